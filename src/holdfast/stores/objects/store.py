"""A store in a bucket of an object store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from holdfast.clock import Clock, SystemClock
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, MissingError, UnavailableError
from holdfast.ports.store import Buffers, ByteRanges, Entry, OnBytes, OnRange
from holdfast.settings import MIB, Settings
from holdfast.stores.keys import split_key, split_prefix
from holdfast.stores.objects.address import KEY_BYTES_MAX, address_of
from holdfast.stores.objects.client import Clients
from holdfast.stores.objects.conditional_delete import ConditionalDelete
from holdfast.stores.objects.memory import BytesInFlight, ObjectUpload
from holdfast.stores.objects.probe import Probe
from holdfast.stores.objects.reads import Batch, Piece, batches_of
from holdfast.stores.parts import PartLedger, check_buffers, check_ranges

_OBJECT_BYTES_MAX = {"s3": 5 << 30, "gs": 5 << 40, "az": 5000 << 20}
"""By scheme, the largest object that one request stores."""

_COPIED_HERE_BYTES_MAX = 64 * MIB
"""`move` passes objects up to this size through this process, and leaves larger ones to the server."""

_TRIES = 4
"""Requests for one create whose key "exists" and then does not: another request for it is under way."""

_DELETED_TOGETHER = 1000


class ObjectStore:
    """Keys to objects beneath a folder of a bucket.

    An object is stored by one request, whole or not at all, durable on return, and a listing shows it at once. What no
    other writer may have stored is stored on condition that the key does not exist. Before the first such request that
    decides something, the server is asked whether it keeps that condition (`probe.py`).

    A request whose reply is lost may still take effect, so a call that raised is not over.
    """

    def __init__(self, url: str, *, settings: Settings, clock: Clock | None = None) -> None:
        """Remember where; does no I/O.

        Args:
            url: `s3://`, `gs://` or `az://`, bucket and folder.
            settings: How the store is reached, and the memory for uploads.
            clock: Source of random names.
        Raises:
            InvalidError: It is no such URL, or has credentials.
        """
        self._address = address_of(url)
        self.url = self._address.url
        self.failed_calls_are_over = False
        """A request whose reply was lost may take effect later."""
        self._clients = Clients(self._address, settings.object_store)
        self._in_flight = BytesInFlight(settings.object_bytes_in_flight_max)
        self._clock = clock or SystemClock()
        self._probe = Probe(self, self._clock, is_needed=not settings.object_store.single_writer)
        self._conditional_delete = ConditionalDelete(self._address, settings.object_store, self._clients, self._clock)

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Store a small object whole, replacing an older one; durable on return."""
        self._put("store", key, data, "overwrite")

    def put_if_absent(self, key: str, data: bytes, *, folders_durable: bool = True) -> None:
        """Store a small object whole unless the key exists; atomic, durable on return.

        An object of the same content counts as this one: the reply to an earlier try may have been lost.

        Raises:
            ConflictError: The key exists with other content; it was not touched.
            UnavailableError: It failed, and may take effect later.
        """
        split_key(key)
        if folders_durable:
            # What is put without that has a name that no other writer uses, so it decides nothing.
            self._probe.require_exclusive_creates()
        self.create(key, memoryview(data))

    def upload(self, key: str, total_bytes: int, part_bytes: int, *, folders_durable: bool = True) -> ObjectUpload:
        """Begin an object that must not exist yet; it is invisible until complete, and uses memory of its size."""
        where = self._where(key)
        self._full(key)
        bytes_max = _OBJECT_BYTES_MAX[self._address.scheme]
        if total_bytes > bytes_max:
            raise InvalidError(
                f"{where}: an object of {total_bytes} bytes; {self._address.scheme}:// takes at most {bytes_max} in one "
                "request. Save from more ranks, so that each one writes less"
            )
        ledger = PartLedger(where, total_bytes=total_bytes, part_bytes=part_bytes)
        return ObjectUpload(ledger, self._in_flight, lambda memory: self.create(key, memory))

    def create(self, key: str, data: memoryview) -> None:
        """Store an object unless its key exists; an object of the same content counts as this one.

        Raises:
            ConflictError: The key exists with other content.
            UnavailableError: It failed, and may take effect later.
        """
        for _ in range(_TRIES):
            try:
                self._put("store", key, data, "create")
            except ConflictError as conflict:
                try:
                    if self._holds(key, data):
                        return
                except MissingError:
                    # The server was busy with another request for this key, and that one stored nothing.
                    continue
                raise ConflictError(
                    f"{self._where(key)}: another writer stored it; it was not touched"
                ) from conflict
            else:
                return
        raise UnavailableError(
            f"could not store {self._where(key)}: the server answers that it exists, and has no such object; whether it "
            "will appear is unknown; retry"
        )

    def sync(self, prefix: str) -> None:
        """Do nothing: an object is durable, with its name, once it is stored."""
        split_prefix(prefix)

    def size(self, key: str) -> int:
        """Return the bytes of an object."""
        return int(self.head(key)["size"])

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole. One that is too large is refused before its content is read."""
        data, _ = self._got(key, bytes_max)
        return data

    def get_ranges(
        self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None
    ) -> list[memoryview]:
        """Read byte ranges of one object: neighbours by one request, several requests side by side."""
        where, full = self._where(key), self._full(key)
        # The sizes of buffers and the order of bounds are checked here, the end of the object by what comes.
        end = max((stop for _, stop in ranges), default=0)
        check_ranges(where, end, ranges, buffers)
        if not any(start < stop for start, stop in ranges) or _ends_empty(ranges, end):
            check_ranges(where, self.size(key), ranges, buffers)
        views = [
            buffer.cast("B")[: stop - start] for (start, stop), buffer in zip(ranges, buffers, strict=True)
        ]
        for batch in batches_of(ranges):
            held = self._batch_bytes(key, full, batch)
            if held is None:
                check_ranges(where, self.size(key), ranges, buffers)
                raise UnavailableError(f"could not read {where}: the server sent less than was asked for; retry")
            for piece in batch.pieces:
                start = ranges[piece.number][0]
                if piece.stop > piece.start:
                    views[piece.number][piece.start - start : piece.stop - start] = _cut(batch, held, piece)
                if piece.is_last and on_range is not None:
                    on_range(piece.number, views[piece.number])
        return views

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        """Return 0: nothing is cached."""
        check_buffers(self._where(key), self.size(key), start, buffers)
        return 0

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders directly under a prefix, sorted."""
        split_prefix(prefix)
        full = self._address.prefix + prefix
        found = self._clients.ask(
            "list", self._where(prefix), lambda api, client: api.list_with_delimiter(client, full or None)
        )
        names = (path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])
        return sorted(name for name in names if _is_key(name))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yield every object under a prefix whose name a key can have, page by page."""
        split_prefix(prefix)
        return self._listed(prefix)

    def _listed(self, prefix: str) -> Iterator[Entry]:
        where, full = self._where(prefix), self._address.prefix + prefix
        pages = self._clients.ask(
            "list", where, lambda api, client: api.list(client, full or None, chunk_size=_DELETED_TOGETHER)
        )
        while page := self._clients.ask("list", where, lambda *_: next(pages, None)):
            for found in page:
                key = found["path"][len(self._address.prefix) :]
                if found["path"].startswith(full) and _is_key(key):
                    yield Entry(key, int(found["size"]))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, a thousand by one request where the store can; absent keys are no error."""
        full = [self._full(key) for key in keys]
        for first in range(0, len(full), _DELETED_TOGETHER):
            batch = full[first : first + _DELETED_TOGETHER]
            where = self._where("") if len(batch) > 1 else f"{self._address.scheme}://{self._address.bucket}/{batch[0]}"
            try:
                self._clients.ask("delete", where, lambda api, client, batch=batch: api.delete(client, batch))
            except MissingError:
                # Some stores say so of an absent key, and then leave the rest undone.
                for name in batch:
                    with suppress(MissingError):
                        self._clients.ask("delete", where, lambda api, client, name=name: api.delete(client, name))

    def link(self, key: str, new_key: str) -> bool:
        """Return False: an object has one key."""
        split_key(new_key)
        self.head(key)
        return False

    def identity(self, key: str) -> str:
        """Return a text that no other key shares: an object has one key."""
        meta = self.head(key)
        return f"{self._full(key)} {meta['e_tag']} {meta['version']}"

    def move(self, key: str, new_key: str) -> None:
        """Give an object another key: copy it, then delete the original if it is still the same.

        What is at the new key is replaced only if it is what was there before the original was read. So a process that
        is stopped in between never replaces what came meanwhile, if whoever stores that first removes the original.
        """
        split_key(key)
        split_key(new_key)
        for _ in range(_TRIES):
            before = self._head_or_none(new_key)
            meta = self._copied(key, new_key, before)
            if meta is None:
                continue
            if self._conditional_delete.delete(self._full(key), self._where(key), meta, self._head_now):
                return
            # Another object came to `key` meanwhile: that one is to be moved.
            self.delete([new_key])
        raise UnavailableError(
            f"could not move {self._where(key)}: it or {self._where(new_key)} changes again and again; retry"
        )

    def _copied(self, key: str, new_key: str, before: Any) -> Any:
        """Copy an object over what was at the new key; return its metadata, None if either changed meanwhile."""
        meta = self.head(key)
        if meta["size"] <= _COPIED_HERE_BYTES_MAX:
            data, meta = self._got(key, _COPIED_HERE_BYTES_MAX)
            try:
                self._put_in_place_of(new_key, data, before)
            except ConflictError:
                return None
            return meta
        full, new_full = self._full(key), self._full(new_key)
        self._clients.ask(
            "copy", self._where(key), lambda api, client: api.copy(client, full, new_full), int(meta["size"])
        )
        return meta

    def _put_in_place_of(self, key: str, data: bytes, before: Any) -> None:
        """Store an object on condition that its key holds what it held before.

        Raises:
            ConflictError: It holds something else.
        """
        if before is None:
            self.create(key, memoryview(data))
            return
        version = {name: before[name] for name in ("e_tag", "version") if before[name] is not None}
        try:
            self._put("replace", key, data, version)
        except ConflictError:
            now = self._head_or_none(key)
            if now is None or now["e_tag"] != before["e_tag"] or not str(now["e_tag"]).startswith('"'):
                if now is not None and self._holds(key, memoryview(data)):
                    return
                raise
            # Some servers compare without the quotes that belong to the tag.
            self._put("replace", key, data, version | {"e_tag": before["e_tag"].strip('"')})

    def head(self, key: str) -> Any:
        """Return size, tag and version of an object.

        Raises:
            MissingError: There is none, and there is a bucket.
        """
        full = self._full(key)
        try:
            return self._clients.ask("look at", self._where(key), lambda api, client: api.head(client, full))
        except MissingError:
            self._require_bucket(key)
            raise

    def _head_now(self, key: str) -> Any:
        return self._clients.ask("look at", self.url, lambda api, client: api.head(client, key))

    def _head_or_none(self, key: str) -> Any:
        try:
            return self.head(key)
        except MissingError:
            return None

    def _require_bucket(self, key: str) -> None:
        """Ask once for an absent object in a way that is answered in words: a bare 404 may be of the bucket."""
        if not self._probe.has_bucket:
            full = self._full(key)
            with suppress(MissingError):
                self._clients.ask("read", self._where(key), lambda api, client: api.get(client, full))
            self._probe.has_bucket = True

    def _got(self, key: str, bytes_max: int) -> tuple[bytes, Any]:
        where, full = self._where(key), self._full(key)
        found = self._clients.ask("read", where, lambda api, client: api.get(client, full), bytes_max)
        if found.meta["size"] > bytes_max:
            raise CorruptError(f"{where}: {found.meta['size']} bytes; expected at most {bytes_max}. Read another copy")
        data: bytes = self._clients.ask("read", where, lambda *_: found.bytes().to_bytes())
        return data, found.meta

    def _put(self, doing: str, key: str, data: bytes | memoryview, mode: Any) -> None:
        full = self._full(key)
        count = memoryview(data).nbytes
        self._clients.ask(
            doing,
            self._where(key),
            lambda api, client: api.put(client, full, data, mode=mode, use_multipart=False),
            count,
        )

    def _holds(self, key: str, data: memoryview) -> bool:
        """Return whether exactly these bytes are stored, by the tag if it is their checksum, else by reading them.

        Raises:
            MissingError: Nothing is stored there.
        """
        meta = self.head(key)
        if meta["size"] != data.nbytes:
            return False
        tag = str(meta["e_tag"]).strip('"')
        if tag == hashlib.md5(data, usedforsecurity=False).hexdigest():
            return True
        full = self._full(key)
        for batch in batches_of([(0, data.nbytes)]):
            held = self._batch_bytes(key, full, batch)
            if held is None or any(_cut(batch, held, piece) != data[piece.start : piece.stop] for piece in batch.pieces):
                return False
        return True

    def _batch_bytes(self, key: str, full: str, batch: Batch) -> list[memoryview] | None:
        """Return the bytes of the requests of a batch; None if the object ends before one does."""
        if not batch.requests:
            return []
        starts, stops = zip(*batch.requests, strict=True)
        where = f"{self._where(key)} bytes [{min(starts)}, {max(stops)})"
        try:
            found = self._clients.ask(
                "read",
                where,
                lambda api, client: api.get_ranges(client, full, starts=starts, ends=stops, coalesce=0),
                max(stop - start for start, stop in batch.requests),
            )
        except MissingError:
            raise
        except CheckpointError as error:
            if "InvalidRange" in str(error) or "416" in str(error):
                return None
            raise
        views = [memoryview(each) for each in found]
        if any(view.nbytes != stop - start for view, (start, stop) in zip(views, batch.requests, strict=True)):
            return None
        return views

    def _full(self, key: str) -> str:
        split_key(key)
        full = self._address.prefix + key
        if len(full) > KEY_BYTES_MAX:
            raise InvalidError(
                f"{self.url}: key {key[:60]!r}… has {len(full)} bytes with its folder; the store takes at most "
                f"{KEY_BYTES_MAX}. Choose a shorter folder"
            )
        return full

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"


def _is_key(text: str) -> bool:
    try:
        split_key(text)
    except InvalidError:
        return False
    return True


def _ends_empty(ranges: ByteRanges, end: int) -> bool:
    """Return whether an empty range ends after all others: no request would meet the end of the object there."""
    return end > max((stop for start, stop in ranges if start < stop), default=0)


def _cut(batch: Batch, held: list[memoryview], piece: Piece) -> memoryview:
    """Return the bytes of one piece out of those of the requests."""
    if piece.start == piece.stop:
        return memoryview(b"")
    for (start, stop), view in zip(batch.requests, held, strict=True):
        if start <= piece.start and piece.stop <= stop:
            return view[piece.start - start : piece.stop - start]
    raise AssertionError("every piece is in a request")
