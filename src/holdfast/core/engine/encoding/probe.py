"""Codes a few chunks of a raw pack while it is written, to learn what coding would gain, and discards the result."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping

from holdfast.base.types.coding import Kind, Sampling
from holdfast.base.types.plan import PackItem, PlannedPack
from holdfast.core.engine.encoding.meter import SaveMeter

Prepare = Callable[[PackItem, memoryview], Callable[[], tuple[str, int]]]
"""Takes a part of a piece; returns what codes it as an encoder does a chunk, and returns codec and stored bytes."""


class ChunkProbe:
    """The samples of one save. The threads that write windows call it, each with a window that is about to be written.

    A chunk often spans two windows, so a sample is the part of a piece that lies in one.
    """

    def __init__(
        self, meter: SaveMeter, kinds: Mapping[str, Kind], samplings: Mapping[Kind, Sampling], prepare: Prepare
    ) -> None:
        """Take no sample yet.

        Args:
            meter: Counts them.
            kinds: The kind of each tensor that may be coded, by FQN.
            samplings: The kinds to measure, and where.
            prepare: Prepares to code a sample, outside the measured time.
        """
        self._meter, self._kinds, self._samplings, self._prepare = meter, kinds, samplings, prepare
        # Taken on the threads that write, which no handler interrupts.
        self._lock = threading.Lock()
        self._seen = dict.fromkeys(samplings, 0)
        self._taken = dict.fromkeys(samplings, 0)

    def of(self, pack: PlannedPack) -> PackProbe | None:
        """Return what looks at the windows of a pack; None if nothing in it is measured."""
        items = [item for item in pack.plan.items if self._kinds.get(item.tensor.fqn) in self._samplings]
        return PackProbe(self, len(pack.header), items) if items and not pack.plan.is_coded else None

    def look(self, item: PackItem, data: memoryview) -> None:
        """Code a part of a piece, if a sample is due there."""
        kind = self._kinds[item.tensor.fqn]
        sampling = self._samplings[kind]
        with self._lock:
            self._seen[kind] += len(data)
            due = sampling.first_bytes + self._taken[kind] * sampling.every_bytes
            if self._taken[kind] >= sampling.count or self._seen[kind] <= due or len(data) < sampling.bytes_min:
                return
            self._taken[kind] += 1
        data, begin = data[: sampling.bytes_max], self._meter.thread_seconds()
        sample = memoryview(bytearray(data))
        encode = self._prepare(item, sample)
        # The first run on a thread allocates what codecs work in. An encoder's threads do that once.
        encode()
        start = self._meter.thread_seconds()
        # Copied again, as an encoder copies each chunk: so both measure the same work.
        sample[:] = data
        codec, stored_bytes = encode()
        stop = self._meter.thread_seconds()
        self._meter.note_sample(item.tensor.fqn, codec, len(sample), stored_bytes, stop - start, stop - begin)


class PackProbe:
    """Finds the pieces in the windows of one pack."""

    def __init__(self, probe: ChunkProbe, header_bytes: int, items: list[PackItem]) -> None:
        self._probe, self._items = probe, items
        self._starts = [header_bytes + item.data_offset for item in items]
        self._stops = [start + item.bytes for start, item in zip(self._starts, items, strict=True)]

    def look(self, offset: int, window: memoryview) -> None:
        """Look at the pieces in a window.

        Args:
            offset: Bytes from the start of the pack to the window.
            window: Its bytes; they are only read.
        """
        for number in range(bisect_left(self._stops, offset + 1), len(self._items)):
            start, stop = self._starts[number], self._stops[number]
            if start >= offset + len(window):
                return
            self._probe.look(self._items[number], window[max(start - offset, 0) : stop - offset])
