"""Measured compression ratios and speeds that the saves of a job share, by place."""

from __future__ import annotations

from collections import OrderedDict

from holdfast.base.interrupts import GUARD
from holdfast.base.types.coding import Compression, Kind, KindCoding, Measured, Sampling
from holdfast.core.plan.coding.choice import Amounts, KindsChoice
from holdfast.core.plan.coding.coding_rates import CodingRates, codings_of
from holdfast.core.plan.coding.kinds import OwnedKinds
from holdfast.core.plan.plan_cache import PlanCache

_PLACES_MAX = 16
"""Number of places for which a job remembers measurements."""


class CompressionStats:
    """The saves of one job to one place. The training thread begins saves, the commit thread ends them."""

    def __init__(self) -> None:
        """Start without measurements."""
        self._knowledge = CodingRates()

    def begin(
        self, amounts: Amounts, compression: Compression, chunk_bytes: int
    ) -> tuple[KindsChoice, dict[Kind, Sampling]]:
        """Begin a save: return the choice of coded kinds, and the samples from the other kinds.

        Args:
            amounts: The bytes that the rank owns, by kind.
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
        """Add the measurements of a written save; return the coding of each kind.

        Args:
            choice: The choice of the save.
            amounts: The written bytes by kind, without the pieces that an earlier step holds.
            measured: The measurements of the save.
            compression: The setting.
        """
        while True:
            known = self._knowledge
            ended = known.ended(choice, measured, compression)
            if self._replace(known, ended):
                return codings_of(ended, choice, amounts, measured)

    def _replace(self, known: CodingRates, learned: CodingRates) -> bool:
        """Store the updated rates; return False if another save has updated the rates meanwhile."""
        with GUARD:
            is_latest = self._knowledge is known
            if is_latest:
                self._knowledge = learned
            return is_latest


class AllCompressionStats:
    """The measurements of a job, by the place of its saves."""

    def __init__(self) -> None:
        """Start without measurements."""
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
    """The owned kinds and measurements that the saves of a job share; used only with compression."""

    def __init__(self, histories: AllCompressionStats | None = None) -> None:
        """Start without owned kinds.

        Args:
            histories: The measurements of another job of the same ranks; None to start without.
        """
        self.owned_kinds: PlanCache[OwnedKinds] = PlanCache()
        """The bytes that this rank owns in the layouts of earlier saves, by kind."""
        self.histories = histories or AllCompressionStats()
        """The measurements of earlier saves."""
