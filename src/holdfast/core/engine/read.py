"""Executes a load plan: several reads in flight, every chunk decoded, checked and placed.

What is read through a buffer passes `verify_and_place_all`: bytes of this rank's own reads, and bytes that another rank
has sent. A large chunk may be read straight into its target, and is checked there.
Bytes that fail their check are read once more: a network may flip a bit on the way, and then the object is whole. What
the second read finds decides.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Self

from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.framework import Target
from holdfast.base.ports.packs import Packs, Stored
from holdfast.base.ports.ranges import read_range, view_for_range
from holdfast.base.types.plan import ChunkRead, LoadPlan, ReadRun, give_slot_bytes
from holdfast.core.engine.buffers import BufferPool
from holdfast.core.engine.decoding.decode import Decoder
from holdfast.core.engine.memory_limits import ranks_on_host
from holdfast.core.engine.other_places import read_elsewhere
from holdfast.core.engine.parallel_map import WorkerThreads
from holdfast.core.engine.placing import (
    Placing,
    pack_expected,
    require_digest,
    verify_and_place,
    verify_and_place_all,
)
from holdfast.core.format.digest import new_digest
from holdfast.errors import CorruptError, InvalidError, UnavailableError
from holdfast.settings import MIB, Settings

logger = logging.getLogger(__name__)

_PART_BYTES_MAX = MIB
"""Bytes read from storage before they are checked and placed. One buffer of this size is filled again and again, so it
stays in the processor's cache. docs/decisions/036-reading-packs.md has the measurements."""


class ReadPool:
    """Threads and buffers that reads share, from the start of a block to its end.

    A caller that executes several plans keeps one. The end of a thread runs callbacks of weak references, in which
    Python discards a Ctrl-C.
    """

    def __init__(self, count: int, buffer_bytes: int) -> None:
        """Allocate `count` buffers for runs that need at most `buffer_bytes` with their bases."""
        self.buffers = BufferPool(count, buffer_bytes)
        self._threads = WorkerThreads(count, "holdfast-read")

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
        self._threads.stop()


def execute(
    plan: LoadPlan,
    packs: Packs,
    targets: Sequence[Target],
    settings: Settings,
    codecs: Codecs,
    pool: ReadPool | None = None,
    moved: Callable[[int], None] | None = None,
) -> Mapping[str, int]:
    """Read, decode, check and place everything a plan lists; return the bytes read, by URL of the root.

    Args:
        plan: What to read.
        packs: Where each pack is stored.
        targets: Where to place, by wanted number.
        settings: Reads in flight, and the size from which on chunks are read straight into targets.
        codecs: What decodes coded chunks.
        pool: What to read with, for a caller that executes several plans. None: a new one.
        moved: Called with the byte count of each run once it is read, on any thread.
    Raises:
        CorruptError: A chunk differs from what was saved; the message names tensor, pack and byte range. Targets may
            hold bytes that failed their check.
        UnavailableError: The store failed.
    """
    placing = Placing(packs, targets, Decoder(codecs))
    execute_placing(plan, placing, settings, pool, moved)
    return placing.sources(plan.runs)


def execute_placing(
    plan: LoadPlan,
    placing: Placing,
    settings: Settings,
    pool: ReadPool | None = None,
    moved: Callable[[int], None] | None = None,
) -> None:
    """As `execute`, for a caller that has placed a part of the load already."""
    if not plan.runs:
        return
    if pool is None:
        count = min(settings._tuning.windows_in_flight, len(plan.runs))
        with ReadPool(count, max(map(_buffer_bytes, plan.runs))) as pool:
            execute_placing(plan, placing, settings, pool, moved)
        return
    buffers = pool.buffers
    # Taken on the threads of the pool alone, which no handler interrupts.
    copying = threading.Semaphore(max(len(os.sched_getaffinity(0)) // ranks_on_host(), 1))

    def read(run: ReadRun) -> None:
        with buffers.lent() as buffer:
            stored = placing.packs(run.pack)
            if not run.bases:
                _RunRead(run, stored, placing, settings._tuning.zero_copy_bytes_min, copying).execute(buffer)
            elif stored.files.traits.read_alignment > 1:
                for part in _parts_of(run, _PART_BYTES_MAX):
                    read_through(part, placing, buffer)
            else:
                read_through(run, placing, buffer)  # Each request takes its time.
        if moved is not None:
            moved(run.bytes)

    pool.execute(read, plan.runs)


def _buffer_bytes(run: ReadRun) -> int:
    return sum(give_slot_bytes(part.stop - part.start) for part in (run, *run.bases))


@dataclass(slots=True)
class _RunRead:
    """Reads one run without bases: cached bytes straight into the targets, the rest through a buffer."""

    _run: ReadRun
    _stored: Stored
    _placing: Placing
    _zero_copy_bytes_min: int
    _copying: threading.Semaphore

    def execute(self, buffer: memoryview) -> None:
        """Read, check and place every chunk."""
        run = self._run
        homes = [self._home(chunk) for chunk in run.chunks]
        placed = 0
        try:
            if any(homes):
                # With more copies at once than cores, each evicts the others' bytes from the cache before they are
                # hashed.
                with self._copying, pack_expected(run, self._stored):
                    placed = self._place_cached(homes, buffer)
            if placed < len(run.chunks):
                self._place_rest(ReadRun.of(run.pack, run.chunks[placed:]), homes[placed:], buffer)
        except (CorruptError, UnavailableError) as error:
            read_elsewhere(run, self._placing, buffer, error)

    def _place_rest(self, rest: ReadRun, homes: Sequence[list[memoryview]], buffer: memoryview) -> None:
        """Read the rest of the run, a few chunks at a time; check and place them.

        They go through the front of the buffer. A large chunk goes straight into its target, unless the store has rules
        for the memory that it reads into.
        """
        parts = list(_parts_of(rest, _PART_BYTES_MAX))
        ranges = [(part.start, part.stop) for part in parts]
        alignment = self._stored.files.traits.read_alignment
        buffers = [view_for_range(buffer, start, stop, alignment) for start, stop in ranges]
        if alignment == 1:
            _read_into_homes(parts, homes, buffers)
        failures: list[Exception] = []
        came: set[int] = set()
        doubtful: list[tuple[ReadRun, bool]] = []

        def place_part(number: int, data: memoryview) -> None:
            came.add(number)
            part, is_placed = parts[number], data.obj is buffers[number].obj is not buffer.obj
            try:
                if is_placed:
                    require_digest(part.chunks[0], data, self._stored.url)
                else:
                    verify_and_place_all(part, [data], self._placing)
            except CorruptError:
                # Not read again in here: this read may hold the only request that the store allows.
                doubtful.append((part, is_placed))
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
        if len(came) != len(parts):
            # A store of a user that ignores `on_range`: its bytes would be neither checked nor placed.
            raise InvalidError(
                f"{self._stored.url}: read_into gave {len(came)} of {len(parts)} ranges to on_range; expected every "
                "one. Run holdfast.testing.store.StoreSuite on this store"
            )
        for part, is_placed in doubtful:
            _read_again(part, self._placing, buffer, in_target=is_placed)

    def _home(self, chunk: ChunkRead) -> list[memoryview]:
        """Return the memory of targets that holds all of a chunk, in its order; empty if a buffer is needed.

        A chunk of a coded piece needs one: what is stored is not what is placed.
        """
        if chunk.bytes < self._zero_copy_bytes_min or chunk.piece.coding is not None:
            return []
        home, at = [], 0
        for part in chunk.parts:
            memory = None
            if part.source_start == at and part.box == part.source_box:
                memory = self._placing.targets[part.wanted_number].memory(part.box)
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
                raw = buffer[chunk.offset - run.start :][: chunk.bytes]
                verify_and_place(chunk, raw, self._stored.url, self._placing.targets)
        return len(run.chunks)


def _read_into_homes(parts: Sequence[ReadRun], homes: Sequence[list[memoryview]], buffers: list[memoryview]) -> None:
    """Replace the buffer of each part that is one chunk by the memory of the target that holds all of it.

    Args:
        parts: Parts of a run.
        homes: The memory of targets for each chunk of the run.
        buffers: The buffer of each part.
    """
    number = 0
    for at, part in enumerate(parts):
        if len(part.chunks) == len(homes[number]) == 1:
            buffers[at] = homes[number][0]
        number += len(part.chunks)


def _parts_of(run: ReadRun, bytes_max: int) -> Iterator[ReadRun]:
    """Yield a run in parts of at most `bytes_max` bytes without bases, or of one unit."""
    chunks, first = run.chunks, 0
    for number, chunk in enumerate(chunks):
        length = chunk.bytes if chunk.piece.coding is None else chunk.stored_bytes
        if (
            number > first
            and chunk.offset + length - chunks[first].offset > bytes_max
            and (chunk.base is None or chunk.base is not chunks[number - 1].base)
        ):
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


def read_through(run: ReadRun, placing: Placing, buffer: memoryview) -> list[memoryview]:
    """Read a run with its bases into a buffer; decode, check and place every chunk.

    Args:
        run: The run.
        placing: Where its chunks come from and go to.
        buffer: Page-aligned, with `give_slot_bytes` for the run and for each base.
    Returns:
        The views of its bytes, as stored, and of those of each base.
    """
    try:
        data = _read(run, placing, buffer)
        try:
            verify_and_place_all(run, data, placing)
        except CorruptError:
            return _read_again(run, placing, buffer)
        return data
    except (CorruptError, UnavailableError) as error:
        return read_elsewhere(run, placing, buffer, error)


def _read(run: ReadRun, placing: Placing, buffer: memoryview) -> list[memoryview]:
    """Read a run and its bases into a buffer; return a view for each."""
    views, at = [], 0
    for part in (run, *run.bases):
        stored = placing.packs(part.pack)
        slot = buffer[at:] if not run.bases else buffer[at : at + give_slot_bytes(part.stop - part.start)]
        with pack_expected(part, stored):
            views.append(read_range(stored.files, stored.key, part.start, part.stop, slot))
        at += len(slot)
    return views


def _read_again(run: ReadRun, placing: Placing, buffer: memoryview, *, in_target: bool = False) -> list[memoryview]:
    """Read a run whose first read failed its check into a buffer; check and place it, and return the views.

    Args:
        run, placing, buffer: As for `read_through`.
        in_target: Whether the first read went straight into a target. Another thread may have filled that memory for
            another target meanwhile.
    Raises:
        CorruptError: A chunk differs from what was saved, this time too.
    """
    data = _read(run, placing, buffer)
    verify_and_place_all(run, data, placing)
    logger.warning(
        "%s: bytes %d–%d were wrong when they were read first, and right when they were read again: memory or network "
        "of this machine changes bytes%s",
        placing.packs(run.pack).url,
        run.start,
        run.stop,
        ", or tensors of the state share memory" if in_target else "",
    )
    return data
