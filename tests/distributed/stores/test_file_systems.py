"""File systems of fsspec with several processes: writers that race, and writers that are killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast._face import offline_api
from holdfast.settings import Settings
from tests.distributed.stores.object_worker import RACERS
from tests.support.fsspec_file_systems import KILLING

ROUNDS = 20
KILLS = 14

_WORK = f"""
import importlib, sys
import holdfast.backends.stores.fsspec.store, tests.support.fsspec_file_systems
from tests.distributed.stores import object_worker

for name in object_worker.IMPORTED:
    importlib.import_module(name)
folder = sys.argv[1]
object_worker.race(f"local://{{folder}}/run", {ROUNDS}, f"{{folder}}/outcomes")
object_worker.killed(f"{KILLING}://{{folder}}/runs", {KILLS}, f"{{folder}}/ends")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process has left that forked all others: importing torch once saves most of the time."""
    folder = tmp_path_factory.mktemp("worked")
    done = subprocess.run([sys.executable, "-c", _WORK, folder], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.long
def test_one_of_eight_writers_wins(folder: Path) -> None:
    outcomes = [json.loads((folder / f"outcomes.{number}").read_text()) for number in range(RACERS)]
    for turn in range(ROUNDS):
        came = [each[turn] for each in outcomes]
        assert sorted(came) == ["ConflictError"] * (RACERS - 1) + ["won"], f"round {turn}: {came}"
        checkpoint = holdfast.open_checkpoint(f"local://{folder}/run/{turn}")
        assert set(checkpoint.read("winner").tolist()) == {came.index("won")}


def test_a_killed_writer_leaves_nothing_that_is_not_removed(folder: Path) -> None:
    """Killed at its n-th change of step 2, before or after it: hidden files are left, and collected."""
    ends = json.loads((folder / "ends").read_text())
    assert sum(status == -signal.SIGKILL for _, status in ends) >= KILLS // 2, ends
    for pid, _ in ends:
        root = folder / "runs" / str(pid)
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
