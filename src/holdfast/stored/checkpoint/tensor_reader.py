"""Reads windows of a checkpoint's tensors into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.base.geometry.box import Box
from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.packs import Packs
from holdfast.base.types.plan import Piece, WantedBoxes
from holdfast.core.engine.read import execute
from holdfast.core.engine.target import HostTarget
from holdfast.core.plan.compare import CompareWindow
from holdfast.core.plan.reads import load_plan
from holdfast.settings import MIB, Settings

BATCH_BYTES = 16 * MIB
"""Bytes of each copy in one batch of windows."""

BATCHES_AT_ONCE = 3
"""One batch is compared while the next are read. Memory stays under 300 MiB, buffers and comparison included."""

_RUN_BYTES_MAX = 4 * MIB


@dataclass(frozen=True, slots=True)
class TensorReader:
    """Reads windows of one copy of tensors."""

    pieces_near: Callable[[str, Box], Sequence[Piece]]
    """Returns stored pieces of a name: all that overlap a box, and possibly more."""

    packs: Packs
    """Locates their packs by name."""

    settings: Settings
    """Reads in flight."""

    codecs: Codecs
    """What decodes coded chunks."""

    def read(
        self, wanted: Sequence[tuple[str, CompareWindow]], dtypes: Sequence[str]
    ) -> tuple[list[list[HostTarget]], int]:
        """Return the parts of each window in memory, and the count of bytes that were read.

        Args:
            wanted: The name of a tensor in this copy, and a window of it.
            dtypes: Dtype of each of these tensors in this copy.
        Raises:
            CorruptError: Stored bytes differ from what was saved.
        """
        window_parts = [
            [HostTarget(dtype, box) for box in window.boxes] for (_, window), dtype in zip(wanted, dtypes, strict=True)
        ]
        boxes = [WantedBoxes(name, (box,)) for name, window in wanted for box in window.boxes]
        plan = load_plan(boxes, self.pieces_near, min(self.settings._tuning.read_window_bytes, _RUN_BYTES_MAX))
        execute(plan, self.packs, [part for parts in window_parts for part in parts], self.settings, self.codecs)
        return window_parts, plan.bytes
