"""The directory of a zip archive in a file or a part of one: where each entry's bytes lie, none of them read."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.errors import CorruptError, InvalidError
from holdfast.foreign.read import read_bytes, read_ranges
from holdfast.geometry.value_class import value_class
from holdfast.ports.store import Readable
from holdfast.settings import KIB, MIB, PAGE_BYTES

DIRECTORY_BYTES_MAX = 64 * MIB
"""Of the directory of one archive: some 600,000 entries."""

_END = struct.Struct("<4s4H2LH")
_END64_AT = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_RECORD = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_COMMENT_BYTES_MAX = (1 << 16) - 1
_STORED = 0
_ENCRYPTED = 1
_ZIP64 = 1
_IN_ZIP64 = (1 << 32) - 1
_GAP_BYTES_MAX = PAGE_BYTES
"""Between two headers that are read as one range: storage gives no less than a page anyhow."""
_SPAN_BYTES_MAX = 64 * KIB
_SPANS_AT_ONCE = 256
"""Ranges of one call, and so of a few mebibytes of memory."""


@value_class
class ZipEntry:
    """One entry, stored as it is."""

    name: str
    """Its name in the archive."""

    offset: int
    """Byte of the file where its content starts."""

    bytes: int
    """Its size."""


@dataclass(frozen=True, slots=True)
class _Record:
    """What the directory says of an entry."""

    name: bytes
    local: int
    bytes: int


def zip_entries(files: Readable, key: str, start: int, stop: int) -> Mapping[str, ZipEntry]:
    """Return the entries of the archive that fills bytes `[start, stop)` of a file, by name.

    Reads the directory and the header before each entry, no entry.

    Raises:
        CorruptError: It is cut short or damaged, or entries overlap or lie outside.
        InvalidError: An entry is compressed or encrypted.
    """
    where = f"{files.url}/{key}"
    at, size, count = _directory(files, key, start, stop, where)
    records = sorted(_records(read_bytes(files, key, at, at + size, DIRECTORY_BYTES_MAX), count, where), key=_place)
    if not records:
        raise CorruptError(f"{where}: a zip archive without entries. Read another copy")
    entries: dict[str, ZipEntry] = {}
    bounds = [start + record.local for record in records[1:]] + [at]
    headers = _headers(files, key, [start + record.local for record in records], at, where)
    for record, bound, (begun, header) in zip(records, bounds, headers, strict=True):
        name = record.name.decode("utf-8", "backslashreplace")
        offset = begun + _header_bytes(header, record, f"{where}, entry {name[:200]!r}")
        if offset + record.bytes > bound:
            raise CorruptError(
                f"{where}, entry {name[:200]!r}: bytes {offset}–{offset + record.bytes} reach beyond {bound}, where "
                "the next one begins or the directory does; expected entries apart. Read another copy"
            )
        if name in entries:
            raise CorruptError(f"{where}: two entries {name[:200]!r}; expected each name once. Read another copy")
        entries[name] = ZipEntry(name, offset, record.bytes)
    return entries


def _place(record: _Record) -> int:
    return record.local


def _directory(files: Readable, key: str, start: int, stop: int, where: str) -> tuple[int, int, int]:
    """Return where the directory lies in the file, its bytes and its entries."""
    first = max(start, stop - _END.size - _COMMENT_BYTES_MAX)
    tail = read_bytes(files, key, first, stop, _END.size + _COMMENT_BYTES_MAX)
    found = tail.rfind(b"PK\5\6")
    while found >= 0 and len(tail) - found < _END.size:
        found = tail.rfind(b"PK\5\6", 0, found)
    if found < 0:
        raise CorruptError(f"{where}, bytes {start}–{stop}: no zip archive ends there. Was it cut short?")
    _, disk, disk_of, _, count, size, at, _ = _END.unpack_from(tail, found)
    end = first + found
    stated = (count, size, at)
    has_locator = tail[max(found - _END64_AT.size, 0) : found].startswith(b"PK\6\7")
    if has_locator or (1 << 16) - 1 in (disk, disk_of, count) or _IN_ZIP64 in (size, at):
        # Where a locator stands, torch goes by it, whatever the older record says.
        *wide, end = _directory64(files, key, start, end, where)
        if any(old not in (new, (1 << 16) - 1, _IN_ZIP64) for old, new in zip(stated, wide, strict=True)):
            raise CorruptError(
                f"{where}, byte {first + found}: the archive states two directories, of {stated} and of {wide} "
                "entries, bytes and place; expected one. Read another copy"
            )
        count, size, at = wide
    elif disk or disk_of:
        raise InvalidError(f"{where}: a zip archive of several files; expected one")
    if size > DIRECTORY_BYTES_MAX or start + at + size > end or count * _RECORD.size > size:
        raise CorruptError(
            f"{where}: a zip directory of {count} entries in {size} bytes from {start + at} on; expected it before "
            f"byte {end}. Read another copy"
        )
    return start + at, size, count


def _directory64(files: Readable, key: str, start: int, end: int, where: str) -> tuple[int, int, int, int]:
    if end - _END64_AT.size < start:
        raise CorruptError(f"{where}: a zip64 archive without its locator. Read another copy")
    signature, _, at, _ = _END64_AT.unpack(read_bytes(files, key, end - _END64_AT.size, end, _END64_AT.size))
    end64 = start + at
    if signature != b"PK\6\7" or end64 + _END64.size > end - _END64_AT.size:
        raise CorruptError(f"{where}, byte {end - _END64_AT.size}: no zip64 locator. Read another copy")
    fields = _END64.unpack(read_bytes(files, key, end64, end64 + _END64.size, _END64.size))
    if fields[0] != b"PK\6\6":
        raise CorruptError(f"{where}, byte {end64}: no end of a zip64 directory. Read another copy")
    _, count, size, directory = fields[-4:]
    return count, size, directory, end64


def _records(directory: bytes, count: int, where: str) -> Iterator[_Record]:
    at = 0
    for number in range(count):
        if at + _RECORD.size > len(directory):
            raise CorruptError(f"{where}: the zip directory ends at entry {number} of {count}. Read another copy")
        fields = _RECORD.unpack_from(directory, at)
        signature, _, _, flags, method = fields[:5]
        stored, size, name_bytes, extra_bytes, comment_bytes = fields[8:13]
        local = fields[16]
        begun = at + _RECORD.size
        at = begun + name_bytes + extra_bytes + comment_bytes
        if signature != b"PK\1\2" or at > len(directory):
            raise CorruptError(f"{where}: entry {number} of the zip directory is damaged. Read another copy")
        name = directory[begun : begun + name_bytes]
        extra = directory[begun + name_bytes : begun + name_bytes + extra_bytes]
        size, stored, local = _widened(extra, (size, stored, local), f"{where}, entry {name[:200]!r}")
        if b"/code/" in name and (method != _STORED or flags & _ENCRYPTED):
            raise InvalidError(f"{where}: a TorchScript archive; expected a state saved with torch.save")
        if method != _STORED or flags & _ENCRYPTED:
            raise InvalidError(
                f"{where}, entry {name[:200]!r}: compressed or encrypted; expected it stored, as torch.save does: "
                "tensors are read in place. Pack it anew without compression"
            )
        if stored != size:
            raise CorruptError(f"{where}, entry {name[:200]!r}: {size} bytes stored in {stored}. Read another copy")
        yield _Record(name, local, size)


def _widened(extra: bytes, fields: tuple[int, int, int], where: str) -> Iterator[int]:
    """Yield size, stored size and place, each from the zip64 field where it does not fit the record."""
    wide = b""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == _ZIP64:
            wide = extra[at + 4 : at + 4 + length]
            break
        at += 4 + length
    used = 0
    for field in fields:
        if field != _IN_ZIP64:
            yield field
            continue
        if used + 8 > len(wide):
            raise CorruptError(f"{where}: its size or place is in a zip64 field that is not there. Read another copy")
        yield int.from_bytes(wide[used : used + 8], "little")
        used += 8


def _headers(files: Readable, key: str, places: Sequence[int], stop: int, where: str) -> Iterator[tuple[int, bytes]]:
    """Yield each place with the header there.

    Args:
        files, key: The file.
        places: Where the entries begin, ascending.
        stop: Where they end.
        where: For messages.
    """
    spans: list[list[int]] = []
    last = -_LOCAL.size
    for place in places:
        if place < last + _LOCAL.size or place + _LOCAL.size > stop:
            raise CorruptError(
                f"{where}: an entry begins at byte {place}, within another or behind byte {stop}, where they end. "
                "Read another copy"
            )
        if spans and place - last <= _GAP_BYTES_MAX and place - spans[-1][0] <= _SPAN_BYTES_MAX:
            spans[-1].append(place)
        else:
            spans.append([place])
        last = place
    for first in range(0, len(spans), _SPANS_AT_ONCE):
        several = spans[first : first + _SPANS_AT_ONCE]
        ranges = [(span[0], span[-1] + _LOCAL.size) for span in several]
        for span, data in zip(several, read_ranges(files, key, ranges), strict=True):
            yield from ((place, data[place - span[0] : place - span[0] + _LOCAL.size]) for place in span)


def _header_bytes(header: bytes, record: _Record, where: str) -> int:
    """Return how far behind the start of its header an entry's content lies."""
    fields = _LOCAL.unpack(header)
    signature, _, flags, method = fields[:4]
    name_bytes, extra_bytes = fields[-2:]
    if signature != b"PK\3\4" or method != _STORED or flags & _ENCRYPTED or name_bytes != len(record.name):
        raise CorruptError(f"{where}: the header before it is not what the directory says. Read another copy")
    return _LOCAL.size + int(name_bytes) + int(extra_bytes)
