"""Finds pairs by shape and name: a tensor of 16-bit numbers, and the float32 master that it was rounded from.

Every rank of a replica group decides alike without communication, because it only looks at tensors of that group. A
pair is a guess: a save proves it chunk by chunk before it uses it, so a wrong guess costs space and never a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast.base.geometry.dtype import MASTER_TYPE, WEIGHT_TYPES
from holdfast.base.geometry.region import Region
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.plan import PieceKey

MOMENT_KEYS = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_avg_diff",
        "exp_inf",
        "momentum",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "ax",
        "grad",
        "prev",
        "row_var",
        "col_var",
        "step",
    }
)
"""Last components of names that no weight and no master has: keys of optimizer state, and gradients."""

_MASTER_WORDS = ("master", "fp32")
"""Parts of a name that say that a tensor is a master."""

Pairs = Mapping[PieceKey, str]
"""By master piece, the FQN of its weight, of which the piece has the same region."""


def pairs_of(pieces: Iterable[tuple[TensorSpec, Region]]) -> dict[PieceKey, str]:
    """Return the pairs among pieces whose names leave no doubt. A weight has one master at most.

    The names of a pair end alike: in the most components that a weight of this shape and region shares with the name of
    the master, or with that name without its last component, a key of optimizer state.

    Args:
        pieces: Pieces of distinct names or regions.
    """
    alike: dict[tuple[tuple[int, ...], Region], tuple[list[str], list[str]]] = {}
    for tensor, region in pieces:
        is_weight = tensor.dtype in WEIGHT_TYPES
        if (is_weight or tensor.dtype == MASTER_TYPE) and not is_moment(tensor.fqn):
            weights, masters = alike.setdefault((tensor.global_shape, region), ([], []))
            (weights if is_weight else masters).append(tensor.fqn)
    return {
        (master, region): weight
        for (_, region), (weights, masters) in alike.items()
        if weights and masters
        for master, weight in matched(weights, masters).items()
    }


def is_moment(fqn: str) -> bool:
    """Return whether a name is that of a moment or a gradient."""
    return fqn.rpartition(".")[2] in MOMENT_KEYS


def matched(weights: Sequence[str], masters: Sequence[str]) -> dict[str, str]:
    """Return the weight of each master that has one, by their names alone.

    Args:
        weights, masters: FQNs of tensors of one shape.
    """
    by_suffix: dict[str, list[str]] = {}
    for weight in weights:
        for suffix in _suffixes(weight):
            by_suffix.setdefault(suffix, []).append(weight)
    claims: dict[str, dict[tuple[int, int], list[str]]] = {}
    for master in masters:
        found, rank = _weight_of(master, by_suffix)
        if found is not None:
            claims.setdefault(found, {}).setdefault(rank, []).append(master)
    best = {weight: ranked[max(ranked)] for weight, ranked in claims.items()}
    return {claimants[0]: weight for weight, claimants in best.items() if len(claimants) == 1}


def _weight_of(master: str, by_suffix: Mapping[str, Sequence[str]]) -> tuple[str | None, tuple[int, int]]:
    """Return the weight whose name fits best, if one alone does; and how well it fits: the higher, the better."""
    says_so = any(word in master.lower() for word in _MASTER_WORDS)
    without_key = master.rpartition(".")[0]
    fits = []
    for name, kind in ((master, 1), (without_key, 0)):
        suffix = next((suffix for suffix in _suffixes(name) if suffix in by_suffix), None)
        if suffix is not None:
            fits.append((suffix.count(".") + 1, kind, by_suffix[suffix]))
    if not fits:
        return None, (0, 0)
    components, kind, weights = max(fits)
    return (weights[0] if len(weights) == 1 else None), (components, 2 if says_so else kind)


def _suffixes(fqn: str) -> list[str]:
    """Return the ends of a name that begin with a component, longest first."""
    parts = fqn.split(".") if fqn else []
    return [".".join(parts[first:]) for first in range(len(parts))]
