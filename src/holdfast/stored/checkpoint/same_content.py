"""Decides if two stored tensors hold equal bytes: a state may tie tensors that the checkpoint stores twice."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter

from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.packs import Packs
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.split_index import SplitIndex
from holdfast.core.plan.compare import batches, windows_of
from holdfast.settings import Settings
from holdfast.stored.checkpoint.tensor_reader import BATCH_BYTES, TensorReader


def same_content(
    index: Index | SplitIndex, packs: Packs, settings: Settings, codecs: Codecs, first: str, second: str
) -> bool:
    """Return whether two stored tensors are known to hold the same bytes.

    Digests decide. Another system's checkpoint has none; its bytes are compared, unless both tensors are one range.

    Args:
        index: The checkpoint's.
        packs: Locates its packs by name.
        settings: Reads in flight.
        codecs: What decodes coded chunks.
        first, second: Stored FQNs.
    Raises:
        CorruptError: A file ends before a piece does.
    """
    pieces_1, pieces_2 = index.pieces_of(first), index.pieces_of(second)
    if all(piece.digests or not piece.bytes for piece in chain(pieces_1, pieces_2)):
        digests_of = attrgetter("region", "digests")
        return [*map(digests_of, pieces_1)] == [*map(digests_of, pieces_2)]
    spec_1, spec_2 = index.tensors[first], index.tensors[second]
    if (spec_1.dtype, spec_1.global_shape) != (spec_2.dtype, spec_2.global_shape):
        return False
    place_of = attrgetter("region", "pack", "offset")
    if [*map(place_of, pieces_1)] == [*map(place_of, pieces_2)]:
        return True
    assert isinstance(index, Index), "an index in several files has every digest"
    reader = TensorReader(index.pieces_near, packs, settings, codecs)
    windows = [window for piece in pieces_1 for window in windows_of(0, piece)]
    for batch in batches([windows], BATCH_BYTES):
        dtypes = [spec_1.dtype] * len(batch)
        parts_1, _ = reader.read([(first, window) for window in batch], dtypes)
        parts_2, _ = reader.read([(second, window) for window in batch], dtypes)
        for part_1, part_2 in zip(chain.from_iterable(parts_1), chain.from_iterable(parts_2), strict=True):
            if part_1.array.tobytes() != part_2.array.tobytes():
                return False
    return True
