"""Copies files side by side: each is proven before it is complete, and what is complete already is not copied again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from holdfast.base.clock import Clock
from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.observer import ByteProgress, Observer
from holdfast.base.ports.packs import Stored
from holdfast.base.ports.ranges import read_range
from holdfast.base.ports.store import Store, Upload
from holdfast.base.types.manifest import FileRecord, Manifest
from holdfast.core.engine.buffers import allocate_aligned, is_read_in
from holdfast.core.engine.parallel_map import WorkerThreads
from holdfast.core.format.index.index_file import decode_index
from holdfast.core.format.names import COPYING_FOLDER, is_coded_pack_name, step_folder
from holdfast.errors import CheckpointError, CorruptError, InvalidError, MissingError, UnavailableError
from holdfast.settings import MIB, PAGE_BYTES
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.checkpoint.verify import Damage
from holdfast.stored.copying.copied_files import CopiedFile
from holdfast.stored.copying.pack_proof import PackPieces
from holdfast.stored.copying.part_writes import PartWrites
from holdfast.stored.copying.proof import ContentProof, NoProof, PackProof, Proof, damages_of_pack
from holdfast.stored.repository.catalog import read_file, read_index, stored_bytes

FILES_AT_ONCE = 8
"""Files that a copy without a job beside it sends at once."""

_WINDOW_BYTES = 8 * MIB
_PART_BYTES = 32 * MIB
_PARTS_MAX = 8_000
"""Parts of one file: fewer than any store takes."""

_NAME_BYTES = 16
_READS_MAX = 2
"""How often a file is read whose bytes are refuted: a bit may flip on the way too."""


@dataclass(slots=True)
class Copied:
    """What has been copied."""

    keys: set[str] = field(default_factory=set)
    """Keys of files that are at the destination, complete."""

    files: int = 0
    """Files that this call copied."""

    bytes: int = 0
    """Their bytes."""

    linked: int = 0
    """Further keys that were linked."""

    duplicated: int = 0
    """Further keys that the destination refused to link; each has a copy of its own."""

    damages: dict[str, list[Damage]] = field(default_factory=dict)
    """Damage of files that were not copied, by key."""


class FileCopies:
    """Copies the files of one run or checkpoint."""

    def __init__(
        self,
        source: Store,
        destination: Store,
        clock: Clock,
        codecs: Codecs,
        location_of: Callable[[Manifest], CheckpointLocation],
        *,
        files_at_once: int = FILES_AT_ONCE,
        unfinished: str = COPYING_FOLDER,
    ) -> None:
        """Do no I/O.

        Args:
            source, destination: From where and to where.
            clock: Gives random names.
            codecs: What decodes coded chunks, which are proven by their raw bytes.
            location_of: Returns the checkpoint of a manifest in the source.
            files_at_once: Threads, each of which copies one file.
            unfinished: Folder of files that are not complete, at a destination that shows them.
        """
        self._source, self._destination, self._clock, self._codecs = source, destination, clock, codecs
        self._location_of, self._files_at_once, self._unfinished = location_of, files_at_once, unfinished
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._ended = 0
        """Files that a thread is done with."""
        self._index_lock = threading.Lock()
        self._chunk_bytes: dict[str, int] = {}
        self._failure: BaseException | None = None
        self._is_over = False
        self._progress = ByteProgress(0, None)
        self.copied = Copied()

    def run(self, files: Iterable[CopiedFile], there: dict[str, int], links: bool, observer: Observer | None) -> Copied:
        """Copy files; return what is there afterwards.

        Ctrl-C waits for the requests under way, so that nothing of an unfinished upload stays.

        Args:
            files: The files.
            there: Sizes of the objects that are at the destination, by key.
            links: Whether the destination makes links.
            observer: Receives progress.
        Raises:
            UnavailableError: Storage failed; the same call continues.
        """
        waiting = list(files)
        self._progress = ByteProgress(sum(file.record.bytes for file in waiting), observer)
        threads = WorkerThreads(self._files_at_once, "holdfast-copy")
        begun = 0
        try:
            for file in waiting:
                threads.begin(partial(self._copy_or_stop, file, there, links))
                begun += 1
            self._wait_for(begun)
        finally:
            self._is_over = True
            # Not `Thread.join`: once Ctrl-C has interrupted it, it takes a thread that goes on for one that has ended.
            self._wait_for(begun)
            threads.end()
        if self._failure is not None:
            raise self._failure
        return self.copied

    def cancel(self) -> None:
        """End soon: no further file is begun, and no further part. Any thread may call, also before `run`."""
        self._is_over = True

    def _wait_for(self, begun: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended >= begun)

    def _copy_or_stop(self, file: CopiedFile, there: dict[str, int], links: bool) -> None:
        try:
            if self._is_over:
                return
            keys = self._keys_of(file, links)
            first, *others = keys
            if self._is_there(file, first, there) or self._copy_from_any(file, first):
                with self._lock:
                    self.copied.keys.add(first)
                for key in others:
                    self._link(file, first, key, there)
            self._add(file.record.bytes if first in there else 0)
        except BaseException as error:  # noqa: BLE001 - raised by `run`, on the thread of the caller
            with self._lock:
                self._failure = self._failure or error
            self._is_over = True
        finally:
            with self._changed:
                self._ended += 1
                self._changed.notify_all()

    def _keys_of(self, file: CopiedFile, links: bool) -> list[str]:
        """Return the keys that a file gets. Where there are no links it has one, in the folder of its own step."""
        if not links or not file.links:
            return [file.key]
        try:
            self._source.size(file.key)
        except (MissingError, InvalidError):
            # Its own step is gone. With links no other step needs that folder.
            return list(file.links)
        return [file.key, *file.links]

    def _is_there(self, file: CopiedFile, key: str, there: dict[str, int]) -> bool:
        """Return whether a file is complete at the destination. One of another size was never complete."""
        if key not in there:
            return False
        # Another copy of the same file may have completed it since the listing.
        if file.record.bytes in (there[key], stored_bytes(self._destination, key)):
            return True
        self._destination.delete([key])
        del there[key]
        return False

    def _link(self, file: CopiedFile, first: str, key: str, there: dict[str, int]) -> None:
        if self._is_there(file, key, there):
            with self._lock:
                self.copied.keys.add(key)
        elif self._destination.link(first, key):
            with self._lock:
                self.copied.linked += 1
                self.copied.keys.add(key)
        elif self._copy_from_any(file, key):
            with self._lock:
                self.copied.duplicated += 1
                self.copied.keys.add(key)

    def _copy_from_any(self, file: CopiedFile, key: str) -> bool:
        """Copy a file from the first of its places that has what was saved; return whether there is one."""
        damages: list[Damage] = []
        for stored in file.sources:
            where = f"{stored.files.url}/{stored.key}"
            try:
                size = stored.files.size(stored.key)
            except (MissingError, InvalidError) as error:
                if stored is file.sources[0]:
                    damages.append(Damage(where, None, None, None, str(error)))
                continue
            if size != file.record.bytes:
                damages.append(Damage(where, None, None, None, f"{size} bytes; expected {file.record.bytes}"))
            elif any(self._is_copied(file, stored, key) for _ in range(_READS_MAX)):
                return True
            else:
                damages += self._named_damages(file, stored)
        with self._lock:
            self.copied.damages[file.key] = damages
        return False

    def _is_copied(self, file: CopiedFile, stored: Stored, key: str) -> bool:
        """Copy a file from one place; return False if it has vanished, or if its bytes are not what was saved."""
        record = file.record
        try:
            proof = self._proof_of(file, stored)
        except CorruptError:
            return False
        try:
            if not self._uploaded(stored, key, record, proof):
                return False
        except CheckpointError as error:
            if stored_bytes(self._destination, key) == record.bytes:
                # Another copy of the same file was first: it stores the same bytes under a name of this file alone.
                self._add(record.bytes)
                return True
            if not isinstance(error, MissingError) or _exists(stored):
                raise  # Something removed what was stored in the destination.
            return False
        with self._lock:
            self.copied.files += 1
            self.copied.bytes += record.bytes
        return True

    def _uploaded(self, stored: Stored, key: str, record: FileRecord, proof: Proof) -> bool:
        """Upload a file from one place, and prove it on the way; return False if its bytes are refuted."""
        # A store of objects shows none before it is whole. A file has its final name only once it is complete.
        is_whole_at_once = self._destination.traits.appears_whole
        name = key if is_whole_at_once else f"{self._unfinished}{self._clock.random_bytes(_NAME_BYTES).hex()}"
        size, part_bytes = record.bytes, self._part_bytes(record.bytes)
        mapped = self._mapped(stored, size)
        lent = None if mapped is None else self._lent(name, mapped)
        upload = lent or self._destination.upload(name, size, part_bytes)
        writes = PartWrites(upload) if lent is None and mapped is not None else None
        buffer: memoryview | None = None
        sent = 0
        try:
            for start in range(0, size, part_bytes):
                if self._is_over:
                    raise UnavailableError(
                        f"{self._destination.url}/{name}: another file failed, or the copy was ended"
                    )
                stop = min(start + part_bytes, size)
                if mapped is not None:
                    data = mapped[start:stop] if lent else _read_in(stored, mapped, start, stop)
                elif (room := upload.room(start, stop - start)) is not None:
                    data = room
                    stored.files.read_into(stored.key, [(start, stop)], [data])
                else:
                    buffer = buffer if buffer is not None else allocate_aligned(part_bytes + PAGE_BYTES)
                    data = read_range(stored.files, stored.key, start, stop, buffer)
                proof.take(data)
                if writes is not None:
                    writes.begin(start, data)
                elif lent is None:
                    upload.write(start, data)
                sent += stop - start
                self._add(stop - start)
            if writes is not None:
                writes.wait()
            if not proof.holds(record.digest):
                raise CorruptError(f"{stored.url}: its bytes do not hash to {record.digest}; expected what was saved")
            upload.complete()
            if name != key:
                self._destination.move(name, key)
        except BaseException as error:
            if writes is not None:
                writes.end()
            with suppress(CheckpointError):  # The next call finds what stays of it.
                upload.abort()
            self._add(-sent)  # Last: an observer may end the copy by an error.
            if isinstance(error, CorruptError):
                return False
            raise
        return True

    def _mapped(self, stored: Stored, size: int) -> memoryview | None:
        """Return a file as memory that a store of objects can send without a copy; None if the file has to be read.

        To send a mapped file takes a third of the CPU time.
        """
        if not stored.files.traits.maps_files or self._destination.traits.object_bytes_max is None:
            return None
        memory = memoryview(stored.files.mapped(stored.key) or b"")
        return memory if size == len(memory) > 0 else None

    def _lent(self, name: str, mapped: memoryview) -> Upload | None:
        """Lend a mapped file to one request; None if the file is sent in parts."""
        largest = self._destination.traits.object_bytes_max
        is_whole = largest is not None and mapped.nbytes <= largest and is_read_in(mapped)
        return self._destination.lent_upload(name, [mapped]) if is_whole else None

    def _part_bytes(self, size: int) -> int:
        largest = self._destination.traits.object_bytes_max
        # Each part has a connection of its own, and all of them memory of the store.
        usual = _WINDOW_BYTES if largest is None or size <= largest else _PART_BYTES
        return max(usual, -(-size // (_PARTS_MAX * PAGE_BYTES)) * PAGE_BYTES)

    def _proof_of(self, file: CopiedFile, stored: Stored) -> Proof:
        """Return what proves a file.

        Raises:
            CorruptError: A pack, and the index of no manifest that names it can be read.
        """
        if not file.is_pack:
            return ContentProof() if file.record.digest else NoProof()
        failure: CheckpointError | None = None
        for manifest, record in file.named_by:
            try:
                listing = PackPieces(manifest, self._location_of(manifest).packs_of(manifest), self._codecs)
                return PackProof(record.name, self._chunk_bytes_of(manifest), stored, listing)
            except (CorruptError, MissingError) as error:
                failure = failure or error
        raise CorruptError(f"{stored.files.url}/{stored.key}: cannot be proven: {failure}") from failure

    def _chunk_bytes_of(self, manifest: Manifest) -> int:
        """Return the bytes of a chunk in the packs of a manifest, read once."""
        with self._index_lock:
            if manifest.digest not in self._chunk_bytes:
                if not manifest.indexes:
                    raise CorruptError(f"{self._source.url}: the manifest of step {manifest.step} names no index")
                folder, first = self._location_of(manifest).folder, manifest.indexes[0]
                data = read_file(self._source, folder, manifest.attempt, first)
                where = f"{self._source.url}/{folder}{manifest.attempt}/{first.name}"
                self._chunk_bytes[manifest.digest] = decode_index(data, where).chunk_bytes
            return self._chunk_bytes[manifest.digest]

    def _named_damages(self, file: CopiedFile, stored: Stored) -> list[Damage]:
        """Return what is wrong with a file, as closely as can be said."""
        where = f"{stored.files.url}/{stored.key}"
        message = f"the content does not hash to {file.record.digest}, as the manifest says"
        if file.is_pack and is_coded_pack_name(file.record.name):
            # Of what no step needs any more the pair may be gone, too: nobody can decode and hash it then.
            message += (
                ", or a chunk that no step needs is coded against a pair that was removed. If `holdfast verify` finds "
                "nothing, write the step anew by `holdfast export --to holdfast`"
            )
        for manifest, record in file.named_by if file.is_pack else ():
            try:
                location = self._location_of(manifest)
                index = read_index(self._source, location.folder, manifest)
                found = damages_of_pack(stored, record, index, location.packs_of(manifest), self._codecs)
            except CheckpointError as error:
                message = str(error)
                continue
            if found:
                return found
        return [Damage(where, None, None, None, message)]

    def _add(self, count: int) -> None:
        with self._lock:
            self._progress.add(count)


def location_in_run(source: Store, manifest: Manifest) -> CheckpointLocation:
    """Return the step of a run that a manifest commits."""
    assert manifest.step is not None, "a manifest of a run has a step"
    return CheckpointLocation(source, step_folder(manifest.step), manifest.step, root=source)


def _read_in(stored: Stored, mapped: memoryview, start: int, stop: int) -> memoryview:
    """Return a part of a mapped file whose pages have been read."""
    part = mapped[start:stop]
    if is_read_in(part):
        return part
    # Where a page cannot be read, the usual reading names the place.
    return read_range(stored.files, stored.key, start, stop, allocate_aligned(stop - start + PAGE_BYTES))


def _exists(stored: Stored) -> bool:
    try:
        stored.files.size(stored.key)
    except MissingError:
        return False
    return True
