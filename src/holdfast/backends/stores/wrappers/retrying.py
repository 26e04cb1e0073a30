"""A store over a network whose calls are tried again, side by side within a limit, and within a cap.

What may be tried again, and what a try finds that comes after one of unknown effect:

- `get`, `size`, `folders`, `read_into`, `identity`: any number of times. `list` goes on after the last key that it has,
  and `read_into` after the last range that its caller took.
- `replace`: the store below compares, and takes its own bytes for a success.
- `put`, `sync`, `delete`, `link`, parts of an upload: any number of times, the last one counts. `replace` too: it takes
  its own bytes, stored by an earlier try, as a success.
- `put_if_absent`: an object that exists is compared with the bytes that were sent. If they are equal, an earlier try
  stored it. If it was stored, and another process has removed it since, it is stored again: as a request that arrives
  late would.
- `move`: if an object is at the new key, and not the same object at the old one, an earlier try moved it.
- `Upload.complete`: the store below knows its bytes, and compares.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from holdfast.backends.stores.wrappers.budget import RetryBudget, RetryCounter
from holdfast.backends.stores.wrappers.concurrency import ConcurrencyLimit
from holdfast.backends.stores.wrappers.held_memory import HeldMemory
from holdfast.backends.stores.wrappers.rate import RateLimit
from holdfast.backends.stores.wrappers.retries import Request, Retries, Tries
from holdfast.base.clock import Clock, SystemClock
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.readable import Buffers, ByteRanges, OnBytes, OnRange, Release, StoreEntry
from holdfast.base.ports.store import Store, Upload
from holdfast.base.ports.temporary import RetryCounts, TemporaryError
from holdfast.errors import ConflictError, CorruptError, MissingError
from holdfast.settings import MIB, Settings

_Result = TypeVar("_Result")

_BATCH_KEYS = 1000
"""Keys that are listed or deleted in one try: what S3 takes in one request."""

_GET_BYTES_MAX = 64 * MIB
"""Largest object for which a `get` has more time: `bytes_max` guards against damage, and is far above most objects."""

_CHANGING = frozenset({"sync", "upload", "link", "move", "replace"})
"""Methods that change what is stored, beside those with a request of their own below."""


class _ListingCut(TemporaryError):
    """A listing failed after some entries."""

    def __init__(self, error: TemporaryError, entries: Sequence[StoreEntry]) -> None:
        super().__init__(
            str(error),
            is_throttled=error.is_throttled,
            may_take_effect=error.may_take_effect,
            retry_after_seconds=error.retry_after_seconds,
        )
        self.is_first_contact = error.is_first_contact
        self.entries = entries


class RetryingStore(ForwardingStore):
    """Tries the calls of a store again; see `Retries`, and the list above."""

    def __init__(
        self,
        inner: Store,
        settings: Settings,
        clock: Clock | None = None,
        *,
        requests_in_flight_max: int | None = None,
    ) -> None:
        """Wrap a store that makes one request a call, and says in its errors what another try may mend.

        Args:
            inner: The store.
            settings: Deadlines, time limits, and the cap.
            clock: Time and chance; None: those of the machine.
            requests_in_flight_max: Most requests to its server at a time; None: as many as to an object store.
        """
        super().__init__(inner)
        # A call that was abandoned, or cut off from its reply, may still take effect.
        self.traits = replace(self.traits, failed_calls_are_over=False)
        self._settings, self._clock = settings, clock or SystemClock()
        self._limit = ConcurrencyLimit.shared(
            _server_of(inner.url), requests_in_flight_max or settings._tuning.requests_in_flight_max
        )
        self._total = RetryCounter(self._clock)
        self._rates: dict[int, RateLimit] = {}
        """By number of ranks, the share of one rank in the cap."""
        self._retries = self._retries_within(RetryBudget(self.url, self._clock, total=self._total), 1)

    def for_operation(self, name: str, rank: int, world_size: int) -> Store:
        """Return a view of the store for one save or load. The calls through it share one deadline."""
        view = copy.copy(self)
        seconds_max = self._settings.object_store.retry_seconds_per_save
        budget = RetryBudget(name, self._clock, seconds_max, total=self._total, is_leader=rank == 0)
        view._retries = self._retries_within(budget, world_size)
        return view

    def with_any_names(self) -> RetryingStore | None:
        """Return a view of the store for other systems' names; its calls share deadlines and limits with this one."""
        inner = self._inner.with_any_names()
        if inner is None:
            return None
        view = copy.copy(self)
        view._inner = inner
        return view

    @property
    def retry_counts(self) -> RetryCounts:
        """What the retries of all views of the store have cost so far."""
        return self._total.counts

    def _retries_within(self, budget: RetryBudget, world_size: int) -> Retries:
        cap = self._settings.max_bytes_per_second
        rate = None
        if cap is not None:
            rate = self._rates.setdefault(world_size, RateLimit(cap / world_size, self._clock))
        return Retries(self._settings.object_store, self._clock, self._limit, budget, rate)

    def _where(self, subject: str) -> str:
        return f"{self.url}/{subject}"

    def _around(self, name: str, subject: str, call: Callable[[], _Result]) -> _Result:
        request = Request(name, self._where(subject), changes=name in _CHANGING)
        return self._retries.run(request, lambda _: call())

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole."""
        request = Request("get", self._where(key), received_bytes_max=min(bytes_max, _GET_BYTES_MAX))
        return self._retries.run(request, lambda _: self._inner.get(key, bytes_max))

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        """Read byte ranges of one object, each into a buffer of its length."""
        taken = 0

        def once(_: Tries) -> None:
            first = taken

            def take(number: int, data: memoryview) -> None:
                nonlocal taken
                assert on_range is not None, "it is passed on only then"
                on_range(first + number, data)
                taken += 1

            passed = None if on_range is None else take
            self._inner.read_into(key, ranges[first:], buffers[first:], passed)

        moved = sum(stop - start for start, stop in ranges)
        request = Request("read_into", self._where(key), received_bytes_max=moved, ends_by_itself=True)
        self._retries.run(request, once)

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        """Read what is in memory already."""
        taken = 0

        def take(data: memoryview) -> None:
            nonlocal taken
            if on_bytes is not None:
                on_bytes(data)
            taken += len(data)

        def once(_: Tries) -> int:
            try:
                return self._inner.get_cached(key, start, buffers, take)
            except TemporaryError:
                if taken:
                    return taken  # They cannot be taken back, and the caller reads the rest.
                raise

        return self._retries.run(Request("get_cached", self._where(key), ends_by_itself=True), once)

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        """Yield every object under a prefix, in the order of the keys."""
        request = Request("list", self._where(prefix))
        # The first page at once, so that a wrong call raises here.
        entries, rest = self._listed(request, prefix, after, up_to, None)
        return self._pages(request, prefix, up_to, entries, rest)

    def _pages(
        self,
        request: Request,
        prefix: str,
        up_to: str | None,
        entries: Sequence[StoreEntry],
        rest: Iterator[StoreEntry] | None,
    ) -> Iterator[StoreEntry]:
        while entries:
            yield from entries
            entries, rest = self._listed(request, prefix, entries[-1].key, up_to, rest)

    def _listed(
        self, request: Request, prefix: str, after: str, up_to: str | None, rest: Iterator[StoreEntry] | None
    ) -> tuple[Sequence[StoreEntry], Iterator[StoreEntry] | None]:
        """Return the next entries, and where those after them come from; no entries at the end.

        Args:
            request: What is asked.
            prefix, up_to: As for `list`.
            after: The last key so far.
            rest: Yields what follows it; None: ask anew.
        """
        # A try takes it away: one that failed or was abandoned is not used again.
        begun = [] if rest is None else [rest]

        def once(tries: Tries) -> tuple[Sequence[StoreEntry], Iterator[StoreEntry] | None]:
            entries = list(tries.last.entries) if isinstance(tries.last, _ListingCut) else []
            first = entries[-1].key if entries else after
            listing = begun.pop() if begun else self._inner.list(prefix, after=first, up_to=up_to)
            try:
                entries.extend(islice(listing, _BATCH_KEYS - len(entries)))
            except TemporaryError as error:
                raise _ListingCut(error, entries) from error
            return entries, listing

        return self._retries.run(request, once)

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Store a small object whole, replacing an older one."""
        request = Request("put", self._where(key), sent_bytes=len(data), changes=True)
        self._retries.run(request, lambda _: self._inner.put(key, data, durable=durable))

    def replace(self, key: str, data: bytes, seen: bytes | None, *, durable: bool = True) -> None:
        """Store a small object whole in place of one that the caller has read."""
        request = Request("replace", self._where(key), sent_bytes=len(data), changes=True)
        self._retries.run(request, lambda _: self._inner.replace(key, data, seen, durable=durable))

    def put_if_absent(self, key: str, data: bytes, *, folders_durable: bool = True) -> None:
        """Store a small object whole unless the key exists."""

        def once(tries: Tries) -> None:
            try:
                self._inner.put_if_absent(key, data, folders_durable=folders_durable)
            except ConflictError:
                if not tries.may_have_taken_effect or not self._holds(key, data):
                    raise

        request = Request("put_if_absent", self._where(key), sent_bytes=len(data), changes=True)
        self._retries.run(request, once)

    def _holds(self, key: str, data: bytes) -> bool:
        """Return whether an object has exactly these bytes."""
        try:
            return self._inner.get(key, len(data)) == data
        except (CorruptError, MissingError):
            return False  # It is longer, or whoever stored it has removed it.

    def upload(
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> Upload:
        """Begin an object that must not exist yet."""
        inner = super().upload(key, bytes_max, part_bytes, folders_durable=folders_durable, may_be_less=may_be_less)
        largest = self.traits.object_bytes_max
        is_whole = self.traits.appears_whole and (largest is None or bytes_max <= largest)
        return _RetryingUpload(inner, self._where(key), bytes_max, self._retries, is_sent_whole=is_whole)

    def require_exclusive_creates(self) -> None:
        """Ask the server whether it keeps the condition of a create, if the store must."""
        if self.traits.checks_exclusive_creates:
            request = Request("require_exclusive_creates", self.url, changes=True)
            self._retries.run(request, lambda _: self._inner.require_exclusive_creates())

    def trust_exclusive_creates(self) -> None:
        """Take note that another process of the job has asked."""
        self._inner.trust_exclusive_creates()

    def lent_upload(self, key: str, parts: Sequence[memoryview]) -> Upload | None:
        """Begin an object out of memory that the caller lends; None if the store takes only parts."""
        upload = self._inner.lent_upload(key, parts)
        if upload is None:
            return None
        full_bytes = sum(part.nbytes for part in parts)
        return _RetryingUpload(upload, self._where(key), full_bytes, self._retries, is_sent_whole=True)

    def abort_uploads(self, prefix: str, is_ours: Callable[[str], bool], *, dry_run: bool = False) -> int:
        """Remove uploads that nobody has ended; none if the store keeps none."""
        request = Request("abort_uploads", self._where(prefix), changes=not dry_run)
        return self._retries.run(request, lambda _: self._inner.abort_uploads(prefix, is_ours, dry_run=dry_run))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; absent keys are no error."""
        left = iter(keys)
        while batch := tuple(islice(left, _BATCH_KEYS)):
            more = f" and {len(batch) - 1:,} more" if len(batch) > 1 else ""
            request = Request("delete", self._where(batch[0]) + more, changes=True)
            self._retries.run(request, lambda _, batch=batch: self._inner.delete(batch))  # type: ignore[misc]

    def move(self, key: str, new_key: str) -> None:
        """Give an object another key."""
        before: str | None = None
        latest = 0

        def once(tries: Tries) -> None:
            nonlocal before, latest
            latest = tries.failed
            if before is None:
                found = self._inner.identity(key)
                if latest != tries.failed:
                    return  # This try was given up while it waited, and a later one goes on.
                before = found
            if not tries.may_have_taken_effect or not self._has_moved(key, new_key, before):
                self._inner.move(key, new_key)

        self._retries.run(Request("move", self._where(key), changes=True), once)

    def require_replacing_moves(self) -> None:
        """Require that `move` replaces at once what is at the new key."""
        self._around("move", "", self._inner.require_replacing_moves)

    def _has_moved(self, key: str, new_key: str, before: str) -> bool:
        """Return whether an earlier try moved an object: nothing or another one is at `key`, and one at the new key.

        A store that copies and then deletes may have been cut between the two: then it is at both keys.
        """
        try:
            if self._inner.identity(key) == before:
                return False
        except MissingError:
            pass  # It was there, so it was moved, or somebody has removed it.
        try:
            self._inner.size(new_key)
        except MissingError:
            return False
        return True


class _RetryingUpload:
    """An upload whose requests are tried again.

    An object that is sent whole is sent by `complete`; otherwise `write` sends each part.
    """

    def __init__(self, inner: Upload, where: str, bytes_max: int, retries: Retries, *, is_sent_whole: bool) -> None:
        self._inner, self._where, self._bytes_max, self._retries = inner, where, bytes_max, retries
        self._is_sent_whole = is_sent_whole

    def room(self, offset: int, length_bytes: int) -> memoryview | None:
        return self._inner.room(offset, length_bytes)

    def write(self, offset: int, data: memoryview, release: Release | None = None) -> None:
        if self._is_sent_whole:
            self._inner.write(offset, data, release)
            return
        held = None if release is None else HeldMemory(release)
        request = Request("upload.write", self._where, sent_bytes=data.nbytes, changes=True, ends_by_itself=True)
        try:
            self._retries.run(request, lambda _: self._inner.write(offset, data, None if held is None else held.hold()))
        finally:
            if held is not None:
                held.let_go()

    def complete(self, total_bytes: int | None = None) -> None:
        stored = self._bytes_max if total_bytes is None else total_bytes
        sent = stored if self._is_sent_whole else 0
        request = Request("upload.complete", self._where, sent_bytes=sent, changes=True, ends_by_itself=True)
        self._retries.run(request, lambda _: self._inner.complete(total_bytes))

    def abort(self) -> None:
        if self._is_sent_whole:
            # Nothing is asked of the server, and the memory of the object must come back in any case.
            self._inner.abort()
            return
        request = Request("upload.abort", self._where, changes=True)
        self._retries.run(request, lambda _: self._inner.abort())


def _server_of(url: str) -> str:
    """Return scheme and host of a URL; a path whole."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}" if separator else url
