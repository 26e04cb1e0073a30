"""Repairs one checkpoint that is in no run: one saved by path, or a step that was copied out of its run.

It proves everything that the repair of a step proves, from the files of the checkpoint alone. What only a run knows
cannot be proven here: which timeline a step belongs to if its manifest lost that, and the packs of other steps.
"""

from __future__ import annotations

from contextlib import suppress

from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.timeline import FIRST_TIMELINE, Timeline
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.index.index_file import INDEX_BYTES_MAX
from holdfast.core.format.manifest import decode_manifest, encode_manifest
from holdfast.core.format.timeline import timeline_in_damaged
from holdfast.errors import ConflictError
from holdfast.offline.repair.overlay import OverlayStore
from holdfast.offline.repair.rebuild import stated_step
from holdfast.offline.repair.repair import Repair, RepairReport
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.leases.path_claim import PathClaim, release_path_claim, take_path_claim
from holdfast.stored.repository.overwriting import require_claim

REPLACED_FOLDER = "replaced/"
"""Folder of the files that a repair replaced, in the folder of the checkpoint."""


class SingleRepair(Repair):
    """Repairs the one checkpoint in a folder."""

    _claim: PathClaim | None = None
    """Held while it writes: a job that overwrites the checkpoint waits, or is refused."""

    def run(self, step: int | None = None) -> RepairReport:
        """Repair the checkpoint, and read all of it back.

        Raises:
            InvalidError: It is of a newer format, or refers to files that may not be read.
            ConflictError: It was replaced meanwhile, or a job overwrites it.
            UnavailableError: Storage failed; the same call continues.
        """
        data = self._manifest_bytes(self._location(self._store, None))
        try:
            return RepairReport(self._store.url, (self._repair_step(stated_step(data or b"")),))
        finally:
            if self._claim is not None:
                release_path_claim(self._claim)

    def _location(self, store: Store, step: int | None) -> CheckpointLocation:
        return CheckpointLocation(store, "", step, references=self._references)

    def _hold(self) -> int:
        # There is no lease outside a run. `_write` compares the manifest after this, and then writes.
        store = self._store
        if self._claim is None:
            self._claim = take_path_claim(store, self._clock, self._settings.lease_seconds, self)
        require_claim(store, self._claim.holder.nonce)
        return 0

    def _end_quarantine(self, step: int) -> None:
        """Do nothing: only a run has a quarantine."""

    def _timeline(self, damaged: bytes) -> Timeline:
        return timeline_in_damaged(damaged) or FIRST_TIMELINE

    def _put_manifest(
        self, location: CheckpointLocation, overlay: OverlayStore, manifest: Manifest, done: list[str], action: str
    ) -> Manifest:
        data = encode_manifest(manifest)
        overlay.put(location.manifest_key, data)
        done.append(action)
        return decode_manifest(data, location.url)

    def _backup(self, step: int | None, key: str) -> str:
        data = self._store.get(key, INDEX_BYTES_MAX)
        copy_key = f"{REPLACED_FOLDER}{hex_digest_of(data)[:16]}.{key.rpartition('/')[2]}"
        # The name holds the digest, so the content of an earlier copy is the same.
        with suppress(ConflictError):
            self._store.put_if_absent(copy_key, data)
        return copy_key
