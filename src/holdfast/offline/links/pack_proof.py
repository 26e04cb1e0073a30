"""Reads the header and the chunks of a pack again, so that the digest in a manifest proves or refutes its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.engine.buffers import allocate_aligned
from holdfast.errors import CorruptError, MissingError
from holdfast.format.digest import digest_of
from holdfast.format.pack import HEADER_BYTES_MAX, StatedPiece, pack_digest, stated_pieces
from holdfast.ports.store import Stored, read_range
from holdfast.settings import MIB, PAGE_BYTES
from holdfast.types.manifest import FileRecord

_CHUNK_BYTES_MAX = 4 * MIB


def is_proven(
    stored: Stored, record: FileRecord, chunk_bytes: int, on_bytes: Callable[[int], None] = lambda count: None
) -> bool:
    """Return whether a stored pack is exactly the one that a manifest records.

    Args:
        stored: Its place.
        record: Its record.
        chunk_bytes: The bytes of its chunks.
        on_bytes: Called with the bytes of each chunk that was read.
    """
    try:
        if stored.files.size(stored.key) != record.bytes:
            return False
        header = header_of(stored, record)
        pieces = stated_pieces(header, record.name, stored.url)
        if pieces and max(piece.stop for piece in pieces) > record.bytes:
            return False
        digests = digests_of(stored, pieces, chunk_bytes, on_bytes)
    except (CorruptError, MissingError):
        return False
    return pack_digest(header, b"".join(digests)) == record.digest


def header_of(stored: Stored, record: FileRecord) -> bytes:
    """Return the header of a pack with its length.

    Raises:
        CorruptError: Its length is impossible.
    """
    length = int.from_bytes(_bytes_of(stored, 0, 8), "little")
    if not 0 < length <= min(HEADER_BYTES_MAX, record.bytes - 8):
        raise CorruptError(f"{stored.url}: a header of {length} bytes; expected at most {HEADER_BYTES_MAX}")
    return _bytes_of(stored, 0, 8 + length)


def _bytes_of(stored: Stored, start: int, stop: int) -> bytes:
    return bytes(read_range(stored.files, stored.key, start, stop, allocate_aligned(stop - start + PAGE_BYTES)))


def digests_of(
    stored: Stored,
    pieces: Sequence[StatedPiece],
    chunk_bytes: int,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> list[bytes]:
    """Return the digests of the chunks of each piece of a pack, hashed again."""
    buffer = allocate_aligned(_CHUNK_BYTES_MAX + PAGE_BYTES)
    digests = []
    for piece in pieces:
        piece_digests = b""
        for start in range(piece.start, piece.stop, chunk_bytes):
            stop = min(start + chunk_bytes, piece.stop)
            data = read_range(stored.files, stored.key, start, stop, buffer)
            piece_digests += digest_of(data)
            on_bytes(len(data))
        digests.append(piece_digests)
    return digests
