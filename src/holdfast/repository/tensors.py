"""The tensors of an index: their specs by FQN, and the same as columns, for checks on all of them at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import attrgetter

import numpy as np

from holdfast.errors import CorruptError
from holdfast.repository.columns import Ints, firsts, packed, positions, unpacked
from holdfast.spec.dtype import DTYPES
from holdfast.spec.tensor import TensorSpec

Column = tuple[int, bytes]

NDIM_MAX = 64
"""Dimensions of a tensor, as in torch and numpy."""

_TENSOR_BYTES_MAX = 1 << 62
"""Bytes of one tensor, its empty dimensions counted as one: what numpy and torch can address."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorTable:
    """Tensors numbered by FQN, ascending."""

    specs: Mapping[str, TensorSpec]
    """Every tensor by FQN, ascending."""

    numbers: Mapping[str, int]
    """Number of each FQN."""

    ndims: Ints
    """Dimensions of each."""

    first_length: Ints
    """For each, and one past the last: where its shape begins in `lengths`."""

    lengths: Ints
    """Shapes, one tensor after the other."""

    itemsizes: Ints
    """Bytes of an element of each."""

    numels: Ints
    """Elements of each."""

    @staticmethod
    def of(tensors: Iterable[TensorSpec]) -> TensorTable:
        """Return the table of tensors; no two of one FQN."""
        specs = sorted(tensors, key=attrgetter("fqn"))
        shapes = [spec.global_shape for spec in specs]
        ndims = np.fromiter(map(len, shapes), np.int64, len(shapes))
        by_fqn = {spec.fqn: spec for spec in specs}
        return TensorTable(
            specs=by_fqn,
            numbers=dict(zip(by_fqn, range(len(by_fqn)), strict=True)),
            ndims=ndims,
            first_length=firsts(ndims),
            lengths=np.fromiter(chain.from_iterable(shapes), np.int64, int(ndims.sum())),
            itemsizes=np.fromiter([DTYPES[spec.dtype].itemsize for spec in specs], np.int64, len(specs)),
            numels=np.fromiter(map(math.prod, shapes), np.int64, len(specs)),
        )

    def taken(self, chosen: Ints) -> TensorTable:
        """Return the table of some of the tensors, by their numbers, ascending."""
        specs = list(self.specs.values())
        by_fqn = {spec.fqn: spec for spec in map(specs.__getitem__, chosen.tolist())}
        ndims = self.ndims[chosen]
        return TensorTable(
            specs=by_fqn,
            numbers=dict(zip(by_fqn, range(len(by_fqn)), strict=True)),
            ndims=ndims,
            first_length=firsts(ndims),
            lengths=self.lengths[positions(self.first_length, chosen)],
            itemsizes=self.itemsizes[chosen],
            numels=self.numels[chosen],
        )

    def encoded(self) -> tuple[list[str], list[str], Column, Column, Column]:
        """Return FQNs, dtypes, and the columns of dtype numbers, dimensions and shapes; inverse of `decode_tensors`."""
        names = [spec.dtype for spec in self.specs.values()]
        dtypes = sorted(set(names))
        number_of = {name: number for number, name in enumerate(dtypes)}
        dtype_numbers = packed([number_of[name] for name in names])
        return list(self.specs), dtypes, dtype_numbers, packed(self.ndims), packed(self.lengths)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Global shape of each tensor, by number."""
        return [spec.global_shape for spec in self.specs.values()]


class TensorTables:
    """Tables decoded before: thousands of ranks list the same few."""

    def __init__(self) -> None:
        self._known: dict[object, TensorTable] = {}

    def of(
        self, fqns: list[str], dtypes: list[str], numbers: Column, ndims: Column, shapes: Column, where: str
    ) -> TensorTable:
        """Return the table that columns hold; arguments and errors as `decode_tensors`."""
        key = (tuple(fqns), tuple(dtypes), numbers, ndims, shapes)
        if key not in self._known:
            self._known[key] = decode_tensors(fqns, dtypes, numbers, ndims, shapes, where)
        return self._known[key]


def decode_tensors(
    fqns: list[str], dtypes: list[str], numbers: Column, ndims: Column, shapes: Column, where: str
) -> TensorTable:
    """Return the table of tensors that columns of an index hold, every number of it checked.

    Raises:
        CorruptError: Names are not ascending, a dtype is unknown, or a shape is impossible.
    """
    count = len(fqns)
    if any(fqn >= later for fqn, later in pairwise(fqns)):
        raise CorruptError(f"{where}: an FQN is listed twice, or FQNs are not in order")
    if count and not fqns[0]:
        raise CorruptError(f"{where}: an FQN is empty")
    unknown = [name for name in dtypes if name not in DTYPES]
    if unknown:
        raise CorruptError(f"{where}: dtype {unknown[0]!r}; expected one of {', '.join(DTYPES)}")
    dtype_of = unpacked(numbers, where, count).tolist()
    ndim_of = unpacked(ndims, where, count).tolist()
    if (dtype_of and max(dtype_of) >= len(dtypes)) or (ndim_of and max(ndim_of) > NDIM_MAX):
        raise CorruptError(f"{where}: a tensor names a dtype that is not listed or has over {NDIM_MAX} dimensions")
    all_lengths = unpacked(shapes, where, sum(ndim_of))
    lengths = all_lengths.tolist()
    tensors: dict[str, TensorSpec] = {}
    numels: list[int] = []
    at = 0
    for fqn, dtype, ndim in zip(fqns, dtype_of, ndim_of, strict=True):
        shape = tuple(lengths[at : at + ndim])
        at += ndim
        numel = math.prod(shape) or math.prod(length or 1 for length in shape)
        if numel * DTYPES[dtypes[dtype]].itemsize >= _TENSOR_BYTES_MAX:
            raise CorruptError(f"{where}: {fqn}: {dtypes[dtype]} of shape {shape}; expected under 2**62 bytes")
        numels.append(numel if all(shape) else 0)
        tensors[fqn] = TensorSpec(fqn, dtypes[dtype], shape)
    itemsizes = np.array([DTYPES[name].itemsize for name in dtypes], dtype=np.int64)
    widths = np.array(ndim_of, dtype=np.int64)
    return TensorTable(
        specs=tensors,
        numbers=dict(zip(fqns, range(count), strict=True)),
        ndims=widths,
        first_length=firsts(widths),
        lengths=all_lengths,
        itemsizes=itemsizes[np.array(dtype_of, dtype=np.int64)],
        numels=np.array(numels, dtype=np.int64),
    )
