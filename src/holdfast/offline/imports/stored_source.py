"""Stored tensors as the source of a save: their bytes are read when the save writes them, and checked."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Self

from holdfast.base.geometry.region import Region, contains, first_element
from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.framework import DONE, Ticket
from holdfast.base.ports.observer import ByteProgress, Observer
from holdfast.base.ports.packs import Packs, Stored
from holdfast.base.ports.ranges import read_range
from holdfast.base.types.plan import Piece
from holdfast.core.engine.buffers import allocate_aligned
from holdfast.core.engine.decoding.chunk_reader import ChunkReader, chunk_of
from holdfast.core.engine.placing import require_digest
from holdfast.core.format.digest import new_digest
from holdfast.errors import CorruptError, MissingError
from holdfast.settings import MIB, PAGE_BYTES

_AHEAD_BYTES_MAX = 32 * MIB
"""Most bytes of a piece that are requested together where nothing is cached: the store reads those side by side."""

_AHEAD_BYTES_MIN = MIB
"""Fewest bytes that are requested there: small pieces are neighbours, and each request takes time."""


class ReadAhead:
    """Reads for one thread, and keeps bytes that were requested too early."""

    def __init__(self, pack_bytes: Mapping[str, int]) -> None:
        """Read nothing yet.

        Args:
            pack_bytes: Size of each pack, by name.
        """
        self._pack_bytes = pack_bytes
        self._ahead: tuple[str, int, memoryview] | None = None
        """Name of a pack, and bytes of it from a place on, where a store caches nothing."""

    def read(self, stored: Stored, piece: Piece, start: int, stop: int, buffer: memoryview) -> memoryview:
        """Return bytes `[start, stop)` of the pack of a piece; the buffer takes them, and a page more."""
        if stored.files.traits.read_alignment > 1:  # A file: the system reads ahead.
            return read_range(stored.files, stored.key, start, stop, buffer)
        if self._ahead is not None:
            pack, first, held = self._ahead
            if pack == piece.pack and first <= start and stop <= first + len(held):
                return held[start - first : stop - first]
        end = min(max(piece.offset + piece.stored_bytes, start + _AHEAD_BYTES_MIN), start + _AHEAD_BYTES_MAX)
        self._ahead = None  # Two such memories are not needed at once.
        end = max(min(end, self._pack_bytes[piece.pack]), stop)
        memory = allocate_aligned(end - start)
        self._ahead = piece.pack, start, read_range(stored.files, stored.key, start, end, memory)
        return self._ahead[2][: stop - start]


_READ_BYTES = 4 * MIB


class PieceReader:
    """Reads pieces of one checkpoint in parts, most often front to back, and checks them against their digests if any.

    For one thread.
    """

    def __init__(
        self,
        packs: Packs,
        pack_bytes: Mapping[str, int],
        total_bytes: int,
        codecs: Codecs,
        observer: Observer | None,
    ) -> None:
        """Read nothing yet.

        Args:
            packs: Locates packs by name.
            pack_bytes: Size of each pack, by name.
            total_bytes: Raw bytes of all pieces, for the observer.
            codecs: What decodes coded chunks.
            observer: Receives progress.
        """
        self._packs, self._progress = packs, ByteProgress(total_bytes, observer)
        self._buffer = allocate_aligned(_READ_BYTES + PAGE_BYTES)
        self._pieces, bases = ReadAhead(pack_bytes), ReadAhead(pack_bytes)
        # No chunk is larger than a read.
        self._chunks = ChunkReader(packs, codecs, _READ_BYTES, self._pieces.read, bases.read)
        self._chunk: tuple[Piece, int, memoryview] | None = None
        """The chunk that was read whole last: its piece, its number and its raw bytes."""
        self._digest = new_digest()
        self._checked: tuple[Piece | None, int] = None, 0

    def read(self, piece: Piece, start: int, target: memoryview, *, by_chunk: bool = False) -> None:
        """Fill memory with the raw bytes of a piece from `start` on.

        Args:
            piece: The piece.
            start: The first byte.
            target: The memory.
            by_chunk: Whether the piece is not read front to back: then each chunk is read whole, and checked.
        Raises:
            CorruptError: The bytes differ from what was saved; the message names tensor, file and byte range.
        """
        stored = self._packs(piece.pack)
        try:
            # What another system wrote has no digests, so nothing is checked.
            if piece.coding is None and not (by_chunk and piece.digests):
                self._read_plain(stored, piece, start, target)
            else:
                self._read_chunks(stored, piece, start, target)
        except MissingError as missing:
            raise CorruptError(
                f"{piece.tensor.fqn}: {stored.url}: the file is missing; the checkpoint names it. Read another copy"
            ) from missing
        self._progress.add(len(target))

    def _read_plain(self, stored: Stored, piece: Piece, start: int, target: memoryview) -> None:
        offset = piece.offset + start
        at = stored.files.get_cached(stored.key, offset, [target])
        while at < len(target):
            stop = min(at + _READ_BYTES, len(target))
            target[at:stop] = self._pieces.read(stored, piece, offset + at, offset + stop, self._buffer)
            at = stop
        if piece.digests:
            self._check(piece, start, target, stored.url)

    def _read_chunks(self, stored: Stored, piece: Piece, start: int, target: memoryview) -> None:
        at = 0
        while at < len(target):
            number, within = divmod(start + at, piece.chunk_bytes)
            if self._chunk is None or self._chunk[0] is not piece or self._chunk[1] != number:
                self._chunk = None
                raw = self._chunks.raw(piece, number)
                require_digest(chunk_of(piece, number), raw, stored.url)
                self._chunk = piece, number, raw
            part = self._chunk[2][within : within + len(target) - at]
            target[at : at + len(part)] = part
            at += len(part)

    def _check(self, piece: Piece, start: int, data: memoryview, where: str) -> None:
        """Check bytes against the digests of their chunks; a chunk is checked once its last byte has been read."""
        while data:
            number, within = divmod(start, piece.chunk_bytes)
            if not within:
                self._digest.reset()
            else:
                assert self._checked == (piece, start), f"{piece.tensor.fqn} is read at {start}, not front to back"
            part = data[: piece.chunk_bytes - within]
            self._digest.update(part)
            start, data = start + len(part), data[len(part) :]
            self._checked = piece, start
            if start % piece.chunk_bytes and start < piece.bytes:
                return
            digest, expected = self._digest.digest(), piece.digests[16 * number : 16 * number + 16]
            if digest != expected:
                first = piece.offset + number * piece.chunk_bytes
                raise CorruptError(
                    f"{piece.tensor.fqn}: {where}: bytes {first}–{piece.offset + start} hash to {digest.hex()}; "
                    f"expected {expected.hex()}. Read another copy or another step"
                )


class StoredSource:
    """A stored tensor as a `Source`. Stored bytes do not change, so `copied` and `stamp` return the source itself."""

    def __init__(self, reader: PieceReader, regions: Mapping[Region, Sequence[Piece]]) -> None:
        """Read nothing yet.

        Args:
            reader: Reads pieces.
            regions: Regions, each with the pieces whose bytes in order are the region's. They can be copied, and so can
                parts of them that are one run.
        """
        self._reader = reader
        self._itemsize = next((pieces[0].tensor.itemsize for pieces in regions.values() if pieces), 0)
        self._regions = {
            region: (pieces, [0, *accumulate(piece.bytes for piece in pieces)]) for region, pieces in regions.items()
        }

    def copy_into(self, piece: Region, start: int, stop: int, buffer: memoryview) -> Ticket:
        """Copy a run of a region's bytes to the front of `buffer`."""
        is_part = piece not in self._regions
        region = next(region for region in self._regions if contains(region, piece)) if is_part else piece
        pieces, firsts = self._regions[region]
        if is_part:
            # A store of objects gets large regions in parts, and not in their order.
            first = first_element(region, piece) * self._itemsize
            start, stop = first + start, first + stop
        at = start
        while at < stop:
            number = bisect_right(firsts, at) - 1
            end = min(stop, firsts[number + 1])
            room = buffer[at - start : end - start]
            self._reader.read(pieces[number], at - firsts[number], room, by_chunk=is_part)
            at = end
        return DONE

    @classmethod
    def copy_together(cls, sources: Sequence[Self], pieces: Sequence[Region], buffer: memoryview) -> Ticket:
        """Copy several regions, each whole, one after the other."""
        at = 0
        for source, piece in zip(sources, pieces, strict=True):
            total = piece.numel * source._itemsize
            source.copy_into(piece, 0, total, buffer[at : at + total])
            at += total
        return DONE

    def sample(self, blocks: int, block_bytes: int, *, whole_bytes: int, shift: float) -> bytes:
        """Never called: one process copies, and there are no replicas to compare."""
        raise AssertionError("replicas of a stored tensor are compared; expected one process to copy it")

    def stamp(self) -> object:
        """Return the source itself."""
        return self

    def copied(self) -> StoredSource:
        """Return the source itself."""
        return self
