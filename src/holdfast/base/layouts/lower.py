"""Lowers a rule at one shape: the shapes of the other side, and the elements that each pair of tensors shares.

The steps are proven here. Each step takes all of a dimension: blocks and parts add up to its length, and what is put
together comes once each. So every target is covered exactly once, and every element of a source is used once, is
padding, or is skipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from holdfast.base.layouts.expression import Expression
from holdfast.base.layouts.rule_file import LayoutRule
from holdfast.base.types.view import Along, Alongs
from holdfast.errors import InvalidError

TERMS_MAX = 65_536
"""Most terms of one tensor."""

Shape = tuple[int, ...]
_Grid = list[Along]


class Lowered:
    """A rule with numbers for the sizes, at one shape.

    The number of a source counts the values of the gathered fields, that of a target the part and the values of the
    spread fields; the last counts fastest.
    """

    def __init__(self, rule: LayoutRule, size: Callable[[str], int]) -> None:
        """Reckon the numbers of the steps; `forward` or `backward` then gives the shapes."""
        self.rule = rule
        self.source_shape: Shape = ()
        """Shape of each source."""
        self.target_shapes: tuple[Shape, ...] = ()
        """Shape of the targets of each part."""
        self.gathered: tuple[int, ...] = ()
        """Values of each field that is put together."""
        self.spread: tuple[int, ...] = ()
        """Values of each field by which a source is taken apart."""

        def number(written: Expression) -> int:
            return written.value(size, rule.where)

        self._lengths = [number(length) for length in rule.lengths]
        self._blocks = [None if block is None else number(block) for _, _, block in rule.unstack]
        self._content = None if rule.pad is None else number(rule.pad[1])
        self._repeat = 1 if rule.sections is None else number(rule.sections[1])
        self._mixed = [
            None if target is None or target.interleave is None else tuple(map(number, target.interleave[1:]))
            for target in rule.targets
        ]
        self._joined = None if rule.join is None or rule.join[2] is None else number(rule.join[2])
        numbers = (*self._lengths, *self._blocks, self._content, self._repeat, self._joined)
        if self._repeat > TERMS_MAX and len(self._lengths) > 1:
            raise InvalidError(f"{rule.where}: {self._repeat} blocks; expected at most {TERMS_MAX}")
        if any(each is not None and each < 0 for each in numbers):
            raise InvalidError(f"{rule.where}: lengths {numbers}; expected none below 0. Correct the sizes")

    @property
    def parts(self) -> list[int]:
        """Numbers of the parts that are targets."""
        return [part for part, target in enumerate(self.rule.targets) if target is not None]

    # Forward: from a source's shape to those of the targets.

    def forward(self, shape: Shape, gathered: tuple[int, ...], name: str) -> None:
        """Take the shape of the sources; prove every step.

        Args:
            shape: Of each source.
            gathered: Values of each field that is put together.
            name: A source, for messages.
        Raises:
            InvalidError: A step does not fit; names the numbers.
        """
        rule, self.source_shape, self.gathered = self.rule, shape, gathered
        sizes, spread = list(shape), []
        for (dim, field, _), block in zip(rule.unstack, self._blocks, strict=True):
            self._require_dim(dim, sizes, name, "unstack")
            if block is None:
                spread.append(sizes.pop(dim))
            else:
                spread.append(self._divided(sizes[dim], block, name, f"unstack as {field}: blocks of {block}"))
                sizes[dim] = block
        self.spread = tuple(spread)
        if rule.pad is not None:
            self._require_dim(rule.pad[0], sizes, name, "pad")
            sizes[rule.pad[0]] = self._cut_padding(sizes[rule.pad[0]], name)
        if rule.sections is not None:
            self._require_dim(rule.sections[0], sizes, name, "sections")
            self._require_sum(sizes[rule.sections[0]], rule.sections[0], name)
        self.target_shapes = tuple(self._part_shape(part, sizes, name) for part in range(len(rule.targets)))

    def _part_shape(self, part: int, sizes: Sequence[int], name: str) -> Shape:
        rule, shape = self.rule, list(sizes)
        target = rule.targets[part]
        if rule.sections is not None:
            shape[rule.sections[0]] = self._repeat * self._lengths[part]
        if target is None:
            return tuple(shape)
        self._require_mixed(part, shape, name)
        shape = [shape[dim] for dim in self._order(part, len(shape), name)]
        if rule.join is not None:
            self._require_dim(rule.join[0], shape, name, "join")
            self._require_count(self.gathered[0], name)
            shape[rule.join[0]] *= self.gathered[0]
        for (dim, _), count in zip(rule.stack, self.gathered[len(self.gathered) - len(rule.stack) :], strict=True):
            self._require_dim(dim, [*shape, 0], name, "stack")
            shape.insert(dim, count)
        return tuple(shape)

    # Backward: from the shapes of the targets to that of the source.

    def backward(self, shapes: Sequence[Shape], spread: tuple[int, ...], names: Sequence[str]) -> None:
        """Take the shape of the targets of each part; prove every step.

        Args:
            shapes: Of each part.
            spread: Values of each field by which the source is taken apart.
            names: A target of each part, for messages.
        Raises:
            InvalidError: A step does not fit; names the numbers.
        """
        rule, self.target_shapes, self.spread = self.rule, tuple(shapes), spread
        found = [self._before_parts(part, shapes[part], names[part]) for part in range(len(shapes))]
        sizes, (first, *others) = list(found[0][0]), names
        self.gathered = found[0][1]
        for (shape, gathered), name in zip(found[1:], others, strict=True):
            rest = [n for dim, n in enumerate(shape) if rule.sections is None or dim != rule.sections[0]]
            has = [n for dim, n in enumerate(sizes) if rule.sections is None or dim != rule.sections[0]]
            if rest != has or gathered != self.gathered:
                raise InvalidError(
                    f"{rule.where}: {first} is {list(shapes[0])} and {name} is {list(shapes[names.index(name)])}; "
                    "expected parts of one tensor"
                )
        if rule.sections is not None:
            sizes[rule.sections[0]] = self._repeat * sum(self._lengths)
        if rule.pad is not None:
            dim = rule.pad[0]
            self._require_dim(dim, sizes, first, "pad")
            if self._cut_padding(sizes[dim], first) != sizes[dim]:
                raise InvalidError(
                    f"{rule.where}: {first}: dimension {dim} is {sizes[dim]} long; expected content of {self._content}"
                )
        for (dim, _, _), block, count in reversed([*zip(rule.unstack, self._blocks, spread, strict=True)]):
            self._require_dim(dim, sizes if block is not None else [*sizes, 0], first, "unstack")
            if block is None:
                sizes.insert(dim, count)
            else:
                if sizes[dim] != block:
                    raise InvalidError(
                        f"{rule.where}: {first}: dimension {dim} is {sizes[dim]} long; expected a block of {block}"
                    )
                sizes[dim] = block * count
        self.source_shape = tuple(sizes)

    def _before_parts(self, part: int, shape: Shape, name: str) -> tuple[list[int], tuple[int, ...]]:
        rule, sizes = self.rule, list(shape)
        gathered: list[int] = []
        for dim, _ in reversed(rule.stack):
            self._require_dim(dim, sizes, name, "stack")
            gathered.insert(0, sizes.pop(dim))
        if rule.join is not None:
            dim, field, _ = rule.join
            count = self._joined or len(rule.source.choices.get(field, ()))
            self._require_dim(dim, sizes, name, "join")
            sizes[dim] = self._divided(sizes[dim], count, name, f"join by {field}: {count} tensors")
            gathered.insert(0, count)
        order = self._order(part, len(sizes), name)
        before = [0] * len(sizes)
        for dim, source in enumerate(order):
            before[source] = sizes[dim]
        self._require_mixed(part, before, name)
        if rule.sections is not None:
            dim, expected = rule.sections[0], self._repeat * self._lengths[part]
            self._require_dim(dim, before, name, "sections")
            if before[dim] != expected:
                raise InvalidError(
                    f"{rule.where}: {name}: dimension {dim} is {before[dim]} long; expected {self._repeat} × "
                    f"{self._lengths[part]} = {expected}. Are the sizes right?"
                )
        return before, tuple(gathered)

    # The steps' conditions.

    def _require_dim(self, dim: int, sizes: Sequence[int], name: str, step: str) -> None:
        if not 0 <= dim < len(sizes):
            raise InvalidError(
                f"{self.rule.where}: {name}: {step} along dimension {dim}; expected one of {len(sizes)} dimensions"
            )

    def _divided(self, length: int, by: int, name: str, step: str) -> int:
        if by < 1 or length % by:
            raise InvalidError(
                f"{self.rule.where}: {name}: {step} in a length of {length}; expected a whole number of these"
            )
        return length // by

    def _cut_padding(self, length: int, name: str) -> int:
        assert self._content is not None
        if self._content > length:
            raise InvalidError(
                f"{self.rule.where}: {name}: content of {self._content} in a length of {length}; expected at most "
                "that. Is the size right?"
            )
        return self._content

    def _require_sum(self, length: int, dim: int, name: str) -> None:
        total = self._repeat * sum(self._lengths)
        if total != length:
            raise InvalidError(
                f"{self.rule.where}: {name}: parts of dimension {dim} are {self._repeat} × "
                f"({' + '.join(map(str, self._lengths))}) = {total} long; found {length}. Are the sizes right?"
            )

    def _require_count(self, found: int, name: str) -> None:
        assert self.rule.join is not None
        expected = self._joined or len(self.rule.source.choices.get(self.rule.join[1], ()))
        if found != expected:
            raise InvalidError(f"{self.rule.where}: {name}: {found} tensors are joined; expected {expected}")

    def _require_mixed(self, part: int, sizes: Sequence[int], name: str) -> None:
        target, mixed = self.rule.targets[part], self._mixed[part]
        if target is None or target.interleave is None or mixed is None:
            return
        dim, (block, by) = target.interleave[0], mixed
        self._require_dim(dim, sizes, name, "interleave")
        count = self._divided(sizes[dim], block, name, f"interleave: blocks of {block}")
        self._divided(block, by, name, f"interleave by {by}")
        if count * by * (self._repeat if len(self._lengths) > 1 else 1) > TERMS_MAX:
            raise InvalidError(f"{self.rule.where}: {name}: {count} blocks by {by}; expected at most {TERMS_MAX} runs")

    def _order(self, part: int, dims: int, name: str) -> Sequence[int]:
        target = self.rule.targets[part]
        permute = None if target is None else target.permute
        order = tuple(range(dims))
        if permute is None:
            return order
        permute = permute or order[::-1]
        if sorted(permute) != list(order):
            raise InvalidError(
                f"{self.rule.where}: {name}: permute = {list(permute)}; expected each of {dims} dimensions once"
            )
        return permute

    # The elements of one source and one target.

    @cached_property
    def sources(self) -> list[tuple[int, ...]]:
        """Values of the fields of each source, in the order of the numbers."""
        return [*itertools.product(*map(range, self.gathered))]

    @cached_property
    def targets(self) -> list[tuple[int, tuple[int, ...]]]:
        """Part, and values of the fields, of each target, in the order of the numbers."""
        return [(part, values) for part in self.parts for values in itertools.product(*map(range, self.spread))]

    def shared(self, source: int, target: int) -> Iterator[Alongs]:
        """Yield grids of elements that a source and a target share."""
        rule, (part, spread) = self.rule, self.targets[target]
        made, gathered = rule.targets[part], self.sources[source]
        assert made is not None
        grids: list[_Grid] = [[Along(dim, dim, 0, 1, 0, 1, count) for dim, count in enumerate(self.source_shape)]]
        dims = len(self.source_shape)
        for (dim, _, _), block, value in zip(rule.unstack, self._blocks, spread, strict=True):
            grids = _taken(grids, dim, value * (block or 1), 1, block or 1, 0)
            if block is None:
                grids, dims = [_without(grid, dim) for grid in grids], dims - 1
        if rule.pad is not None and self._content is not None:
            grids = _taken(grids, rule.pad[0], 0, 1, self._content, 0)
        if rule.sections is not None:
            block, length, start = sum(self._lengths), self._lengths[part], sum(self._lengths[:part])
            runs = range(self._repeat) if len(self._lengths) > 1 else ()
            dim = rule.sections[0]
            grids = (
                [g for r in runs for g in _taken(grids, dim, r * block + start, 1, length, r * length)]
                if runs
                else grids
            )
        mixed = self._mixed[part]
        if made.interleave is not None and mixed is not None:
            grids = [*self._interleaved(grids, made.interleave[0], part, *mixed)]
        order = self._order(part, dims, "")
        at = {source: dim for dim, source in enumerate(order)}
        grids = [
            [each if each.target_dim is None else replace(each, target_dim=at[each.target_dim]) for each in grid]
            for grid in grids
        ]
        if rule.join is not None:
            dim = rule.join[0]
            shift = gathered[0] * (self._joined_length(part))
            grids = [
                [
                    replace(each, target_start=each.target_start + shift) if each.target_dim == dim else each
                    for each in grid
                ]
                for grid in grids
            ]
        for (dim, _), value in zip(rule.stack, gathered[len(gathered) - len(rule.stack) :], strict=True):
            grids = [[*_moved(grid, dim, 1), Along(None, dim, 0, 1, value, 1, 1)] for grid in grids]
        yield from map(tuple, grids)

    def terms_of_target(self, target: int) -> list[tuple[int, Alongs]]:
        """Return the terms of a target, each with the number of a source.

        Raises:
            InvalidError: There are too many.
        """
        return self._few([(source, a) for source in range(len(self.sources)) for a in self.shared(source, target)])

    def terms_of_source(self, source: int) -> list[tuple[int, Alongs]]:
        """Return the terms of a source for a layout that is turned around, each with the number of a target."""
        pairs = [(target, a) for target in range(len(self.targets)) for a in self.shared(source, target)]
        return self._few([(target, tuple(along.reversed() for along in alongs)) for target, alongs in pairs])

    def _few(self, terms: list[tuple[int, Alongs]]) -> list[tuple[int, Alongs]]:
        if len(terms) > TERMS_MAX:
            raise InvalidError(f"{self.rule.where}: a tensor of {len(terms)} terms; expected at most {TERMS_MAX}")
        return terms

    def _joined_length(self, part: int) -> int:
        """Return the elements that one source has along the dimension of a join."""
        assert self.rule.join is not None
        dim = self.rule.join[0]
        length = [*self.target_shapes[part]]
        for stacked, _ in reversed(self.rule.stack):
            length.pop(stacked)
        return length[dim] // self.gathered[0]

    def _interleaved(self, grids: list[_Grid], dim: int, part: int, block: int, by: int) -> Iterator[_Grid]:
        length = max(
            (each.target_start + each.count for grid in grids for each in grid if each.target_dim == dim), default=0
        )
        for start in range(0, length, block):
            for j in range(by):
                yield from _taken(grids, dim, start + j, by, block // by, start + j * (block // by))


def _taken(grids: list[_Grid], dim: int, start: int, step: int, count: int, at: int) -> list[_Grid]:
    """Keep, of one target dimension, elements `start + j * step`, and move each to `at + j`."""
    kept = []
    for grid in grids:
        number = next(number for number, each in enumerate(grid) if each.target_dim == dim)
        along = grid[number]
        first = max(0, -((start - along.target_start) // step))
        last = min(count, -((start - along.target_start - along.count) // step))
        if first < last:
            moved = along.source_start + (start + first * step - along.target_start) * along.source_step
            cut = Along(along.source_dim, dim, moved, along.source_step * step, at + first, 1, last - first)
            kept.append([*grid[:number], cut, *grid[number + 1 :]])
    return kept


def _moved(grid: _Grid, dim: int, by: int) -> _Grid:
    """Renumber the target dimensions from one on."""
    return [
        each if each.target_dim is None or each.target_dim < dim else replace(each, target_dim=each.target_dim + by)
        for each in grid
    ]


def _without(grid: _Grid, dim: int) -> _Grid:
    """Take a target dimension of one element away."""
    dropped = [replace(each, target_dim=None, target_start=0) if each.target_dim == dim else each for each in grid]
    return _moved(dropped, dim, -1)
