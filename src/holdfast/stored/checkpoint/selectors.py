"""Integers and slices that select a part of a tensor, as the box around the part."""

from __future__ import annotations

import operator
from types import EllipsisType

from holdfast.base.geometry.box import Box
from holdfast.errors import InvalidError

Selector = int | slice | EllipsisType
"""Selects along one dimension, as for a numpy array; an Ellipsis stands for whole dimensions."""


def box_of(
    index: Selector | tuple[Selector, ...] | None, shape: tuple[int, ...], fqn: str
) -> tuple[Box, tuple[Selector, ...]]:
    """Return the smallest box that contains the indexed elements, and the selectors to apply to the box."""
    selectors = () if index is None else index if isinstance(index, tuple) else (index,)
    dots = [at for at, selector in enumerate(selectors) if selector is Ellipsis]
    if len(dots) > 1:
        raise InvalidError(f"{fqn}: an index may hold one Ellipsis, not {len(dots)}")
    at = dots[0] if dots else len(selectors)
    first, last = selectors[:at], selectors[at + 1 :]
    if len(first) + len(last) > len(shape):
        raise InvalidError(f"{fqn}: index of {len(first) + len(last)} dimensions; the tensor has {len(shape)}")
    middle = (slice(None),) * (len(shape) - len(first) - len(last))
    runs = [_run_of(selector, length, fqn) for length, selector in zip(shape, (*first, *middle, *last), strict=True)]
    box = Box(tuple(start for start, _, _ in runs), tuple(stop for _, stop, _ in runs))
    return box, tuple(rest for _, _, rest in runs)


def _run_of(selector: object, length: int, fqn: str) -> tuple[int, int, int | slice]:
    """Return start and stop of the run of a dimension that contains the selected elements, and the selector in it."""
    try:
        if isinstance(selector, slice):
            first, last, stride = selector.indices(length)
            if stride < 1:
                raise InvalidError(f"{fqn}: slice step {stride}; expected a positive step")
            return first, max(last, first), slice(None, None, stride)
        if isinstance(selector, bool):
            raise TypeError("a bool is a mask")
        position = operator.index(selector)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise InvalidError(f"{fqn}: index {selector!r:.80}; expected integers and slices ({error})") from error
    at = position + length if position < 0 else position
    if not 0 <= at < length:
        raise InvalidError(f"{fqn}: index {position} of a dimension of length {length}")
    return at, at + 1, 0
