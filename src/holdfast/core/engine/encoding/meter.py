"""Measures one save on one rank: how fast the store took bytes, and what coding cost and gained by kind of tensor."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from holdfast.base.clock import Clock
from holdfast.base.types.coding import Coded, Kind, Measured


class _Sums:
    """What was coded of one kind so far."""

    def __init__(self) -> None:
        self.raw_bytes = self.stored_bytes = 0
        self.seconds = self.elapsed_seconds = 0.0
        self.codecs: dict[str, int] = {}

    def add(self, codec: str, raw_bytes: int, stored_bytes: int, seconds: float, elapsed_seconds: float) -> None:
        self.raw_bytes += raw_bytes
        self.stored_bytes += stored_bytes
        self.seconds += seconds
        self.elapsed_seconds += elapsed_seconds
        self.codecs[codec] = self.codecs.get(codec, 0) + raw_bytes

    def coded(self) -> Coded:
        return Coded(self.raw_bytes, self.stored_bytes, self.seconds, self.elapsed_seconds, dict(self.codecs))


class SaveMeter:
    """Counts for one save on one rank. Any thread may call. Without compression no save has one."""

    def __init__(self, clock: Clock, kinds: Mapping[str, Kind]) -> None:
        """Count nothing yet.

        Args:
            clock: Time.
            kinds: The kind of each tensor that may be coded, by FQN.
        """
        self._clock, self._kinds = clock, kinds
        # Taken on the threads that write, and on the commit thread, which no handler interrupts.
        self._lock = threading.Lock()
        self._coded: dict[Kind, _Sums] = {}
        self._probed: dict[Kind, _Sums] = {}
        self._written_bytes = self._in_flight = 0
        self._in_flight_since = self._write_seconds = self._processor_seconds = self._seconds = 0.0
        self._probe_seconds = 0.0

    def thread_seconds(self) -> float:
        """Return the processor seconds of the calling thread: the difference of two calls is what work cost."""
        return self._clock.thread_seconds()

    def seconds(self) -> float:
        """Return seconds on the monotonic clock."""
        return self._clock.monotonic_seconds()

    def note_chunk(
        self, fqn: str, codec: str, raw_bytes: int, stored_bytes: int, seconds: float, elapsed_seconds: float
    ) -> None:
        """Count a chunk that was coded and is stored.

        Args:
            fqn: Its tensor.
            codec: Its codec; empty if it gained nothing and is stored raw.
            raw_bytes, stored_bytes: Its sizes.
            seconds: Processor seconds of all that was done to it: to copy, hash, code and append it.
            elapsed_seconds: Seconds that passed meanwhile, without waits for the store.
        """
        kind = self._kinds.get(fqn)
        with self._lock:
            self._processor_seconds += seconds
            if kind is not None:
                sums = self._coded.setdefault(kind, _Sums())
                sums.add(codec, raw_bytes, stored_bytes, seconds, elapsed_seconds)

    def note_sample(
        self, fqn: str, codec: str, raw_bytes: int, stored_bytes: int, seconds: float, all_seconds: float
    ) -> None:
        """Count a sample that was coded and discarded.

        Args:
            fqn, codec, raw_bytes, stored_bytes, seconds: As `note_chunk`, for the measured run.
            all_seconds: Processor seconds of all runs. They are not those of a save.
        """
        kind = self._kinds.get(fqn)
        with self._lock:
            self._probe_seconds += all_seconds
            if kind is not None:
                self._probed.setdefault(kind, _Sums()).add(codec, raw_bytes, stored_bytes, seconds, seconds)

    @contextmanager
    def writing(self, count: int) -> Iterator[None]:
        """Count a block as a write of some bytes that is in flight; writes that overlap count their time once."""
        thread_seconds = self._clock.thread_seconds()
        with self._lock:
            if not self._in_flight:
                self._in_flight_since = self._clock.monotonic_seconds()
            self._in_flight += 1
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            thread_seconds = self._clock.thread_seconds() - thread_seconds
            with self._lock:
                self._in_flight -= 1
                if not self._in_flight:
                    self._write_seconds += self._clock.monotonic_seconds() - self._in_flight_since
                self._processor_seconds += thread_seconds
                if is_whole:
                    self._written_bytes += count

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the processor time that the calling thread takes within a block."""
        start = self._clock.thread_seconds()
        try:
            yield
        finally:
            seconds = self._clock.thread_seconds() - start
            with self._lock:
                self._processor_seconds += seconds

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Take the time of a block as that of the whole save: everything is written within it."""
        start = self._clock.monotonic_seconds()
        try:
            yield
        finally:
            self._seconds = self._clock.monotonic_seconds() - start

    def measured(self) -> Measured:
        """Return what was measured, once everything is written."""
        with self._lock:
            return Measured(
                seconds=self._seconds,
                written_bytes=self._written_bytes,
                write_seconds=self._write_seconds,
                processor_seconds=self._processor_seconds,
                coded={kind: sums.coded() for kind, sums in self._coded.items()},
                probed={kind: sums.coded() for kind, sums in self._probed.items()},
                probe_seconds=self._probe_seconds,
            )
