"""The codecs of one save on one rank: the choice of coded pieces, the measurements, and the update of the history."""

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
    """The decisions and measurements of one save with `compression`. A save without compression makes no instance."""

    def __init__(self, job: Job, location: CheckpointLocation, owned: OwnedKinds, writer: PackWriter) -> None:
        """Decide which pieces are coded.

        Args:
            job: Holds the measurements of earlier saves.
            location: Where the save goes.
            owned: The bytes that this rank owns, by kind.
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
        """Samples pieces that are written raw; None for no samples."""

    @property
    def key(self) -> str:
        """The coded kinds as text: with the layout, the key decides which pieces are coded."""
        return " ".join(map(str, sorted(self._choice.coded)))

    def announce(self, trace: OperationTrace) -> None:
        """Send the decisions to the observers."""
        decisions = {str(kind): decision for kind, decision in self._choice.decisions.items()}
        trace.decide(decisions, self._choice.predicted_seconds(self._owned.amounts))

    def end(self, packs: Sequence[PlannedPack]) -> tuple[KindCoding, ...]:
        """Add the measurements to the history, once all packs are written; return the coding of each kind."""
        items = (item for pack in packs for item in pack.plan.items)
        pieces = ((item.tensor.fqn, item.bytes) for item in items)
        amounts = amounts_of(pieces, self._owned.kinds, self._settings._tuning.coded_bytes_min)
        return self._history.end(self._choice, amounts, self.meter.measured(), self._settings.compression)


def _place_of(location: CheckpointLocation) -> str:
    """Return the URL whose saves share their measurements: the root of a run, or the folder above a path."""
    return location.url.rstrip("/").rpartition("/")[0]
