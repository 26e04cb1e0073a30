"""Kinds of tensors: all tensors of one kind are coded alike, or stay raw together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.base.geometry.tensor import Role, Shard, TensorSpec
from holdfast.base.types.coding import Kind
from holdfast.core.plan.coding.choice import Amounts
from holdfast.core.plan.coding.coded_pieces import matches
from holdfast.core.plan.ownership import Owned
from holdfast.core.plan.pairs import MOMENT_KEYS, pairs_of

MASTER = "master"
"""Name of the kinds of tensors with a 16-bit pair."""

_KEY_LENGTH_MAX = 40


@dataclass(frozen=True, slots=True)
class OwnedKinds:
    """What one rank owns of a layout, by kind."""

    owned: Sequence[Owned]
    """The pieces."""

    kinds: Mapping[str, Kind]
    """The kind of each tensor that may be coded, by FQN."""

    weight_types: Mapping[str, str]
    """By FQN of each master, the element type of its weight."""

    amounts: Amounts
    """Bytes of the pieces."""


def kinds_owned(
    shards: Sequence[Shard], owned: Sequence[Owned], skip: Collection[str], coded_bytes_min: int
) -> OwnedKinds:
    """Return what a rank owns, by kind.

    Args:
        shards: The rank's shards.
        owned: What it owns of them.
        skip: Patterns of tensors that stay plain.
        coded_bytes_min: Smallest piece that is coded.
    """
    pieces = [(shards[part.shard_number], part.region) for part in owned]
    types = {shard.tensor.fqn: shard.tensor.dtype for shard, _ in pieces}
    pairs = pairs_of((shard.tensor, region) for shard, region in pieces)
    weight_types = {fqn: types[weight] for (fqn, _), weight in pairs.items()}
    kinds = {
        shard.tensor.fqn: kind_of(shard.tensor, shard.role, is_master=shard.tensor.fqn in weight_types)
        for shard, _ in pieces
        if not matches(shard.tensor.fqn, skip)
    }
    sizes = [(shard.tensor.fqn, region.numel * shard.tensor.itemsize) for shard, region in pieces]
    return OwnedKinds(owned, kinds, weight_types, amounts_of(sizes, kinds, coded_bytes_min))


def kind_of(tensor: TensorSpec, role: Role, *, is_master: bool = False) -> Kind:
    """Return the kind of a tensor.

    Optimizer state is named by its key, the end of the FQN: `exp_avg` compresses unlike `exp_avg_sq`. An end that is
    no name, such as a number, or a long one, says nothing about the content: then the role names the kind.
    """
    if is_master:
        return Kind(tensor.dtype, MASTER)
    key = tensor.fqn.rpartition(".")[2]
    is_key = role is Role.OPTIMIZER and key.isidentifier() and len(key) <= _KEY_LENGTH_MAX
    # Moments in a dict of the caller's own have the role of a buffer.
    return Kind(tensor.dtype, key if is_key or key in MOMENT_KEYS else role.value)


def amounts_of(pieces: Iterable[tuple[str, int]], kinds: Mapping[str, Kind], coded_bytes_min: int) -> Amounts:
    """Return what a rank writes by kind.

    Args:
        pieces: FQN and bytes of each piece.
        kinds: The kind of each tensor that may be coded.
        coded_bytes_min: Smallest piece that is coded.
    """
    by_kind: dict[Kind, int] = {}
    plain_bytes = 0
    for fqn, piece_bytes in pieces:
        kind = kinds.get(fqn)
        if kind is None or piece_bytes < max(coded_bytes_min, 1):
            plain_bytes += piece_bytes
        else:
            by_kind[kind] = by_kind.get(kind, 0) + piece_bytes
    return Amounts(by_kind, plain_bytes)
