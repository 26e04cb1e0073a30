"""Reads of packs from nodes that may be slow. Then the rest of the group is asked too, and the first answer counts.

A node is slow if the bytes that the node owes last three times as long as the fastest other node would need, and 0.3 s
more. For the next ten seconds, and until the reads that were given up end, packs of the node are read through parity.
A store that reads one node alone reads one window through parity, and knows the paces of the group from then on.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, as_completed, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise

from holdfast.base.clock import Clock
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.ranges import check_ranges, runs_of
from holdfast.base.ports.readable import Buffers, ByteRanges, OnRange
from holdfast.base.ports.store import Store
from holdfast.core.engine.buffers import allocate_aligned, copy_bytes
from holdfast.core.engine.parallel_map import WorkerThreads
from holdfast.errors import CheckpointError, shown_bytes
from holdfast.settings import KIB, MIB
from holdfast.stored.peers.parity_files import WINDOW_BYTES

logger = logging.getLogger(__name__)

_TIMES_AS_LONG, _MORE_SECONDS, _SLOW_SECONDS = 3, 0.3, 10.0

_FIRST_PACE = 16 * MIB
"""Bytes a second that are expected of a node while no other node was read."""

_LOOK_SECONDS = 0.1
"""Time between two looks whether a node is slow by now: the pace of another node may have become known."""

_MEASURED_BYTES_MIN = 256 * KIB
"""Fewer bytes take the time of a request, whatever the pace."""

_KEPT = 0.9
"""Weight of the earlier reads of a node against the newest."""


@dataclass(slots=True)
class _Pace:
    """The reads of one node."""

    owed_bytes: int = 0
    bytes: float = 0.0
    seconds: float = 0.0
    """Time in which the node owed these bytes. Seconds of several reads count once."""
    measured_until: float = 0.0
    slow_until: float = 0.0
    given_up: list[Future[None]] = field(default_factory=list)


class Paces:
    """How fast the nodes send packs, and which are slow now. Any thread may make any call."""

    def __init__(self, url: str, clock: Clock) -> None:
        """Know of no node.

        Args:
            url: Names the store of all nodes, for people.
            clock: Measures.
        """
        self.url, self.clock, self._scratch = url, clock, threading.local()
        self._nodes, self._lock = defaultdict[str, _Pace](_Pace), threading.Lock()
        self._may_compare = True
        self.read_bytes = Counter[str]()
        """Bytes of packs that were read, by place."""

    def count(self, place: str, count: int) -> int:
        """Count bytes that came from a place; return the bytes of this call."""
        with self._lock:
            self.read_bytes[place] += count
        return count

    def begin(self, name: str, count: int) -> int:
        """Note that bytes are asked of a node; return the bytes that the node owes now."""
        with self._lock:
            self._nodes[name].owed_bytes += count
            return self._nodes[name].owed_bytes

    def slow_after(self, name: str, owed_bytes: int) -> float:
        """Return the seconds after which a node that owes so many bytes is slow, by the paces of the others now."""
        with self._lock:
            others = [each for other, each in self._nodes.items() if other != name and each.seconds]
            best = max((each.bytes / each.seconds for each in others), default=_FIRST_PACE)
            return _TIMES_AS_LONG * owed_bytes / best + _MORE_SECONDS

    def is_first_alone(self, name: str, count: int) -> bool:
        """Return, once, whether so many bytes are asked again of the only node that was read: no pace compares."""
        with self._lock:
            read = {each for each, pace in self._nodes.items() if pace.seconds or pace.owed_bytes}
            is_alone = self._may_compare and read == {name} and count >= _MEASURED_BYTES_MIN
            self._may_compare = self._may_compare and not is_alone and read <= {name}
            return is_alone

    def end(self, name: str, count: int, begun: float, *, came: bool) -> None:
        """Note the end of a read that began at some second of the clock."""
        with self._lock:
            pace, now = self._nodes[name], self.clock.monotonic_seconds()
            pace.owed_bytes -= count
            if came and count >= _MEASURED_BYTES_MIN:
                pace.bytes = pace.bytes * _KEPT + count
                pace.seconds = pace.seconds * _KEPT + now - max(begun, pace.measured_until)
                pace.measured_until = now

    def give_up(self, name: str, read: Future[None], count: int, seconds: float) -> None:
        """Take a node for slow: a read of so many bytes has not ended after these seconds."""
        was_slow = self.is_slow(name)
        with self._lock:
            self._nodes[name].given_up.append(read)
            self._nodes[name].slow_until = self.clock.monotonic_seconds() + _SLOW_SECONDS
        if not was_slow:
            text = (
                "%s: node %s is slow: %s have not come after %.1f s. Packs of the node are read through parity for now"
            )
            logger.warning(text, self.url, name, shown_bytes(count), seconds)

    def is_slow(self, name: str) -> bool:
        """Return whether the packs of a node are to be read through parity at once."""
        with self._lock:
            pace = self._nodes[name]
            pace.given_up = [read for read in pace.given_up if not read.done()]
            return bool(pace.given_up) or self.clock.monotonic_seconds() < pace.slow_until

    def read_by_windows(
        self,
        ranges: ByteRanges,
        buffers: Buffers,
        on_range: OnRange | None,
        read: Callable[[ByteRanges, memoryview], memoryview],
    ) -> None:
        """Carry out `read_into` by reads of at most one window into memory of this thread.

        Args:
            ranges, buffers, on_range: As for `read_into`; the ranges are within the object.
            read: Takes ranges and memory; returns the memory that begins with the bytes of the ranges.
        """
        for window in _windows(ranges):
            wanted = [(start, stop) for _, start, stop in window]
            memory = read(wanted, self._scratch.__dict__.pop("memory", None) or allocate_aligned(WINDOW_BYTES))
            for (number, start, stop), part in zip(window, _cut(memory, wanted), strict=True):
                buffer, (first, last) = buffers[number], ranges[number]
                if on_range is not None and (start, stop) == (first, last):
                    on_range(number, part)
                    continue
                if part:  # An empty buffer cannot be cast.
                    copy_bytes(part, buffer.cast("B")[start - first : stop - first])
                if on_range is not None and stop == last:
                    on_range(number, buffer)
            self._scratch.memory = memory  # Not after an error: a read that was given up may go on.


class MeasuredNode(ForwardingStore):
    """A node that takes part in a rebuild, as a store that tells the pace of the node."""

    def __init__(self, node: Store, name: str, paces: Paces) -> None:
        """Wrap a node."""
        super().__init__(node)
        self._name, self._paces = name, paces

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        """Read byte ranges of one object."""
        count, begun, came = sum(stop - start for start, stop in ranges), self._paces.clock.monotonic_seconds(), False
        self._paces.begin(self._name, count)
        try:
            self._inner.read_into(key, ranges, buffers, on_range)
            came = True
        finally:
            self._paces.end(self._name, count, begun, came=came)


class HedgedNode(ForwardingStore):
    """A node whose packs can be read through parity too, as a store that does not wait long for the node."""

    def __init__(
        self, node: Store, name: str, paces: Paces, rebuild: Callable[[str, int, int, memoryview], object] | None
    ) -> None:
        """Wrap a node for one read.

        Args:
            node: The node.
            name: The name of the node.
            paces: The paces of all nodes.
            rebuild: Fills memory with a range of a pack of the node, through parity. Takes key, start, stop and memory.
                None: nothing has parity, and the node is waited for.
        """
        super().__init__(node)
        self._name, self._paces, self._rebuild = name, paces, rebuild

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        """Read byte ranges of a pack, each into memory of this store first: a read that was given up goes on."""
        check_ranges(f"{self.url}/{key}", max((stop for _, stop in ranges), default=0), ranges, buffers)
        self._paces.read_by_windows(ranges, buffers, on_range, partial(self._read, key))

    def _read(self, key: str, ranges: ByteRanges, memory: memoryview) -> memoryview:
        """Return memory that begins with the bytes of some ranges: the given memory, or another one."""
        count, paces = sum(stop - start for start, stop in ranges), self._paces

        def direct(memory: memoryview, begun: float) -> None:
            came = False
            try:
                self._inner.read_into(key, ranges, _cut(memory, ranges))
                came = True
            finally:
                paces.end(self._name, count, begun, came=came)

        def through_parity(memory: memoryview) -> None:
            assert self._rebuild is not None, "asked for only then"
            rebuild_runs(partial(self._rebuild, key), ranges, memory)

        node, parity = f"node {self._name}", f"parity of node {self._name}"
        if self._rebuild is not None and (paces.is_slow(self._name) or paces.is_first_alone(self._name, count)):
            with suppress(CheckpointError):
                through_parity(memory)
                paces.count(parity, count)
                return memory
        threads, owed_bytes, waited = WorkerThreads(2, "holdfast-hedge"), paces.begin(self._name, count), 0.0
        try:
            asked = threads.submit(direct, memory, paces.clock.monotonic_seconds())
            reads = {asked: memory}
            while not asked.done() and (left := paces.slow_after(self._name, owed_bytes) - waited) > 0:
                wait(reads, None if self._rebuild is None else min(left, _LOOK_SECONDS))
                waited += min(left, _LOOK_SECONDS)
            if not asked.done():
                paces.give_up(self._name, asked, count, waited)
                other = allocate_aligned(WINDOW_BYTES)
                reads[threads.submit(through_parity, other)] = other
        finally:
            threads.end()
        for read in as_completed(reads):
            if read.exception() is None:
                paces.count(node if read is asked else parity, count)
                return reads[read]
        asked.result()
        raise AssertionError("both reads have failed")


def rebuild_runs(rebuild: Callable[[int, int, memoryview], object], ranges: ByteRanges, memory: memoryview) -> None:
    """Fill memory with the bytes of some ranges; neighbours are rebuilt at once."""
    at = 0
    for first, last in runs_of(ranges, WINDOW_BYTES):
        start, stop = ranges[first][0], ranges[last - 1][1]
        rebuild(start, stop, memory[at : at + stop - start])
        at += stop - start


def _windows(ranges: ByteRanges) -> Iterator[list[tuple[int, int, int]]]:
    """Yield parts of ranges, together at most one window: number of the range, start and stop."""
    window, total_bytes = list[tuple[int, int, int]](), 0
    for number, (start, stop) in enumerate(ranges):
        for at in range(start, max(stop, start + 1), WINDOW_BYTES):
            end = min(at + WINDOW_BYTES, stop)
            if total_bytes + end - at > WINDOW_BYTES:
                yield window
                window, total_bytes = [], 0
            window.append((number, at, end))
            total_bytes += end - at
    yield window


def _cut(memory: memoryview, ranges: ByteRanges) -> list[memoryview]:
    ends = accumulate((stop - start for start, stop in ranges), initial=0)
    return [memory[first:last] for first, last in pairwise(ends)]
