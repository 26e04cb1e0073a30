"""A store in memory behind a network that loses requests and replies, as a store below the retries reports it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from holdfast.ports.store import Entry, ForwardingStore, Release, Store, Upload
from holdfast.ports.temporary import TemporaryError

_Result = TypeVar("_Result")

PASS, REFUSED, LOST_BEFORE, LOST_AFTER = "pass", "refused", "lost before", "lost after"


class NetworkStore(ForwardingStore):
    """Asks `draw` at each request what the network does to it. Uploads are sent whole, by `complete`."""

    def __init__(self, inner: Store, draw: Callable[[], str]) -> None:
        super().__init__(inner)
        self._draw = draw
        self.failed_calls_are_over = False
        self.object_bytes_max = 1 << 40
        self.requests: list[str] = []

    def _around(self, name: str, subject: str, call: Callable[[], _Result]) -> _Result:
        fate = self._draw()
        self.requests.append(f"{name} {subject}: {fate}")
        where = f"{name} of {subject}"
        if fate == REFUSED:
            raise TemporaryError(f"{where}: 503 Slow Down", is_throttled=True)
        if fate == LOST_BEFORE:
            raise TemporaryError(f"{where}: connection cut", may_take_effect=True)
        result = call()
        if fate == LOST_AFTER:
            raise TemporaryError(f"{where}: connection cut", may_take_effect=True)
        return result

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[Entry]:
        # A page has two keys, and each is a request.
        listing = self._inner.list(prefix, after=after, up_to=up_to)

        def pages() -> Iterator[Entry]:
            for number, entry in enumerate(listing):
                if number % 2 == 0:
                    self._around("list", prefix, lambda: None)
                yield entry

        return pages()

    def upload(self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True) -> Upload:
        inner = super().upload(key, bytes_max, part_bytes, folders_durable=folders_durable)
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

        self._store._around("complete", self._key, send)
        self._is_known = True

    def abort(self) -> None:
        self._inner.abort()


def drawn(seed: int, *, passing: float = 0.6) -> Callable[[], str]:
    """Return what draws the fates of requests: most pass, the others meet one of three faults. Any thread may call."""
    chance, lock = random.Random(seed), threading.Lock()

    def draw() -> str:
        with lock:
            return PASS if chance.random() < passing else chance.choice((REFUSED, LOST_BEFORE, LOST_AFTER))

    return draw
