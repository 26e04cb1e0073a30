"""Flattened keys back into the state they came from: whatever torch flattens, and optimizers out of either form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from holdfast.backends.foreign.dcp.nesting import nested_of, tree_of
from holdfast.backends.foreign.dcp.optimizers import flattened_optimizer, nested_optimizer
from holdfast.base.types.values import Group, TensorRef
from holdfast.errors import CorruptError

_keys = st.text("abc01", min_size=1, max_size=2)
_leaves = st.integers() | st.none() | st.text(max_size=2) | st.lists(st.integers(), max_size=2)
_states = st.dictionaries(
    _keys,
    st.recursive(
        _leaves,
        lambda inner: st.dictionaries(_keys, inner, max_size=3) | st.lists(inner, max_size=3),
        max_leaves=12,
    ),
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(state=_states)
def test_what_torch_flattens_comes_back_as_torch_brings_it_back(state: dict[str, Any]) -> None:
    flattened, paths = flatten_state_dict(state)
    expected = unflatten_state_dict(flattened, paths)
    assert nested_of([(paths[key], value) for key, value in flattened.items()], "here") == expected


@pytest.mark.parametrize(
    "paths",
    [
        [("a",), ("a",)],
        [("a",), ("a", "b")],
        [("a", "b"), ("a",)],
        [("a", 0), ("a", "b")],
        [("a", 1 << 40)],
        [*((("a", number, 60_000)) for number in range(3))],
    ],
)
def test_leaves_that_cannot_stand_together(paths: list[tuple[str | int, ...]]) -> None:
    with pytest.raises(CorruptError, match="here"):
        nested_of([(path, 1) for path in paths], "here")


def optimizer_in_both_forms() -> tuple[dict[object, Any], dict[object, Any]]:
    """Return one optimizer nested and flattened, a name of a parameter being the beginning of another."""
    ref = {name: TensorRef(name) for name in ("w.exp_avg", "w.b.exp_avg", "w.b.left")}
    nested = {
        "state": {
            "w": {"exp_avg": ref["w.exp_avg"]},
            "w.b": {"count": 3, "exp_avg": ref["w.b.exp_avg"], "f": {"l": ref["w.b.left"]}},
        },
        "param_groups": [{"lr": 0.5, "params": ["w"]}, {"lr": 0.25, "params": ["w.b"]}],
    }
    flattened = {
        "state.w.exp_avg": ref["w.exp_avg"],
        "state.w.b.count": 3,
        "state.w.b.exp_avg": ref["w.b.exp_avg"],
        "state.w.b.f.l": ref["w.b.left"],
        "param_groups.w.lr": 0.5,
        "param_groups.w.b.lr": 0.25,
    }
    return nested, flattened


def test_both_forms_of_an_optimizer_are_the_same() -> None:
    nested, flattened = optimizer_in_both_forms()
    found = nested_optimizer(nested)
    assert found == flattened_optimizer(flattened)
    assert found is not None
    assert found.hyperparameters == {"w": {"lr": 0.5}, "w.b": {"lr": 0.25}}
    assert found.values == {"w.b": {"count": 3, "f": {"l": TensorRef("w.b.left")}}}
    assert found.names == {"w", "w.b"}


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"state": {}},
        {"param_groups": 3},
        {"param_groups": [{"lr": 1}]},
        {"param_groups": [{"lr": 1, "params": [0, 1]}]},
        {"param_groups": [], "state": {0: {}}},
        {"param_groups": [], "state": {}, "more": 1},
        {"param_groups": [{1: 2, "params": []}]},
        {"state.w.exp_avg": 1},
        {"param_groups.w.lr": 1, "other": 2},
        {1: 2},
    ],
)
def test_what_is_no_optimizer_by_name(value: dict[object, Any]) -> None:
    assert nested_optimizer(value) is None
    assert flattened_optimizer(value) is None


def test_a_tree_is_as_holdfast_would_have_kept_it() -> None:
    nested, _ = optimizer_in_both_forms()
    state = {
        "model": {"w": TensorRef("model.w"), "w._extra_state": 7},
        "optimizer": nested,
        "ema": {"decay": 0.5, "w": TensorRef("ema.w"), "deep": {"v": TensorRef("ema.deep.v")}},
        "queue": [TensorRef("queue.0"), {"a": TensorRef("queue.1.a")}],
        "plain": {"a": [1]},
        "alone": TensorRef("alone"),
    }
    remarks: list[str] = []
    tree = tree_of(state, lambda fqn: None, remarks)
    assert remarks == []
    assert list(tree.items) == ["model", "optimizer", "ema", "queue", "plain"]
    assert tree.items["model"] == Group("module", {"w._extra_state": 7})
    assert tree.items["ema"] == Group("dict", {"decay": 0.5, "deep": Group("dict")})
    assert tree.items["queue"] == state["queue"]
    assert tree.items["plain"] == {"a": [1]}
    optimizer = tree.items["optimizer"]
    assert isinstance(optimizer, Group)
    assert optimizer.kind == "optimizer"
    assert optimizer.items["state"] == {"w.b": {"count": 3, "f": {"l": TensorRef("w.b.left")}}}
