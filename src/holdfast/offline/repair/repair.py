"""Repairing the steps of a run: what can be proven is made again, the rest is told, and nothing is thrown away."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from holdfast.checkpoint.coverage import require_covered
from holdfast.checkpoint.location import CheckpointLocation, require_no_checkpoint
from holdfast.clock import Clock, utc_now_text
from holdfast.engine.buffers import allocate_aligned
from holdfast.errors import CheckpointError, CorruptError, InvalidError, MissingError
from holdfast.format.digest import hex_digest_of
from holdfast.format.index.index import Index
from holdfast.format.index.index_file import INDEX_BYTES_MAX, encode_index
from holdfast.format.manifest import decode_manifest, encode_manifest
from holdfast.format.names import OVERVIEW_FILE, index_name, is_index_name, step_folder
from holdfast.leases.writer import WriterLease
from holdfast.offline.repair.bit_flip import correct_bit_flip
from holdfast.offline.repair.overlay import OverlayStore
from holdfast.offline.repair.rebuild import Unprovable, no_longer_told, rebuilt_index, rebuilt_manifest
from holdfast.ports.observer import Observer
from holdfast.ports.store import Packs, Store
from holdfast.repository.catalog import (
    manifest_in,
    read_index,
    read_manifest_bytes,
    read_run_id,
    short_packs,
    step_folders,
)
from holdfast.repository.epochs import current_fence, is_valid_manifest
from holdfast.repository.quarantine import backup, is_quarantined, quarantined, release
from holdfast.repository.tags import tags_for_new_manifest
from holdfast.repository.verify import Damage, Verification
from holdfast.saving.commit import write_index
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.types.manifest import FileRecord, Manifest

logger = logging.getLogger(__name__)

_TAKEN_IN = "manifest.json: did not count, and is published anew"


@dataclass(frozen=True, slots=True)
class StepRepair:
    """What became of one step."""

    step: int
    """The step."""

    outcome: Literal["whole", "repaired", "damaged", "unfinished"]
    """`whole`: it was; `repaired`: it is now; `damaged`: not all of it could be made again; `unfinished`: no save of it
    was ever published, so it is no checkpoint."""

    done: tuple[str, ...]
    """What was made again, and from what; of a dry run, what would be."""

    lost: tuple[str, ...]
    """What could not be, and what is gone with it."""

    lost_tensors: tuple[str, ...]
    """FQNs of tensors of which something is gone, ascending."""


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What became of a run that was repaired."""

    url: str
    """Where its root lies."""

    steps: tuple[StepRepair, ...]
    """Every step that was looked into, ascending."""

    @property
    def is_whole(self) -> bool:
        """Whether none of them is damaged any more."""
        return all(each.outcome != "damaged" for each in self.steps)


class Repair:
    """Repairs steps under one root."""

    def __init__(
        self,
        store: Store,
        references: Packs,
        clock: Clock,
        settings: Settings,
        *,
        dry_run: bool = False,
        unfinished: bool = False,
        observer: Observer | None = None,
    ) -> None:
        """Look at nothing yet.

        Args:
            store: The root of the run.
            references: Where files lie that steps reference by URL.
            clock: For chance, and for the time that people are told.
            settings: How an index is split.
            dry_run: Write nothing.
            unfinished: Take in a manifest that does not count, if all that it names is whole.
            observer: Told of progress while a step is read back.
        """
        self._store, self._references, self._clock, self._settings = store, references, clock, settings
        self._dry_run, self._unfinished, self._observer = dry_run, unfinished, observer
        self._writer_lease = WriterLease(store, clock, settings.lease_seconds)

    def run(self, step: int | None) -> RepairReport:
        """Repair one step, or every step of which a look at manifest, index, sizes and quarantine finds anything wrong.

        Raises:
            MissingError: There is no such step, or no step at all.
            InvalidError: A step is of a newer format, or references files that may not be read.
            ConflictError: Another process writes to the run.
            UnavailableError: Storage failed; the same call goes on where it was.
        """
        require_no_checkpoint(self._store)
        steps = step_folders(self._store)
        if not steps or (step is not None and step not in steps):
            missing = "no steps" if step is None else f"no step {step}; there are {steps[-20:]}"
            raise MissingError(f"{self._store.url}: {missing}. Look for another path, or choose another step")
        chosen = [each for each in steps if self._needs_repair(each)] if step is None else [step]
        try:
            return RepairReport(self._store.url, tuple(self._step(each) for each in chosen))
        finally:
            self._writer_lease.release()

    def _needs_repair(self, step: int) -> bool:
        location = self._place(self._store, step)
        try:
            if is_quarantined(self._store, step):
                return True
            manifest = manifest_in(location.folder, read_manifest_bytes(self._store, location.folder), location.url)
            self._require_sound(location, manifest)
            short = short_packs(self._store, location.folder, manifest, location.packs_of(manifest))
            return bool(short or _surplus(location, manifest))
        except MissingError:
            return bool(self._store.folders(location.folder))
        except (CorruptError, InvalidError):
            return True

    def _step(self, step: int) -> StepRepair:
        """Repair one step, and read all of it back."""
        overlay = OverlayStore(self._store)
        location = self._place(overlay, step)
        done: list[str] = []
        try:
            manifest = self._manifest(location, overlay, done)
            if manifest is None:
                return StepRepair(step, "unfinished", (), ("no manifest that counts, so it is no checkpoint",), ())
            manifest = self._with_index(location, overlay, manifest, done)
        except Unprovable as error:
            if _TAKEN_IN in done:
                return _not_taken_in(step, [str(error)], error.fqns)
            self._carry_out(step, overlay)
            return StepRepair(step, "damaged", tuple(done), (str(error),), tuple(error.fqns))
        surplus = _surplus(location, manifest)
        if surplus:
            overlay.delete(surplus)
            done.append("index files that the manifest does not name: taken away")
        damages = list(self._damages(location, manifest))
        fqns = sorted({damage.fqn for damage in damages if damage.fqn is not None})
        if damages and _TAKEN_IN in done:
            return _not_taken_in(step, map(_told, damages), fqns)
        self._carry_out(step, overlay)
        if not damages and not self._dry_run and quarantined(self._store).get(step):
            self._hold()
            release(self._store, step)
        outcome: Literal["whole", "repaired", "damaged"] = "damaged" if damages else "repaired" if done else "whole"
        return StepRepair(step, outcome, tuple(done), tuple(map(_told, damages)), tuple(fqns))

    def _manifest(self, location: CheckpointLocation, overlay: OverlayStore, done: list[str]) -> Manifest | None:
        where = f"{location.url}/manifest.json"
        data = b""
        try:
            data = read_manifest_bytes(self._store, location.folder)
            if not is_valid_manifest(data, current_fence(self._store), where):
                if not self._unfinished:
                    return None
                manifest = manifest_in(location.folder, data, where)
                return self._put_manifest(location, overlay, manifest, done, _TAKEN_IN)
            return manifest_in(location.folder, data, where)
        except MissingError:
            return None
        except CorruptError as error:
            damage = error
        try:
            other = decode_manifest(data, where).step
        except CorruptError:
            pass
        else:
            raise Unprovable(f"{damage}; what lies there is whole, and of step {other}") from damage
        whole = correct_bit_flip(data)
        if whole is not None:
            manifest = manifest_in(location.folder, whole, where)
            overlay.put(location.manifest_key, whole)
            done.append("manifest.json: one bit put right, proven by its digest")
            return manifest
        made = rebuilt_manifest(location, data, self._run_id(), utc_now_text(self._clock), self._settings)
        return self._put_manifest(
            location,
            overlay,
            made,
            done,
            f"manifest.json: rebuilt from {len(made.parts)} parts; lost are {', '.join(no_longer_told(data))}",
        )

    def _with_index(
        self, location: CheckpointLocation, overlay: OverlayStore, manifest: Manifest, done: list[str]
    ) -> Manifest:
        """Return the manifest whose index can be read, after making the index again if need be."""
        try:
            self._require_sound(location, manifest)
            return manifest
        except CorruptError as error:
            logger.info("%s: its index is made again: %s", location.url, error)
        made = rebuilt_index(location, manifest)
        before = dict(overlay.pending)
        records = write_index(location, manifest.attempt, made.index, self._settings, [])
        source = f"from the packs of ranks {list(made.from_packs)} and the parts of the others"
        said = f"index: rebuilt {source if made.from_packs else 'from parts'}"
        if records != (manifest.indexes, manifest.overview):
            overlay.pending = before
            said += ", as one file"
            one = self._one_file(location, manifest, made.index)
            manifest = replace(manifest, indexes=(one,), overview=None)
            manifest = self._put_manifest(location, overlay, manifest, done, said)
        else:
            done.append(said)
        try:
            self._require_sound(location, manifest)
        except CorruptError as error:
            overlay.pending = before
            raise Unprovable(f"what parts and packs say is not what the manifest does: {error}") from error
        return manifest

    def _one_file(self, location: CheckpointLocation, manifest: Manifest, index: Index) -> FileRecord:
        """Put an index into one file of a name that is free, so that nothing is replaced before the manifest is."""
        prefix = f"{location.folder}{manifest.attempt}/"
        taken = {entry.key.removeprefix(prefix) for entry in location.store.list(prefix)}
        name = next(name for name in map(index_name, range(100_000)) if name not in taken)
        data = encode_index(index)
        location.store.put(prefix + name, data)
        return FileRecord(name, len(data), hex_digest_of(data))

    def _put_manifest(
        self, location: CheckpointLocation, overlay: OverlayStore, manifest: Manifest, done: list[str], said: str
    ) -> Manifest:
        # Under an epoch of its own: what older ones accepted is known by its digest.
        data = encode_manifest(replace(manifest, epoch=self._hold() or manifest.epoch))
        made = decode_manifest(data, location.url)
        assert made.step is not None, "a run holds steps"
        # Before the manifest: one who is killed between them repairs again, and gives them again.
        tags = tags_for_new_manifest(location.store, made.step, made.digest)
        for key, record in tags.items():
            overlay.put(key, record)
        overlay.put(location.manifest_key, data)
        done.append(said)
        if tags:
            done.append(f"given again: {len(tags)} tag{'s' * (len(tags) > 1)}, which named the manifest of before")
        return made

    def _require_sound(self, location: CheckpointLocation, manifest: Manifest) -> None:
        require_covered(read_index(location.store, location.folder, manifest), self._clock, location.url)

    def _damages(self, location: CheckpointLocation, manifest: Manifest) -> Sequence[Damage]:
        chunk_bytes = read_index(location.store, location.folder, manifest).chunk_bytes
        return list(
            Verification(
                location.store,
                location.folder,
                manifest,
                location.packs_of(manifest),
                allocate_aligned(max(self._settings.window_bytes * 2, chunk_bytes) + 2 * PAGE_BYTES),
                lambda index: require_covered(index, self._clock, location.url),
                self._observer,
            ).damages()
        )

    def _carry_out(self, step: int, overlay: OverlayStore) -> None:
        """Write what was decided; of every file that is replaced or removed the bytes are kept first."""
        if self._dry_run:
            return
        for key, data in overlay.pending.items():
            self._hold()
            try:
                kept = backup(self._store, step, key, INDEX_BYTES_MAX)
                logger.info("%s is kept as %s", key, kept)
            except MissingError:
                pass
            if data is None:
                self._store.delete([key])
            else:
                self._store.put(key, data)

    def _hold(self) -> int:
        """Return the epoch under which it is written, 0 in a dry run; refuses where another process writes."""
        return 0 if self._dry_run else self._writer_lease.hold(self._run_id() or "unknown")

    def _run_id(self) -> str | None:
        try:
            return read_run_id(self._store)
        except CheckpointError:
            return None

    def _place(self, store: Store, step: int) -> CheckpointLocation:
        return CheckpointLocation(store, step_folder(step), step, references=self._references, root=self._store)


def _surplus(location: CheckpointLocation, manifest: Manifest) -> list[str]:
    """Return the keys of index files that the manifest does not name: an earlier repair replaced them."""
    named = {record.name for record in manifest.indexes}
    named |= set() if manifest.overview is None else {OVERVIEW_FILE}
    prefix = f"{location.folder}{manifest.attempt}/"
    files = [entry.key.removeprefix(prefix) for entry in location.store.list(prefix)]
    return [prefix + name for name in files if (is_index_name(name) or name == OVERVIEW_FILE) and name not in named]


def _not_taken_in(step: int, lost: Iterable[str], fqns: Iterable[str]) -> StepRepair:
    return StepRepair(step, "unfinished", (), ("its manifest does not count, and not all is whole", *lost), tuple(fqns))


def _told(damage: Damage) -> str:
    where = damage.file if damage.start is None else f"{damage.file} bytes {damage.start}-{damage.stop}"
    return f"{where}{'' if damage.fqn is None else f' ({damage.fqn})'}: {damage.message}"
