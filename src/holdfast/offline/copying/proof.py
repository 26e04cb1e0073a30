"""Proves the bytes of a file while they pass, and names the chunks of a pack that are not what was saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from holdfast.checkpoint.verify import Damage
from holdfast.engine.buffers import allocate_aligned
from holdfast.errors import CheckpointError, CorruptError
from holdfast.format.digest import digest_of, new_digest
from holdfast.format.index.index import Index
from holdfast.format.pack import HEADER_BYTES_MAX, pack_digest, stated_pieces
from holdfast.geometry.chunking import DIGEST_BYTES
from holdfast.ports.store import Stored, read_range
from holdfast.settings import PAGE_BYTES
from holdfast.types.manifest import FileRecord

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

    def __init__(self, name: str, chunk_bytes: int, where: str) -> None:
        """Begin with no bytes.

        Args:
            name: Name of the pack, which tells what its header states.
            chunk_bytes: Bytes of a chunk.
            where: The pack, for messages.
        """
        self._name, self._chunk_bytes, self._where = name, chunk_bytes, where
        self._header = bytearray()
        self._header_bytes = 0
        self._ends: Iterator[int] = iter(())
        self._end = self._at = 0
        self._state = new_digest()
        self._digests = bytearray()
        self._is_refuted = False

    def take(self, data: memoryview) -> None:
        """Take the next bytes."""
        data = self._after_header(data)
        while len(data) and not self._is_refuted:
            if self._end < 0:
                self._is_refuted = True  # Bytes that belong to no piece.
                return
            part = data[: self._end - self._at]
            self._state.update(part)
            self._at += len(part)
            data = data[len(part) :]
            if self._at == self._end:
                self._digests += self._state.digest()
                self._next_chunk()

    def holds(self, digest: str) -> bool:
        """Return whether the bytes so far are those of a digest."""
        is_whole = bool(self._header) and len(self._header) == self._header_bytes and self._end < 0
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
            pieces = stated_pieces(bytes(self._header), self._name, self._where)
        except CorruptError:
            self._is_refuted = True
            return
        at = self._header_bytes
        for piece in pieces:
            self._is_refuted |= piece.start != at
            at = piece.stop
        self._ends = (
            min(start + self._chunk_bytes, piece.stop)
            for piece in pieces
            for start in range(piece.start, piece.stop, self._chunk_bytes)
        )
        self._at = self._header_bytes
        self._next_chunk()

    def _next_chunk(self) -> None:
        self._end = next(self._ends, -1)
        self._state = new_digest()


def damages_of_pack(stored: Stored, record: FileRecord, index: Index) -> list[Damage]:
    """Return the chunks of a pack that are not what was saved, by reading it again; none if all are.

    Args:
        stored: The pack.
        record: Its record in the manifest.
        index: The index of a checkpoint that names it so.
    """
    file = f"{stored.files.url}/{stored.key}"
    found: list[Damage] = []
    buffer = allocate_aligned(index.chunk_bytes + PAGE_BYTES)
    for piece in index.pieces_in(record.name):
        for number in range(len(piece.digests) // DIGEST_BYTES):
            start = piece.offset + number * piece.chunk_bytes
            stop = min(start + piece.chunk_bytes, piece.offset + piece.bytes)
            expected = piece.digests[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)]
            try:
                digest = digest_of(read_range(stored.files, stored.key, start, stop, buffer))
                message = f"chunk hashes to {digest.hex()}; expected {expected.hex()}" if digest != expected else ""
            except CheckpointError as error:
                message = str(error)
            if message and len(found) < _DAMAGES_MAX:
                found.append(Damage(file, start, stop, piece.tensor.fqn, message))
    return found
