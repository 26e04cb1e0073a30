"""How small packs are, and how near their errors come to the bound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.part import Measured, Params, Part, Round, Spread, spread_of
from holdfast.activations.runtime.bounded import pack_codes
from tests.unit.activations.runtime.hostile_tensors import hostile_tensor
from tests.unit.activations.runtime.test_bounded import with_outlier_channels, worst_of

BOUNDS = {8: 0.02, 4: 0.25}
"""Error bound for each number of bits."""


def measure(root: Path, params: Params) -> Measured:
    """Pack activations with outlier channels, and hostile tensors; a round is a tensor."""
    tensor = with_outlier_channels(params["rows"])
    ratios: Round = {}
    for bits, bound in BOUNDS.items():
        packed = pack_codes(tensor, bits, error_bound=bound)
        assert packed is not None and worst_of(tensor, packed, bound) < 1
        ratios[f"q{bits}_ratio"] = tensor.nbytes / packed.device_bytes
    rounds = []
    for seed in range(params["hostile"]):
        name, hostile = hostile_tensor(seed)
        worst = 0.0
        for bits, bound in BOUNDS.items():
            packed = pack_codes(hostile, bits, error_bound=bound)
            assert packed is not None, name
            worst = max(worst, worst_of(hostile, packed, bound))
        rounds.append({**ratios, "worst": worst})
    return Measured(rounds, [])


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the ratios, and the worst error of an element by its bound."""
    worst = [each["worst"] for each in rounds]
    ratios = {key: spread_of([rounds[0][key]]) for key in rounds[0] if key.endswith("_ratio")}
    return {**ratios, "bound_worst": Spread(max(worst), min(worst), max(worst))}


PART = Part(
    name="packs",
    question="How small are packs, and how near to the bound are their errors?",
    ranks=1,
    full={"rows": 4096, "hostile": 1000},
    quick={"rows": 1024, "hostile": 200},
    measure=measure,
    keys=keys,
)
