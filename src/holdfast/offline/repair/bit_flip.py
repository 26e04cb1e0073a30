"""Corrects one flipped bit of a sealed text; the digest in the text proves which bit it was."""

from __future__ import annotations

import re

from holdfast.core.format.digest import digest_of

_TAIL = re.compile(rb',\n "digest": "([0-9a-f]{32})"\n}\n')
_TAIL_BYTES = len(b',\n "digest": "') + 32 + len(b'"\n}\n')
_BODY_BYTES_MAX = 1 << 17
"""The work grows with the square of the size; a text of this size takes about ten seconds."""


def correct_bit_flip(data: bytes) -> bytes | None:
    """Return a sealed text with its one flipped bit corrected; None if it has other damage.

    Every bit is tried: a digest proves the right one and says nothing of where it is.
    """
    if not _TAIL_BYTES < len(data) <= _BODY_BYTES_MAX:
        return None
    body, tail = bytearray(data[:-_TAIL_BYTES]), data[-_TAIL_BYTES:]
    correct_tail = b',\n "digest": "' + digest_of(memoryview(body)).hex().encode() + b'"\n}\n'
    flipped = [(left ^ right).bit_count() for left, right in zip(correct_tail, tail, strict=True)]
    if sum(flipped) == 1:
        return bytes(body) + correct_tail  # The flipped bit is in the digest itself.
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
