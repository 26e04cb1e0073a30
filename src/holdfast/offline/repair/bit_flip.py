"""A sealed text of which one bit was flipped, put right: the digest that it carries proves which bit it was."""

from __future__ import annotations

import re

from holdfast.format.digest import digest_of

_TAIL = re.compile(rb',\n "digest": "([0-9a-f]{32})"\n}\n')
_TAIL_BYTES = len(b',\n "digest": "') + 32 + len(b'"\n}\n')
_BODY_BYTES_MAX = 1 << 17
"""The work grows with the square; a text of this size takes some ten seconds."""


def correct_bit_flip(data: bytes) -> bytes | None:
    """Return what a sealed text was before one of its bits was flipped; None if that is not what happened to it."""
    if not _TAIL_BYTES < len(data) <= _BODY_BYTES_MAX:
        return None
    body, tail = bytearray(data[:-_TAIL_BYTES]), data[-_TAIL_BYTES:]
    own = b',\n "digest": "' + digest_of(memoryview(body)).hex().encode() + b'"\n}\n'
    flipped = [(left ^ right).bit_count() for left, right in zip(own, tail, strict=True)]
    if sum(flipped) == 1:
        return bytes(body) + own
    stated = _TAIL.fullmatch(tail)
    if stated is None:
        return None
    wanted = bytes.fromhex(stated[1].decode())
    view = memoryview(body)
    for at in range(len(body)):
        for bit in range(8):
            body[at] ^= 1 << bit
            if digest_of(view) == wanted:
                return bytes(body) + tail
            body[at] ^= 1 << bit
    return None
