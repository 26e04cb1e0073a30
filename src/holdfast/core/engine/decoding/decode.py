"""Decodes chunks into memory of the calling thread, which is filled again and again and stays in its cache."""

from __future__ import annotations

import threading

from holdfast.base.ports.codec import Codecs
from holdfast.base.types.plan import ChunkRead
from holdfast.core.engine.buffers import allocate_aligned
from holdfast.core.format.coded_chunks import decode_chunk


class Decoder(threading.local):
    """Each thread that decodes has memory of its own: for one chunk, and for one base."""

    def __init__(self, codecs: Codecs) -> None:
        """Allocate nothing yet.

        Args:
            codecs: The codecs by name.
        """
        self._codecs = codecs
        self._chunk = self._base = memoryview(b"")

    def raw(self, chunk: ChunkRead, stored: memoryview, base: memoryview | None, where: str) -> memoryview:
        """Return the raw bytes of a chunk, valid until the thread decodes the next one; no digest is compared.

        Args:
            chunk: The chunk.
            stored: Its stored bytes. They are returned if they are the raw ones.
            base: The raw bytes of its base.
            where: The pack, for messages.
        Raises:
            CorruptError: The bytes are no stored form of the chunk.
            InvalidError: The codec is of a newer version of the format.
        """
        if not chunk.codec:
            return stored
        if len(self._chunk) < chunk.bytes:
            self._chunk = allocate_aligned(chunk.piece.chunk_bytes)
        return self._decoded(chunk, stored, base, self._chunk[: chunk.bytes], where)

    def raw_base(self, chunk: ChunkRead, stored: memoryview, where: str) -> memoryview:
        """Return the raw bytes of a base, valid until the thread decodes the next base. As `raw`."""
        if not chunk.codec:
            return stored
        if len(self._base) < chunk.bytes:
            self._base = allocate_aligned(chunk.piece.chunk_bytes)
        return self._decoded(chunk, stored, None, self._base[: chunk.bytes], where)

    def _decoded(
        self, chunk: ChunkRead, stored: memoryview, base: memoryview | None, raw: memoryview, where: str
    ) -> memoryview:
        decode_chunk(chunk.piece, chunk.number, stored, base, raw, self._codecs, where)
        return raw


def stored_place(chunk: ChunkRead) -> str:
    """Return the stored bytes of a chunk, for messages; of a coded piece also its number and codec."""
    place = f"bytes {chunk.offset}–{chunk.offset + chunk.stored_bytes}"
    if chunk.piece.coding is None:
        return place
    return f"{place}, chunk {chunk.number} {f'coded by {chunk.codec}' if chunk.codec else 'stored raw'},"
