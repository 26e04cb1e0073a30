"""Which weight a master belongs to, by shapes and names alone."""

from __future__ import annotations

import pytest

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import FlatRange
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.core.plan.pairs import matched, pairs_of

LAYERS = ["model.layers.0.w", "model.layers.1.w"]


@pytest.mark.parametrize(
    ("weights", "masters", "expected"),
    [
        (LAYERS, ["master.layers.0.w", "master.layers.1.w"], [0, 1]),
        (LAYERS, ["optimizer.state.layers.0.w.master_param", "optimizer.state.layers.1.w.master_param"], [0, 1]),
        (LAYERS, ["optimizer.state.layers.1.w.master_param"], [1]),
        (["w"], ["optimizer.state.w.master"], [0]),
        (["w"], ["w.master"], [0]),
        # Each fits two weights alike.
        (LAYERS, ["optimizer.state.7.master", "ema.w"], [None, None]),
        # A key that is known to be a master's goes before one that may be a moment's.
        (LAYERS, ["optimizer.state.layers.0.w.foo", "optimizer.state.layers.0.w.fp32_param"], [None, 0]),
        (LAYERS, ["optimizer.state.layers.0.w.foo", "optimizer.state.layers.0.w.bar"], [None, None]),
        # The longer common end decides.
        (["a.model.w", "b.model.w"], ["copy.b.model.w", "copy.model.w"], [1, None]),
        (["model.w"], ["copy.w", "copy.model.w"], [None, 0]),
        (["model.w"], ["other.v"], [None]),
    ],
)
def test_names_that_end_alike(weights: list[str], masters: list[str], expected: list[int | None]) -> None:
    pairs = {master: weights[number] for master, number in zip(masters, expected, strict=True) if number is not None}
    assert matched(weights, masters) == pairs
    assert matched(weights[::-1], masters[::-1]) == pairs


def test_only_pieces_of_one_shape_and_region_are_pairs() -> None:
    weight, master = TensorSpec("model.w", "bfloat16", (4, 4)), TensorSpec("master.w", "float32", (4, 4))
    top, bottom = Box((0, 0), (2, 4)), Box((2, 0), (4, 4))
    both = [(weight, top), (weight, bottom), (master, top), (master, bottom)]
    assert pairs_of(both) == {("master.w", top): "model.w", ("master.w", bottom): "model.w"}
    assert pairs_of([(weight, top), (master, bottom)]) == {}
    assert pairs_of([(weight, FlatRange(0, 8)), (master, top)]) == {}
    assert pairs_of([(TensorSpec("model.w", "bfloat16", (16,)), FlatRange(0, 8)), (master, FlatRange(0, 8))]) == {}


def test_moments_and_gradients_are_no_masters_and_other_types_no_weights() -> None:
    region = Box.whole((4,))

    def piece(fqn: str, dtype: str) -> tuple[TensorSpec, Box]:
        return TensorSpec(fqn, dtype, (4,)), region

    weight = piece("model.w", "float16")
    assert pairs_of([weight, piece("opt.state.w.exp_avg", "float32"), piece("model.w.grad", "float32")]) == {}
    assert pairs_of([piece("opt.w.exp_avg", "bfloat16"), piece("opt.w", "float32")]) == {}
    assert pairs_of([piece("model.w", "float32"), piece("master.w", "float32")]) == {}
    assert pairs_of([piece("model.w", "float16"), piece("master.w", "float64")]) == {}
