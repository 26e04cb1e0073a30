"""Reads windows of a checkpoint's tensors into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from holdfast.base.geometry.box import Box
from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.framework import Target
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


def _itself(fqn: str, box: Box, target: Target) -> Iterable[tuple[str, Box, Target]]:
    return [(fqn, box, target)]


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

    stored: Callable[[str, Box, Target], Iterable[tuple[str, Box, Target]]] = _itself
    """Returns the stored boxes that fill a box, each with its target: those of a view."""

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
        parts = [
            part
            for (name, window), targets in zip(wanted, window_parts, strict=True)
            for box, target in zip(window.boxes, targets, strict=True)
            for part in self.stored(name, box, target)
        ]
        boxes = [WantedBoxes(name, (box,)) for name, box, _ in parts]
        plan = load_plan(boxes, self.pieces_near, min(self.settings._tuning.read_window_bytes, _RUN_BYTES_MAX))
        execute(plan, self.packs, [target for _, _, target in parts], self.settings, self.codecs)
        return window_parts, plan.bytes
