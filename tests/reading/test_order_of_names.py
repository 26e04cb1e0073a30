"""A state that is read or exported has its names in the order of the state that was saved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import holdfast
from holdfast import api
from holdfast.core.format.state_order import text_of
from holdfast.errors import CorruptError
from holdfast.integrations import dcp
from tests.hostile.crafting import sealed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Net(torch.nn.Module):
    """Modules in no alphabetical order, a tied weight, extra state in the middle, a number above nine."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(5, 3)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(11)))
        self.counted = Counted()
        self.batch = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 5)
        self.head.weight = self.tokens.weight


class Counted(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def state_of(model: torch.nn.Module) -> dict[str, object]:
    parameters = list(model.parameters())
    return {
        "step": 3,
        "model": model,
        "z": torch.zeros(2),
        "ema": {"second": torch.ones(1), "decay": 0.5, "first": torch.ones(3), "inner": {"y": torch.ones(1), "b": 2}},
        "optimizer": torch.optim.SGD(parameters, lr=0.1),
        "a": torch.zeros(3),
        "epoch": 1,
    }


def require_order(found: Mapping[str, object], state: Mapping[str, object], model: torch.nn.Module) -> None:
    assert list(found) == list(state)
    assert list(found["model"]) == list(model.state_dict())  # type: ignore[call-overload]
    ema = found["ema"]
    assert isinstance(ema, Mapping)
    assert list(ema) == ["second", "decay", "first", "inner"]
    assert list(ema["inner"]) == ["y", "b"]


@pytest.fixture(name="saved")
def _saved(tmp_path: Path) -> tuple[Path, dict[str, object], torch.nn.Module]:
    model = Net()
    state = state_of(model)
    holdfast.save(tmp_path / "c", state, process_group=False)
    return tmp_path / "c", state, model


def test_every_way_to_read_keeps_the_order(saved: tuple[Path, dict[str, object], torch.nn.Module]) -> None:
    path, state, model = saved
    require_order(holdfast.read(path), state, model)
    require_order(holdfast.read(path, mmap=True), state, model)
    require_order(holdfast.read(path, framework="numpy"), state, model)
    chosen = holdfast.read(path, only=["a", "model.layers.*", "model.tokens.*", "z"])
    assert list(chosen) == ["model", "z", "a"]
    assert list(chosen["model"])[:4] == ["tokens.weight", "layers.0.weight", "layers.0.bias", "layers.1.weight"]


def test_values_of_a_state_dict_go_with_the_parameters(saved: tuple[Path, dict[str, object], torch.nn.Module]) -> None:
    """As some code copies weights: without a look at the names."""
    path, _, model = saved
    trained = {name for name, _ in model.named_parameters()}
    values = [value for name, value in holdfast.read(path, only="model")["model"].items() if name in trained]
    assert all(torch.equal(one, other) for one, other in zip(values, model.parameters(), strict=True))


def test_exports_and_imports_keep_the_order(
    saved: tuple[Path, dict[str, object], torch.nn.Module], tmp_path: Path
) -> None:
    path, state, model = saved
    holdfast.export(path, tmp_path / "model.pt", to="torch")
    assert list(torch.load(tmp_path / "model.pt")) == list(model.state_dict())  # noqa: TID251 - our own file
    holdfast.export(path, tmp_path / "whole.pt", to="torch", model_only=False)
    require_order(torch.load(tmp_path / "whole.pt"), state, model)  # noqa: TID251 - as above
    require_order(holdfast.read(tmp_path / "whole.pt"), state, model)
    settings = holdfast.Settings(allowed_roots=(str(tmp_path),))
    for number, copy in enumerate((True, False)):
        root = tmp_path / f"run-{number}"
        holdfast.import_checkpoint(tmp_path / "whole.pt", root, step=1, copy=copy)
        require_order(holdfast.read(root, step=1, settings=settings), state, model)


def test_steps_copies_and_overwritten_checkpoints_keep_the_order(tmp_path: Path) -> None:
    model = Net()
    state = state_of(model)
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        manager.save(1, state)
        manager.save(2, state)  # Refers to the packs of step 1.
        manager.wait()
    api.copy_run(tmp_path / "run", tmp_path / "copy")
    require_order(holdfast.read(tmp_path / "copy", step=2), state, model)
    holdfast.save(tmp_path / "c", {"b": torch.ones(1), "a": torch.ones(1)}, process_group=False)
    holdfast.save(tmp_path / "c", {"x": 1, "w": torch.ones(1)}, process_group=False, overwrite=True)
    assert list(holdfast.read(tmp_path / "c")) == ["x", "w"]


def test_what_is_left_out_changes_no_order(tmp_path: Path) -> None:
    model = Net()
    holdfast.save(tmp_path / "c", state_of(model), skip=["model.layers.*", "z", "epoch"], process_group=False)
    found = holdfast.read(tmp_path / "c")
    assert list(found) == ["step", "model", "ema", "optimizer", "a"]
    assert list(found["model"]) == [name for name in model.state_dict() if not name.startswith("layers.")]


def test_what_dcp_plans_keeps_the_order(tmp_path: Path) -> None:
    model = Net()
    state = {"step": 3, "model": model.state_dict(), "b": torch.ones(1), "a": {"n": 2, "m": torch.ones(2)}}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    found = holdfast.read(tmp_path / "c")
    assert [name for name in found if name in state] == list(state)
    assert list(found["model"]) == list(model.state_dict())
    whole: dict[str, dict[str, object]] = {}
    _load_state_dict(
        whole, storage_reader=dcp.HoldfastReader(tmp_path / "c"), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    assert list(whole) == list(state)
    assert list(whole["model"]) == list(model.state_dict())


def test_a_checkpoint_without_an_order_is_read_as_before(
    saved: tuple[Path, dict[str, object], torch.nn.Module],
) -> None:
    path, state, model = saved
    document = json.loads((path / "manifest.json").read_bytes())
    del document["digest"], document["order"]
    (path / "manifest.json").write_bytes(sealed(document))
    found = holdfast.read(path)
    assert found.keys() == state.keys() and found["model"].keys() == model.state_dict().keys()
    document["order"] = text_of((10_000).to_bytes(4, "little"))
    (path / "manifest.json").write_bytes(sealed(document))
    with pytest.raises(CorruptError, match=r"order has the number 10000; expected below \d+"):
        holdfast.read(path)
