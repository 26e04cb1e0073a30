"""The tensors of an index as columns, for checks of all at once, and as specs by FQN on request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from holdfast.base.geometry.dtype import DTYPES, NEWER_TYPES
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.core.format.index.columns import Ints, decode_column, encode_column, positions, products, run_starts
from holdfast.errors import CorruptError, InvalidError

Column = tuple[int, bytes]

NDIM_MAX = 64
"""Dimensions of a tensor, as in torch and numpy."""

_TENSOR_BYTES_MAX = 1 << 62
"""Limit of the bytes of one tensor, empty dimensions counted as one: numpy and torch cannot address more."""


class TensorsDocument(msgspec.Struct):
    """The first fields of an index file, a part and an overview: the chunk size, and the tensors in columns."""

    chunk_bytes: int
    fqns: list[str]
    dtypes: list[str]
    dtype_numbers: Column
    ndims: Column
    shapes: Column


class TensorTable:
    """Tensors numbered in order of FQN. Columns are the data; lookups by name are built on first use."""

    def __init__(self, fqns: list[str], dtypes: Sequence[str], dtype_numbers: Ints, ndims: Ints, lengths: Ints) -> None:
        """Take checked columns.

        Args:
            fqns: FQN of each tensor, ascending.
            dtypes: Element types, by number.
            dtype_numbers: Number of each tensor's element type.
            ndims: Number of each tensor's dimensions.
            lengths: Shapes, tensor after tensor.
        """
        self.fqns, self.ndims, self.lengths = fqns, ndims, lengths
        self._dtypes, self._dtype_numbers = dtypes, dtype_numbers
        self.first_length = run_starts(ndims)
        """Start of each tensor's shape in `lengths`, and the end of the last; shape (tensors + 1,)."""

    @staticmethod
    def of(tensors: Iterable[TensorSpec]) -> TensorTable:
        """Return the table of tensors that pass `require_listable`; no two may have one FQN."""
        specs = sorted(tensors, key=attrgetter("fqn"))
        shapes = [spec.global_shape for spec in specs]
        names = [spec.dtype for spec in specs]
        dtypes = sorted(set(names))
        number_of = {name: number for number, name in enumerate(dtypes)}
        ndims = np.fromiter(map(len, shapes), np.int64, len(specs))
        lengths = np.fromiter(chain.from_iterable(shapes), np.int64, int(ndims.sum()))
        numbers = np.fromiter(map(number_of.__getitem__, names), np.int64, len(specs))
        table = TensorTable([spec.fqn for spec in specs], dtypes, numbers, ndims, lengths)
        table.specs = dict(zip(table.fqns, specs, strict=True))
        return table

    @property
    def count(self) -> int:
        """Number of tensors."""
        return len(self.fqns)

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor by FQN, ascending."""
        return {fqn: TensorSpec(fqn, dtype, shape) for fqn, dtype, shape in self.rows()}

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """Number of each FQN."""
        return dict(zip(self.fqns, range(self.count), strict=True))

    @cached_property
    def itemsizes(self) -> Ints:
        """Bytes of one element of each tensor."""
        return np.array([DTYPES[name].itemsize for name in self._dtypes], dtype=np.int64)[self._dtype_numbers]

    @cached_property
    def numels(self) -> Ints:
        """Elements of each tensor."""
        return products(self.ndims, self.lengths)

    @property
    def newer_types(self) -> tuple[str, ...]:
        """Element types that readers before format 1.5 do not know, sorted."""
        return tuple(sorted(NEWER_TYPES.intersection(self._dtypes)))

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum((self.numels * self.itemsizes).tolist())

    def rows(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield FQN, element type and shape of every tensor, FQNs ascending."""
        lengths = self.lengths.tolist()
        names = map(self._dtypes.__getitem__, self._dtype_numbers.tolist())
        for fqn, dtype, (begin, stop) in zip(self.fqns, names, pairwise(self.first_length.tolist()), strict=True):
            yield fqn, dtype, tuple(lengths[begin:stop])

    def taken(self, chosen: Ints) -> TensorTable:
        """Return the table of the tensors with these numbers, ascending."""
        return TensorTable(
            [self.fqns[number] for number in chosen.tolist()],
            self._dtypes,
            self._dtype_numbers[chosen],
            self.ndims[chosen],
            self.lengths[positions(self.first_length, chosen)],
        )

    def encoded(self) -> dict[str, Any]:
        """Return the fields of a `TensorsDocument` except `chunk_bytes`; inverse of `decode_tensors`."""
        used = np.unique(self._dtype_numbers).tolist()
        dtypes = sorted({self._dtypes[number] for number in used})
        renumbered = np.zeros(len(self._dtypes), dtype=np.int64)
        renumbered[used] = [dtypes.index(self._dtypes[number]) for number in used]
        return {
            "fqns": self.fqns,
            "dtypes": dtypes,
            "dtype_numbers": encode_column(renumbered[self._dtype_numbers]),
            "ndims": encode_column(self.ndims),
            "shapes": encode_column(self.lengths),
        }


def require_listable(tensor: TensorSpec) -> None:
    """Refuse a tensor that cannot be stored.

    Raises:
        InvalidError: The tensor has too many dimensions or bytes.
    """
    shape = tensor.global_shape
    if len(shape) > NDIM_MAX:
        raise InvalidError(
            f"{tensor.fqn}: {len(shape)} dimensions; expected at most {NDIM_MAX}. Reshape it, or leave it out with "
            "skip="
        )
    if not is_addressable(tensor):
        raise InvalidError(
            f"{tensor.fqn}: {tensor.dtype} of shape {list(shape)}; expected under 2**62 bytes, empty dimensions "
            "counted as one. Leave it out with skip="
        )


def is_addressable(tensor: TensorSpec) -> bool:
    """Return whether a tensor has under 2**62 bytes, empty dimensions counted as one."""
    return math.prod(length or 1 for length in tensor.global_shape) * tensor.itemsize < _TENSOR_BYTES_MAX


class TensorTables:
    """Cache of decoded tables: thousands of ranks share a few tables."""

    def __init__(self) -> None:
        self._known: dict[object, TensorTable] = {}

    def of(self, document: TensorsDocument, where: str) -> TensorTable:
        """Return the table of a document; errors as `decode_tensors`."""
        columns = document.dtype_numbers, document.ndims, document.shapes
        key = (tuple(document.fqns), tuple(document.dtypes), columns)
        if key not in self._known:
            self._known[key] = decode_tensors(document, where)
        return self._known[key]


def decode_tensors(document: TensorsDocument, where: str) -> TensorTable:
    """Return the table of a document's tensors, every number checked.

    Raises:
        CorruptError: FQNs are not ascending, a dtype is unknown, or a shape is impossible.
    """
    fqns, dtypes, count = document.fqns, document.dtypes, len(document.fqns)
    if any(fqn >= later for fqn, later in pairwise(fqns)):
        raise CorruptError(f"{where}: an FQN is listed twice, or FQNs are not in order. Read another copy")
    if count and not fqns[0]:
        raise CorruptError(f"{where}: an FQN is empty. Read another copy")
    unknown = [name for name in dtypes if name not in DTYPES]
    if unknown:
        raise CorruptError(f"{where}: dtype {unknown[0][:80]!r}; expected one of docs/format.md. Read another copy")
    dtype_of = decode_column(document.dtype_numbers, where, count)
    ndim_of = decode_column(document.ndims, where, count)
    if count and (int(dtype_of.max()) >= len(dtypes) or int(ndim_of.max()) > NDIM_MAX):
        raise CorruptError(f"{where}: a tensor has an unlisted dtype or over {NDIM_MAX} dimensions. Read another copy")
    lengths = decode_column(document.shapes, where, int(ndim_of.sum()))
    table = TensorTable(fqns, dtypes, dtype_of, ndim_of, lengths)
    _require_addressable(table, where)
    return table


def _require_addressable(table: TensorTable, where: str) -> None:
    """Refuse tensors that are too large to address.

    Raises:
        CorruptError: The message names the first such tensor.
    """
    # Estimate in floats first, because numpy integers would wrap around. Compute exactly only near the limit.
    lengths = np.maximum(table.lengths, 1).astype(np.float64)
    with np.errstate(over="ignore"):  # An infinite product is above the limit, as it should be.
        likely = products(table.ndims, lengths) * table.itemsizes
    for number in np.flatnonzero(likely >= _TENSOR_BYTES_MAX / 2).tolist():
        spec = table.specs[table.fqns[number]]
        if not is_addressable(spec):
            raise CorruptError(
                f"{where}: {spec.fqn}: {spec.dtype} of shape {spec.global_shape}; expected under 2**62 bytes. Read "
                "another copy"
            )
