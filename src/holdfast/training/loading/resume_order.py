"""The order in which a resume tries the steps of a run: the newest first. It reads no more manifests than it has to.

In a run with one timeline the number of a step decides, so a manifest is read when its turn comes. Once a run has
several, every manifest is read first: what they state decides which of them the newest timeline holds.

Which manifests count is asked after a manifest was read. A former writer may publish late. Its manifest is then judged
by the list of the writer that took over, for this was stored before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Fence
from holdfast.base.types.timeline import FIRST_TIMELINE
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX
from holdfast.core.format.names import SUPERSEDED_FOLDER, manifest_key
from holdfast.errors import CorruptError, InvalidError, MissingError
from holdfast.stored.repository.catalog import exists, step_folders, steps_among
from holdfast.stored.repository.epochs import current_fence
from holdfast.stored.repository.near_tier import NEAR_FOLDER
from holdfast.stored.repository.quarantine import QUARANTINE, identity_at, identity_of
from holdfast.stored.repository.timelines import StoredManifest, counted, timelines_under

logger = logging.getLogger(__name__)


class StepsChanged(Exception):
    """A step was deleted since the listing: what took its place may be newer than the steps that follow."""


TriedManifest = tuple[StoredManifest, str, bytes | None]
"""A manifest that was read just now, the result of `identity_at`, and the bytes; None if they are too many."""


class ResumeOrder:
    """The manifests of a run that a resume may take and has not tried, of the last listing."""

    def __init__(self, store: Store, announce: Callable[[StoredManifest], None]) -> None:
        """List nothing yet.

        Args:
            store: The root of the run.
            announce: Called with a manifest before it is read.
        """
        self._store, self._announce = store, announce
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
        self.has_near = False
        """Whether the root names a near tier."""
        self._has_superseded = False
        """Whether there may be manifests outside the folders of steps."""

    def list(self) -> None:
        """List the steps."""
        folders = self._store.folders("")
        steps = steps_among(folders)
        self._untried, self._is_read = [StoredManifest(step, manifest_key(step)) for step in steps], False
        self._listed, self._absent = frozenset(steps), set()
        self.may_have_records = QUARANTINE.rstrip("/") in folders
        self.has_near = NEAR_FOLDER.rstrip("/") in folders
        self._has_superseded = SUPERSEDED_FOLDER.rstrip("/") in folders

    def manifests(self) -> Iterator[TriedManifest]:
        """Yield the manifests that count, each read when its turn comes.

        Raises:
            StepsChanged: The steps must be listed again.
        """
        while self._untried:
            listed = self._untried.pop()
            self._announce(listed)
            try:
                data = self._bytes_of(listed)
            except MissingError:
                if self._is_read:
                    raise StepsChanged from None
                self._absent.add(listed.step)
                continue
            except InvalidError as error:
                logger.warning("step %d is skipped: %s", listed.step, error)
                continue
            fence = current_fence(self._store)
            if fence.has_timelines and not self._is_read:
                self._read_all(fence)
                continue
            manifest = self._judged(listed, data, fence)
            if manifest is None:
                continue
            if not self._is_read and manifest.timeline not in (None, FIRST_TIMELINE):
                self._read_all(fence)  # The list of the epoch, which would say so, was lost.
                continue
            self._require_nothing_newer(manifest.step)
            self.had_steps = True
            identity = identity_at(self._store, manifest.key) if data is None else identity_of(data)
            yield manifest, identity, data
        if self._has_superseded and not self._is_read:
            # No folder of a step has a manifest. The chain of the newest timeline may lie under `superseded/` alone.
            self._read_all(current_fence(self._store))
            yield from self.manifests()
        else:
            self._require_nothing_newer(-1)

    def _bytes_of(self, listed: StoredManifest) -> bytes | None:
        try:
            return self._store.get(listed.key, MANIFEST_BYTES_MAX)
        except CorruptError:  # Too large for a manifest.
            return None

    def _judged(self, listed: StoredManifest, data: bytes | None, fence: Fence) -> StoredManifest | None:
        """Return a manifest if it counts; raise `StepsChanged` if it is not the one that was listed."""
        if data is None:
            return StoredManifest(listed.step, listed.key, None, None)
        manifest = counted(fence, listed.step, listed.key, data, f"{self._store.url}/{listed.key}")
        if self._is_read and (manifest is None or listed.digest not in (None, manifest.digest)):
            raise StepsChanged
        return manifest

    def _read_all(self, fence: Fence) -> None:
        self._untried, self._is_read = list(timelines_under(self._store, fence).chain), True
        self._absent.clear()
        self.had_steps = self.had_steps or bool(self._untried)

    def _require_nothing_newer(self, step: int) -> None:
        """Look for newer steps than one, if a newer one had no manifest.

        It is being saved, a save failed at it, or it was deleted. A collector deletes a step only once a newer one is
        committed, which this call then finds.

        Raises:
            StepsChanged: A newer one has come since the listing.
        """
        absent, self._absent = self._absent, set()
        if not absent:
            return
        steps = set(step_folders(self._store))
        self.had_steps = self.had_steps or not steps.issuperset(absent)
        if any(new > step for new in steps - self._listed):
            raise StepsChanged
        if any(exists(self._store, manifest_key(each)) for each in steps & absent if each > step):
            raise StepsChanged
