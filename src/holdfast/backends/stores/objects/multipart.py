"""Objects larger than one request: sent in parts, which the server joins.

begun       The server has given an id. A process that is killed leaves the parts: nobody sees them, and they are
paid for. `abort` of another process finds the id in a listing of uploads, and removes them.
completed   The object is there, whole. Its parts are gone.
aborted     Nothing is there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import xxhash

from holdfast.backends.stores.remote.memory import BytesInFlight
from holdfast.base.ports.parts import PartLedger, address_of
from holdfast.base.ports.readable import Release
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import CheckpointError, ConflictError, InvalidError, MissingError, UnavailableError


class StoredParts(Protocol):
    """What an upload needs of its store."""

    def head_or_none(self, key: str) -> Any:
        """Return size, tag and version of an object; None if there is none."""
        ...

    def read_back(self, key: str, start: int, stop: int) -> memoryview:
        """Return bytes of an object."""
        ...

    def create(self, key: str, data: memoryview) -> None:
        """Store an object by one request unless its key exists."""
        ...


class Parts(Protocol):
    """The uploads of one bucket: begins, lists and aborts them."""

    part_bytes_min: int
    """Smallest part, but for the last one."""

    parts_max: int
    """Most parts of an object."""

    def begin(self, full: str, where: str) -> str:
        """Begin an upload; return its id."""
        ...

    def put(self, full: str, where: str, upload_id: str, number: int, data: memoryview) -> str:
        """Store a part, counted from 1; return its tag."""
        ...

    def join(self, full: str, where: str, upload_id: str, tags: list[str], *, on_condition: bool) -> None:
        """Join the parts of an upload into an object; if the server keeps the condition, only where its key is free.

        Raises:
            ConflictError: The key exists.
            MissingError: There is no such upload.
            InvalidError: The server refuses, for example since it has no such condition.
        """
        ...

    def abort(self, full: str, where: str, upload_id: str) -> None:
        """Remove an upload and its parts; one that is gone is no error."""
        ...

    def listed(self, prefix: str, where: str) -> Iterator[tuple[str, str]]:
        """Yield the full key and the id of every upload under a prefix that is neither completed nor aborted."""
        ...


class MultipartUpload:
    """Sends an object part by part, each from `write`. The object appears in `complete`, whole."""

    def __init__(
        self,
        ledger: PartLedger,
        in_flight: BytesInFlight,
        parts: Parts,
        store: StoredParts,
        key: str,
        full: str,
    ) -> None:
        """Begin an object; nothing is sent before the first part.

        Args:
            ledger: Records its parts.
            in_flight: Bounds the memory of parts on their way.
            parts: The uploads of the bucket.
            store: Its store.
            key, full: Its key in the store and in the bucket.
        Raises:
            InvalidError: The parts are smaller or more than a server takes.
        """
        self._ledger, self._in_flight, self._parts, self._store = ledger, in_flight, parts, store
        self._key, self._full = key, full
        self._lock = threading.Lock()
        self._rooms: dict[int, memoryview] = {}
        self._tags: dict[int, str] = {}
        self._digests: dict[int, tuple[int, bytes]] = {}
        """Size and digest of each part, by offset."""
        self._id = ""
        self._may_have_begun = self._is_closed = False
        if ledger.part_bytes < parts.part_bytes_min or ledger.bytes_max > ledger.part_bytes * parts.parts_max:
            raise InvalidError(
                f"upload of {ledger.where}: parts of {ledger.part_bytes} bytes of an object of {ledger.bytes_max}; "
                f"expected at least {parts.part_bytes_min}, and at most {parts.parts_max} parts"
            )

    def room(self, offset: int, length_bytes: int) -> memoryview:
        """Return memory for one part; waits until there is some."""
        self._ledger.check(offset, length_bytes)
        self._require_open()
        if offset not in self._rooms:
            room = self._in_flight.take(length_bytes)[:length_bytes]
            with self._lock:
                self._rooms[offset] = room
        return self._rooms[offset][:length_bytes]

    def write(self, offset: int, data: memoryview, release: Release | None = None) -> None:
        """Send one part. The memory is read no more when the call has ended."""
        try:
            self._ledger.check(offset, data.nbytes)
            self._require_open()
            where = self._ledger.where
            data = data.cast("B")
            number = offset // self._ledger.part_bytes + 1
            self._tags[offset] = self._parts.put(self._full, where, self._begun(), number, data)
            self._digests[offset] = data.nbytes, xxhash.xxh3_128_digest(data)
            self._ledger.note_written(offset, data.nbytes)
            room = self._rooms.get(offset)
            if room is not None and address_of(room) == address_of(data):
                self._give_room(offset)
        finally:
            if release is not None:
                release()

    def complete(self, total_bytes: int | None = None) -> None:
        """Join the parts, unless the key exists."""
        self._require_open()
        total = self._ledger.require_whole(total_bytes)
        if not total:
            self._store.create(self._key, memoryview(b""))
            self.abort()
            return
        if self._is_there(total):
            self.abort()
            return
        tags = [self._tags[offset] for offset in sorted(self._tags)]
        try:
            self._join(tags)
        except (ConflictError, MissingError) as error:
            # Another object, or ours: the reply to an earlier try was lost, and the upload is over.
            if not self._is_there(total):
                raise self._lost(error) from error
            if isinstance(error, ConflictError):
                # Another process stored the same bytes, and this upload still has its parts.
                self.abort()
        self._close()

    def abort(self) -> None:
        """Remove the parts that were sent, also those of an upload of which the id did not come back."""
        with self._lock:
            if self._is_closed or not self._may_have_begun:
                self._is_closed = True
        self._give_rooms()
        if self._is_closed:
            return
        if self._id:
            self._parts.abort(self._full, self._ledger.where, self._id)
        else:
            for full, upload_id in list(self._parts.listed(self._full, self._ledger.where)):
                if full == self._full:
                    self._parts.abort(full, self._ledger.where, upload_id)
        self._close()

    def _begun(self) -> str:
        """Return the id of the upload, which begins with its first part."""
        with self._lock:
            if not self._id:
                self._may_have_begun = True
                self._id = self._parts.begin(self._full, self._ledger.where)
            return self._id

    def _join(self, tags: list[str]) -> None:
        where = self._ledger.where
        try:
            self._parts.join(self._full, where, self._id, tags, on_condition=True)
        except InvalidError as error:
            said = str(error).replace(where, "")
            if "501" not in said and "NotImplemented" not in said:
                raise
            # This server has no such condition. The key was free a moment ago.
            self._parts.join(self._full, where, self._id, tags, on_condition=False)

    def _lost(self, error: CheckpointError) -> UnavailableError:
        where = self._ledger.where
        if isinstance(error, MissingError):
            return UnavailableError(
                f"could not complete {where}: another process, or a rule, has aborted it; begin again"
            )
        return TemporaryError(f"could not complete {where}: another request for it is under way", may_take_effect=True)

    def _is_there(self, total: int) -> bool:
        """Return whether an object of exactly these bytes is stored; its parts are read back.

        Raises:
            ConflictError: Another object is.
        """
        meta = self._store.head_or_none(self._key)
        if meta is None:
            return False
        is_ours = meta["size"] == total
        for offset, (count, digest) in sorted(self._digests.items()):
            if not is_ours:
                break
            is_ours = xxhash.xxh3_128_digest(self._store.read_back(self._key, offset, offset + count)) == digest
        if not is_ours:
            raise ConflictError(f"{self._ledger.where}: another writer stored it; it was not touched")
        return True

    def _require_open(self) -> None:
        if self._is_closed:
            raise InvalidError(f"{self._ledger.where}: the upload was completed or aborted before")

    def _close(self) -> None:
        self._is_closed = True
        self._give_rooms()

    def _give_rooms(self) -> None:
        for offset in list(self._rooms):
            self._give_room(offset)

    def _give_room(self, offset: int) -> None:
        with self._lock:
            room = self._rooms.pop(offset, None)
        if room is not None:
            self._in_flight.give(room.nbytes)


def abort_uploads(parts: Parts, prefix: str, where: str, is_ours: Callable[[str], bool], *, dry_run: bool) -> int:
    """Remove the uploads under a prefix that nobody has ended; return how many there were.

    Args:
        parts: The uploads of the bucket.
        prefix: What their full keys begin with.
        where: The place, for messages.
        is_ours: Takes what follows the prefix; says whether that upload is to go.
        dry_run: Only count.
    Raises:
        CheckpointError: The server refuses to list or abort.
    """
    found = [(full, upload_id) for full, upload_id in parts.listed(prefix, where) if full.startswith(prefix)]
    chosen = [each for each in found if is_ours(each[0][len(prefix) :])]
    failure: CheckpointError | None = None
    for full, upload_id in chosen if not dry_run else ():
        try:
            parts.abort(full, where, upload_id)
        except CheckpointError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return len(chosen)
