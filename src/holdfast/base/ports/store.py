"""The store: keys to bytes, in a file system or an object store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Protocol

from holdfast.base.ports.keys import Split, split_key, split_prefix
from holdfast.base.ports.parts import CollectedUpload, PartLedger
from holdfast.base.ports.ranges import check_buffers, check_ranges, hand_out
from holdfast.base.ports.readable import (
    Buffers,
    ByteRanges,
    OnBytes,
    OnRange,
    Readable,
    ReadRange,
    Release,
    StoreTraits,
)
from holdfast.base.ports.temporary import RetryCounts
from holdfast.errors import ConflictError, CorruptError, MissingError


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


class Store(Readable, Protocol):
    """Keys to bytes.

    A key is relative, its parts are separated by `/`, and each part matches `[A-Za-z0-9._-]{1,128}` without a leading
    dot. Any other key is `InvalidError`. A class of your own derives from `Store` and writes the methods up to `move`;
    `docs/stores.md` shows one.

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

    traits: StoreTraits = StoreTraits()
    """Facts about the store."""

    read_bytes: Mapping[str, int] = MappingProxyType({})
    """Bytes of packs that were read so far, by place within the store; empty for a store of one place."""

    rebuilt: Store | None = None
    """The packs of this store, read from other bytes than their own: a pack may be damaged. None: there are none."""

    _split: Split = staticmethod(split_key)
    """Which keys there are."""

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Store a small object whole, replacing an older one.

        Args:
            key: The object.
            data: Its content.
            durable: Whether the object is durable on return. If not, a power cut may remove or empty it; it is faster.
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

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, in any order; absent keys are no error. Follows no links.

        Args:
            keys: Any number. A store that removes many objects with one request makes as few requests as it can.
        Raises:
            InvalidError: A text is no key, or this user may not delete; some objects may be gone.
            UnavailableError: It failed; some objects may be gone. The same call again removes the rest.
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
        if is_still_to_replace(self, key, data, seen):
            self.put(key, data, durable=durable)

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
        self._split(key)
        ledger = PartLedger(f"{self.url}/{key}", bytes_max=bytes_max, part_bytes=part_bytes)
        return CollectedUpload(ledger, lambda data: self.put_if_absent(key, bytes(data)))

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        """Return 0: the store caches nothing. The store does not look at the object."""
        self._split(key)
        end = max(start, 0) + sum(buffer.nbytes for buffer in buffers)
        check_buffers(f"{self.url}/{key}", end, start, buffers)
        return 0

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders directly under a prefix, sorted: by a listing of every key below."""
        below = (entry.key[len(prefix) :].split("/", 1) for entry in self.list(prefix))
        return sorted({parts[0] for parts in below if len(parts) == 2})

    def sync(self, prefix: str) -> None:
        """Make durable the names in a folder and in those above it, whichever process stored the objects.

        Raises:
            UnavailableError: They could not be made durable.
        """
        split_prefix(prefix, self._split)

    def link(self, key: str, new_key: str) -> bool:
        """Give an object one more key, without a copy; return False if this store or this object cannot have one.

        Both keys are alike from then on: a put or delete at one changes nothing at the other. The new name is durable
        once `sync` of its folder returns. A key that names this very object already is a success.

        Raises:
            MissingError: No such key.
            ConflictError: Another object is at `new_key`; it was not touched.
        """
        self._split(new_key)
        self.size(key)
        return False

    def identity(self, key: str) -> str:
        """Return a text that two keys share exactly if they name one object, as after `link`.

        Raises:
            MissingError: No such key.
        """
        self.size(key)
        return key

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

    def free_bytes(self) -> int | None:
        """Return the free space; None if the store has no known limit."""
        return None

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

    # --------------------------------------------------------------------------- checks for authors of a store

    def require_key(self, key: str) -> None:
        """Require a key.

        Raises:
            InvalidError: The text is no key.
        """
        self._split(key)

    def require_prefix(self, prefix: str) -> None:
        """Require a prefix: an empty text, or a key followed by one slash.

        Raises:
            InvalidError: The text is neither.
        """
        split_prefix(prefix, self._split)

    def hand_out(
        self,
        key: str,
        total_bytes: int,
        ranges: ByteRanges,
        buffers: Buffers,
        on_range: OnRange | None,
        read: ReadRange,
    ) -> None:
        """Carry out `read_into` with a function that returns the bytes of one range.

        Args:
            key, total_bytes: The object and its size.
            ranges, buffers, on_range: As for `read_into`.
            read: Takes start and stop.
        """
        check_ranges(f"{self.url}/{key}", total_bytes, ranges, buffers)
        hand_out((read(start, stop) for start, stop in ranges), buffers, on_range)


def is_still_to_replace(store: Readable, key: str, data: bytes, seen: bytes | None) -> bool:
    """Return whether an object still has the bytes that the caller has read; False if the new bytes are stored already.

    Args:
        store: The store. Another writer may store the object between this look and the put of the caller.
        key: The key of the object.
        data: The bytes to store.
        seen: The bytes that the caller has read; None: there was no object.
    Raises:
        ConflictError: The object has other bytes.
    """
    conflict = ConflictError(f"{store.url}/{key}: another writer replaced it meanwhile; it was not touched")
    found = None
    try:
        with suppress(MissingError):
            found = store.get(key, max(len(data), len(seen or b"")))
    except CorruptError as larger:
        raise conflict from larger
    if found == data:
        return False
    if found != seen:
        raise conflict
    return True
