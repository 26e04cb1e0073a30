"""What the saves of a job share to code: what earlier ones have shown about coding and its stores."""

from __future__ import annotations

from collections import OrderedDict

from holdfast.base.interrupts import GUARD
from holdfast.base.types.coding import Compression, Kind, KindCoding, Measured, Sampling
from holdfast.core.plan.coding.choice import Amounts, KindsChoice
from holdfast.core.plan.coding.coding_rates import CodingRates, codings_of
from holdfast.core.plan.coding.kinds import OwnedKinds
from holdfast.core.plan.plan_cache import PlanCache

_PLACES_MAX = 16
"""Roots of which a job remembers the saves."""


class CompressionStats:
    """The saves of one job to one place. The training thread begins saves, the commit thread ends them."""

    def __init__(self) -> None:
        """Know nothing."""
        self._knowledge = CodingRates()

    def begin(
        self, amounts: Amounts, compression: Compression, chunk_bytes: int
    ) -> tuple[KindsChoice, dict[Kind, Sampling]]:
        """Begin a save: return what it codes, and what it samples of the rest.

        Args:
            amounts: What the rank owns.
            compression: The setting.
            chunk_bytes: Raw bytes of a chunk.
        """
        while True:
            known = self._knowledge
            begun, choice = known.begun(amounts, compression)
            samplings = begun.samplings(choice, amounts, chunk_bytes)
            if self._replace(known, begun):
                return choice, samplings

    def end(
        self, choice: KindsChoice, amounts: Amounts, measured: Measured, compression: Compression
    ) -> tuple[KindCoding, ...]:
        """Learn from a save that is written; return what it did with each kind.

        Args:
            choice: Its choice.
            amounts: What it wrote, without the pieces that an earlier step holds.
            measured: What it measured.
            compression: The setting.
        """
        while True:
            known = self._knowledge
            ended = known.ended(choice, measured, compression)
            if self._replace(known, ended):
                return codings_of(ended, choice, amounts, measured)

    def _replace(self, known: CodingRates, learned: CodingRates) -> bool:
        """Store what a save has shown; return False if another save has shown something meanwhile."""
        with GUARD:
            is_latest = self._knowledge is known
            if is_latest:
                self._knowledge = learned
            return is_latest


class AllCompressionStats:
    """The histories of a job, one for each place that it saves to."""

    def __init__(self) -> None:
        """Know nothing."""
        self._by_place: OrderedDict[str, CompressionStats] = OrderedDict()

    def of(self, place: str) -> CompressionStats:
        """Return the history of a place, a URL; forget the place used longest ago."""
        with GUARD:
            history = self._by_place.setdefault(place, CompressionStats())
            self._by_place.move_to_end(place)
            while len(self._by_place) > _PLACES_MAX:
                self._by_place.popitem(last=False)
            return history


class JobCoding:
    """What the saves of a job share to code; used only with compression."""

    def __init__(self, histories: AllCompressionStats | None = None) -> None:
        """Know nothing yet.

        Args:
            histories: Those of another job of the same ranks; None: new ones.
        """
        self.owned_kinds: PlanCache[OwnedKinds] = PlanCache()
        """What this rank owns of the layouts of earlier saves, by kind."""
        self.histories = histories or AllCompressionStats()
        """What earlier saves have shown."""
