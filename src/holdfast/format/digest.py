"""The one digest of the format: xxh3-128, 25 GB/s a core, for damage rather than for adversaries."""

from __future__ import annotations

import xxhash


def digest_of(data: bytes | memoryview) -> bytes:
    """Return the 16-byte xxh3-128 of some bytes."""
    return xxhash.xxh3_128_digest(data)


def new_digest() -> xxhash.xxh3_128:
    """Return an xxh3-128 to be fed part by part."""
    return xxhash.xxh3_128()


def hex_digest_of(*parts: bytes | memoryview) -> str:
    """Return the xxh3-128 of parts one after the other, as 32 hex digits."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def new_short_digest() -> xxhash.xxh3_64:
    """Return an xxh3-64 to be fed part by part."""
    return xxhash.xxh3_64()


def short_digest_of(*parts: bytes) -> bytes:
    """Return 8 bytes that differ when the parts do, but with a chance of 2⁻⁶⁴."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()
