"""How a piece is cut into chunks."""

from __future__ import annotations

DIGEST_BYTES = 16
"""Bytes of one xxh3-128."""

TINY_BYTES_MAX = 4096
"""Pieces of so few bytes are copied together, out of a state and into one: a call for each would cost more than it."""


def chunk_count(piece_bytes: int, chunk_bytes: int) -> int:
    """Return into how many chunks a piece is cut; an empty piece has none."""
    return -(-piece_bytes // chunk_bytes)


def chunk_range(piece_bytes: int, chunk_bytes: int, number: int) -> tuple[int, int]:
    """Return the half-open byte range of a chunk within its piece."""
    return number * chunk_bytes, min((number + 1) * chunk_bytes, piece_bytes)


def pair_range(chunk_bytes: int, number: int, length: int, ratio: int) -> tuple[int, int, int]:
    """Return which elements of a pair a chunk is coded against.

    Args:
        chunk_bytes: Raw bytes of every chunk but the last, of both pieces.
        number: Number of the chunk.
        length: Its raw bytes.
        ratio: How many bytes of the chunk there are for one of the pair.
    Returns:
        The number of the pair's chunk, and the half-open byte range in its raw bytes.
    """
    start = number % ratio * (chunk_bytes // ratio)
    return number // ratio, start, start + length // ratio
