"""Steps whose packs may be damaged: quarantined, or named by a quarantined manifest. Saves do not reference them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from holdfast.base.ports.store import Store
from holdfast.core.format.names import step_folder, step_of_pack
from holdfast.errors import CheckpointError
from holdfast.stored.repository.catalog import read_manifest
from holdfast.stored.repository.quarantine import list_records

logger = logging.getLogger(__name__)


class SuspectSteps:
    """The suspect steps of one run."""

    def __init__(self, store: Store) -> None:
        """Read nothing yet.

        Args:
            store: The root of the run.
        """
        self._store = store
        self._named: dict[tuple[int, str], frozenset[int]] = {}

    def steps(self) -> list[int]:
        """Return the suspect steps, ascending. Costs one listing; each quarantined manifest is read once."""
        return self.named_by(list_records(self._store))

    def named_by(self, records: Iterable[tuple[int, str]]) -> list[int]:
        """Return the suspect steps, ascending, given what `list_records` returned."""
        found = set[int]()
        for step, identity in records:
            found.add(step)
            try:
                if (step, identity) not in self._named:
                    self._named[step, identity] = self._named_by(step, identity)
                found |= self._named[step, identity]
            except CheckpointError as error:
                logger.debug("which packs step %d names is not known: %s", step, error)
        return sorted(found)

    def _named_by(self, step: int, identity: str) -> frozenset[int]:
        """Return the steps whose packs a quarantined manifest names; raises as `read_manifest`."""
        manifest = read_manifest(self._store, step_folder(step))
        if not manifest.digest.startswith(identity):
            return frozenset()
        named = (step_of_pack(pack.name) for pack in manifest.packs)
        return frozenset(other for other in named if other is not None)
