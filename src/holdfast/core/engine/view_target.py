"""A target of a source's box: takes the elements of one term out of stored bytes, and puts them where the term says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.ports.framework import Target
from holdfast.base.types.view import Along, Alongs

_BLOCK = 4096
"""Elements of a row that are turned at once. A transposed copy of whole rows, without rows of an odd length, took 2.5
times as long; with blocks of 512, threads wait for Python's lock for a third of the time."""

_APART = 16


class ViewTarget(Target):
    """The elements that one term gives to a target."""

    def __init__(self, target: Target, alongs: Alongs, dtype: str) -> None:
        """Serve a target.

        Args:
            target: Takes the elements, in its own coordinates.
            alongs: The elements, all of them wanted.
            dtype: Stored element type.
        """
        self._target, self._numpy = target, np.dtype(DTYPES[dtype].numpy)
        by_source: list[tuple[int, Along]] = [(a.source_dim, a) for a in alongs if a.source_dim is not None]
        self._sources = [along for _, along in sorted(by_source, key=lambda each: each[0])]
        self._targets = sorted((a for a in alongs if a.target_dim is not None), key=lambda along: along.target_dim or 0)
        # The order in which the dimensions of a source come in the target.
        kept = [along for along in self._sources if along.target_dim is not None]
        self._order = [kept.index(along) for along in self._targets if along.source_dim is not None]
        last = len(kept) - 1
        is_turned = last > 0 and self._order[-1] != last
        self._turned_dim = self._targets.index(kept[last]) if is_turned else None
        """The target's dimension of the source's last one, if another dimension is the last of the target."""
        steps = all(along.source_step == along.target_step == 1 for along in alongs)
        self._only_shifts = steps and self._order == sorted(self._order)

    def place(self, part: Box, source: memoryview, source_box: Box) -> None:
        """Put the elements of `part`, if there are any, where they go."""
        cuts = [_within(along, a, b) for along, a, b in zip(self._sources, part.start, part.stop, strict=True)]
        if all(first < last for first, last in cuts):
            stored = np.frombuffer(source, dtype=self._numpy).reshape(source_box.shape)
            self._put(stored, source_box.start, cuts)

    def put(self, at: Sequence[slice], elements: NDArray[np.generic]) -> None:
        """Put those elements of another view's term that this term takes."""
        coarse = _coarse(at)
        if coarse is None:
            cuts = [_within(along, each.start, each.stop) for along, each in zip(self._sources, at, strict=True)]
            if all(first < last for first, last in cuts):
                self._put(elements, [each.start for each in at], cuts)
            return
        for number, one in enumerate(_slices(at, coarse)):
            self.put(one, elements.take([number], axis=coarse))

    def count(self, part: Box) -> int:
        """Return how many elements of a box of the source go to the last target."""
        return self._count([slice(start, stop, 1) for start, stop in zip(part.start, part.stop, strict=True)])

    def _count(self, at: Sequence[slice]) -> int:
        coarse = _coarse(at)
        if coarse is not None:
            return sum(self._count(one) for one in _slices(at, coarse))
        cuts = [_within(along, each.start, each.stop) for along, each in zip(self._sources, at, strict=True)]
        if not all(first < last for first, last in cuts):
            return 0
        inner = self._target
        return inner._count(self._places(cuts)) if isinstance(inner, ViewTarget) else math.prod(b - a for a, b in cuts)

    def _put(self, stored: NDArray[np.generic], origin: Sequence[int], cuts: Sequence[tuple[int, int]]) -> None:
        chosen: list[slice | int] = []
        for along, start, (first, last) in zip(self._sources, origin, cuts, strict=True):
            at = along.source_start + first * along.source_step - start
            stop = at + (last - first - 1) * along.source_step + 1
            chosen.append(at if along.target_dim is None else slice(at, stop, along.source_step))
        taken, places = stored[(*chosen, ...)], self._places(cuts)
        if self._turned_dim is None or taken.size < _BLOCK:
            self._put_at(places, taken)
            return
        dim, place = self._turned_dim, places[self._turned_dim]
        for first in range(0, taken.shape[-1], _BLOCK):
            block = taken[..., first : first + _BLOCK]
            # Rows of an odd length keep the elements of a column in different lines of the processor's cache.
            room = np.empty((*block.shape[:-1], _BLOCK + _APART), block.dtype)[..., : block.shape[-1]]
            room[...] = block
            start = place.start + first * place.step
            part = slice(start, start + (block.shape[-1] - 1) * place.step + 1, place.step)
            self._put_at([*places[:dim], part, *places[dim + 1 :]], room)

    def _put_at(self, places: Sequence[slice], taken: NDArray[np.generic]) -> None:
        elements = taken.transpose(self._order)
        for dim, along in enumerate(self._targets):
            if along.source_dim is None:
                elements = np.expand_dims(elements, dim)
        self._target.put(places, elements)

    def _places(self, cuts: Sequence[tuple[int, int]]) -> list[slice]:
        """Return the grid of the target where the elements with these numbers go."""
        places = []
        for along in self._targets:
            first, last = (0, 1) if along.source_dim is None else cuts[along.source_dim]
            begin = along.target_start + first * along.target_step
            places.append(slice(begin, begin + (last - first - 1) * along.target_step + 1, along.target_step))
        return places

    def memory(self, part: Box) -> memoryview | None:
        """Return the target's own memory, if the term only shifts."""
        if not self._only_shifts:
            return None
        cuts = [_within(along, a, b) for along, a, b in zip(self._sources, part.start, part.stop, strict=True)]
        places = self._places(cuts)
        return self._target.memory(Box(tuple(each.start for each in places), tuple(each.stop for each in places)))


def _coarse(at: Sequence[slice]) -> int | None:
    """Return a dimension in which a grid has a step. Such grids are rare here: layouts that stand on each other, the
    one below turned around.
    """
    return next((dim for dim, each in enumerate(at) if each.step != 1), None)


def _slices(at: Sequence[slice], dim: int) -> list[list[slice]]:
    """Return a grid as one grid for each coordinate of a dimension."""
    return [[*at[:dim], slice(each, each + 1, 1), *at[dim + 1 :]] for each in range(*at[dim].indices(at[dim].stop))]


def _within(along: Along, start: int, stop: int) -> tuple[int, int]:
    """Return the numbers of the elements that are inside a run of the source."""
    first = max(0, -((along.source_start - start) // along.source_step))
    return first, min(along.count, -((along.source_start - stop) // along.source_step))
