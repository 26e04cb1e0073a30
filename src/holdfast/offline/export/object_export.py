"""Export to a store of objects: every file is filled in memory and stored whole, by one upload.

A file is one window here. Several are sent while the next one is filled. What is there already, from an earlier call,
is left out. The file by which readers find the others is stored last.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from holdfast.base.clock import Clock
from holdfast.base.ports.foreign import Writer
from holdfast.base.ports.observer import ByteProgress, Observer
from holdfast.base.ports.store import Upload
from holdfast.base.types.export import ExportFile, ExportOptions, WindowPlan
from holdfast.core.engine.buffers import allocate_aligned
from holdfast.core.engine.read import ReadPool
from holdfast.errors import ConflictError, InvalidError
from holdfast.offline.export.crc32 import joined_crc32
from holdfast.offline.export.object_place import ObjectPlace
from holdfast.offline.export.planned import (
    ExportReport,
    ExportRequest,
    ExportShare,
    OnWindow,
    PlannedExport,
    WorkerPool,
)
from holdfast.offline.export.window_writer import READS_IN_FLIGHT, DoneWindow, ExportSource, fill
from holdfast.offline.export.windows import share_of, windows_of
from holdfast.settings import PAGE_BYTES
from holdfast.stored.checkpoint.checkpoint import Checkpoint

OBJECT_SHARE = 0.625
"""Share of the memory that objects on their way may take; the rest is for reads, which a store answers with memory of
its own."""

_UPLOADS = 8
"""Uploads that are completed side by side."""


class ObjectExport(PlannedExport):
    """The export of one checkpoint to objects below one URL, or to one object."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        folder: ObjectPlace,
        single: ObjectPlace | None,
        writer: Writer,
        options: ExportOptions,
        clock: Clock,
    ) -> None:
        """Lay the files out; reads the index and writes nothing.

        Args:
            checkpoint: The source.
            folder: The destination, for a format of several files.
            single: The same for a format of one file; None if the URL cannot be that of an object.
            writer, options, clock: As for `Export`.
        Raises:
            InvalidError: The format cannot hold the checkpoint's content, or nothing of it, or is one file and the URL
                is a bucket.
        """
        super().__init__(checkpoint, writer, options, clock)
        if not self.files:
            raise InvalidError(f"{checkpoint.url}: has nothing that {writer.name} holds; expected a tensor")
        place = folder if any(file.name for file in self.files) else single
        if place is None:
            raise InvalidError(f"{folder.url}: {writer.name} is one file; expected the URL of an object in a bucket")
        self._place = place

    def run(
        self, request: ExportRequest, pool: WorkerPool | None = None, observer: Observer | None = None
    ) -> ExportReport:
        """Store the files that are not there yet, the one that completes them last.

        Arguments and errors as `PlannedExport.run`.
        """
        started, place = self._clock.monotonic_seconds(), self._place
        self._require_room(request)
        read_bytes = 0
        with self._checkpoint.blaming_overwrite():
            done = self._stored() if place.claim(self.fingerprint, self._clock) else []
            resumed_bytes = sum(stop for _, _, stop in done)
            progress = ByteProgress(self._bytes, observer)
            progress.add(resumed_bytes)

            def on_window(written: int, read: int) -> None:
                nonlocal read_bytes
                read_bytes += read
                progress.add(written)

            last = [(number, 0, file.bytes) for number, file in enumerate(self.files) if file.completes]
            shares = self._shares(request, self._longest, [*done, *last], [""] * request.workers)
            if pool is not None:
                pool(shares, on_window)
            else:
                for share in shares:
                    self.execute(share, on_window)
            self._checkpoint.require_unchanged()
            others = [(number, 0, file.bytes) for number, file in enumerate(self.files) if not file.completes]
            one_worker = ExportRequest(memory_bytes=request.memory_bytes, workers=1)
            self.execute(self._shares(one_worker, self._longest, [*done, *others], [""])[0], on_window)
            place.release()
        return self._report(place.url, started, resumed_bytes, read_bytes)

    def execute(self, share: ExportShare, on_window: OnWindow) -> None:
        """Store a share's files; return once all are durable.

        Raises:
            ConflictError: Another process stored something else under the name of a file.
            CheckpointError: A read or write failed.
        """
        self._require_same(share)
        read_window_bytes = self._read_window_bytes(share.memory_bytes)
        windows = share_of(windows_of(self.files, share.window_bytes, share.done), share.number, share.count)
        plans = self._window_plans(windows, read_window_bytes)
        self._store_all(plans, self._source(read_window_bytes), on_window)
        self._checkpoint.require_unchanged()

    @property
    def _longest(self) -> int:
        """Bytes of the longest file: a window is a file."""
        return max(file.bytes for file in self.files)

    def _require_room(self, request: ExportRequest) -> None:
        """Refuse a file that does not fit the memory of a worker, or the store, before anything is written.

        Raises:
            InvalidError: The message says what to do.
        """
        room = int(self._worker_bytes(request) * OBJECT_SHARE)
        largest = max(self.files, key=lambda file: file.bytes)
        object_bytes_max = self._place.store.traits.object_bytes_max
        where = f"{self._place.url}/{largest.name}".rstrip("/")
        if largest.bytes > room:
            needed = int(largest.bytes / OBJECT_SHARE) + 1
            raise InvalidError(
                f"{where}: a file of {largest.bytes} bytes is sent from memory, and a worker has {room} bytes for it. "
                f"Allow {needed} bytes of memory for each worker (--memory, memory_bytes=), or choose a smaller shard "
                "size (--shard-size, shard_bytes=)"
            )
        if object_bytes_max is not None and largest.bytes > object_bytes_max:
            raise InvalidError(
                f"{where}: a file of {largest.bytes} bytes; the store takes at most {object_bytes_max} in one request. "
                "Choose a smaller shard size, or a format of several files, or export to a disk"
            )

    def _stored(self) -> list[tuple[int, int, int]]:
        """Return the files that are there: number, start and stop.

        Raises:
            ConflictError: Something else has the name of one.
        """
        sizes, done = self._place.sizes(), []
        for number, file in enumerate(self.files):
            found = sizes.get(file.name)
            if found is None:
                continue
            if found != file.bytes:
                raise ConflictError(
                    f"{self._place.url}/{file.name}: an object of {found} bytes; this export stores {file.bytes} bytes "
                    "there. Nothing was touched. Remove it, or export elsewhere"
                )
            done.append((number, 0, file.bytes))
        return done

    def _store_all(self, plans: Iterable[WindowPlan], source: ExportSource, on_window: OnWindow) -> None:
        lock = Lock()

        def finish(upload: Upload, window_bytes: int, read_bytes: int) -> None:
            try:
                upload.complete()
            except BaseException:
                upload.abort()
                raise
            with lock:  # `on_window` accepts one call at a time.
                on_window(window_bytes, read_bytes)

        uploads: dict[Future[None], Upload] = {}
        with (
            ReadPool(READS_IN_FLIGHT, source.read_bytes_max) as reads,
            ThreadPoolExecutor(_UPLOADS, thread_name_prefix="holdfast-export") as threads,
        ):
            try:
                for plan in plans:
                    _raise_failures(uploads)
                    upload, is_lent = self._filled(plan, source, reads)
                    if is_lent:
                        begun = threads.submit(finish, upload, plan.window.bytes, plan.reads.bytes)
                        uploads[begun] = upload
                    else:
                        finish(upload, plan.window.bytes, plan.reads.bytes)
                for each in uploads:
                    each.result()
            except BaseException:
                threads.shutdown(wait=True, cancel_futures=True)
                for future, upload in uploads.items():
                    if future.cancelled():
                        upload.abort()
                raise

    def _filled(self, plan: WindowPlan, source: ExportSource, reads: ReadPool) -> tuple[Upload, bool]:
        """Return the upload of a file, filled, and whether its memory is the store's.

        The store lends memory within a bound, so this waits for other uploads. Nothing bounds memory of our own but
        that one file after the other is stored.
        """
        file = self.files[plan.window.file]
        part_bytes = -(-file.bytes // PAGE_BYTES) * PAGE_BYTES
        key = self._place.key_of(file.name)
        upload = self._place.store.upload(key, file.bytes, part_bytes, folders_durable=False)
        try:
            lent = upload.room(0, file.bytes)
            memory = allocate_aligned(file.bytes)[: file.bytes] if lent is None else lent
            _put_checksums(memory, file, fill(plan, memory, source, reads))
            upload.write(0, memory)
        except BaseException:
            upload.abort()
            raise
        return upload, lent is not None


def _raise_failures(uploads: dict[Future[None], Upload]) -> None:
    """Raise the error of an upload that failed: now, not after all files. Those that ended are taken out."""
    for future in [future for future in uploads if future.done()]:
        future.result()
        del uploads[future]


def _put_checksums(memory: memoryview, file: ExportFile, done: DoneWindow) -> None:
    """Write the checksums of a file into it; its only window has all of them."""
    parts = {number: (start, stop, crc) for number, start, stop, crc in done.sums}
    for number, checksum in enumerate(file.checksums):
        crc = joined_crc32([parts[number]] if number in parts else [], checksum.start, checksum.stop)
        for at in checksum.at:
            memory[at : at + 4] = crc.to_bytes(4, "little")
