"""SIGTERM beside a near tier: the step is near, and in the root if the grace allows; the exit code is one of a save."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import holdfast
from tests.distributed.tiers.exit_cases import state_of
from tests.support.forked_processes import Forked, Work, start_ranks

GRACE_SECONDS, LATE_SECONDS = 9.0, 3.0
"""This grace leaves the process 0.9 s for its exit, which a busy machine may miss; the usual one of 30 s leaves 2 s. A
save must fit in, for which a busy machine has seen an estimate of 5.1 s."""

HANGS = {"fast": "", "drain hangs": "upload.write", "root hangs": "put,put_if_absent,get,size,list,upload,folders"}


@dataclass
class Ended:
    code: int
    seconds: float
    log: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Ended]]:
    """What came of processes that were told to end at one time, by what their root does."""
    folders = {name: tmp_path_factory.mktemp("exits") for name in HANGS}
    works = [
        Work.of_rank(
            0,
            folders[name],
            "tests.distributed.tiers.exit_cases:preempted",
            folders[name],
            GRACE_SECONDS if hang else 20,
            hang,
        )
        for name, hang in HANGS.items()
    ]
    processes = start_ranks(works)
    found = {}
    for process, folder in zip(processes, folders.values(), strict=True):
        deadline = time.monotonic() + 60.0
        while not (folder / "begun").exists():
            assert time.monotonic() < deadline and process.poll() is None, (folder / "log.0").read_text()
            time.sleep(0.02)
    time.sleep(0.5)
    start = time.monotonic()
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for name, process in zip(HANGS, processes, strict=True):
        found[name] = folders[name], _ended(process, start, folders[name])
    return found


def _ended(process: Forked, start: float, folder: Path) -> Ended:
    try:
        code = process.wait(30)
    finally:
        process.send_signal(signal.SIGKILL)
    return Ended(code, time.monotonic() - start, (folder / "log.0").read_text())


@pytest.mark.long
@pytest.mark.parametrize("name", list(HANGS))
def test_a_preempted_job_saves_near_and_drains_within_its_grace(
    ended: dict[str, tuple[Path, Ended]], name: str
) -> None:
    folder, end = ended[name]
    assert end.code == 85 and end.seconds < GRACE_SECONDS + LATE_SECONDS, end.log
    steps = {
        place: sorted(int(path.parent.name[5:]) for path in (folder / place).glob("step-*/manifest.json"))
        for place in ("near", "root")
    }
    if name == "fast":
        assert steps["root"][-1] == steps["near"][-1]
    else:
        assert steps["root"] == [2] and f"step {steps['near'][-1]} is saved near, and not in the root" in end.log
    state = state_of(0)
    near = holdfast.Tier(folder / "near", every=1)
    with holdfast.CheckpointManager(folder / "root", every=2, near=near, process_group=False) as manager:
        assert manager.load(state) == steps["near"][-1] == state["step"]
