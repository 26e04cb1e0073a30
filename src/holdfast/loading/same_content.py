"""Whether two stored tensors hold the same: asked of a checkpoint that keeps by themselves what a state has tied."""

from __future__ import annotations

from itertools import chain

from holdfast.checkpoint.tensor_reader import BATCH_BYTES, TensorReader
from holdfast.format.index.index import Index
from holdfast.format.index.split_index import SplitIndex
from holdfast.plan.compare import batches, windows_of
from holdfast.ports.store import Packs
from holdfast.settings import Settings


def same_content(index: Index | SplitIndex, packs: Packs, settings: Settings, first: str, second: str) -> bool:
    """Return whether two stored tensors are known to hold the same bytes.

    Digests tell. Where another system's checkpoint has none, the bytes are read, unless they are the very same ones.

    Args:
        index: What is stored.
        packs: Where its packs lie.
        settings: How to read.
        first, second: FQNs of the two.
    Raises:
        CorruptError: What is read cannot be what was saved.
    """
    pieces, others = index.pieces_of(first), index.pieces_of(second)
    if all(piece.digests or not piece.bytes for piece in chain(pieces, others)):
        return [(each.region, each.digests) for each in pieces] == [(each.region, each.digests) for each in others]
    spec, other = index.tensors[first], index.tensors[second]
    if (spec.dtype, spec.global_shape) != (other.dtype, other.global_shape):
        return False
    if [(each.region, each.pack, each.offset) for each in pieces] == [
        (each.region, each.pack, each.offset) for each in others
    ]:
        return True
    assert isinstance(index, Index), "an index in several files has every digest"
    source = TensorReader(index.pieces_near, packs, settings)
    windows = [window for piece in pieces for window in windows_of(0, piece)]
    for batch in batches([windows], BATCH_BYTES):
        dtypes = [spec.dtype] * len(batch)
        ours, _ = source.read([(first, window) for window in batch], dtypes)
        theirs, _ = source.read([(second, window) for window in batch], dtypes)
        for one, two in zip(chain.from_iterable(ours), chain.from_iterable(theirs), strict=True):
            if one.array.tobytes() != two.array.tobytes():
                return False
    return True
