"""Real checkpoints of other systems imported both ways: nothing differs from what they are where they lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast import api
from holdfast.settings import PAGE_BYTES, Settings
from tests.support.tuning import tuned

DEEPSPEED = Path(__file__).parents[1] / "fixtures" / "deepspeed"
CASES = sorted(
    str(path.relative_to(DEEPSPEED)) for kind in ("ckpt", "universal") for path in DEEPSPEED.glob(f"*/{kind}")
)
SETTINGS = tuned(Settings(chunk_bytes=PAGE_BYTES), read_window_bytes=2 * PAGE_BYTES)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(50, 60), torch.nn.Linear(60, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.ones(3, 50)).sum().backward()
    optimizer.step()
    return model, optimizer


def in_dcp(path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = trained()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "epoch": 5}, checkpoint_id=path, no_dist=True)


def in_torch_save(path: Path) -> None:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 5}, path)  # noqa: TID251


def require_nothing_differs(source: Path, tmp_path: Path, allowed: Path) -> None:
    settings = Settings(chunk_bytes=PAGE_BYTES, allowed_roots=(str(allowed),))
    api.import_checkpoint(source, tmp_path / "run", step=1, settings=SETTINGS)
    api.import_checkpoint(source, tmp_path / "run", step=2, copy=True, settings=SETTINGS)
    there = holdfast.open_checkpoint(source)
    for step in (1, 2):
        imported = holdfast.open_checkpoint(tmp_path / "run" / f"step-{step:012d}", settings=settings)
        found = holdfast.diff(there, imported, full=True)
        assert found.equal, found
        assert set(imported.tensors) == set(there.tensors) != set()
        assert imported.aliases == there.aliases
        assert imported.manifest.tree == there.manifest.tree
        assert imported.manifest.masters == there.manifest.masters
        assert (imported.origin, imported.step) == (there.origin, step)
        assert list(imported.verify()) == []


@pytest.mark.parametrize("case", CASES)
def test_deepspeed(case: str, tmp_path: Path) -> None:
    source = DEEPSPEED / case
    require_nothing_differs(source, tmp_path, DEEPSPEED)
    # It tells its own step.
    assert api.import_checkpoint(source, tmp_path / "own", settings=SETTINGS).step == 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("save", (in_dcp, in_torch_save))
def test_training_goes_on_from_either(save: Callable[[Path], None], tmp_path: Path) -> None:
    source = tmp_path / "source"
    save(source)
    require_nothing_differs(source, tmp_path, tmp_path)
    expected, stepped = trained()
    settings = Settings(allowed_roots=(str(tmp_path),))
    for step in (1, 2):
        model, optimizer = trained()
        with torch.no_grad():
            for tensor in (*model.parameters(), *(each["exp_avg"] for each in optimizer.state.values())):
                tensor.fill_(-1)
        with holdfast.CheckpointManager(tmp_path / "run", process_group=False, settings=settings) as manager:
            assert manager.load({"model": model, "optimizer": optimizer}, step) == step
        for found, true in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(found, true)
            assert torch.equal(optimizer.state[found]["exp_avg"], stepped.state[true]["exp_avg"])
        assert optimizer.param_groups[0]["lr"] == 0.125
