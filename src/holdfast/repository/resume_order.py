"""The order in which a resume tries the steps of a run: the newest first. It reads no more manifests than it has to.

In a run with one timeline the number of a step decides, so a manifest is read when its turn comes. Once a run has
several, every manifest is read first: what they state decides which of them the newest timeline holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.errors import MissingError
from holdfast.format.names import manifest_key
from holdfast.ports.store import Store
from holdfast.repository.catalog import step_folders, steps_among
from holdfast.repository.epochs import current_fence
from holdfast.repository.quarantine import QUARANTINE, identity_at, identity_of
from holdfast.repository.timelines import StoredManifest, read_counted, timelines_under
from holdfast.types.epoch import Fence
from holdfast.types.timeline import FIRST_TIMELINE


class StepsChanged(Exception):
    """A step was deleted since the listing: what took its place may be newer than the steps that follow."""


@dataclass(frozen=True, slots=True)
class TriedManifest:
    """A manifest whose turn has come."""

    manifest: StoredManifest
    """The manifest, as it was read just now."""

    identity: str
    """Its identity, as `identity_at` returns it."""

    data: bytes | None
    """Its bytes; None if it is too large for a manifest."""


class ResumeOrder:
    """The manifests of a run that a resume may take and has not tried, of the last listing."""

    def __init__(self, store: Store) -> None:
        """List nothing yet.

        Args:
            store: The root of the run.
        """
        self._store = store
        self._fence = Fence()
        self._untried: list[StoredManifest] = []
        self._is_read = False
        """Whether the untried ones are known to be committed, with their digests."""
        self._listed: frozenset[int] = frozenset()
        self._absent: set[int] = set()
        """Steps of the listing that had no manifest when their turn came."""
        self.had_steps = False
        """Whether a step is known to be committed, or to have been."""
        self.may_have_records = False
        """Whether the run may have records of damaged steps."""

    def list(self) -> None:
        """List the steps."""
        self._fence = current_fence(self._store)
        if self._fence.has_timelines:
            self._read_all()
            return
        folders = self._store.folders("")
        steps = steps_among(folders)
        self.may_have_records = QUARANTINE.rstrip("/") in folders
        self._untried, self._is_read = [StoredManifest(step, manifest_key(step)) for step in steps], False
        self._listed, self._absent = frozenset(steps), set()

    def next(self, announce: Callable[[StoredManifest], None]) -> TriedManifest | None:
        """Return the next manifest that counts; None after the last.

        Args:
            announce: Called with a manifest before it is read.
        Raises:
            StepsChanged: The steps must be listed again.
        """
        while self._untried:
            listed = self._untried.pop()
            announce(listed)
            try:
                found = read_counted(self._store, self._fence, listed.step, listed.key)
            except MissingError:
                if self._is_read:
                    raise StepsChanged from None
                self._absent.add(listed.step)
                continue
            if found is None:
                continue
            manifest, data = found
            if self._is_read and listed.digest is not None and manifest.digest != listed.digest:
                raise StepsChanged
            if not self._is_read and manifest.timeline not in (None, FIRST_TIMELINE):
                self._read_all()  # The list of the epoch, which would say so, was lost.
                continue
            self._require_nothing_newer(manifest.step)
            self.had_steps = True
            identity = identity_at(self._store, manifest.key) if data is None else identity_of(data)
            return TriedManifest(manifest, identity, data)
        self._require_nothing_newer(-1)
        return None

    def _read_all(self) -> None:
        self._untried, self._is_read = list(timelines_under(self._store, self._fence).chain), True
        self.had_steps = self.had_steps or bool(self._untried)
        self.may_have_records = True

    def _require_nothing_newer(self, step: int) -> None:
        """Look for newer steps than one, if a newer one had no manifest: a save failed at it, or it was deleted.

        Raises:
            StepsChanged: A newer one has come since the listing.
        """
        if not self._absent:
            return
        steps = set(step_folders(self._store))
        self.had_steps = self.had_steps or not steps.issuperset(self._absent)
        self._absent.clear()
        if any(new > step for new in steps - self._listed):
            raise StepsChanged
