"""Whether the near tier has room for a step. If not, a step that is due at the root is saved straight there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from math import ceil

from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.reports import SaveReport
from holdfast.core.engine.memory_limits import memory_domains
from holdfast.core.format.names import step_folder, step_of_pack
from holdfast.errors import CheckpointError, CorruptError, MissingError, UnavailableError, first_three, shown_bytes
from holdfast.settings import MIB
from holdfast.stored.repository.catalog import read_manifest, step_folders

_PROBE = "near-room-probe.json"

_LARGER_MOUNT = (
    "; a part of a mount in memory stays free for DataLoader workers. Make the mount larger (docker run --shm-size, "
    "sizeLimit of an emptyDir)"
)

_STAYS_FREE_BYTES = 64 * MIB
"""What a step leaves free in the memory of the host and of each control group."""


class NearRoom:
    """What rank 0 knows of the room of a near tier: one file system for all ranks, or the folders of several nodes.

    Of several nodes, that of rank 0 stands for all: the nodes of a job have equal memory and nearly equal shares.
    """

    def __init__(
        self,
        store: Store,
        bytes_max: int | None,
        spares: tuple[Callable[[], int], Callable[[], None]] | None,
        folder: Store | None = None,
        node_share: float = 1.0,
    ) -> None:
        """Look at nothing yet.

        Args:
            store: The near tier.
            bytes_max: Most bytes of all files in a folder; None for what the file system holds.
            spares: Of a near tier in memory: returns the bytes of collected files that the next step takes again, and
                removes these files. None on a disk.
            folder: The folder of this node, if each node has one; None: the store is the only folder.
            node_share: The part of the bytes of a step that each folder takes, with parity.
        """
        self._store, self._bytes_max, self._spares = store, bytes_max, spares
        self._folder, self._node_share = folder or store, node_share
        self._where = "" if folder is None else " on each node"
        self._step_bytes = 0
        """Bytes that the last step wrote."""
        self._failure = ""
        """Why saves into the near tier fail since the last one that did not; empty if that is the last save."""

    def note_saved(self, manifest: Manifest) -> None:
        """Take note of the size of a step that is near."""
        self._step_bytes = _own_bytes(manifest)

    def note_end(self, ended: Future[SaveReport]) -> None:
        """Take note of the end of a save into the near tier."""
        error = ended.exception()
        if error is not None or ended.result().tier == "near":
            # A later error may only repeat the first: a step is refused because of the failure.
            self._failure = (self._failure or str(error)) if isinstance(error, UnavailableError) else ""

    def why_not(self, state_bytes: int) -> str:
        """Return why the next step has no place near; empty if the near tier takes the step.

        Args:
            state_bytes: Bytes of the tensors that rank 0 knows of: the size of a step until one was saved.
        """
        try:
            lack = self._lack(state_bytes)
            if lack:
                held = first_three(step_folders(self._store))
                return f"{self._store.url} {lack}; it holds steps [{held}]"
            if self._failure:
                # The failure may be over, as after a full disk.
                self._store.put(_PROBE, bytes(4096))
                self._store.delete([_PROBE])
        except CheckpointError as error:
            return f"the near tier fails: {self._failure or error}"
        return ""

    def _lack(self, state_bytes: int) -> str:
        # A step that refers to older ones is smaller than the state.
        step_bytes = ceil((self._step_bytes or self._bytes_of_newest() or state_bytes) * self._node_share)
        needed, free = f", and a step needs {shown_bytes(step_bytes)}{self._where}", self._folder.free_bytes()
        if free is not None and free < step_bytes:
            return f"has {shown_bytes(free)} free{needed}{'' if self._spares is None else _LARGER_MOUNT}"
        used = 0 if self._bytes_max is None else sum(entry.bytes for entry in self._folder.list(""))
        # Steps of an earlier job may fill the tier, and are only collected after a save: the first save may be over.
        more_bytes = 0 if not self._step_bytes and step_folders(self._store) else step_bytes
        if self._bytes_max is not None and used + more_bytes > self._bytes_max:
            return f"has {shown_bytes(used)} of Tier(bytes_max={shown_bytes(self._bytes_max)}){needed}"
        return "" if self._spares is None else self._lack_of_memory(step_bytes, *self._spares)

    def _bytes_of_newest(self) -> int:
        """Return the bytes of the newest whole step that an earlier job has left; 0 if there is none."""
        for step in reversed(step_folders(self._store)):
            with suppress(MissingError, CorruptError):  # The save was killed.
                return _own_bytes(read_manifest(self._store, step_folder(step)))
        return 0

    def _lack_of_memory(self, step_bytes: int, spare_bytes: Callable[[], int], drop_spares: Callable[[], None]) -> str:
        """Return why the memory of the host does not hold a step; empty if it does.

        The kernel kills a process of a control group that is full, instead of an error.
        """
        # The first save also allocates the arena, which the process keeps. Spares of an earlier job may be too small:
        # until a save they do not count, and go if memory is short.
        fresh_bytes = step_bytes - spare_bytes() if self._step_bytes else 2 * step_bytes
        needed = fresh_bytes + _STAYS_FREE_BYTES
        free = min(domain.free_bytes for domain in memory_domains())
        if free < needed and not self._step_bytes and spare_bytes():
            drop_spares()
            free = min(domain.free_bytes for domain in memory_domains())
        if fresh_bytes <= 0 or free >= needed:
            return ""
        return (
            f"is in memory, and the host or the control group has {shown_bytes(free)} free; a step needs "
            f"{shown_bytes(needed)}{self._where}: its files, copies on their way there and what stays free; swap does "
            "not count. Raise the limit of the container (docker run --memory, resources.limits.memory)"
        )


def _own_bytes(manifest: Manifest) -> int:
    """Return the bytes of a step without packs of other steps."""
    return sum(file.bytes for file in manifest.files if step_of_pack(file.name) is None)
