"""Encodes a coded pack: the writer thread takes, encodes and appends the chunks of the pack, in file order.

A unit is the part of a piece that is encoded at once: a chunk, or the chunks of a master from which a chunk of the
weight was rounded. The raw bytes of a unit are in a staged window, or are copied into memory of the encoder. This
memory is released once the unit is written or has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from holdfast.base.geometry.chunking import DIGEST_BYTES, chunk_count, chunk_range
from holdfast.base.geometry.region import Region
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.geometry.value_class import value_class
from holdfast.base.ports.codec import Codecs, StoredPart
from holdfast.base.ports.framework import Source
from holdfast.base.types.plan import Coding, PackItem, PackPlan, PieceKey
from holdfast.core.engine.buffers import copy_part
from holdfast.core.engine.encoding.chunk_encoder import ChunkEncoder, EncodedChunk, PairedWeight, rounded
from holdfast.core.engine.encoding.meter import SaveMeter
from holdfast.core.engine.encoding.probe import Prepare
from holdfast.core.engine.encoding.raw_chunks import ChunkMemory, CopiedChunks, RawChunk, RawChunks, StagedChunks
from holdfast.core.engine.staging import Staging
from holdfast.core.format.coded_chunks import PAIR_RATIO
from holdfast.core.format.digest import digest_of
from holdfast.settings import Settings


@value_class
class EncodedPiece:
    """The record of an encoded piece."""

    digests: bytes
    """Digests of the raw chunks, 16 bytes each."""

    coding: Coding
    """The stored form of the chunks."""

    nonfinite: int
    """Number of NaN and infinite elements; 0 if the save does not count."""


class KnownWeights:
    """The chunk digests of the weights of pairs in one save, known once a weight is written or found unchanged."""

    def __init__(self, pairs: Mapping[PieceKey, str]) -> None:
        """Know no digest yet.

        Args:
            pairs: By master piece, the FQN of a weight that may be the rounded master.
        """
        self.pairs = pairs
        self._digests: dict[PieceKey, tuple[str, bytes]] = {}
        self._wanted = {(weight, region) for (_, region), weight in pairs.items()}

    def record(self, tensor: TensorSpec, region: Region, digests: bytes) -> None:
        """Take note of the chunk digests of a piece, if the piece is a weight of a pair."""
        key = tensor.fqn, region
        if key in self._wanted:
            self._digests[key] = tensor.dtype, digests

    def of(self, item: PackItem) -> tuple[str, str, bytes] | None:
        """Return FQN, dtype and chunk digests of the weight of a master; None without a weight."""
        weight = self.pairs.get((item.tensor.fqn, item.region))
        known = None if weight is None else self._digests.get((weight, item.region))
        return None if weight is None or known is None else (weight, *known)


NO_WEIGHTS = KnownWeights({})
"""For packs without pairs."""


class Encoder:
    """Encodes the packs of one writer."""

    def __init__(self, codecs: Codecs, settings: Settings) -> None:
        """Allocate nothing yet.

        Args:
            codecs: The codecs by name.
            settings: Size of chunks, and whether non-finite elements are counted.
        """
        self._chunks = ChunkEncoder(codecs, counts_nonfinite=settings.count_nonfinite)
        self._chunk_bytes = settings.chunk_bytes
        self._memory = ChunkMemory(settings.chunk_bytes)

    def from_sources(self, sources: Sequence[Source]) -> RawChunks:
        """Return raw chunks that are copied from the sources."""
        return CopiedChunks(sources, self._memory)

    def from_staging(self, staging: Staging) -> RawChunks:
        """Return raw chunks in staged windows."""
        return StagedChunks(staging, self._memory, is_in_place=staging.holds(self._windows_max(staging.window_bytes)))

    def _windows_max(self, window_bytes: int) -> int:
        """Return the largest number of staged windows in use at once, if chunks are encoded in place.

        A unit of two chunks may hold its windows until the unit is written, and the thread that copies fills one more.
        There is room for one unit more: an earlier save whose write hangs may still hold the windows of a unit.
        """
        each = -(-PAIR_RATIO * self._chunk_bytes // window_bytes) + 1
        return 2 * each + 1

    def sampler(self, weight_types: Mapping[str, str], codec_for: Callable[[str], str]) -> Prepare:
        """Return a function that codes samples of raw pieces in the same way as chunks.

        Args:
            weight_types: By FQN of each master, the element type of its weight. A sample of a master needs no proof:
                the sample is coded against its own bytes, rounded.
            codec_for: Returns the codec to try first for an element type.
        """

        def prepare(item: PackItem, raw: memoryview) -> Callable[[], tuple[str, int]]:
            dtype = weight_types.get(item.tensor.fqn)
            weight = None if dtype is None else PairedWeight(dtype, digest_of(rounded(raw, dtype)))
            codec = codec_for(item.tensor.dtype)
            window = memoryview(bytearray(len(raw)))

            def encode() -> tuple[str, int]:
                (chunk,) = self._chunks.encoded(item.tensor.dtype, codec, [raw], weight)
                # The encoding thread copies chunks to windows, too.
                at = 0
                for part in chunk.parts:
                    copy_part(part, 0, window[at : at + len(part)])
                    at += len(part)
                return chunk.codec, chunk.stored_bytes

            return encode

        return prepare

    def encode(
        self,
        pack: PackPlan,
        chunks: RawChunks,
        weights: KnownWeights,
        append: Callable[[Sequence[StoredPart]], None],
        encoded: Callable[[int], None],
        meter: SaveMeter | None = None,
    ) -> list[EncodedPiece]:
        """Encode a pack; return the record of each piece.

        Args:
            pack: The pack.
            chunks: The raw bytes of the pack.
            weights: Weights that may be rounded masters of this pack.
            append: Writes the stored bytes of a chunk, in file order; keeps no reference to the memory.
            encoded: Called with the number of raw bytes of each unit, after the unit was appended.
            meter: Measures the time of coding; None for no measurement.
        """
        found = []
        times = None if meter is None else _UnitTimes(meter)
        for item in pack.items:
            weight = weights.of(item)
            piece = _PieceRecord("" if weight is None else weight[0])
            for ranges, part in self._units_of(item, weight):
                with _taken(chunks, item, ranges) as raw:
                    encode = partial(self._chunks.encoded, item.tensor.dtype, item.codec, raw, part)
                    unit = encode() if times is None else times.encoded(encode)
                    for chunk in unit:
                        append(chunk.parts)
                        piece.add(chunk)
                sizes = [stop - start for start, stop in ranges]
                encoded(sum(sizes))
                if times is not None:
                    times.note(item, unit, sizes)
                del unit  # The next unit takes the memory.
            found.append(piece.encoded())
        return found

    def _units_of(
        self, item: PackItem, weight: tuple[str, str, bytes] | None
    ) -> Iterator[tuple[list[tuple[int, int]], PairedWeight | None]]:
        """Yield for each unit of a piece the byte ranges of the chunks, and the matching part of the weight."""
        step = 1 if weight is None else PAIR_RATIO
        count = chunk_count(item.bytes, self._chunk_bytes)
        for first in range(0, count, step):
            numbers = range(first, min(first + step, count))
            part = None
            if weight is not None:
                _, dtype, digests = weight
                part = PairedWeight(dtype, digests[first // step * DIGEST_BYTES :][:DIGEST_BYTES])
            yield [chunk_range(item.bytes, self._chunk_bytes, number) for number in numbers], part


class _PieceRecord:
    """The record of the chunks of a piece that were written so far, without the bytes."""

    def __init__(self, weight: str) -> None:
        self._weight = weight
        self._digests: list[bytes] = []
        self._codecs: list[str] = []
        self._starts = [0]
        self._nonfinite = 0

    def add(self, chunk: EncodedChunk) -> None:
        """Add the next chunk."""
        self._digests.append(chunk.digest)
        self._codecs.append(chunk.codec)
        self._starts.append(self._starts[-1] + chunk.stored_bytes)
        self._nonfinite += chunk.nonfinite

    def encoded(self) -> EncodedPiece:
        """Return the record of the piece, once all chunks were added."""
        names = tuple(sorted({*self._codecs} - {""}))
        numbers = {name: number for number, name in enumerate(("", *names))}
        weight = self._weight if "residual" in names else ""
        coding = Coding(names, bytes(map(numbers.__getitem__, self._codecs)), tuple(self._starts), weight)
        return EncodedPiece(b"".join(self._digests), coding, self._nonfinite)


@contextmanager
def _taken(chunks: RawChunks, item: PackItem, ranges: Sequence[tuple[int, int]]) -> Iterator[list[memoryview]]:
    """Return the raw bytes of a unit, which are released when the block ends."""
    taken: list[RawChunk] = []
    try:
        for start, stop in ranges:
            taken.append(chunks.take(item, start, stop))
        yield [chunk.bytes() for chunk in taken]
    finally:
        for chunk in taken:
            chunk.release()


class _UnitTimes:
    """Reports each unit to the meter of a save: processor time of the writer thread, and of encoding alone."""

    def __init__(self, meter: SaveMeter) -> None:
        self._meter = meter
        self._since = meter.thread_seconds()
        self._encoding_seconds = self._elapsed_seconds = 0.0

    def encoded(self, encode: Callable[[], list[EncodedChunk]]) -> list[EncodedChunk]:
        """Encode a unit by this call, and measure the call."""
        begin, start = self._meter.seconds(), self._meter.thread_seconds()
        unit = encode()
        self._encoding_seconds = self._meter.thread_seconds() - start
        self._elapsed_seconds = self._meter.seconds() - begin
        return unit

    def note(self, item: PackItem, unit: Sequence[EncodedChunk], sizes: Sequence[int]) -> None:
        """Let the meter count each chunk of a unit, once all are written; `sizes` are the raw bytes of each chunk."""
        now = self._meter.thread_seconds()
        seconds, self._since = now - self._since, now
        # The elapsed time of a unit is unknown, since a unit includes waits for the store. So scale by encoding
        # alone: a wait for a processor slows down all work by the same factor.
        elapsed = self._elapsed_seconds * seconds / self._encoding_seconds if self._encoding_seconds else seconds
        share = 1 / len(unit)
        for chunk, raw_bytes in zip(unit, sizes, strict=True):
            self._meter.note_chunk(
                item.tensor.fqn, chunk.codec, raw_bytes, chunk.stored_bytes, seconds * share, elapsed * share
            )
