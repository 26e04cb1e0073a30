"""Whether the near tier has room for a step. If not, a step that is due at the root is saved straight there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.reports import SaveReport
from holdfast.core.engine.memory_limits import memory_domains
from holdfast.core.format.names import step_folder, step_of_pack
from holdfast.errors import CheckpointError, UnavailableError, first_three, shown_bytes
from holdfast.settings import MIB
from holdfast.stored.repository.catalog import step_folders

_PROBE = "near-room-probe.json"

_LARGER_MOUNT = (
    "; a part of a mount in memory stays free for DataLoader workers. Make the mount larger (docker run --shm-size, "
    "sizeLimit of an emptyDir)"
)

_STAYS_FREE_BYTES = 64 * MIB
"""What a step leaves free in the memory of the host and of each control group."""


class NearRoom:
    """What rank 0 knows of the room of a near tier. The folder is one file system for all ranks."""

    def __init__(self, store: Store, bytes_max: int | None, spare_bytes: Callable[[], int] | None) -> None:
        """Look at nothing yet.

        Args:
            store: The near tier.
            bytes_max: Most bytes of all files there; None for what the file system holds.
            spare_bytes: Of a near tier in memory: returns the bytes of collected files that the next step takes again.
                None on a disk.
        """
        self._store, self._bytes_max, self._spare_bytes = store, bytes_max, spare_bytes
        self._step_bytes = 0
        """Bytes that the last step wrote."""
        self._failure = ""
        """Why the last save into the near tier failed; empty if the save did not fail."""

    def note_saved(self, manifest: Manifest) -> None:
        """Take note of the size of a step that is near."""
        self._step_bytes = sum(file.bytes for file in manifest.files if step_of_pack(file.name) is None)

    def note_end(self, ended: Future[SaveReport]) -> None:
        """Take note of the end of a save into the near tier."""
        error = ended.exception()
        if error is not None or ended.result().tier == "near":
            self._failure = str(error) if isinstance(error, UnavailableError) else ""

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
        step_bytes = self._step_bytes or self._bytes_of_newest() or state_bytes
        needed, free = f", and a step needs {shown_bytes(step_bytes)}", self._store.free_bytes()
        if free is not None and free < step_bytes:
            return f"has {shown_bytes(free)} free{needed}{'' if self._spare_bytes is None else _LARGER_MOUNT}"
        used = 0 if self._bytes_max is None else sum(entry.bytes for entry in self._store.list(""))
        if self._bytes_max is not None and used + step_bytes > self._bytes_max:
            return f"has {shown_bytes(used)} of Tier(bytes_max={shown_bytes(self._bytes_max)}){needed}"
        return "" if self._spare_bytes is None else self._lack_of_memory(step_bytes - self._spare_bytes())

    def _bytes_of_newest(self) -> int:
        """Return the bytes of the newest step that an earlier job has left; 0 if there is none."""
        steps = step_folders(self._store)
        return sum(entry.bytes for entry in self._store.list(step_folder(steps[-1]))) if steps else 0

    def _lack_of_memory(self, fresh_bytes: int) -> str:
        """Return why the memory of the host does not hold a step; empty if it does.

        The kernel kills a process of a control group that is full, instead of an error.
        """
        # The first save also allocates the arena, which the process keeps.
        copies_bytes = 0 if self._step_bytes else fresh_bytes
        needed = fresh_bytes + copies_bytes + _STAYS_FREE_BYTES
        free = min(domain.free_bytes for domain in memory_domains())
        if fresh_bytes <= 0 or free >= needed:
            return ""
        return (
            f"is in memory, and the host or the control group has {shown_bytes(free)} free; a step needs "
            f"{shown_bytes(needed)}: its files, copies on their way there and what stays free; swap does not count. "
            "Raise the limit of the container (docker run --memory, resources.limits.memory)"
        )
