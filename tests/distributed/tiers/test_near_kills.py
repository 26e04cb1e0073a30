"""All ranks of a run with a near tier are killed again and again: what was acknowledged near is there, bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import holdfast
from holdfast import api
from holdfast.errors import ConflictError
from tests.distributed.tiers.kill_cases import COUNT, LARGE_COUNT, SETTINGS, manager_at, state_of
from tests.support.forked_processes import Forked, Work, start_ranks
from tests.support.gloo_worlds import Case, Launch
from tests.support.server_folders import ServerFolder, steps_in

LIVES = int(os.environ.get("NEAR_LIVES", "5"))
"""How often a run is killed."""

SECONDS_MAX = 3.0 if os.environ.get("TIER_ROOT_ON") else 0.7
"""How long a life lasts after its first save: some drains must come to their end."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(120 + 15 * LIVES)]


def newest(folder: Path, place: str) -> int:
    """Return the newest step that rank 0 was told of."""
    path = folder / "acknowledged"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return max((int(line.split()[1]) for line in lines if line.startswith(place)), default=0)


def lived(folder: Path, root: Path | ServerFolder, number: int, seconds: float, at_least: int, count: int) -> None:
    """Let two ranks resume and save, and kill both some time after their first save."""
    case = Case(
        "tests.distributed.tiers.kill_cases:live",
        {"folder": str(folder), "root": str(root), "begun": f"begun-{number}", "at_least": at_least, "count": count},
    )
    with Launch(2, [case], folder / f"life-{number}") as launch:
        deadline = time.monotonic() + 60.0
        while not (folder / f"begun-{number}").exists():
            ended = [process.poll() for process in launch.processes]
            assert time.monotonic() < deadline and ended == [None, None], _said(folder / f"life-{number}")
            time.sleep(0.01)
        time.sleep(seconds)
        assert [process.poll() for process in launch.processes] == [None, None], _said(folder / f"life-{number}")
        for process in launch.processes:
            process.send_signal(signal.SIGKILL)


def _said(scratch: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-3000:] for path in scratch.glob("l*.?*"))


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_no_acknowledged_step_is_lost_by_kills(tmp_path: Path, tier_root: Path | ServerFolder, where: str) -> None:
    with ExitStack() as ended:
        if where == "memory":
            memory = ended.enter_context(TemporaryDirectory(dir="/dev/shm"))
            (tmp_path / "near").symlink_to(Path(memory) / "near")  # The jobs take the folder that the link leads to.
        play(tmp_path, tier_root, LARGE_COUNT if where == "memory" else COUNT)


def play(tmp_path: Path, tier_root: Path | ServerFolder, count: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance, at_least = random.Random(seed), 0
    for number in range(LIVES):
        lived(tmp_path, tier_root, number, chance.random() * SECONDS_MAX, at_least, count)
        act = chance.choice(["resume", "resume", "drain", "lose"])
        at_least = newest(tmp_path, "near")
        if act == "drain":
            api.drain(str(tmp_path / "near"), settings=SETTINGS)
            assert steps_in(tier_root)[-1] == steps_in(tmp_path / "near")[-1] >= at_least
        elif act == "lose":
            shutil.rmtree((tmp_path / "near").resolve())
            at_least = newest(tmp_path, "root")
            (tmp_path / "acknowledged").write_text(f"near {at_least}\nroot {at_least}\n")
        print(f"{number + 1}/{LIVES}: {act}, {at_least} acknowledged, {steps_in(tier_root)} in the root")
    state = state_of(0, count=count)
    with manager_at(tmp_path, tier_root, process_group=False) as manager:
        step = manager.load(state, skip="own")
        assert step is not None and step >= at_least
        assert torch.equal(state["weights"], state_of(step, count=count)["weights"])
        manager.save(step + 1, state_of(step + 1, count=count)).wait()
    for place in (tmp_path / "near", tier_root):
        for each in steps_in(place):
            assert list(holdfast.open_checkpoint(place / f"step-{each:012d}").verify()) == []
    # Files of a later step, which was lost with the near tier, go once the run comes to that step again.
    left = [path.name for path in tier_root.glob("copying/*") if path.name < f"step-{step + 2:012d}"]
    assert not left, "the drain removes what killed ones left"
    assert step + 1 in steps_in(tier_root) and len(steps_in(tmp_path / "near")) <= 3


def test_a_job_excludes_a_drain_by_hand_and_nothing_of_it_counts_once_another_took_over(
    tmp_path: Path, tier_root: Path | ServerFolder
) -> None:
    work = Work.of_rank(0, tmp_path, "tests.distributed.tiers.kill_cases:stopped", tmp_path, tier_root)
    (process,) = start_ranks([work])
    try:
        _await(lambda: (tmp_path / "begun").exists(), process, tmp_path)
        with pytest.raises(ConflictError, match=f"another job writes here.*process {process.pid}"):
            api.drain(str(tmp_path / "near"), settings=SETTINGS)
        (tmp_path / "go").touch()
        _await(lambda: ") T " in Path(f"/proc/{process.pid}/stat").read_text(), process, tmp_path)
        state = state_of(0)
        with manager_at(tmp_path, tier_root, process_group=False) as manager:
            assert manager.load(state) == 6
            for step in (7, 8, 9):
                handle = manager.maybe_save(step, state_of(step))
                assert handle is not None
                handle.wait()
        before = steps_in(tier_root), steps_in(tmp_path / "near")
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(60) == 0, (tmp_path / "log.0").read_text()
    finally:
        process.send_signal(signal.SIGKILL)
    said = json.loads((tmp_path / "said").read_text())
    assert all(said[str(step)].startswith("ConflictError") for step in (7, 8, 9)), said
    assert before == (steps_in(tier_root), steps_in(tmp_path / "near"))
    with manager_at(tmp_path, tier_root, process_group=False) as manager:
        assert manager.load(state) == 9 and torch.equal(state["weights"], state_of(9)["weights"])
    for place in (tmp_path / "near", tier_root):
        for each in steps_in(place):
            assert list(holdfast.open_checkpoint(place / f"step-{each:012d}").verify()) == []


def _await(is_so: Callable[[], bool], process: Forked, scratch: Path) -> None:
    deadline = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < deadline and process.poll() is None, _said(scratch)
        time.sleep(0.01)
