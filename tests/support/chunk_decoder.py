"""Reads what a save wrote, chunk by chunk, without the code that loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache

import numpy as np

from holdfast._face.wiring import codecs
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import chunk_count, chunk_range
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.ports.store import Store
from holdfast.base.types.plan import Piece
from holdfast.core.format.coded_chunks import base_number, decode_chunk
from holdfast.core.format.digest import digest_of
from holdfast.stored.repository.catalog import read_index, read_manifest

BytesOf = Callable[[str], bytes]
"""Returns the bytes of a pack, by its name in the index."""


def raw_chunk(piece: Piece, number: int, bytes_of: BytesOf) -> bytes:
    """Return the raw bytes of a chunk, which has its digest."""
    start, stop = piece.stored_range(number)
    first, last = chunk_range(piece.bytes, piece.chunk_bytes, number)
    raw = memoryview(bytearray(last - first))
    stored, base = memoryview(bytes_of(piece.pack))[start:stop], base_number(piece, number)
    pair = piece.coding.pair if piece.coding is not None else None
    base_raw = None
    if base is not None:
        assert pair is not None and pair.region == piece.region, f"{piece.tensor.fqn}: no pair"
        base_raw = memoryview(raw_chunk(pair, base, bytes_of))
    if piece.coding is None:
        raw[:] = stored
    else:
        decode_chunk(piece, number, stored, base_raw, raw, codecs(), piece.pack)
    assert digest_of(raw) == piece.digests[16 * number :][:16], f"{piece.tensor.fqn}, chunk {number}"
    return bytes(raw)


def whole_tensor(pieces: Iterable[Piece], bytes_of: BytesOf) -> bytes:
    """Return the row-major bytes of a tensor, every element of which is in exactly one piece."""
    pieces = list(pieces)
    tensor = pieces[0].tensor
    whole = np.zeros(tensor.global_shape, DTYPES[tensor.dtype].numpy)
    count = np.zeros(tensor.global_shape, np.uint8)
    for piece in pieces:
        chunks = range(chunk_count(piece.bytes, piece.chunk_bytes))
        raw = np.frombuffer(b"".join(raw_chunk(piece, number, bytes_of) for number in chunks), whole.dtype)
        if isinstance(piece.region, Box):
            at = tuple(map(slice, piece.region.start, piece.region.stop))
            whole[at], count[at] = raw.reshape(piece.region.shape), count[at] + 1
        else:
            at = slice(piece.region.start, piece.region.stop)
            whole.reshape(-1)[at], count.reshape(-1)[at] = raw, count.reshape(-1)[at] + 1
    assert (count == 1).all(), tensor.fqn
    return whole.tobytes()


def stored_pieces(store: Store, folder: str = "") -> Mapping[str, list[Piece]]:
    """Return the pieces of the checkpoint in a folder, by FQN."""
    index = read_index(store, folder, read_manifest(store, folder))
    return {fqn: list(index.pieces_of(fqn)) for fqn in index.tensors}


def stored_tensors(store: Store, folder: str = "") -> Mapping[str, bytes]:
    """Return the bytes of each tensor of the checkpoint in a folder."""
    attempt = read_manifest(store, folder).attempt

    @cache
    def bytes_of(pack: str) -> bytes:
        return store.get(pack if pack.startswith("step-") else f"{folder}{attempt}/{pack}", 1 << 30)

    return {fqn: whole_tensor(pieces, bytes_of) for fqn, pieces in stored_pieces(store, folder).items()}
