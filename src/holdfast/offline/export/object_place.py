"""The place of an export in a store of objects: every file is sent whole, and a note claims the place meanwhile."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from holdfast.base.clock import Clock
from holdfast.base.ports.store import Store, Upload
from holdfast.base.types.export import EXPORT_NOTE, Claim, DoneWindow, ExportFile, ExportWindow
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, MissingError
from holdfast.settings import PAGE_BYTES
from holdfast.stored.repository.publish import is_put_first

logger = logging.getLogger(__name__)

OBJECT_SHARE = 0.625
"""Share of the memory that objects on their way may take; the rest is for reads, which a store answers with memory of
its own."""

_NOTE_BYTES_MAX = 1 << 16
_TRIES = 16

_FOLDER = EXPORT_NOTE.rpartition("/")[0] + "/"
_BEGUN = _FOLDER + "begun"
"""What is put once the place was found free under the note: the nonce of the note."""

_PROBES = "reports/probe-"
"""What a store is asked about its creates with. A process that was killed just then leaves one."""


@dataclass(frozen=True, slots=True)
class _Note:
    """What claims a place."""

    fingerprint: str
    """Of the export."""

    nonce: str
    """Text of this claim alone."""


class ObjectPlace:
    """A folder in a store, or one object in it, that must not exist yet.

    A store has no rename, so the objects of an export appear one by one. The note beside them comes first and goes
    last. As long as it is there, everything under the names of the export belongs to the export that it states.
    """

    def __init__(self, store: Store, name: str = "") -> None:
        """Remember where; does no I/O.

        Args:
            store: The folder, or the folder around the object; it takes any names.
            name: Key of the one object; empty for a folder.
        """
        self.store, self._name = store, name
        self._note_key, self._begun_key = f"{name}{EXPORT_NOTE}", f"{name}{_BEGUN}"
        self.url = f"{store.url}/{name}" if name else store.url
        """The place, for messages."""

    def whole_file_bytes(self, files: Sequence[ExportFile], memory_bytes: int) -> int:
        """Return the bytes of the longest file, which is sent whole.

        Raises:
            InvalidError: It does not fit the memory of a worker, or the store. The message names the remedy.
        """
        room, object_bytes_max = int(memory_bytes * OBJECT_SHARE), self.store.traits.object_bytes_max
        largest = max(files, key=lambda file: file.bytes)
        where = f"{self.url}/{largest.name}".rstrip("/")
        if largest.bytes > room:
            needed = int(largest.bytes / OBJECT_SHARE) + 1
            raise InvalidError(
                f"{where}: a file of {largest.bytes} bytes is sent from memory, and a worker has {room} bytes for it. "
                f"Allow {needed} bytes of memory for each worker (--memory, memory_bytes=), or choose a smaller shard "
                "size (--shard-size, shard_bytes=)"
            )
        if object_bytes_max is not None and largest.bytes > object_bytes_max:
            raise InvalidError(
                f"{where}: a file of {largest.bytes} bytes; the store takes at most {object_bytes_max} in one request. "
                "Choose a smaller shard size, or a format of several files, or export to a disk"
            )
        return largest.bytes

    @contextmanager
    def claimed(self, fingerprint: str, files: Sequence[ExportFile], clock: Clock) -> Iterator[Claim]:
        """Claim the place until `publish`, also beyond the block. Files that are there are done: objects are whole."""
        yield Claim(done=self._stored(files) if self.claim(fingerprint, clock) else ())

    def upload(self, file: ExportFile) -> Upload:
        """Begin the object of a file."""
        part_bytes = -(-file.bytes // PAGE_BYTES) * PAGE_BYTES
        return self.store.upload(self._name or file.name, file.bytes, part_bytes, folders_durable=False)

    def record(self, journal: str, windows: Sequence[DoneWindow]) -> None:
        """Do nothing: an object is its own record."""

    def recorded(self, journal: str) -> Sequence[DoneWindow]:
        """Return nothing: an object has its checksums when it is sent."""
        return ()

    def claim(self, fingerprint: str, clock: Clock) -> bool:
        """Claim the place for an export; return whether an earlier call of it did, and may have stored files.

        Raises:
            ConflictError: Something is there already, or another export was begun there; nothing was touched.
        """
        note, is_ours = self._noted(), False
        for _ in range(_TRIES):
            if note is not None:
                break
            self._require_free(next(self._found(), None))
            # No two notes are alike: an equal one would count as this one.
            own = _Note(fingerprint, clock.random_bytes(8).hex())
            is_ours = is_put_first(self.store, self._note_key, json.dumps(asdict(own)).encode())
            note = own if is_ours else self._noted()  # None: the other export has ended, and left files or none.
        if note is None or note.fingerprint != fingerprint:
            raise ConflictError(
                f"{self.url}: another export, or one with other options, was begun there and has not ended; it was not "
                f"touched. Run its command again to end it, or remove {self.store.url}/{self._note_key} and what it "
                "has stored, or export elsewhere"
            )
        return self._has_begun(note, is_ours=is_ours)

    def _has_begun(self, note: _Note, *, is_ours: bool) -> bool:
        """Return whether files were stored under a note already; if none were, let it begin.

        Another export may have come and gone between the look and the note, and its files may have the same names and
        sizes. The process may have ended just then. So a note counts once the place was found free under it.

        Args:
            note: The note.
            is_ours: Whether this call has put it; it is removed again if it does not count.
        Raises:
            ConflictError: Files are there that do not belong to it.
        """
        if not is_ours and self._begun_by() == note.nonce:
            return True
        found = next(self._found(), None)
        if found is None:
            self.store.put(self._begun_key, note.nonce.encode())
            return False
        # Another process with the same export may have begun it meanwhile.
        if self._begun_by() == note.nonce:
            return True
        if is_ours:
            self.store.delete([self._note_key])
        self._require_free(found)
        return False

    def _stored(self, files: Sequence[ExportFile]) -> list[DoneWindow]:
        """Return the files that are there.

        Raises:
            ConflictError: Something else has the name of one.
        """
        sizes, done = dict(self._found()), []
        for number, file in enumerate(files):
            found = sizes.get(file.name)
            if found is None:
                continue
            if found != file.bytes:
                raise ConflictError(
                    f"{self.url}/{file.name}: an object of {found} bytes; this export stores {file.bytes} bytes there. "
                    "Nothing was touched. Remove it, or export elsewhere"
                )
            done.append(DoneWindow(ExportWindow(number, 0, file.bytes)))
        return done

    def _found(self) -> Iterator[tuple[str, int]]:
        if not self._name:
            for entry in self.store.list():
                if not entry.key.startswith((_FOLDER, _PROBES)):
                    yield entry.key, entry.bytes
            return
        try:
            yield "", self.store.size(self._name)
        except MissingError:
            for entry in self.store.list(f"{self._name}/"):
                yield entry.key.removeprefix(f"{self._name}/"), entry.bytes

    def publish(self) -> None:
        """Remove the note: the export is complete. It stays so if the note does."""
        try:
            self.store.delete([self._note_key])
            self.store.delete([self._begun_key])  # Alone it says nothing; a note alone would be one that never began.
        except CheckpointError as error:
            logger.warning("%s: is complete, but its note could not be removed: %s", self.url, error)

    def _require_free(self, found: tuple[str, int] | None) -> None:
        """Require that nothing was found."""
        if found is not None:
            there = f"{self.url}/{found[0]}".rstrip("/")
            raise ConflictError(f"{there}: exists already; it was not touched. Export elsewhere")

    def _begun_by(self) -> str | None:
        """Return the nonce of the note under which files were stored; None if there is none."""
        try:
            return self.store.get(self._begun_key, _NOTE_BYTES_MAX).decode("utf-8", "replace")
        except (CorruptError, MissingError):
            return None

    def _noted(self) -> _Note | None:
        """Return the note; None if there is none, and one of no export if it is damaged."""
        try:
            note = json.loads(self.store.get(self._note_key, _NOTE_BYTES_MAX))
            return _Note(str(note["fingerprint"]), str(note["nonce"]))
        except MissingError:
            return None
        except (CorruptError, ValueError, KeyError, TypeError):
            return _Note("", "")
