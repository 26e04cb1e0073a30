"""Read-only access by key, to a store or to files of another system."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One stored object."""

    key: str
    """Its key, relative to the root of the store."""

    bytes: int
    """Its size."""

    tag: str = field(default="", compare=False)
    """Changes with its content; empty if the listing does not say so."""


ByteRanges = Sequence[tuple[int, int]]
"""Half-open byte ranges of one object."""

Buffers = Sequence[memoryview]
"""Memory to read into."""

OnRange = Callable[[int, memoryview], None]
"""Takes the number and the bytes of a range that was read; the bytes may be read-only."""

OnBytes = Callable[[memoryview], None]
"""Takes bytes that were read."""

ReadRange = Callable[[int, int], "bytes | memoryview"]
"""Returns the bytes of one half-open range."""

Release = Callable[[], None]
"""Takes memory back that a store has read."""


@dataclass(frozen=True, slots=True)
class StoreTraits:
    """Facts about a store that decide how saves and loads use it. Each default is right for the simplest store."""

    read_alignment: int = 1
    """A power of two, at most `PAGE_BYTES`; 1 if the store reads into any memory alike.

    A buffer of `read_into` is filled without a further copy, and past the system's cache, if its address and the first
    byte of its range leave the same remainder. `view_for_range` returns such a buffer.
    """

    object_bytes_max: int | None = None
    """Largest object that a save uploads here; a larger one is `InvalidError`, or slower. None: no limit."""

    appears_whole: bool = True
    """Whether an object appears at `Upload.complete`, whole. Until then its parts are in memory. False: parts are
    written as they come, and the key of an upload may exist before its end."""

    failed_calls_are_over: bool = False
    """Whether a call that raised has no effect later; False if its request may still reach the storage."""

    page_entries: int | None = None
    """Entries that are best listed together: as many as one request brings, where it may begin at any key. More than
    any folder has, where each listing is read from its beginning. None, as for files: sizes are asked for one by one,
    and an object may have several names (`link`)."""

    maps_files: bool = False
    """Whether objects are files that `mapped` maps into memory."""

    lends_memory: bool = False
    """Whether `Upload.room` returns the object's own memory, for all parts at once: a save copies the state there, and
    needs no other memory."""

    checks_exclusive_creates: bool = False
    """Whether the server must show once a process that it refuses the second of two creates of one key:
    `require_exclusive_creates`. `put_if_absent` asks by itself, before a create that decides something."""

    has_parity: bool = False
    """Whether the store is the folders of many nodes, which keep parity of all packs of an attempt together. So a
    collection keeps all packs of an attempt while a step refers to one, and lists all folders at once; and a commit
    does not wait for a node that does not answer."""


class Readable(Protocol):
    """Read-only access by key: a store, or files of another system under their own names.

    Any thread may make any call. Implementations raise only the five errors, as `Store` describes.
    """

    url: str
    """Place of the store, for messages: the path of a folder, as a shell takes it, or a URL."""

    traits: StoreTraits
    """Facts about the store. A wrapper returns the traits of the inner store, but maps no files."""

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

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        """Read byte ranges of one object, exactly these, each into a buffer of its length.

        Args:
            key: The object.
            ranges: What to read, in any order. A store may read neighbours with one request.
            buffers: Writable memory for each range, best as `traits.read_alignment` says. Buffers may share memory if
                `on_range` is given.
            on_range: Called for each range, in order, before memory is filled for the next one: memory that is filled
                again and again stays in the processor's cache. Its bytes are in the buffer, or in memory of the store
                that is valid until the call returns. A buffer that was handed over is not touched again, unless another
                range has it too; the content of any other is undefined afterwards.
        Raises:
            MissingError: No such key.
            CorruptError: The object ends before a range does.
        """
        ...

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        """Read what is in memory already, from `start` on, into one buffer after the other.

        Cached bytes are copied once, straight to their destination. `read_into` reads the rest: it waits for storage.

        Args:
            key: The object.
            start: First byte.
            buffers: Writable memory for the consecutive bytes from there, of any alignment.
            on_bytes: Called with every run of bytes as it is copied, in order, so that the caller hashes it while the
                processor's cache holds it.
        Returns:
            Bytes read, counted from `start`; buffer contents beyond them are undefined. 0 if the store caches nothing.
        Raises:
            MissingError: No such key. A store that caches nothing need not look: `read_into` does.
            CorruptError: The object ends before the last buffer does. Likewise.
        """
        ...

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names that follow `prefix` (empty, or ending in `/`) before the next `/`, sorted.

        A folder may be listed after its last object has gone.
        """
        ...

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        """Yield every object whose key starts with `prefix` (empty, or ending in `/`), in the order of the keys.

        Objects not completed are not listed. An unknown prefix yields nothing. A store asks for a page when the one
        before it is used up. A listing that failed can go on after its last key.

        Args:
            prefix: What the keys start with.
            after: Only keys behind this one; it need not exist. Empty: from the first on.
            up_to: Only keys up to and including this one; None: to the last. So ranks that share a sorted list of keys
                each list the part from one of them to another.
        """
        ...

    def mapped(self, key: str) -> mmap.mmap | None:
        """Map all bytes of an object, where `traits.maps_files`; None if the object is empty.

        Memory is read from the file where it is touched. The memory is private: a write to it stays in this process. It
        shows this file also after the file was deleted or replaced. If the file is cut short, or cannot be read,
        touching the memory ends the process with SIGBUS.

        Raises:
            MissingError: No such key.
            UnavailableError: The file cannot be mapped.
        """
        raise AssertionError("only files are mapped")
