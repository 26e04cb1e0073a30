"""The codec `dictionary`: float32 numbers with few different mantissas, such as 16-bit gradients that were clipped."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.backends.codecs.byte_planes import BLOCK, Bytes, coded_plane, plane_of
from holdfast.backends.codecs.scratch import lent, scratch
from holdfast.backends.codecs.sections import bytes_of, element_count, require_taken, sections_of, stored_form
from holdfast.base.ports.codec import Base, Coder, StoredPart
from holdfast.errors import CorruptError

_MANTISSA_BITS = 23

_MANTISSA = (1 << _MANTISSA_BITS) - 1

_ENTRIES_MAX = 256

_SIGNED_ENTRIES_MAX = 128
"""Most entries with which an index leaves a bit for the sign."""

_ENTRY_BYTES = 4

_FIRST_LOOK = 4096
"""Elements of which the first table is made. More than 256 mantissas among them end the attempt."""


class _Entries(threading.local):
    """The number of an entry by its mantissa, reused by all chunks of a thread.

    8 MiB, of which a page for each entry is ever written. Numbers of former chunks stay in it, so each is checked.
    """

    def __init__(self) -> None:
        self.by_mantissa = np.zeros(1 << _MANTISSA_BITS, np.uint8)


_entries = _Entries()


class _Table:
    """The mantissas found so far. A place without one holds a number that no mantissa has."""

    def __init__(self) -> None:
        self.mantissas = np.full(_ENTRIES_MAX, _MANTISSA + 1, np.uint32)
        self.count = 0

    def add(self, mantissas: NDArray[np.uint32]) -> bool:
        """Add new mantissas, some of them more than once. Return False if there is no room for them."""
        new = np.unique(mantissas)
        stop = self.count + len(new)
        if stop > _ENTRIES_MAX:
            return False
        self.mantissas[self.count : stop] = new
        _entries.by_mantissa[new] = np.arange(self.count, stop)
        self.count = stop
        return True

    def index(self, mantissas: NDArray[np.uint32], index: Bytes) -> bool:
        """Fill the index of mantissas. Return False if there are too many different ones."""
        _take(_entries.by_mantissa, mantissas, index)
        found = scratch("found mantissas", 4 * len(index)).view(np.uint32)
        _take(self.mantissas, index, found)
        missing = np.not_equal(found, mantissas, out=scratch("missing", len(index)).view(np.bool_))
        if not missing.any():
            return True
        if not self.add(mantissas[missing]):
            return False
        _take(_entries.by_mantissa, mantissas, index)
        return True


def _take(table: NDArray[np.generic], places: NDArray[np.unsignedinteger], out: NDArray[np.generic]) -> None:
    """Fill `out` with the entries of a table at some places."""
    # numpy takes by places of this type alone, and would make them of fresh memory.
    at = scratch("places", 8 * len(places)).view(np.intp)
    np.copyto(at, places, casting="same_kind")
    np.take(table, at, out=out, mode="clip")


@dataclass(frozen=True, slots=True)
class _DictionaryCoder:
    """A table of mantissas, and for each element: the number of its mantissa, its exponent, its sign."""

    def encode(self, raw: memoryview, base: memoryview | None = None) -> list[StoredPart] | None:
        """Return the stored form, or None."""
        count = element_count(raw, 4)
        if not count:
            return None
        elements = np.frombuffer(raw, np.uint32)
        table = _Table()
        if not table.add(np.bitwise_and(elements[:: -(-count // _FIRST_LOOK)], _MANTISSA)):
            return None
        index, exponents, signs = lent(count), lent(count), scratch("signs", count)
        for start in range(0, count, BLOCK):
            block = slice(start, start + BLOCK)
            some = elements[block]
            mantissas = scratch("mantissas", some.nbytes).view(np.uint32)
            np.bitwise_and(some, _MANTISSA, out=mantissas)
            if not table.index(mantissas, index[block]):
                return None
            np.right_shift(some, _MANTISSA_BITS, out=exponents[block], casting="unsafe")
            np.less(some.view(np.int32), 0, out=signs[block].view(np.bool_))
        sign_bits = np.empty(0, np.uint8)
        if table.count <= _SIGNED_ENTRIES_MAX:
            np.add(index, index, out=index)
            np.add(index, signs, out=index)
        else:
            sign_bits = np.packbits(signs, bitorder="little")
        return stored_form(
            [
                bytes_of(table.mantissas[: table.count]),
                coded_plane(index),
                coded_plane(exponents, sampled=False),
                bytes_of(sign_bits),
            ],
            len(raw),
        )

    def decode(self, stored: memoryview, base: memoryview | None, raw: memoryview) -> None:
        """Fill `raw`."""
        table_section, index_section, exponent_section, sign_section = sections_of(stored, 4, len(raw), 4)
        table = _table_of(table_section)
        count = len(raw) // 4
        has_signs = len(table) <= _SIGNED_ENTRIES_MAX
        index = plane_of(index_section, count, "plane of indices")
        entries = 2 * len(table) if has_signs else len(table)
        if int(index.max()) >= entries:
            raise CorruptError(f"plane of indices: {int(index.max())}; expected less than {entries}")
        exponents = plane_of(exponent_section, count, "plane of exponents")
        sign_bytes = 0 if has_signs else -(-count // 8)
        if len(sign_section) != sign_bytes:
            raise CorruptError(f"signs: {len(sign_section)} bytes; expected {sign_bytes}")
        if has_signs:
            table = np.stack([table, table | np.uint32(1 << 31)], axis=1).reshape(-1)
        elements = np.frombuffer(raw, np.uint32)
        for start in range(0, count, BLOCK):
            block = slice(start, start + BLOCK)
            some = elements[block]
            np.left_shift(exponents[block], _MANTISSA_BITS, out=some, dtype=np.uint32)
            some &= (1 << 31) - 1
            mantissas = scratch("mantissas", some.nbytes).view(np.uint32)
            _take(table, index[block], mantissas)
            some |= mantissas
        if not has_signs:
            signs = np.unpackbits(np.frombuffer(sign_section, np.uint8), count=count, bitorder="little")
            elements |= np.left_shift(signs, 31, dtype=np.uint32)


class DictionaryCodec:
    """float32 numbers that are 16-bit numbers times one factor."""

    name = "dictionary"
    base: Base = "none"

    def takes(self, dtype: str, base_dtype: str = "") -> bool:
        """Return whether it codes elements of a type."""
        return dtype == "float32" and not base_dtype

    def coder(self, dtype: str, base_dtype: str = "") -> Coder:
        """Return the coder for elements of a type."""
        require_taken(self, dtype, base_dtype)
        return _DictionaryCoder()


def _table_of(section: memoryview) -> NDArray[np.uint32]:
    """Return the mantissas of a table.

    Raises:
        CorruptError: It holds none, too many, or a number that is no mantissa.
    """
    if len(section) % _ENTRY_BYTES or not _ENTRY_BYTES <= len(section) <= _ENTRY_BYTES * _ENTRIES_MAX:
        raise CorruptError(
            f"table of {len(section)} bytes; expected 1 to {_ENTRIES_MAX} entries of {_ENTRY_BYTES} bytes"
        )
    table = np.frombuffer(section, np.uint32)
    if int(table.max()) > _MANTISSA:
        raise CorruptError(f"table: {int(table.max())}; expected mantissas up to {_MANTISSA}")
    return table
