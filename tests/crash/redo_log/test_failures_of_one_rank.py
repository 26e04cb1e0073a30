"""One of two ranks fails in a redo or in the first base: both go on from one step, with the bits of a whole run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.gloo_worlds import Case, Launch, Results, run_world

pytestmark = pytest.mark.long

TRAIN = "tests.crash.redo_log.recorded_run:train"
FAILED_REDO = "tests.crash.redo_log.failing_run:train_after_failed_redo"
FAILED_BASE = "tests.crash.redo_log.failing_run:train_after_failed_base"


def _case(function: str, name: str, folder: Path, **arguments: object) -> Case:
    return Case(function, {"steps": 30, "every": 20, "root": str(folder / name)} | arguments, name)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Runs that went on after each failure, and one in which nothing fails: one world, since a world is slow."""
    folder = tmp_path_factory.mktemp("one_rank")
    # The policy saves no base before the kill. Long steps: the requested base comes about a second later.
    arguments = {"rank": 1, "kill_at": 27, "every": 1000, "pause": 0.1}
    with Launch(2, [_case(FAILED_BASE, "failed-base", folder, **arguments)], folder / "killed") as launch:
        assert all(launch.join().exits)
    for name in ("once", "twice"):
        shutil.copytree(folder / "failed-base", folder / name)
    cases = [
        _case(TRAIN, "whole", folder),
        _case(TRAIN, "failed-base", folder),
        _case(FAILED_REDO, "once", folder, rank=1, at=26, failures=1),
        _case(FAILED_REDO, "twice", folder, rank=1, at=26, failures=2),
    ]
    return run_world(2, cases, folder / "ranks")


@pytest.mark.parametrize("name", ["failed-base", "once", "twice"])
def test_both_ranks_go_on_from_one_step(ended: Results, name: str) -> None:
    whole, again = _values(ended, "whole"), _values(ended, name)
    starts, reasons = [each["start"] for each in again], {str(each["why"]) for each in again}
    if name == "twice":  # The base is taken alone: the one that was requested after the first base had failed.
        assert starts[0] == starts[1] and starts[0] in range(2, 26)
        (why,) = reasons
        assert why.endswith("step 26 could not be redone on rank 1: no room for a step")
    else:
        assert (starts, reasons) == ([27, 27], {""})
    assert [each["digest"] for each in again] == [each["digest"] for each in whole]


def _values(ended: Results, name: str) -> list[dict[str, object]]:
    return [value for value in ended.values(name) if isinstance(value, dict)]
