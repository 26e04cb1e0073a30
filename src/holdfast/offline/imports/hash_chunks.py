"""Hashes every chunk of another system's files, reading each byte once, with several reads in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from holdfast.base.geometry.chunking import DIGEST_BYTES
from holdfast.base.ports.observer import ByteProgress, Observer
from holdfast.base.ports.packs import Packs
from holdfast.base.ports.ranges import read_range
from holdfast.core.engine.buffers import BufferPool
from holdfast.core.engine.parallel_map import ordered_parallel_map
from holdfast.core.format.digest import digest_of
from holdfast.core.format.index.columns import Ints, positions, run_starts
from holdfast.core.format.index.index import Index
from holdfast.core.format.names import file_url
from holdfast.settings import PAGE_BYTES, Settings


def digested(index: Index, packs: Packs, settings: Settings, observer: Observer | None = None) -> Index:
    """Return an index with the digests of all chunks, cut to `settings.chunk_bytes`.

    Two pieces with the same byte range, as of tied tensors, are read once.

    Args:
        index: Pieces without digests.
        packs: Locates their packs by name.
        settings: Bytes of a chunk, of a read, and reads in flight.
        observer: Receives progress.
    Raises:
        CorruptError: A file ends before a piece does.
        MissingError: A file is gone.
    """
    pieces, chunk_bytes = index.pieces, settings.chunk_bytes
    rows, row_of = np.unique(
        np.stack([pieces.packs, pieces.offsets, pieces.bytes], axis=1).reshape(-1, 3), axis=0, return_inverse=True
    )
    row_of = row_of.reshape(-1)
    run_bytes_max = max(settings._tuning.read_window_bytes, chunk_bytes)
    buffers = BufferPool(settings._tuning.windows_in_flight, run_bytes_max + PAGE_BYTES)

    def digests_of(run: _Run) -> tuple[bytes, int]:
        stored = packs(index.packs[run.pack])
        with buffers.lent() as buffer:
            data = read_range(stored.files, stored.key, run.start, run.stop, buffer)
            digests = [digest_of(data[start - run.start : stop - run.start]) for start, stop in run.chunks]
        return b"".join(digests), run.stop - run.start

    progress, row_digests = ByteProgress(int(rows[:, 2].sum()), observer), bytearray()
    for digests, count in ordered_parallel_map(digests_of, _runs(rows, chunk_bytes, run_bytes_max)):
        row_digests += digests
        progress.add(count)
    row_chunks = -(-rows[:, 2] // chunk_bytes)
    # Rows are distinct byte ranges; each piece takes the digests of its row.
    at = positions(run_starts(row_chunks), row_of)
    piece_digests = np.frombuffer(row_digests, dtype=f"V{DIGEST_BYTES}")[at]
    hashed = replace(pieces, chunks=row_chunks[row_of], digests=piece_digests.view(np.uint8).data)
    return Index(chunk_bytes, index.table, [file_url(packs(name).url) for name in index.packs], hashed)


@dataclass(slots=True)
class _Run:
    """Consecutive chunks of one file."""

    pack: int
    start: int
    stop: int
    chunks: list[tuple[int, int]] = field(default_factory=list)


def _runs(rows: Ints, chunk_bytes: int, run_bytes_max: int) -> Iterator[_Run]:
    """Yield the chunks of pieces in order, consecutive ones as one run.

    Args:
        rows: Number of the pack, offset and bytes of each piece.
        chunk_bytes: Bytes of each chunk, except the last of a piece.
        run_bytes_max: Bytes of a run, at most.
    """
    run: _Run | None = None
    for pack, offset, count in rows.tolist():
        for start in range(offset, offset + count, chunk_bytes):
            stop = min(start + chunk_bytes, offset + count)
            if run is None or run.pack != pack or run.stop != start or stop - run.start > run_bytes_max:
                if run is not None:
                    yield run
                run = _Run(pack, start, start)
            run.stop = stop
            run.chunks.append((start, stop))
    if run is not None:
        yield run
