"""What a restart of a run with a redo log must find: said a second time, by what training was told.

The model holds the boundaries that a restart may come back to, in the order of training, and asks storage only for what
nobody was told: which checkpoints a collection has left, and what became of a save whose end nobody knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.base.ports.store import Store
from holdfast.stored.repository.logs import BASES_KEPT
from holdfast.stored.repository.timelines import run_timelines


@dataclass(eq=False)
class Boundary:
    """The end of a step as it was trained."""

    step: int
    state: str
    """Digest of all that a restart must restore."""

    is_recorded: bool | None
    """Whether a sealed record leads here from the boundary before; None if nobody was told."""

    digest: str | None = None
    """Digest of the manifest, if the step is a checkpoint."""

    log: str = ""
    """The log that the manifest states."""

    has_unseen_damage: bool = False
    """Whether the manifest is damaged, and no restart has tried it yet and put it under quarantine."""


class LoggedRunModel:
    """The boundaries of one run that count."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.chain: list[Boundary] = []
        self.known: set[str | None] = set()
        """Digests of all manifests so far."""

    def adopt(self, step: int) -> tuple[str, str, bool] | None:
        """Return digest and log of a checkpoint that is new at a step, and whether it began a timeline."""
        stored = run_timelines(self._store)
        found = stored.at(step)
        if found is None or found.digest is None or found.digest in self.known or found.timeline is None:
            return None
        others = {each.timeline.id for each in (*stored.chain, *stored.superseded) if each.timeline and each != found}
        self.known.add(found.digest)
        return found.digest, found.log, found.timeline.id not in others

    def cut(self, first: Boundary, origin: int | None, *, is_fork: bool) -> None:
        """Let the first checkpoint of a life end what was left."""
        last = first.step - 1 if not is_fork else -1 if origin is None else origin
        self.chain = [each for each in self.chain if each.step <= last]

    def bases(self) -> list[int]:
        """Return the places of the checkpoints in the chain."""
        return [place for place, each in enumerate(self.chain) if each.digest is not None]

    def kept(self) -> list[int]:
        """Return the places of the bases that no collection may take, ascending."""
        return [place for place in self.bases() if self.chain[place].log][-BASES_KEPT:]

    def reach(self, place: int, *, trusting: bool = False) -> int:
        """Return the place to which the log leads from a checkpoint.

        Args:
            place: The place of the checkpoint.
            trusting: Whether records count of which nobody was told.
        """
        base = self.chain[place]
        for later in range(place + 1, len(self.chain)):
            each = self.chain[later]
            is_cut = not base.log or (each.digest is not None and each.log != base.log)
            if is_cut or not (each.is_recorded or (trusting and each.is_recorded is None)):
                return later - 1
        return len(self.chain) - 1

    def newest(self) -> Sequence[Boundary]:
        """Return the boundaries at one of which a restart goes on; the first of them is the least."""
        bases = self.bases()
        return self.chain[self.reach(bases[-1]) : self.reach(bases[-1], trusting=True) + 1] if bases else ()

    def reachable(self, *, trusting: bool = False) -> list[Boundary]:
        """Return the boundaries that a load by number finds, the oldest first."""
        # A collection may take any other checkpoint at any time.
        bases = self.bases() if trusting else sorted({*self.kept(), *self.bases()[-1:]})
        places = {place for base in bases for place in range(base, self.reach(base, trusting=trusting) + 1)}
        # The log leads past a damaged manifest to its step only once the manifest is under quarantine.
        return [self.chain[place] for place in sorted(places) if not self.chain[place].has_unseen_damage]

    def see_damage(self) -> None:
        """Take note that a restart has tried every manifest from the newest one down to the newest base."""
        for place in self.bases()[-1:]:
            for boundary in self.chain[place:]:
                boundary.has_unseen_damage = False

    def settle(self) -> None:
        """Take note of what collections took: no newest checkpoint, no base that stays, and no record after these."""
        stored = {manifest.digest for manifest in run_timelines(self._store).chain}
        kept = self.kept()
        for place in self.bases():
            boundary = self.chain[place]
            if boundary.digest not in stored:
                assert place not in {*kept, self.bases()[-1]}, f"{boundary} is gone"
                boundary.digest, boundary.log = None, ""
        for boundary in self.chain[: kept[0] + 1] if len(kept) == BASES_KEPT else ():
            boundary.is_recorded = boundary.is_recorded and None
