"""What `ls` and `inspect` show of health."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast as package
from tests.unit.cli.running import holdfast

WEIGHTS = [f"w{number}" for number in range(3)]


@pytest.fixture
def marked(tmp_path: Path) -> Path:
    """A root of which nothing was looked at first; then all is well; then three tensors are broken."""
    state = {fqn: torch.zeros(5) for fqn in WEIGHTS}
    counting = package.Settings(count_nonfinite=True)
    with package.CheckpointManager(tmp_path, process_group=False) as manager:
        manager.save(10, state).wait()
    with package.CheckpointManager(tmp_path, process_group=False, settings=counting) as manager:
        manager.load(state)
        manager.save(20, state).wait()
        for tensor in state.values():
            tensor[1] = float("nan")
        manager.save(30, state).wait()
    return tmp_path


def test_ls_shows_health_where_something_was_looked_at(marked: Path) -> None:
    lines = holdfast("ls", marked).out.splitlines()
    assert "HEALTH" in lines[0]
    assert [line.split()[-1] for line in lines[1:4]] == ["-", "healthy", "unhealthy"]
    said = "step 30: unhealthy: w0: 1 non-finite elements, 0 before (and 2 more, see: holdfast inspect)"
    assert lines[4:] == [said]


def test_ls_tells_health_as_json(marked: Path) -> None:
    unknown, well, broken = holdfast("ls", marked, "--json").json()["steps"]
    assert (unknown["healthy"], unknown["nonfinite"], unknown["unhealthy"]) == (None, None, [])
    assert (well["healthy"], well["nonfinite"], well["unhealthy"]) == (True, {}, [])
    assert (broken["healthy"], broken["nonfinite"]) == (False, dict.fromkeys(WEIGHTS, 1))
    assert broken["unhealthy"] == [f"{fqn}: 1 non-finite elements, 0 before" for fqn in WEIGHTS]


def test_inspect_shows_all_that_was_found(marked: Path) -> None:
    lines = [line.split(maxsplit=1) for line in holdfast("inspect", marked / "step-000000000030").out.splitlines()]
    for fqn in WEIGHTS:
        assert ["unhealthy", f"{fqn}: 1 non-finite elements, 0 before"] in lines
    assert "health" not in holdfast("inspect", marked / "step-000000000010").out
    assert holdfast("inspect", marked / "step-000000000020", "--json").json()["healthy"] is True
