"""Compares two copies of a tensor: bit for bit, and by how much they differ as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.base.geometry.value_class import value_class
from holdfast.base.types.diff import Change
from holdfast.core.engine.casting import cast, widened
from holdfast.core.engine.target import HostTarget

Array = NDArray[np.generic]

BLOCK_ELEMENTS = 1 << 16
"""Elements measured at once; their intermediate results stay in the processor's cache."""

_SAFE_EXPONENT = 400
"""Numbers between 2**-400 and 2**400 can be squared and summed without overflow or underflow."""


@value_class
class Disagreement:
    """Where two runs of elements differ that should be equal."""

    count: int
    """Elements that differ."""

    first: int
    """Index of the first of them in the run."""

    last: int
    """Index of the last."""

    expected: str
    """Expected bytes of the first, in hex, as stored."""

    found: str
    """Found bytes of the first, in hex, as stored."""


def disagreement(
    expected: Sequence[HostTarget], found: Sequence[HostTarget], *, cast_from: str = ""
) -> Disagreement | None:
    """Return where two copies differ in a bit, or None.

    Args:
        expected, found: The copies, in parts of pairwise equal shape.
        cast_from: Element type of `expected`, if `found` should be a cast of it. Then any two NaNs are equal, since
            the NaN that a cast makes differs by machine.
    """
    ours, theirs = _joined(expected), _joined(found)
    dtype = found[0].dtype
    if cast_from:
        ours = cast(ours, cast_from, dtype)
    differs = _differs(ours, theirs)
    if cast_from and differs.any():
        differs &= ~(np.isnan(widened(ours, dtype)) & np.isnan(widened(theirs, dtype)))
    where = np.flatnonzero(differs)
    if not len(where):
        return None
    first, last = int(where[0]), int(where[-1])
    return Disagreement(len(where), first, last, ours[first].tobytes().hex(), theirs[first].tobytes().hex())


class Measure:
    """By how much one tensor differs in two checkpoints, over the windows added so far; sums use 64-bit floats."""

    def __init__(self) -> None:
        self._changed = self._unmeasured = 0
        self._absolute: float = 0
        self._relative = 0.0
        self._nan, self._inf = [0, 0], [0, 0]
        self._norms = [_Norm(), _Norm(), _Norm()]

    def add(self, a: Sequence[HostTarget], b: Sequence[HostTarget], common: str) -> None:
        """Add one window.

        Args:
            a, b: The window in both checkpoints, in parts of pairwise equal shape.
            common: The numpy type to which both are widened if their types differ; else empty.
        """
        for ours, theirs in zip(a, b, strict=True):
            first, second = ours.array.reshape(-1), theirs.array.reshape(-1)
            for start in range(0, len(first), BLOCK_ELEMENTS):
                x, y = first[start : start + BLOCK_ELEMENTS], second[start : start + BLOCK_ELEMENTS]
                with np.errstate(over="ignore", invalid="ignore"):
                    if common:
                        self._add(widened(x, ours.dtype).astype(common), widened(y, theirs.dtype).astype(common))
                    else:
                        self._add_alike(x, y, ours.dtype)

    def merge(self, other: Measure) -> None:
        """Add the measure of another part of the tensor."""
        self._changed += other._changed
        self._unmeasured += other._unmeasured
        self._absolute = max(self._absolute, other._absolute)
        self._relative = max(self._relative, other._relative)
        for side in (0, 1):
            self._nan[side] += other._nan[side]
            self._inf[side] += other._inf[side]
        for norm, other_norm in zip(self._norms, other._norms, strict=True):
            norm.merge(other_norm)

    def change(self) -> Change:
        """Return the totals."""
        a, b, difference = (norm.root() for norm in self._norms)
        return Change(
            changed=self._changed,
            unmeasured=self._unmeasured,
            max_absolute=self._absolute,
            max_relative=self._relative,
            norm_a=a,
            norm_b=b,
            norm_difference=difference,
            nan=(self._nan[0], self._nan[1]),
            inf=(self._inf[0], self._inf[1]),
        )

    def _add_alike(self, x: Array, y: Array, dtype: str) -> None:
        """Measure elements of one type. Blocks with equal bits are measured once, for both sides."""
        differs = _differs(x, y)
        if differs.any():
            self._add(widened(x, dtype), widened(y, dtype), differs)
            return
        other = Measure()
        finite = other._count(0, widened(x, dtype))
        other._norms[0].add(finite)
        other._norms[1], other._nan[1], other._inf[1] = other._norms[0], other._nan[0], other._inf[0]
        self.merge(other)

    def _add(self, x: Array, y: Array, differs: NDArray[np.bool_] | None = None) -> None:
        """Measure elements as numbers; `differs` marks those that differ, None: those of unequal value."""
        if differs is None:
            differs = (x != y) & ~(_nans(x) & _nans(y))
        self._changed += int(np.count_nonzero(differs))
        self._norms[0].add(self._count(0, x))
        self._norms[1].add(self._count(1, y))
        if not differs.all():
            x, y = x[differs], y[differs]
        if x.dtype.kind in "fc":
            measurable = np.isfinite(x) & np.isfinite(y)
            self._unmeasured += int(np.count_nonzero(~measurable))
            x, y = x[measurable], y[measurable]
        if not len(x):
            return
        distance = _distance(x, y)
        absolute = distance.max().item()
        self._absolute = max(self._absolute, absolute)
        numbers = distance.astype(np.float64)
        self._norms[2].add(numbers)
        if math.isinf(absolute):
            # The distance of two numbers near the largest may overflow; quarters have the same relative distance.
            x, y = np.multiply(x, 0.25), np.multiply(y, 0.25)
            numbers = _distance(x, y).astype(np.float64)
        larger = np.maximum(_magnitude(x), _magnitude(y))
        relative = numbers[larger > 0] / larger[larger > 0]
        self._relative = max(self._relative, float(relative.max(initial=0.0)))

    def _count(self, side: int, numbers: Array) -> Array:
        """Count NaN and infinite numbers of one side; return the finite ones."""
        if numbers.dtype.kind not in "fc":
            return numbers
        finite = np.isfinite(numbers)
        if finite.all():
            return numbers
        nan = int(np.count_nonzero(_nans(numbers)))
        self._nan[side] += nan
        self._inf[side] += int(np.count_nonzero(~finite)) - nan
        return numbers[finite]


class _Norm:
    """A sum of squares, kept with a separate exponent so that it neither overflows nor underflows."""

    def __init__(self) -> None:
        self._sum, self._exponent = 0.0, 0

    def add(self, numbers: Array) -> None:
        """Add the squares of finite numbers."""
        if not len(numbers):
            return
        if numbers.dtype.kind == "c":
            numbers = numbers.astype(np.complex128).view(np.float64)
        wide = numbers.astype(np.float64, copy=False)
        largest = float(max(wide.max(), -wide.min()))
        if not largest:
            return
        exponent = math.frexp(largest)[1] if math.isfinite(largest) else 0
        if -_SAFE_EXPONENT < exponent < _SAFE_EXPONENT:
            exponent = 0
        scaled = np.ldexp(wide, -exponent) if exponent else wide
        # Not np.dot: its threads would compete for cores with the threads that compare other windows.
        self._add_scaled(float(np.square(scaled).sum()), exponent)

    def merge(self, other: _Norm) -> None:
        """Add another sum."""
        self._add_scaled(other._sum, other._exponent)

    def root(self) -> float:
        """Return the square root of the sum; infinity if it exceeds a 64-bit float."""
        try:
            return math.ldexp(math.sqrt(self._sum), self._exponent)
        except OverflowError:
            return math.inf

    def _add_scaled(self, squares: float, exponent: int) -> None:
        if not squares:
            return
        if not self._sum or exponent > self._exponent:
            self._sum = math.ldexp(self._sum, 2 * (self._exponent - exponent)) if self._sum else 0.0
            self._exponent = exponent
        self._sum += math.ldexp(squares, 2 * (exponent - self._exponent))


def _joined(parts: Sequence[HostTarget]) -> Array:
    if len(parts) == 1:
        return parts[0].array.reshape(-1)
    return np.concatenate([part.array.reshape(-1) for part in parts])


def _differs(x: Array, y: Array) -> NDArray[np.bool_]:
    """Return which elements differ in a bit; both arrays have one dimension and the same numpy type."""
    if x.itemsize > 8:
        differs: NDArray[np.bool_] = (x.view(np.uint64) != y.view(np.uint64)).reshape(len(x), -1).any(axis=1)
    else:
        unsigned = np.dtype(f"u{x.itemsize}")
        differs = x.view(unsigned) != y.view(unsigned)
    return differs


def _nans(numbers: Array) -> NDArray[np.bool_]:
    return np.isnan(numbers) if numbers.dtype.kind in "fc" else np.zeros(len(numbers), dtype=bool)


def _distance(x: Array, y: Array) -> Array:
    """Return |x − y|: integers exactly, floating numbers in 64 bits."""
    if x.dtype.kind == "c":
        return np.abs(x.astype(np.complex128) - y.astype(np.complex128))
    if x.dtype.kind == "f":
        return np.abs(x.astype(np.float64) - y.astype(np.float64))
    # The difference of two 64-bit integers modulo 2**64 is exact, because the larger one comes first.
    larger, smaller = np.maximum(x, y), np.minimum(x, y)
    return larger.astype(np.uint64) - smaller.astype(np.uint64)


def _magnitude(numbers: Array) -> NDArray[np.float64]:
    wide = numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64)
    magnitude: NDArray[np.float64] = np.abs(wide)
    return magnitude
