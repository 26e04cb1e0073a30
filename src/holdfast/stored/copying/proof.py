"""Proves the bytes of a file while they pass, and names the chunks of a pack that are not what was saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from holdfast.base.geometry.chunking import DIGEST_BYTES, chunk_count
from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.packs import Packs, Stored
from holdfast.base.types.manifest import FileRecord
from holdfast.base.types.plan import Piece
from holdfast.core.engine.decoding.chunk_reader import ChunkReader, refutation
from holdfast.core.format.digest import digest_of, new_digest
from holdfast.core.format.index.index import Index
from holdfast.core.format.pack import HEADER_BYTES_MAX, pack_digest
from holdfast.errors import CorruptError, first_three
from holdfast.stored.checkpoint.verify import Damage
from holdfast.stored.copying.pack_proof import PackPieces

_LENGTH_BYTES = 8
_DAMAGES_MAX = 1000
"""Damaged chunks of one pack that are named."""


class Proof(Protocol):
    """Takes all bytes of a file, in order."""

    def take(self, data: memoryview) -> None:
        """Take the next bytes."""
        ...

    def holds(self, digest: str) -> bool:
        """Return whether the bytes so far are those of this digest in a manifest."""
        ...


class ContentProof:
    """Proves a part or an index, by the digest of its content."""

    def __init__(self) -> None:
        """Begin with no bytes."""
        self._state = new_digest()

    def take(self, data: memoryview) -> None:
        """Take the next bytes."""
        self._state.update(data)

    def holds(self, digest: str) -> bool:
        """Return whether the bytes so far are those of a digest."""
        return bool(self._state.hexdigest() == digest)


class NoProof:
    """Of a file of which nobody knows a digest, such as what a repair has set aside."""

    def take(self, data: memoryview) -> None:
        """Take the next bytes."""

    def holds(self, digest: str) -> bool:
        """Return True."""
        return True


class PackProof:
    """Proves a pack, by the digest of its header and of the digests of its chunks."""

    def __init__(self, name: str, chunk_bytes: int, stored: Stored, listing: PackPieces) -> None:
        """Begin with no bytes.

        Args:
            name: Name of the pack, which tells what its header states.
            chunk_bytes: Bytes of a chunk, where the header does not state it.
            stored: Where its bytes come from. Chunks that others are coded against are read there once more.
            listing: Lists its pieces, and finds what they are coded against.
        """
        self._name, self._chunk_bytes, self._stored, self._listing = name, chunk_bytes, stored, listing
        self._header = bytearray()
        self._header_bytes = 0
        self._chunks: Iterator[tuple[Piece, int]] = iter(())
        self._chunk: tuple[Piece, int] | None = None
        self._end = self._at = 0
        self._state = new_digest()
        self._coded = bytearray()
        """Stored bytes so far of a chunk of a coded piece."""
        self._reader: ChunkReader | None = None
        self._digests = bytearray()
        self._is_refuted = False

    def take(self, data: memoryview) -> None:
        """Take the next bytes."""
        data = self._after_header(data)
        while len(data) and not self._is_refuted:
            if self._chunk is None:
                self._is_refuted = True  # Bytes that belong to no piece.
                return
            part = data[: self._end - self._at]
            if self._chunk[0].coding is None:
                self._state.update(part)
            else:
                self._coded += part
            self._at += len(part)
            data = data[len(part) :]
            if self._at == self._end:
                self._end_chunk(*self._chunk)

    def holds(self, digest: str) -> bool:
        """Return whether the bytes so far are those of a digest."""
        is_whole = bool(self._header) and len(self._header) == self._header_bytes and self._chunk is None
        return is_whole and not self._is_refuted and pack_digest(bytes(self._header), bytes(self._digests)) == digest

    def _after_header(self, data: memoryview) -> memoryview:
        """Take bytes of the header; return those behind it."""
        for wanted in (_LENGTH_BYTES, None):
            missing = (wanted or self._header_bytes) - len(self._header)
            if missing > 0:
                self._header += data[:missing]
                data = data[missing:]
                if len(self._header) == _LENGTH_BYTES:
                    self._header_bytes = _LENGTH_BYTES + int.from_bytes(self._header, "little")
                    self._is_refuted = self._header_bytes > HEADER_BYTES_MAX + _LENGTH_BYTES
                elif wanted is None and len(self._header) == self._header_bytes:
                    self._begin_chunks()
            if self._is_refuted:
                break
        return data

    def _begin_chunks(self) -> None:
        """Find the chunks in the header. Pieces follow one another without a gap."""
        try:
            pieces = self._listing.of(bytes(self._header), self._name, self._stored.url, self._chunk_bytes)
        except CorruptError:
            self._is_refuted = True
            return
        at = self._header_bytes
        for piece in pieces:
            self._is_refuted |= piece.offset != at
            at = piece.offset + piece.stored_bytes
        self._chunks = (
            (piece, number) for piece in pieces for number in range(chunk_count(piece.bytes, piece.chunk_bytes))
        )
        self._at = self._header_bytes
        self._next_chunk()

    def _end_chunk(self, piece: Piece, number: int) -> None:
        """Add the digest of a chunk that has been taken whole."""
        if piece.coding is None:
            self._digests += self._state.digest()
        else:
            if self._reader is None:
                self._reader = ChunkReader(self._listing.packs, self._listing.codecs, piece.chunk_bytes)
            try:
                self._digests += digest_of(self._reader.decoded(piece, number, memoryview(self._coded), self._stored))
            except CorruptError:
                self._is_refuted = True
        self._next_chunk()

    def _next_chunk(self) -> None:
        self._chunk = next(self._chunks, None)
        self._state, self._coded = new_digest(), bytearray()
        if self._chunk is not None:
            self._end = self._chunk[0].stored_range(self._chunk[1])[1]


def damages_of_pack(stored: Stored, record: FileRecord, index: Index, packs: Packs, codecs: Codecs) -> list[Damage]:
    """Return the chunks of a pack that are not what was saved, by reading it again; none if all are.

    Args:
        stored: The pack.
        record: Its record in the manifest.
        index: The index of a checkpoint that names it so.
        packs: Locates the packs of that checkpoint.
        codecs: What decodes coded chunks.
    """
    file = f"{stored.files.url}/{stored.key}"
    found: list[Damage] = []
    chunks = ChunkReader(packs, codecs, index.chunk_bytes)
    for piece in index.pieces_in(record.name):
        for number in range(len(piece.digests) // DIGEST_BYTES):
            start, stop = piece.stored_range(number)
            message = refutation(chunks, piece, number, stored)
            if message and len(found) < _DAMAGES_MAX:
                found.append(Damage(file, start, stop, piece.tensor.fqn, message))
    return found


def shown_damages(damages: Sequence[Damage]) -> str:
    """Return the first damaged places for a message, and how many more there are."""
    return first_three(map(_shown, damages))


def _shown(damage: Damage) -> str:
    place = "" if damage.start is None else f" bytes [{damage.start}, {damage.stop})"
    tensor = "" if damage.fqn is None else f" of {damage.fqn}"
    return f"{damage.file}{place}{tensor}: {damage.message}"
