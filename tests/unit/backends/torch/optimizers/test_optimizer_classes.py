"""A checkpoint states the class and the state keys of each optimizer; a class that uses others is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast import api
from holdfast.base.types.manifest import OptimizerRecord
from holdfast.errors import InvalidError
from tests.unit.backends.torch.optimizers.test_wrapped_optimizers import Sam, TitanContainer

Build = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
ADAM_KEYS = ("exp_avg", "exp_avg_sq", "step")
OPTIM = torch.optim


class AdamW8bit(OPTIM.AdamW):
    """Stands for an optimizer derived from one of torch."""


class Foreign(OPTIM.Optimizer):
    """Of no known package."""

    def __init__(self, parameters: Iterator[nn.Parameter], key: str = "velocity") -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.key = key

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter][self.key] = parameter.detach().clone()


def adam(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return OPTIM.Adam(parameters)


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return OPTIM.AdamW(parameters)


def fused(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return OPTIM.AdamW(parameters, fused=True)


def amsgrad(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return OPTIM.AdamW(parameters, amsgrad=True)


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return OPTIM.SGD(parameters, lr=0.1, momentum=0.9)


def rmsprop(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return OPTIM.RMSprop(parameters)


def made(build: Build, steps: int = 1) -> dict[str, object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = build(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def saved(path: Path, build: Build, steps: int = 1) -> Path:
    holdfast.save(path, made(build, steps), process_group=False)
    return path


def without_records(path: Path) -> Path:
    """Take the field out of a manifest, as an older Holdfast wrote it."""
    from holdfast.core.format.sealed_json import sealed

    manifest = path / "manifest.json"
    document = json.loads(manifest.read_bytes())
    del document["optimizers"], document["digest"]
    manifest.write_bytes(sealed(document))
    return path


def test_a_manifest_states_class_and_keys(tmp_path: Path) -> None:
    manifest = holdfast.open_checkpoint(saved(tmp_path / "c", adamw)).manifest
    assert manifest.optimizers == {"optimizer": OptimizerRecord("torch.optim.adamw.AdamW", ADAM_KEYS)}
    document = json.loads((tmp_path / "c" / "manifest.json").read_bytes())
    stated = {"class": "torch.optim.adamw.AdamW", "state_keys": list(ADAM_KEYS)}
    assert document["optimizers"] == {"optimizer": stated}
    assert document["holdfast"]["format"] == [1, 0]


def test_a_manifest_without_optimizers_has_no_such_field(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"w": torch.ones(2)}, process_group=False)
    assert "optimizers" not in json.loads((tmp_path / "c" / "manifest.json").read_bytes())


def test_a_name_that_is_no_unicode_is_left_out(tmp_path: Path) -> None:
    state = made(adamw, 0)
    holdfast.save(tmp_path / "c", {"model": state["model"], "\ud800": state["optimizer"]}, process_group=False)
    assert holdfast.open_checkpoint(tmp_path / "c").manifest.optimizers == {}


def test_an_optimizer_that_holds_others_is_of_their_class(tmp_path: Path) -> None:
    for name, build in (("container", TitanContainer), ("sam", Sam)):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        optimizer = build(model)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        holdfast.save(tmp_path / name, {"model": model, "more": {"o": optimizer}}, process_group=False)
        records = holdfast.open_checkpoint(tmp_path / name).manifest.optimizers
        assert records == {"more.o": OptimizerRecord("torch.optim.adamw.AdamW", ADAM_KEYS)}


def test_a_copy_keeps_the_records(tmp_path: Path) -> None:
    saved(tmp_path / "c", adamw)
    holdfast.export(tmp_path / "c", tmp_path / "d", to="holdfast")
    first, second = (holdfast.open_checkpoint(tmp_path / name).manifest for name in ("c", "d"))
    assert first.optimizers == second.optimizers != {}


def test_a_repaired_manifest_has_the_records(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path, process_group=False) as manager:
        manager.save(1, made(adamw)).wait()
    path = tmp_path / "step-000000000001"
    before = holdfast.open_checkpoint(path).manifest.optimizers
    manifest = path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    api.repair(tmp_path)
    assert holdfast.open_checkpoint(path).manifest.optimizers == before != {}


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("first", "second"), [(adam, adamw), (adamw, adam), (adamw, fused), (fused, AdamW8bit),
                                               (AdamW8bit, adamw), (amsgrad, amsgrad), (sgd, sgd)])  # fmt: skip
def test_classes_of_the_same_keys_load_each_other(
    tmp_path: Path, first: Build, second: Build, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "c", first, steps)
    for present in (0, 1) if steps else (0,):
        with caplog.at_level(logging.WARNING, "holdfast"):
            holdfast.load(tmp_path / "c", made(second, present), process_group=False)
    # To torch 2.13, AdamW is an Adam with another hyperparameter, which comes from the checkpoint.
    is_switched = adam in (first, second)
    assert len(caplog.messages) == (1 + bool(steps)) * is_switched
    assert all("had decoupled_weight_decay=" in each for each in caplog.messages)


@pytest.mark.parametrize("present", [0, 1])
@pytest.mark.parametrize(("first", "second"), [(adamw, sgd), (sgd, adamw), (adamw, rmsprop), (sgd, rmsprop)])
def test_a_class_of_other_keys_is_refused_unless_asked_for(
    tmp_path: Path, first: Build, second: Build, present: int
) -> None:
    saved(tmp_path / "c", first)
    state = made(second, present)
    optimizer = state["optimizer"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    rate = optimizer.param_groups[0]["lr"]
    expected = r"optimizer: was saved by torch\.optim\.\S+, with state .*; torch\.optim\.\S+ keeps .*strict=False"
    with pytest.raises(InvalidError, match=expected):
        holdfast.load(tmp_path / "c", state, process_group=False)
    assert optimizer.param_groups[0]["lr"] == rate
    holdfast.load(tmp_path / "c", state, skip="optimizer", process_group=False)
    assert optimizer.param_groups[0]["lr"] == rate
    holdfast.load(tmp_path / "c", state, strict=False, process_group=False)


def test_classes_are_compared_where_nothing_was_stepped(tmp_path: Path) -> None:
    saved(tmp_path / "c", adamw, steps=0)
    with pytest.raises(InvalidError, match=r"optimizer: was saved by torch\.optim\.adamw\.AdamW, with state of no"):
        holdfast.load(tmp_path / "c", made(sgd, 0), process_group=False)


@pytest.mark.parametrize("present", [0, 1])
def test_a_class_that_nobody_knows_is_taken_with_a_warning(
    tmp_path: Path, present: int, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "c", adamw)
    state = made(Foreign, present)
    if present:
        with pytest.raises(InvalidError, match=r"Foreign keeps velocity\."):
            holdfast.load(tmp_path / "c", state, process_group=False)
        return
    with caplog.at_level(logging.WARNING, "holdfast"):
        holdfast.load(tmp_path / "c", state, process_group=False)
    assert "Foreign may use other state, which Holdfast does not know" in caplog.text


def test_a_checkpoint_without_the_field_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    without_records(saved(tmp_path / "c", adamw))
    with caplog.at_level(logging.WARNING, "holdfast"):
        holdfast.load(tmp_path / "c", made(fused, 0), process_group=False)
        assert not caplog.records
        holdfast.load(tmp_path / "c", made(sgd, 0), process_group=False)
    assert "optimizer: was saved by another system or an older Holdfast, with state exp_avg, exp_avg_sq, step; " in (
        caplog.text
    )


@pytest.mark.parametrize("present", [0, 1])
def test_a_load_that_turns_a_hyperparameter_on_or_off_says_so(
    tmp_path: Path, present: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As torch's `load_state_dict`, a load sets the saved value; but the group and the key are in the log."""
    saved(tmp_path / "with", amsgrad)
    state = made(adamw, present)
    with caplog.at_level(logging.WARNING, "holdfast"):
        holdfast.load(tmp_path / "with", state, process_group=False)
    assert "optimizer.param_groups: group 0 (0.weight) had amsgrad=False, the checkpoint has amsgrad=True" in (
        caplog.text
    )
    assert len(caplog.records) == 1
    optimizer = state["optimizer"]
    assert isinstance(optimizer, OPTIM.Optimizer)
    assert optimizer.param_groups[0]["amsgrad"] is True
    optimizer.step()


def test_groups_that_a_load_changes_alike_share_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def grouped(parameters: Iterator[nn.Parameter], **chosen: bool) -> OPTIM.Optimizer:
        return OPTIM.AdamW([{"params": [each], "lr": 0.1 * (n + 1)} for n, each in enumerate(parameters)], **chosen)

    saved(tmp_path / "c", grouped)
    state = made(lambda parameters: grouped(parameters, amsgrad=True, maximize=True), 0)
    with caplog.at_level(logging.WARNING, "holdfast"):
        holdfast.load(tmp_path / "c", state, process_group=False)
    first, second = caplog.messages
    assert "group 0 (0.weight), group 1 (0.bias), group 2 (1.weight) and 1 more had amsgrad=True, the che" in first
    assert "had maximize=True, the checkpoint has maximize=False" in second
    optimizer = state["optimizer"]
    assert isinstance(optimizer, OPTIM.Optimizer)
    assert not any(group["amsgrad"] or group["maximize"] for group in optimizer.param_groups)


def test_an_empty_group_that_a_load_turns_off_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def with_empty(parameters: Iterator[nn.Parameter], **chosen: bool) -> OPTIM.Optimizer:
        return OPTIM.AdamW([{"params": list(parameters)}, {"params": [], **chosen}])

    saved(tmp_path / "c", with_empty)
    with caplog.at_level(logging.WARNING, "holdfast"):
        holdfast.load(tmp_path / "c", made(lambda each: with_empty(each, amsgrad=True), 0), process_group=False)
    assert "optimizer.param_groups: group 1 had amsgrad=True, the checkpoint has amsgrad=False" in caplog.text


def test_own_hyperparameters_that_are_kept_are_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path / "c", adamw)
    for skip in ("optimizer.param_groups.*", "optimizer"):
        state = made(amsgrad, 0)
        with caplog.at_level(logging.WARNING, "holdfast"):
            holdfast.load(tmp_path / "c", state, skip=skip, process_group=False)
        optimizer = state["optimizer"]
        assert isinstance(optimizer, OPTIM.Optimizer)
        assert not caplog.records and optimizer.param_groups[0]["amsgrad"] is True


def test_every_optimizer_of_torch_uses_the_keys_that_are_stated() -> None:
    from holdfast.backends.torch.optimizers.kinds import _KEYS

    stock = {name for name in OPTIM.__all__ if isinstance(getattr(OPTIM, name, None), type)} - {"Optimizer"}
    assert stock == _KEYS["torch"].keys()
    for name in sorted(stock - {"SparseAdam", "LBFGS"}):
        model = nn.Linear(3, 2, bias=False)
        optimizer = getattr(OPTIM, name)(model.parameters(), lr=0.1)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        always, sometimes = _KEYS["torch"][name]
        keys = set(optimizer.state[model.weight])
        assert always <= keys <= always | sometimes, name
