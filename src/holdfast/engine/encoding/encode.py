"""Encodes a coded pack: one thread takes its chunks, encodes them with helpers, and returns them in file order.

A unit is what is encoded at once: a chunk, or the chunks of a master that a chunk of its weight was rounded from. Its
raw bytes are memory of a staged window, or memory of the encoder into which they are copied. They are released once the
unit is written, or once the pack is given up; if a helper process encodes it, as soon as they are copied to its memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from holdfast.engine.buffers import copy_part
from holdfast.engine.encoding.chunk_encoder import ChunkEncoder, EncodedChunk, PairedWeight, rounded
from holdfast.engine.encoding.helper_messages import SLOTS
from holdfast.engine.encoding.helper_process import CodingHelpers, Helper, HelperTask
from holdfast.engine.encoding.meter import SaveMeter
from holdfast.engine.encoding.probe import Prepare
from holdfast.engine.encoding.raw_chunks import ChunkMemory, CopiedChunks, RawChunk, RawChunks, StagedChunks
from holdfast.engine.staging import Staging
from holdfast.format.coded_chunks import PAIR_RATIO
from holdfast.format.digest import digest_of
from holdfast.geometry.chunking import DIGEST_BYTES, chunk_count, chunk_range
from holdfast.geometry.region import Region
from holdfast.geometry.tensor import TensorSpec
from holdfast.geometry.value_class import value_class
from holdfast.ports.codec import Codecs, StoredPart
from holdfast.ports.framework import Source
from holdfast.settings import MIB, Settings
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


_UNITS_HERE_MAX = 2
"""Units beside those of helpers: while one waits to be written, the thread that writes encodes another."""


_WAIT_SECONDS_PER_MIB = 0.002
"""How long a helper is waited for: twice as long as it needs, unless it waits for a processor."""


class Encoder:
    """Encodes the packs of one writer."""

    def __init__(
        self, codecs: Codecs, settings: Settings, helpers: CodingHelpers | None = None, *, reads_in_order: bool = False
    ) -> None:
        """Allocate nothing yet.

        Args:
            codecs: The codecs by name.
            settings: Size of chunks, and whether non-finite elements are counted.
            helpers: Processes that encode beside the calling thread; None: there are none.
            reads_in_order: Whether all sources are read front to back.
        """
        self._reads_in_order = reads_in_order
        self._chunks = ChunkEncoder(codecs, counts_nonfinite=settings.count_nonfinite)
        self._chunk_bytes = settings.chunk_bytes
        self._helpers = helpers or CodingHelpers("", settings)
        self._memory = ChunkMemory(settings.chunk_bytes)

    @property
    def threads(self) -> int:
        """How many encode at once, the thread that calls `encode` included."""
        return 1 + self._helpers.ready_count

    def start_helpers(self) -> None:
        """Start helpers, so that they are ready when there is something to encode."""
        self._helpers.start()

    def from_sources(self, sources: Sequence[Source]) -> RawChunks:
        """Return raw chunks that are copied from their sources: when each is encoded, or all in order."""
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
        units = _UNITS_HERE_MAX + 1 if self._helpers.count_max else 1
        return each * (units + 1) + 1

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
            window = memoryview(bytearray(len(raw)))

            def encode() -> tuple[str, int]:
                (chunk,) = self._chunks.encoded(item.tensor.dtype, codec, [raw], weight)
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
        with self._helpers.lent() as helpers, _UnitsUnderWay(helpers, append, encoded, meter) as units:
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
        self._raw: list[RawChunk] = []
        self._sizes: list[int] = []
        """Raw bytes of each chunk."""
        self._task: HelperTask | None = None
        """What a helper does with it."""
        self._chunks: list[EncodedChunk] | None = None
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

    def lend(self, helper: Helper) -> None:
        """Let a helper encode it that has room for it."""
        raw = [chunk.bytes() for chunk in self._raw]
        self._task = helper.begin(self._item.tensor.dtype, self._item.codec, raw, self._weight)
        self._release_raw()

    @property
    def is_lent(self) -> bool:
        """Whether it lies in memory of a helper."""
        return self._task is not None

    @property
    def is_encoded(self) -> bool:
        """Whether its chunks are encoded."""
        return self._chunks is not None

    @property
    def waits(self) -> bool:
        """Whether a helper has not answered yet."""
        return self._task is not None and not self._task.wait(0.0)

    def finish(self) -> float:
        """Take what its helper made of it, after a short wait for that; without a helper's answer, encode it here.

        Returns:
            Processor seconds that this thread took to encode it, if it is measured.
        """
        task = self._task
        if task is None or not task.wait(_WAIT_SECONDS_PER_MIB * max(self.raw_bytes / MIB, 1)) or task.chunks is None:
            return self.encode_here()
        self._chunks, self._seconds, self._elapsed_seconds = task.chunks, task.seconds, task.elapsed_seconds
        return 0.0

    def encode_here(self) -> float:
        """Encode it on this thread, whoever has it; return as `finish`."""
        if self._task is None:
            raw: Sequence[memoryview] = [chunk.bytes() for chunk in self._raw]
        else:
            raw = self._task.raw
            self._task.take_back()
        meter, dtype, codec = self._meter, self._item.tensor.dtype, self._item.codec
        if meter is None:
            self._chunks = self._encoder.encoded(dtype, codec, raw, self._weight)
            return 0.0
        begin, start = meter.seconds(), meter.thread_seconds()
        self._chunks = self._encoder.encoded(dtype, codec, raw, self._weight)
        self._seconds, self._elapsed_seconds = meter.thread_seconds() - start, meter.seconds() - begin
        return self._seconds

    def written(self, append: Callable[[Sequence[StoredPart]], None]) -> list[EncodedChunk]:
        """Write its chunks, once they are encoded, and release their memory; return what is known of them."""
        chunks, self._chunks = self._chunks, []
        assert chunks is not None, "it is encoded"
        for chunk in chunks:
            append(chunk.parts)
            self.piece.add(chunk)
        self.release()
        return chunks

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
    def raw_bytes(self) -> int:
        """Raw bytes of its chunks."""
        return sum(self._sizes)

    def release(self) -> None:
        """Release its memory, unless that was done."""
        self._release_raw()
        task, self._task = self._task, None
        if task is not None:
            task.release()

    def _release_raw(self) -> None:
        raw, self._raw = self._raw, []
        for chunk in raw:
            chunk.release()


class _UnitsUnderWay:
    """The units of a pack that are encoded, or wait for their turn to be written. When the block ends, none is.

    The thread that writes encodes too: what no helper has room for, and then what helpers have not come to. If nothing
    else is left it waits for a helper, and not for long: one without a processor of its own takes its time.
    """

    def __init__(
        self,
        helpers: Sequence[Helper],
        append: Callable[[Sequence[StoredPart]], None],
        encoded: Callable[[int], None],
        meter: SaveMeter | None,
    ) -> None:
        self._helpers, self._append, self._encoded, self._meter = helpers, append, encoded, meter
        self._units_max = SLOTS * len(helpers) + _UNITS_HERE_MAX if helpers else 1
        self._under_way: deque[_Unit] = deque()
        self._measured_until = 0.0 if meter is None else meter.thread_seconds()
        self._encoding_seconds = 0.0
        """Processor seconds since then in which this thread encoded."""

    def __enter__(self) -> _UnitsUnderWay:
        return self

    def __exit__(self, *_: object) -> None:
        for unit in self._under_way:
            unit.release()

    def begin(self, unit: _Unit, chunks: RawChunks, ranges: Sequence[tuple[int, int]]) -> None:
        """Begin a unit, and finish earlier ones until there is room for the next.

        Raises:
            BaseException: A unit failed with this error.
        """
        unit.take(chunks, ranges)
        self._under_way.append(unit)
        with_room = [helper for helper in self._helpers if helper.has_room(unit.raw_bytes)]
        if with_room:
            unit.lend(max(with_room, key=lambda helper: len(helper.free_slots)))
        # Units that are not lent hold staged windows, of which there are few.
        while len(self._under_way) >= self._units_max or self._count_here() > _UNITS_HERE_MAX:
            self._finish_first()

    def finish_all(self) -> None:
        """Write every unit."""
        while self._under_way:
            self._finish_first()

    def _count_here(self) -> int:
        return sum(not unit.is_lent for unit in self._under_way)

    def _finish_first(self) -> None:
        first = self._under_way[0]
        while not first.is_encoded:
            other = self._other() if first.waits else None
            self._encoding_seconds += first.finish() if other is None else other.encode_here()
        chunks = first.written(self._append)
        self._under_way.popleft()
        self._encoded(first.raw_bytes)
        if self._meter is not None:
            first.note(chunks, self._seconds_beside(self._meter))

    def _other(self) -> _Unit | None:
        """Return what is left to encode while a helper encodes the first unit.

        The next that no helper has, or else the last: helpers that have no processor of their own come to it late.
        """
        later = [unit for unit in islice(self._under_way, 1, None) if not unit.is_encoded]
        here = next((unit for unit in later if not unit.is_lent), None)
        return here or next((unit for unit in reversed(later) if unit.waits), None)

    def _seconds_beside(self, meter: SaveMeter) -> float:
        """Return the processor seconds of this thread since the last call, without those in which it encoded."""
        now = meter.thread_seconds()
        seconds = now - self._measured_until - self._encoding_seconds
        self._measured_until, self._encoding_seconds = now, 0.0
        return max(seconds, 0.0)
