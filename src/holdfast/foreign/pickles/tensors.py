"""A tensor of torch where it lies in a file: a view of a storage, not read."""

from __future__ import annotations

import math
from typing import TypeGuard

from holdfast.foreign.pickles.objects import UnsupportedPickle
from holdfast.geometry.dtype import DTYPES
from holdfast.geometry.value_class import value_class

DIMENSIONS_MAX = 64
"""What torch allows."""

_NUMBER_MAX = 1 << 62
"""Above every count of elements or bytes that a file can hold."""


@value_class
class StoredStorage:
    """Memory that tensors are views of, as it lies in a file."""

    file: str
    """Key of the file."""

    offset: int
    """Byte of the file where it starts."""

    bytes: int
    """Its size."""

    key: str
    """What the file calls it; the same for every tensor that lies in it."""

    dtype: str
    """Element type, a key of `DTYPES`; empty where it is without one and every tensor tells its own."""


@value_class
class StoredTensor:
    """A tensor where it lies in a file. What autograd knew of it is left out."""

    dtype: str
    """Element type, a key of `DTYPES`."""

    shape: tuple[int, ...]
    """Elements along each dimension."""

    strides: tuple[int, ...]
    """Elements of the storage from one to the next along each dimension; 0 where it is expanded."""

    file: str
    """Key of the file."""

    offset: int
    """Byte of the file where its first element lies."""

    storage: str
    """Key of its storage in the file: tensors of one storage share memory."""

    storage_offset: int
    """Elements of the storage before the first of the tensor."""

    @property
    def numel(self) -> int:
        """Count of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements follow one another in row-major order, without gaps."""
        if 0 in self.shape:
            return True
        return all(
            length == 1 or stride == wanted
            for length, stride, wanted in zip(self.shape, self.strides, row_major_strides(self.shape), strict=True)
        )


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def view_of(storage: object, offset: object, shape: object, strides: object, dtype: str | None = None) -> StoredTensor:
    """Return a tensor that is a view of a storage, as a pickle states it.

    Args:
        storage: What it lies in.
        offset: Elements of the storage before its first.
        shape, strides: In elements, one per dimension.
        dtype: Its element type, where the storage does not tell.
    Raises:
        ValueError: It is no view, or reaches beyond the storage.
        Refusal: Its element type is not stored.
    """
    if not isinstance(storage, StoredStorage):
        raise ValueError(f"a tensor over {type(storage).__name__}; expected a storage")
    if not _is_count(offset) or not _are_counts(shape) or not _are_counts(strides):
        raise ValueError("a tensor whose offset, shape or strides are no counts")
    if len(shape) != len(strides) or len(shape) > DIMENSIONS_MAX:
        raise ValueError(f"a tensor of {len(shape)} lengths and {len(strides)} strides; expected at most 64 of each")
    name = dtype or storage.dtype
    if name not in DTYPES:
        raise UnsupportedPickle(f"a tensor of dtype {name or 'unknown'}; expected one of {', '.join(DTYPES)}")
    itemsize = DTYPES[name].itemsize
    last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    reach = 0 if 0 in shape else last + 1
    if math.prod(shape) >= _NUMBER_MAX or reach * itemsize > storage.bytes:
        raise ValueError(
            f"a tensor of {name} {list(shape)} with strides {list(strides)} from element {offset} on; "
            f"its storage {storage.key!r} has {storage.bytes} bytes"
        )
    at = storage.offset + (offset * itemsize if reach else 0)
    return StoredTensor(name, tuple(shape), tuple(strides), storage.file, at, storage.key, offset)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _NUMBER_MAX


def _are_counts(value: object) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and all(map(_is_count, value))
