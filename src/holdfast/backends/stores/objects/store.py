"""A store in a bucket of an object store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from holdfast.backends.stores.objects.address import address_of
from holdfast.backends.stores.objects.conditional_delete import ConditionalDelete
from holdfast.backends.stores.objects.multipart import MultipartUpload, Parts, abort_uploads
from holdfast.backends.stores.objects.parts_of_azure import BlocksOfContainer
from holdfast.backends.stores.objects.parts_of_s3 import PartsOfBucket
from holdfast.backends.stores.objects.reading import ObjectReading
from holdfast.backends.stores.objects.signed import SignedRequests
from holdfast.backends.stores.remote.memory import BytesInFlight, LentObject, ObjectUpload
from holdfast.backends.stores.remote.probe import Probe
from holdfast.base.clock import Clock, SystemClock
from holdfast.base.ports.keys import split_prefix
from holdfast.base.ports.parts import PartLedger
from holdfast.base.ports.store import Store, Upload
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError
from holdfast.settings import MIB, Settings

logger = logging.getLogger(__name__)

_OBJECT_BYTES_MAX = {"s3": 5 << 30, "gs": 5 << 40, "az": 5000 << 20}
"""By scheme, the largest object that one request stores."""

_IN_PARTS_BYTES_MIN = 256 * MIB
"""Smallest object that is sent in parts because the memory budget is below its size. No save makes such an object."""

_COPIED_HERE_BYTES_MAX = 64 * MIB
"""`move` passes objects up to this size through this process, and leaves larger ones to the server."""

_MOVES_MAX = 4
"""How often `move` starts again after another writer changed the object at one of the two keys."""

_DELETED_TOGETHER = 1000

_said_to_keep: set[str] = set()
"""Versioned buckets that were already warned about."""


class ObjectStore(ObjectReading, Store):
    """Keys to objects beneath a folder of a bucket.

    An object is stored by one request, whole or not at all, durable on return, and a listing shows the object at once.
    A put-if-absent is a request on condition that the key does not exist. Before the first such request that decides
    something, `probe.py` checks whether the server enforces the condition.

    A request whose reply is lost may still take effect, so a call that raised is not over.
    """

    def __init__(self, url: str, *, settings: Settings, clock: Clock | None = None) -> None:
        """Remember where; does no I/O.

        Args:
            url: `s3://`, `gs://` or `az://`, bucket and folder.
            settings: How the store is reached, and the memory for uploads.
            clock: Source of random names.
        Raises:
            InvalidError: The URL has another form, or has credentials.
        """
        super().__init__(address_of(url), settings)
        object_bytes_max = _OBJECT_BYTES_MAX[self.address.scheme]
        self._keeps_versions = False
        """Whether an object that this store has put got a version."""
        self._compares_bare_tags = False
        """Whether the server compares tags without quotes, as an earlier request has shown."""
        self._in_flight = BytesInFlight(settings.object_store.bytes_in_flight_max)
        self._clock = clock or SystemClock()
        self._parts = self._parts_of(settings)
        if self._parts is not None:
            # A request sends an object from memory, and memory is bounded.
            in_memory = max(settings.object_store.bytes_in_flight_max, _IN_PARTS_BYTES_MIN)
            object_bytes_max = min(object_bytes_max, in_memory)
        self.traits = replace(
            self.traits, object_bytes_max=object_bytes_max, appears_whole=True, checks_exclusive_creates=True
        )
        self._probe = Probe(self, self._clock, is_needed=not settings.object_store.single_writer)
        self._conditional_delete = ConditionalDelete(self.address, self.clients, self._clock)

    @property
    def _object_bytes_max(self) -> int:
        largest = self.traits.object_bytes_max
        assert largest is not None, "a request has a limit"
        return largest

    def _parts_of(self, settings: Settings) -> Parts | None:
        """Return the sender of large objects in parts; None where one request takes any object (Google)."""
        if self.address.scheme == "s3":
            requests = SignedRequests(self.address, settings.object_store, self.clients)
            return PartsOfBucket(requests, _encryption(settings.object_store.kms_key))
        return BlocksOfContainer(self.clients, self._clock, self.url) if self.address.scheme == "az" else None

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Store a small object whole, replacing an older one; durable on return."""
        try:
            self._put("store", key, data, "overwrite")
        except ConflictError as busy:
            raise TemporaryError(f"could not store {self.where(key)}: another request for it is under way") from busy

    def replace(self, key: str, data: bytes, seen: bytes | None, *, durable: bool = True) -> None:
        """Store a small object whole in place of one that the caller has read, in one request that compares."""
        found, meta = self._known.pop(key, (None, None))
        if found is not None and found == seen != data:
            # Read by the caller just now. If the object has changed since, the put is refused, and the object is read
            # again.
            with suppress(ConflictError):
                self._put_in_place_of(key, data, meta)
                return
        try:
            found, meta = self.got(key, max(len(data), len(seen or b"")))
        except MissingError:
            found, meta = None, None
        except CorruptError as larger:
            raise self._conflict(key) from larger
        if found == data:
            return
        if found != seen:
            raise self._conflict(key)
        self._put_in_place_of(key, data, meta)

    def put_if_absent(self, key: str, data: bytes, *, folders_durable: bool = True) -> None:
        """Store a small object whole unless the key exists; atomic, durable on return.

        An object of the same content counts as this one: the reply to an earlier try may have been lost.

        Raises:
            ConflictError: The key exists with other content; the object was not touched.
            UnavailableError: The request failed, and may take effect later.
        """
        self._split(key)
        if folders_durable:
            # An object without durable folders has a name that no other writer uses: such a put decides nothing.
            self._probe.require_exclusive_creates()
        self.create(key, memoryview(data))

    def require_exclusive_creates(self) -> None:
        """Check once in this process that the server enforces the condition of a create."""
        self._probe.require_exclusive_creates()

    def trust_exclusive_creates(self) -> None:
        """Take note that another process of the job has checked."""
        self._probe.trust()

    def upload(
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> Upload:
        """Begin an object that must not exist yet; the object is invisible until complete.

        An object of up to `traits.object_bytes_max` is collected in memory, and sent by one request. A larger object is
        sent in parts, except by Google, which takes any object by one request.
        """
        where, full = self.where(key), self.full_key(key)
        ledger = PartLedger(where, bytes_max=bytes_max, part_bytes=part_bytes)
        if bytes_max <= self._object_bytes_max:
            return ObjectUpload(ledger, self._in_flight, lambda memory: self.create(key, memory))
        if self._parts is None:
            raise InvalidError(
                f"{where}: an object of {bytes_max} bytes; {self.address.scheme}:// takes at most "
                f"{self._object_bytes_max} in one request. Save from more ranks, so that each one writes less"
            )
        return MultipartUpload(ledger, self._in_flight, self._parts, self, key, full)

    def lent_upload(self, key: str, parts: Sequence[memoryview]) -> Upload:
        """Begin an object that must not exist yet, out of memory that the caller lends; one request sends it."""
        where, full_bytes = self.where(key), sum(part.nbytes for part in parts)
        self.full_key(key)
        if full_bytes > self._object_bytes_max:
            raise InvalidError(f"{where}: an object of {full_bytes} bytes; expected at most {self._object_bytes_max}")
        return LentObject(where, parts, self._in_flight, lambda lent: self.create(key, lent))

    def abort_uploads(self, prefix: str, is_ours: Callable[[str], bool], *, dry_run: bool = False) -> int:
        """Remove unfinished uploads in parts; see `Store.abort_uploads`."""
        split_prefix(prefix)
        if self._parts is None:
            return 0
        full, where = self.address.prefix + prefix, self.where(prefix)
        return abort_uploads(self._parts, full, where, is_ours, dry_run=dry_run)

    def create(self, key: str, data: memoryview | Sequence[memoryview]) -> None:
        """Store an object unless its key exists; an object of the same content counts as this one.

        Args:
            key: The object.
            data: The content, in one place or in several.
        Raises:
            ConflictError: The key exists with other content.
            UnavailableError: The request failed, and may take effect later.
        """
        try:
            self._put("store", key, data, "create")
        except ConflictError as conflict:
            try:
                if self.holds(key, data if isinstance(data, memoryview) else memoryview(b"".join(data))):
                    return
            except MissingError:
                # The server was busy with another request for this key, and that one stored nothing.
                raise TemporaryError(
                    f"could not store {self.where(key)}: the server says that it exists, and has no such object",
                    may_take_effect=True,
                ) from conflict
            raise self._conflict(key) from conflict

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, a thousand by one request where the store can; absent keys are no error."""
        full = [self.full_key(key) for key in keys]
        for first in range(0, len(full), _DELETED_TOGETHER):
            batch = full[first : first + _DELETED_TOGETHER]
            try:
                self._delete_together(batch)
            except MissingError:
                # Some stores raise this for an absent key, and then skip the other keys.
                for name in batch:
                    with suppress(MissingError):
                        self._delete_together([name])
        if full:
            self._say_what_stays()

    def _delete_together(self, names: list[str]) -> None:
        shown = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        where = f"{self.address.scheme}://{self.address.bucket}/{shown}"
        self.clients.ask("delete", where, lambda api, client: api.delete(client, names))

    def identity(self, key: str) -> str:
        """Return a text that no other key shares: an object has one key."""
        meta = self.head(key)
        return f"{self.full_key(key)} {meta['e_tag']} {meta['version']}"

    def move(self, key: str, new_key: str) -> None:
        """Give an object another key: copy the object, then delete the original if the original has not changed.

        The copy replaces only the object that was at the new key before the original was read. So a process paused
        between copy and delete cannot overwrite a newer object, provided writers delete the source first.
        """
        self._split(key)
        self._split(new_key)
        for _ in range(_MOVES_MAX):
            before = self.head_or_none(new_key)
            meta = self._copied(key, new_key, before)
            if meta is None:
                continue
            if self._conditional_delete.delete(self.full_key(key), self.where(key), meta, self.head_full):
                return
            # Another writer stored a new object at `key` meanwhile: the new object is to be moved. If the copy replaced
            # an object, that object is gone and the copy stays: the next copy replaces this copy.
            if before is None:
                self.delete([new_key])
        raise TemporaryError(
            f"could not move {self.where(key)}: other writers keep changing this object or {self.where(new_key)}",
            may_take_effect=True,
        )

    def _copied(self, key: str, new_key: str, before: Any) -> Any:
        """Copy an object over the old object at the new key; return the metadata, None if either changed meanwhile."""
        meta = self.head(key)
        if meta["size"] <= _COPIED_HERE_BYTES_MAX:
            data, meta = self.got(key, _COPIED_HERE_BYTES_MAX)
            try:
                self._put_in_place_of(new_key, data, before)
            except ConflictError:
                return None
            return meta
        full, new_full = self.full_key(key), self.full_key(new_key)
        self.clients.ask(
            "copy", self.where(key), lambda api, client: api.copy(client, full, new_full), int(meta["size"])
        )
        return meta

    def _put_in_place_of(self, key: str, data: bytes, before: Any) -> None:
        """Store an object on condition that the key still holds the object `before`.

        Raises:
            ConflictError: The key holds another object.
        """
        if before is None:
            self.create(key, memoryview(data))
            return
        version = {name: before[name] for name in ("e_tag", "version") if before[name] is not None}
        bare = version | {"e_tag": str(before["e_tag"]).strip('"')}
        try:
            self._put("replace", key, data, bare if self._compares_bare_tags else version)
            return
        except ConflictError:
            now = self.head_or_none(key)
            if self._compares_bare_tags or now is None or now["e_tag"] != before["e_tag"] or version == bare:
                if now is not None and self.holds(key, memoryview(data)):
                    return
                raise
            # Some servers compare without the quotes that belong to the tag.
        try:
            self._put("replace", key, data, bare)
            self._compares_bare_tags = True
        except ConflictError:
            now = self.head_or_none(key)
            if now is None or now["e_tag"] != before["e_tag"]:
                raise
            raise InvalidError(
                f"{self.where(key)}: the server refuses to replace an object that has not changed. Ceph does so in a "
                "bucket that keeps versions; choose a bucket without versions"
            ) from None

    def _conflict(self, key: str) -> ConflictError:
        return ConflictError(f"{self.where(key)}: another writer stored it; it was not touched")

    def _put(self, doing: str, key: str, data: bytes | memoryview | Sequence[memoryview], mode: Any) -> None:
        full = self.full_key(key)
        parts = (data,) if isinstance(data, bytes | memoryview) else data
        count = sum(memoryview(part).nbytes for part in parts)
        stored = self.clients.ask(
            doing,
            self.where(key),
            lambda api, client: api.put(client, full, data, mode=mode, use_multipart=False),
            count,
        )
        # At Google every object has a version, whether the bucket keeps older versions or not.
        self._keeps_versions |= self.address.scheme != "gs" and stored["version"] not in (None, "null")

    def _say_what_stays(self) -> None:
        """Warn once that a deletion leaves old versions, if the bucket keeps versions."""
        bucket = f"{self.address.scheme}://{self.address.bucket}"
        if self._keeps_versions and bucket not in _said_to_keep:
            _said_to_keep.add(bucket)
            logger.warning(
                "%s keeps versions: a deleted object stays as an old version, and is paid for, until a lifecycle rule "
                "of the bucket removes the version",
                bucket,
            )


def _encryption(kms_key: str | None) -> dict[str, str]:
    """Return the headers that begin an object which a key of the key service encrypts."""
    if kms_key is None:
        return {}
    return {"x-amz-server-side-encryption": "aws:kms", "x-amz-server-side-encryption-aws-kms-key-id": kms_key}
