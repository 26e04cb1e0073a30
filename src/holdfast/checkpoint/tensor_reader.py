"""Windows of checkpoints read into memory, in batches, several of these at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.engine.read import execute
from holdfast.engine.target import HostTarget
from holdfast.geometry.box import Box
from holdfast.plan.compare import CompareWindow
from holdfast.plan.reads import WantedBoxes, load_plan
from holdfast.ports.store import Packs
from holdfast.settings import MIB, Settings
from holdfast.types.plan import Piece

BATCH_BYTES = 16 * MIB
"""Bytes of each copy that are read and compared at once."""

BATCHES_AT_ONCE = 3
"""One is compared while the next are read: with buffers and what comparing makes on the way under 300 MiB in all."""

_RUN_BYTES_MAX = 4 * MIB


@dataclass(frozen=True, slots=True)
class TensorReader:
    """Where one copy is read from."""

    pieces_near: Callable[[str, Box], Sequence[Piece]]
    """Stored pieces of a name, all that share an element with a box among them."""

    packs: Packs
    """Where their packs lie."""

    settings: Settings
    """How to read."""

    def read(
        self, wanted: Sequence[tuple[str, CompareWindow]], dtypes: Sequence[str]
    ) -> tuple[list[list[HostTarget]], int]:
        """Return the parts of each window, and the bytes that were read for all.

        Args:
            wanted: For each, the name here of the tensor it is of.
            dtypes: Element type of each here.
        Raises:
            CorruptError: Stored bytes are not what was saved.
        """
        boxes: list[WantedBoxes] = []
        targets: list[HostTarget] = []
        found: list[list[HostTarget]] = []
        for (name, window), dtype in zip(wanted, dtypes, strict=True):
            parts = [(WantedBoxes(name, (box,)), HostTarget(dtype, box)) for box in window.boxes]
            boxes += [each for each, _ in parts]
            targets += [each for _, each in parts]
            found.append([each for _, each in parts])
        plan = load_plan(boxes, self.pieces_near, min(self.settings.read_window_bytes, _RUN_BYTES_MAX))
        execute(plan, self.packs, targets, self.settings)
        return found, plan.bytes
