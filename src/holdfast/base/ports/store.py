"""The store: keys to bytes, in a file system or an object store."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.base.ports.temporary import RetryCounts


@dataclass(frozen=True, slots=True)
class Entry:
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

Release = Callable[[], None]
"""Takes memory back that a store has read."""


class Upload(Protocol):
    """An object being written, in parts, in any order and from any thread."""

    def room(self, offset: int, length_bytes: int) -> memoryview | None:
        """Return memory of the store for one part, so that nothing is copied twice; None: use memory of your own.

        The caller fills it and passes it to `write`: all of it, or its front as the last part of an object that is less
        than its `bytes_max`. Then, and after `abort`, the memory is the store's again. The call may wait for memory of
        other uploads. Asked again before `write`, it returns the same memory.

        Args:
            offset, length_bytes: The part, as for `write`.
        """
        ...

    def write(self, offset: int, data: memoryview, release: Release | None = None) -> None:
        """Write one part.

        Args:
            offset: Where the part starts, in bytes; a multiple of the upload's `part_bytes`.
            data: The part: `part_bytes` long, less only for the last one. Memory that `room` returned for this part is
                not copied, nor is page-aligned memory by a file system.
            release: None: the caller may reuse the memory once the call has ended, so the store copies what it needs
                for longer. Otherwise the store may keep reading the memory, until `complete` for example. It calls
                `release` exactly once, on any thread, when it will not read the memory again: also after `abort`, and
                also if `write` raises. Of memory that `room` returned it is never given.
        """
        ...

    def complete(self, total_bytes: int | None = None) -> None:
        """Make the object durable and visible; its folders too, unless the upload was begun without that.

        Args:
            total_bytes: The size of the object, if it is less than the `bytes_max` of the upload; None: `bytes_max`.
        Raises:
            InvalidError: The parts written are not those of an object of this size.
            ConflictError: The key exists by now; the object of the other writer was not touched.
            UnavailableError: The object could not be made durable; do not trust it, and abort the upload.
        """
        ...

    def abort(self) -> None:
        """Remove everything of an upload that was not completed. After `complete`, or a second time, do nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Traits:
    """Facts about a store that decide how saves and loads use it. Each default is right for the simplest store."""

    read_alignment: int = 1
    """A power of two, at most `PAGE_BYTES`; 1 if the store reads into any memory alike.

    A buffer of `read_into` is filled without a further copy, and past the system's cache, if its address and the first
    byte of its range leave the same remainder. `view_for_range` returns such a buffer.
    """

    object_bytes_max: int | None = None
    """Largest object that a save uploads here; a larger one is `InvalidError`, or slower. None: no limit."""

    appears_whole: bool = False
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

    checks_exclusive_creates: bool = False
    """Whether the server must show once a process that it refuses the second of two creates of one key:
    `require_exclusive_creates`. `put_if_absent` asks by itself, before a create that decides something."""


class Readable(Protocol):
    """Read-only access by key: a store, or files of another system under their own names.

    Any thread may make any call. Implementations raise only the five errors, as `Store` describes.
    """

    url: str
    """Place of the store, for messages: the path of a folder, as a shell takes it, or a URL."""

    traits: Traits
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

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[Entry]:
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


def view_for_range(buffer: memoryview, start: int, stop: int, alignment: int) -> memoryview:
    """Return the part of a page-aligned buffer that takes bytes `[start, stop)` of an object without a further copy.

    Args:
        buffer: Page-aligned, at least `alignment - 1` bytes longer than the range.
        start, stop: The range.
        alignment: `traits.read_alignment` of the store.
    """
    first = start % alignment
    return buffer[first : first + stop - start]


def read_range(files: Readable, key: str, start: int, stop: int, buffer: memoryview) -> memoryview:
    """Read one range of an object into a buffer as `view_for_range` takes it; return its bytes in the buffer."""
    view = view_for_range(buffer, start, stop, files.traits.read_alignment)
    files.read_into(key, [(start, stop)], [view])
    return view


def hand_out(held: Sequence[bytes | memoryview], buffers: Buffers, on_range: OnRange | None) -> None:
    """Carry out `read_into` with ranges that are in memory: nothing is copied if `on_range` takes them.

    Args:
        held: Bytes of each range.
        buffers, on_range: As for `read_into`.
    """
    for number, (data, buffer) in enumerate(zip(held, buffers, strict=True)):
        if on_range is not None:
            on_range(number, memoryview(data))
        elif data:  # An empty buffer cannot be cast.
            buffer.cast("B")[:] = data


class Store(Readable, Protocol):
    """Keys to bytes.

    A key is relative, its parts are separated by `/`, and each part matches `[A-Za-z0-9._-]{1,128}` without a leading
    dot. Any other key is `InvalidError`.

    A store has no append, no locks and no rename but `move`, so that file systems and object stores behave alike. Any
    thread may make any call. Implementations raise only the five errors. A wrong call, or a place without write
    permission, is `InvalidError`. A failure that may be temporary (full disk, quota, I/O error, too many open files) is
    `UnavailableError`. An absent key is `MissingError`, a lost race `ConflictError`.

    A store over a network never tries a call again. The store raises `TemporaryError` of `base/ports/temporary.py`, a
    kind of `UnavailableError`, for a failure that the same call may not meet again, and a wrapper tries again
    (`backends/stores/wrappers/`). After a `TemporaryError` any call may be repeated: `Upload.write` with the same
    memory, and `Upload.complete`, which takes an object that an earlier try stored as its own if the object has these
    bytes. `read_into`, `Upload.write` and `Upload.complete` end in time by themselves. Once one of them has raised, the
    store touches no memory but the memory that the upload holds until `release`. Another call may be abandoned while
    the call runs.
    """

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Store a small object whole, replacing an older one.

        Args:
            key: The object.
            data: Its content.
            durable: Whether the object is durable on return. If not, a power cut may remove or empty it; it is faster.
        """
        ...

    def replace(self, key: str, data: bytes, seen: bytes | None, *, durable: bool = True) -> None:
        """Store a small object whole in place of one that the caller has read.

        An object store compares and replaces at once. A file system compares just before it replaces: so what decides
        something is never replaced by this call alone.

        Args:
            key: The object.
            data: Its content.
            seen: What the caller has read there; None if it found nothing.
            durable: As for `put`.
        Raises:
            ConflictError: Neither `seen` nor `data` is there; it was not touched.
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

    def upload(
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> Upload:
        """Begin an object that must not exist yet.

        Args:
            key: Its key.
            bytes_max: Its size, or what it will not exceed; the store reserves the space if it can.
            part_bytes: Size of every part but the last; a multiple of `PAGE_BYTES`.
            folders_durable: Whether `complete` makes its name durable too, as for `put_if_absent`.
            may_be_less: Whether `complete` may state fewer bytes. Then a store without space for `bytes_max` reserves
                none, and only a part for which there is no space fails.
        Raises:
            ConflictError: The key exists; a store may say so only at `complete`.
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
        """Remove objects, in any order; absent keys are no error. Follows no links.

        Args:
            keys: Any number. A store that removes many objects with one request makes as few requests as it can.
        Raises:
            InvalidError: A key is none, or this user may not delete; some objects may be gone.
            UnavailableError: It failed; some objects may be gone. The same call again removes the rest.
        """
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

    # ------------------------------------------------------------- methods with defaults, right for most stores

    def lent_upload(self, key: str, parts: Sequence[memoryview]) -> Upload | None:
        """Begin an object that must not exist yet, out of memory that the caller lends; None: only parts are written.

        `Upload.complete` sends the object; nothing is written before. The call may wait for other uploads, as
        `Upload.room`. The name is as durable as that of an upload with `folders_durable=False`.

        Args:
            key: Its key.
            parts: Its bytes, one part after the other. They may change until `complete` is called. From then on, until
                `complete` has returned, a change is sent or not. A request that was given up may read them longer, and
                has no effect once another request has stored the object.
        """
        return None

    def require_exclusive_creates(self) -> None:
        """Ask the server, unless this process has asked before; see `traits.checks_exclusive_creates`.

        Raises:
            InvalidError: The server lets two writers create one object.
            CheckpointError: The server does not answer, or refuses these credentials.
        """
        return

    def trust_exclusive_creates(self) -> None:
        """Record that another process of the job has asked, and that the server does refuse the second create."""
        return

    def require_replacing_moves(self) -> None:
        """Require that `move` replaces at once an object at the new key.

        Raises:
            InvalidError: The store cannot: such a move is refused.
        """
        return

    def abort_uploads(self, prefix: str, is_ours: Callable[[str], bool], *, dry_run: bool = False) -> int:
        """Remove incomplete uploads under a prefix; return their number. 0 where no upload leaves hidden parts.

        The caller knows that no process is sending them.

        Args:
            prefix: The beginning of their keys.
            is_ours: Takes the rest of a key; returns whether that upload is to go.
            dry_run: Only count.
        Raises:
            InvalidError: This user may not list or abort uploads, or the server cannot.
            UnavailableError: It failed; the same call again removes the rest.
        """
        return 0

    def with_any_names(self) -> Store | None:
        """Return the same store for keys of any printable characters, without empty parts, `.` or `..`.

        None: the store has no such names, so checkpoints of other systems in it cannot be read.
        """
        return None

    def for_operation(self, name: str, rank: int, world_size: int) -> Store:
        """Return a view of the store for one save or load: the retries of all calls through it share one deadline.

        Args:
            name: Name of the save or load, for messages.
            rank: This rank. Rank 0 warns if storage does not answer.
            world_size: Ranks of the job, which share the cap on its bandwidth.
        """
        return self

    @property
    def retry_counts(self) -> RetryCounts:
        """The cost of all retries of the store so far, in all views."""
        return RetryCounts()
