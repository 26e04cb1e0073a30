"""How pieces are coded, as columns beside those of `PieceColumns`. An index without coded pieces has none."""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from holdfast.base.types.plan import Coding, Piece
from holdfast.core.format.codec_names import needs_pair, used_codecs
from holdfast.core.format.index.columns import Ints, run_starts, runs_taken

Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class CodingColumns:
    """Columns with one entry for each piece, or for each chunk of each coded piece."""

    codecs: tuple[str, ...]
    """Names of codecs, by number."""

    pair_fqns: tuple[str, ...]
    """Names of paired tensors, by number. They are names, because another index file may list the tensor."""

    coded: Bools
    """Whether a piece is coded; shape (pieces,)."""

    pairs: Ints
    """0 for a piece that is coded against nothing, else the number of its paired tensor, from 1 on; shape (pieces,)."""

    chunks: Ints
    """Number of its chunks; 0 for a piece that is not coded; shape (pieces,)."""

    numbers: NDArray[np.uint8]
    """0 for a chunk that is stored raw, else the number of its codec, from 1 on; piece after piece."""

    lengths: NDArray[np.uint32]
    """Stored bytes of each chunk, piece after piece."""

    @cached_property
    def first_chunk(self) -> Ints:
        """Number of each piece's first chunk in `numbers` and `lengths`, and one past the last."""
        return run_starts(self.chunks)

    @cached_property
    def stored(self) -> Ints:
        """Stored bytes of each piece; 0 for a piece that is not coded."""
        sums = run_starts(self.lengths.astype(np.int64))
        return sums[self.first_chunk[1:]] - sums[self.first_chunk[:-1]]

    def paired_chunks(self) -> Bools:
        """Return which chunks are coded against a pair."""
        return np.array([False, *map(needs_pair, self.codecs)], dtype=bool)[self.numbers]

    def taken(self, numbers: Ints) -> CodingColumns:
        """Return the columns of the pieces with these numbers, in this order."""
        return replace(
            self,
            coded=self.coded[numbers],
            pairs=self.pairs[numbers],
            chunks=self.chunks[numbers],
            numbers=runs_taken(self.numbers, self.first_chunk, numbers),
            lengths=runs_taken(self.lengths, self.first_chunk, numbers),
        )

    def between(self, first: int, stop: int) -> CodingColumns:
        """Return the columns of a half-open run of pieces, without a copy."""
        pieces, chunks = slice(first, stop), slice(int(self.first_chunk[first]), int(self.first_chunk[stop]))
        return replace(
            self,
            coded=self.coded[pieces],
            pairs=self.pairs[pieces],
            chunks=self.chunks[pieces],
            numbers=self.numbers[chunks],
            lengths=self.lengths[chunks],
        )

    def values(self, pairs: list[Piece | None]) -> list[Coding | None]:
        """Return the coding of each piece as a Python value; None for one that is not coded.

        Args:
            pairs: The piece that each piece is coded against, if there is one.
        """
        first, numbers = self.first_chunk.tolist(), self.numbers.tobytes()
        ends = np.cumsum(self.lengths, dtype=np.int64)
        ends -= np.repeat(run_starts(self.lengths.astype(np.int64))[self.first_chunk[:-1]], self.chunks)
        stops = ends.tolist()
        values: list[Coding | None] = []
        for at, (is_coded, pair_number, pair) in enumerate(
            zip(self.coded.tolist(), self.pairs.tolist(), pairs, strict=True)
        ):
            if not is_coded:
                values.append(None)
                continue
            chunks = slice(first[at], first[at + 1])
            codecs, used = used_codecs(self.codecs, numbers[chunks])
            pair_fqn = self.pair_fqns[pair_number - 1] if pair_number else ""
            values.append(Coding(codecs, used, (0, *stops[chunks]), pair_fqn, pair))
        return values


class CodingJoiner:
    """Joins the columns of several indexes, or of single pieces. Nothing is kept while no piece is coded."""

    def __init__(self) -> None:
        """Begin with no pieces."""
        self._codecs: dict[str, int] = {}
        self._pair_fqns: dict[str, int] = {}
        self._plain = 0
        """Pieces so far, none of them coded."""
        self._columns: dict[str, bytearray] = {}

    def add(self, count: int, coding: CodingColumns | None) -> None:
        """Append the columns of so many pieces; None if none of them is coded."""
        if coding is None:
            self._add_plain(count)
            return
        columns = self._begun()
        codecs = [0, *(self._codecs.setdefault(name, len(self._codecs) + 1) for name in coding.codecs)]
        pairs = [0, *(self._pair_fqns.setdefault(fqn, len(self._pair_fqns) + 1) for fqn in coding.pair_fqns)]
        columns["coded"].extend(np.ascontiguousarray(coding.coded).data)
        columns["pairs"].extend(np.array(pairs, dtype=np.int64)[coding.pairs].data)
        columns["chunks"].extend(np.ascontiguousarray(coding.chunks).data)
        columns["numbers"].extend(np.array(codecs, dtype=np.uint8)[coding.numbers].data)
        columns["lengths"].extend(np.ascontiguousarray(coding.lengths).data)

    def add_piece(self, coding: Coding | None) -> None:
        """Append one piece."""
        if coding is None:
            self._add_plain(1)
            return
        names, numbers = used_codecs(coding.codecs, coding.numbers)
        is_paired = any(map(needs_pair, names))
        # Bytes and no arrays: a rank may write tens of thousands of pieces, most of one chunk.
        columns = self._begun()
        table = bytes([0, *(self._codecs.setdefault(name, len(self._codecs) + 1) for name in names)])
        pair = self._pair_fqns.setdefault(coding.pair_fqn, len(self._pair_fqns) + 1) if is_paired else 0
        lengths = [stop - start for start, stop in pairwise(coding.starts)]
        columns["coded"].append(1)
        columns["pairs"].extend(pair.to_bytes(8, sys.byteorder))
        columns["chunks"].extend(len(numbers).to_bytes(8, sys.byteorder))
        columns["numbers"].extend(numbers.translate(table.ljust(256, b"\0")))
        columns["lengths"].extend(struct.pack(f"={len(lengths)}I", *lengths))

    def columns(self) -> CodingColumns | None:
        """Return the columns of all pieces; None if none is coded. Nothing can be added afterwards."""
        if not self._columns:
            return None
        columns, self._columns = self._columns, {}
        return CodingColumns(
            codecs=tuple(self._codecs),
            pair_fqns=tuple(self._pair_fqns),
            coded=np.frombuffer(columns["coded"], bool),
            pairs=np.frombuffer(columns["pairs"], np.int64),
            chunks=np.frombuffer(columns["chunks"], np.int64),
            numbers=np.frombuffer(columns["numbers"], np.uint8),
            lengths=np.frombuffer(columns["lengths"], np.uint32),
        )

    def _begun(self) -> dict[str, bytearray]:
        if not self._columns:
            self._columns = {name: bytearray() for name in ("coded", "pairs", "chunks", "numbers", "lengths")}
            self._add_plain(self._plain)
        return self._columns

    def _add_plain(self, count: int) -> None:
        if not self._columns:
            self._plain += count
            return
        for name, width in (("coded", 1), ("pairs", 8), ("chunks", 8)):
            self._columns[name].extend(bytes(width * count))
