"""The codecs of one save on one rank: what is coded, what is measured while it is written, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.base.types.coding import KindCoding
from holdfast.base.types.plan import PlannedPack
from holdfast.core.engine.encoding.meter import SaveMeter
from holdfast.core.engine.encoding.probe import ChunkProbe
from holdfast.core.engine.writing.write import PackWriter
from holdfast.core.plan.coding.coded_pieces import CodingChoice, codec_for
from holdfast.core.plan.coding.kinds import OwnedKinds, amounts_of
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.training.coordination.job import Job
from holdfast.training.telemetry.operation import OperationTrace


class SaveCoding:
    """The decisions of one save with `compression`, and what it measures. Without it no save has one."""

    def __init__(self, job: Job, location: CheckpointLocation, owned: OwnedKinds, writer: PackWriter) -> None:
        """Decide what is coded.

        Args:
            job: Knows what earlier saves have shown.
            location: Where the save goes.
            owned: What this rank owns.
            writer: Codes and writes the packs.
        """
        settings = job.settings
        self._settings, self._owned = settings, owned
        self._history = job.coding.histories.of(_place_of(location))
        self._choice, samplings = self._history.begin(owned.amounts, settings.compression, settings.chunk_bytes)
        self.pieces = CodingChoice(
            settings.chunk_bytes, settings._tuning.coded_bytes_min, owned.kinds, self._choice.coded
        )
        """Which pieces are coded."""
        self.meter = SaveMeter(job.clock, owned.kinds)
        """Measures the save."""
        prepare = writer.sampler(owned.weight_types, codec_for)
        self.probe = ChunkProbe(self.meter, owned.kinds, samplings, prepare) if samplings else None
        """Samples what is written raw; None: nothing."""

    @property
    def key(self) -> str:
        """What decides which pieces are coded, apart from the layout."""
        return " ".join(map(str, sorted(self._choice.coded)))

    def announce(self, trace: OperationTrace) -> None:
        """Send the decisions to the observers."""
        decisions = {str(kind): decision for kind, decision in self._choice.decisions.items()}
        trace.decide(decisions, self._choice.predicted_seconds(self._owned.amounts))

    def end(self, packs: Sequence[PlannedPack]) -> tuple[KindCoding, ...]:
        """Let later saves learn from this one, once all packs are written; return what it did with each kind."""
        items = (item for pack in packs for item in pack.plan.items)
        pieces = ((item.tensor.fqn, item.bytes) for item in items)
        amounts = amounts_of(pieces, self._owned.kinds, self._settings._tuning.coded_bytes_min)
        return self._history.end(self._choice, amounts, self.meter.measured(), self._settings.compression)


def _place_of(location: CheckpointLocation) -> str:
    """Return the URL whose saves share their measurements: the root of a run, or the folder above a path."""
    return location.url.rstrip("/").rpartition("/")[0]
