"""Which piece lies where in which pack."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from holdfast.geometry.box import Box
from holdfast.geometry.dtype import DTYPES
from holdfast.geometry.tensor import Shard
from holdfast.plan.ownership import Owned
from holdfast.settings import PAGE_BYTES
from holdfast.types.plan import OPAQUE_FOLDER, PackItem, PackPlan

_ENTRY_BYTES = 160
"""Upper bound of a header entry without its FQN and numbers, the sharding note for other readers included."""

_CHARACTER_BYTES = 32
"""Upper bound of one character of an FQN in a header, which names it three times: once as it is (4 bytes), twice
in JSON inside JSON, where beyond ASCII it is two escapes of seven."""


def packs_of(rank: int, shards: Sequence[Shard], owned: Sequence[Owned], header_bytes_max: int) -> list[PackPlan]:
    """Return the packs that hold everything a rank writes, pieces in file order.

    Pieces whose size is a multiple of a page come first, so that with a page-padded header they lie on page
    boundaries and can be read directly without a copy; the rest follow by falling element size, so that
    every element stays aligned. An FQN occurs once per pack, because a safetensors key does. What stock readers
    could not make sense of (flat ranges, dtypes that safetensors lacks) lies apart, in packs of its own.
    """
    raw: list[Owned] = []
    apart: list[Owned] = []
    for each in owned:
        (raw if _is_raw(shards[each.shard_number], each) else apart).append(each)
    return [
        *_packs(_PackNames(rank, ""), shards, raw, header_bytes_max),
        *_packs(_PackNames(rank, OPAQUE_FOLDER), shards, apart, header_bytes_max),
    ]


def without(pack: PackPlan, fqns: Collection[str]) -> PackPlan:
    """Return a pack without some of its pieces: the others in the same order, moved up so that no hole is left."""
    kept, offset = [], 0
    for item in pack.items:
        if item.tensor.fqn not in fqns:
            kept.append(PackItem(item.tensor, item.region, offset, item.shard_number))
            offset += item.bytes
    return PackPlan(pack.name, tuple(kept))


def _is_raw(shard: Shard, owned: Owned) -> bool:
    return isinstance(owned.region, Box) and bool(DTYPES[shard.tensor.dtype].safetensors)


def _packs(names: _PackNames, shards: Sequence[Shard], owned: Sequence[Owned], header_bytes_max: int) -> list[PackPlan]:
    packs: list[PackPlan] = []
    rest = list(owned)
    while rest:
        taken: list[Owned] = []
        left: list[Owned] = []
        fqns: set[str] = set()
        header_bytes = PAGE_BYTES
        for each in rest:
            tensor = shards[each.shard_number].tensor
            name_bytes = (3 if _written_as_is(tensor.fqn) else _CHARACTER_BYTES) * len(tensor.fqn)
            entry_bytes = _ENTRY_BYTES + name_bytes + 66 * len(tensor.global_shape)
            if tensor.fqn in fqns or (taken and header_bytes + entry_bytes > header_bytes_max):
                left.append(each)
                continue
            fqns.add(tensor.fqn)
            header_bytes += entry_bytes
            taken.append(each)
        packs.append(PackPlan(names.next(), _in_file_order(shards, taken)))
        rest = left
    return packs


def _written_as_is(fqn: str) -> bool:
    """Return whether JSON writes an FQN without escapes, as it does nearly every one."""
    return fqn.isascii() and fqn.isprintable() and '"' not in fqn and "\\" not in fqn


class _PackNames:
    """Numbers the packs of one rank."""

    def __init__(self, rank: int, folder: str) -> None:
        self._rank, self._folder, self._count = rank, folder, 0

    def next(self) -> str:
        suffix = f"-{self._count}" if self._count else ""
        self._count += 1
        return f"{self._folder}r{self._rank:05d}{suffix}.safetensors"


def _in_file_order(shards: Sequence[Shard], owned: list[Owned]) -> tuple[PackItem, ...]:
    def order(each: Owned) -> tuple[bool, int, str]:
        tensor = shards[each.shard_number].tensor
        piece_bytes = each.region.numel * tensor.itemsize
        return piece_bytes % PAGE_BYTES != 0 or piece_bytes == 0, -tensor.itemsize, tensor.fqn

    items = []
    offset = 0
    for each in sorted(owned, key=order):
        item = PackItem(shards[each.shard_number].tensor, each.region, offset, each.shard_number)
        items.append(item)
        offset += item.bytes
    return tuple(items)
