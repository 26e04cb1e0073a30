"""Reads the header and the chunks of a pack again, so that the digest in a manifest proves or refutes its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.base.geometry.chunking import chunk_count
from holdfast.base.geometry.region import Region
from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.packs import Packs, Stored
from holdfast.base.ports.ranges import read_range
from holdfast.base.types.manifest import FileRecord, Manifest
from holdfast.base.types.plan import Piece
from holdfast.core.engine.buffers import allocate_aligned
from holdfast.core.engine.decoding.chunk_reader import ChunkReader
from holdfast.core.format.digest import digest_of
from holdfast.core.format.names import is_pack_name, rank_of_pack, step_of_pack
from holdfast.core.format.pack import HEADER_BYTES_MAX, pack_digest, stated_pieces
from holdfast.errors import CorruptError, InvalidError, MissingError
from holdfast.settings import PAGE_BYTES


class PackPieces:
    """Lists the pieces of packs by their headers, and finds the pairs that chunks are coded against."""

    def __init__(self, manifest: Manifest, packs: Packs, codecs: Codecs) -> None:
        """Read nothing yet.

        Args:
            manifest: A manifest that names the packs; the others that it names may hold their pairs.
            packs: Locates its packs by name.
            codecs: What decodes coded chunks.
        """
        self._manifest, self.packs, self.codecs = manifest, packs, codecs
        self._listed: dict[str, Sequence[Piece]] = {}

    def of(self, header: bytes, name: str, where: str, chunk_bytes: int) -> list[Piece]:
        """Return the pieces that a header states, by offset, without digests.

        Args:
            header: All bytes before the data, including the length.
            name: Name of the pack.
            where: The pack, for messages.
            chunk_bytes: Bytes of a chunk, where the header does not state it.
        Raises:
            CorruptError: The bytes are not the header of a pack, or nobody has the pair of a piece.
            InvalidError: A codec is of a newer version of the format.
        """
        pieces = _stated(header, name, where, chunk_bytes)
        return [self._with_pair(piece, pieces, where) for piece in pieces]

    def _with_pair(self, piece: Piece, neighbours: Sequence[Piece], where: str) -> Piece:
        coding = piece.coding
        if coding is None or not coding.pair_fqn:
            return piece
        pair = _find(neighbours, coding.pair_fqn, piece.region) or self._elsewhere(piece, coding.pair_fqn)
        if pair is None:
            raise CorruptError(
                f"{where}: {piece.tensor.fqn} is coded against {coding.pair_fqn}, of which no pack at hand has a piece "
                "of the same region. Read another copy"
            )
        return replace(piece, coding=replace(coding, pair=pair))

    def _elsewhere(self, piece: Piece, fqn: str) -> Piece | None:
        """Return the piece of a tensor in another pack: the one that a rank saw when it wrote the pack of `piece`.

        A rank writes a piece and its pair together, or leaves the pair in the last earlier pack that has it. Packs of
        still earlier steps may hold other values of the pair, for the sake of other tensors.
        """
        (own_step, own_attempt), own_rank = self._origin_of(piece.pack), rank_of_pack(piece.pack)

        def order(name: str) -> tuple[int, bool, int, bool]:
            (step, attempt), is_other_rank = self._origin_of(name), rank_of_pack(name) != own_rank
            if attempt == own_attempt:
                return (2 if is_other_rank else 0), False, 0, is_other_rank
            return 1, step > own_step, abs(own_step - step), is_other_rank

        names = [
            record.name
            for record in self._manifest.packs
            if is_pack_name(record.name) or step_of_pack(record.name) is not None
        ]
        names.sort(key=order)
        for name in names:
            if name not in self._listed:
                self._listed[name] = self._list(name, piece.chunk_bytes)
            pair = _find(self._listed[name], fqn, piece.region)
            if pair is not None:
                return pair
        return None

    def _origin_of(self, name: str) -> tuple[int, str]:
        """Return step and attempt that wrote a pack; -1 for a checkpoint without a step."""
        step = step_of_pack(name)
        if step is not None:
            return step, name.split("/")[1]
        return -1 if self._manifest.step is None else self._manifest.step, self._manifest.attempt

    def _list(self, name: str, chunk_bytes: int) -> Sequence[Piece]:
        try:
            stored = self.packs(name)
            header = header_of(stored, stored.files.size(stored.key))
            return _stated(header, name, stored.url, chunk_bytes)
        except (CorruptError, MissingError, InvalidError):
            return ()


def _stated(header: bytes, name: str, where: str, chunk_bytes: int) -> list[Piece]:
    return [
        Piece(
            tensor=stated.tensor,
            region=stated.region,
            pack=name,
            offset=stated.start,
            digests=b"",
            chunk_bytes=stated.chunk_bytes or chunk_bytes,
            coding=stated.coding,
        )
        for stated in stated_pieces(header, name, where)
    ]


def _find(pieces: Sequence[Piece], fqn: str, region: Region) -> Piece | None:
    return next((piece for piece in pieces if piece.tensor.fqn == fqn and piece.region == region), None)


def is_proven(
    stored: Stored,
    record: FileRecord,
    chunk_bytes: int,
    listing: PackPieces,
) -> bool:
    """Return whether a stored pack is exactly the one that a manifest records.

    Args:
        stored: Its place.
        record: Its record.
        chunk_bytes: The bytes of its chunks.
        listing: Lists its pieces, and finds what they are coded against.
    """
    try:
        if stored.files.size(stored.key) != record.bytes:
            return False
        header = header_of(stored, record.bytes)
        pieces = listing.of(header, record.name, stored.url, chunk_bytes)
        if pieces and max(piece.offset + piece.stored_bytes for piece in pieces) > record.bytes:
            return False
        digests = digests_of(stored, pieces, listing)
    except (CorruptError, MissingError):
        return False
    return pack_digest(header, b"".join(digests)) == record.digest


def header_of(stored: Stored, pack_bytes: int) -> bytes:
    """Return the header of a pack with its length.

    Args:
        stored: Its place.
        pack_bytes: Bytes of the pack.
    Raises:
        CorruptError: Its length is impossible.
    """
    length = int.from_bytes(_bytes_of(stored, 0, 8), "little")
    if not 0 < length <= min(HEADER_BYTES_MAX, pack_bytes - 8):
        raise CorruptError(f"{stored.url}: a header of {length} bytes; expected at most {HEADER_BYTES_MAX}")
    return _bytes_of(stored, 0, 8 + length)


def _bytes_of(stored: Stored, start: int, stop: int) -> bytes:
    return bytes(read_range(stored.files, stored.key, start, stop, allocate_aligned(stop - start + PAGE_BYTES)))


def digests_of(
    stored: Stored,
    pieces: Sequence[Piece],
    listing: PackPieces,
) -> list[bytes]:
    """Return the digests of the chunks of each piece of a pack, decoded and hashed again.

    Raises:
        CorruptError: A chunk cannot be decoded, or the file ends before it.
    """
    chunk_bytes = max((piece.chunk_bytes for piece in pieces), default=PAGE_BYTES)
    chunks = ChunkReader(listing.packs, listing.codecs, chunk_bytes)
    digests = []
    for piece in pieces:
        piece_digests = b""
        for number in range(chunk_count(piece.bytes, piece.chunk_bytes)):
            piece_digests += digest_of(chunks.raw(piece, number, stored))
        digests.append(piece_digests)
    return digests
