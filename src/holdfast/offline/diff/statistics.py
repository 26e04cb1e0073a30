"""Statistics of one tensor, in bounded memory: all elements, or evenly drawn ones of a large tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.base.ports.observer import ByteProgress, Observer
from holdfast.core.engine.casting import widened
from holdfast.core.plan.compare import batches, sampled
from holdfast.errors import MissingError, first_three
from holdfast.settings import MIB
from holdfast.stored.checkpoint.checkpoint import Checkpoint

BINS = 64
_BYTES_MAX = 256 * MIB
_BLOCK_BYTES = MIB // 4
_CORNER = 3


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """Statistics of the elements that were read. Of complex elements the magnitudes count."""

    elements: int
    """Elements that were read."""

    total_elements: int
    """Elements of the tensor; more than `elements` if they were drawn evenly."""

    min: float
    """The smallest finite element; NaN without one."""

    max: float
    """The largest finite element; NaN without one."""

    mean: float
    """Mean of the finite elements; NaN without one."""

    norm: float
    """Euclidean norm of the finite elements that were read."""

    zeros: int
    """Elements that are zero."""

    nan: int
    """Elements that are NaN."""

    infinite: int
    """Elements that are infinite."""

    histogram: tuple[int, ...]
    """Finite elements in each of 64 bins from `min` to `max`."""

    corners: tuple[tuple[float, ...], ...]
    """The first elements and the last ones, in the order of storage of each."""


def statistics(checkpoint: Checkpoint, fqn: str, *, observer: Observer | None = None) -> TensorStatistics:
    """Return statistics of a tensor; of more than 256 MiB, of evenly drawn blocks. Needs no torch.

    Example:
        found = holdfast.api.statistics(holdfast.open_checkpoint("checkpoint"), "model.weight")
        print(found.mean, found.nan, found.histogram)
    Args:
        checkpoint: The checkpoint.
        fqn: The name of a tensor, or a tied name.
        observer: Receives progress, and ends the work if it raises.
    Raises:
        MissingError: There is no such tensor.
        CorruptError: Stored bytes differ from the saved bytes.
    """
    stored = checkpoint.aliases.get(fqn, fqn)
    spec = checkpoint.viewed.tensors.get(stored)
    if spec is None:
        raise MissingError(f"{checkpoint.url}: no tensor {fqn!r}; expected one of {first_three(checkpoint.tensors)}")
    pieces = checkpoint.whole_pieces(stored)
    share = min(_BYTES_MAX / max(spec.global_bytes, 1), 1.0)
    blocks = (math.ceil(piece.bytes * share / _BLOCK_BYTES) for piece in pieces)
    windows = [list(sampled(0, piece, count, _BLOCK_BYTES)) for piece, count in zip(pieces, blocks, strict=True)]
    progress = ByteProgress(2 * sum(window.bytes for of_piece in windows for window in of_piece), observer)

    def numbers() -> Iterator[NDArray[np.float64]]:
        for batch in batches(windows, 16 * MIB):
            parts, _ = checkpoint.source.read([(stored, window) for window in batch], [spec.dtype] * len(batch))
            for part in (part for of_window in parts for part in of_window):
                wide = widened(part.array.reshape(-1), spec.dtype)
                yield np.abs(wide).astype(np.float64) if wide.dtype.kind == "c" else wide.astype(np.float64)
            progress.add(sum(window.bytes for window in batch))

    counts, ends, sums = np.zeros(4, np.int64), list[list[float]](), np.zeros(2)
    low, high = math.inf, -math.inf
    with np.errstate(all="ignore"):
        for block in numbers():
            finite, nan = block[np.isfinite(block)], np.isnan(block).sum()
            counts += len(block), (block == 0).sum(), nan, len(block) - len(finite) - nan
            low, high = min(low, finite.min(initial=math.inf)), max(high, finite.max(initial=-math.inf))
            sums += finite.sum(), np.square(finite).sum()
            ends = [ends[0] if ends else block[:_CORNER].tolist(), block[-_CORNER:].tolist()]
        elements, zeros, nan, infinite = map(int, counts)
        bins, finite_count = np.zeros(BINS, np.int64), elements - nan - infinite
        # The range of float64 may overflow, and the half of a denormal number may be zero.
        half = 1.0 if math.isfinite(high - low) else 0.5
        width = (high * half - low * half) or 1.0
        for block in numbers() if finite_count else ():
            places = (block[np.isfinite(block)] * half - low * half) / width * BINS
            bins += np.bincount(places.astype(np.int64).clip(0, BINS - 1), minlength=BINS)
    low, high, mean = (low, high, sums[0] / finite_count) if finite_count else (math.nan,) * 3
    return TensorStatistics(
        elements, spec.global_bytes // spec.itemsize, float(low), float(high), float(mean), float(math.sqrt(sums[1])),
        zeros, nan, infinite, tuple(bins.tolist()), tuple(map(tuple, ends)),
    )  # fmt: skip
