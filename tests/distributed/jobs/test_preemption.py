"""SIGTERM at random moments: every rank leaves at one step, its exit code is right, and training goes on to the bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import holdfast
from tests.distributed.jobs.preempting import Told, interrupted, require_never_broken, trained_through
from tests.support.forked_processes import REPOSITORY, environment

ROUNDS = int(os.environ.get("PREEMPTION_ROUNDS", "5"))
"""How often one training is told to end; `make campaign` asks for more."""

KINDS: list[Told] = ["one", "all", "launcher", "one", "all"]


@pytest.mark.long
@pytest.mark.timeout(120 + 60 * ROUNDS)
def test_a_training_that_is_told_to_end_again_and_again_is_the_one_that_never_was(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    endings = []
    for number in range(ROUNDS):
        scratch = tmp_path / f"round-{number}"
        endings.append(interrupted(tmp_path / "run", scratch, KINDS[number % 5], chance, grace_seconds=15.0))
        print(f"{number + 1}/{ROUNDS}: {endings[-1].code} at step {endings[-1].step}, {endings[-1].seconds:.1f} s")
    digests = trained_through(tmp_path / "other", tmp_path / "through", [each.step for each in endings])
    require_never_broken(endings, digests)
    # Where the machine is so busy that a save would not have fitted, it says so.
    assert all(each.code == 85 or "of the grace" in each.why for each in endings), endings
    assert sum(each.code == 85 for each in endings) > ROUNDS / 2
    assert max(each.seconds for each in endings) < 15


def test_too_short_a_grace_ends_with_the_other_code_and_the_newest_step_stays(tmp_path: Path) -> None:
    chance = random.Random(5)
    root = tmp_path / "run"
    kept = interrupted(root, tmp_path / "kept", "all", chance, grace_seconds=15.0)
    lost = interrupted(root, tmp_path / "lost", "one", chance, grace_seconds=0.001)
    assert (kept.code, lost.code, lost.resumed) == (85, 86, kept.step)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, int], Path]:
    folder = tmp_path_factory.mktemp("ended")
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.jobs.ended_worker", str(folder)],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    return json.loads(done.stdout), folder


@pytest.mark.parametrize(
    ("case", "status", "steps"),
    [
        ("sigterm", 85, [3]),
        ("sigint", 85, [3]),
        ("sigusr1", 85, [3]),
        ("no-time", 86, []),
        # Nothing is there yet that a save could keep.
        ("before-the-first", -15, []),
        ("after-the-last", -15, []),
        ("off", -15, []),
        ("thread", -15, []),
        ("failing", 1, []),
        ("twice", 85, [3]),
        ("interrupted-twice", 30, []),
    ],
)
def test_what_a_process_that_is_told_to_end_says_with_its_exit_code(
    ended: tuple[dict[str, int], Path], case: str, status: int, steps: list[int]
) -> None:
    statuses, folder = ended
    assert statuses[case] == status
    with holdfast.CheckpointManager(folder / case, process_group=False) as manager:
        assert manager.steps() == steps
    for step in steps:
        checkpoint = holdfast.open_checkpoint(folder / case / f"step-{step:012d}")
        assert list(checkpoint.verify()) == []


LOADING = """
import signal, sys, time
import torch
import holdfast

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, number):
        time.sleep(0.002)
        return torch.zeros(4)

def outlive_signals(worker):
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

preemption = holdfast.Preemption(signals=("SIGTERM", "SIGUSR1"))
with holdfast.CheckpointManager(sys.argv[1], every=100_000, process_group=False, preemption=preemption) as manager:
    batches = torch.utils.data.DataLoader(Slow(), batch_size=4, num_workers=2, worker_init_fn=outlive_signals)
    for step, batch in enumerate(batches, 1):
        manager.maybe_save(step, {"weights": torch.ones(10)})
        if step == 5:
            print("begun", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_workers_of_a_data_loader_outlive_a_signal_to_the_group(tmp_path: Path, number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOADING, str(tmp_path / "run")],
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.killpg(process.pid, number)
        try:
            assert process.wait(60) == 85
            with pytest.raises(ProcessLookupError):
                # No worker is left either.
                os.killpg(process.pid, 0)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
