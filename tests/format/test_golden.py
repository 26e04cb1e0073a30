"""Checkpoints written once by format 1 are read by every later version, with torch and without."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.api import list_steps
from holdfast.base.types.health import Health
from tests.format import state
from tests.format.description import CHECKPOINTS, EXPECTED, FOLDER, described, description

SIZE_MAX = 350_000
LEAVES_NOTHING = holdfast.Settings(reports=False)
"""The files are everybody's; no test run leaves its reports among them."""
STATES: dict[str, tuple[Callable[[int], state.State], int]] = {
    "run/step-000000000005": (state.training, 5),
    "run/step-000000000007": (state.training, 7),
    "sharded": (state.plain_sharded_state, 9),
    "single": (state.single, 3),
    "split": (state.plain_sharded_state, 9),
    "unhealthy": (state.unhealthy, 4),
    "reusing/step-000000000002": (state.partly_frozen, 2),
    "reusing/step-000000000004": (state.partly_frozen, 4),
    "reusing/step-000000000006": (state.resumed, 6),
    "rewound/step-000000000002": (state.single, 20),
    "rewound/step-000000000004": (state.single, 41),
    "rewound/step-000000000006": (state.single, 60),
}


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, object]]:
    document = json.loads(EXPECTED.read_text())
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_tensor_and_value_reads_as_it_did(name: str, expected: dict[str, dict[str, object]]) -> None:
    # Through JSON and back, as the expected one went.
    assert json.loads(json.dumps(description(FOLDER / name))) == expected[name]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_whole(name: str) -> None:
    assert list(holdfast.open_checkpoint(FOLDER / name).verify()) == []


def test_read_where_torch_is_not_installed() -> None:
    code = (
        "import sys, json\n"
        "sys.modules['torch'] = None\n"
        "from tests.format.description import CHECKPOINTS, EXPECTED, FOLDER, description\n"
        "import holdfast\n"
        "expected = json.loads(EXPECTED.read_text())\n"
        "for name in CHECKPOINTS:\n"
        "    assert json.loads(json.dumps(description(FOLDER / name))) == expected[name], name\n"
        "    assert list(holdfast.open_checkpoint(FOLDER / name).verify()) == [], name\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(root), *sys.path]!r}\n{code}"],
        capture_output=True, text=True, timeout=60, check=False, cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def leaves(value: object, path: str = "") -> dict[str, object]:
    """Return every tensor and value of a state by path, modules and optimizers opened."""
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
        value = value.state_dict()
    if isinstance(value, Mapping) and value and all(isinstance(key, str | int) for key in value):
        return {name: leaf for key, item in value.items() for name, leaf in leaves(item, f"{path}.{key}").items()}
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return {path: [str(value.dtype), list(value.shape), flat.numpy().tobytes().hex()]}
    return {path: described(value)}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_loads_into_a_state_bit_for_bit(name: str) -> None:
    make, seed = STATES[name]
    target = make(seed + 1)
    report = holdfast.load(FOLDER / name, target, settings=LEAVES_NOTHING)
    assert report.missing == report.unexpected == ()
    assert leaves(target) == leaves(make(seed))
    assert leaves(target) != leaves(make(seed + 1))
    if "model" in target and isinstance(target["model"], state.Tied):
        assert target["model"].head.weight is target["model"].embedding.weight


def test_a_manager_resumes_from_the_newest_step() -> None:
    with holdfast.CheckpointManager(FOLDER / "run", settings=LEAVES_NOTHING) as manager:
        assert manager.steps() == [5, 7]
        target = state.training(1)
        assert manager.load(target) == 7
    assert leaves(target) == leaves(state.training(7))


def test_golden_files_are_small_and_hold_what_they_should(expected: dict[str, dict[str, object]]) -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < SIZE_MAX
    assert expected["sharded"]["world_size"] == 2
    assert expected["sharded"]["packs"] == ["r00000.safetensors", "r00001.safetensors"]
    manifest = holdfast.open_checkpoint(FOLDER / "split").manifest
    assert manifest.overview is not None
    assert len(manifest.indexes) > 2
    assert expected["run/step-000000000005"]["aliases"] == {"model.head.weight": "model.embedding.weight"}


def test_what_was_found_of_health_is_told() -> None:
    assert holdfast.open_checkpoint(FOLDER / "single").manifest.health is None
    found = Health({"masked.mask": 3, "weight": 2}, {"weight": 0}, {})
    assert holdfast.open_checkpoint(FOLDER / "unhealthy").manifest.health == found


def test_golden_steps_refer_to_the_packs_that_hold_the_bytes() -> None:
    opened = {step: holdfast.open_checkpoint(FOLDER / f"reusing/step-{step:012d}") for step in (2, 4, 6)}
    assert {step: list(each.packs_of_other_steps) for step, each in opened.items()} == {2: [], 4: [2], 6: [2, 4]}
    assert not [pack for pack in opened[6].manifest.packs if not pack.name.startswith("step-")]


def test_a_run_that_went_back_resumes_from_its_newest_timeline_and_keeps_the_others() -> None:
    names = [record.name for record in list_steps(FOLDER / "rewound").steps if record.superseded]
    assert [name.split("@")[0] for name in names] == ["4", "6"]
    wanted = [(None, 4, 41), (2, 2, 20), *((name, int(name[0]), 10 * int(name[0])) for name in names)]
    with holdfast.CheckpointManager(FOLDER / "rewound", settings=LEAVES_NOTHING) as manager:
        assert manager.steps() == [2, 4]
        for asked, step, seed in wanted:
            target = state.single(1)
            assert manager.load(target, asked) == step
            assert leaves(target) == leaves(state.single(seed))
    timeline = holdfast.open_checkpoint(FOLDER / "rewound/step-000000000004").manifest.timeline
    assert timeline.number == 2
    assert [(fork.timeline, fork.step) for fork in timeline.ancestors] == [("", 2)]
