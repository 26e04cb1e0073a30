"""The fuzz target of the codecs: any bytes as a stored form."""

from __future__ import annotations

import random
from contextlib import suppress

from holdfast._face.wiring import codecs
from holdfast.base.geometry.dtype import DTYPES
from holdfast.errors import CorruptError
from tests.contract.codec_suite import Chunk, CodecSuite, chunk_of

_CASES = [(codec, *types) for codec in codecs().values() for types in CodecSuite.types_of(codec)]

RAW_BYTES = 2048
"""Bytes of the chunk that is decoded, so that a stored form fits into an input."""


def codec(data: bytes) -> None:
    """A stored form: damage is CorruptError, and what is decoded comes back once it is encoded again."""
    if not data:
        return
    coded, dtype, base_dtype = _CASES[data[0] % len(_CASES)]
    coder = coded.coder(dtype, base_dtype)
    base = random.Random(data[0]).randbytes(RAW_BYTES // 2) if base_dtype else None
    with suppress(CorruptError):
        raw = Chunk("fuzzed", dtype, base_dtype, bytes(RAW_BYTES), base).decoded(coder, data[1:])
        chunk = Chunk("fuzzed", dtype, base_dtype, raw, base)
        form = chunk.encoded(coder)
        assert form is None or chunk.decoded(coder, form) == raw


def seeds() -> list[bytes]:
    """Return the stored forms of chunks of every kind, each after the number of its case."""
    found = []
    for number, (coded, dtype, base_dtype) in enumerate(_CASES):
        for kind in ("zeros", "numbers", "few mantissas", "one of a hundred"):
            chunk = chunk_of(kind, dtype, base_dtype, RAW_BYTES, seed=1)
            base = random.Random(number).randbytes(RAW_BYTES // 2) if base_dtype else None
            form = Chunk(kind, dtype, base_dtype, chunk.raw, base).encoded(coded.coder(dtype, base_dtype))
            if form is not None:
                found.append(bytes((number,)) + form)
    assert len(_CASES) < 256 and all(RAW_BYTES % DTYPES[dtype].itemsize == 0 for _, dtype, _ in _CASES)
    return found
