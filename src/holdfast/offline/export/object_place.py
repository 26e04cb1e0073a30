"""Where an export stores its objects, and the note that claims the place until the last one is there."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

from holdfast.clock import Clock
from holdfast.errors import CheckpointError, ConflictError, CorruptError, MissingError
from holdfast.ports.store import Store
from holdfast.types.export import EXPORT_NOTE

logger = logging.getLogger(__name__)

_NOTE_BYTES_MAX = 1 << 16

_PROBES = "reports/probe-"
"""What a store is asked about its creates with. A process that was killed just then leaves one."""


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
        self._note_key = f"{name}{EXPORT_NOTE}"
        self.url = f"{store.url}/{name}" if name else store.url
        """The place, for messages."""

    def key_of(self, file: str) -> str:
        """Return the key of a file of the export."""
        return self._name or file

    def claim(self, fingerprint: str, clock: Clock) -> bool:
        """Claim the place for an export; return whether an earlier call of it did, and may have stored files.

        Raises:
            ConflictError: Something is there already, or another export was begun there; nothing was touched.
        """
        found = self._noted()
        if found is None:
            self._require_free()
            # No two notes are alike: an equal one would count as this one.
            note = {"fingerprint": fingerprint, "nonce": clock.random_bytes(8).hex()}
            try:
                self.store.put_if_absent(self._note_key, json.dumps(note).encode())
            except ConflictError:
                found = self._noted()
            else:
                # Another export may have come and gone since the look.
                self._require_free(withdrawing=True)
                return False
        if found != fingerprint:
            raise ConflictError(
                f"{self.url}: another export, or one with other options, was begun there and has not ended; it was not "
                f"touched. Run its command again to end it, or remove {self.store.url}/{self._note_key} and what it "
                "has stored, or export elsewhere"
            )
        return True

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every object there, by its name in the export."""
        return dict(self._found())

    def _found(self) -> Iterator[tuple[str, int]]:
        if not self._name:
            for entry in self.store.list():
                if entry.key != self._note_key and not entry.key.startswith(_PROBES):
                    yield entry.key, entry.bytes
            return
        try:
            yield "", self.store.size(self._name)
        except MissingError:
            for entry in self.store.list(f"{self._name}/"):
                yield entry.key.removeprefix(f"{self._name}/"), entry.bytes

    def release(self) -> None:
        """Remove the note: the export is complete. It stays so if the note does."""
        try:
            self.store.delete([self._note_key])
        except CheckpointError as error:
            logger.warning("%s: is complete, but its note could not be removed: %s", self.url, error)

    def _require_free(self, *, withdrawing: bool = False) -> None:
        """Require that nothing is there.

        Args:
            withdrawing: Whether to remove the note if something is.
        """
        found = next(self._found(), None)
        if found is None:
            return
        if withdrawing:
            self.store.delete([self._note_key])
        there = f"{self.url}/{found[0]}".rstrip("/")
        raise ConflictError(f"{there}: exists already; it was not touched. Export elsewhere")

    def _noted(self) -> str | None:
        """Return the fingerprint in the note; None if there is none, and empty if it is damaged."""
        try:
            note = json.loads(self.store.get(self._note_key, _NOTE_BYTES_MAX))
            return str(note["fingerprint"])
        except MissingError:
            return None
        except (CorruptError, ValueError, KeyError, TypeError):
            return ""
