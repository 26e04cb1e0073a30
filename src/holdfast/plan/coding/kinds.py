"""Kinds of tensors: all tensors of one kind are coded alike, or stay raw together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from holdfast.geometry.tensor import Role, Shard, TensorSpec
from holdfast.plan.coding.choice import Amounts
from holdfast.types.coding import Kind

MASTER = "master"
"""Name of the kinds of tensors with a 16-bit pair."""

CODED_BYTES_MIN = 64 << 10
"""Smallest piece that is coded: a smaller one saves less than its entries in header and index take."""

_KEY_LENGTH_MAX = 40


def kinds_of(shards: Sequence[Shard], pairs: Collection[str], skipped: Collection[str] = ()) -> dict[str, Kind]:
    """Return the kind of each tensor of a rank by FQN, without those that are never coded.

    Args:
        shards: The rank's shards.
        pairs: FQNs of the tensors that have a 16-bit pair.
        skipped: FQNs that `compression_skip` leaves plain.
    """
    return {
        shard.tensor.fqn: kind_of(shard.tensor, shard.role, is_master=shard.tensor.fqn in pairs)
        for shard in shards
        if shard.tensor.fqn not in skipped
    }


def kind_of(tensor: TensorSpec, role: Role, *, is_master: bool = False) -> Kind:
    """Return the kind of a tensor.

    Optimizer state is named by its key, the end of the FQN: `exp_avg` compresses unlike `exp_avg_sq`. An end that is
    no name, such as a number, or a long one, says nothing about the content: then the role names the kind.
    """
    if is_master:
        return Kind(tensor.dtype, MASTER)
    key = tensor.fqn.rpartition(".")[2]
    is_key = role is Role.OPTIMIZER and key.isidentifier() and len(key) <= _KEY_LENGTH_MAX
    return Kind(tensor.dtype, key if is_key else role.value)


def amounts_of(pieces: Iterable[tuple[str, int]], kinds: Mapping[str, Kind]) -> Amounts:
    """Return what a rank writes by kind.

    Args:
        pieces: FQN and bytes of each piece.
        kinds: The kind of each tensor that may be coded.
    """
    by_kind: dict[Kind, int] = {}
    plain_bytes = 0
    for fqn, piece_bytes in pieces:
        kind = kinds.get(fqn)
        if kind is None or piece_bytes < CODED_BYTES_MIN:
            plain_bytes += piece_bytes
        else:
            by_kind[kind] = by_kind.get(kind, 0) + piece_bytes
    return Amounts(by_kind, plain_bytes)
