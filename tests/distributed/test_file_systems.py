"""File systems of fsspec with several processes: writers that race, and writers that are killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import holdfast
from holdfast import offline_api
from holdfast.settings import Settings
from tests.distributed.object_worker import RACERS
from tests.distributed.test_object_stores import work
from tests.file_systems import KILLING

ROUNDS = 20
KILLS = 16


def test_one_of_eight_writers_wins(tmp_path: Path) -> None:
    work("race", f"local://{tmp_path}/run", ROUNDS, tmp_path / "outcomes", variables={})
    outcomes = [json.loads((tmp_path / f"outcomes.{number}").read_text()) for number in range(RACERS)]
    for turn in range(ROUNDS):
        came = [each[turn] for each in outcomes]
        assert sorted(came) == ["ConflictError"] * (RACERS - 1) + ["won"], f"round {turn}: {came}"
        checkpoint = holdfast.open_checkpoint(f"local://{tmp_path}/run/{turn}")
        assert set(checkpoint.read("winner").tolist()) == {came.index("won")}


def test_a_killed_writer_leaves_nothing_that_is_not_removed(tmp_path: Path) -> None:
    """Killed at its n-th change of step 2, before or after it: hidden files are left, and collected."""
    work("killed", f"{KILLING}://{tmp_path}/runs", KILLS, tmp_path / "ends", variables={})
    ends = json.loads((tmp_path / "ends").read_text())
    assert sum(status == -signal.SIGKILL for _, status in ends) >= KILLS // 2, ends
    for pid, _ in ends:
        root = tmp_path / "runs" / str(pid)
        offline_api.collect(f"local://{root}", settings=Settings(collect_grace_seconds=0))
        second = root / "step-000000000002"
        if not (second / "manifest.json").exists():
            assert not second.exists()
        for step in (1, 2) if second.exists() else (1,):
            checkpoint = holdfast.open_checkpoint(f"local://{root}", step=step)
            assert list(checkpoint.verify()) == []
            assert checkpoint.read("weights")[9_999] == 9_998 + step
            attempt = json.loads((root / f"step-{step:012d}" / "manifest.json").read_bytes())["attempt"]
            left = {path.name for path in (root / f"step-{step:012d}").iterdir()}
            assert left <= {attempt, "manifest.json", "reports"}
