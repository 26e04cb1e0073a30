"""Carries out a load plan: several reads in flight, every chunk checked."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from holdfast.engine.buffers import BufferPool
from holdfast.engine.memory_limits import ranks_on_host
from holdfast.errors import CorruptError, MissingError
from holdfast.format.digest import digest_of, new_digest
from holdfast.geometry.box import Box
from holdfast.geometry.chunking import TINY_BYTES_MAX
from holdfast.ports.framework import Target
from holdfast.ports.store import Packs, Stored
from holdfast.settings import MIB, PAGE_BYTES, Settings
from holdfast.types.plan import ChunkRead, LoadPlan, Part, ReadRun

_SETTLED_BYTES = MIB
"""What is read past the page cache before it is settled. Memory that is filled again and again stays in the processor's
cache (docs/architecture.md, Amendments, has the measurements)."""


def execute(
    plan: LoadPlan,
    packs: Packs,
    targets: Sequence[Target],
    settings: Settings,
    buffers: BufferPool | None = None,
    moved: Callable[[int], None] | None = None,
) -> None:
    """Read, check and place everything a plan lists.

    Args:
        plan: What to read.
        packs: Where from.
        targets: Where to, by wanted number.
        settings: Windows in flight, and from which size on chunks are read straight into targets.
        buffers: What to read through, for who carries out one plan after the other: one for each read in
            flight, each as long as the longest read and two pages. None: new ones.
        moved: Told how many bytes were read, run by run, on any thread.
    Raises:
        CorruptError: A chunk is not what was saved; the message names tensor, pack and byte range. Targets may hold
            bytes that failed their check.
        UnavailableError: The store failed.
    """
    if not plan.runs:
        return
    count = min(settings.windows_in_flight, len(plan.runs))
    if buffers is None:
        buffers = BufferPool(count, max(run.stop - run.start for run in plan.runs) + 2 * PAGE_BYTES)
    copying = threading.Semaphore(max(len(os.sched_getaffinity(0)) // ranks_on_host(), 1))

    def read(run: ReadRun, buffers: BufferPool = buffers) -> None:
        with buffers.lent() as buffer:
            _RunRead(run, packs(run.pack), targets, settings._tuning.zero_copy_bytes_min, copying).execute(buffer)
        if moved is not None:
            moved(run.stop - run.start)

    with ThreadPoolExecutor(count, thread_name_prefix="holdfast-read") as threads:
        reads = [threads.submit(read, run) for run in plan.runs]
        try:
            for each in reads:
                each.result()
        except BaseException:
            threads.shutdown(wait=True, cancel_futures=True)
            raise


class _RunRead:
    """One run on its way: straight into the targets what lies in memory already, the rest through a buffer."""

    def __init__(
        self,
        run: ReadRun,
        stored: Stored,
        targets: Sequence[Target],
        zero_copy_bytes_min: int,
        copying: threading.Semaphore,
    ) -> None:
        self._run, self._stored, self._targets = run, stored, targets
        self._in_place_bytes_min, self._copying = zero_copy_bytes_min, copying

    def execute(self, buffer: memoryview) -> None:
        """Read, check and place every chunk."""
        run = self._run
        homes = [self._home(chunk) for chunk in run.chunks]
        arrived = 0
        if any(homes):
            # More copies at once than cores push each other's bytes out of the cache before they are hashed.
            with self._copying, pack_expected(run, self._stored):
                arrived = self._take_cached(homes, buffer)
        if arrived < len(run.chunks):
            self._settle_rest(ReadRun.of(run.pack, run.chunks[arrived:]), buffer)

    def _settle_rest(self, rest: ReadRun, buffer: memoryview) -> None:
        """Read what is left of the run through the front of the buffer, a few chunks at a time, and settle it."""
        parts = list(_parted(rest, _SETTLED_BYTES))
        ranges = [(part.start, part.stop) for part in parts]
        unsettled: list[Exception] = []

        def settle_part(number: int, data: memoryview) -> None:
            try:
                verify_and_place_all(parts[number], data, self._stored.url, self._targets)
            except Exception as error:
                unsettled.append(error)
                raise

        try:
            with pack_expected(rest, self._stored):
                self._stored.files.get_ranges(self._stored.key, ranges, [buffer] * len(ranges), settle_part)
        except Exception:
            if unsettled:
                # A target's own error is none of the store's, whatever the store made of it.
                raise unsettled[0] from None
            raise

    def _home(self, chunk: ChunkRead) -> list[memoryview]:
        """Return the targets' own memory for all of a chunk, in its order; empty where a buffer must come between."""
        if chunk.bytes < self._in_place_bytes_min:
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

    def _take_cached(self, homes: Sequence[list[memoryview]], buffer: memoryview) -> int:
        """Settle the chunks at the front of the run that need no wait for storage; return how many these are."""
        run = self._run
        buffers: list[memoryview] = []
        apart = run.start  # What has no home in the targets goes to its place in the buffer, neighbours in one read.
        for chunk, home in zip(run.chunks, homes, strict=True):
            if home:
                buffers += home
                apart = chunk.offset + chunk.bytes
                continue
            if chunk.offset > apart:
                buffers.pop()
            buffers.append(buffer[apart - run.start : chunk.offset + chunk.bytes - run.start])
        hashing = _Hashing(run, [bool(home and chunk.expected) for chunk, home in zip(run.chunks, homes, strict=True)])
        stop = run.start + self._stored.files.get_cached(self._stored.key, run.start, buffers, hashing.take)
        for number, (chunk, home) in enumerate(zip(run.chunks, homes, strict=True)):
            if chunk.offset + chunk.bytes > stop:
                return number
            if home:
                # Threads that fill targets that overlap may have been at these bytes too: the buffer's copy decides.
                if chunk.expected and hashing.digests[number] != chunk.expected:
                    return number
            else:
                verify_and_place(
                    chunk, buffer[chunk.offset - run.start :][: chunk.bytes], self._stored.url, self._targets
                )
        return len(run.chunks)


def _parted(run: ReadRun, bytes_max: int) -> Iterator[ReadRun]:
    """Yield a run in parts, as many chunks in each as fit."""
    chunks, first = run.chunks, 0
    for number, chunk in enumerate(chunks):
        if number > first and chunk.offset + chunk.bytes - chunks[first].offset > bytes_max:
            yield ReadRun.of(run.pack, chunks[first:number])
            first = number
    yield ReadRun.of(run.pack, chunks[first:])


class _Hashing:
    """Digests of the chunks of a run that are read where they belong, fed with its bytes as they come."""

    def __init__(self, run: ReadRun, hashed: Sequence[bool]) -> None:
        self.digests: dict[int, bytes] = {}
        """By number of the chunk, once it is there in full."""
        self._chunks, self._hashed = run.chunks, hashed
        self._number, self._at, self._digest = 0, 0, new_digest()

    def take(self, piece: memoryview) -> None:
        """Take the next bytes of the run."""
        while piece:
            chunk = self._chunks[self._number]
            own, piece = piece[: chunk.bytes - self._at], piece[chunk.bytes - self._at :]
            self._at += len(own)
            if self._hashed[self._number]:
                self._digest.update(own)
            if self._at == chunk.bytes:
                if self._hashed[self._number]:
                    self.digests[self._number] = self._digest.digest()
                    self._digest.reset()
                self._number, self._at = self._number + 1, 0


@contextmanager
def pack_expected(run: ReadRun, stored: Stored) -> Iterator[None]:
    """Say of a pack that is missing that the manifest names it."""
    try:
        yield
    except MissingError as missing:
        fqn = run.chunks[0].piece.tensor.fqn
        raise CorruptError(
            f"{fqn}: {stored.url}: the pack is missing; the manifest names it. Read another copy"
        ) from missing


def read_through(run: ReadRun, stored: Stored, targets: Sequence[Target], buffer: memoryview) -> memoryview:
    """Read a run into a buffer, check and place every chunk, and return where its bytes lie in the buffer."""
    with pack_expected(run, stored):
        (data,) = stored.files.get_ranges(stored.key, [(run.start, run.stop)], [buffer])
    verify_and_place_all(run, data, stored.url, targets)
    return data


def verify_and_place_all(run: ReadRun, data: memoryview, where: str, targets: Sequence[Target]) -> None:
    """Check every chunk of a run and copy what is wanted of it.

    Raises:
        CorruptError: A chunk is not what was saved; what came before it may be placed.
    """
    assert len(data) >= run.stop - run.start, "all of a run has been read"
    tiny: list[tuple[Target, Box, tuple[int, int]]] = []
    for chunk in run.chunks:
        start = chunk.offset - run.start
        stop = start + chunk.bytes
        raw, part = data[start:stop], chunk.parts[0]
        if chunk.bytes <= TINY_BYTES_MAX and len(chunk.parts) == 1 and _is_all(chunk, part):
            _require_digest(chunk, raw, where)
            tiny.append((targets[part.wanted_number], part.box, (start, stop)))
        else:
            verify_and_place(chunk, raw, where, targets)
    if tiny:
        own, boxes, ranges = zip(*tiny, strict=True)
        own[0].place_together(own, boxes, data, ranges)


def _is_all(chunk: ChunkRead, part: Part) -> bool:
    """Return whether a part is known at a glance to be the whole piece, of which the chunk is the only one."""
    return part.box is chunk.piece.region and part.box is part.source_box and chunk.bytes == chunk.piece.bytes


def verify_and_place(chunk: ChunkRead, raw: memoryview, where: str, targets: Sequence[Target]) -> None:
    """Check a chunk and copy what is wanted of it."""
    _require_digest(chunk, raw, where)
    itemsize = chunk.piece.tensor.itemsize
    for part in chunk.parts:
        source = raw[part.source_start : part.source_start + part.source_box.numel * itemsize]
        targets[part.wanted_number].place(part.box, source, part.source_box)


def _require_digest(chunk: ChunkRead, raw: memoryview, where: str) -> None:
    expected = chunk.expected
    # Another system's checkpoint that is read in place says nothing of its chunks.
    if expected and (found := digest_of(raw)) != expected:
        raise CorruptError(
            f"{chunk.piece.tensor.fqn}: {where}: bytes "
            f"{chunk.offset}–{chunk.offset + chunk.bytes} hash to {found.hex()}; expected "
            f"{expected.hex()}. Read another copy or another step"
        )
