"""Patterns of `only` and `skip` that match nothing: refused or warned about, and patterns that match are neither."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import InvalidError

UNMATCHED = r"{}: matches no name on any rank\. Expected names of the state"


class Loader:
    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, object]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.position = int(str(state["position"]))


def state_of(value: float) -> dict[str, object]:
    model = nn.Sequential(nn.Linear(2, 2))
    nn.init.constant_(model[0].weight, value)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {
        "model": model,
        "optimizer": optimizer,
        "loader": Loader(int(value)),
        "cfg": {"lr": value, "data": {"seed": 1}, "empty": {}},
        "rng": holdfast.RngState(),
        "steps": [torch.ones(1)],
    }


@pytest.mark.parametrize(
    ("only", "skip", "named"),
    [
        ("modle.*", (), r"only='modle\.\*'"),
        (["model.*", "modle.*"], (), r"only='modle\.\*'"),
        (None, "modle.weigth", r"skip='modle\.weigth'"),
        (None, ["loader", "cfg.data.sed"], r"skip='cfg\.data\.sed'"),
        (None, "loader.position", r"skip='loader\.position'"),
        (None, "model.0.weigth.grad", r"skip='model\.0\.weigth\.grad'"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path, only: str, skip: str, named: str) -> None:
    with pytest.raises(InvalidError, match=UNMATCHED.format(named)):
        holdfast.save(tmp_path / "refused", state_of(1), only=only, skip=skip)
    assert not (tmp_path / "refused").exists() or not list((tmp_path / "refused").rglob("*.json"))
    holdfast.save(tmp_path / "c", state_of(1))
    state = state_of(2)
    with pytest.raises(InvalidError, match=UNMATCHED.format(named)):
        holdfast.load(tmp_path / "c", state, only=only, skip=skip)
    assert state["cfg"] == {"lr": 2, "data": {"seed": 1}, "empty": {}}
    with pytest.raises(InvalidError, match=UNMATCHED.format(named)):
        holdfast.load(tmp_path / "c", state, only=only, skip=skip, strict=False)


@pytest.mark.parametrize("nothing", [[], ()])
def test_only_without_a_pattern_is_refused(tmp_path: Path, nothing: list[str]) -> None:
    with pytest.raises(InvalidError, match=r"only=.*: selects nothing; expected at least one pattern"):
        holdfast.save(tmp_path / "c", state_of(1), only=nothing)
    holdfast.save(tmp_path / "c", state_of(1), skip=nothing)
    with pytest.raises(InvalidError, match=r"only=.*: selects nothing; expected at least one pattern"):
        holdfast.load(tmp_path / "c", state_of(1), only=nothing)


def test_a_load_that_finds_no_step_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with holdfast.CheckpointManager(tmp_path / "typo", process_group=False) as manager:
        assert manager.load({"model": torch.ones(1)}) is None
    (text,) = [record.getMessage() for record in caplog.records if "new run" in record.getMessage()]
    assert text == f"starting a new run at {tmp_path}/typo: it has no committed step"


def test_a_manager_refuses_it_too(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        with pytest.raises(InvalidError, match=UNMATCHED.format(r"only='modle\.\*'")):
            manager.save(1, {"model": torch.ones(1)}, only="modle.*")
        manager.save(1, {"model": torch.ones(1)}).wait()
        with pytest.raises(InvalidError, match=UNMATCHED.format(r"skip='modle'")):
            manager.load({"model": torch.ones(1)}, skip="modle")


@pytest.mark.parametrize(
    "pattern",
    [
        "model",
        "model.*",
        "model.0.weight",
        "*.bias",
        "optimizer",
        "optimizer.*",
        "optimizer.param_groups.0.weight",
        "optimizer.state.0.bias.exp_avg",
        "optimizer.state.*.step",
        "loader",
        "loader.*",
        "cfg",
        "cfg.lr",
        "cfg.data.seed",
        "cfg.d*.seed",
        "cfg.empty",
        "rng",
        "steps",
        "model.0.weight.grad",
        "*.grad",
    ],
)
def test_a_pattern_that_matches_is_neither_refused_nor_warned_about(
    tmp_path: Path, pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    holdfast.save(tmp_path / "c", state_of(1))
    holdfast.save(tmp_path / "skip", state_of(1), skip=pattern)
    holdfast.load(tmp_path / "c", state_of(2), skip=pattern)
    if not pattern.endswith("grad"):
        holdfast.save(tmp_path / "only", state_of(1), only=pattern)
        holdfast.load(tmp_path / "c", state_of(2), only=pattern)
    assert "matches no name" not in caplog.text


def test_skip_may_name_what_only_the_checkpoint_has(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", state_of(1))
    model = state_of(2)["model"]
    holdfast.load(tmp_path / "c", {"model": model}, skip=["optimizer", "cfg.data.seed", "loader.*"])
    with pytest.raises(InvalidError, match=UNMATCHED.format(r"only='optimizer\.\*'")):
        holdfast.load(tmp_path / "c", {"model": model}, only="optimizer.*")


def test_only_may_name_what_the_state_lacks_below_a_key_that_it_has(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"model": {"a": torch.ones(1), "b": torch.ones(1)}})
    with pytest.raises(InvalidError, match=r"1 unexpected in the checkpoint: model\.b"):
        holdfast.load(tmp_path / "c", {"model": {"a": torch.ones(1)}}, only="model.b")


def test_a_glob_in_skip_that_matches_nothing_is_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        for step in (1, 2):
            manager.save(step, {"model": torch.ones(1)}, skip=["modle.*", "model.x*"]).wait()
        manager.load({"model": torch.ones(1)}, skip="modle.*")
    warned = [record.getMessage() for record in caplog.records if "matches no name" in record.getMessage()]
    assert [text.partition(" matches")[0].rpartition(": ")[2] for text in warned] == [
        "skip='modle.*'",
        "skip='model.x*'",
    ]


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, as PEFT names it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


def test_an_adapter_alone_is_saved_and_training_goes_on_from_it(tmp_path: Path) -> None:
    def made() -> dict[str, object]:
        model = Adapted()
        trained = [each for each in model.parameters() if each.requires_grad]
        return {"model": model, "optimizer": torch.optim.AdamW(trained)}

    def step(state: dict[str, object]) -> float:
        model, optimizer = state["model"], state["optimizer"]
        assert isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
        loss = model(torch.ones(1, 8)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    state, only = made(), ["model.*lora_*", "optimizer.*"]
    step(state)
    holdfast.save(tmp_path / "c", state, only=only, process_group=False)
    assert not any("base" in name for name in holdfast.open_checkpoint(tmp_path / "c").tensors)
    expected = step(state)
    with pytest.raises(InvalidError, match=r"2 missing.*model\.base\.bias"):
        holdfast.load(tmp_path / "c", made(), process_group=False)
    state = made()
    holdfast.load(tmp_path / "c", state, only=only, process_group=False)
    assert step(state) == expected
