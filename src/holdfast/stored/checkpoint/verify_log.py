"""Verification of redo logs: reads every byte of their segments, and lists the damage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.base.geometry.chunking import DIGEST_BYTES
from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.observer import ByteProgress, Observer
from holdfast.base.ports.packs import Stored, packs_under
from holdfast.base.ports.store import Store
from holdfast.base.types.plan import Piece
from holdfast.core.engine.decoding.chunk_reader import ChunkReader, refutation
from holdfast.errors import CorruptError, MissingError
from holdfast.stored.checkpoint.verify import Damage
from holdfast.stored.repository.logs import RunLog, Segment, TornSegment, records_in


class LogVerification:
    """Reads every byte of the segments of redo logs."""

    def __init__(self, logs: Sequence[RunLog], codecs: Codecs, observer: Observer | None = None) -> None:
        """Prepare; `damages` does the work.

        Args:
            logs: The logs, as `list_steps` returns them.
            codecs: What decodes compressed gradients.
            observer: Receives progress.
        """
        self._codecs = codecs
        # The log after a base holds the log after a newer base: each segment is read once.
        self._segments = {segment.key: (log.store, segment) for log in logs for segment in log.segments}
        self._lasts: dict[tuple[str, int], int] = {}
        for _, segment in self._segments.values():
            of_rank = segment.log, segment.rank
            self._lasts[of_rank] = max(segment.first, self._lasts.get(of_rank, 0))
        self._progress = ByteProgress(self.total_bytes, observer)
        self.torn: list[str] = []
        """Keys of the last segments of ranks that end early: a killed run never sealed them. They are no damage."""

    @property
    def total_bytes(self) -> int:
        """Bytes to read."""
        return sum(segment.bytes for _, segment in self._segments.values())

    @property
    def segments(self) -> int:
        """Number of segments."""
        return len(self._segments)

    def damages(self) -> Iterator[Damage]:
        """Yield everything that is damaged, by segment.

        Raises:
            UnavailableError: The store failed.
        """
        for store, segment in self._segments.values():
            yield from self._damages_of(store, segment)
            self._progress.add(segment.bytes)

    def _damages_of(self, store: Store, segment: Segment) -> Iterator[Damage]:
        try:
            records = records_in(store, segment)
        except MissingError:
            return  # A collection has removed the segment meanwhile.
        except CorruptError as error:
            is_last = segment.first == self._lasts[segment.log, segment.rank]
            if is_last and isinstance(error, TornSegment):
                self.torn.append(segment.key)
            else:
                yield Damage(segment.key, None, None, None, f"rank {segment.rank}: {error}")
            return
        stored = Stored(store, segment.key)
        named = [(step, *item) for step, record in records.items() for item in record.pieces.items()]
        pieces = [(step, name, piece) for step, name, found in named for piece in found]
        largest = max((piece.chunk_bytes for _, _, piece in pieces), default=1)
        chunks = ChunkReader(packs_under(store, ""), self._codecs, largest)
        for step, name, piece in pieces:
            for start, stop, message in _refuted(chunks, piece, stored):
                yield Damage(segment.key, start, stop, name, f"rank {segment.rank}, record of step {step}: {message}")


def _refuted(chunks: ChunkReader, piece: Piece, stored: Stored) -> Iterator[tuple[int, int, str]]:
    for number in range(len(piece.digests) // DIGEST_BYTES):
        # A network may flip a bit on the way: the second read decides.
        message = refutation(chunks, piece, number, stored) and refutation(chunks, piece, number, stored)
        if message:
            yield *piece.stored_range(number), message
