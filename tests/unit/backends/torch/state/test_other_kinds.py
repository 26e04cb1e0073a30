"""A name that is a tensor or an object in the checkpoint and a plain value in the state, or the reverse: it is said."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import InvalidError


def refusal(folder: Path, state: Mapping[str, object]) -> str:
    with pytest.raises(InvalidError) as caught:
        holdfast.load(folder, state)
    return str(caught.value)


@pytest.mark.parametrize(
    ("present", "said"),
    [
        (0.0, "a float"),
        (3, "an int"),
        (None, "None"),
        (True, "a bool"),
        ("x", "a str"),
        ([1], "a list"),
        ({}, "a dict"),
    ],
)
def test_a_plain_value_where_the_checkpoint_has_a_tensor(tmp_path: Path, present: object, said: str) -> None:
    holdfast.save(tmp_path / "c", {"best_loss": torch.tensor(0.5)})
    state = {"best_loss": present}
    assert (f": best_loss is a tensor in the checkpoint and {said} here: pass a tensor, or strict=False") in refusal(
        tmp_path / "c", state
    )
    report = holdfast.load(tmp_path / "c", state, strict=False)
    assert state == {"best_loss": present} and report.missing == ("best_loss",)


def test_a_plain_value_where_the_checkpoint_has_an_object(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    saved = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "best": model.state_dict()}
    holdfast.save(tmp_path / "c", saved)
    others = {name: value for name, value in saved.items() if name != "optimizer"}
    assert "model is a module in the checkpoint and None here: pass the module" in refusal(
        tmp_path / "c", {**others, "model": None}
    )
    for name, text in {
        "optimizer": "optimizer is an optimizer in the checkpoint and None here: pass the optimizer",
        "scheduler": "scheduler is the state of an object in the checkpoint and None here: pass an object with state_d",
        "best": "best is a dict or list of tensors or objects in the checkpoint and None here: pass one with ",
    }.items():
        assert text in refusal(tmp_path / "c", {**saved, name: None})


def test_a_tensor_where_the_checkpoint_has_a_plain_value(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"best": {"loss": 0.5, "name": "a", "at": None, "w": torch.ones(1)}})
    for name, said in {"loss": "a float", "name": "a str", "at": "None"}.items():
        state = {"best": {"w": torch.ones(1), name: torch.zeros(1)}}
        expected = f"best.{name} is {said} in the checkpoint and a tensor here: pass {said}, or strict=False"
        assert expected in refusal(tmp_path / "c", state)


def test_all_such_names_are_named_at_once_up_to_three(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"best": {name: torch.ones(1) for name in "abcde"}})
    text = refusal(tmp_path / "c", {"best": dict.fromkeys("abcde", 0.0)})
    assert "best.a is a tensor" in text and "best.b is" in text and "best.c is" in text and "best.d" not in text
    assert "; and 2 more, or strict=False" in text


def test_what_is_left_out_or_absent_is_not_of_another_kind(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"best_loss": torch.tensor(0.5), "step": 3})
    state = {"best_loss": 0.0, "step": 0}
    holdfast.load(tmp_path / "c", state, skip="best_loss")
    assert state == {"best_loss": 0.0, "step": 3}
    assert "1 missing from the checkpoint: other" in refusal(tmp_path / "c", {"step": 0, "other": None})
