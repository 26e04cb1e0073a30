"""State that an optimizer has, in another shape or kind than a checkpoint has it; and its state dict, without any."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import InvalidError


class Keeper(torch.optim.Optimizer):
    """Keeps what it is given; a step adds one to each tensor."""

    def __init__(self, parameter: torch.Tensor, kept: Mapping[str, object]) -> None:
        super().__init__([parameter], {})
        if kept:
            self.state[parameter] = dict(kept)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        raise AssertionError("a load steps nothing")


class Historian(Keeper):
    """Its history grows."""

    holdfast_growing_state = ("history",)


def state_of(kept: Mapping[str, object], kind: type[Keeper] = Keeper) -> tuple[dict[str, object], dict[str, object]]:
    """Return a state, and the entries of its optimizer."""
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = kind(weight, kept)
    return {"w": weight, "optimizer": optimizer}, optimizer.state[weight]


OTHER: dict[str, tuple[object, object, str]] = {
    "one block and four": (torch.ones(4), torch.zeros(1), "optimizer.state.w.kept: (1,) here and (4,)"),
    "blocks of two dimensions": (torch.ones(2, 4), torch.zeros(4, 2), "kept: (4, 2) here and (2, 4)"),
    "of more dimensions": (torch.ones(4, 4), torch.zeros(4, 4, 1), "kept: (4, 4, 1) here and (4, 4)"),
    "none of dimensions": (torch.ones(4), torch.zeros(()), "kept: () here and (4,)"),
    "in a list": ([torch.ones(4), torch.ones(3)], [torch.zeros(4), torch.zeros(2)], "kept.1: (2,) here and (3,)"),
    "in a dict": ({"a": torch.ones(3)}, {"a": torch.zeros(4)}, "kept.a: (4,) here and (3,)"),
    "a list for a tensor": (torch.ones(4), [torch.zeros(4)], "kept: a list here and (4,)"),
    "a tensor for a list": ([torch.ones(4)], torch.zeros(4), "kept: (4,) here and a list"),
}


@pytest.mark.parametrize("name", OTHER)
def test_state_of_another_form_is_refused_and_nothing_changes(tmp_path: Path, name: str) -> None:
    before, now, text = OTHER[name]
    holdfast.save(tmp_path / "c", state_of({"kept": before, "more": torch.ones(2)})[0], process_group=False)
    more = torch.zeros(2)
    state, entries = state_of({"kept": now, "more": more})
    for strict in (True, False):
        with pytest.raises(InvalidError, match="1 of another shape") as caught:
            holdfast.load(tmp_path / "c", state, strict=strict, process_group=False)
        assert text in str(caught.value) and "holdfast_growing_state" in str(caught.value)
        assert entries["kept"] is now and not more.any()
    holdfast.load(tmp_path / "c", state, skip="optimizer.state.w.kept", process_group=False)
    assert entries["more"] is more and more.all()
    kept = entries["kept"]
    inner = kept.values() if isinstance(kept, dict) else kept if isinstance(kept, list) else [kept]
    assert not any(bool(each.any()) for each in inner)


@pytest.mark.parametrize("name", OTHER)
def test_an_optimizer_without_state_takes_any_form(tmp_path: Path, name: str) -> None:
    before = OTHER[name][0]
    holdfast.save(tmp_path / "c", state_of({"kept": before})[0], process_group=False)
    state, _ = state_of({})
    holdfast.load(tmp_path / "c", state, process_group=False)
    optimizer = state["optimizer"]
    assert isinstance(optimizer, Keeper)
    ((_, entries),) = optimizer.state.items()
    assert type(entries["kept"]) is type(before)
    assert str(entries["kept"]) == str(before)


def test_counts_and_what_is_not_made_yet_are_replaced(tmp_path: Path) -> None:
    saved = {
        "step": torch.tensor(3.0),
        "count": torch.tensor([4.0]),
        "late": torch.ones(4),
        "later": [torch.ones(2)],
        "placeholder": torch.ones(4),
        "empty": torch.ones(3),
        "back": None,
    }
    holdfast.save(tmp_path / "c", state_of(saved)[0], process_group=False)
    now = {
        "step": torch.zeros(1),
        "count": 0,
        "late": None,
        "later": [],
        "placeholder": 0,
        "empty": torch.zeros(0),
        "back": torch.zeros(4),
    }
    state, _ = state_of(now)
    holdfast.load(tmp_path / "c", state, process_group=False)
    optimizer = state["optimizer"]
    assert isinstance(optimizer, Keeper)
    ((_, entries),) = optimizer.state.items()
    assert str({key: entries[key] for key in saved}) == str(saved)


def test_state_that_its_class_declares_to_grow_is_replaced(tmp_path: Path) -> None:
    saved = {"history": torch.arange(12.0).view(3, 4), "average": torch.ones(4)}
    holdfast.save(tmp_path / "c", state_of(saved, Historian)[0], process_group=False)
    average = torch.zeros(4)
    state, _ = state_of({"history": torch.zeros(1, 4), "average": average}, Historian)
    holdfast.load(tmp_path / "c", state, process_group=False)
    optimizer = state["optimizer"]
    assert isinstance(optimizer, Historian)
    ((_, entries),) = optimizer.state.items()
    assert torch.equal(entries["history"], saved["history"])
    assert entries["average"] is average and average.all()
    state, _ = state_of({"history": torch.zeros(1, 4), "average": torch.zeros(2)}, Historian)
    with pytest.raises(InvalidError, match=r"average: \(2,\) here and \(4,\)"):
        holdfast.load(tmp_path / "c", state, process_group=False)


def test_a_list_that_grew_is_replaced(tmp_path: Path) -> None:
    # As the history of LBFGS: more tensors of one shape.
    saved = [torch.full((4,), float(number)) for number in range(3)]
    holdfast.save(tmp_path / "c", state_of({"steps": saved})[0], process_group=False)
    first = torch.zeros(4)
    state, _ = state_of({"steps": [first]})
    holdfast.load(tmp_path / "c", state, process_group=False)
    optimizer = state["optimizer"]
    assert isinstance(optimizer, Keeper)
    ((_, entries),) = optimizer.state.items()
    assert entries["steps"][0] is first
    assert all(map(torch.equal, entries["steps"], saved)) and len(entries["steps"]) == 3


# ---------------------------------------------------------------------------------------------------- its state dict


def trained(*, stepped: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    if stepped:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the state dict in the form of `get_optimizer_state_dict`: with names in place of numbers."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [{**group, "params": [names[each] for each in group["params"]]} for group in optimizer.param_groups]
    return {"state": {names[each]: dict(kept) for each, kept in optimizer.state.items()}, "param_groups": groups}


def numbered(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return optimizer.state_dict()


PLACES = {
    "at the top": lambda state: {"optimizer": state},
    "in a dict of values": lambda state: {"training": {"optimizer": state, "epoch": 3}},
    "beside tensors": lambda state: {"training": {"optimizer": state, "average": torch.zeros(2)}},
    "in a list": lambda state: {"optimizers": [state, state]},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", [numbered, by_name])
def test_the_state_dict_of_an_optimizer_without_state_is_refused(tmp_path: Path, form, place: str) -> None:  # type: ignore[no-untyped-def]
    holdfast.save(tmp_path / "c", PLACES[place](form(*trained(stepped=True))), process_group=False)
    kept = form(*trained(stepped=False))
    state = PLACES[place](kept)
    with pytest.raises(InvalidError, match=r"optimizers?(\.0)? is the state dict .*pass the optimizer itself"):
        holdfast.load(tmp_path / "c", state, process_group=False)
    assert kept["state"] == {}
    # With state it is filled in place.
    kept = form(*trained(stepped=True))
    first = next(iter(kept["state"].values()))["exp_avg"]
    expected = first.clone()
    first.zero_()
    holdfast.load(tmp_path / "c", PLACES[place](kept), process_group=False)
    assert torch.equal(first, expected)


def test_the_optimizer_itself_takes_such_a_checkpoint(tmp_path: Path) -> None:
    model, optimizer = trained(stepped=True)
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer.state_dict()}, process_group=False)
    other, fresh = trained(stepped=False)
    with pytest.raises(InvalidError, match="optimizer is the state dict"):
        holdfast.load(tmp_path / "c", {"model": other, "optimizer": fresh.state_dict()}, process_group=False)
    holdfast.load(tmp_path / "c", {"model": other, "optimizer": fresh}, process_group=False)
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_what_a_load_leaves_out_is_not_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = trained(stepped=True)
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer.state_dict()}, process_group=False)
    for skip in ("optimizer", "optimizer.state", "optimizer.state.*"):
        other, fresh = trained(stepped=False)
        kept = fresh.state_dict()
        holdfast.load(tmp_path / "c", {"model": other, "optimizer": kept}, skip=skip, process_group=False)
        assert kept["state"] == {}
    assert "pass the optimizer itself" not in caplog.text
    state: dict[str, object] = {"model": model, "optimizer": trained(stepped=False)[1].state_dict()}
    holdfast.load(tmp_path / "c", state, strict=False, process_group=False)
    assert "pass the optimizer itself" in caplog.text
    loaded = state["optimizer"]
    assert isinstance(loaded, dict) and len(loaded["state"]) == 2


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        ({"state": {"a": 1}}, {"state": {}}),
        ({"state": {"a": 1}, "param_groups": []}, {"state": {}, "param_groups": []}),
        ({"state": {"a": 1}, "param_groups": [{"lr": 1}]}, {"state": {}, "param_groups": [{"lr": 2}]}),
        ({"state": {}, "param_groups": [{"params": [0]}]}, {"state": {}, "param_groups": [{"params": [1]}]}),
        ({"state": {0: 1}, "param_groups": "all"}, {"state": {}, "param_groups": "none"}),
    ],
)
def test_dicts_that_only_resemble_one_are_filled(
    tmp_path: Path, saved: dict[str, object], here: dict[str, object]
) -> None:
    holdfast.save(tmp_path / "c", {"values": saved}, process_group=False)
    state: dict[str, object] = {"values": here}
    holdfast.load(tmp_path / "c", state, process_group=False)
    assert state["values"] == saved


def test_a_state_dict_without_state_on_both_sides_is_filled(tmp_path: Path) -> None:
    _, optimizer = trained(stepped=False)
    holdfast.save(tmp_path / "c", {"optimizer": optimizer.state_dict()}, process_group=False)
    other = torch.optim.AdamW(nn.Linear(3, 2).parameters(), lr=0.5).state_dict()
    state: dict[str, object] = {"optimizer": other}
    holdfast.load(tmp_path / "c", state, process_group=False)
    assert state["optimizer"] == optimizer.state_dict()
