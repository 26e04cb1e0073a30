"""Reads the directory of a zip archive that fills a file or a part of one; no entry is read.

Thousands of small archives of a DCP checkpoint are read in batched ranges, and an archive with two contradicting
directories is refused. `zipfile` does neither.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

from holdfast.backends.foreign.read import read_bytes, read_ranges
from holdfast.base.geometry.value_class import value_class
from holdfast.base.ports.readable import Readable
from holdfast.errors import CorruptError, InvalidError
from holdfast.settings import KIB, MIB, PAGE_BYTES

DIRECTORY_BYTES_MAX = 64 * MIB
"""Largest directory of one archive: about 600,000 entries."""

END = struct.Struct("<4s4H2LH")
"""End of the directory."""

LOCATOR64 = struct.Struct("<4sLQL")
"""The locator of the zip64 end of the directory."""

END64 = struct.Struct("<4sQ2H2L4Q")
"""The zip64 end of the directory."""

RECORD = struct.Struct("<4s6H3L5H2L")
"""The record of an entry in the directory."""

LOCAL = struct.Struct("<4s5H3L2H")
"""The header before the content of an entry."""

CHECKSUM_IN_RECORD = 16
"""Byte of a record at which the CRC-32 of the content is stored."""

_TAIL_BYTES = 2 * KIB
"""Bytes read of the end first: torch writes no comment, and a few bytes of a small archive are in memory already."""

_COMMENT_BYTES_MAX = (1 << 16) - 1
_STORED = 0
_ENCRYPTED = 1
_ZIP64 = 1
_IN_ZIP64 = (1 << 32) - 1
_GAP_BYTES_MAX = PAGE_BYTES
"""Largest gap between two headers of one range: storage reads at least a page anyhow."""

_SPAN_BYTES_MAX = 64 * KIB
_SPANS_AT_ONCE = 256
"""Ranges of one read, which bounds its memory to a few MiB."""


@value_class
class ZipEntry:
    """One uncompressed entry."""

    name: str
    """Name in the archive."""

    offset: int
    """First byte of the content, in the file."""

    bytes: int
    """Size of the content."""

    header: int
    """First byte of the local header, in the file."""

    checksum_at: int
    """Byte of the file at which the directory stores the CRC-32 of the content."""

    checksum: int
    """That CRC-32; 0 if the writer computed none."""


_Record = tuple[int, int, bytes, int, int]
"""An entry as the directory states it: offsets of its local header in the archive and of its record in the directory,
name, size and CRC-32 of the content."""


def zip_entries(files: Readable, key: str, start: int, stop: int) -> Mapping[str, ZipEntry]:
    """Return the entries of the archive that fills bytes `[start, stop)` of a file, by name.

    Reads the directory and the header before each entry, but no content.

    Raises:
        CorruptError: The archive is cut short or damaged, or entries overlap or reach out of it.
        InvalidError: An entry is compressed or encrypted.
    """
    where = f"{files.url}/{key}"
    directory, size, count = _directory(files, key, start, stop, where)
    data = read_bytes(files, key, directory, directory + size, DIRECTORY_BYTES_MAX)
    records = sorted(_records(data, count, where))
    if not records:
        raise CorruptError(f"{where}: a zip archive without entries. Read another copy")
    entries: dict[str, ZipEntry] = {}
    places = [start + header_at for header_at, *_ in records]
    headers = _headers(files, key, places, directory, where)
    for (_, record_at, name_bytes, size, checksum), place, bound, header in zip(
        records, places, [*places[1:], directory], headers, strict=True
    ):
        name = name_bytes.decode("utf-8", "backslashreplace")
        entry = f"{where}, entry {name[:200]!r}"
        signature, _, flags, method, *_, header_name_bytes, extra_bytes = LOCAL.unpack(header)
        if signature != b"PK\3\4" or method != _STORED or flags & _ENCRYPTED or header_name_bytes != len(name_bytes):
            raise CorruptError(f"{entry}: its header contradicts the directory. Read another copy")
        offset = place + LOCAL.size + len(name_bytes) + extra_bytes
        # Overlapping entries would let a small file state any number of tensors.
        if offset + size > bound:
            raise CorruptError(
                f"{entry}: bytes {offset}–{offset + size} reach beyond byte {bound}, "
                "where the next entry or the directory begins; expected separate entries. Read another copy"
            )
        if name in entries:
            raise CorruptError(f"{where}: two entries {name[:200]!r}; expected each name once. Read another copy")
        entries[name] = ZipEntry(name, offset, size, place, directory + record_at + CHECKSUM_IN_RECORD, checksum)
    return entries


def _directory(files: Readable, key: str, start: int, stop: int, where: str) -> tuple[int, int, int]:
    """Return the first byte of the directory in the file, its size in bytes and its number of entries."""
    first, tail, end_at = stop, b"", -1
    for tail_bytes in (_TAIL_BYTES, END.size + _COMMENT_BYTES_MAX):
        # The last record is the same in a longer tail. The locator before it must be in the tail too.
        if end_at < LOCATOR64.size and first > start:
            first = max(start, stop - tail_bytes)
            tail = read_bytes(files, key, first, stop, tail_bytes)
            end_at = _last_record(tail)
    if end_at < 0:
        raise CorruptError(f"{where}, bytes {start}–{stop}: no zip archive ends there. Was it cut short?")
    _, disk, disk_of, _, count, size, at, _ = END.unpack_from(tail, end_at)
    end = first + end_at
    stated = (count, size, at)
    has_locator = tail[max(end_at - LOCATOR64.size, 0) : end_at].startswith(b"PK\6\7")
    if has_locator or (1 << 16) - 1 in (disk, disk_of, count) or _IN_ZIP64 in (size, at):
        # torch follows a locator whatever the older record states. Two records that contradict each other would let
        # torch and Holdfast read different archives, so refuse them.
        *wide, end = _directory64(files, key, start, end, where)
        if any(old not in (new, (1 << 16) - 1, _IN_ZIP64) for old, new in zip(stated, wide, strict=True)):
            raise CorruptError(
                f"{where}, byte {first + end_at}: the archive states two directories, {stated} and {wide} (entries, "
                "bytes, offset); expected one. Read another copy"
            )
        count, size, at = wide
    elif disk or disk_of:
        raise InvalidError(f"{where}: a zip archive in several files; expected one file. Join the files")
    if size > DIRECTORY_BYTES_MAX or start + at + size > end or count * RECORD.size > size:
        raise CorruptError(
            f"{where}: a zip directory of {count} entries in {size} bytes from byte {start + at}; expected it before "
            f"byte {end}. Read another copy"
        )
    return start + at, size, count


def _last_record(tail: bytes) -> int:
    """Return where the last end of a directory begins in the end of a file; -1 if there is none."""
    # The record may be followed by a comment, which may contain the signature too: search from the end.
    end_at = tail.rfind(b"PK\5\6")
    while end_at >= 0 and len(tail) - end_at < END.size:
        end_at = tail.rfind(b"PK\5\6", 0, end_at)
    return end_at


def _directory64(files: Readable, key: str, start: int, end: int, where: str) -> tuple[int, int, int, int]:
    """Return entries, bytes and offset of the directory from the zip64 record, and the first byte of that record."""
    if end - LOCATOR64.size < start:
        raise CorruptError(f"{where}: a zip64 archive without its locator. Read another copy")
    signature, _, at, _ = LOCATOR64.unpack(read_bytes(files, key, end - LOCATOR64.size, end, LOCATOR64.size))
    end64 = start + at
    if signature != b"PK\6\7" or end64 + END64.size > end - LOCATOR64.size:
        raise CorruptError(f"{where}, byte {end - LOCATOR64.size}: no zip64 locator. Read another copy")
    fields = END64.unpack(read_bytes(files, key, end64, end64 + END64.size, END64.size))
    if fields[0] != b"PK\6\6":
        raise CorruptError(f"{where}, byte {end64}: no end of a zip64 directory. Read another copy")
    _, count, size, directory = fields[-4:]
    return count, size, directory, end64


def _records(directory: bytes, count: int, where: str) -> Iterator[_Record]:
    at = 0
    for number in range(count):
        if at + RECORD.size > len(directory):
            raise CorruptError(f"{where}: the zip directory ends at entry {number} of {count}. Read another copy")
        fields = RECORD.unpack_from(directory, at)
        signature, _, _, flags, method = fields[:5]
        checksum, stored, size, name_bytes, extra_bytes, comment_bytes = fields[7:13]
        header, record_at = fields[16], at
        name_at = at + RECORD.size
        at = name_at + name_bytes + extra_bytes + comment_bytes
        if signature != b"PK\1\2" or at > len(directory):
            raise CorruptError(f"{where}: entry {number} of the zip directory is damaged. Read another copy")
        name = directory[name_at : name_at + name_bytes]
        extra = directory[name_at + name_bytes : name_at + name_bytes + extra_bytes]
        size, stored, header = _widened(extra, (size, stored, header), f"{where}, entry {name[:200]!r}")
        if b"/code/" in name and (method != _STORED or flags & _ENCRYPTED):
            raise InvalidError(f"{where}: a TorchScript archive; expected a state saved with torch.save")
        if method != _STORED or flags & _ENCRYPTED:
            raise InvalidError(
                f"{where}, entry {name[:200]!r}: compressed or encrypted; expected it stored, because tensors "
                "are read in place. Write the archive again without compression"
            )
        if stored != size:
            raise CorruptError(f"{where}, entry {name[:200]!r}: {size} bytes stored in {stored}. Read another copy")
        yield header, record_at, name, size, checksum


def _widened(extra: bytes, fields: tuple[int, int, int], where: str) -> Iterator[int]:
    """Yield size, stored size and header offset, each from the zip64 field if it does not fit the record."""
    wide = b""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == _ZIP64:
            wide = extra[at + 4 : at + 4 + length]
            break
        at += 4 + length
    for field in fields:
        if field != _IN_ZIP64:
            yield field
        elif len(wide) < 8:
            raise CorruptError(f"{where}: its size or offset needs a zip64 field, and there is none. Read another copy")
        else:
            yield int.from_bytes(wide[:8], "little")
            wide = wide[8:]


def _headers(files: Readable, key: str, places: Sequence[int], stop: int, where: str) -> Iterator[bytes]:
    """Yield the local header at each place. Headers close to each other are read as one range.

    Args:
        files, key: The file.
        places: First byte of each header, ascending.
        stop: Byte past the last entry.
        where: For messages.
    """
    spans: list[list[int]] = []
    last = -LOCAL.size
    for place in places:
        if place < last + LOCAL.size or place + LOCAL.size > stop:
            raise CorruptError(
                f"{where}: an entry begins at byte {place}, inside another entry or beyond byte {stop}, the end of all "
                "entries. Read another copy"
            )
        if spans and place - last <= _GAP_BYTES_MAX and place - spans[-1][0] <= _SPAN_BYTES_MAX:
            spans[-1].append(place)
        else:
            spans.append([place])
        last = place
    for first in range(0, len(spans), _SPANS_AT_ONCE):
        batch = spans[first : first + _SPANS_AT_ONCE]
        ranges = [(span[0], span[-1] + LOCAL.size) for span in batch]
        for span, data in zip(batch, read_ranges(files, key, ranges), strict=True):
            yield from (data[place - span[0] : place - span[0] + LOCAL.size] for place in span)
