"""Hashes what one rank holds of a tensor, so that it can be told from what others hold of the same."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.format.digest import new_short_digest
from holdfast.geometry.region import Region
from holdfast.ports.framework import Source

REPLICA_WINDOW_BYTES = 1 << 18
"""Bytes copied and hashed at a time: they stay in the processor's cache in between. Whole elements of any type."""


def content_digest(source: Source, pieces: Sequence[Region], itemsize: int, buffer: memoryview) -> bytes:
    """Return 8 bytes that differ when what is held differs, but with a chance of 2⁻⁶⁴.

    Args:
        source: The bytes.
        pieces: What is held, in its order.
        itemsize: Bytes of an element.
        buffer: Scratch memory of `REPLICA_WINDOW_BYTES`.
    """
    state = new_short_digest()
    for piece in pieces:
        piece_bytes = piece.numel * itemsize
        for start in range(0, piece_bytes, REPLICA_WINDOW_BYTES):
            stop = min(start + REPLICA_WINDOW_BYTES, piece_bytes)
            part = buffer[: stop - start]
            source.copy_into(piece, start, stop, part).wait()
            state.update(part)
    return state.digest()
