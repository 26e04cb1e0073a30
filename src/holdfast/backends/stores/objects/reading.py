"""Reading objects of a bucket: the half of the store that changes nothing."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Self

from holdfast.backends.stores.objects.address import KEY_BYTES_MAX, Address
from holdfast.backends.stores.objects.client import Clients
from holdfast.backends.stores.remote.reads import Batch, batches_of, cut, read_by_batches
from holdfast.base.ports.keys import Split, is_key, is_listed, split_key, split_name, split_prefix
from holdfast.base.ports.readable import Buffers, ByteRanges, OnRange, Readable, StoreEntry, StoreTraits
from holdfast.errors import CheckpointError, CorruptError, InvalidError, MissingError
from holdfast.settings import MIB, Settings

_PAGE_ENTRIES = 1000
_WHOLE_LISTING = 1 << 40
"""More entries than there are in any folder."""

_TIMED_BYTES_MAX = 64 * MIB
"""Bytes that lengthen the time of a `get`: its limit guards against damage, and is far above what is there."""
_BEYOND_END = re.compile(r"\bInvalidRange\b|status code: 416\b")
_NOT_PARTIAL = "non-partial response"
"""What the client says of a server that answers 200 to a request for a part."""


_KNOWN_BYTES_MAX, _KNOWN_MAX = 1024, 16
"""Size and number of the objects whose tags are kept: `latest` is one."""


class ObjectReading(Readable):
    """Reads objects beneath a folder of a bucket."""

    def __init__(self, address: Address, settings: Settings) -> None:
        """Remember where; does no I/O."""
        self.address = address
        self.url = address.url
        # The client reads a listing on Azure from its beginning, and leaves out what is before `after`: parts of it
        # would cost more than the whole.
        self.traits = StoreTraits(page_entries=_WHOLE_LISTING if address.scheme == "az" else _PAGE_ENTRIES)
        self.clients = Clients(address, settings)
        self._has_bucket = False
        self._known: dict[str, tuple[bytes, Any]] = {}
        """Small objects that were read last, by key, with their metadata: a replacement compares with these tags."""
        self._split: Split = split_key
        self._sends_whole_objects = False
        """Whether the server was asked for a part once, and did not say that it sent one."""

    def with_any_names(self) -> Self:
        """Return the same store, with the same connections and memory, for keys of any printable characters."""
        view = copy.copy(self)
        view._split = split_name
        return view

    def size(self, key: str) -> int:
        """Return the bytes of an object."""
        return int(self.head(key)["size"])

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole. One that is too large is refused before its content is read."""
        data, meta = self.got(key, bytes_max)
        if len(data) <= _KNOWN_BYTES_MAX:
            self._known.pop(key, None)
            self._known[key] = data, meta
            for oldest in list(self._known)[:-_KNOWN_MAX]:
                self._known.pop(oldest, None)
        return data

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        """Read byte ranges of one object: neighbours by one request, several requests side by side."""
        full = self.full_key(key)
        read_by_batches(
            self.where(key),
            ranges,
            buffers,
            on_range,
            size=lambda: self.size(key),
            batch_bytes=lambda batch: self._batch_bytes(key, full, batch),
        )

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders directly under a prefix, sorted."""
        split_prefix(prefix, self._split)
        full = self.address.prefix + prefix
        found = self.clients.ask(
            "list", self.where(prefix), lambda api, client: api.list_with_delimiter(client, full or None)
        )
        self._has_bucket = True
        names = (path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])
        return sorted(name for name in names if is_key(name, self._split))

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        """Yield every object under a prefix whose name a key can have, in order, page by page."""
        split_prefix(prefix, self._split)
        return self._listed(prefix, after, up_to)

    def _listed(self, prefix: str, after: str, up_to: str | None) -> Iterator[StoreEntry]:
        where, full, root = self.where(prefix), self.address.prefix + prefix, self.address.prefix
        pages = self.clients.ask(
            "list",
            where,
            lambda api, client: api.list(
                client, full or None, offset=root + after if after else None, chunk_size=_PAGE_ENTRIES
            ),
            is_request=False,
        )
        while page := self.clients.ask("list", where, lambda *_: next(pages, None)):
            for found in page:
                key = found["path"][len(root) :]
                if not found["path"].startswith(full) or not is_key(key, self._split):
                    continue
                if up_to is not None and key > up_to:
                    return
                if is_listed(key, after, up_to):
                    yield StoreEntry(key, int(found["size"]), _tag_of(found))
                if key == up_to:
                    return  # Without a request for the page behind it.

    def head(self, key: str) -> Any:
        """Return size, tag and version of an object.

        Raises:
            MissingError: There is none, and there is a bucket.
        """
        full = self.full_key(key)
        failure: CheckpointError
        try:
            return self.clients.ask("look at", self.where(key), lambda api, client: api.head(client, full))
        except (MissingError, InvalidError) as error:
            failure = error
        self._ask_in_words(key, failure)
        raise failure

    def head_full(self, key: str) -> Any:
        """Return size, tag and version of an object by its full key."""
        return self.clients.ask("look at", self.url, lambda api, client: api.head(client, key))

    def head_or_none(self, key: str) -> Any:
        """Return size, tag and version of an object; None if there is none."""
        try:
            return self.head(key)
        except MissingError:
            return None

    def _ask_in_words(self, key: str, failure: CheckpointError) -> None:
        """Ask once more in a way that is answered in words: the reply to a look has a status and nothing else.

        A bare 404 may be of the bucket, and a bare 403 of the clock.

        Raises:
            CheckpointError: What the server says, if it says more than the key is absent.
        """
        is_absent = isinstance(failure, MissingError)
        if is_absent and self._has_bucket:
            return
        full = self.full_key(key)
        with suppress(MissingError):
            self.clients.ask("read", self.where(key), lambda api, client: api.get(client, full))
        self._has_bucket |= is_absent

    def got(self, key: str, bytes_max: int) -> tuple[bytes, Any]:
        """Return an object whole, with its metadata; refuse one that is too large before its content is read."""
        where, full = self.where(key), self.full_key(key)
        found = self.clients.ask(
            "read", where, lambda api, client: api.get(client, full), min(bytes_max, _TIMED_BYTES_MAX), is_received=True
        )
        if found.meta["size"] > bytes_max:
            raise CorruptError(f"{where}: {found.meta['size']} bytes; expected at most {bytes_max}. Read another copy")
        data: bytes = self.clients.ask("read", where, lambda *_: found.bytes().to_bytes())
        return data, found.meta

    def holds(self, key: str, data: memoryview) -> bool:
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
        full = self.full_key(key)
        for batch in batches_of([(0, data.nbytes)]):
            held = self._batch_bytes(key, full, batch)
            if held is None:
                return False
            if any(cut(batch, held, piece) != data[piece.start : piece.stop] for piece in batch.pieces):
                return False
        return True

    def read_back(self, key: str, start: int, stop: int) -> memoryview:
        """Return bytes of an object that was stored just now."""
        memory = memoryview(bytearray(stop - start))
        self.read_into(key, [(start, stop)], [memory])
        return memory

    def _batch_bytes(self, key: str, full: str, batch: Batch) -> Sequence[memoryview] | None:
        """Return the bytes of the requests of a batch; None if the object ends before one does."""
        if not batch.requests:
            return []
        starts, stops = zip(*batch.requests, strict=True)
        where = f"{self.where(key)} bytes [{min(starts)}, {max(stops)})"
        if self._sends_whole_objects:
            return self._cut_from_whole(where, full, batch)
        try:
            found = self.clients.ask(
                "read",
                where,
                lambda api, client: api.get_ranges(client, full, starts=starts, ends=stops, coalesce=0),
                max(stop - start for start, stop in batch.requests),
            )
        except MissingError:
            raise
        except CheckpointError as error:
            if _BEYOND_END.search(str(error)):
                return None
            if _NOT_PARTIAL not in str(error):
                raise
            self._sends_whole_objects = True
            return self._cut_from_whole(where, full, batch)
        views = [memoryview(each) for each in found]
        if any(view.nbytes != stop - start for view, (start, stop) in zip(views, batch.requests, strict=True)):
            return None
        return views

    def _cut_from_whole(self, where: str, full: str, batch: Batch) -> Sequence[memoryview] | None:
        """Read an object from its begin to the end of a batch, and keep what the batch asks for.

        Some servers, `rclone serve s3` for one, do not say that what they send is a part.
        """
        end = batch.requests[-1][1]
        # All of it comes, so all of it lengthens the time: a later part of a large object would never be read.
        found = self.clients.ask("read", where, lambda api, client: api.get(client, full), end, is_received=True)
        if found.meta["size"] < end:
            return None
        kept = [memoryview(bytearray(stop - start)) for start, stop in batch.requests]
        pieces, at = iter(found.stream(min_chunk_size=MIB)), 0
        while at < end:
            piece = self.clients.ask("read", where, lambda *_: next(pieces, None))
            if piece is None:
                return None
            data = memoryview(piece)
            for view, (start, stop) in zip(kept, batch.requests, strict=True):
                first, last = max(start, at), min(stop, at + data.nbytes)
                if first < last:
                    view[first - start : last - start] = data[first - at : last - at]
            at += data.nbytes
        return kept

    def full_key(self, key: str) -> str:
        """Return the name of an object in its bucket.

        Raises:
            InvalidError: The key is none, or too long with its folder.
        """
        self._split(key)
        full = self.address.prefix + key
        full_bytes = len(full.encode())
        if full_bytes > KEY_BYTES_MAX:
            raise InvalidError(
                f"{self.url}: key {key[:60]!r}… has {full_bytes} bytes with its folder; the store takes at most "
                f"{KEY_BYTES_MAX}. Choose a shorter folder"
            )
        return full

    def where(self, key: str) -> str:
        """Return store and key, for messages."""
        return f"{self.url}/{key}"


def _tag_of(found: Any) -> str:
    """Return what changes with the content of an object, out of its metadata; empty if the server states nothing."""
    stated = (found.get("e_tag"), found.get("version"))
    return " ".join(str(each) for each in stated if each)
