"""Archives that are alike but for the elements in them, so that of thousands only a few need be taken apart.

What torch.save writes of two tensors of one shape differs in their elements, in check sums and in an id made of those.
Where all else is the same byte for byte, what is read out of the one stands at the same place in the other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from holdfast.foreign.dcp.metadata import Item
from holdfast.foreign.dcp.prefetch import TailPrefetch
from holdfast.foreign.pickles.tensors import StoredTensor
from holdfast.foreign.torch.zip_reader import ZipEntry, zip_entries

UNKNOWN = object()
"""Said of an archive that is like none before it."""

_END = struct.Struct("<4s4H2LH")
_RECORD_BYTES, _SUM_AT, _LENGTHS_AT, _LOCAL_AT = 46, 16, 28, 42
_KNOWN_MAX, _LAYOUTS_MAX = 4096, 4

_Ranges = tuple[tuple[int, int], ...]


class ArchiveTemplate:
    """Values of archives by every byte of them that is looked at."""

    def __init__(self) -> None:
        """Know none."""
        self._layouts: dict[int, list[_Ranges]] = {}
        self._known: dict[tuple[_Ranges, bytes], tuple[object, int]] = {}

    def value(self, windows: TailPrefetch, item: Item) -> object:
        """Return what an item's archive holds if one like it was learned, `UNKNOWN` if not."""
        for ranges in self._layouts.get(item.stop - item.start, ()):
            found = self._known.get((ranges, _frame(windows, item, ranges)))
            if found is not None:
                value, start = found
                if isinstance(value, StoredTensor):
                    return replace(value, file=item.file, offset=value.offset - start + item.start)
                return value
        return UNKNOWN

    def learn(self, windows: TailPrefetch, item: Item, value: object) -> None:
        """Remember what an archive holds; nothing of one that is not as torch.save writes it.

        Args:
            windows: Holds its ends.
            item: Where it lies.
            value: What it holds; only a tensor by itself or a plain value is remembered.
        """
        layouts = self._layouts.setdefault(item.stop - item.start, [])
        if len(self._known) >= _KNOWN_MAX or not (isinstance(value, StoredTensor) or _is_plain(value)):
            return
        ranges = _looked_at(windows, item, zip_entries(windows, item.file, item.start, item.stop).values())
        if ranges not in layouts:
            if not ranges or len(layouts) >= _LAYOUTS_MAX:
                return
            layouts.append(ranges)
        self._known[ranges, _frame(windows, item, ranges)] = (value, item.start)


def _frame(windows: TailPrefetch, item: Item, ranges: _Ranges) -> bytes:
    """Return the bytes of ranges of an item; fewer than those of any that was learned where some are not held."""
    return b"".join([windows.held(item.start + start, item.start + stop) for start, stop in ranges])


def _looked_at(windows: TailPrefetch, item: Item, entries: Iterable[ZipEntry]) -> _Ranges:
    """Return the ranges of an archive that decide what is read out of it; none where they are not held.

    They are all of the directory but check sums, each header, and those contents that are read.
    """
    length = item.stop - item.start
    end = windows.held(item.stop - _END.size, item.stop)
    if len(end) < _END.size:
        return ()
    signature, _, _, _, _, _, directory, comment_bytes = _END.unpack(end)
    records = windows.held(item.start + directory, item.stop) if directory < length else b""
    if signature != b"PK\5\6" or comment_bytes or not records:
        return ()
    contents = sorted((entry.offset - item.start, entry) for entry in entries)
    places, sums, at = [], [], 0
    for _ in contents:
        if at + _RECORD_BYTES > len(records):
            return ()
        places.append(int.from_bytes(records[at + _LOCAL_AT : at + _LOCAL_AT + 4], "little"))
        sums.append(directory + at + _SUM_AT)
        at += _RECORD_BYTES + sum(struct.unpack_from("<3H", records, at + _LENGTHS_AT))
    ranges = []
    for place, (offset, entry) in zip(sorted(places), contents, strict=True):
        is_read = entry.name.endswith(("/data.pkl", "/byteorder"))
        ranges.append((place, offset + entry.bytes if is_read else offset))
    for begun, stop in pairwise([directory - 4, *sums, length]):
        ranges.append((begun + 4, stop))
    if any(not start < stop or not windows.held(item.start + start, item.start + stop) for start, stop in ranges):
        return ()
    return tuple(ranges)


def _is_plain(value: object) -> bool:
    """Return whether a value says nothing of where it lies."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)
