"""What garbage collection remembers of steps that stay, so that it lists only folders that may have changed.

A large job leaves tens of thousands of files in each step. A committed step keeps its files until the holder of the
writer lease removes them, and the collector runs in that process. So a step is listed when it is new, when it is to be
removed, and as long as it holds anything but its manifest, the files that this names, and reports. For each other step
the collector reads the digest at the end of the manifest.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.ranges import read_range
from holdfast.base.ports.readable import StoreEntry
from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Fence
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.removal import StepFiles
from holdfast.base.types.values import Group
from holdfast.core.format.names import manifest_key, step_folder, step_of_pack
from holdfast.core.format.sealed_json import stated_digest
from holdfast.errors import CheckpointError, UnavailableError
from holdfast.settings import PAGE_BYTES
from holdfast.stored.repository import removal

_SEAL_BYTES_MAX = 256
"""Bytes at the end of a manifest that hold its digest."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A step that was listed and found to hold what its manifest names."""

    manifest_bytes: int
    """Size of its manifest."""

    files: StepFiles
    """The step without its files, and of its packs those of other steps only."""

    manifest: Manifest
    """Its manifest, without the names of its files and tensors."""


class _ListedAtOnce(ForwardingStore):
    """A store whose folders were listed together, and are listed no more."""

    def __init__(self, inner: Store) -> None:
        """List all that is there now."""
        super().__init__(inner)
        # Before the listing: a folder that a save makes between the two is not taken for an empty one.
        self._folders = inner.folders()
        self._entries = defaultdict[str, list[StoreEntry]](list)
        for entry in inner.list(""):
            self._entries[entry.key.partition("/")[0] + "/"].append(entry)

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders of the store."""
        assert not prefix, "of the whole store"
        return self._folders

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        """Yield every object of a folder of the store."""
        assert prefix.count("/") == 1 and not after and up_to is None, "a whole folder"
        return iter(self._entries.get(prefix, ()))


def listed_at_once(store: Store) -> Store:
    """Return a store for one inventory: each listing of the folders of many nodes asks every node, so one is enough.

    Raises:
        UnavailableError: Storage failed.
    """
    return _ListedAtOnce(store) if store.traits.has_parity else store


class InventoryCache:
    """Inspects the steps of a run; remembers those that hold what their manifests name."""

    def __init__(self, store: Store) -> None:
        """Remember nothing yet."""
        self._store = self._listed = store
        self._known: dict[int, _Known] = {}
        self._buffer = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES))

    def begin(self, listed: Store, steps: Collection[int]) -> None:
        """Begin an inventory: take the store with its listings, and forget the steps that have no folder any more."""
        self._listed = listed
        self._known = {step: known for step, known in self._known.items() if step in steps}

    def inspect(
        self, step: int, fence: Fence, pinned: Collection[str] = ()
    ) -> tuple[StepFiles, Manifest | None, list[str]]:
        """Return what `removal.inspect_step` does; without names and sizes of files for a step that is known.

        The manifest of a step that is known from now on names only packs of other steps: they may be missing.

        Raises:
            UnavailableError: Storage failed.
        """
        known = self._known.get(step)
        if known is not None and not pinned and self._is_unchanged(step, known):
            counts = fence.admits(step, known.manifest.epoch, known.manifest.digest)
            return replace(known.files, counts=counts), known.manifest, []
        self._known.pop(step, None)
        files, manifest, strangers = removal.inspect_step(self._listed, step, fence, pinned)
        if manifest is not None and not (pinned or strangers) and self._remember(files, manifest):
            elsewhere = tuple(pack for pack in manifest.packs if step_of_pack(pack.name) is not None)
            # A run has many steps, each perhaps with hundreds of thousands of packs.
            manifest = replace(self._known[step].manifest, packs=elsewhere)
        return files, manifest, strangers

    def with_files_to_delete(
        self, steps: Iterable[StepFiles], staying: Collection[int], fence: Fence
    ) -> list[StepFiles]:
        """Return the steps; those that do not stay with the files of this listing: loads may have left reports there.

        Raises:
            UnavailableError: Storage failed, or a step has another manifest now, which the policy has not seen.
        """
        listed = []
        for files in steps:
            if files.step not in staying and self._known.pop(files.step, None) is not None and not files.attempts:
                digest = files.digest
                files, _, _ = removal.inspect_step(self._listed, files.step, fence)
                if files.digest != digest:
                    raise UnavailableError(
                        f"{self._store.url}: step {files.step} got another manifest while it was being judged; nothing "
                        "was removed. The next commit collects again"
                    )
            listed.append(files)
        return listed

    def _is_unchanged(self, step: int, known: _Known) -> bool:
        """Return whether a step still has the manifest that is known."""
        key, size = manifest_key(step), known.manifest_bytes
        try:
            if self._store.size(key) != size:
                return False
            seal = read_range(self._store, key, max(size - _SEAL_BYTES_MAX, 0), size, self._buffer)
        except CheckpointError:
            return False  # The inspection that follows raises what must be raised.
        return stated_digest(bytes(seal)) == known.manifest.digest

    def _remember(self, files: StepFiles, manifest: Manifest) -> bool:
        """Remember a step if it holds exactly the files that its manifest names; return whether it does."""
        named = removal.named_files(manifest)
        own = {key: size for key, size in named.items() if key.startswith(step_folder(files.step))}
        # Links to packs of other steps stay with their attempt, and no manifest names them.
        found = {
            attempt: {key: size for key, size in sizes.items() if not removal.is_link_key(key)}
            for attempt, sizes in files.attempts.items()
        }
        if found != {manifest.attempt: own} or not files.manifest_bytes:
            return False
        slim = replace(
            manifest,
            layouts=(),
            aliases={},
            tree=Group("dict"),
            packs=(),
            parts=(),
            indexes=(),
            overview=None,
            masters={},
        )
        packs = self._shared(frozenset(pack for pack in files.packs if step_of_pack(pack) != files.step))
        without = replace(files, attempts={}, reports={}, packs=packs)
        self._known[files.step] = _Known(files.manifest_bytes, without, slim)
        return True

    def _shared(self, packs: frozenset[str]) -> frozenset[str]:
        """Return the same set for steps that refer to the same packs: each may refer to a pack of every rank."""
        return next((known.files.packs for known in self._known.values() if known.files.packs == packs), packs)
