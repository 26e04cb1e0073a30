"""Unfolds a box of a viewed tensor into boxes of the tensors that it is made of."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.base.geometry.box import Box
from holdfast.base.types.view import Along, Alongs, ViewedTensor


def unfold(tensor: ViewedTensor, box: Box) -> Iterator[tuple[str, Box, Alongs]]:
    """Yield the sources of a box: stored name, the box around the elements in it, and the elements.

    Args:
        tensor: Has terms; of a tensor without, the box is that of its source.
        box: In coordinates of the target.
    """
    for number, alongs in tensor.listed_terms():
        cut = [_cut(along, box) for along in alongs]
        if all(along.count > 0 for along in cut):
            by_dim = {along.source_dim: along for along in cut if along.source_dim is not None}
            of_source = [by_dim[dim] for dim in range(len(by_dim))]
            start = tuple(along.source_start for along in of_source)
            stop = tuple(along.source_start + (along.count - 1) * along.source_step + 1 for along in of_source)
            yield tensor.sources[number], Box(start, stop), tuple(cut)


def _cut(along: Along, box: Box) -> Along:
    """Keep the elements that are inside a box of the target."""
    if along.target_dim is None:
        return along
    start, stop = box.start[along.target_dim], box.stop[along.target_dim]
    first = max(0, -((along.target_start - start) // along.target_step))
    last = min(along.count, -((along.target_start - stop) // along.target_step))
    return Along(
        along.source_dim,
        along.target_dim,
        along.source_start + first * along.source_step,
        along.source_step,
        along.target_start + first * along.target_step,
        along.target_step,
        last - first,
    )
