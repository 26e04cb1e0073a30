"""Crafted records of tensor subclasses: each ends in one of the five errors, imports nothing and runs nothing."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import CheckpointError
from tests.hostile.crafting import STEP, Crafted, Document
from tests.support.tensor_subclasses import KnownMomentum, blocks_of

HUGE = {"$int": "0x" + "f" * 20_000}


def state_of(steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = KnownMomentum(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "loose": blocks_of(torch.ones(4)), "listed": [torch.ones(1)]}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("records") / "template"
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        manager.save(STEP, state_of(1)).wait()
    return root


@pytest.fixture
def crafted(template: Path, tmp_path: Path) -> Iterator[Crafted]:
    shutil.copytree(template, tmp_path / "run")
    yield Crafted(tmp_path / "run")


def _moments(state: dict[str, Any]) -> list[object]:
    return [each["momentum"].dequantized().tolist() for each in state["optimizer"].state.values()]


def _record(items: Document) -> Document:
    """Return the record of the weight's momentum."""
    state: Any = items["optimizer"]["$group"]["items"]["state"]
    record: Document = state["weight"]["momentum"]["$framework"]["value"]
    return record


def _nested(levels: int) -> object:
    value: object = {"$tensor": "optimizer.state.weight.momentum.codes"}
    for _ in range(levels):
        value = {"$framework": {"kind": "torch.subclass", "value": {"class": "a.B", "tensors": {"codes": value}}}}
    return value


def _with(**fields: object) -> Callable[[Document], object]:
    return lambda record: record.update(fields)


def _with_tensors(**tensors: object) -> Callable[[Document], object]:
    return lambda record: record["tensors"].update(tensors)


CHANGES: dict[str, Callable[[Document], object]] = {
    "a class that nobody has": _with(**{"class": "nobody.Nothing"}),
    "a class that could be imported": _with(**{"class": "antigravity.Tensor"}),
    "a function of the system": _with(**{"class": "os.system"}),
    "a class of torch": _with(**{"class": "torch.distributed.tensor.DTensor"}),
    "another class at hand": _with(**{"class": "tests.support.tensor_subclasses.Pair"}),
    "a class that steers a terminal": _with(**{"class": "\x1b[31m"}),
    "a class that is a number": _with(**{"class": 5}),
    "a huge class": _with(**{"class": HUGE}),
    "no class": lambda record: record.pop("class"),
    "no context": lambda record: record.pop("context"),
    "no tensors": lambda record: record.pop("tensors"),
    "tensors in a list": _with(tensors=[{"$tensor": "optimizer.state.weight.momentum.codes"}]),
    "an inner tensor of no name in the index": _with_tensors(codes={"$tensor": "nothing"}),
    "the inner tensor of another": _with_tensors(codes={"$tensor": "model.weight"}),
    "an inner tensor too many": _with_tensors(more={"$tensor": "model.weight"}),
    "an attribute that is no inner tensor": _with_tensors(__class__={"$tensor": "model.weight"}),
    "an inner tensor too few": lambda record: record["tensors"].pop("scale"),
    "an inner tensor that is a value": _with_tensors(codes=5),
    "nested": _with_tensors(codes=_nested(1)),
    "nested deep": _with_tensors(codes=_nested(20)),
    "another shape": _with(shape={"$tuple": [8, 4]}),
    "a huge shape": _with(shape={"$tuple": [1 << 62, 1 << 62]}),
    "a shape of a huge number": _with(shape={"$tuple": [HUGE, 8]}),
    "a shape that is text": _with(shape="4x8"),
    "an empty shape": _with(shape={"$tuple": [0, 8]}),
    "another dtype": _with(dtype="float64"),
    "a grid": _with(grid={"$tuple": [2, 1]}),
    "a grid of zeros": _with(grid={"$tuple": [0, 0]}),
    "a grid of text": _with(grid="2"),
    "another context": _with(context={"block": 5}),
    "a huge context": _with(context={"block": HUGE}),
    "a context of a described object": _with(
        context={"$framework": {"kind": "torch.described", "value": {"class": "os.system", "fields": {}}}}
    ),
    "a context of an unknown kind": _with(context={"$framework": {"kind": "os.system", "value": "true"}}),
    "a context of a record": _with(context=_nested(1)),
    "a context of a small tensor": _with(
        context={
            "$framework": {
                "kind": "torch.tensor",
                "value": {"dtype": "float32", "shape": {"$tuple": [1]}, "data": {"$bytes": "AAAAAA=="}},
            }
        }
    ),
}


HARMLESS = {
    ("an inner tensor of no name in the index", 1),
    ("the inner tensor of another", 1),
    ("another context", 0),
}
"""What is loaded is what was saved: inner tensors are found by their own names, and a context is data of the class."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_crafted_record_is_refused(crafted: Crafted, name: str) -> None:
    crafted.edit_state(lambda items: CHANGES[name](_record(items)))
    modules = set(sys.modules)
    for steps in (0, 1):
        state = state_of(steps)
        before = _moments(state)
        if (name, steps) in HARMLESS:
            holdfast.load(crafted.folder, state, process_group=False)
            assert _moments(state) == _moments(state_of(1))
            continue
        with pytest.raises(CheckpointError):
            holdfast.load(crafted.folder, state, process_group=False)
        assert _moments(state) == before
    assert {name.partition(".")[0] for name in set(sys.modules) - modules} <= {"holdfast", "torch"}


def test_a_record_in_the_wrong_place_is_refused(crafted: Crafted) -> None:
    def move(items: Document) -> None:
        record = items["optimizer"]["$group"]["items"]["state"]["weight"]["momentum"]
        items["listed"] = [record]
        (table,) = items["optimizer"]["$group"]["items"]["hyperparameters"].values()
        table["lr"] = record

    crafted.edit_state(move)
    for state in (state_of(0), {"listed": [torch.ones(1)]}):
        with pytest.raises(CheckpointError):
            holdfast.load(crafted.folder, state, process_group=False)


@pytest.mark.parametrize("name", CHANGES)
def test_reading_a_crafted_record_gives_a_state_or_an_error(crafted: Crafted, name: str) -> None:
    crafted.edit_state(lambda items: CHANGES[name](_record(items)))
    modules = set(sys.modules)
    try:
        assert "optimizer" in holdfast.read(crafted.folder)
    except CheckpointError:
        pass
    assert {name.partition(".")[0] for name in set(sys.modules) - modules} <= {"holdfast", "torch"}
