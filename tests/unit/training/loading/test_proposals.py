"""What is proposed for names that do not match, in time that grows with the names and not with their square."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest

from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.framework import Catalog
from holdfast.base.types.values import Group
from holdfast.training.loading.proposals import NameAdvice


def catalog(names: list[str], tree: Mapping[str, object] | None = None) -> Catalog:
    tops = dict.fromkeys((name.partition(".")[0] for name in names), Group("module"))
    return Catalog(
        tensors={name: TensorSpec(name, "float32", (2,)) for name in names},
        aliases={},
        tree=Group("dict", {**tops, **(tree or {})}),
        run_id="",
        step=None,
        world_size=1,
        per_rank=lambda _: {},
        same_content=lambda *_: False,
        fill=lambda _: None,
    )


def advice(state: list[str], stored: list[str], tree: Mapping[str, object] | None = None) -> NameAdvice:
    keys = {name.partition(".")[0] for name in state}
    missing, present = sorted({*state} - {*stored}), {*state}
    unexpected = [name for name in stored if name not in present and name.partition(".")[0] in keys]
    return NameAdvice(missing, unexpected, keys, catalog(stored, tree))


NAMES = [f"layers.{number}.{kind}.weight" for number in range(4) for kind in ("attn", "mlp")]


def below(top: str, *, old: str = "", new: str = "") -> list[str]:
    return [f"{top}.{name.replace(old, new) if old else name}" for name in NAMES]


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (below("model.module"), "rename={'module.': ''}, which finds all"),
        (below("model._orig_mod.module"), "rename={'_orig_mod.module.': ''}, which finds all"),
        (below("model.model"), "rename={'model.': ''}, which finds all"),
        (below("net"), "rename={'net': 'model'}, which finds all"),
        (below("model", old="layers", new="blocks"), "rename={'blocks': 'layers'}, which finds all"),
        (
            below("model", old="attn", new="attention"),
            "rename={'layers.*.attention': 'layers.*.attn'}, which finds all",
        ),
        ([*below("model.module")[:-1], "model.other"], "rename={'module.': ''}, which finds 7 of 8"),
        ([f"model.{number}" for number in range(8)], None),
    ],
)
def test_the_rule_that_explains_most_is_proposed(stored: list[str], expected: str | None) -> None:
    assert advice(below("model"), stored).rename() == expected


def test_a_prefix_that_the_checkpoint_lacks_is_added() -> None:
    assert advice(below("model.encoder"), below("model")).rename() == "rename={'': 'encoder.'}, which finds all"


def test_names_that_match_now_are_not_renamed() -> None:
    both = [*below("model"), "ema.layers.0.attn.weight"]
    assert advice(both, below("model")).rename() is None


def test_optimizers_follow_their_parameters() -> None:
    tree = {"optimizer": Group("optimizer", {"param_groups": {}, "state": {}})}
    state = [*below("model"), *below("optimizer.param_groups"), *below("optimizer.state")]
    stored = [*below("model.module"), *below("optimizer.state.module")]
    assert advice(state, stored, tree).rename() == "rename={'module.': ''}, which finds all"


def test_similar_names_are_listed() -> None:
    found = advice(["model.trunk.weight", "model.x.bias"], ["model.trunc.weight", "model.head.weight"]).similar()
    assert found == ["model.trunc.weight for model.trunk.weight"]


def test_top_level_keys_are_named() -> None:
    assert advice(["net.w"], ["model.v", "optimizer.v"]).tops() == "model, optimizer"
    assert advice(["model.w"], ["model.v"]).tops() is None


@pytest.mark.parametrize("ending", ["weight", "{number}"])
def test_many_names_take_seconds(ending: str) -> None:
    stored = [f"model.a{number}.{ending.format(number=number)}" for number in range(30_000)]
    state = [f"model.b{number}.{ending.format(number=number)}" for number in range(30_000)]
    began = time.process_time()
    found = advice(state, stored)
    assert found.rename() is None
    found.similar()
    assert time.process_time() - began < 15
