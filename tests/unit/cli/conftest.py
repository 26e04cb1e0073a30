from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import holdfast

ESCAPE = "\x1b]0;owned\x07\x1b[31m\u202e\x9b"
"""Sets a window's title, turns text red and its direction around, if a terminal gets to see it."""


def small_state() -> dict[str, object]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 700), torch.nn.ReLU(), torch.nn.Linear(700, 30))
    model[0].tied = model[2].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "half": torch.ones(2, 3, dtype=torch.bfloat16), "note": "plain"}


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with steps 10 and 20 and an unfinished 30, never to be changed."""
    root = tmp_path_factory.mktemp("cli") / "run"
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        for step in (10, 20):
            manager.save(step, small_state()).wait()
    leftover = root / "step-000000000030" / "0123456789abcdef"
    leftover.mkdir(parents=True)
    (leftover / "r00000.safetensors").write_bytes(b"half a pack")
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(pristine, tmp_path / "run"))


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose every name and value would steer a terminal."""
    path = tmp_path_factory.mktemp("cli") / "hostile"
    state = {
        f"name{ESCAPE}": torch.ones(2),
        "values": {
            f"key{ESCAPE}": f"text{ESCAPE}",
            "list": [ESCAPE],
            "nested": [{ESCAPE: ESCAPE}],
            "[red]markup[/]": 1,
        },
    }
    holdfast.save(path, state, process_group=False)
    return path
