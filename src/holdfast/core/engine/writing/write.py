"""Writes packs: one thread copies and hashes a pack in file order, other threads write its full windows.

The bytes come straight from the sources, or from windows that another thread has filled (`core/engine/staging.py`).
`stream.stream` does both: it copies and hashes in one pass, or only hashes what is in the windows already. A coded pack
goes through `encoding.Encoder`, which copies, hashes and encodes. Its header is written last.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate

from holdfast.base.ports.codec import NO_CODECS, Codecs
from holdfast.base.ports.framework import Source
from holdfast.base.ports.store import Store, Upload
from holdfast.base.types.manifest import FileRecord
from holdfast.base.types.plan import Coding, PackPlan, PlannedPack
from holdfast.core.engine.buffers import BufferPool
from holdfast.core.engine.encoding.encode import NO_WEIGHTS, EncodedPiece, Encoder, KnownWeights
from holdfast.core.engine.encoding.meter import SaveMeter
from holdfast.core.engine.encoding.probe import ChunkProbe, Prepare
from holdfast.core.engine.encoding.raw_chunks import RawChunks
from holdfast.core.engine.nonfinite import NonFinite
from holdfast.core.engine.staging import Staging
from holdfast.core.engine.stream import Scratch, stream
from holdfast.core.engine.writing.completions import Completions, in_flight
from holdfast.core.engine.writing.windows import WrittenWindows
from holdfast.core.format.pack import pack_digest
from holdfast.settings import Settings


@dataclass(frozen=True, slots=True)
class WrittenPack:
    """A pack that is durable, but named by no manifest yet."""

    record: FileRecord
    """Name, size and digest."""

    digests: tuple[bytes, ...]
    """For each item of the plan its chunk digests, 16 bytes per chunk."""

    nonfinite: Mapping[str, int]
    """Number of NaN or infinite elements by FQN, where there are any; empty if the settings do not count them."""

    offsets: tuple[int, ...]
    """For each item of the plan, the bytes from the start of the pack to it."""

    codings: tuple[Coding, ...] = ()
    """Of a coded pack, for each item of the plan, how its chunks are stored."""

    def stored_bytes(self, plan: PackPlan) -> int:
        """Return the bytes of all its pieces as they are stored."""
        return sum(coding.starts[-1] for coding in self.codings) if plan.is_coded else plan.data_bytes


class PackWriter:
    """Writes packs through a fixed pool of buffers."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        codecs: Codecs = NO_CODECS,
    ) -> None:
        """Allocate the buffers.

        Args:
            store: Where packs go.
            settings: Sizes, and how packs are coded.
            codecs: What chunks are coded by.
        """
        self._store, self._settings = store, settings
        self._encoder = Encoder(codecs, settings)
        self._buffers = BufferPool(settings._tuning.windows_in_flight + 1, settings._tuning.window_bytes)
        self.meter: SaveMeter | None = None
        """Measures what this writer does; None: nothing does."""
        self._probe: ChunkProbe | None = None
        self.sends_whole_packs = store.traits.appears_whole
        """Whether the store gets a pack in one request, when the pack is complete."""
        self.lends_memory = store.traits.lends_memory
        """Whether copies of the state may go straight into memory of the store."""

    def sampler(self, weight_types: Mapping[str, str], codec_for: Callable[[str], str]) -> Prepare:
        """Return what codes samples as this writer codes chunks; arguments as `Encoder.sampler`."""
        return self._encoder.sampler(weight_types, codec_for)

    def measured_by(self, meter: SaveMeter, probe: ChunkProbe | None) -> PackWriter:
        """Return a writer with the same buffers that a meter measures, and that takes the samples of a probe."""
        writer = copy.copy(self)
        writer.meter, writer._probe = meter, probe
        return writer

    def measuring_save(self) -> AbstractContextManager[None]:
        """Return a block within which all packs of a save are written."""
        if self.meter is None:
            return nullcontext()
        return self.meter.saving()

    @property
    def chunk_bytes(self) -> int:
        """Raw bytes of each chunk but the last of a piece."""
        return self._settings.chunk_bytes

    def through(self, store: Store) -> PackWriter:
        """Return a writer with the same buffers that writes through another view of the store."""
        writer = copy.copy(self)
        writer._store = store
        return writer

    def write(
        self,
        pack: PlannedPack,
        sources: Sequence[Source],
        written: Callable[[int], None] | None = None,
        completions: Completions | None = None,
        weights: KnownWeights = NO_WEIGHTS,
    ) -> WrittenPack:
        """Write one pack straight from its sources and make it durable.

        Args:
            pack: The pack.
            sources: Where the bytes come from, by shard number.
            written: Called with the byte count of each window once it is written, on any thread; of a coded pack, with
                the raw bytes of chunks once they are encoded.
            completions: Makes the pack durable, perhaps later; None: it is durable on return.
            weights: Of a coded pack, the weights that its masters were perhaps rounded from.
        Raises:
            CheckpointError: The write failed; nothing of the pack is left.
        """
        if pack.plan.is_coded:
            chunks = self._encoder.from_sources(sources)
            return self._write_coded(pack, chunks, written, completions, weights)
        return self._write(pack, self._buffers, sources, written, completions)

    def write_staged(
        self,
        pack: PlannedPack,
        staging: Staging,
        written: Callable[[int], None] | None = None,
        completions: Completions | None = None,
        weights: KnownWeights = NO_WEIGHTS,
    ) -> WrittenPack:
        """Write the next staged pack and make it durable; each window returns to the arena once it is written.

        Args:
            pack: The pack.
            staging: Where its filled windows come from.
            written, completions, weights: As `write`.
        Raises:
            CheckpointError: The write failed; nothing of the pack is left.
            BaseException: The copy failed with this error.
        """
        if pack.plan.is_coded:
            chunks = self._encoder.from_staging(staging)
            return self._write_coded(pack, chunks, written, completions, weights)
        rooms = staging.rooms
        return self._write(pack, staging, None, written, completions, self.begin if rooms is None else rooms.of)

    def digests_of(self, pack: PlannedPack, sources: Sequence[Source]) -> tuple[bytes, ...]:
        """Return for each item of a pack the chunk digests of its source's current bytes."""
        with self.lent() as buffer:
            return stream(pack.header, pack.plan, Scratch(buffer), self._settings.chunk_bytes, sources)

    @contextmanager
    def lent(self) -> Iterator[memoryview]:
        """Lend a buffer to copy into for the length of a block.

        If the block raises, a device may still be copying into the buffer, so it is never lent again.
        """
        buffer = self._buffers.take()
        try:
            yield buffer
        except BaseException:
            self._buffers.quarantine_buffer(buffer)
            raise
        self._buffers.give(buffer)

    def _write(
        self,
        pack: PlannedPack,
        buffers: BufferPool | Staging,
        sources: Sequence[Source] | None,
        written: Callable[[int], None] | None,
        completions: Completions | None,
        begin: Callable[[PlannedPack], Upload] | None = None,
    ) -> WrittenPack:
        settings = self._settings
        nonfinite = NonFinite() if settings.count_nonfinite else None
        probe = None if self._probe is None else self._probe.of(pack)

        def write(upload: Upload) -> WrittenPack:
            windows = WrittenWindows(upload, pack.bytes, buffers, settings, written, meter=self.meter, probe=probe)
            with windows, nullcontext() if self.meter is None else self.meter.working():
                digests = stream(pack.header, pack.plan, windows, settings.chunk_bytes, sources, nonfinite)
                windows.close()
            return _written_plain(pack, digests, nonfinite)

        return self._upload(pack, write, completions, begin or self.begin)

    def _write_coded(
        self,
        pack: PlannedPack,
        chunks: RawChunks,
        written: Callable[[int], None] | None,
        completions: Completions | None,
        weights: KnownWeights,
    ) -> WrittenPack:
        note, start, settings = written or _ignore, pack.header_bytes, self._settings

        def write(upload: Upload) -> WrittenPack:
            # What counts as written are raw bytes: how many of them there are is known before.
            raw, meter = pack.bytes, self.meter
            with WrittenWindows(upload, raw, self._buffers, settings, lambda _: note(0), start, meter) as windows:
                pieces = self._encoder.encode(pack.plan, chunks, weights, windows.append, note, meter)
                assert pack.coded_header is not None, "a coded pack is planned with its header"
                header = pack.coded_header([piece.coding for piece in pieces], [piece.digests for piece in pieces])
                windows.close_behind(header)
            note(start)
            return _written_coded(pack, header, pieces)

        try:
            return self._upload(pack, write, completions, self.begin)
        finally:
            chunks.close()

    def begin(self, pack: PlannedPack) -> Upload:
        """Begin the upload of a pack; errors as `Store.upload`."""
        window_bytes, is_coded = self._settings._tuning.window_bytes, pack.plan.is_coded
        return self._store.upload(pack.key, pack.bytes, window_bytes, folders_durable=False, may_be_less=is_coded)

    def _upload(
        self,
        pack: PlannedPack,
        write: Callable[[Upload], WrittenPack],
        completions: Completions | None,
        begin: Callable[[PlannedPack], Upload],
    ) -> WrittenPack:
        """Begin an upload, let its parts be written, and complete it; if anything fails, nothing of it is left."""
        # A file was written window by window: to complete it later would gain nothing.
        later = completions if self.sends_whole_packs else None
        upload = begin(pack)
        try:
            result = write(upload)
            total_bytes = result.record.bytes if pack.plan.is_coded else None
            if later is None:
                with in_flight(self.meter, 0):
                    upload.complete(total_bytes)
        except BaseException:
            upload.abort()
            raise
        if later is not None:
            later.begin(upload, total_bytes)
        return result


def _written_plain(pack: PlannedPack, digests: tuple[bytes, ...], nonfinite: NonFinite | None) -> WrittenPack:
    record = FileRecord(pack.plan.name, pack.bytes, pack_digest(pack.header, b"".join(digests)))
    offsets = tuple(len(pack.header) + item.data_offset for item in pack.plan.items)
    return WrittenPack(record, digests, {} if nonfinite is None else nonfinite.counts, offsets)


def _written_coded(pack: PlannedPack, header: bytes, pieces: Sequence[EncodedPiece]) -> WrittenPack:
    starts = [0, *accumulate(piece.coding.starts[-1] for piece in pieces)]
    digests = tuple(piece.digests for piece in pieces)
    record = FileRecord(pack.plan.name, len(header) + starts[-1], pack_digest(header, b"".join(digests)))
    by_piece = zip(pack.plan.items, pieces, strict=True)
    nonfinite = {item.tensor.fqn: piece.nonfinite for item, piece in by_piece if piece.nonfinite}
    offsets = tuple(len(header) + start for start in starts[:-1])
    return WrittenPack(record, digests, nonfinite, offsets, tuple(piece.coding for piece in pieces))


def _ignore(_: int) -> None:
    """Take note of nothing."""
