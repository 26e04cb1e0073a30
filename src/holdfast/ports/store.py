"""The store: keys to bytes, in a file system or an object store. Also the bases of wrappers around stores."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored object."""

    key: str
    """Its key, relative to the root of the store."""

    bytes: int
    """Its size."""


ByteRanges = Sequence[tuple[int, int]]
"""Half-open byte ranges of one object."""

Buffers = Sequence[memoryview]
"""Memory to read into."""

OnRange = Callable[[int, memoryview], None]
"""Takes the number and the bytes of a range that was read."""

OnBytes = Callable[[memoryview], None]
"""Takes bytes that were read."""


class Upload(Protocol):
    """An object being written, in parts, in any order and from any thread."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write one part.

        Args:
            offset: Where the part starts, in bytes; a multiple of the upload's `part_bytes`.
            data: The part: `part_bytes` long, or the rest for the last one. Page-aligned memory is written without a
                copy. The caller may reuse the memory once the call returns.
        """
        ...

    def complete(self) -> None:
        """Make the object durable and visible; its folders too, unless the upload was begun without that.

        Raises:
            ConflictError: The key exists by now; the object of the other writer was not touched.
            UnavailableError: The object could not be made durable; do not trust it, and abort the upload.
        """
        ...

    def abort(self) -> None:
        """Remove everything of an upload that was not completed. After `complete`, or a second time, do nothing."""
        ...


class Readable(Protocol):
    """Read-only access by key: a store, or files of another system under their own names.

    Any thread may make any call. Implementations raise only the five errors, as `Store` describes.
    """

    @property
    def url(self) -> str:
        """Place of the store, for messages: the path of a folder, as a shell takes it, or a URL."""
        ...

    def size(self, key: str) -> int:
        """Return the bytes of an object.

        Raises:
            MissingError: No such key.
        """
        ...

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole.

        Raises:
            MissingError: No such key.
            CorruptError: It is larger than `bytes_max`; nothing was allocated for it.
        """
        ...

    def get_ranges(
        self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None
    ) -> list[memoryview]:
        """Read byte ranges of one object.

        Args:
            key: The object.
            ranges: What to read.
            buffers: One writable, page-aligned buffer per range, at least two pages longer than the range, so that a
                store may read whole pages around it. Ranges may share a buffer if `on_range` is given.
            on_range: Called for each range, in order, before the next one is read: memory that is filled again and
                again stays in the processor's cache.
        Returns:
            For each range a view of exactly its bytes inside its buffer. Where ranges share a buffer, only the view
            of the last one still shows its own bytes.
        Raises:
            MissingError: No such key.
            CorruptError: The object ends before a range does.
        """
        ...

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        """Read what is in memory already, from `start` on, into one buffer after the other.

        Cached bytes are copied once, straight to their destination. `get_ranges` reads the rest; it needs page-aligned
        buffers.

        Args:
            key: The object.
            start: First byte.
            buffers: Writable memory for the consecutive bytes from there, of any alignment.
            on_bytes: Called with every run of bytes as it is copied, in order, so that the caller hashes it while the
                processor's cache holds it.
        Returns:
            Bytes read, counted from `start`; buffer contents beyond them are undefined. 0 if the store caches nothing.
        Raises:
            MissingError: No such key.
            CorruptError: The object ends before the last buffer does.
        """
        ...

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names that follow `prefix` (empty, or ending in `/`) before the next `/`, sorted.

        A folder may be listed after its last object has gone.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yield every object whose key starts with `prefix` (empty, or ending in `/`), in any order.

        Objects not completed are not listed. An unknown prefix yields nothing.
        """
        ...


@runtime_checkable
class Mappable(Protocol):
    """A store whose objects are files, which can be mapped into memory."""

    def mapped(self, key: str) -> mmap.mmap | None:
        """Map all bytes of an object: memory that is read from the file where it is touched; None if it is empty.

        The memory is private: a write to it stays in this process. It shows the bytes of this file also after the file
        was deleted or replaced. If the file is cut short, or cannot be read, touching the memory ends the process with
        SIGBUS.

        Raises:
            MissingError: No such key.
            UnavailableError: It cannot be mapped.
        """
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a pack is stored."""

    files: Readable
    """The store, or the files of another system."""

    key: str
    """Its key in `files`."""

    @property
    def url(self) -> str:
        """Place of the pack, for messages."""
        return f"{self.files.url}/{self.key}"


Packs = Callable[[str], Stored]
"""Returns where a pack of a checkpoint is stored, by its name in the index."""


def packs_under(files: Readable, prefix: str) -> Packs:
    """Return the packs of one folder, stored under their names."""
    return lambda name: Stored(files, prefix + name)


def copy_ranges(held: Sequence[bytes | memoryview], buffers: Buffers, on_range: OnRange | None) -> list[memoryview]:
    """Carry out `get_ranges` with ranges that are in memory: copy each range to the front of its buffer.

    Args:
        held: Bytes of each range.
        buffers: One for each range, at least as long.
        on_range: As for `get_ranges`.
    """
    views = []
    for number, (data, buffer) in enumerate(zip(held, buffers, strict=True)):
        view = buffer.cast("B")[: len(data)]
        view[:] = data
        views.append(view)
        if on_range is not None:
            on_range(number, view)
    return views


class Store(Readable, Protocol):
    """Keys to bytes.

    A key is relative, its parts are separated by `/`, and each part matches `[A-Za-z0-9._-]{1,128}` without a leading
    dot. Any other key is `InvalidError`.

    A store has no append, no locks and no rename but `move`, so that file systems and object stores behave alike. Any
    thread may make any call. Implementations raise only the five errors. A wrong call, or a place without write
    permission, is `InvalidError`. A failure that may be temporary (full disk, quota, I/O error, too many open files) is
    `UnavailableError`. An absent key is `MissingError`, a lost race `ConflictError`.
    """

    @property
    def failed_calls_are_over(self) -> bool:
        """Whether a call that raised has no effect later; False if its request may still reach the storage."""
        ...

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Store a small object whole, replacing an older one.

        Args:
            key: The object.
            data: Its content.
            durable: Whether the object is durable on return. If not, the call is faster, and a power cut may remove or
                empty the object.
        """
        ...

    def put_if_absent(self, key: str, data: bytes, *, folders_durable: bool = True) -> None:
        """Store a small object whole unless the key exists; atomic, durable on return.

        Args:
            key: The object.
            data: Its content.
            folders_durable: Whether its name is durable on return too, in its folder and in those above. If not, only
                its content is, until `sync` of its folder returns, in this process or another.
        Raises:
            ConflictError: The key exists, and its object is durable; it was not touched.
        """
        ...

    def upload(self, key: str, total_bytes: int, part_bytes: int, *, folders_durable: bool = True) -> Upload:
        """Begin an object that must not exist yet.

        Args:
            key: Its key.
            total_bytes: Its exact size; the store reserves the space if it can.
            part_bytes: Size of every part but the last; a multiple of `PAGE_BYTES`.
            folders_durable: Whether `complete` makes its name durable too, as for `put_if_absent`.
        Raises:
            ConflictError: The key exists.
            UnavailableError: There is not enough space.
        """
        ...

    def sync(self, prefix: str) -> None:
        """Make durable the names in a folder and in those above it, whichever process stored the objects.

        Args:
            prefix: The folder, ending in `/`.
        Raises:
            UnavailableError: They could not be made durable.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; absent keys are no error. Follows no links."""
        ...

    def link(self, key: str, new_key: str) -> bool:
        """Give an object one more key, without a copy; return False if this store or this object cannot have one.

        Both keys are alike from then on: what is put or deleted at one changes nothing at the other. The new name is
        durable once `sync` of its folder returns. A key that names this very object already is a success.

        Args:
            key: The object.
            new_key: Its further key.
        Raises:
            MissingError: No such key.
            ConflictError: Another object is at `new_key`; it was not touched.
        """
        ...

    def identity(self, key: str) -> str:
        """Return a text that two keys share exactly if they name one object, as after `link`.

        Raises:
            MissingError: No such key.
        """
        ...

    def move(self, key: str, new_key: str) -> None:
        """Give an object another key; durable on return.

        Exactly one object moves, the one that is at `key` at that moment. At any time, and after a crash at any point,
        it is at one key at least. What is stored at `key` afterwards stays. An object store copies the object, deletes
        the original on condition that it is still the same, and otherwise deletes the copy and begins again.

        Args:
            key: The object.
            new_key: A key that no other call uses, for example with random digits. An object there may be replaced.
                Where it is the manifest of a checkpoint that is overwritten, it is replaced at once. If nothing is at
                `key` then, this call may return as if it had moved it: the caller looks.
        Raises:
            MissingError: No such key.
            UnavailableError: It failed; the object may have either key.
        """
        ...


class ForwardingReadable:
    """Passes every call on to `inner`: the base of wrappers, which override the methods they change.

    It is here beside the port because stores, foreign formats, `testing/` and `offline/` all wrap stores and may not
    import each other.
    """

    def __init__(self, inner: Readable) -> None:
        """Wrap `inner`."""
        self._inner = inner
        self.url = inner.url

    def _around(self, name: str, subject: str, call: Callable[[], _Result]) -> _Result:
        """Make one call of a method about a key or prefix; override this to change every call alike."""
        return call()

    def size(self, key: str) -> int:
        """Return the bytes of an object."""
        return self._around("size", key, lambda: self._inner.size(key))

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole."""
        return self._around("get", key, lambda: self._inner.get(key, bytes_max))

    def get_ranges(
        self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None
    ) -> list[memoryview]:
        """Read byte ranges of one object."""
        return self._around("get_ranges", key, lambda: self._inner.get_ranges(key, ranges, buffers, on_range))

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        """Read what is in memory already."""
        return self._around("get_cached", key, lambda: self._inner.get_cached(key, start, buffers, on_bytes))

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders under a prefix."""
        return self._around("folders", prefix, lambda: self._inner.folders(prefix))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yield every object under a prefix."""
        return self._around("list", prefix, lambda: self._inner.list(prefix))


class ForwardingStore(ForwardingReadable):
    """Passes every call on to the store `inner`; see `ForwardingReadable`."""

    _inner: Store

    def __init__(self, inner: Store) -> None:
        """Wrap `inner`."""
        super().__init__(inner)
        self.failed_calls_are_over = inner.failed_calls_are_over

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Store a small object whole, replacing an older one."""
        self._around("put", key, lambda: self._inner.put(key, data, durable=durable))

    def put_if_absent(self, key: str, data: bytes, *, folders_durable: bool = True) -> None:
        """Store a small object whole unless the key exists."""
        self._around(
            "put_if_absent", key, lambda: self._inner.put_if_absent(key, data, folders_durable=folders_durable)
        )

    def upload(self, key: str, total_bytes: int, part_bytes: int, *, folders_durable: bool = True) -> Upload:
        """Begin an object that must not exist yet."""
        return self._around(
            "upload",
            key,
            lambda: self._inner.upload(key, total_bytes, part_bytes, folders_durable=folders_durable),
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

    def identity(self, key: str) -> str:
        """Return a text that the keys of one object share."""
        return self._around("identity", key, lambda: self._inner.identity(key))
