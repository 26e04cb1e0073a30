"""`holdfast gc`: what it says, what it removes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import holdfast
from holdfast.cli.app import app


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        for step in range(1, 7):
            manager.save(step, {"step": step}, metrics={"loss": abs(step - 2.0)}).wait()
        manager.tag(1, "first")
    return tmp_path / "run"


def gc(root: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["gc", str(root), *words])
    return result.exit_code, result.output


def steps(root: Path) -> list[int]:
    return sorted(int(path.parent.name.removeprefix("step-")) for path in root.glob("step-*/manifest.json"))


def test_rules_add_up_and_a_dry_run_only_tells(root: Path) -> None:
    words = ("--keep-last", "1", "--keep-best", "1:loss", "--keep-every", "4", "--grace", "0", "--json")
    status, said = gc(root, *words, "--dry-run")
    planned = json.loads(said)
    assert status == 0 and planned["dry_run"] and steps(root) == [1, 2, 3, 4, 5, 6]
    assert planned["kept"] == {
        "1": ["tag first"], "2": ["min loss"], "4": ["every 4"], "6": ["latest 1", "newest"]
    }  # fmt: skip
    assert planned["removed"]["steps"] == [3, 5]
    status, said = gc(root, *words)
    done = json.loads(said)
    assert status == 0 and steps(root) == [1, 2, 4, 6]
    assert done["removed"] == planned["removed"]


def test_the_steps_nearest_to_multiples_stay(root: Path) -> None:
    status, said = gc(root, "--keep-every", "4:closest", "--grace", "0", "--json")
    why = ["closest to every 4"]
    assert status == 0 and json.loads(said)["kept"] == {"1": [*why, "tag first"], "4": why, "6": [*why, "newest"]}
    assert steps(root) == [1, 4, 6]


def test_people_are_told_what_stays_and_why(root: Path) -> None:
    status, said = gc(root, "--keep-last", "2", "--grace", "0")
    assert status == 0 and steps(root) == [1, 5, 6]
    assert "tag first" in said and "removed: steps 2, 3, 4" in said


def test_without_a_rule_every_step_stays(root: Path) -> None:
    status, said = gc(root, "--grace", "0")
    assert status == 0 and "removed: no step" in said
    assert steps(root) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--keep-best", "loss"), "expected N:METRIC or N:METRIC:max"),
        (("--keep-every", "x"), "expected N or N:closest"),
        (("--keep-every", "4:near"), "expected N or N:closest"),
        (("--keep-every", "0:closest"), "EveryNth"),
        (("--keep-best", "1:los"), "no step has the metric 'los'"),
        (("--keep-last", "0"), "LatestN"),
    ],
)
def test_a_wrong_rule_removes_nothing(root: Path, words: tuple[str, ...], expected: str) -> None:
    status, said = gc(root, *words, "--grace", "0")
    assert status == 2 and expected in said
    assert steps(root) == [1, 2, 3, 4, 5, 6]


def test_refused_while_a_job_writes(root: Path) -> None:
    with holdfast.CheckpointManager(root, start_over=True, process_group=False) as manager:
        manager.save(7, {"step": 7}).wait()
        status, said = gc(root, "--keep-last", "1", "--grace", "0")
    assert status == 2 and "another job writes here" in said
    assert len(steps(root)) == 7
