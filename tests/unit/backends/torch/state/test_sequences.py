"""Lists and tuples of modules, optimizers and stateful objects: filled in place, as entries of a dict are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import InvalidError


class Counter:
    """An object with a state."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, object]:
        return {"count": self.count, "seen": torch.full((3,), float(self.count))}

    def load_state_dict(self, state: dict[str, object]) -> None:
        seen = state["seen"]
        assert isinstance(seen, torch.Tensor)
        self.count = int(seen[0])


class Trained:
    """A model with an optimizer for its matrices and one for the rest."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        matrices = [each for each in self.model.parameters() if each.ndim == 2]
        others = [each for each in self.model.parameters() if each.ndim != 2]
        self.optimizers = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in self.optimizers]

    def step(self, number: int) -> float:
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
        loss = (self.model(inputs) - inputs).square().mean()
        self.model.zero_grad()
        loss.backward()
        for each in (*self.optimizers, *self.schedulers):
            each.step()
        return loss.item()


def _pairs(run: Trained) -> list[dict[str, object]]:
    pairs = zip(run.optimizers, run.schedulers, strict=True)
    return [{"optimizer": optimizer, "scheduler": scheduler} for optimizer, scheduler in pairs]


LAYOUTS: dict[str, Callable[[Trained], dict[str, object]]] = {
    "lists": lambda run: {"model": run.model, "optimizers": run.optimizers, "schedulers": run.schedulers},
    "tuples": lambda run: {"models": (run.model,), "of": (tuple(run.optimizers), tuple(run.schedulers))},
    "in dicts": lambda run: {"train": {"model": run.model, "by": _pairs(run)}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_on_from_lists_and_tuples_of_objects(tmp_path: Path, layout: str) -> None:
    first, second = Trained(0), Trained(1)
    for number in range(3):
        first.step(number)
    holdfast.save(tmp_path / "c", LAYOUTS[layout](first))
    losses = [first.step(number) for number in range(3, 6)]
    holdfast.load(tmp_path / "c", LAYOUTS[layout](second))
    assert [second.step(number) for number in range(3, 6)] == losses


def test_items_are_named_by_number_and_a_dict_of_the_same_names_takes_them(tmp_path: Path) -> None:
    first, second = Trained(0), Trained(1)
    first.step(0)
    holdfast.save(tmp_path / "c", LAYOUTS["lists"](first))
    names = {*holdfast.open_checkpoint(tmp_path / "c").tensors}
    assert names >= {"optimizers.0.state.0.weight.momentum_buffer", "optimizers.1.state.0.bias.exp_avg"}, sorted(names)
    by_number = {str(number): each for number, each in enumerate(second.optimizers)}
    holdfast.load(tmp_path / "c", {"model": second.model, "optimizers": by_number})
    holdfast.load(tmp_path / "c", {"optimizers": second.optimizers, "model": second.model}, only="optimizers.1*")


def test_objects_and_values_beside_them(tmp_path: Path) -> None:
    nested = [1, {"a": (2, 3)}]
    state: dict[str, object] = {"mixed": [Counter(4), torch.ones(2), 5, "text", nested], "pair": (Counter(6), 7, [8])}
    holdfast.save(tmp_path / "c", state)
    objects, filled = (Counter(), Counter()), torch.zeros(2)
    mixed: list[object] = [objects[0], filled, 0, "", None]
    wanted: dict[str, object] = {"mixed": mixed, "pair": (objects[1], 0, None)}
    holdfast.load(tmp_path / "c", wanted)
    assert [each.count for each in objects] == [4, 6]
    assert wanted["mixed"] is mixed and mixed[0] is objects[0] and mixed[1] is filled
    assert mixed[2:] == [5, "text", nested] and filled.tolist() == [1, 1]
    assert wanted["pair"] == (objects[1], 7, [8])


def test_values_of_each_rank_in_a_list(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"loaders": [holdfast.PerRank(3), holdfast.PerRank(Counter(4))]})
    plain, counter = holdfast.PerRank(0), Counter()
    holdfast.load(tmp_path / "c", {"loaders": (plain, holdfast.PerRank(counter))})
    assert plain.value == 3 and counter.count == 4


def test_state_dicts_that_were_saved_as_values_fill_a_list_of_objects(tmp_path: Path) -> None:
    first, second = Trained(0), Trained(1)
    first.step(0)
    dicts = [each.state_dict() for each in first.optimizers]
    holdfast.save(tmp_path / "c", {"model": first.model, "optimizers": dicts})
    holdfast.load(tmp_path / "c", {"model": second.model, "optimizers": second.optimizers})
    assert [second.step(number) for number in (1, 2)] == [first.step(number) for number in (1, 2)]


def test_lists_of_another_length_differ_by_name(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"of": [Counter(1), Counter(2)]})
    with pytest.raises(InvalidError, match=r"1 missing from the checkpoint: of\.2"):
        holdfast.load(tmp_path / "c", {"of": [Counter(), Counter(), Counter()]})
    with pytest.raises(InvalidError, match=r"unexpected in the checkpoint: of\.1"):
        holdfast.load(tmp_path / "c", {"of": [Counter()]})


def test_a_list_that_contains_itself_is_refused(tmp_path: Path) -> None:
    loop: list[object] = [Counter()]
    loop.append(loop)
    with pytest.raises(InvalidError, match=r"of\.1: the list contains itself"):
        holdfast.save(tmp_path / "c", {"of": loop})
    inner: dict[str, object] = {"counter": Counter()}
    inner["again"] = [inner, Counter()]
    with pytest.raises(InvalidError, match=r"of\.again\.0: the dict contains itself"):
        holdfast.save(tmp_path / "c", {"of": inner})


def test_a_tuple_with_values_in_a_read_only_state_is_refused_before_anything_changes(tmp_path: Path) -> None:
    counter = Counter()
    holdfast.save(tmp_path / "c", {"pair": (Counter(3), 4)})
    with pytest.raises(InvalidError, match=r"^pair: is in a read-only mappingproxy"):
        holdfast.load(tmp_path / "c", MappingProxyType({"pair": (counter, 0)}))
    assert counter.count == 0
    holdfast.save(tmp_path / "of objects", {"pair": (Counter(3), Counter(4))})
    holdfast.load(tmp_path / "of objects", MappingProxyType({"pair": (counter, Counter())}))
    assert counter.count == 3
