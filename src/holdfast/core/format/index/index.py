"""The index of a checkpoint: its tensors, the pieces that store them, and the digest of each chunk.

It is columnar on storage and in memory: one array per field. Chunk offsets follow from the piece, so a chunk costs
its digest alone. A piece becomes a Python value only on request, because there may be millions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import DIGEST_BYTES
from holdfast.base.geometry.region import FlatRange, Region
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.plan import Coding, Piece
from holdfast.core.format.index.columns import Ints
from holdfast.core.format.index.pairing import pair_pieces
from holdfast.core.format.index.piece_columns import PieceColumns, PieceIntervals, PieceJoiner, in_order
from holdfast.core.format.index.tensor_table import TensorTable
from holdfast.errors import InvalidError

_FEW = 8
"""Up to this many pieces of a tensor, testing each is faster than sorting them."""

_MADE_AT_ONCE_MAX = 1 << 18
"""Up to this many pieces, an index of small tensors makes all values at the first request, which is faster."""


class Index:
    """Tensors, and their pieces in order of tensor and start, with lookup by FQN, box and pack."""

    def __init__(self, chunk_bytes: int, table: TensorTable, packs: Sequence[str], pieces: PieceColumns) -> None:
        """Take checked columns.

        Args:
            chunk_bytes: Bytes of every chunk but the last of a piece.
            table: The tensors.
            packs: Names of packs, by number.
            pieces: Pieces, in order of tensor and start.
        """
        self.chunk_bytes, self.table, self.packs, self.pieces = chunk_bytes, table, packs, pieces
        self._pieces_of: dict[str, list[Piece]] = {}
        self._nearby: dict[str, PieceIntervals] = {}

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor by FQN, ascending."""
        return self.table.specs

    def pieces_of(self, fqn: str) -> Sequence[Piece]:
        """Return the stored pieces of a tensor."""
        known = self._pieces_of.get(fqn)
        if known is not None or fqn not in self.table.specs:
            return known or ()
        if self.pieces.count > min(_MADE_AT_ONCE_MAX, _FEW * self.table.count):
            run = self._run_of(fqn)
            pieces = self._pieces_of[fqn] = self._values(self.pieces.between(*run), slice(*run))
            return pieces
        pieces, first = self._values(self.pieces, slice(None)), self._first.tolist()
        self._pieces_of = {
            name: pieces[start:stop] for name, start, stop in zip(self.table.fqns, first, first[1:], strict=False)
        }
        return self._pieces_of[fqn]

    def pieces_near(self, fqn: str, box: Box) -> Sequence[Piece]:
        """Return every piece of a tensor that overlaps a box, each once; others may be among them."""
        known = self._pieces_of.get(fqn)
        if known is not None and len(known) <= _FEW:
            return known
        if fqn not in self.table.specs:
            return ()
        first, stop = self._run_of(fqn)
        if stop - first <= _FEW:
            return self.pieces_of(fqn)
        nearby = self._nearby.get(fqn)
        if nearby is None:
            nearby = PieceIntervals(self.pieces.between(first, stop), self.table.specs[fqn].global_shape)
            self._nearby[fqn] = nearby
        numbers = first + nearby.near(box)
        return self._values(self.pieces.taken(numbers), numbers)

    def all_pieces(self) -> Iterator[Piece]:
        """Yield every piece, by FQN."""
        for fqn in self.table.fqns:
            yield from self.pieces_of(fqn)

    def pieces_in(self, pack: str) -> list[Piece]:
        """Return the pieces in a pack, by offset."""
        number = self._pack_numbers.get(pack)
        if number is None:
            return []
        order, first = self._by_pack
        numbers = order[first[number] : first[number + 1]]
        return self._values(self.pieces.taken(numbers), numbers)

    def pairs_of(self, fqn: str) -> Sequence[str]:
        """Return the FQNs of the tensors that pieces of a tensor are coded against."""
        coding = self.pieces.coding
        if coding is None or not coding.pair_fqns or fqn not in self.table.numbers:
            return ()
        first, stop = self._run_of(fqn)
        return [coding.pair_fqns[number - 1] for number in np.unique(coding.pairs[first:stop]).tolist() if number]

    @cached_property
    def bytes_by_pack(self) -> Mapping[str, int]:
        """Stored bytes of the pieces in each pack, by pack name; bytes that two pieces share count twice."""
        totals = np.zeros(len(self.packs), dtype=np.int64)
        np.add.at(totals, self.pieces.packs, self.pieces.stored)
        return dict(zip(self.packs, totals.tolist(), strict=True))

    @cached_property
    def pair_pieces(self) -> Ints:
        """For each piece the number of the piece that it is coded against; negative if there is none."""
        return pair_pieces(self.table, self.pieces)

    @cached_property
    def _first(self) -> Ints:
        """Number of the first piece of each tensor, and one past the last piece; shape (tensors + 1,)."""
        return np.searchsorted(self.pieces.tensors, np.arange(self.table.count + 1))

    @cached_property
    def _pack_numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.packs)}

    @cached_property
    def _by_pack(self) -> tuple[Ints, Ints]:
        """The numbers of all pieces by pack and offset, and the start of each pack among them."""
        order = np.lexsort((self.pieces.stored, self.pieces.offsets, self.pieces.packs))
        return order, np.searchsorted(self.pieces.packs[order], np.arange(len(self.packs) + 1))

    @cached_property
    def _specs(self) -> list[TensorSpec]:
        return list(self.table.specs.values())

    def _run_of(self, fqn: str) -> tuple[int, int]:
        number = self.table.numbers[fqn]
        return int(self._first[number]), int(self._first[number + 1])

    def _values(self, pieces: PieceColumns, numbers: Ints | slice) -> list[Piece]:
        """Return pieces as Python values.

        Args:
            pieces: The pieces.
            numbers: Their numbers in the index.
        """
        codings = None
        if pieces.coding is not None and pieces.coding.coded.any():
            codings = pieces.coding.values(self._pairs(self.pair_pieces[numbers]))
        return self._plain_values(pieces, codings)

    def _pairs(self, numbers: Ints) -> list[Piece | None]:
        """Return the pieces with these numbers, which others are coded against; None for a negative number."""
        chosen, places = np.unique(numbers, return_inverse=True)
        known = chosen[chosen >= 0]
        pieces = self.pieces.taken(known)
        # Nothing is coded against what is coded against something, so these have no pairs of their own.
        codings = None if pieces.coding is None else pieces.coding.values([None] * len(known))
        values: list[Piece | None] = [None] * (len(chosen) - len(known))
        values += self._plain_values(pieces, codings)
        return [values[place] for place in places.tolist()]

    def _plain_values(self, pieces: PieceColumns, codings: Sequence[Coding | None] | None) -> list[Piece]:
        specs, packs, digests = self._specs, self.packs, bytes(pieces.digests)
        starts, stops = pieces.starts.tolist(), pieces.stops.tolist()
        values: list[Piece] = []
        at = digest_at = 0
        for number, pack, offset, flat, width, chunks in zip(
            pieces.tensors.tolist(),
            pieces.packs.tolist(),
            pieces.offsets.tolist(),
            pieces.flat.tolist(),
            pieces.widths.tolist(),
            pieces.chunks.tolist(),
            strict=True,
        ):
            tensor = specs[number]
            start, stop = tuple(starts[at : at + width]), tuple(stops[at : at + width])
            at += width
            if flat:
                region: Region = FlatRange(start[0], stop[0])
            elif stop == tensor.global_shape and not any(start):
                region = Box.whole(stop)  # Shared by all tensors of its shape.
            else:
                region = Box(start, stop)
            digest_stop = digest_at + DIGEST_BYTES * chunks
            coding = codings[len(values)] if codings else None
            piece_digests = digests[digest_at:digest_stop]
            values.append(Piece(tensor, region, packs[pack], offset, piece_digests, self.chunk_bytes, coding))
            digest_at = digest_stop
        return values

    def __eq__(self, other: object) -> bool:
        """Return whether another index has equal tensors and pieces."""
        if not isinstance(other, Index):
            return NotImplemented
        return (
            self.chunk_bytes == other.chunk_bytes
            and self.tensors == other.tensors
            and list(self.all_pieces()) == list(other.all_pieces())
        )

    __hash__ = None  # type: ignore[assignment]


class IndexMerger:
    """Merges indexes: `add` each, then `merged`."""

    def __init__(self, chunk_bytes: int, table: TensorTable | None = None) -> None:
        """Begin with no pieces.

        Args:
            chunk_bytes: The chunk size that every index must have.
            table: Tensors to list even without a piece.
        """
        self._chunk_bytes = chunk_bytes
        self._tensors: dict[str, TensorSpec] = {}
        self._numbers: dict[str, int] = {}
        self._packs: dict[str, int] = {}
        self._tables: dict[int, tuple[TensorTable, Ints]] = {}
        self._pieces = PieceJoiner()
        if table is not None:
            self._number(table, "")

    def add(self, index: Index, where: str) -> None:
        """Add the tensors and pieces of an index.

        Raises:
            InvalidError: It has another chunk size, or another dtype or shape of a tensor.
        """
        if index.chunk_bytes != self._chunk_bytes:
            raise InvalidError(
                f"{where}: chunk_bytes={index.chunk_bytes}; expected {self._chunk_bytes}, as on other "
                "ranks. Use one chunk size on all ranks"
            )
        numbers = self._number(index.table, where)
        packs = [self._packs.setdefault(name, len(self._packs)) for name in index.packs]
        pieces = index.pieces
        self._pieces.add(
            replace(pieces, tensors=numbers[pieces.tensors], packs=np.array(packs, dtype=np.int64)[pieces.packs])
        )

    def _number(self, table: TensorTable, where: str) -> Ints:
        """Return the merged number of each tensor of a table; cached, because thousands of ranks share few tables."""
        known = self._tables.get(id(table))
        if known is None:
            if not self._tables:
                # The first table keeps its numbers, so a job with one table never looks up a name.
                numbers = np.arange(table.count)
            else:
                self._register_first()
                for fqn, dtype, shape in table.rows():
                    spec = self._tensors.get(fqn)
                    # Make a spec only of a new or different tensor: thousands of tables repeat the same tensors.
                    if spec is None or spec.dtype != dtype or spec.global_shape != shape:
                        register_tensor(self._tensors, TensorSpec(fqn, dtype, shape), where)
                merged_numbers = [self._numbers.setdefault(fqn, len(self._numbers)) for fqn in table.fqns]
                numbers = np.array(merged_numbers, dtype=np.int64)
            known = self._tables[id(table)] = table, numbers
        return known[1]

    def _register_first(self) -> None:
        """Register the tensors of the first table when a second table comes."""
        if len(self._tables) == 1:
            ((first, _),) = self._tables.values()
            self._tensors.update(first.specs)
            self._numbers.update(first.numbers)

    def merged(self) -> Index:
        """Return the merged index. Nothing can be added afterwards."""
        if len(self._tables) == 1:
            ((whole, number_of),) = self._tables.values()
        else:
            whole = TensorTable.of(self._tensors.values())
            number_of = np.fromiter(map(whole.numbers.__getitem__, self._numbers), np.int64, len(self._numbers))
        columns = self._pieces.columns()
        columns["tensors"] = number_of[columns["tensors"]]
        return Index(self._chunk_bytes, whole, list(self._packs), in_order(columns))


def register_tensor(tensors: dict[str, TensorSpec], tensor: TensorSpec, where: str) -> None:
    """Add a tensor to `tensors`.

    Raises:
        InvalidError: It is registered with another dtype or shape.
    """
    known = tensors.setdefault(tensor.fqn, tensor)
    # Compare two fields, not the objects: cached plans hold equal but distinct specs, and there may be 100,000.
    if known is not tensor and (known.dtype != tensor.dtype or known.global_shape != tensor.global_shape):
        raise InvalidError(
            f"{where}: {tensor.fqn} is {tensor.dtype} {list(tensor.global_shape)} here and "
            f"{known.dtype} {list(known.global_shape)} on another rank. Rename one of them"
        )
