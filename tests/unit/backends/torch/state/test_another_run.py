"""Corners of `rename`, `partial` and `hyperparameters`: factored and own state, ties, gradients, values by rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.backends.torch.optimizers.state import shape_of_state
from holdfast.errors import InvalidError


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("stored", "before", "now", "expected"),
    [
        ((10, 8), (10, 8), (12, 8), (12, 8)),
        ((10, 1), (10, 8), (12, 8), (12, 1)),
        ((1, 8), (10, 8), (12, 8), (1, 8)),
        ((), (10, 8), (12, 8), ()),
        ((1,), (10, 8), (12, 8), (1,)),
        ((1, 1), (1, 1), (3, 1), (3, 1)),
        ((40,), (10, 8), (12, 8), None),
        ((40,), (10, 8), (10, 8), (40,)),
        ((10, 8), (10, 8), (80,), (80,)),
    ],
)
def test_state_follows_the_shape_of_its_parameter(
    stored: tuple[int, ...], before: tuple[int, ...], now: tuple[int, ...], expected: tuple[int, ...] | None
) -> None:
    assert shape_of_state(stored, before, now) == expected


def test_factored_moments_of_a_resized_parameter(tmp_path: Path) -> None:
    old = nn.Embedding(10, 8)
    optimizer = stepped(torch.optim.Adafactor(old.parameters()))
    holdfast.save(tmp_path / "c", {"model": old, "optimizer": optimizer}, process_group=False)
    model = nn.Embedding(12, 8)
    new = torch.optim.Adafactor(model.parameters())
    state = {"model": model, "optimizer": new}
    report = holdfast.load(tmp_path / "c", state, partial={"model.weight"}, process_group=False)
    row, saved_row = new.state[model.weight]["row_var"], optimizer.state[old.weight]["row_var"]
    assert row.shape == (12, 1) and torch.equal(row[:10], saved_row) and not row[10:].any()
    assert torch.equal(new.state[model.weight]["col_var"], optimizer.state[old.weight]["col_var"])
    assert [each.fqn for each in report.partial] == ["model.weight", "optimizer.state.weight.row_var"]
    stepped(new)


def test_moments_of_a_parameter_of_one_element_grow_with_it(tmp_path: Path) -> None:
    old = nn.Linear(1, 1)
    optimizer = stepped(torch.optim.AdamW(old.parameters()))
    holdfast.save(tmp_path / "c", {"model": old, "optimizer": optimizer}, process_group=False)
    model = nn.Linear(1, 3)
    new = torch.optim.AdamW(model.parameters())
    holdfast.load(tmp_path / "c", {"model": model, "optimizer": new}, partial="model", process_group=False)
    assert torch.equal(new.state[model.weight]["exp_avg"][:1], optimizer.state[old.weight]["exp_avg"])
    assert not new.state[model.weight]["exp_avg"][1:].any() and new.state[model.weight]["step"] == 1
    stepped(new)


def test_state_of_its_own_form_is_refused(tmp_path: Path) -> None:
    old = nn.Embedding(10, 8)
    optimizer = stepped(torch.optim.SGD(old.parameters(), momentum=0.9))
    optimizer.state[old.weight]["absmax"] = torch.ones(5)
    holdfast.save(tmp_path / "c", {"model": old, "optimizer": optimizer}, process_group=False)
    model = nn.Embedding(12, 8)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9)}
    with pytest.raises(
        InvalidError, match=r"optimizer\.state\.weight\.absmax: \(5,\), of a parameter that has another"
    ):
        holdfast.load(tmp_path / "c", state, partial={"model.weight"}, strict=False, process_group=False)


def test_state_in_a_list_of_a_resized_parameter_is_refused(tmp_path: Path) -> None:
    """It would have the saved shape, at which the next step fails."""
    old = nn.Embedding(10, 8)
    optimizer = stepped(torch.optim.SGD(old.parameters(), momentum=0.9))
    optimizer.state[old.weight]["history"] = [torch.ones(10, 8), torch.ones(())]
    holdfast.save(tmp_path / "c", {"model": old, "optimizer": optimizer}, process_group=False)
    model = nn.Embedding(12, 8)
    new = torch.optim.SGD(model.parameters(), momentum=0.9)
    state = {"model": model, "optimizer": new}
    with pytest.raises(InvalidError, match=r"1 of another shape: optimizer\.state\.weight\.history\.0: \(10, 8\)"):
        holdfast.load(tmp_path / "c", state, partial="model.weight", strict=False, process_group=False)
    assert not new.state
    same = nn.Embedding(10, 8)
    again = torch.optim.SGD(same.parameters(), momentum=0.9)
    holdfast.load(tmp_path / "c", {"model": same, "optimizer": again}, process_group=False)
    assert [each.shape for each in again.state[same.weight]["history"]] == [(10, 8), ()]


def test_a_tensor_inside_one_value_is_not_filled_in_part(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"m": {"list": [torch.ones(4), 2], "w": torch.ones(1)}}, process_group=False)
    state: dict[str, dict[str, object]] = {"m": {"list": [torch.zeros(6), 2], "w": torch.zeros(1)}}
    with pytest.raises(InvalidError, match=r"m\.list\.0: \(6,\) here and \(4,\) in the checkpoint, inside one value"):
        holdfast.load(tmp_path / "c", state, partial="m.list", process_group=False)
    # Without `partial`, the value is replaced as a whole.
    holdfast.load(tmp_path / "c", state, process_group=False)
    assert state["m"]["list"][0].eq(torch.ones(4)).all()  # type: ignore[index]


@pytest.mark.parametrize(("value", "other"), [("a", "b"), ("c", "b")])
def test_a_value_does_not_take_the_place_of_a_dict(tmp_path: Path, value: str, other: str) -> None:
    holdfast.save(tmp_path / "c", {"m": {value: 5, other: {"n": 1, "t": torch.ones(1)}}}, process_group=False)
    state = {"m": {other: {"n": 0, "t": torch.zeros(1)}}}
    with pytest.raises(InvalidError, match=rf"makes m\.b of m\.{value}, and other names are below m\.b"):
        holdfast.load(tmp_path / "c", state, rename={value: other}, strict=False, process_group=False)


def test_gradients_of_a_resized_parameter(tmp_path: Path) -> None:
    old = nn.Linear(3, 4)
    old.weight.grad, old.bias.grad = torch.ones(4, 3), torch.ones(4)
    holdfast.save(tmp_path / "c", {"model": old}, grads=True, process_group=False)
    model = nn.Linear(3, 6)
    report = holdfast.load(tmp_path / "c", {"model": model}, grads=True, partial="model", process_group=False)
    assert model.weight.grad is not None and torch.equal(model.weight.grad[:4], torch.ones(4, 3))
    assert {each.fqn for each in report.partial} == {
        f"model.{name}{end}" for name in ("weight", "bias") for end in ("", ".grad")
    }


def test_tied_names_that_were_saved_apart_are_refused(tmp_path: Path) -> None:
    saved = {"a": torch.ones(4), "b": torch.zeros(4)}
    holdfast.save(tmp_path / "c", {"t": saved}, process_group=False)
    tied = torch.full((6,), 7.0)
    with pytest.raises(InvalidError, match=r"t\.b: \(6,\) here and \(4,\) in the checkpoint"):
        holdfast.load(tmp_path / "c", {"t": {"a": tied, "b": tied}}, partial="t.a", process_group=False)
    assert tied.eq(7).all()


def test_values_by_rank_and_containers_follow_their_name(tmp_path: Path) -> None:
    saved = {
        "old": {"r": holdfast.PerRank({"seed": 5}), "list": [torch.ones(2), {"x": torch.zeros(1)}], "w": torch.ones(1)}
    }
    holdfast.save(tmp_path / "c", saved, process_group=False)
    mine = holdfast.PerRank(None)
    state: dict[str, dict[str, object]] = {
        "new": {"mine": mine, "list": [torch.zeros(2), {"x": torch.ones(1)}], "w": torch.zeros(1)}
    }
    holdfast.load(tmp_path / "c", state, rename={"old": "new", "r": "mine"}, process_group=False)
    assert mine.value == {"seed": 5}
    listed = state["new"]["list"]
    assert isinstance(listed, list) and listed[0].eq(1).all() and listed[1]["x"].eq(0).all()


def test_state_left_out_of_the_checkpoint_follows_its_name(tmp_path: Path) -> None:
    old = nn.ModuleDict({"body": nn.Linear(2, 2)})
    optimizer = stepped(torch.optim.AdamW(old.parameters()))
    holdfast.save(tmp_path / "c", {"model": old, "optimizer": optimizer}, skip="*.exp_avg", process_group=False)
    model = nn.ModuleDict({"trunk": nn.Linear(2, 2)})
    new = stepped(torch.optim.AdamW(model.parameters()))
    state = {"model": model, "optimizer": new}
    holdfast.load(tmp_path / "c", state, rename={"body": "trunk"}, strict=False, process_group=False)
    weights = model["trunk"].weight, old["body"].weight
    assert torch.equal(new.state[weights[0]]["exp_avg_sq"], optimizer.state[weights[1]]["exp_avg_sq"])


class OwnState(torch.optim.SGD):
    """Keeps a tensor outside the state of its parameters."""

    def __init__(self, parameters: object, lr: float) -> None:
        super().__init__(parameters, lr=lr)  # type: ignore[arg-type]
        self.slow = torch.zeros(3)

    def state_dict(self) -> dict[str, object]:
        return {**super().state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.slow = state_dict["slow"]  # type: ignore[assignment]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "slow"})


def test_an_optimizer_saved_as_an_object_keeps_its_hyperparameters(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = OwnState(model.parameters(), lr=0.1)
    optimizer.slow += 5
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer}, process_group=False)
    new = OwnState(model.parameters(), lr=0.5)
    holdfast.load(tmp_path / "c", {"model": model, "optimizer": new}, hyperparameters=False, process_group=False)
    assert new.param_groups[0]["lr"] == 0.5 and new.slow.eq(5).all()


def test_a_switch_that_stays_another_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    holdfast.save(
        tmp_path / "c",
        {"model": model, "optimizer": stepped(torch.optim.AdamW(model.parameters()))},
        process_group=False,
    )
    new = torch.optim.AdamW(model.parameters(), amsgrad=True)
    with caplog.at_level(logging.WARNING):
        holdfast.load(tmp_path / "c", {"model": model, "optimizer": new}, hyperparameters=False, process_group=False)
    assert "had amsgrad=True, the checkpoint has amsgrad=False; its own value stays" in caplog.text
    assert new.param_groups[0]["amsgrad"] is True


def test_an_optimizer_of_other_names_alone_fills_nothing(tmp_path: Path) -> None:
    old = nn.ModuleDict({"body": nn.Linear(2, 2)})
    holdfast.save(
        tmp_path / "c", {"model": old, "optimizer": stepped(torch.optim.AdamW(old.parameters()))}, process_group=False
    )
    model = nn.ModuleDict({"trunk": nn.Linear(2, 2)})
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with pytest.raises(
        InvalidError, match=r"nothing of the state is in the checkpoint.*pass rename=\{'body': 'trunk'\}"
    ):
        holdfast.load(tmp_path / "c", state, strict=False, process_group=False)


NESTED = {"sub": {"w": torch.ones(2), "n": 5}, "top": 1}


@pytest.mark.parametrize(
    ("saved", "rename", "state"),
    [
        ({"m": {"module": NESTED}}, {"module": ""}, {"m": NESTED}),
        ({"m": {"module": NESTED}}, {"module.": ""}, {"m": NESTED}),
        ({"m": NESTED}, {"": "encoder."}, {"m": {"encoder": NESTED}}),
        ({"m": NESTED}, {"sub": "a.b"}, {"m": {"a": {"b": NESTED["sub"]}, "top": 1}}),
        ({"m": NESTED}, {"m.sub": "s"}, {"m": {"top": 1, "t": torch.ones(1)}, "s": NESTED["sub"]}),
        ({"m": {"net": NESTED}}, {"m.net": "net"}, {"net": NESTED}),
        ({"m": NESTED}, {"sub.w": "v", "sub.n": "k"}, {"m": {"v": torch.ones(2), "k": 5, "top": 1}}),
        ({"m": {"x.w": torch.ones(2), "x.n": 5}}, {"x.": ""}, {"m": {"w": torch.ones(2), "n": 5}}),
        ({"m": {"w": torch.ones(2), "x.n": 5}}, {"": "y."}, {"m": {"y.w": torch.ones(2), "y.x.n": 5}}),
        ({"m": {"module": nn.Linear(2, 2)}}, {"module": ""}, {"m": nn.Linear(2, 2)}),
        ({"m": nn.BatchNorm1d(2)}, {"": "a"}, {"m": nn.ModuleDict({"a": nn.BatchNorm1d(2)})}),
    ],
)
def test_dicts_of_dicts_are_opened_and_nested(
    tmp_path: Path, saved: dict[str, object], rename: dict[str, str], state: dict[str, object]
) -> None:
    extra = {"m": {**saved["m"], "t": torch.ones(1)}} if "m.sub" in rename else saved  # type: ignore[dict-item]
    holdfast.save(tmp_path / "c", extra, process_group=False)
    emptied = _emptied(state)
    holdfast.load(tmp_path / "c", emptied, rename=rename, process_group=False)
    assert repr(_emptied(emptied, keep=True)) == repr(_emptied(state, keep=True))


def _emptied(value: object, *, keep: bool = False) -> dict[str, object]:
    """Return a copy of dicts, with zeros unless the values are kept."""
    found = _copied(value, keep=keep)
    assert isinstance(found, dict)
    return found


def _copied(value: object, *, keep: bool) -> object:
    if isinstance(value, dict):
        return {key: _copied(item, keep=keep) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return value.clone() if keep else torch.zeros_like(value)
    return value if keep or isinstance(value, nn.Module) else 0


class Grows(torch.nn.Module):
    """A buffer that its own code takes in any size."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.empty(0))

    def _load_from_state_dict(self, state: dict[str, torch.Tensor], prefix: str, *others: object) -> None:
        self.seen = state[f"{prefix}seen"].clone()
        super()._load_from_state_dict(state, prefix, *others)


class Takes(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.empty(size))

    def load_state_dict(self, state: Mapping[str, torch.Tensor], *others: object, **options: object) -> object:
        self.seen = state["seen"].clone()
        return super().load_state_dict(state, *others, **options)


OWN_CODE = {
    "load_state_dict": (lambda: Takes(0), r"m\.seen: \(0,\) here and \(3,\).* \(Takes\.load_state_dict is not called"),
    "compiled": (
        lambda: torch.compile(Takes(0), backend="eager"),
        r"m\.seen: .*\(Takes\.load_state_dict is not called",
    ),
    "inside": (lambda: torch.nn.Sequential(Grows()), r"m\.0\.seen: .*\(Grows\._load_from_state_dict is not called"),
}


@pytest.mark.parametrize("case", OWN_CODE)
def test_code_of_a_module_that_would_take_another_shape_is_said_not_to_be_called(tmp_path: Path, case: str) -> None:
    make, text = OWN_CODE[case]
    name = "0.seen" if case == "inside" else "seen"
    holdfast.save(tmp_path / "c", {"m": {name: torch.ones(3)}}, process_group=False)
    with pytest.raises(InvalidError, match=f"{text}: a load fills tensors in place"):
        holdfast.load(tmp_path / "c", {"m": make()}, process_group=False)


def test_a_module_of_torch_of_another_shape_says_nothing_of_its_code(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"m": torch.nn.BatchNorm1d(3)}, process_group=False)
    with pytest.raises(InvalidError, match="of another shape") as refused:
        holdfast.load(tmp_path / "c", {"m": torch.nn.BatchNorm1d(4)}, process_group=False)
    assert "not called" not in str(refused.value)
