"""Executes a load plan: several reads in flight, every chunk checked before it is placed.

Bytes that fail their check are read once more: a network may flip a bit on the way, and then the object is whole. What
the second read finds decides.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from holdfast.engine.buffers import BufferPool
from holdfast.engine.memory_limits import ranks_on_host
from holdfast.errors import CorruptError, MissingError
from holdfast.format.digest import digest_of, new_digest
from holdfast.geometry.box import Box
from holdfast.geometry.chunking import TINY_BYTES_MAX
from holdfast.ports.framework import Target
from holdfast.ports.store import Packs, Stored, read_range, view_for_range
from holdfast.settings import MIB, PAGE_BYTES, Settings
from holdfast.types.plan import ChunkRead, LoadPlan, Part, ReadRun

logger = logging.getLogger(__name__)

_PART_BYTES_MAX = MIB
"""Bytes read from storage before they are checked and placed. One buffer of this size is filled again and again, so it
stays in the processor's cache. docs/decisions/036-reading-packs.md has the measurements."""


class ReadPool:
    """Threads and buffers that reads share, from the start of a block to its end.

    A caller that executes several plans keeps one. The end of a thread runs callbacks of weak references, in which
    Python discards a Ctrl-C.
    """

    def __init__(self, count: int, read_bytes_max: int) -> None:
        """Allocate `count` buffers for reads of at most `read_bytes_max` bytes."""
        self.buffers = BufferPool(count, read_bytes_max + PAGE_BYTES)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="holdfast-read")

    def execute(self, read: Callable[[ReadRun], None], runs: Sequence[ReadRun]) -> None:
        """Call `read` with every run, on the threads; return, or raise the first error, once no call is running."""
        reads: list[Future[None]] = []
        try:
            for run in runs:  # One by one: an interrupt must find those that have begun.
                reads.append(self._threads.submit(read, run))
            for future in reads:
                future.result()
        except BaseException:
            for future in reads:
                future.cancel()
            wait(reads)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


def execute(
    plan: LoadPlan,
    packs: Packs,
    targets: Sequence[Target],
    settings: Settings,
    pool: ReadPool | None = None,
    moved: Callable[[int], None] | None = None,
) -> None:
    """Read, check and place everything a plan lists.

    Args:
        plan: What to read.
        packs: Where each pack is stored.
        targets: Where to place, by wanted number.
        settings: Reads in flight, and the size from which on chunks are read straight into targets.
        pool: What to read with, for a caller that executes several plans. None: a new one.
        moved: Called with the byte count of each run once it is read, on any thread.
    Raises:
        CorruptError: A chunk differs from what was saved; the message names tensor, pack and byte range. Targets may
            hold bytes that failed their check.
        UnavailableError: The store failed.
    """
    if not plan.runs:
        return
    if pool is None:
        count = min(settings.windows_in_flight, len(plan.runs))
        with ReadPool(count, max(run.stop - run.start for run in plan.runs)) as pool:
            execute(plan, packs, targets, settings, pool, moved)
        return
    buffers = pool.buffers
    copying = threading.Semaphore(max(len(os.sched_getaffinity(0)) // ranks_on_host(), 1))

    def read(run: ReadRun) -> None:
        with buffers.lent() as buffer:
            _RunRead(run, packs(run.pack), targets, settings._tuning.zero_copy_bytes_min, copying).execute(buffer)
        if moved is not None:
            moved(run.stop - run.start)

    pool.execute(read, plan.runs)


@dataclass(slots=True)
class _RunRead:
    """Reads one run: cached bytes straight into the targets, the rest through a buffer."""

    _run: ReadRun
    _stored: Stored
    _targets: Sequence[Target]
    _zero_copy_bytes_min: int
    _copying: threading.Semaphore

    def execute(self, buffer: memoryview) -> None:
        """Read, check and place every chunk."""
        run = self._run
        homes = [self._home(chunk) for chunk in run.chunks]
        placed = 0
        if any(homes):
            # With more copies at once than cores, each evicts the others' bytes from the cache before they are hashed.
            with self._copying, pack_expected(run, self._stored):
                placed = self._place_cached(homes, buffer)
        if placed < len(run.chunks):
            self._place_rest(ReadRun.of(run.pack, run.chunks[placed:]), buffer)

    def _place_rest(self, rest: ReadRun, buffer: memoryview) -> None:
        """Read the rest of the run through the front of the buffer, a few chunks at a time; check and place them."""
        parts = list(_parts_of(rest, _PART_BYTES_MAX))
        ranges = [(part.start, part.stop) for part in parts]
        alignment = self._stored.files.read_alignment
        buffers = [view_for_range(buffer, start, stop, alignment) for start, stop in ranges]
        failures: list[Exception] = []
        doubtful: list[ReadRun] = []

        def place_part(number: int, data: memoryview) -> None:
            try:
                verify_and_place_all(parts[number], data, self._stored.url, self._targets)
            except CorruptError:
                # Not read again in here: this read may hold the only request that the store allows.
                doubtful.append(parts[number])
            except Exception as error:
                failures.append(error)
                raise

        try:
            with pack_expected(rest, self._stored):
                self._stored.files.read_into(self._stored.key, ranges, buffers, place_part)
        except Exception:
            if failures:
                # A target's own error; the store may have wrapped it as an error of its own.
                raise failures[0] from None
            raise
        for part in doubtful:
            _read_again(part, self._stored, self._targets, buffer)

    def _home(self, chunk: ChunkRead) -> list[memoryview]:
        """Return the memory of targets that holds all of a chunk, in its order; empty if a buffer is needed."""
        if chunk.bytes < self._zero_copy_bytes_min:
            return []
        home, at = [], 0
        for part in chunk.parts:
            memory = None
            if part.source_start == at and part.box == part.source_box:
                memory = self._targets[part.wanted_number].memory(part.box)
            if memory is None:
                return []
            home.append(memory)
            at += memory.nbytes
        return home if at == chunk.bytes else []

    def _place_cached(self, homes: Sequence[list[memoryview]], buffer: memoryview) -> int:
        """Check and place the chunks at the front of the run that the store has in memory; return their number."""
        run = self._run
        buffers: list[memoryview] = []
        # Chunks without memory in the targets are read into the buffer, consecutive ones in one read that starts here.
        buffered_from = run.start
        for chunk, home in zip(run.chunks, homes, strict=True):
            if home:
                buffers += home
                buffered_from = chunk.offset + chunk.bytes
                continue
            if chunk.offset > buffered_from:
                buffers.pop()
            buffers.append(buffer[buffered_from - run.start : chunk.offset + chunk.bytes - run.start])
        hashing = _Hashing(run, [bool(home and chunk.expected) for chunk, home in zip(run.chunks, homes, strict=True)])
        stop = run.start + self._stored.files.get_cached(self._stored.key, run.start, buffers, hashing.take)
        for number, (chunk, home) in enumerate(zip(run.chunks, homes, strict=True)):
            if chunk.offset + chunk.bytes > stop:
                return number
            if home:
                # On a wrong digest, read the chunk again through the buffer: targets may overlap, so another thread may
                # have written to this memory meanwhile. The check of the buffer's copy decides.
                if chunk.expected and hashing.digests[number] != chunk.expected:
                    return number
            else:
                verify_and_place(
                    chunk, buffer[chunk.offset - run.start :][: chunk.bytes], self._stored.url, self._targets
                )
        return len(run.chunks)


def _parts_of(run: ReadRun, bytes_max: int) -> Iterator[ReadRun]:
    """Yield a run in parts of at most `bytes_max` bytes, or of one chunk."""
    chunks, first = run.chunks, 0
    for number, chunk in enumerate(chunks):
        if number > first and chunk.offset + chunk.bytes - chunks[first].offset > bytes_max:
            yield ReadRun.of(run.pack, chunks[first:number])
            first = number
    yield ReadRun.of(run.pack, chunks[first:])


class _Hashing:
    """Hashes the chunks of a run that are read straight into targets, as their bytes are copied."""

    def __init__(self, run: ReadRun, hashed: Sequence[bool]) -> None:
        self.digests: dict[int, bytes] = {}
        """By number of the chunk, once all of it is copied."""
        self._chunks, self._hashed = run.chunks, hashed
        self._number, self._at, self._digest = 0, 0, new_digest()

    def take(self, piece: memoryview) -> None:
        """Take the next bytes of the run."""
        while piece:
            chunk = self._chunks[self._number]
            data, piece = piece[: chunk.bytes - self._at], piece[chunk.bytes - self._at :]
            self._at += len(data)
            if self._hashed[self._number]:
                self._digest.update(data)
            if self._at == chunk.bytes:
                if self._hashed[self._number]:
                    self.digests[self._number] = self._digest.digest()
                    self._digest.reset()
                self._number, self._at = self._number + 1, 0


@contextmanager
def pack_expected(run: ReadRun, stored: Stored) -> Iterator[None]:
    """Turn a missing pack into `CorruptError`: the manifest names it."""
    try:
        yield
    except MissingError as missing:
        fqn = run.chunks[0].piece.tensor.fqn
        raise CorruptError(
            f"{fqn}: {stored.url}: the pack is missing; the manifest names it. Read another copy"
        ) from missing


def read_through(run: ReadRun, stored: Stored, targets: Sequence[Target], buffer: memoryview) -> memoryview:
    """Read a run into a buffer, check and place every chunk, and return the view of its bytes."""
    with pack_expected(run, stored):
        data = read_range(stored.files, stored.key, run.start, run.stop, buffer)
    try:
        verify_and_place_all(run, data, stored.url, targets)
    except CorruptError:
        return _read_again(run, stored, targets, buffer)
    return data


def _read_again(run: ReadRun, stored: Stored, targets: Sequence[Target], buffer: memoryview) -> memoryview:
    """Read a run whose first read failed its check into a buffer; check and place it, and return the view of its bytes.

    Raises:
        CorruptError: A chunk differs from what was saved, this time too.
    """
    with pack_expected(run, stored):
        data = read_range(stored.files, stored.key, run.start, run.stop, buffer)
    verify_and_place_all(run, data, stored.url, targets)
    logger.warning(
        "%s: bytes %d–%d were wrong when they were read first, and right when they were read again: memory or network "
        "of this machine changes bytes",
        stored.url,
        run.start,
        run.stop,
    )
    return data


def verify_and_place_all(run: ReadRun, data: memoryview, where: str, targets: Sequence[Target]) -> None:
    """Check every chunk of a run and copy its wanted parts to the targets.

    Raises:
        CorruptError: A chunk differs from what was saved; earlier chunks may be placed.
    """
    assert len(data) >= run.stop - run.start, "all of a run has been read"
    tiny: list[tuple[Target, Box, tuple[int, int]]] = []
    for chunk in run.chunks:
        start = chunk.offset - run.start
        stop = start + chunk.bytes
        raw, part = data[start:stop], chunk.parts[0]
        if chunk.bytes <= TINY_BYTES_MAX and len(chunk.parts) == 1 and _is_all(chunk, part):
            require_digest(chunk, raw, where)
            tiny.append((targets[part.wanted_number], part.box, (start, stop)))
        else:
            verify_and_place(chunk, raw, where, targets)
    if tiny:
        tiny_targets, boxes, ranges = zip(*tiny, strict=True)
        tiny_targets[0].place_together(tiny_targets, boxes, data, ranges)


def _is_all(chunk: ChunkRead, part: Part) -> bool:
    """Return whether a part is the whole of a piece with a single chunk, decided by identity alone: it is cheap."""
    return part.box is chunk.piece.region and part.box is part.source_box and chunk.bytes == chunk.piece.bytes


def verify_and_place(chunk: ChunkRead, raw: memoryview, where: str, targets: Sequence[Target]) -> None:
    """Check a chunk and copy its wanted parts to the targets."""
    require_digest(chunk, raw, where)
    itemsize = chunk.piece.tensor.itemsize
    for part in chunk.parts:
        source = raw[part.source_start : part.source_start + part.source_box.numel * itemsize]
        targets[part.wanted_number].place(part.box, source, part.source_box)


def require_digest(chunk: ChunkRead, raw: memoryview, where: str) -> None:
    """Require that the bytes of a chunk are those that were saved.

    Raises:
        CorruptError: They are not; the message names tensor, file and byte range.
    """
    expected = chunk.expected
    # A foreign checkpoint that is read in place has no digests.
    if expected and (actual := digest_of(raw)) != expected:
        raise CorruptError(
            f"{chunk.piece.tensor.fqn}: {where}: bytes "
            f"{chunk.offset}–{chunk.offset + chunk.bytes} hash to {actual.hex()}; expected "
            f"{expected.hex()}. Read another copy or another step"
        )
