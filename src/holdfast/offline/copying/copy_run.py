"""Copies a whole run to another root: every file that a manifest names, once, then the records, then the manifests.

A process that dies leaves the destination as `destination.py` says, and the next call goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from holdfast.base.clock import Clock
from holdfast.base.ports.codec import NO_CODECS, Codecs
from holdfast.base.ports.observer import Observer
from holdfast.base.ports.packs import Stored
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import FileRecord
from holdfast.core.engine.parallel_map import ordered_parallel_map
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX
from holdfast.core.format.names import (
    EPOCHS_FOLDER,
    MANIFEST_FILE,
    RUN_FILE,
    beat_key,
    epoch_of_key,
    manifest_key,
    step_folder,
    superseded_in,
)
from holdfast.errors import CheckpointError, CorruptError, MissingError, first_three
from holdfast.offline.copying.destination import CopyDestination
from holdfast.settings import MIB
from holdfast.stored.checkpoint.location import require_no_checkpoint
from holdfast.stored.checkpoint.verify import Damage
from holdfast.stored.copying.copied_files import CopiedFile, CopiedManifest, files_of_run, needed_files
from holdfast.stored.copying.file_copies import Copied, FileCopies, location_in_run
from holdfast.stored.copying.proof import shown_damages
from holdfast.stored.repository.catalog import manifest_in, read_run_id, step_folders
from holdfast.stored.repository.epochs import RELEASED
from holdfast.stored.repository.latest import name_latest
from holdfast.stored.repository.publish import get_or_none, publish
from holdfast.stored.repository.quarantine import QUARANTINE
from holdfast.stored.repository.removal import link_keys
from holdfast.stored.repository.reports import REPORTS_FOLDER
from holdfast.stored.repository.run_readme import README_FILE
from holdfast.stored.repository.tags import TAGS_FOLDER
from holdfast.stored.repository.timeline_records import TIMELINES_FOLDER
from holdfast.stored.repository.timelines import superseded_keys

_RECORDS = (EPOCHS_FOLDER, TIMELINES_FOLDER, QUARANTINE, REPORTS_FOLDER)
"""Folders of records beside the steps, without tags."""

_BEAT = ".beat"
"""End of the key of a heartbeat."""


@dataclass(slots=True)
class CopyReport:
    """What a copy of a run or checkpoint stored."""

    url: str
    """The destination."""

    steps: int = 0
    """Checkpoints whose manifests are there."""

    files: int = 0
    """Files that this call copied."""

    bytes: int = 0
    """Their bytes."""

    linked: int = 0
    """Further keys of these files that were linked."""

    duplicated: int = 0
    """Further keys that the destination refused to link; each has a copy of its own."""

    left_out: tuple[int, ...] = ()
    """Steps that the copy does not have: removed or saved again while they were copied, or damaged."""

    damages: tuple[Damage, ...] = ()
    """What was damaged in the source, if the caller left it out."""

    leaves_log: bool = False
    """Whether the source has a redo log, which is never copied: a load of the copy ends at a checkpoint."""

    def take(self, copied: Copied) -> None:
        """Take over what was counted."""
        self.files, self.bytes, self.linked, self.duplicated = (
            copied.files,
            copied.bytes,
            copied.linked,
            copied.duplicated,
        )


class RunCopy:
    """Copies one run."""

    def __init__(
        self,
        source: Store,
        destination: Store,
        clock: Clock,
        observer: Observer | None = None,
        *,
        codecs: Codecs = NO_CODECS,
        skip_damaged: bool = False,
    ) -> None:
        """Read nothing yet.

        Args:
            source, destination: The roots.
            clock: Gives random names.
            observer: Receives progress.
            codecs: What decodes coded chunks.
            skip_damaged: Whether to leave out damaged steps, rather than to refuse to complete the copy.
        """
        self._source, self._observer, self._skip_damaged = source, observer, skip_damaged
        self._destination = CopyDestination(destination, clock)
        self._files = FileCopies(source, destination, clock, codecs, partial(location_in_run, source))
        self._report = CopyReport(destination.url)
        self._needed: dict[str, CopiedFile] = {}
        self._damages: dict[Damage, None] = {}
        """Each once, in order: steps share packs."""
        self._damaged_steps: set[int] = set()

    def run(self) -> CopyReport:
        """Copy the run.

        Raises:
            MissingError: There is no run.
            ConflictError: The destination holds something else, or a complete copy.
            CorruptError: Steps are damaged. All others are there; the same call continues once they are repaired.
            UnavailableError: Storage failed; the same call continues.
        """
        source, destination = self._source, self._destination.store
        require_no_checkpoint(source)
        run_id = read_run_id(source)
        if run_id is None:
            raise MissingError(f"{source.url}: no root of a run; expected a folder that holds {RUN_FILE}")
        self._destination.claim(run_id, read_run_id(destination))
        if RUN_FILE in self._destination.there:
            # An earlier call died right after it ended the copy. A job may have gone on there: nothing is replaced.
            self._report.steps = sum(_is_manifest(key) for key in self._destination.there)
            self._destination.end()
            return self._report
        # Tags first: a tag may move at any time, and then names a step that was committed before the steps were listed.
        tags = self._read_tags()
        manifests = list(self._read_manifests())
        self._report.leaves_log = any(each.manifest is not None and each.manifest.log for each in manifests)
        records = self._records(manifests)
        large = [_unproven(source, key, size) for key, size in records.items() if size > MIB]
        self._needed = files_of_run(source, manifests)
        files = [*self._needed.values(), *large]
        copied = self._files.run(files, self._destination.there, self._destination.makes_links, self._observer)
        self._report.take(copied)
        self._copy_records([key for key, size in records.items() if size <= MIB], tags)
        self._copy_manifests(manifests, copied)
        if self._damages and not self._skip_damaged:
            raise self._refused()
        self._report.damages = tuple(self._damages)
        publish(destination, RUN_FILE, source.get(RUN_FILE, MANIFEST_BYTES_MAX))
        self._destination.end()
        return self._report

    def _read_tags(self) -> dict[str, bytes]:
        keys = [entry.key for entry in self._source.list(TAGS_FOLDER)]
        found = ordered_parallel_map(lambda key: (key, get_or_none(self._source, key, MANIFEST_BYTES_MAX)), keys)
        return {key: data for key, data in found if data is not None}

    def _read_manifests(self) -> Iterator[CopiedManifest]:
        """Yield the manifests of the run: in step folders, then superseded ones, which may have moved meanwhile."""

        def read(key: str) -> tuple[str, bytes | None]:
            return key, get_or_none(self._source, key, MANIFEST_BYTES_MAX)

        seen = set[bytes]()
        for keys in (map(manifest_key, step_folders(self._source)), _superseded(self._source)):
            for key, data in ordered_parallel_map(read, keys):
                if data is not None and data not in seen:
                    seen.add(data)
                    yield self._manifest_at(key, data)

    def _manifest_at(self, key: str, data: bytes) -> CopiedManifest:
        folder = "" if superseded_in(key) is not None else key.removesuffix(MANIFEST_FILE)
        try:
            return CopiedManifest(key, data, manifest_in(folder, data, f"{self._source.url}/{key}"))
        except CheckpointError as error:
            return CopiedManifest(key, data, None, error)

    def _records(self, manifests: list[CopiedManifest]) -> dict[str, int]:
        """Return key and size of what no manifest names: epochs, timelines, quarantine, reports."""
        steps = {copied.manifest.step for copied in manifests if copied.manifest is not None}
        folders = [
            f"{step_folder(step)}{REPORTS_FOLDER}" for step in sorted(step for step in steps if step is not None)
        ]
        listed = ordered_parallel_map(lambda folder: list(self._source.list(folder)), (*_RECORDS, *folders))
        records = {entry.key: entry.bytes for entries in listed for entry in entries}
        # A heartbeat is of this root alone, and a report never changes.
        there = self._destination.there
        return {
            key: size
            for key, size in records.items()
            if not key.endswith(_BEAT) and (REPORTS_FOLDER not in key or there.get(key) != size)
        }

    def _copy_records(self, keys: list[str], tags: Mapping[str, bytes]) -> None:
        def copy(key: str) -> None:
            data = get_or_none(self._source, key, MANIFEST_BYTES_MAX)
            if data is not None:
                self._destination.put(key, data)

        for _ in ordered_parallel_map(copy, (*keys, README_FILE)):
            pass
        for key, data in tags.items():
            self._destination.put(key, data)
        epochs = [number for number in map(epoch_of_key, keys) if number is not None]
        if epochs:
            # Nobody writes to the copy: the next job need not wait for a heartbeat.
            self._destination.store.put(beat_key(max(epochs)), RELEASED)

    def _copy_manifests(self, manifests: list[CopiedManifest], copied: Copied) -> None:
        """Copy the manifests of which all files were copied."""
        left_out = set[int]()
        for manifest in manifests:
            lacking = self._lacking(manifest, copied)
            if not lacking:
                self._destination.put(manifest.key, manifest.data)
                self._report.steps += 1
                continue
            step = _step_of(manifest.key)
            left_out.add(step)
            if get_or_none(self._source, manifest.key, MANIFEST_BYTES_MAX) == manifest.data:
                self._damaged_steps.add(step)
                self._damages |= dict.fromkeys(damage for damages in lacking.values() for damage in damages)
        self._report.left_out = tuple(sorted(left_out))
        # That of the source may name a step that was committed meanwhile.
        name_latest(self._destination.store, None)

    def _lacking(self, copied_manifest: CopiedManifest, copied: Copied) -> Mapping[str, list[Damage]]:
        """Return the files of a manifest that were not copied, with their damage; itself if it is damaged."""
        manifest, key = copied_manifest.manifest, copied_manifest.key
        if manifest is None:
            return {key: [Damage(f"{self._source.url}/{key}", None, None, None, str(copied_manifest.error))]}
        links = link_keys(manifest)
        lacking: dict[str, list[Damage]] = {}
        for name, record, _ in needed_files(manifest):
            other = self._needed[name].record
            if other[1:] != record[1:]:
                message = f"another manifest says {other.bytes} bytes, {other.digest}; expected {record[1:]}"
                lacking[name] = [Damage(f"{self._source.url}/{name}", None, None, None, message)]
            elif name not in copied.keys and links.get(name) not in copied.keys:
                missing = Damage(f"{self._source.url}/{name}", None, None, None, f"expected {record.bytes} bytes")
                lacking[name] = copied.damages.get(name) or [missing]
        return lacking

    def _refused(self) -> CorruptError:
        steps, places = first_three(sorted(self._damaged_steps)), shown_damages([*self._damages])
        return CorruptError(
            f"{self._source.url}: damaged steps [{steps}]: {places}. They were not copied, and "
            f"{self._report.url} is not complete. Repair them (holdfast repair {self._source.url}) and copy "
            "again, which continues; or leave those steps out (--skip-damaged, skip_damaged=True)"
        )


def _unproven(source: Store, key: str, size: int) -> CopiedFile:
    """Return a large file of which nobody knows a digest, such as a pack that a repair has set aside."""
    return CopiedFile(key, FileRecord(key, size, ""), [], False, [Stored(source, key)])


def _superseded(source: Store) -> Iterator[str]:
    """Yield the keys of superseded manifests, listed when the first is asked for."""
    yield from (key for _, key in superseded_keys(source))


def _step_of(key: str) -> int:
    """Return the step of which a key of a run names a manifest, in its folder or under `superseded/`."""
    moved = superseded_in(key)
    return moved[0] if moved is not None else int(key.partition("/")[0].removeprefix("step-"))


def _is_manifest(key: str) -> bool:
    return superseded_in(key) is not None or (key.startswith("step-") and key.endswith(f"/{MANIFEST_FILE}"))
