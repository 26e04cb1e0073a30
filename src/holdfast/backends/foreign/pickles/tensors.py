"""References to torch tensors in a file: views of storages, whose bytes are not read."""

from __future__ import annotations

import math
from typing import TypeGuard

from holdfast.backends.foreign.pickles.objects import UnsupportedPickle
from holdfast.backends.foreign.typed_values import COUNT_MAX, DIMENSIONS_MAX
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.value_class import value_class


@value_class
class StoredStorage:
    """The memory of one or several tensors, in a file."""

    file: str
    """Key of the file."""

    offset: int
    """First byte in the file."""

    bytes: int
    """Size in bytes."""

    key: str
    """Name of the storage in the file."""

    dtype: str
    """Element type, a key of `DTYPES`; empty if it is untyped and each tensor states its own."""


@value_class
class StoredTensor:
    """A tensor in a file, without its autograd state."""

    dtype: str
    """Element type, a key of `DTYPES`."""

    shape: tuple[int, ...]
    """Elements along each dimension."""

    strides: tuple[int, ...]
    """Elements of the storage between neighbours along each dimension; 0 for an expanded dimension."""

    file: str
    """Key of the file."""

    offset: int
    """Byte of the file at which its first element is stored."""

    storage: str
    """Name of its storage. Tensors of one storage share memory."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are stored in row-major order without gaps."""
        return 0 in self.shape or all(
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
    """Return a tensor that is a view of a storage, from the arguments in a pickle.

    Args:
        storage: The storage.
        offset: Elements of the storage before the first element.
        shape, strides: In elements, one per dimension.
        dtype: Element type, if the storage states none.
    Raises:
        ValueError: The arguments are not those of a view, or the view reaches beyond the storage.
        UnsupportedPickle: Holdfast does not store the element type.
    """
    if not isinstance(storage, StoredStorage):
        raise ValueError(f"a tensor over {type(storage).__name__}; expected a storage")
    if not _is_count(offset) or not _are_counts(shape) or not _are_counts(strides):
        raise ValueError("a tensor whose offset, shape or strides are not counts")
    if len(shape) != len(strides) or len(shape) > DIMENSIONS_MAX:
        raise ValueError(f"a tensor of {len(shape)} lengths and {len(strides)} strides; expected at most 64 of each")
    name = dtype or storage.dtype
    if name not in DTYPES:
        raise UnsupportedPickle(f"a tensor of dtype {name or 'unknown'}; expected one of {', '.join(DTYPES)}")
    itemsize = DTYPES[name].itemsize
    last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    reach = 0 if 0 in shape else last + 1
    if math.prod(shape) >= COUNT_MAX or reach * itemsize > storage.bytes:
        raise ValueError(
            f"a tensor of {name} {list(shape)} with strides {list(strides)} from element {offset}; "
            f"its storage {storage.key!r} has {storage.bytes} bytes"
        )
    at = storage.offset + (offset * itemsize if reach else 0)
    return StoredTensor(name, tuple(shape), tuple(strides), storage.file, at, storage.key)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < COUNT_MAX


def _are_counts(value: object) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and all(map(_is_count, value))
