"""Decides in which pack, and at which offset, each piece is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import chunk_count
from holdfast.base.geometry.dtype import DTYPES, WEIGHT_TYPES
from holdfast.base.geometry.tensor import Shard, TensorSpec
from holdfast.base.types.plan import CODED_FOLDER, OPAQUE_FOLDER, PackItem, PackPlan
from holdfast.core.plan.coding.coded_pieces import CodingChoice
from holdfast.core.plan.ownership import Owned
from holdfast.errors import InvalidError
from holdfast.settings import PAGE_BYTES

_ENTRY_BYTES = 160
"""Upper bound of a header entry without its FQN and numbers, including the sharding note for other readers."""

_CHARACTER_BYTES = 32
"""Upper bound of one character of an FQN in a header, which holds the FQN three times: once as UTF-8 (4 bytes), twice
in JSON inside JSON, where a character beyond ASCII takes two escapes of seven bytes."""

_CODED_ENTRY_BYTES, _CODED_CHUNK_BYTES = 160, 12
"""Upper bounds of what the header of a coded pack has more, for a piece without the name of its pair, and a chunk."""

_ELEMENT_BYTES_MAX = max(dtype.itemsize for dtype in DTYPES.values())

_OPEN_MAX = 16
"""Packs that may still take a piece, while pieces are given to packs."""


@dataclass(frozen=True, slots=True)
class PackSizes:
    """Sizes of the packs of a store of objects."""

    full_bytes: int
    """Bytes of pieces from which on a pack takes no more; it has at most twice as many, or one piece."""

    bytes_max: int
    """Bytes of a pack at most, header included."""

    cell_elements: int
    """Elements at which tensors are cut (`grid.py`)."""


def cell_elements_max(pack_bytes_max: int) -> int:
    """Return the elements of a piece of any dtype that fits a pack, with a header of the same size."""
    return max(pack_bytes_max // (2 * _ELEMENT_BYTES_MAX), 1)


def packs_of(
    rank: int,
    shards: Sequence[Shard],
    owned: Sequence[Owned],
    header_bytes_max: int,
    sizes: PackSizes | None = None,
    coding: CodingChoice | None = None,
) -> list[PackPlan]:
    """Return the packs of everything a rank writes, their pieces in file order.

    Coded pieces go to packs of their own, behind all others. Those of 16 bits come first: a master is coded against its
    weight.

    Pieces whose size is a multiple of a page come first. The header is padded to pages, so these pieces start on page
    boundaries and can be read directly, without a copy. The other pieces follow by descending element size, so every
    element is aligned. A pack holds an FQN once, because a safetensors file has each key once. Flat ranges and dtypes
    that safetensors lacks go to packs of their own, because stock readers cannot interpret them.

    Args:
        rank: This rank.
        shards: Its shards.
        owned: What it writes of them.
        header_bytes_max: Bytes of the header of a pack with more than one piece.
        sizes: Sizes of packs; None: packs have any size.
        coding: Which pieces are coded; None: none.
    Raises:
        InvalidError: One piece alone exceeds the largest pack.
    """
    readable: list[Owned] = []
    opaque: list[Owned] = []
    coded: tuple[list[Owned], list[Owned]] = ([], [])
    for part in owned:
        shard = shards[part.shard_number]
        if coding is not None and coding.codec(shard, part.region):
            coded[shard.tensor.dtype not in WEIGHT_TYPES].append(part)
        else:
            (readable if _is_readable(shard, part) else opaque).append(part)
    return [
        *_packs(f"r{rank:05d}", shards, _filled(shards, readable, header_bytes_max, sizes)),
        *_packs(f"{OPAQUE_FOLDER}r{rank:05d}", shards, _filled(shards, opaque, header_bytes_max, sizes)),
        *_packs(
            f"{CODED_FOLDER}r{rank:05d}",
            shards,
            [pack for alike in coded for pack in _filled(shards, alike, header_bytes_max, sizes, coding)],
            coding,
        ),
    ]


def without(pack: PackPlan, fqns: Collection[str]) -> PackPlan:
    """Return a pack without the pieces of some tensors; the others keep their order and close the gaps."""
    kept, offset = [], 0
    for item in pack.items:
        if item.tensor.fqn not in fqns:
            kept.append(PackItem(item.tensor, item.region, offset, item.shard_number, item.codec))
            offset += item.bytes
    return PackPlan(pack.name, tuple(kept))


def _is_readable(shard: Shard, owned: Owned) -> bool:
    """Return whether stock safetensors readers can interpret a piece."""
    return isinstance(owned.region, Box) and bool(DTYPES[shard.tensor.dtype].safetensors)


class _Filling:
    """A pack that is being filled."""

    def __init__(self, header_bytes_max: int, sizes: PackSizes | None, coding: CodingChoice | None = None) -> None:
        self._header_bytes_max, self._sizes, self._coding = header_bytes_max, sizes, coding
        self._header_bytes, self._data_bytes = PAGE_BYTES, 0
        self._fqns: set[str] = set()
        self.owned: list[Owned] = []

    @property
    def is_full(self) -> bool:
        return self._sizes is not None and self._data_bytes >= self._sizes.full_bytes

    def takes(self, part: Owned, tensor: TensorSpec) -> bool:
        """Add a piece, unless it has no place here."""
        if tensor.fqn in self._fqns:
            return False
        name_bytes = (3 if _written_as_is(tensor.fqn) else _CHARACTER_BYTES) * len(tensor.fqn)
        header_bytes = self._header_bytes + _ENTRY_BYTES + name_bytes + 66 * len(tensor.global_shape)
        piece_bytes = part.region.numel * tensor.itemsize
        data_bytes = self._data_bytes + piece_bytes
        if self._coding is not None:
            chunks = chunk_count(piece_bytes, self._coding.chunk_bytes)
            # The name of its pair is as long as any: no more than a name of the state, on average.
            header_bytes += _CODED_ENTRY_BYTES + name_bytes + _CODED_CHUNK_BYTES * chunks
        if self._sizes is not None and _whole_pages(header_bytes) + data_bytes > self._sizes.bytes_max:
            if not self.owned:
                raise _too_large(tensor, data_bytes, self._sizes.bytes_max)
            return False
        if self.owned and (
            header_bytes > self._header_bytes_max
            or (self._sizes is not None and data_bytes > 2 * self._sizes.full_bytes)
        ):
            return False
        self._fqns.add(tensor.fqn)
        self._header_bytes, self._data_bytes = header_bytes, data_bytes
        self.owned.append(part)
        return True


def _packs(
    stem: str, shards: Sequence[Shard], packs: Sequence[Sequence[Owned]], coding: CodingChoice | None = None
) -> list[PackPlan]:
    """Return packs named `stem`, `stem-1`, `stem-2` and so on."""
    return [
        PackPlan(f"{stem}{f'-{number}' if number else ''}.safetensors", _in_file_order(shards, pack, coding))
        for number, pack in enumerate(packs)
    ]


def _filled(
    shards: Sequence[Shard],
    owned: Sequence[Owned],
    header_bytes_max: int,
    sizes: PackSizes | None,
    coding: CodingChoice | None = None,
) -> list[list[Owned]]:
    """Return the pieces of each pack.

    A piece goes to the first open pack that takes it. Where packs have a size, the first pieces of all tensors come
    first, then the second ones, so that packs are filled although each holds an FQN once. Only the packs that were
    opened last stay open: the time of a plan must not grow with the square of their number.
    """
    packs: list[_Filling] = []
    opened: list[_Filling] = []
    for part in owned if sizes is None else _in_turn(owned):
        tensor = shards[part.shard_number].tensor
        into = next((pack for pack in opened if pack.takes(part, tensor)), None)
        if into is None:
            into = _Filling(header_bytes_max, sizes, coding)
            into.takes(part, tensor)
            packs.append(into)
            opened.append(into)
            if sizes is not None:
                del opened[:-_OPEN_MAX]
        if into.is_full:
            opened.remove(into)
    return [pack.owned for pack in packs]


def _in_turn(owned: Sequence[Owned]) -> list[Owned]:
    """Return the first piece of each shard, then the second one of each, and so on."""
    turns = Counter[int]()
    turn_of = []
    for part in owned:
        turn_of.append(turns[part.shard_number])
        turns[part.shard_number] += 1
    return [owned[number] for number in sorted(range(len(owned)), key=turn_of.__getitem__)]


def _whole_pages(count: int) -> int:
    return -(-count // PAGE_BYTES) * PAGE_BYTES


def _too_large(tensor: TensorSpec, piece_bytes: int, pack_bytes_max: int) -> InvalidError:
    return InvalidError(
        f"{tensor.fqn}: one piece of {piece_bytes} bytes; expected at most {pack_bytes_max} bytes with the header "
        "of its pack, the largest object of this store. Shard the tensor over more ranks, or save to another store"
    )


def _written_as_is(fqn: str) -> bool:
    """Return whether JSON writes an FQN without escapes; nearly every FQN is like this."""
    return fqn.isascii() and fqn.isprintable() and '"' not in fqn and "\\" not in fqn


def _in_file_order(
    shards: Sequence[Shard], owned: Sequence[Owned], coding: CodingChoice | None
) -> tuple[PackItem, ...]:
    def order(part: Owned) -> tuple[bool, int, str]:
        tensor = shards[part.shard_number].tensor
        piece_bytes = part.region.numel * tensor.itemsize
        return piece_bytes % PAGE_BYTES != 0 or piece_bytes == 0, -tensor.itemsize, tensor.fqn

    items = []
    offset = 0
    for part in sorted(owned, key=order):
        shard = shards[part.shard_number]
        codec = "" if coding is None else coding.codec(shard, part.region)
        item = PackItem(shard.tensor, part.region, offset, part.shard_number, codec)
        items.append(item)
        offset += item.bytes
    return tuple(items)
