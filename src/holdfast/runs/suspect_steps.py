"""Steps in whose packs there may be damage, by what was found of them: what a save holds in memory it writes anew."""

from __future__ import annotations

import logging

from holdfast.errors import CheckpointError
from holdfast.format.names import step_folder, step_of_pack
from holdfast.ports.store import Store
from holdfast.repository.catalog import read_manifest
from holdfast.repository.quarantine import list_records

logger = logging.getLogger(__name__)


class SuspectSteps:
    """Which steps of a run lie under quarantine or have packs that one under quarantine names."""

    def __init__(self, store: Store) -> None:
        """Look at nothing yet.

        Args:
            store: The root of the run.
        """
        self._store = store
        self._named: dict[tuple[int, str], frozenset[int]] = {}

    def steps(self) -> list[int]:
        """Return them, ascending, as the quarantine is now: one listing, and each manifest there is read once."""
        found = set[int]()
        for step, identity in list_records(self._store):
            found.add(step)
            try:
                if (step, identity) not in self._named:
                    self._named[step, identity] = self._named_by(step, identity)
                found |= self._named[step, identity]
            except CheckpointError as error:
                logger.debug("which packs step %d names is not known: %s", step, error)
        return sorted(found)

    def _named_by(self, step: int, identity: str) -> frozenset[int]:
        """Return the other steps whose packs a manifest under quarantine names; errors as `read_manifest`."""
        manifest = read_manifest(self._store, step_folder(step))
        if not manifest.digest.startswith(identity):
            return frozenset()
        named = (step_of_pack(pack.name) for pack in manifest.packs)
        return frozenset(other for other in named if other is not None)
