"""Encodes a coded pack: one thread takes its chunks, encodes them with others, and returns them in file order.

A unit is what is encoded at once: a chunk, or the chunks of a master that a chunk of its weight was rounded from. Its
raw bytes are memory of a staged window, or memory of the encoder into which they are copied. They are released once the
unit is written, or once the pack is given up.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from holdfast.engine.buffers import copy_part
from holdfast.engine.encoding.chunk_encoder import ChunkEncoder, EncodedChunk, PairedWeight, rounded
from holdfast.engine.encoding.meter import SaveMeter
from holdfast.engine.encoding.probe import Prepare
from holdfast.engine.encoding.raw_chunks import ChunkMemory, CopiedChunks, RawChunk, RawChunks, StagedChunks
from holdfast.engine.parallel_map import WorkerThreads
from holdfast.engine.staging import Staging
from holdfast.format.coded_chunks import PAIR_RATIO
from holdfast.format.digest import digest_of
from holdfast.geometry.chunking import DIGEST_BYTES, chunk_count, chunk_range
from holdfast.geometry.region import Region
from holdfast.geometry.tensor import TensorSpec
from holdfast.geometry.value_class import value_class
from holdfast.ports.codec import Codecs, StoredPart
from holdfast.ports.framework import Source
from holdfast.settings import Settings
from holdfast.types.plan import Coding, PackItem, PackPlan, PieceKey


@value_class
class EncodedPiece:
    """What is known of a piece once it is encoded."""

    digests: bytes
    """Digests of its raw chunks, 16 bytes each."""

    coding: Coding
    """How its chunks are stored."""

    nonfinite: int
    """NaN and infinite elements in it; 0 if they are not counted."""


class KnownWeights:
    """The weights of the pairs of one save: their chunk digests, once they are written or found unchanged."""

    def __init__(self, pairs: Mapping[PieceKey, str]) -> None:
        """Know no digest yet.

        Args:
            pairs: By master piece, the FQN of the weight that it was perhaps rounded from.
        """
        self.pairs = pairs
        self._digests: dict[PieceKey, tuple[str, bytes]] = {}
        self._wanted = {(weight, region) for (_, region), weight in pairs.items()}

    def record(self, tensor: TensorSpec, region: Region, digests: bytes) -> None:
        """Take note of the chunk digests of a piece, if it is a weight of a pair."""
        key = tensor.fqn, region
        if key in self._wanted:
            self._digests[key] = tensor.dtype, digests

    def of(self, item: PackItem) -> tuple[str, str, bytes] | None:
        """Return FQN, dtype and chunk digests of the weight of a master; None if it has none."""
        weight = self.pairs.get((item.tensor.fqn, item.region))
        known = None if weight is None else self._digests.get((weight, item.region))
        return None if weight is None or known is None else (weight, *known)


NO_WEIGHTS = KnownWeights({})
"""For packs without pairs."""


class Encoder:
    """Encodes the packs of one writer."""

    def __init__(self, codecs: Codecs, settings: Settings, *, reads_in_order: bool = False) -> None:
        """Start no thread yet.

        Args:
            codecs: The codecs by name.
            settings: Size of chunks, number of threads, and whether non-finite elements are counted.
            reads_in_order: Whether one thread reads all sources, front to back.
        """
        self._reads_in_order = reads_in_order
        self._chunks = ChunkEncoder(codecs, counts_nonfinite=settings.count_nonfinite)
        self._chunk_bytes = settings.chunk_bytes
        self.threads = settings.compression_threads
        """Threads that encode, the one that calls `encode` included."""
        self._memory = ChunkMemory(settings.chunk_bytes)

    def from_sources(self, sources: Sequence[Source]) -> RawChunks:
        """Return raw chunks that are copied from their sources: by the thread that encodes each, or all in order."""
        return CopiedChunks(sources, self._memory, in_order=self._reads_in_order)

    def from_staging(self, staging: Staging) -> RawChunks:
        """Return raw chunks in staged windows."""
        return StagedChunks(staging, self._memory, is_in_place=staging.holds(self._windows_max(staging.window_bytes)))

    def _windows_max(self, window_bytes: int) -> int:
        """Return how many staged windows are in use at most, if chunks are encoded where they are.

        A unit of two chunks may hold the windows that it lies in until it is written, and the thread that copies fills
        one. There is room for one unit more: an earlier save whose write hangs may still hold the windows of a unit.
        """
        each = -(-PAIR_RATIO * self._chunk_bytes // window_bytes) + 1
        return each * (_units_max(self.threads) + 1) + 1

    def sampler(self, weight_types: Mapping[str, str], codec_for: Callable[[str], str]) -> Prepare:
        """Return what codes samples of pieces that are written raw, as chunks are coded.

        Args:
            weight_types: By FQN of each master, the element type of its weight. A sample of one counts as proven: it is
                coded against its own bytes, rounded.
            codec_for: Returns the codec that is tried first for an element type.
        """

        def prepare(item: PackItem, raw: memoryview) -> Callable[[], tuple[str, int]]:
            dtype = weight_types.get(item.tensor.fqn)
            weight = None if dtype is None else PairedWeight(dtype, digest_of(rounded(raw, dtype)))
            codec = codec_for(item.tensor.dtype)
            coded = PackItem(item.tensor, item.region, item.data_offset, item.shard_number, codec)

            window = memoryview(bytearray(len(raw)))

            def encode() -> tuple[str, int]:
                (chunk,) = self._chunks.encoded(coded, [raw], weight)
                # The thread that encodes copies chunks to windows, too.
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
        """Encode a pack; return what is known of each piece.

        Args:
            pack: The pack.
            chunks: Its raw bytes.
            weights: The weights that its masters were perhaps rounded from.
            append: Writes the stored bytes of a chunk, in file order; it keeps none of the memory.
            encoded: Called with the raw bytes of each unit once they were appended.
            meter: Measures what coding takes; None: nothing does.
        """
        found = []
        with _UnitsUnderWay(self.threads, append, encoded, meter) as units:
            for item in pack.items:
                weight = weights.of(item)
                piece = _PieceRecord("" if weight is None else weight[0])
                found.append(piece)
                for ranges, part in self._units_of(item, weight):
                    units.begin(_Unit(self._chunks, item, part, piece, meter), chunks, ranges)
            units.finish_all()
        return [piece.encoded() for piece in found]

    def _units_of(
        self, item: PackItem, weight: tuple[str, str, bytes] | None
    ) -> Iterator[tuple[list[tuple[int, int]], PairedWeight | None]]:
        """Yield for each unit of a piece the byte ranges of its chunks, and the part of the weight that is theirs."""
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
    """What is known of the chunks of a piece that were written so far, without their bytes."""

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
        """Return the piece, once all of its chunks were added."""
        names = tuple(sorted({*self._codecs} - {""}))
        numbers = {name: number for number, name in enumerate(("", *names))}
        weight = self._weight if "residual" in names else ""
        coding = Coding(names, bytes(map(numbers.__getitem__, self._codecs)), tuple(self._starts), weight)
        return EncodedPiece(b"".join(self._digests), coding, self._nonfinite)


class _Unit:
    """Chunks that are encoded at once."""

    def __init__(
        self,
        encoder: ChunkEncoder,
        item: PackItem,
        weight: PairedWeight | None,
        piece: _PieceRecord,
        meter: SaveMeter | None,
    ) -> None:
        self._encoder, self._item, self._weight, self.piece, self._meter = encoder, item, weight, piece, meter
        self._encoded_chunks: list[EncodedChunk] = []
        self._error: BaseException | None = None
        self._raw: list[RawChunk] = []
        self._lock, self._is_begun = threading.Lock(), False
        # Held until the unit is encoded, or failed: a future takes five times as long.
        self._under_way = threading.Lock()
        self._under_way.acquire()
        self._sizes: list[int] = []
        """Raw bytes of each chunk."""
        self._seconds = self._elapsed_seconds = 0.0
        """Processor seconds that it took to encode, and seconds that passed meanwhile."""

    def take(self, chunks: RawChunks, ranges: Sequence[tuple[int, int]]) -> None:
        """Take its raw chunks, all or none."""
        try:
            for start, stop in ranges:
                self._raw.append(chunks.take(self._item, start, stop))
                self._sizes.append(stop - start)
        except BaseException:
            self.release()
            raise

    def run(self, is_given_up: Callable[[], bool]) -> float:
        """Encode, unless another thread has begun it or the pack was given up. On any thread; never raises.

        Returns:
            Processor seconds that this thread took to encode it, if it is measured.
        """
        with self._lock:
            if self._is_begun:
                return 0.0
            self._is_begun = True
        try:
            if is_given_up():
                return 0.0
            self._encoded_chunks = self._measured() if self._meter is not None else self._encoded()
        except BaseException as error:  # noqa: BLE001 - the thread that waits for the unit raises it
            self._error = error
        finally:
            self._under_way.release()
        return self._seconds

    def _encoded(self) -> list[EncodedChunk]:
        return self._encoder.encoded(self._item, [raw.bytes() for raw in self._raw], self._weight)

    def _measured(self) -> list[EncodedChunk]:
        """Encode, and measure what it took to copy, hash and encode the chunks."""
        meter = self._meter
        assert meter is not None
        begin, start = meter.seconds(), meter.thread_seconds()
        encoded = self._encoded()
        self._seconds, self._elapsed_seconds = meter.thread_seconds() - start, meter.seconds() - begin
        return encoded

    def note(self, encoded: Sequence[EncodedChunk], beside_seconds: float) -> None:
        """Let the meter count each chunk, once all are written.

        Args:
            encoded: The chunks.
            beside_seconds: Processor seconds that the thread that writes took for the unit beside encoding it.
        """
        assert self._meter is not None
        seconds = self._seconds + beside_seconds
        # What it elapsed is unknown, since it contains waits for the store: where threads wait for processors, all
        # work takes longer alike.
        elapsed = self._elapsed_seconds * seconds / self._seconds if self._seconds else seconds
        share = 1 / len(encoded)
        for chunk, raw_bytes in zip(encoded, self._sizes, strict=True):
            self._meter.note_chunk(
                self._item.tensor.fqn, chunk.codec, raw_bytes, chunk.stored_bytes, seconds * share, elapsed * share
            )

    @property
    def is_done(self) -> bool:
        """Whether it is encoded, or failed."""
        return not self._under_way.locked()

    def encoded(self) -> list[EncodedChunk]:
        """Wait for the encoded chunks, and hand them over; raise what `run` met."""
        with self._under_way:
            encoded, self._encoded_chunks = self._encoded_chunks, []
        if self._error is not None:
            raise self._error
        return encoded

    @property
    def raw_bytes(self) -> int:
        """Raw bytes of its chunks."""
        return sum(self._sizes)

    def release(self) -> None:
        """Release the raw chunks, unless that was done."""
        with self._lock:
            raw, self._raw = self._raw, []
        for chunk in raw:
            chunk.release()


class _UnitsUnderWay:
    """The units of a pack that are encoded, or wait for their turn to be written. When the block ends, none is.

    The thread that writes encodes too: handing every unit to another thread would cost a fifth of the time of encoding.
    """

    def __init__(
        self,
        threads: int,
        append: Callable[[Sequence[StoredPart]], None],
        encoded: Callable[[int], None],
        meter: SaveMeter | None,
    ) -> None:
        self._append, self._encoded, self._units_max, self._meter = append, encoded, _units_max(threads), meter
        self._others = WorkerThreads(threads - 1, "holdfast-encode") if threads > 1 else None
        self._under_way: deque[_Unit] = deque()
        self._given_up = False
        self._measured_until = 0.0 if meter is None else meter.thread_seconds()
        self._encoding_seconds = 0.0
        """Processor seconds since then in which this thread encoded."""

    def __enter__(self) -> _UnitsUnderWay:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._given_up = kind is not None
        if self._others is not None:
            self._others.join()
        for unit in self._under_way:
            unit.release()

    def begin(self, unit: _Unit, chunks: RawChunks, ranges: Sequence[tuple[int, int]]) -> None:
        """Begin a unit, and finish earlier ones until there is room for the next.

        Raises:
            BaseException: A unit failed with this error.
        """
        unit.take(chunks, ranges)
        self._under_way.append(unit)
        if self._others is not None:
            self._others.begin(lambda: self._help(unit))
        while len(self._under_way) >= self._units_max:
            self._finish_first()

    def finish_all(self) -> None:
        """Write every unit."""
        while self._under_way:
            self._finish_first()

    def _finish_first(self) -> None:
        unit = self._under_way[0]
        for this_or_later in self._under_way:
            if unit.is_done:
                break
            self._encoding_seconds += self._run(this_or_later)
        chunks = unit.encoded()
        for chunk in chunks:
            self._append(chunk.parts)
            unit.piece.add(chunk)
        unit.release()
        self._under_way.popleft()
        self._encoded(unit.raw_bytes)
        if self._meter is not None:
            unit.note(chunks, self._seconds_beside(self._meter))

    def _help(self, unit: _Unit) -> None:
        self._run(unit)

    def _run(self, unit: _Unit) -> float:
        return unit.run(lambda: self._given_up)

    def _seconds_beside(self, meter: SaveMeter) -> float:
        """Return the processor seconds of this thread since the last call, without those in which it encoded."""
        now = meter.thread_seconds()
        seconds = now - self._measured_until - self._encoding_seconds
        self._measured_until, self._encoding_seconds = now, 0.0
        return max(seconds, 0.0)


def _units_max(threads: int) -> int:
    """Return how many units are under way at most: some wait, so that no thread does."""
    return threads + threads // 2 + 2 if threads > 1 else 1
