"""Gradients of a redo log: recorded as optimizers consume them, and applied again.

Source: the differential checkpoints of LowDiff (arXiv 2509.04084), which reuse gradients; made exact here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.base.geometry.region import Region
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.geometry.value_class import value_class
from holdfast.base.ports.framework import Framework, LocalShard, Selection, Source, Wanted
from holdfast.base.types.redo import Record


@value_class
class RecordedTensor:
    """A gradient or an after-image, copied out of the state."""

    tensor: TensorSpec
    """Its name in the record (`call_tensor`, `image_tensor`), its dtype, and the global shape."""

    region: Region
    """The region that this rank records."""

    source: Source
    """The bytes of the region, in host memory that training does not touch."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A record and its bytes."""

    record: Record
    """The record."""

    tensors: Callable[[], Sequence[RecordedTensor]]
    """Returns its tensors, without those of which this rank records no element. On any thread, before `release`."""

    bytes: int
    """Bytes of its tensors."""

    release: Callable[[], None]
    """Gives the memory of the tensors back; called once, on any thread."""


class RecordMemory(Protocol):
    """Lends the memory of records."""

    def take(self, count: int) -> memoryview:
        """Return so many bytes; wait a bounded time for them.

        Raises:
            UnavailableError: There is no memory in time: the record is given up.
        """
        ...

    def give(self, buffer: memoryview) -> None:
        """Take a buffer back, on any thread."""
        ...


class GradientCapture(Protocol):
    """Records the steps of the optimizers of one state. Used on the training thread."""

    @property
    def interrupted(self) -> str:
        """Why the records since the last `begin` have a gap; empty if they have none."""
        ...

    @property
    def parameters(self) -> Sequence[LocalShard]:
        """The shards of the parameters that the optimizers step, and of the tensors that get after-images."""
        ...

    def begin(
        self, step: int, regions: Mapping[str, Sequence[Region]], state: Mapping[str, object] | None = None
    ) -> None:
        """Begin at a boundary: the next record holds everything after this moment.

        Args:
            step: The boundary.
            regions: By FQN, the regions that this rank records.
            state: The state as the loop passes it now: plain values are read off it. None: as it was passed before.
        """
        ...

    def boundary(self, step: int, state: Mapping[str, object] | None = None) -> Captured | None:
        """End a record at a boundary and begin the next; return None if the records have a gap.

        Args:
            step: The boundary.
            state: As for `begin`.
        """
        ...

    def close(self) -> None:
        """Remove the hooks, and give the memory of an unfinished record back."""
        ...


class StepRedo(Protocol):
    """Applies records to a state that holds their base. Used on the caller's thread, record by record."""

    def unlike(self, record: Record) -> str:
        """Return why a record cannot be redone here with equal bits: class, flag or version; empty if it can."""
        ...

    def wanted(self, record: Record) -> Sequence[Wanted]:
        """Return the tensors of a record to read, by their names in the record; their memory stays valid until the
        next call.
        """
        ...

    def apply(self, record: Record) -> Sequence[str]:
        """Carry out the calls and after-images of a record; return the FQNs whose sums differ."""
        ...

    def finish(self, record: Record) -> None:
        """Restore the values at the boundary of the last record."""
        ...


class RecordingFramework(Framework, Protocol):
    """A framework whose optimizers can be recorded, and stepped again."""

    def capture(
        self, state: Mapping[str, object], selection: Selection, vouched: Sequence[type], memory: RecordMemory
    ) -> GradientCapture:
        """Hook the optimizers of a state, to record their steps.

        Args:
            state, selection: As every later save: the optimizers, and the parameters that they step.
            vouched: Optimizer classes whose step, so says the caller, is a function of state, gradients and groups.
            memory: Lends memory for copies.
        Raises:
            InvalidError: A step of this state cannot be recorded: the message names the optimizer and the remedy.
        """
        ...

    def redo(self, state: Mapping[str, object], selection: Selection) -> StepRedo:
        """Return how records are applied to a state that holds their base.

        Raises:
            InvalidError: The state or the selection lacks a part that records need.
        """
        ...
