"""The bases of wrappers around stores: every call is passed on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from holdfast.base.ports.readable import Buffers, ByteRanges, OnBytes, OnRange, Readable, StoreEntry
from holdfast.base.ports.store import Store, Upload

_Result = TypeVar("_Result")


class ForwardingReadable(Readable):
    """Passes every call on to `inner`: the base of wrappers, which override the methods they change.

    This base is in the room of the port, since stores, foreign formats, `testing/` and `offline/` all wrap stores.
    """

    def __init__(self, inner: Readable) -> None:
        """Wrap `inner`."""
        self._inner = inner
        self.url = inner.url
        # `mapped` is not passed on. A subclass that maps files overrides the trait.
        self.traits = replace(inner.traits, maps_files=False)

    def _around(self, name: str, subject: str, call: Callable[[], _Result]) -> _Result:
        """Make one call of a method about a key or prefix; override this to change every call alike."""
        return call()

    def size(self, key: str) -> int:
        """Return the bytes of an object."""
        return self._around("size", key, lambda: self._inner.size(key))

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole."""
        return self._around("get", key, lambda: self._inner.get(key, bytes_max))

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        """Read byte ranges of one object, each into a buffer of its length."""
        self._around("read_into", key, lambda: self._inner.read_into(key, ranges, buffers, on_range))

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        """Read what is in memory already."""
        return self._around("get_cached", key, lambda: self._inner.get_cached(key, start, buffers, on_bytes))

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders under a prefix."""
        return self._around("folders", prefix, lambda: self._inner.folders(prefix))

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        """Yield every object under a prefix, in the order of the keys."""
        return self._around("list", prefix, lambda: self._inner.list(prefix, after=after, up_to=up_to))


class ForwardingStore(ForwardingReadable, Store):
    """Passes every call on to the store `inner`; see `ForwardingReadable`."""

    _inner: Store

    def __init__(self, inner: Store) -> None:
        """Wrap `inner`."""
        super().__init__(inner)

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Store a small object whole, replacing an older one."""
        self._around("put", key, lambda: self._inner.put(key, data, durable=durable))

    def replace(self, key: str, data: bytes, seen: bytes | None, *, durable: bool = True) -> None:
        """Store a small object whole in place of one that the caller has read."""
        self._around("replace", key, lambda: self._inner.replace(key, data, seen, durable=durable))

    def put_if_absent(self, key: str, data: bytes, *, folders_durable: bool = True) -> None:
        """Store a small object whole unless the key exists."""
        self._around(
            "put_if_absent", key, lambda: self._inner.put_if_absent(key, data, folders_durable=folders_durable)
        )

    def upload(
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> Upload:
        """Begin an object that must not exist yet."""
        return self._around(
            "upload",
            key,
            lambda: self._inner.upload(
                key, bytes_max, part_bytes, folders_durable=folders_durable, may_be_less=may_be_less
            ),
        )

    def sync(self, prefix: str) -> None:
        """Make durable the names in a folder and in those above it."""
        self._around("sync", prefix, lambda: self._inner.sync(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; absent keys are no error."""
        listed = tuple(keys)
        self._around("delete", ",".join(listed), lambda: self._inner.delete(listed))

    def move(self, key: str, new_key: str) -> None:
        """Give an object another key."""
        self._around("move", key, lambda: self._inner.move(key, new_key))

    def link(self, key: str, new_key: str) -> bool:
        """Give an object one more key, if the store can."""
        return self._around("link", key, lambda: self._inner.link(key, new_key))

    def free_bytes(self) -> int | None:
        """Forward to the inner store."""
        return self._inner.free_bytes()

    def identity(self, key: str) -> str:
        """Return a text that the keys of one object share."""
        return self._around("identity", key, lambda: self._inner.identity(key))
