"""A store in memory behind a network that loses requests and replies, as a store below the retries reports it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.ranges import hand_out
from holdfast.base.ports.readable import Buffers, ByteRanges, OnRange, Release, StoreEntry
from holdfast.base.ports.store import Store, Upload
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import CheckpointError

_Result = TypeVar("_Result")

PASS, REFUSED, LOST_BEFORE, LOST_AFTER = "pass", "refused", "lost before", "lost after"
LATE = "late"
"""The server gets the request after some later ones; by then the client has given it up."""
FLIPPED = "flipped"
"""A bit of what is sent or received is flipped. Requests without content pass."""
_LATE_REQUESTS = 7
_CHANGES = ("put", "put_if_absent", "replace", "complete", "delete", "move", "link")
"""Requests that may be late. The others have no effect then, and touch no memory that is used again."""


class NetworkStore(ForwardingStore):
    """Asks `draw` at each request what the network does to it. Uploads are sent whole, by `complete`."""

    def __init__(self, inner: Store, draw: Callable[[], str], *, object_bytes_max: int = 1 << 40) -> None:
        super().__init__(inner)
        self._draw = draw
        self.traits = replace(
            self.traits, failed_calls_are_over=False, object_bytes_max=object_bytes_max, appears_whole=True
        )
        self.requests: list[str] = []
        self._lock = threading.Lock()
        self._late: list[tuple[int, Callable[[], object]]] = []

    def _around(self, name: str, subject: str, call: Callable[[], _Result]) -> _Result:
        return self._asked(name, subject, call, self._draw())

    def _asked(self, name: str, subject: str, call: Callable[[], _Result], fate: str) -> _Result:
        if fate == LATE and name not in _CHANGES:
            fate = LOST_BEFORE
        with self._lock:
            self.requests.append(f"{name} {subject}: {fate}")
            at = len(self.requests)
            due = [each for number, each in self._late if number <= at]
            self._late = [(number, each) for number, each in self._late if number > at]
            if fate == LATE:
                self._late.append((at + _LATE_REQUESTS, call))
        _arrive(due)
        where = f"{name} of {subject}"
        if fate == REFUSED:
            raise TemporaryError(f"{where}: 503 Slow Down", is_throttled=True)
        if fate in (LOST_BEFORE, LATE):
            raise TemporaryError(f"{where}: connection cut", may_take_effect=True)
        result = call()
        if fate == LOST_AFTER:
            raise TemporaryError(f"{where}: connection cut", may_take_effect=True)
        return result

    def end(self) -> None:
        """Let everything arrive that is late."""
        with self._lock:
            late, self._late = self._late, []
        _arrive([call for _, call in late])

    def get(self, key: str, bytes_max: int) -> bytes:
        fate = self._draw()
        data = self._asked("get", key, lambda: self._inner.get(key, bytes_max), fate)
        return _flipped(data) if fate == FLIPPED else data

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        fate = self._draw()
        if fate != FLIPPED:
            self._asked("read_into", key, lambda: self._inner.read_into(key, ranges, buffers, on_range), fate)
            return
        held = [bytes(stop - start) for start, stop in ranges]
        into = [memoryview(bytearray(each)) for each in held]
        self._asked("read_into", key, lambda: self._inner.read_into(key, ranges, into), fate)
        # None are left to read where all came before the reply was lost.
        hand_out([*map(_flipped, map(bytes, into[:1])), *map(bytes, into[1:])], buffers, on_range)

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        fate = self._draw()
        sent = _flipped(data) if fate == FLIPPED else data
        self._asked("put", key, lambda: self._inner.put(key, sent, durable=durable), fate)

    def put_if_absent(self, key: str, data: bytes, *, folders_durable: bool = True) -> None:
        fate = self._draw()
        sent = _flipped(data) if fate == FLIPPED else data
        call = lambda: self._inner.put_if_absent(key, sent, folders_durable=folders_durable)  # noqa: E731
        self._asked("put_if_absent", key, call, fate)

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        # A page has two keys, and each is a request.
        listing = self._inner.list(prefix, after=after, up_to=up_to)

        def pages() -> Iterator[StoreEntry]:
            for number, entry in enumerate(listing):
                if number % 2 == 0:
                    self._around("list", prefix, lambda: None)
                yield entry

        return pages()

    def upload(
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> Upload:
        inner = super().upload(key, bytes_max, part_bytes, folders_durable=folders_durable, may_be_less=may_be_less)
        return _NetworkUpload(inner, key, self)


class _NetworkUpload:
    """Sends the object in `complete`, and knows its own object when it meets it."""

    def __init__(self, inner: Upload, key: str, store: NetworkStore) -> None:
        self._inner, self._key, self._store = inner, key, store
        self._is_stored = False
        self._is_known = False

    def room(self, offset: int, length_bytes: int) -> memoryview | None:
        return self._inner.room(offset, length_bytes)

    def write(self, offset: int, data: memoryview, release: Release | None = None) -> None:
        self._inner.write(offset, data, release)

    def complete(self, total_bytes: int | None = None) -> None:
        def send() -> None:
            if self._is_known or not self._is_stored:
                self._inner.complete(total_bytes)
                self._is_stored = True

        fate = self._store._draw()
        self._store._asked("complete", self._key, send, fate)
        self._is_known = True
        if fate == FLIPPED:
            store = self._store._inner
            store.put(self._key, _flipped(store.get(self._key, 1 << 40)))

    def abort(self) -> None:
        self._inner.abort()


def _arrive(late: Sequence[Callable[[], object]]) -> None:
    """Make calls whose client has given them up: nobody hears of their errors."""
    for call in late:
        with suppress(CheckpointError):
            call()


def _flipped(data: bytes) -> bytes:
    """Return data with a bit flipped, in its second half: a header is at the beginning."""
    if not data:
        return data
    changed = bytearray(data)
    changed[len(data) * 3 // 4] ^= 1
    return bytes(changed)


def drawn(
    seed: int, *, passing: float = 0.6, faults: Sequence[str] = (REFUSED, LOST_BEFORE, LOST_AFTER)
) -> Callable[[], str]:
    """Return what draws the fates of requests: most pass, the others meet one of the faults. Any thread may call."""
    chance, lock = random.Random(seed), threading.Lock()

    def draw() -> str:
        with lock:
            return PASS if chance.random() < passing else chance.choice(faults)

    return draw
