"""Repairs the steps of a run: rebuilds what digests prove, reports the rest, and keeps every replaced file.

A repair is planned on an `OverlayStore`, which keeps changes in memory, and verified there. Only then is it written, so
a dry run does the same work, and an interrupted repair leaves the manifest of before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from holdfast.base.clock import Clock, utc_now_text
from holdfast.base.ports.codec import NO_CODECS, Codecs
from holdfast.base.ports.observer import Observer
from holdfast.base.ports.packs import Packs
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import FileRecord, Manifest
from holdfast.base.types.timeline import Timeline
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.index_file import INDEX_BYTES_MAX, encode_index
from holdfast.core.format.log import LOG_FOLDER
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX, decode_manifest, encode_manifest
from holdfast.core.format.names import OVERVIEW_FILE, index_name, is_index_name, step_folder
from holdfast.core.format.sealed_json import stated_digest
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, MissingError, first_three
from holdfast.offline.links.shared_packs import has_unfinished, remove_unfinished
from holdfast.offline.repair.bit_flip import correct_bit_flip
from holdfast.offline.repair.damaged_packs import plan_packs, replace_packs
from holdfast.offline.repair.overlay import OverlayStore
from holdfast.offline.repair.rebuild import (
    LOST_TIMELINE,
    Unprovable,
    lost_fields,
    rebuilt_index,
    rebuilt_manifest,
    require_known_format,
    timeline_of_damaged,
)
from holdfast.settings import Settings
from holdfast.stored.checkpoint.coverage import require_covered
from holdfast.stored.checkpoint.location import CheckpointLocation, require_no_checkpoint
from holdfast.stored.checkpoint.pack_sizes import short_packs
from holdfast.stored.checkpoint.verify import Damage, Verification
from holdfast.stored.leases.writer import WriterLease
from holdfast.stored.repository.catalog import (
    manifest_in,
    read_index,
    read_manifest_bytes,
    read_run_id,
    step_folders,
)
from holdfast.stored.repository.epochs import current_fence, is_valid_manifest
from holdfast.stored.repository.publish import get_or_none
from holdfast.stored.repository.quarantine import backup, identity_at, is_quarantined, quarantined, release
from holdfast.stored.repository.tags import TAGS_FOLDER, tags_for_new_manifest
from holdfast.stored.repository.timelines import (
    DamagedManifest,
    RunTimelines,
    moved_manifests,
    run_timelines,
    superseded_keys,
)
from holdfast.training.saving.commit import write_index

logger = logging.getLogger(__name__)

_ACCEPTED = "manifest.json: was fenced off, and is published again"


class _NotAcceptable(Exception):
    """The manifest of a fenced writer must not count."""


@dataclass(frozen=True, slots=True)
class StepRepair:
    """The repair of one step."""

    step: int | None
    """The step; None for a checkpoint saved by path."""

    outcome: Literal["whole", "repaired", "damaged", "unfinished", "unreadable"]
    """`whole`: undamaged before; `repaired`: undamaged now; `damaged`: a part could not be rebuilt; `unfinished`: no
    save was ever published, so the step is no checkpoint; `unreadable`: of a newer format, and left alone."""

    done: tuple[str, ...]
    """What was rebuilt, and from what; in a dry run, what would be."""

    lost: tuple[str, ...]
    """The losses, a text for each; for `unfinished` and `unreadable` why."""

    lost_tensors: tuple[str, ...]
    """FQNs of tensors that lost bytes, ascending."""


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The repair of a run."""

    url: str
    """The root of the run, or the one checkpoint."""

    steps: tuple[StepRepair, ...]
    """Examined steps, ascending."""

    @property
    def is_whole(self) -> bool:
        """Whether no examined step is damaged any more."""
        return all(step.outcome != "damaged" for step in self.steps)


class Repair:
    """Repairs steps under one root."""

    def __init__(
        self,
        store: Store,
        references: Packs,
        clock: Clock,
        settings: Settings,
        *,
        codecs: Codecs = NO_CODECS,
        dry_run: bool = False,
        unfinished: bool = False,
        observer: Observer | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            store: The root of the run.
            references: Locates files that steps reference by URL.
            clock: Randomness, and the time in rebuilt manifests.
            settings: How an index is split.
            codecs: What decodes coded chunks.
            dry_run: Write nothing.
            unfinished: Accept the manifest of a fenced writer if every file that it names is undamaged.
            observer: Receives progress while a step is read back.
        """
        self._store, self._references, self._clock, self._settings = store, references, clock, settings
        self._dry_run, self._unfinished, self._observer, self._codecs = dry_run, unfinished, observer, codecs
        self._writer_lease = WriterLease(store, clock, settings.lease_seconds)

    def hold_at(self, run: Store) -> None:
        """Hold the writer lease of near tier and root as one, if the run has both."""
        self._writer_lease = WriterLease(run, self._clock, self._settings.lease_seconds)

    def run(self, step: int | None) -> RepairReport:
        """Repair one step, or every step with a suspicious manifest, index, file size or quarantine record.

        Raises:
            MissingError: There is no such step, or no step at all.
            InvalidError: The step that was asked for is of a newer format, or a step references files that may not be
                read.
            ConflictError: Another process writes to the run.
            UnavailableError: Storage failed; the same call continues.
        """
        require_no_checkpoint(self._store)
        steps = step_folders(self._store)
        if not steps or (step is not None and step not in steps):
            missing = "no steps" if step is None else f"no step {step}; the newest are {first_three(steps[::-1])}"
            raise MissingError(f"{self._store.url}: {missing}. Try another path, or choose another step")
        # A manifest of a newer format is not damaged.
        damaged = [one for one in moved_manifests(self._store).damaged if isinstance(one.error, CorruptError)]
        chosen = [number for number in steps if self._needs_repair(number)] if step is None else [step]
        if step is None:
            chosen = sorted({*chosen, *(manifest.step for manifest in damaged)})
        repaired = self._repair_found_step if step is None else self._repair_step
        try:
            if not self._dry_run and has_unfinished(self._store) and self._hold():
                remove_unfinished(self._store)
            return RepairReport(
                self._store.url,
                tuple(
                    self._with_moved(repaired(number), [one for one in damaged if one.step == number])
                    for number in chosen
                ),
            )
        finally:
            self._writer_lease.release()

    def _needs_repair(self, step: int) -> bool:
        location = self._location(self._store, step)
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

    def _repair_found_step(self, step: int) -> StepRepair:
        """Repair a step that nobody asked for by number. One of a newer format does not keep others from repair."""
        location = self._location(self._store, step)
        try:
            manifest_in(location.folder, read_manifest_bytes(self._store, location.folder), location.url)
        except InvalidError as error:
            return StepRepair(step, "unreadable", (), (str(error),), ())
        except (CorruptError, MissingError):
            pass
        return self._repair_step(step)

    def _repair_step(self, step: int | None) -> StepRepair:
        """Repair one step, and read all of it back."""
        overlay = OverlayStore(self._store)
        location = self._location(overlay, step)
        before = self._manifest_bytes(location)
        done: list[str] = []
        try:
            manifest = self._manifest(location, overlay, done)
            if manifest is None:
                return StepRepair(step, "unfinished", (), ("no valid manifest, so it is no checkpoint",), ())
            manifest = self._with_index(location, overlay, manifest, done)
        except _NotAcceptable as error:
            return StepRepair(step, "unfinished", (), (str(error),), ())
        except Unprovable as error:
            if _ACCEPTED in done:
                return _not_accepted(step, [str(error)], error.fqns)
            # What was proven before is written all the same.
            self._write(location, overlay, before)
            return StepRepair(step, "damaged", tuple(done), (str(error),), tuple(error.fqns))
        surplus = _surplus(location, manifest)
        if surplus:
            overlay.delete(surplus)
            done.append("index files that the manifest does not name: removed")
        done += plan_packs(self._store, overlay, manifest, self._codecs)
        verification = Verification(location, manifest, self._settings, self._clock, self._codecs, self._observer)
        damages = list(verification.damages())
        fqns = sorted({damage.fqn for damage in damages if damage.fqn is not None})
        if damages and _ACCEPTED in done:
            return _not_accepted(step, map(_format_damage, damages), fqns)
        self._write(location, overlay, before)
        if not damages and not self._dry_run and step is not None:
            self._end_quarantine(step)
        outcome: Literal["whole", "repaired", "damaged"] = "damaged" if damages else "repaired" if done else "whole"
        return StepRepair(step, outcome, tuple(done), tuple(map(_format_damage, damages)), tuple(fqns))

    def _end_quarantine(self, step: int) -> None:
        """Remove the quarantine records of a step that was read and found intact."""
        if quarantined(self._store).get(step):
            self._hold()
            moved = [key for number, key in superseded_keys(self._store) if number == step]
            release(self._store, step, [identity_at(self._store, key) for key in moved])

    def _with_moved(self, found: StepRepair, damaged: Sequence[DamagedManifest]) -> StepRepair:
        """Return the repair of a step with that of its damaged manifests under `superseded/`."""
        done: list[str] = []
        lost: list[str] = []
        for manifest in damaged:
            try:
                data = self._store.get(manifest.key, MANIFEST_BYTES_MAX)
            except CorruptError:  # Too large for a manifest.
                data = b""
            corrected = correct_bit_flip(data)
            if corrected is None:
                lost.append(str(manifest.error))
                continue
            if not self._dry_run:
                self._hold()
                backup(self._store, manifest.step, manifest.key, MANIFEST_BYTES_MAX)
                self._store.put(manifest.key, corrected)
            done.append(f"{manifest.key}: one bit corrected, proven by its digest")
        if not done and not lost:
            return found
        is_damaged = lost or found.outcome == "damaged"
        return replace(
            found,
            outcome="damaged" if is_damaged else "repaired",
            done=(*found.done, *done),
            lost=(*found.lost, *lost),
        )

    def _manifest(self, location: CheckpointLocation, overlay: OverlayStore, done: list[str]) -> Manifest | None:
        where = f"{location.url}/manifest.json"
        data = b""
        try:
            data = read_manifest_bytes(self._store, location.folder)
            is_valid = is_valid_manifest(data, current_fence(self._store), where)
            if not is_valid and not self._unfinished:
                return None
            manifest = manifest_in(location.folder, data, where)
            if is_valid:
                return manifest
            _require_known_timeline(manifest.timeline, run_timelines(self._store))
            return self._put_manifest(location, overlay, manifest, done, _ACCEPTED)
        except MissingError:
            return None
        except CorruptError as error:
            damage = error
        with suppress(CorruptError):
            other = decode_manifest(data, where).step
            raise Unprovable(f"{damage}; the manifest is undamaged, but of step {other}") from damage
        corrected = correct_bit_flip(data)
        if corrected is not None:
            manifest = manifest_in(location.folder, corrected, where)
            overlay.put(location.manifest_key, corrected)
            done.append("manifest.json: one bit corrected, proven by its digest")
            return manifest
        require_known_format(data)
        timeline = self._timeline(data)
        rebuilt = rebuilt_manifest(location, data, self._run_id(), utc_now_text(self._clock), timeline, self._settings)
        lost = lost_fields(data)
        if timeline == LOST_TIMELINE:
            lost.append("timeline, so the step is superseded")
        if not rebuilt.log and self._store.folders(LOG_FOLDER):
            lost.append("redo log, if the step was a base: a load ends at the step")
        action = f"manifest.json: rebuilt from {len(rebuilt.parts)} parts; lost are {', '.join(lost)}"
        return self._put_manifest(location, overlay, rebuilt, done, action)

    def _timeline(self, damaged: bytes) -> Timeline:
        """Return the timeline to record instead of that in a damaged manifest; raises `Unprovable`."""
        has_timelines = current_fence(self._store).has_timelines
        return timeline_of_damaged(damaged, run_timelines(self._store), has_timelines=has_timelines)

    def _with_index(
        self, location: CheckpointLocation, overlay: OverlayStore, manifest: Manifest, done: list[str]
    ) -> Manifest:
        """Return a manifest whose index can be read, after rebuilding the index if needed."""
        try:
            self._require_sound(location, manifest)
            return manifest
        except CorruptError as error:
            logger.info("%s: the index is rebuilt: %s", location.url, error)
        index, from_packs = rebuilt_index(location, manifest, self._codecs)
        before = dict(overlay.pending)
        records = write_index(location, manifest.attempt, index, self._settings, [])
        source = f"from the packs of ranks {list(from_packs)} and the parts of the others"
        action = f"index: rebuilt {source if from_packs else 'from parts'}"
        if records != (manifest.indexes, manifest.overview):
            # The manifest names other files, so it must change too: one new file, then a manifest that names it.
            overlay.pending = before
            action += ", as one file"
            record = self._one_file(location, manifest, index)
            manifest = replace(manifest, indexes=(record,), overview=None)
            manifest = self._put_manifest(location, overlay, manifest, done, action)
        else:
            done.append(action)
        try:
            self._require_sound(location, manifest)
        except CorruptError as error:
            overlay.pending = before
            raise Unprovable(f"parts and packs contradict the manifest: {error}") from error
        return manifest

    def _one_file(self, location: CheckpointLocation, manifest: Manifest, index: Index) -> FileRecord:
        """Store an index as one file under an unused name: nothing is replaced before the manifest is."""
        prefix = f"{location.folder}{manifest.attempt}/"
        used = {entry.key.removeprefix(prefix) for entry in location.store.list(prefix)}
        name = next(name for name in map(index_name, range(100_000)) if name not in used)
        data = encode_index(index)
        location.store.put(prefix + name, data)
        return FileRecord(name, len(data), hex_digest_of(data))

    def _put_manifest(
        self, location: CheckpointLocation, overlay: OverlayStore, manifest: Manifest, done: list[str], action: str
    ) -> Manifest:
        # A new epoch: a fence accepts manifests of older epochs by digest, and this digest is new.
        data = encode_manifest(replace(manifest, epoch=self._hold() or manifest.epoch))
        stored = decode_manifest(data, location.url)
        assert stored.step is not None, "a run holds steps"
        # Tags are written before the manifest: a repair that is interrupted between them is repeated, tags included.
        tags = tags_for_new_manifest(location.store, stored.step, stored.digest)
        for key, record in tags.items():
            overlay.put(key, record)
        overlay.put(location.manifest_key, data)
        done.append(action)
        if tags:
            done.append(f"{len(tags)} tag{'s' * (len(tags) > 1)} of the previous manifest: set again")
        return stored

    def _require_sound(self, location: CheckpointLocation, manifest: Manifest) -> None:
        require_covered(read_index(location.store, location.folder, manifest), self._clock, location.url)

    def _manifest_bytes(self, location: CheckpointLocation) -> bytes | None:
        """Return the manifest of a step; None if it is absent or no readable file."""
        try:
            return read_manifest_bytes(self._store, location.folder)
        except (MissingError, CorruptError, InvalidError):
            return None

    def _write(self, location: CheckpointLocation, overlay: OverlayStore, before: bytes | None) -> None:
        """Write the overlay's changes; before a file is replaced or removed, keep a backup of its bytes.

        Args:
            location: The step.
            overlay: The changes.
            before: The manifest from which they were planned.
        Raises:
            ConflictError: The step has another manifest now.
        """
        if self._dry_run or not (overlay.pending or overlay.relinked):
            return
        self._hold()
        # Planning may take hours, and most of it needs no lease. A training may have saved the step again meanwhile.
        if self._manifest_bytes(location) != before:
            raise ConflictError(
                f"{self._store.url}: {_named(location.step)}: its manifest is another one than was examined; expected "
                "the same. Another process saved it meanwhile. Nothing was written. Run the repair again"
            )
        if overlay.relinked:
            assert location.step is not None, "only steps of a run share packs"
            replace_packs(self._store, self._clock, location.step, overlay.relinked, self._hold)
        # Before the look at what they name: a tag that moves from now on stays.
        keys = [key for key in overlay.pending if key.startswith(TAGS_FOLDER)]
        tags = {key: get_or_none(self._store, key, INDEX_BYTES_MAX) for key in keys}
        moved_on = self._tags_moved_on(location, overlay)
        for key, data in overlay.pending.items():
            self._hold()
            if key in moved_on:
                logger.info("%s names another step by now, and stays as it is", key)
                continue
            try:
                backup_key = self._backup(location.step, key)
                logger.info("%s is kept as %s", key, backup_key)
            except MissingError:
                pass  # A new file replaces none.
            if data is None:
                self._store.delete([key])
            elif key in tags:
                with suppress(ConflictError):
                    self._store.replace(key, data, tags[key])
            elif key == location.manifest_key and before is not None:
                self._store.replace(key, data, before)
            else:
                self._store.put(key, data)

    def _tags_moved_on(self, location: CheckpointLocation, overlay: OverlayStore) -> set[str]:
        """Return the tags that were to be set again and name another manifest by now. They take no lease to move."""
        tags = {key for key in overlay.pending if key.startswith(TAGS_FOLDER)}
        manifest = overlay.pending.get(location.manifest_key)
        if not tags or manifest is None or location.step is None:
            return set()
        return tags - tags_for_new_manifest(self._store, location.step, stated_digest(manifest) or "").keys()

    def _backup(self, step: int | None, key: str) -> str:
        """Keep the bytes of a file that is replaced or removed; return where. `MissingError` if it does not exist."""
        assert step is not None, "a run holds steps"
        return backup(self._store, step, key, INDEX_BYTES_MAX)

    def _hold(self) -> int:
        """Return the epoch to write under, 0 in a dry run; raise if another process writes to the run."""
        return 0 if self._dry_run else self._writer_lease.hold(self._run_id() or "unknown")

    def _run_id(self) -> str | None:
        try:
            return read_run_id(self._store)
        except CheckpointError:
            return None

    def _location(self, store: Store, step: int | None) -> CheckpointLocation:
        assert step is not None, "a run holds steps"
        return CheckpointLocation(store, step_folder(step), step, references=self._references, root=store)


def _require_known_timeline(timeline: Timeline, stored: RunTimelines) -> None:
    """Refuse to accept a manifest whose timeline would become the newest, or would share its number with another one.

    Raises:
        _NotAcceptable: It would.
    """
    known = stored.known
    if timeline in known or not known:
        return
    # Its writer was replaced before a manifest of the timeline counted. Since then the run has gone on without it.
    numbers = {other.number for other in known}
    if timeline.number > max(numbers) or timeline.number in numbers:
        raise _NotAcceptable(
            f"its manifest was fenced off, and it is of timeline {timeline.number}, of which no step counts. Expected "
            f"one that counts: the newest is {stored.newest.number}, and a resume would take this step before it or "
            "confuse the two. Nothing was changed. To read the step, copy the root and remove epochs/ from the copy"
        )


def _surplus(location: CheckpointLocation, manifest: Manifest) -> list[str]:
    """Return the keys of index files that the manifest does not name; an earlier repair replaced them."""
    named = {record.name for record in manifest.index_files}
    prefix = f"{location.folder}{manifest.attempt}/"
    files = [entry.key.removeprefix(prefix) for entry in location.store.list(prefix)]
    return [prefix + name for name in files if (is_index_name(name) or name == OVERVIEW_FILE) and name not in named]


def _named(step: int | None) -> str:
    return "the checkpoint" if step is None else f"step {step}"


def _not_accepted(step: int | None, lost: Iterable[str], fqns: Iterable[str]) -> StepRepair:
    return StepRepair(
        step, "unfinished", (), ("its manifest was fenced off, and its files are damaged", *lost), tuple(fqns)
    )


def _format_damage(damage: Damage) -> str:
    where = damage.file if damage.start is None else f"{damage.file} bytes {damage.start}-{damage.stop}"
    return f"{where}{'' if damage.fqn is None else f' ({damage.fqn})'}: {damage.message}"
