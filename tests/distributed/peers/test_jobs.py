"""Jobs whose near tier is the memory of their nodes, on one host."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import holdfast
from holdfast.backends.stores.local import LocalStore
from holdfast.settings import Settings
from holdfast.stored.peers.roster import read_roster, write_roster
from holdfast.training.runs.tiers.agent_files import JOB_FILE, is_agent_running
from tests.distributed.peers.nodes import node_memory

ORPHAN_SECONDS = 4.0


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOLDFAST_NODE", "a")
    with node_memory() as folder:
        yield folder


def job(root: Path, memory: Path) -> holdfast.CheckpointManager:
    """Open a job of one node."""
    near = holdfast.Tier(f"peers://{memory}", every=1, orphan_seconds=ORPHAN_SECONDS, linger_seconds=0.0)
    return holdfast.CheckpointManager(root, every=100, near=near, process_group=False, preemption=False)


@pytest.mark.long
@pytest.mark.parametrize("left", ["nothing", "a dead job"])
def test_an_old_agent_waits_for_the_job_of_a_new_roster(tmp_path: Path, memory: Path, left: str) -> None:
    with job(tmp_path / "root", memory) as manager:
        manager.save(1, {"weights": torch.ones(3)}).wait()
    with job(tmp_path / "root", memory):
        time.sleep(ORPHAN_SECONDS)
        folder, file = LocalStore(memory / "a", settings=Settings()), memory / "a" / JOB_FILE
        roster = read_roster(folder)
        assert roster is not None
        if left == "nothing":
            file.unlink()  # As if the keepers that had the file were lost.
        else:
            with subprocess.Popen(["true"]) as ended:
                pass
            file.write_text(json.dumps(json.loads(file.read_text()) | {"pid": ended.pid}))
        write_roster(folder, msgspec.structs.replace(roster, made=roster.made + 1.0))
        time.sleep(ORPHAN_SECONDS / 4)
        assert is_agent_running(str(memory / "a"))
