"""The index: which tensors there are, which pieces they are stored as, what each chunk hashes to.

Columnar on storage and in memory, one packed array per field. Chunk offsets follow from the piece, so a chunk costs
its digest alone, and a piece becomes a Python value only when somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from holdfast.errors import InvalidError
from holdfast.format.index.columns import Ints
from holdfast.format.index.piece_columns import PieceColumns, joined
from holdfast.format.index.piece_lookup import PieceIntervals
from holdfast.format.index.tensor_table import TensorTable
from holdfast.geometry.box import Box
from holdfast.geometry.chunking import DIGEST_BYTES
from holdfast.geometry.region import FlatRange, Region
from holdfast.geometry.tensor import TensorSpec
from holdfast.types.plan import Piece

_FEW = 8
"""Pieces of a tensor that are sooner asked one by one than put in order."""

_MADE_AT_ONCE_MAX = 1 << 18
"""Pieces of an index of small tensors that become values all at once when the first is asked for, which is faster."""

_JOINED_AT_ONCE = 256
"""Indexes of which the pieces are moved together while more are added: freed one by one, small columns leave holes that
no large one fits into."""


class Index:
    """Tensors and pieces, by tensor and by where they start in it, with lookup by FQN."""

    def __init__(self, chunk_bytes: int, table: TensorTable, packs: Sequence[str], pieces: PieceColumns) -> None:
        """Hold columns that have been checked.

        Args:
            chunk_bytes: Bytes of every chunk but the last of a piece.
            table: The tensors.
            packs: Names of packs, by number.
            pieces: Pieces, by tensor.
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
        found = self._pieces_of.get(fqn)
        if found is not None or fqn not in self.table.specs:
            return found or ()
        if self.pieces.count > min(_MADE_AT_ONCE_MAX, _FEW * self.table.count):
            made = self._pieces_of[fqn] = self._made(self.pieces.between(*self._run_of(fqn)))
            return made
        pieces, first = self._made(self.pieces), self._first.tolist()
        self._pieces_of = {
            each: pieces[begin:end] for each, begin, end in zip(self.table.fqns, first, first[1:], strict=False)
        }
        return self._pieces_of[fqn]

    def pieces_near(self, fqn: str, box: Box) -> Sequence[Piece]:
        """Return pieces of a tensor among which are all that share an element with a box, each once."""
        if fqn not in self.table.specs:
            return ()
        if fqn in self._pieces_of and len(self._pieces_of[fqn]) <= _FEW:
            return self._pieces_of[fqn]
        first, stop = self._run_of(fqn)
        if stop - first <= _FEW:
            return self.pieces_of(fqn)
        nearby = self._nearby.get(fqn)
        if nearby is None:
            nearby = PieceIntervals(self.pieces.between(first, stop), self.table.specs[fqn].global_shape)
            self._nearby[fqn] = nearby
        return self._made(self.pieces.taken(first + nearby.near(box)))

    def all_pieces(self) -> Iterator[Piece]:
        """Yield every piece, by FQN."""
        for fqn in self.table.fqns:
            yield from self.pieces_of(fqn)

    def pieces_in(self, pack: str) -> list[Piece]:
        """Return the pieces that lie in a pack, by offset."""
        number = self._pack_numbers.get(pack)
        if number is None:
            return []
        order, first = self._by_pack
        return self._made(self.pieces.taken(order[first[number] : first[number + 1]]))

    @cached_property
    def bytes_by_pack(self) -> Mapping[str, int]:
        """Bytes of the pieces in each pack, by its name; bytes that two pieces share count twice."""
        found = np.zeros(len(self.packs), dtype=np.int64)
        np.add.at(found, self.pieces.packs, self.pieces.bytes)
        return dict(zip(self.packs, found.tolist(), strict=True))

    @cached_property
    def _first(self) -> Ints:
        """For each tensor, and one past the last: number of its first piece."""
        return np.searchsorted(self.pieces.tensors, np.arange(self.table.count + 1))

    @cached_property
    def _pack_numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.packs)}

    @cached_property
    def _by_pack(self) -> tuple[Ints, Ints]:
        """The numbers of all pieces by pack and offset, and where each pack begins among them."""
        order = np.lexsort((self.pieces.bytes, self.pieces.offsets, self.pieces.packs))
        return order, np.searchsorted(self.pieces.packs[order], np.arange(len(self.packs) + 1))

    @cached_property
    def _specs(self) -> list[TensorSpec]:
        return list(self.table.specs.values())

    def _run_of(self, fqn: str) -> tuple[int, int]:
        number = self.table.numbers[fqn]
        return int(self._first[number]), int(self._first[number + 1])

    def _made(self, pieces: PieceColumns) -> list[Piece]:
        """Return pieces as values."""
        specs, packs, digests = self._specs, self.packs, bytes(pieces.digests)
        starts, stops = pieces.starts.tolist(), pieces.stops.tolist()
        made = []
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
            made.append(Piece(tensor, region, packs[pack], offset, digests[digest_at:digest_stop], self.chunk_bytes))
            digest_at = digest_stop
        return made

    def __eq__(self, other: object) -> bool:
        """Return whether another index lists the same."""
        if not isinstance(other, Index):
            return NotImplemented
        return (
            self.chunk_bytes == other.chunk_bytes
            and self.tensors == other.tensors
            and list(self.all_pieces()) == list(other.all_pieces())
        )

    __hash__ = None  # type: ignore[assignment]


class IndexMerger:
    """Indexes on their way to becoming one."""

    def __init__(self, chunk_bytes: int, table: TensorTable | None = None) -> None:
        """Begin with no piece.

        Args:
            chunk_bytes: What all of them must cut chunks to.
            table: Tensors to be listed whether or not a piece of them is.
        """
        self._chunk_bytes = chunk_bytes
        self._tensors: dict[str, TensorSpec] = {}
        self._numbers: dict[str, int] = {}
        self._packs: dict[str, int] = {}
        self._tables: dict[int, tuple[TensorTable, Ints]] = {}
        self._blocks: list[PieceColumns] = []
        self._parts: list[PieceColumns] = []
        if table is not None:
            self._number(table, "")

    def add(self, index: Index, where: str) -> None:
        """Add everything an index lists.

        Raises:
            InvalidError: It cuts chunks differently, or describes a tensor differently than another.
        """
        if index.chunk_bytes != self._chunk_bytes:
            raise InvalidError(f"{where}: chunk_bytes={index.chunk_bytes}; expected {self._chunk_bytes} as elsewhere")
        numbers = self._number(index.table, where)
        packs = [self._packs.setdefault(name, len(self._packs)) for name in index.packs]
        pieces = index.pieces
        self._parts.append(
            replace(pieces, tensors=numbers[pieces.tensors], packs=np.array(packs, dtype=np.int64)[pieces.packs])
        )
        if len(self._parts) == _JOINED_AT_ONCE:
            self._blocks.append(joined(self._parts))
            self._parts.clear()

    def _number(self, table: TensorTable, where: str) -> Ints:
        """Return the number here of each tensor of a table; thousands of ranks share a few tables."""
        known = self._tables.get(id(table))
        if known is None:
            if not self._tables:
                # As they are: until another table comes, nothing need be looked up.
                numbers = np.arange(table.count)
            else:
                self._look_up_first()
                for tensor in table.specs.values():
                    register_tensor(self._tensors, tensor, where)
                found = [self._numbers.setdefault(fqn, len(self._numbers)) for fqn in table.fqns]
                numbers = np.array(found, dtype=np.int64)
            known = self._tables[id(table)] = table, numbers
        return known[1]

    def _look_up_first(self) -> None:
        """Know the tensors of the first table, if they are not known yet."""
        if len(self._tables) == 1:
            ((first, _),) = self._tables.values()
            self._tensors.update(first.specs)
            self._numbers.update(first.numbers)

    def merged(self) -> Index:
        """Return all as one; nothing can be added any more."""
        if len(self._tables) == 1:
            ((whole, number_of),) = self._tables.values()
        else:
            whole = TensorTable.of(self._tensors.values())
            number_of = np.fromiter(map(whole.numbers.__getitem__, self._numbers), np.int64, len(self._numbers))
        parts = [*self._blocks, *self._parts]
        self._blocks.clear()
        self._parts.clear()
        pieces = joined(parts)
        parts.clear()  # Millions of pieces twice are enough.
        pieces = replace(pieces, tensors=number_of[pieces.tensors])
        return Index(self._chunk_bytes, whole, list(self._packs), in_order(pieces))


def in_order(pieces: PieceColumns) -> PieceColumns:
    """Return pieces by tensor and by where they start in it."""
    order = pieces.order()
    return pieces if bool((order[1:] > order[:-1]).all()) else pieces.taken(order)


def register_tensor(tensors: dict[str, TensorSpec], tensor: TensorSpec, where: str) -> None:
    """Note a tensor.

    Raises:
        InvalidError: It is known with another dtype or shape.
    """
    known = tensors.setdefault(tensor.fqn, tensor)
    # Not as wholes: the one plan of many saves holds other values than each of these, a hundred thousand perhaps.
    if known is not tensor and (known.dtype != tensor.dtype or known.global_shape != tensor.global_shape):
        raise InvalidError(
            f"{where}: {tensor.fqn} is {tensor.dtype} {list(tensor.global_shape)} here and "
            f"{known.dtype} {list(known.global_shape)} on another rank; expected one tensor"
        )
