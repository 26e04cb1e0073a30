"""What a save refuses, it names all at once, by path and with the way out; nothing is written."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import InvalidError


class Loader:
    def __init__(self, **state: object) -> None:
        self.state = state

    def state_dict(self) -> dict[str, object]:
        return self.state

    def load_state_dict(self, state: dict[str, object]) -> None: ...


def refusal(folder: Path, state: Mapping[str, object], skip: list[str] | None = None) -> str:
    with pytest.raises(InvalidError) as caught:
        holdfast.save(folder / "c", state, skip=skip)
    assert not (folder / "c").exists()
    return str(caught.value)


def test_three_and_the_count(tmp_path: Path) -> None:
    state = {
        "model": nn.Linear(2, 2),
        "args": argparse.Namespace(lr=0.1),
        "cfg": {"loss": nn.functional.mse_loss, "devices": [object()], "lr": 0.1},
        "sparse": torch.eye(2).to_sparse(),
        "ema": [torch.ones(2, device="meta")],
    }
    text = refusal(tmp_path, state)
    assert text.startswith("5 values of the state cannot be saved: (1) ") and text.endswith("; and 2 more")
    assert text.count("; (") == 2 and "(4)" not in text
    # The first of them mended, the others are named.
    text = refusal(tmp_path, {**state, "sparse": torch.eye(2), "ema": [], "args": vars(state["args"])})
    assert text == (
        "2 values of the state cannot be saved: (1) cfg.loss: a value of type function cannot be saved. It is code: "
        "pass its name, value.__name__, and look it up after a load, or leave it out with skip=['cfg.loss']; "
        "(2) cfg.devices[0]: a value of type object cannot be saved. Convert it to plain values, or give the object "
        "that holds it state_dict() and load_state_dict(), or leave it out with skip=['cfg.devices']"
    )
    holdfast.save(tmp_path / "c", state, skip=["cfg.loss", "cfg.devices", "args", "sparse", "ema"])


def test_the_only_one_stands_alone(tmp_path: Path) -> None:
    expected = "args: a value of type argparse.Namespace cannot be saved. Pass vars(value), or leave it out with "
    assert refusal(tmp_path, {"args": argparse.Namespace(lr=0.1)}) == f"{expected}skip=['args']"


def test_in_objects_a_path_has_no_names_of_ours_and_skip_leaves_the_object_out(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    groups = [
        {"params": [model.weight], "schedule": print},
        {"params": [model.bias], "schedule": print, "lr": 0.5},
    ]
    state = {
        "model": model,
        "optimizer": torch.optim.SGD(groups, lr=0.1),
        "loader": Loader(position={"at": [argparse.Namespace()]}),
        "loaders": [holdfast.PerRank({"seen": {"at": argparse.Namespace()}})],
    }
    text = refusal(tmp_path, state)
    assert text.startswith("3 values of the state cannot be saved: (1) optimizer.param_groups.schedule: a value of ")
    assert "(2) loader.position.at[0]: " in text and "(3) loaders.0.seen.at: " in text
    names = ["optimizer", "loader", "loaders.0"]
    assert all(f"skip=['{name}']" in text for name in names)
    holdfast.save(tmp_path / "c", state, skip=names)


def test_extra_state_of_a_module(tmp_path: Path) -> None:
    class Counted(nn.Linear):
        def get_extra_state(self) -> object:
            return {"at": argparse.Namespace()}

        def set_extra_state(self, state: object) -> None: ...

    state = {"model": nn.Sequential(Counted(2, 2))}
    text = refusal(tmp_path, state)
    assert text.startswith("model.0._extra_state.at: ") and text.endswith("skip=['model.0._extra_state']")
    holdfast.save(tmp_path / "c", state, skip="model.0._extra_state")


@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (lambda: torch.eye(2).to_sparse(), r"torch\.sparse_coo .*value\.to_dense\(\)"),
        (lambda: torch.eye(2).to_sparse_csr(), r"torch\.sparse_csr .*value\.to_dense\(\)"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), r"nested Tensor .*value\.unbind\(\)"),
        (lambda: torch.ones(2, device="meta"), "meta tensor.*materialise"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_of_other_kinds(tmp_path: Path, make: Callable[[], torch.Tensor], instead: str) -> None:
    tensor = make()
    for state in ({"w": tensor}, {"w": [tensor]}, {"w": {1: tensor}}, {"w": Loader(t=tensor)}):
        with pytest.raises(InvalidError, match=rf"^w.*: .*{instead}"):
            holdfast.save(tmp_path / "c", state)


def test_a_save_of_a_run_holds_the_error_and_the_next_one_is_taken(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": torch.ones(1)}).wait()
        handle = manager.save(2, {"w": torch.ones(1), "a": argparse.Namespace(), "s": torch.eye(2).to_sparse()})
        with pytest.raises(InvalidError, match="2 values of the state cannot be saved"):
            handle.wait()
        manager.save(3, {"w": torch.ones(1)}).wait()
        assert manager.steps() == [1, 3]


@pytest.mark.parametrize("value", [{"kept": 1}, 7, {"w": torch.ones(1)}, {"a": {"b": [torch.ones(1)]}}])
def test_a_key_that_exports_leave_out_is_refused_by_name(tmp_path: Path, value: object) -> None:
    state = {"w": torch.ones(1), "holdfast_pieces": value}
    text = refusal(tmp_path, state)
    assert text.startswith("holdfast_pieces: Holdfast itself keeps names under this key") and "Rename it" in text
    for number, pattern in enumerate(("holdfast_pieces", "holdfast_pieces*")):
        holdfast.save(tmp_path / f"skipped-{number}", state, skip=pattern)
    holdfast.save(tmp_path / "chosen", state, only="w")
    holdfast.save(tmp_path / "c", {"w": state["w"], "deeper": {"holdfast_pieces": value}})
    assert holdfast.read(tmp_path / "c")["deeper"]
