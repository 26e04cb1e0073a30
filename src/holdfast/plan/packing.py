"""Decides in which pack, and at which offset, each piece is stored."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holdfast.errors import InvalidError
from holdfast.geometry.box import Box
from holdfast.geometry.dtype import DTYPES
from holdfast.geometry.tensor import Shard
from holdfast.plan.ownership import Owned
from holdfast.settings import PAGE_BYTES
from holdfast.types.plan import OPAQUE_FOLDER, PackItem, PackPlan

_ENTRY_BYTES = 160
"""Upper bound of a header entry without its FQN and numbers, including the sharding note for other readers."""

_CHARACTER_BYTES = 32
"""Upper bound of one character of an FQN in a header, which holds the FQN three times: once as UTF-8 (4 bytes), twice
in JSON inside JSON, where a character beyond ASCII takes two escapes of seven bytes."""


def packs_of(
    rank: int,
    shards: Sequence[Shard],
    owned: Sequence[Owned],
    header_bytes_max: int,
    *,
    pack_bytes_max: int | None = None,
    object_bytes_max: int | None = None,
) -> list[PackPlan]:
    """Return the packs of everything a rank writes, their pieces in file order.

    Pieces whose size is a multiple of a page come first. The header is padded to pages, so these pieces start on page
    boundaries and can be read directly, without a copy. The other pieces follow by descending element size, so every
    element is aligned. A pack holds an FQN once, because a safetensors file has each key once. Flat ranges and dtypes
    that safetensors lacks go to packs of their own, because stock readers cannot interpret them.

    Args:
        rank, shards, owned: What the rank writes.
        header_bytes_max: Longest header of a pack with more than one piece.
        pack_bytes_max: Most bytes of the pieces of a pack; a larger piece has a pack of its own. None: no limit.
        object_bytes_max: Most bytes of a pack with its header. None: no limit.
    Raises:
        InvalidError: One piece alone exceeds `object_bytes_max`.
    """
    readable: list[Owned] = []
    opaque: list[Owned] = []
    for part in owned:
        (readable if _is_readable(shards[part.shard_number], part) else opaque).append(part)
    limits = _Limits(header_bytes_max, pack_bytes_max, object_bytes_max)
    return [
        *_packs(f"r{rank:05d}", shards, readable, limits),
        *_packs(f"{OPAQUE_FOLDER}r{rank:05d}", shards, opaque, limits),
    ]


def without(pack: PackPlan, fqns: Collection[str]) -> PackPlan:
    """Return a pack without the pieces of some tensors; the others keep their order and close the gaps."""
    kept, offset = [], 0
    for item in pack.items:
        if item.tensor.fqn not in fqns:
            kept.append(PackItem(item.tensor, item.region, offset, item.shard_number))
            offset += item.bytes
    return PackPlan(pack.name, tuple(kept))


def _is_readable(shard: Shard, owned: Owned) -> bool:
    """Return whether stock safetensors readers can interpret a piece."""
    return isinstance(owned.region, Box) and bool(DTYPES[shard.tensor.dtype].safetensors)


@dataclass(frozen=True, slots=True)
class _Limits:
    """How large the packs may be. Arguments as `packs_of`."""

    header_bytes_max: int
    pack_bytes_max: int | None
    object_bytes_max: int | None

    def hold(self, header_bytes: int, data_bytes: int) -> bool:
        """Return whether a pack may have more than one piece with this header and these bytes of pieces."""
        return (
            header_bytes <= self.header_bytes_max
            and (self.pack_bytes_max is None or data_bytes <= self.pack_bytes_max)
            and self.an_object_holds(header_bytes, data_bytes)
        )

    def an_object_holds(self, header_bytes: int, data_bytes: int) -> bool:
        """Return whether the store takes such a pack."""
        pack_bytes = -(-header_bytes // PAGE_BYTES) * PAGE_BYTES + data_bytes
        return self.object_bytes_max is None or pack_bytes <= self.object_bytes_max


def _packs(stem: str, shards: Sequence[Shard], owned: Sequence[Owned], limits: _Limits) -> list[PackPlan]:
    """Return packs named `stem`, `stem-1`, `stem-2` and so on."""
    packs: list[PackPlan] = []
    rest = list(owned)
    while rest:
        taken: list[Owned] = []
        left: list[Owned] = []
        fqns: set[str] = set()
        header_bytes, data_bytes = PAGE_BYTES, 0
        for part in rest:
            tensor = shards[part.shard_number].tensor
            name_bytes = (3 if _written_as_is(tensor.fqn) else _CHARACTER_BYTES) * len(tensor.fqn)
            entry_bytes = _ENTRY_BYTES + name_bytes + 66 * len(tensor.global_shape)
            piece_bytes = part.region.numel * tensor.itemsize
            header_after, data_after = header_bytes + entry_bytes, data_bytes + piece_bytes
            if tensor.fqn in fqns or (taken and not limits.hold(header_after, data_after)):
                left.append(part)
                continue
            if not taken and not limits.an_object_holds(header_after, data_after):
                raise InvalidError(
                    f"{tensor.fqn}: one piece of {piece_bytes} bytes; expected at most {limits.object_bytes_max} bytes "
                    "with the header of its pack, the largest object of this store. Shard the tensor over more ranks, "
                    "or save to another store"
                )
            fqns.add(tensor.fqn)
            header_bytes, data_bytes = header_after, data_after
            taken.append(part)
        suffix = f"-{len(packs)}" if packs else ""
        packs.append(PackPlan(f"{stem}{suffix}.safetensors", _in_file_order(shards, taken)))
        rest = left
    return packs


def _written_as_is(fqn: str) -> bool:
    """Return whether JSON writes an FQN without escapes; nearly every FQN is like this."""
    return fqn.isascii() and fqn.isprintable() and '"' not in fqn and "\\" not in fqn


def _in_file_order(shards: Sequence[Shard], owned: list[Owned]) -> tuple[PackItem, ...]:
    def order(part: Owned) -> tuple[bool, int, str]:
        tensor = shards[part.shard_number].tensor
        piece_bytes = part.region.numel * tensor.itemsize
        return piece_bytes % PAGE_BYTES != 0 or piece_bytes == 0, -tensor.itemsize, tensor.fqn

    items = []
    offset = 0
    for part in sorted(owned, key=order):
        item = PackItem(shards[part.shard_number].tensor, part.region, offset, part.shard_number)
        items.append(item)
        offset += item.bytes
    return tuple(items)
