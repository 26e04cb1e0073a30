"""What a state may be, what strict judges, what reports say, and which calls are refused before anything happens."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import ConflictError, InvalidError, MissingError


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def whole(seed: int) -> dict[str, object]:
    torch.manual_seed(seed)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    if seed == 0:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "epoch": 7 - seed, "notes": {"name": f"run {seed}"}}


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


# ------------------------------------------------------------------------------------------------- values


def test_plain_values_of_every_kind_are_replaced_in_the_dict(tmp_path: Path) -> None:
    values: dict[str, object] = {
        "none": None,
        "true": True,
        "large": 10**40,
        "float": 0.1,
        "infinite": float("-inf"),
        "text": "wörter",
        "bytes": b"\0\xff",
        "list": [1, [2, (3, "four")]],
        "tuple": (1, 2.5),
        "set": {1, 2},
        "dict": {1: "int key", None: "none key", (1, "a"): "tuple key", "x": 2},
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(1.5),
        "time": datetime(2026, 1, 2, tzinfo=UTC),
        "path": Path("/data/x"),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "device": torch.device("cuda", 3),
    }
    holdfast.save(tmp_path / "c", {"values": values, "top": 3})
    state: dict[str, object] = {"values": dict.fromkeys(values), "top": 0}
    inner = state["values"]
    holdfast.load(tmp_path / "c", state)
    assert state["top"] == 3
    found = state["values"]
    assert isinstance(found, dict) and isinstance(inner, dict)
    assert list(found) == list(values)
    for name, value in values.items():
        if name == "array":
            assert np.array_equal(found[name], value)
        else:
            assert found[name] == value, name
        assert type(found[name]) is type(value), name


def test_containers_with_tensors_inside(tmp_path: Path) -> None:
    def build(fill: float) -> dict[str, object]:
        return {"buffers": [torch.full((2,), fill), {"deep": (torch.full((1,), fill + 1), "text")}], "count": int(fill)}

    holdfast.save(tmp_path / "c", build(3.0))
    state = build(0.0)
    first = state["buffers"][0]  # type: ignore[index]
    holdfast.load(tmp_path / "c", state)
    buffers = state["buffers"]
    assert isinstance(buffers, list)
    assert buffers[0].tolist() == [3.0, 3.0]
    assert buffers[0] is first, "filled in place"
    assert buffers[1]["deep"][0].tolist() == [4.0]
    assert buffers[1]["deep"][1] == "text"
    assert state["count"] == 3


class Counter:
    def __init__(self, count: int) -> None:
        self.count, self.window = count, torch.full((3,), float(count))

    def state_dict(self) -> dict[str, object]:
        return {"count": self.count, "window": self.window, "history": [self.count, torch.tensor(self.count)]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.count, self.window = state["count"], state["window"]  # type: ignore[assignment]
        self.history = state["history"]


def test_anything_with_state_dict_and_load_state_dict(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"data": {"loader": Counter(5)}})
    fresh = Counter(0)
    holdfast.load(tmp_path / "c", {"data": {"loader": fresh}})
    assert fresh.count == 5
    assert fresh.window.tolist() == [5.0] * 3
    assert fresh.history[0] == 5 and int(fresh.history[1]) == 5


class Refusing(Counter):
    def load_state_dict(self, state: dict[str, object]) -> None:
        raise KeyError("no thanks")


def test_a_state_object_that_refuses_its_state_is_named(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"loader": Counter(5)})
    with pytest.raises(InvalidError, match=r"loader: Refusing\.load_state_dict refused it.*no thanks"):
        holdfast.load(tmp_path / "c", {"loader": Refusing(0)})


class Opaque:
    pass


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Opaque(), "cfg.deep"),
        ([1, {"x": Opaque()}], "cfg.deep[1].x"),
        (lambda: 1, "cfg.deep"),
        (Opaque, "cfg.deep"),
        (Fraction(1, 2), "cfg.deep"),
        ({Opaque(): 1}, "cfg.deep"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path_and_nothing_is_written(
    tmp_path: Path, value: object, path: str
) -> None:
    with pytest.raises(InvalidError, match=re.escape(path)) as caught:
        holdfast.save(tmp_path / "c", {"weights": torch.ones(3), "cfg": {"deep": value}})
    assert any(word in str(caught.value) for word in ("Opaque", "function", "type", "Fraction")), str(caught.value)
    assert not (tmp_path / "c").exists()


def test_a_state_that_holds_itself_is_refused(tmp_path: Path) -> None:
    loop: dict[str, object] = {"t": torch.ones(1)}
    loop["again"] = loop
    with pytest.raises((InvalidError, RecursionError)) as caught:
        holdfast.save(tmp_path / "c", {"state": loop})
    assert isinstance(caught.value, InvalidError)
    values: list[object] = []
    values.append(values)
    with pytest.raises(InvalidError):
        holdfast.save(tmp_path / "c", {"state": values})


# ------------------------------------------------------------------------------------- strict, only, skip, report


def test_strict_judges_only_the_top_level_keys_passed(tmp_path: Path) -> None:
    saved = whole(0)
    holdfast.save(tmp_path / "c", saved)
    model = net()
    report = holdfast.load(tmp_path / "c", {"model": model})
    assert report.missing == report.unexpected == report.skipped == ()
    assert set(report.loaded) == {f"model.{name}" for name in model.state_dict()}
    assert report.step is None and report.bytes > 0 and report.seconds >= 0


def test_missing_names_are_listed_and_nothing_changes(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"model": nn.Sequential(nn.Linear(3, 2))})
    model = net()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    state: dict[str, object] = {"model": model, "epoch": 4}
    with pytest.raises(InvalidError, match=r"missing.*epoch, model\.1\.bias, model\.1\.num_batches_tracked"):
        holdfast.load(tmp_path / "c", state)
    assert state["epoch"] == 4
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    report = holdfast.load(tmp_path / "c", state, strict=False)
    assert "model.1.bias" in report.missing and "epoch" in report.missing
    assert set(report.loaded) == {"model.0.weight", "model.0.bias"}
    assert state["epoch"] == 4


def test_unexpected_names_are_listed_and_nothing_changes(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"model": net(), "notes": {"a": 1, "b": 2}})
    model = nn.Sequential(nn.Linear(3, 2))
    before = model[0].weight.detach().clone()
    state: dict[str, object] = {"model": model, "notes": {"a": 0}}
    with pytest.raises(InvalidError, match=r"unexpected.*model\.1\.bias") as caught:
        holdfast.load(tmp_path / "c", state)
    assert "model.1.running_mean" in str(caught.value)
    assert torch.equal(model[0].weight, before)
    report = holdfast.load(tmp_path / "c", state, strict=False)
    assert "model.1.bias" in report.unexpected
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("others", [0, 50])
def test_names_that_only_the_checkpoint_has_are_not_compared_with_each_key(tmp_path: Path, others: int) -> None:
    # A flat state on a rank of many stages or experts: nearly all names of the checkpoint are those of other ranks.
    class Watched(dict[str, object]):
        passes = 0

        def __iter__(self) -> Iterator[str]:
            self.passes += 1
            return super().__iter__()

    names = ["layers.0.w", *(f"layers.{number}.w" for number in range(1, others + 1))]
    holdfast.save(tmp_path / "c", {name: torch.ones(1) for name in names})
    state = Watched({"layers.0.w": torch.zeros(1), "layers.7": torch.zeros(1)})
    report = holdfast.load(tmp_path / "c", state, strict=False)
    assert report.unexpected == (("layers.7.w",) if others else ())
    assert state.passes <= 5


def test_a_parameter_missing_from_the_optimizer_is_listed(tmp_path: Path) -> None:
    model = net()
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": torch.optim.SGD(model[0].parameters(), lr=0.1)})
    with pytest.raises(InvalidError, match=r"missing.*optimizer\.param_groups\.1\.weight"):
        holdfast.load(tmp_path / "c", {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})


def test_only_and_skip_on_save(tmp_path: Path) -> None:
    state = whole(0)
    report = holdfast.save(tmp_path / "only", state, only=["model.*"])
    names = holdfast.open_checkpoint(tmp_path / "only").tensors
    assert names and all(name.startswith("model.") for name in names)
    assert any(name.startswith("optimizer.state.") for name in report.skipped)
    assert "epoch" in report.skipped
    report = holdfast.save(tmp_path / "skip", state, skip="optimizer*")
    names = holdfast.open_checkpoint(tmp_path / "skip").tensors
    assert names and not any(name.startswith("optimizer.") for name in names)
    assert all(name.startswith("optimizer") for name in report.skipped)


def test_only_and_skip_on_load(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", whole(0))
    state = whole(1)
    model = state["model"]
    assert isinstance(model, nn.Sequential)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    report = holdfast.load(tmp_path / "c", state, skip=["model.1.*", "epoch"])
    assert state["epoch"] == 6
    assert "epoch" in report.skipped and "model.1.weight" in report.skipped
    assert torch.equal(model[1].running_mean, before["1.running_mean"])  # type: ignore[arg-type]
    assert not torch.equal(model[0].weight, before["0.weight"])  # type: ignore[arg-type]
    state = whole(1)
    model = state["model"]
    assert isinstance(model, nn.Sequential)
    report = holdfast.load(tmp_path / "c", state, only="model.0.*")
    assert set(report.loaded) == {"model.0.weight", "model.0.bias"}
    assert state["epoch"] == 6 and state["notes"] == {"name": "run 1"}


def test_what_was_skipped_on_save_is_missing_on_load_unless_skipped_again(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", whole(0), skip=["epoch", "model.1.running_*"])
    state = whole(1)
    with pytest.raises(InvalidError, match=r"missing.*epoch, model\.1\.running_mean, model\.1\.running_var"):
        holdfast.load(tmp_path / "c", state)
    report = holdfast.load(tmp_path / "c", state, skip=["epoch", "model.1.running_*"])
    assert report.missing == report.unexpected == ()


def test_values_inside_a_dict_are_skipped_one_by_one(tmp_path: Path) -> None:
    def state(seed: int) -> dict[str, object]:
        return {"cfg": {"lr": seed, "data": {"seed": seed, "path": f"{seed}"}, "own": {}}, "epoch": seed}

    saved = state(1)
    saved["cfg"]["handle"] = object()  # type: ignore[index]
    with pytest.raises(InvalidError, match=r"cfg\.handle"):
        holdfast.save(tmp_path / "c", saved)
    report = holdfast.save(tmp_path / "c", saved, skip=["cfg.handle", "cfg.data.seed"])
    assert set(report.skipped) == {"cfg.handle", "cfg.data.seed"}

    with pytest.raises(InvalidError, match=r"1 missing from the checkpoint: cfg\.data\.seed"):
        holdfast.load(tmp_path / "c", state(2))
    loaded = state(2)
    report = holdfast.load(tmp_path / "c", loaded, skip=["cfg.lr", "cfg.data.seed", "cfg.own.mi*"])
    assert loaded == {"cfg": {"lr": 2, "data": {"seed": 2, "path": "1"}, "own": {}}, "epoch": 1}
    assert set(report.skipped) == {"cfg.lr", "cfg.data.seed"}

    placeholder: dict[str, object] = {"cfg": {}, "epoch": None}
    holdfast.load(tmp_path / "c", placeholder)
    assert placeholder == {"cfg": {"lr": 1, "data": {"path": "1"}, "own": {}}, "epoch": 1}
    report = holdfast.save(tmp_path / "all", state(1), skip="cfg.*")
    assert report.skipped == ("cfg",)


def test_only_chooses_values_inside_a_dict_and_leaves_the_others(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"cfg": {"lr": 1, "data": {"seed": 1, "path": "a"}}, "epoch": 1})
    loaded = {"cfg": {"lr": 2, "data": {"seed": 2, "path": "b"}, "fresh": {"x": 2}}, "epoch": 2}
    holdfast.load(tmp_path / "c", loaded, only="cfg.data.seed")
    assert loaded == {"cfg": {"lr": 2, "data": {"seed": 1, "path": "b"}, "fresh": {"x": 2}}, "epoch": 2}
    report = holdfast.save(tmp_path / "part", loaded, only="cfg.data")
    assert set(report.skipped) == {"cfg.lr", "cfg.fresh.x", "epoch"}
    placeholder: dict[str, object] = {"cfg": {}}
    holdfast.load(tmp_path / "part", placeholder)
    assert placeholder == {"cfg": {"data": {"seed": 1, "path": "b"}}}


@pytest.mark.parametrize(
    ("saved", "own", "selection", "expected"),
    [
        ({"a": {"x": 1}, "b": 1}, {"a": None, "b": 2}, {"skip": "cfg.a"}, {"a": None, "b": 1}),
        ({"a": {"x": 1}, "b": 1}, {"a": 5, "b": 2}, {"only": "cfg.b"}, {"a": 5, "b": 1}),
        ({"a": {"x": 1}, "b": 1}, {"a": {"y": 8}, "b": 2}, {"only": "cfg.b"}, {"a": {"y": 8}, "b": 1}),
        ({"a.b": 1, "a": {"b": 2}, "c": 0}, {"a.b": 10, "a": {"b": 20}, "c": 1}, {"skip": "cfg.a.b"}, None),
        ({"a": 1, "b": 2}, {1: "x", "a": 5, "b": 0}, {"skip": "cfg.a"}, {"a": 5, "b": 2}),
        ({}, {"x": 1, "y": 2}, {"skip": "cfg.x"}, {"x": 1}),
        ({"a": 1}, {"z": 5}, {"skip": "cfg.a"}, {}),
        ({"a": {"x": 1}, "b": 2}, {"a": {"z": 5}, "b": 3}, {"skip": "cfg.a.x"}, {"a": {}, "b": 2}),
        ({"a": 1}, {}, {"skip": "cfg.a"}, {}),
        ({"a": 1}, {"a": 2, "b": {"x": 3, "y": 4}}, {"skip": "cfg.b.x"}, {"a": 1, "b": {"x": 3}}),
    ],
)
def test_what_is_left_alone_stays_as_it_is(
    tmp_path: Path,
    saved: dict[str, object],
    own: dict[object, object],
    selection: dict[str, str],
    expected: dict[object, object] | None,
) -> None:
    holdfast.save(tmp_path / "c", {"cfg": saved})
    state: dict[str, object] = {"cfg": own}
    holdfast.load(tmp_path / "c", state, **selection)  # type: ignore[arg-type]
    assert state["cfg"] == ({"a.b": 10, "a": {"b": 20}, "c": 0} if expected is None else expected)


def test_names_asked_for_and_left_out_are_missing(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"cfg": {"lr": 1}})
    state: dict[str, object] = {"cfg": {"lr": 2, "fresh": 3}}
    with pytest.raises(InvalidError, match=r"missing.*cfg\.fresh"):
        holdfast.load(tmp_path / "c", state, only="cfg.fresh")
    holdfast.save(tmp_path / "part", {"cfg": {"a": {"x": 1}, "b": 1, "t": torch.ones(1)}}, skip="cfg.a")
    state = {"cfg": {"a": {"x": 9, "y": 8}, "b": 2}}
    with pytest.raises(InvalidError, match=r"missing.*cfg\.a"):
        holdfast.load(tmp_path / "part", state, skip="cfg.t")
    holdfast.load(tmp_path / "part", state, strict=False)
    assert state == {"cfg": {"a": {"x": 9, "y": 8}, "b": 1}}


def test_the_same_skip_on_save_and_load_is_whole(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"cfg": {"a": 1}, "e": 1}, skip="cfg.*")
    state: dict[str, object] = {"cfg": {"a": 2}, "e": 2}
    holdfast.load(tmp_path / "c", state, skip="cfg.*")
    assert state == {"cfg": {"a": 2}, "e": 1}
    holdfast.save(tmp_path / "d", {"cfg": {"t": torch.ones(1), "q": {"z": 1}}})
    report = holdfast.load(tmp_path / "d", {"cfg": {"t": torch.zeros(1)}}, skip="cfg.q.*")
    assert report.unexpected == ()
    holdfast.save(tmp_path / "e", {"cfg": {"lr": 1, "h": 2}}, skip="cfg.h")
    report = holdfast.load(tmp_path / "e", {"cfg": {"lr": 0, "t": torch.ones(1)}}, strict=False)
    assert (report.missing, report.unexpected) == (("cfg.t",), ())


def test_skipping_optimizer_state_leaves_the_targets_own(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", whole(0))
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    held = optimizer.state[model[0].weight]["exp_avg"].clone()
    holdfast.load(tmp_path / "c", {"model": model, "optimizer": optimizer}, skip="optimizer.state.*")
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], held)
    assert optimizer.param_groups[0]["lr"] == 0.1


def scheduled(size: int) -> tuple[dict[str, object], torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * size)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, size)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": Counter(size)}
    return state, optimizer, scheduler


@pytest.mark.parametrize("pattern", ["scheduler", "scheduler*", "scheduler.*", "sched*"])
def test_skip_leaves_objects_with_a_state_dict_alone(tmp_path: Path, pattern: str) -> None:
    saved, _, _ = scheduled(1)
    holdfast.save(tmp_path / "c", saved)
    state, optimizer, scheduler = scheduled(2)
    report = holdfast.load(tmp_path / "c", state, skip=pattern)
    assert report.skipped == ("scheduler",)
    assert scheduler.step_size == 2
    assert optimizer.param_groups[0]["lr"] == 0.1
    report = holdfast.save(tmp_path / "d", saved, skip=pattern)
    assert report.skipped == ("scheduler",)
    assert "scheduler" not in holdfast.open_checkpoint(tmp_path / "d").objects


@pytest.mark.parametrize("pattern", ["model", "model.*", "mod*"])
def test_only_leaves_everything_else_alone(tmp_path: Path, pattern: str) -> None:
    saved, _, _ = scheduled(1)
    holdfast.save(tmp_path / "c", saved)
    state, optimizer, scheduler = scheduled(2)
    report = holdfast.load(tmp_path / "c", state, only=pattern)
    assert report.loaded and all(name.startswith("model.") for name in report.loaded)
    assert scheduler.step_size == 2
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert state["loader"].count == 2  # type: ignore[attr-defined]
    assert {"scheduler", "loader"} <= set(report.skipped)


@pytest.mark.parametrize("pattern", ["loader", "loader.*"])
def test_tensors_of_a_skipped_object_are_not_unexpected(tmp_path: Path, pattern: str) -> None:
    saved, _, _ = scheduled(1)
    holdfast.save(tmp_path / "c", saved)
    state, _, _ = scheduled(2)
    report = holdfast.load(tmp_path / "c", state, skip=pattern)
    assert report.missing == report.unexpected == ()
    assert state["loader"].count == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("pattern", ["optimizer", "optimizer.*", "opt*"])
def test_a_pattern_speaks_of_all_that_stands_under_what_it_matches(tmp_path: Path, pattern: str) -> None:
    saved, _, _ = scheduled(1)
    holdfast.save(tmp_path / "c", saved, skip=pattern)
    state, optimizer, _ = scheduled(2)
    holdfast.load(tmp_path / "c", state, skip=[pattern])
    assert optimizer.param_groups[0]["lr"] == 0.2
    model = state["model"]
    holdfast.save(tmp_path / "bare", {"model": model})
    report = holdfast.load(tmp_path / "bare", {"model": model, "optimizer": optimizer}, skip=pattern)
    assert report.missing == ()


@pytest.mark.parametrize("patterns", [3, [3], [None]])
def test_patterns_that_are_no_text_are_refused(tmp_path: Path, patterns: object) -> None:
    with pytest.raises((InvalidError, TypeError)) as caught:
        holdfast.save(tmp_path / "c", {"a": 1}, only=patterns)  # type: ignore[arg-type]
    assert isinstance(caught.value, InvalidError)


def test_the_report_of_a_save(tmp_path: Path) -> None:
    report = holdfast.save(tmp_path / "c", {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int64)})
    assert (report.step, report.bytes, report.tensors, report.divergent) == (None, 28, 2, ())
    assert report.committed_seconds >= report.staged_seconds >= 0
    assert (tmp_path / "c" / report.attempt).is_dir()


# ------------------------------------------------------------------------------------------------ wrong calls


def test_swapped_arguments_are_refused_with_a_word_about_it(tmp_path: Path) -> None:
    path, state = tmp_path / "c", {"a": torch.ones(1)}
    with pytest.raises(InvalidError, match="swapped"):
        holdfast.save(state, path)  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match="swapped"):
        holdfast.load(state, path)  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match="swapped"):
        holdfast.async_save(state, str(path))  # type: ignore[arg-type]
    with holdfast.CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(InvalidError, match="swapped"):
            manager.save(state, 3)  # type: ignore[arg-type]
        with pytest.raises(InvalidError, match="swapped"):
            manager.load(3, state)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [-1, True, 1.0, "3", None, 10**12])
def test_steps_that_are_none_are_refused(tmp_path: Path, step: object) -> None:
    with holdfast.CheckpointManager(tmp_path / "run") as manager, pytest.raises(InvalidError):
        manager.save(step, {"a": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["", 3, None, b"bytes", "s3://bucket/x"])
def test_paths_that_are_none_are_refused(path: object) -> None:
    with pytest.raises(InvalidError):
        holdfast.save(path, {"a": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [None, [1], "x", torch.ones(1), nn.Linear(1, 1)])
def test_states_that_are_no_dict_are_refused(tmp_path: Path, state: object) -> None:
    with pytest.raises(InvalidError):
        holdfast.save(tmp_path / "c", state)  # type: ignore[arg-type]
    with pytest.raises(InvalidError):
        holdfast.load(tmp_path / "c", state)  # type: ignore[arg-type]


def test_a_state_key_that_is_no_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="3"):
        holdfast.save(tmp_path / "c", {3: torch.ones(1)})  # type: ignore[dict-item]


def test_a_root_given_for_a_path_and_a_path_for_a_root(tmp_path: Path) -> None:
    root, path = tmp_path / "run", tmp_path / "c"
    state = {"a": torch.ones(1)}
    with holdfast.CheckpointManager(root) as manager:
        manager.save(1, state).wait()
    holdfast.save(path, state)
    for call in (
        lambda: holdfast.save(root, state),
        lambda: holdfast.load(root, state),
        lambda: holdfast.open_checkpoint(root),
    ):
        with pytest.raises(InvalidError, match=r"root of a run.*CheckpointManager"):
            call()
    with pytest.raises(InvalidError, match=r"one checkpoint.*holdfast\.load"):
        holdfast.CheckpointManager(path)
    assert holdfast.load(root / "step-000000000001", state).loaded == ("a",)


def test_saving_onto_a_checkpoint_is_a_conflict_and_touches_nothing(tmp_path: Path) -> None:
    path, root = tmp_path / "c", tmp_path / "run"
    holdfast.save(path, {"a": torch.ones(2)})
    with holdfast.CheckpointManager(root) as manager:
        manager.save(1, {"a": torch.ones(2)}).wait()
        before = listing(tmp_path)
        with pytest.raises(ConflictError, match="already there"):
            holdfast.save(path, {"a": torch.zeros(2)})
        handle = manager.save(1, {"a": torch.zeros(2)})
        with pytest.raises(ConflictError, match="already there"):
            handle.wait()
        assert listing(tmp_path) == before
    target = torch.zeros(2)
    holdfast.load(path, {"a": target})
    assert target.tolist() == [1.0, 1.0]


def test_loading_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingError):
        holdfast.load(tmp_path / "absent", {"a": torch.ones(1)})
    with holdfast.CheckpointManager(tmp_path / "run") as manager:
        assert manager.load({"a": torch.ones(1)}) is None
        assert manager.latest is None and manager.steps() == []
        manager.save(4, {"a": torch.ones(1)}).wait()
        with pytest.raises(MissingError, match=r"no committed step 3; committed, newest first: 4\."):
            manager.load({"a": torch.ones(1)}, 3)
    assert not (tmp_path / "absent").exists()


def test_the_manager_loads_the_newest_step_and_says_which(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path / "run") as manager:
        for step in (3, 20, 7):
            manager.save(step, {"a": torch.full((2,), float(step)), "step": step}).wait()
        assert manager.steps() == [3, 7, 20] and manager.latest == 20
        state: dict[str, object] = {"a": torch.zeros(2), "step": 0}
        assert manager.load(state) == 20
        assert state["step"] == 20
        assert manager.load(state, 7) == 7
        assert state["step"] == 7
        assert manager.load_report is not None and manager.load_report.step == 7


def test_moments_of_a_handle(tmp_path: Path) -> None:
    handle = holdfast.async_save(tmp_path / "c", {"a": torch.ones(3)})
    assert handle.wait("staged") is None
    assert handle.wait("replicated") is None
    report = handle.wait(timeout=30)
    assert report is not None and report.tensors == 1
    assert handle.staged.done() and handle.replicated.done() and handle.committed.result() is report
    with pytest.raises(InvalidError, match="moment"):
        handle.wait("done")  # type: ignore[arg-type]


def test_training_may_change_the_state_once_it_is_staged(tmp_path: Path) -> None:
    tensor = torch.ones(2_000_000)
    handle = holdfast.async_save(tmp_path / "c", {"a": tensor})
    handle.wait("staged")
    tensor.zero_()
    handle.wait()
    target = torch.zeros(2_000_000)
    holdfast.load(tmp_path / "c", {"a": target})
    assert bool((target == 1).all())


def test_a_relative_path_and_one_with_a_home_in_it_are_folders_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    holdfast.save("relative", {"a": torch.ones(1)})
    assert os.path.exists(tmp_path / "relative" / "manifest.json")


def test_an_empty_state(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {})
    assert holdfast.load(tmp_path / "c", {}).loaded == ()


def test_tensors_tied_inside_a_list_are_tied_again(tmp_path: Path) -> None:
    kept = torch.arange(3.0)
    holdfast.save(tmp_path / "c", {"queue": [kept, kept, torch.ones(2)]})
    state: dict[str, object] = {"queue": []}
    holdfast.load(tmp_path / "c", state)
    queue = state["queue"]
    assert isinstance(queue, list)
    assert queue[0] is queue[1]
    assert torch.equal(queue[0], kept) and torch.equal(queue[2], torch.ones(2))


def test_an_object_whose_state_is_no_dict_is_refused_at_the_save(tmp_path: Path) -> None:
    class Listing:
        def state_dict(self) -> list[int]:
            return [1, 2]

        def load_state_dict(self, state: object) -> None:
            raise AssertionError(state)

    with pytest.raises(InvalidError, match=r"loader: Listing\.state_dict\(\) returned list; expected a dict"):
        holdfast.save(tmp_path / "c", {"loader": Listing()})
    assert not (tmp_path / "c").exists()
