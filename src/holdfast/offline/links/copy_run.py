"""Copies a whole run to another root: each object once, under all the keys that it has.

Order of one copy; a process that dies leaves the destination in one of these states, and the next copy goes on:

    empty      Nothing is there.
    claimed    `copying/run.json` says which run is being copied. Nothing else may be there but what a copy stored.
    filled     Packs, parts and indexes are there, then tags, epochs and records, then the manifests.
    complete   `holdfast.json` is there, and `copying/` is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.checkpoint.location import require_no_checkpoint
from holdfast.clock import Clock
from holdfast.engine.buffers import allocate_aligned
from holdfast.errors import CheckpointError, ConflictError, MissingError
from holdfast.format.manifest import MANIFEST_BYTES_MAX
from holdfast.format.names import LATEST_FILE, RUN_FILE, beat_key, epoch_of_key
from holdfast.offline.links.committed_files import committed_files, manifest_at, step_of_manifest
from holdfast.offline.links.shared_packs import RELINKING
from holdfast.ports.observer import ByteProgress, Observer
from holdfast.ports.store import Entry, Store, read_range
from holdfast.repository.catalog import exists, read_run_id
from holdfast.repository.epochs import RELEASED
from holdfast.repository.latest import name_latest
from holdfast.repository.publish import get_or_none, publish
from holdfast.repository.removal import MARKS_FOLDER, link_keys, named_files
from holdfast.settings import MIB, PAGE_BYTES

_COPYING = "copying/"
_CLAIM = f"{_COPYING}run.json"
_LEFT_OUT = ("readers/", MARKS_FOLDER, RELINKING, _COPYING)
"""Folders of processes that read, collect or copy now."""

_BEAT = ".beat"
"""End of the key of a heartbeat."""

_WINDOW_BYTES = 8 * MIB
_NAME_BYTES = 16


@dataclass(slots=True)
class CopyReport:
    """What a copy of a run stored."""

    url: str
    """The destination."""

    steps: int = 0
    """Steps whose manifests are there."""

    files: int = 0
    """Objects that this call copied."""

    bytes: int = 0
    """Their bytes."""

    linked: int = 0
    """Further keys of these objects that were linked."""

    duplicated: int = 0
    """Further keys that the destination refused to link; each has a copy of its own."""

    left_out: tuple[int, ...] = ()
    """Steps that were removed or saved again while they were copied. The copy does not have them."""


class RunCopy:
    """Copies one run."""

    def __init__(self, source: Store, destination: Store, clock: Clock, observer: Observer | None = None) -> None:
        """Read nothing yet.

        Args:
            source, destination: The roots.
            clock: Gives random names.
            observer: Receives progress.
        """
        self._source, self._destination, self._clock = source, destination, clock
        self._observer = observer
        self._report = CopyReport(destination.url)
        self._buffer = allocate_aligned(_WINDOW_BYTES + PAGE_BYTES)

    def run(self) -> CopyReport:
        """Copy the run.

        Raises:
            MissingError: There is no run.
            ConflictError: The destination holds something else, or a complete copy.
            UnavailableError: Storage failed; the same call continues.
        """
        source, destination = self._source, self._destination
        require_no_checkpoint(source)
        run_id = read_run_id(source)
        if run_id is None:
            raise MissingError(f"{source.url}: no root of a run; expected a folder that holds {RUN_FILE}")
        self._claim(run_id)
        there = {entry.key for entry in destination.list("")}
        if RUN_FILE in there:
            # An earlier call died right after it ended the copy. A job may have gone on there: nothing is replaced.
            self._report.steps = sum(map(_is_manifest, there))
            destination.delete([_CLAIM])
            return self._report
        listed = [entry for entry in source.list("") if not entry.key.startswith(_LEFT_OUT)]
        manifests = sorted(entry.key for entry in listed if _is_manifest(entry.key))
        is_committed = committed_files(source, manifests)
        others = [entry for entry in listed if not _is_manifest(entry.key) and is_committed(entry.key)]
        # What is beside the steps is small and may have changed since an earlier call.
        small = {entry.key for entry in others if not entry.key.startswith("step-") and entry.bytes <= MIB}
        there = self._copy_all([entry for entry in others if entry.key not in small], there)
        for key in sorted(small - {RUN_FILE}):
            data = get_or_none(source, key, MANIFEST_BYTES_MAX)
            if data is not None and not key.endswith(_BEAT):
                destination.put(key, data)
                there.add(key)
        self._copy_manifests(manifests, there)
        epochs = [number for number in map(epoch_of_key, there) if number is not None]
        if epochs:
            # Nobody writes to the copy: the next job need not wait for a heartbeat.
            destination.put(beat_key(max(epochs)), RELEASED)
        publish(destination, RUN_FILE, source.get(RUN_FILE, MANIFEST_BYTES_MAX))
        destination.delete([entry.key for entry in destination.list(_COPYING)])
        return self._report

    def _claim(self, run_id: str) -> None:
        """Say which run is copied here, in an empty place, or find that an earlier copy of it said so."""
        destination = self._destination
        claim = get_or_none(destination, _CLAIM, MANIFEST_BYTES_MAX)
        if claim is None:
            first = next(iter(destination.list("")), None)
            if first is not None:
                raise ConflictError(
                    f"{destination.url}: is not empty (it holds {first.key}), and no unfinished copy of this run is "
                    "there; expected a new folder. Nothing was touched. Choose another place"
                )
            destination.put_if_absent(_CLAIM, run_id.encode())
        elif claim != run_id.encode() or read_run_id(destination) not in (None, run_id):
            raise ConflictError(
                f"{destination.url}: holds an unfinished copy of run {claim.decode(errors='replace')}, or a job has "
                f"begun a run in it; expected a copy of {run_id}. Nothing was touched. Choose another place"
            )
        destination.delete([entry.key for entry in destination.list(_COPYING) if entry.key != _CLAIM])

    def _copy_all(self, entries: Iterable[Entry], there: set[str]) -> set[str]:
        """Copy objects; return the keys that are there afterwards. What vanishes meanwhile is left out."""
        objects: dict[str, list[Entry]] = {}
        for entry in entries:
            try:
                objects.setdefault(self._source.identity(entry.key), []).append(entry)
            except MissingError:
                continue
        progress = ByteProgress(sum(keys[0].bytes for keys in objects.values()), self._observer)
        done = set[str]()
        for names in objects.values():
            done |= self._copy_object(names, there, progress)
        return done

    def _copy_object(self, names: list[Entry], there: set[str], progress: ByteProgress) -> set[str]:
        """Copy one object under all its keys; return those."""
        # A key that is there is complete: it got its name after its bytes.
        done = [entry.key for entry in names if entry.key in there]
        for entry in names:
            if entry.key in there:
                continue
            if done and self._destination.link(done[0], entry.key):
                self._report.linked += 1
            elif self._is_copied(entry):
                self._report.duplicated += bool(done)
            else:
                continue
            done.append(entry.key)
        progress.add(names[0].bytes)
        return set(done)

    def _is_copied(self, entry: Entry) -> bool:
        """Copy an object by one of its keys; return False if that key has vanished. The object may have others."""
        try:
            self._copy(entry)
        except MissingError:
            if exists(self._source, entry.key):
                raise  # Something removed what was stored in the destination.
            return False
        return True

    def _copy(self, entry: Entry) -> None:
        """Copy an object under a name of its own, then give it its key: a key that exists is complete."""
        name = f"{_COPYING}{self._clock.random_bytes(_NAME_BYTES).hex()}"
        size = self._source.size(entry.key)
        upload = self._destination.upload(name, size, _WINDOW_BYTES)
        try:
            for start in range(0, size, _WINDOW_BYTES):
                stop = min(start + _WINDOW_BYTES, size)
                data = upload.room(start, stop - start)
                if data is None:
                    data = read_range(self._source, entry.key, start, stop, self._buffer)
                else:
                    self._source.read_into(entry.key, [(start, stop)], [data])
                upload.write(start, data)
            upload.complete()
        except BaseException:
            upload.abort()
            raise
        self._destination.move(name, entry.key)
        self._report.files += 1
        self._report.bytes += size

    def _copy_manifests(self, keys: list[str], there: set[str]) -> None:
        """Copy the manifests of which all files were copied."""
        left_out = set[int]()
        for key in keys:
            data, step = get_or_none(self._source, key, MANIFEST_BYTES_MAX), step_of_manifest(key)
            assert step is not None, "a manifest of a run has a step"
            if data is None:
                left_out.add(step)
                continue
            try:
                manifest = manifest_at(key, data)
            except CheckpointError:
                # Damaged: the copy is like the original, and `repair` finds the same files.
                self._destination.put(key, data)
                continue
            links = link_keys(manifest)
            if any(file not in there and links.get(file) not in there for file in named_files(manifest)):
                left_out.add(step)
                continue
            self._destination.put(key, data)
            self._report.steps += 1
        self._report.left_out = tuple(sorted(left_out))
        if left_out and LATEST_FILE in there:
            name_latest(self._destination, None)  # The one that was copied may name a step that was not.


def _is_manifest(key: str) -> bool:
    return step_of_manifest(key) is not None
