"""Recognises archives that differ only in the elements of their tensor, so that most need no parsing.

torch.save writes two tensors of one shape as archives that differ in the elements, in checksums, and in an id derived
from them. If all other bytes are equal, the value of one archive holds for the other, at another place.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

from holdfast.backends.foreign.dcp.metadata import Item
from holdfast.backends.foreign.dcp.prefetch import TailPrefetch
from holdfast.backends.foreign.pickles.tensors import StoredTensor
from holdfast.backends.foreign.torch.zip_reader import CHECKSUM_IN_RECORD, ZipEntry, zip_entries

UNKNOWN = object()
"""Returned for an archive that equals no learned archive."""

_CHECKSUM_BYTES = 4
_KNOWN_MAX, _LAYOUTS_MAX = 4096, 4

_Ranges = tuple[tuple[int, int], ...]
"""Byte ranges from the start of an archive."""


class ArchiveTemplate:
    """Values of archives, by all bytes that decide the value."""

    def __init__(self) -> None:
        """Start without any archive."""
        self._layouts: dict[int, list[_Ranges]] = {}
        self._known: dict[tuple[_Ranges, bytes], tuple[object, int]] = {}

    def value(self, prefetch: TailPrefetch, item: Item) -> object:
        """Return the value of an item's archive if an equal archive was learned, else `UNKNOWN`."""
        for ranges in self._layouts.get(item.stop - item.start, ()):
            known = self._known.get((ranges, _deciding_bytes(prefetch, item, ranges)))
            if known is not None:
                value, start = known
                if isinstance(value, StoredTensor):
                    return replace(value, file=item.file, offset=value.offset - start + item.start)
                return value
        return UNKNOWN

    def learn(self, prefetch: TailPrefetch, item: Item, value: object) -> None:
        """Remember the value of an archive, if its layout is the one of torch.save.

        Args:
            prefetch: Holds both ends of the archive.
            item: The archive.
            value: Its value. Only a single tensor or a plain value is remembered.
        """
        layouts = self._layouts.setdefault(item.stop - item.start, [])
        if len(self._known) >= _KNOWN_MAX or not (isinstance(value, StoredTensor) or _is_plain(value)):
            return
        ranges = _deciding_ranges(prefetch, item, zip_entries(prefetch, item.file, item.start, item.stop).values())
        if ranges not in layouts:
            if not ranges or len(layouts) >= _LAYOUTS_MAX:
                return
            layouts.append(ranges)
        self._known[ranges, _deciding_bytes(prefetch, item, ranges)] = (value, item.start)


def _deciding_bytes(prefetch: TailPrefetch, item: Item, ranges: _Ranges) -> bytes:
    """Return the bytes of ranges of an item. If some are not held, they are too few to equal any learned archive."""
    return b"".join([prefetch.held(item.start + start, item.start + stop) for start, stop in ranges])


def _deciding_ranges(prefetch: TailPrefetch, item: Item, entries: Collection[ZipEntry]) -> _Ranges:
    """Return the ranges of an archive that decide its value: headers, directory without checksums, parsed entries.

    Empty if some of these bytes are not held.
    """
    # Every byte of the directory counts except the checksums: it states names, sizes and places of all entries.
    checksums = sorted(entry.checksum_at - item.start for entry in entries)
    ranges = []
    for entry in sorted(entries, key=lambda entry: entry.header):
        is_parsed = entry.name.endswith(("/data.pkl", "/byteorder"))
        stop = entry.offset + entry.bytes if is_parsed else entry.offset
        ranges.append((entry.header - item.start, stop - item.start))
    directory = checksums[0] - CHECKSUM_IN_RECORD
    for before, stop in pairwise([directory - _CHECKSUM_BYTES, *checksums, item.stop - item.start]):
        ranges.append((before + _CHECKSUM_BYTES, stop))
    if any(not start < stop or not prefetch.held(item.start + start, item.start + stop) for start, stop in ranges):
        return ()
    return tuple(ranges)


def _is_plain(value: object) -> bool:
    """Return whether a value does not depend on the place of its archive."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)
