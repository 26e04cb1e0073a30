from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.base.types.events import Operation, Phase, RankReport
from holdfast.stored.repository.reports import put_reports
from tests.page.browsing import Browser

RANKS = 12
SLOW_RANK = 7


def state_of(seed: int) -> dict[str, object]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    half = torch.tensor([1.0, 2.0, 0.0, float("nan"), float("inf"), -4.0], dtype=torch.bfloat16)
    return {"model": model, "half": half, "note": "plain", "epoch": seed}


def reports_of(step: int, attempt: str, began: float, ranks: int = RANKS) -> list[RankReport]:
    """The reports of a save on many ranks, one of which is slow."""
    return [
        RankReport(
            Operation("save", step, "root", rank, ranks),
            attempt,
            f"host-{rank // 4}",
            100 + rank,
            began,
            9.0,
            (Phase("copy", 0.0, 0.2), Phase("write", 0.2, 8.0 if rank == SLOW_RANK else 1.5), Phase("wait", 8.2, 0.7)),
            1 << 20,
            {"staging": "copy", "staged_seconds": 0.2, "fence_seconds": 0.0, "throttled": 0, "retries": 3},
        )
        for rank in range(ranks)
    ]


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went back from step 500 to step 300, and whose saves were made on many ranks; never to be changed."""
    root = tmp_path_factory.mktemp("page") / "run"
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        for step in range(100, 600, 100):
            manager.save(step, state_of(step), metrics={"loss": 1 / step}).wait()
        manager.tag(200, "best")
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        state = state_of(0)
        manager.load(state, step=300)
        manager.save(400, state_of(7)).wait()
    store = holdfast._face.wiring.store_at(root, holdfast.Settings())
    for record in holdfast.api.list_steps(root).steps:
        assert record.manifest is not None
        folder = f"step-{record.step:012d}/"
        for path in (root / folder / "reports").glob(f"save-{record.manifest.attempt}*"):
            path.unlink()
        began = 1e9 + 1e5 * record.manifest.timeline.number + 100 * record.step
        put_reports(store, folder, reports_of(record.step, record.manifest.attempt, began))
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(pristine, tmp_path / "run"))


@pytest.fixture
def browser(pristine: Path) -> Browser:
    return Browser(pristine)
