"""torchrun starts the ranks again after a death in the middle of a save."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from tests.support.faulty_run import state_of
from tests.support.forked_processes import REPOSITORY, environment

pytestmark = pytest.mark.long


def test_an_elastic_restart_saves_the_step_again_and_no_vote_of_the_first_life_counts(tmp_path: Path) -> None:
    root, scratch = tmp_path / "run", tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--monitor-interval=0.2"]
    command += ["--module", "tests.distributed.jobs.elastic_worker", str(root), str(scratch)]
    with (tmp_path / "log").open("wb") as log:
        agent = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = agent.wait(120)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            # Its own session: the agent and, should they outlive it, its ranks.
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
    said = (tmp_path / "log").read_text(errors="replace")[-6000:]
    assert status == 0, f"exit {status}\n{said}"
    names = sorted(path.name for path in scratch.iterdir())
    assert names == ["died-after-rank-0-voted", "life-1.0.json", "life-1.1.json"], said
    first, second = (json.loads((scratch / f"life-1.{rank}.json").read_text()) for rank in (0, 1))
    assert first["resumed"] == second["resumed"] == 1
    assert second["manifest_before_vote"] == [False], "rank 0's vote of the first life completed the count"
    assert first["attempt"] == second["attempt"]
    folder = root / "step-000000000002"
    assert [path.name for path in folder.iterdir() if path.is_dir() and path.name != "reports"] == [first["attempt"]]
    state: dict[str, object] = {name: torch.zeros(30_000) for name in "abc"} | {"step": 0}
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        assert manager.load(state) == 2
    for name in "abc":
        assert torch.equal(state[name], state_of(2)[name])  # type: ignore[arg-type]
