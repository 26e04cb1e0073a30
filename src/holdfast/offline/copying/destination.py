"""The place that a copy fills: claimed for one source, so that an interrupted copy goes on and none is mixed in.

empty      Nothing is there.
claimed    `copying/run.json` says what is being copied. Nothing else may be there but what a copy stored.
filled     Files are there, then records, then manifests.
complete   What makes it a run or a checkpoint is there, and `copying/` is gone.
"""

from __future__ import annotations

import logging

from holdfast.base.clock import Clock
from holdfast.base.ports.store import Store
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX
from holdfast.core.format.names import (
    COPY_CLAIM_FILE,
    COPYING_FOLDER,
    is_attempt_file,
    is_attempt_folder,
    step_of_folder,
)
from holdfast.errors import ConflictError, InvalidError, printable
from holdfast.stored.repository.publish import get_or_none, publish
from holdfast.stored.repository.quarantine import QUARANTINE

logger = logging.getLogger(__name__)

_NAME_BYTES = 16


class CopyDestination:
    """Where one run or checkpoint is copied to."""

    def __init__(self, store: Store, clock: Clock) -> None:
        """Do no I/O.

        Args:
            store: The place.
            clock: Gives random names.
        """
        self.store, self._clock = store, clock
        self.there: dict[str, int] = {}
        """Sizes of the objects that were there at the claim."""
        self.makes_links = False
        """Whether an object can have several keys there."""

    def claim(self, what: str, found: str | None) -> None:
        """Say what is copied here, in an empty place, or find that an earlier copy of it said so.

        What an earlier copy was sending when it was killed is removed.

        Args:
            what: What is copied: the id of a run, or `checkpoint` with the digest of its manifest.
            found: What is there already, complete; None if nothing.
        Raises:
            ConflictError: Something else is there; it was not touched.
        """
        store = self.store
        claim = get_or_none(store, COPY_CLAIM_FILE, MANIFEST_BYTES_MAX)
        if claim is None:
            first = next(iter(store.list("")), None)
            if first is not None:
                raise ConflictError(
                    f"{store.url}: is not empty (it holds {first.key}), and no unfinished copy of this is there; "
                    "expected a new folder. Nothing was touched. Choose another place"
                )
            publish(store, COPY_CLAIM_FILE, what.encode())
        elif claim != what.encode() or found not in (None, what):
            begun = _shown(claim.decode(errors="replace"))
            raise ConflictError(
                f"{store.url}: holds an unfinished copy of {begun}, or a job has begun to save there; expected a copy "
                f"of {_shown(what)}. Nothing was touched. Choose another place"
            )
        self._abort_uploads()
        self.there = {entry.key: entry.bytes for entry in store.list("")}
        others = [key for key in self.there if not key.startswith(COPYING_FOLDER)]
        if claim is None and others:
            # It saw no claim: from now on a job sees it.
            store.delete([COPY_CLAIM_FILE])
            raise ConflictError(
                f"{store.url}: a job or another copy has stored {others[0]} there meanwhile; expected a new folder. It "
                "was not touched. Choose another place"
            )
        store.delete([key for key in self.there if key.startswith(COPYING_FOLDER) and key != COPY_CLAIM_FILE])
        self.makes_links = store.link(COPY_CLAIM_FILE, f"{COPYING_FOLDER}{self._clock.random_bytes(_NAME_BYTES).hex()}")

    def _abort_uploads(self) -> None:
        """Remove uploads that a killed copy left. Those of other programs, as in the root of a bucket, go on."""
        try:
            self.store.abort_uploads("", _is_of_copy)
        except InvalidError as error:
            logger.warning("uploads that a killed copy may have left were not looked for: %s", error)

    def put(self, key: str, data: bytes) -> None:
        """Store a record or manifest, in place of what an earlier call of the same copy stored."""
        if key in self.there:
            seen = get_or_none(self.store, key, MANIFEST_BYTES_MAX)
            self.store.replace(key, data, seen)
        else:
            publish(self.store, key, data)

    def end(self) -> None:
        """Remove the claim: the copy is complete."""
        store = self.store
        rest = [entry.key for entry in store.list(COPYING_FOLDER) if entry.key != COPY_CLAIM_FILE]
        store.delete([*rest, COPY_CLAIM_FILE])


def _is_of_copy(key: str) -> bool:
    """Return whether a key is that of a file which a copy may send in parts."""
    folder, _, name = key.partition("/")
    if step_of_folder(folder) is not None:
        folder, _, name = name.partition("/")
    return key.startswith(QUARANTINE) or (is_attempt_folder(folder) and is_attempt_file(name))


def _shown(what: str) -> str:
    return printable(what[:100] if what.startswith("checkpoint ") else f"run {what[:100]}")
