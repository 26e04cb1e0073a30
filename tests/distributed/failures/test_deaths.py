"""SIGKILL of a rank at the worst moments: what the survivors are told is true, what was committed stays whole."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch

import holdfast
from tests.support.faulty_run import state_of
from tests.support.gloo_worlds import Case, Launch, Results

CASES = "tests.distributed.failures.fault_cases"


@dataclass(frozen=True)
class Death:
    """One way to die, and what may be said of it afterwards."""

    function: str
    said: tuple[str, ...]
    """What survivors may be told."""
    committed: bool
    """Whether step 2 is there in the end."""
    size: int = 2
    host: Literal["rank0", "launcher"] = "launcher"
    arguments: tuple[tuple[str, object], ...] = ()
    victim: int | None = None
    """Which rank dies; None where it is whoever comes last."""


DEATHS = {
    "a rank in the middle of writing": Death(
        "killed_while_writing", ("aborted",), False, host="rank0", arguments=(("victim", 1),), victim=1
    ),
    "the store's host in the middle of writing": Death(
        "killed_while_writing", ("aborted", "unknown"), False, host="rank0", arguments=(("victim", 0),), victim=0
    ),
    "one of three before its vote": Death(
        "killed_before_vote", ("aborted",), False, size=3, arguments=(("victim", 2),), victim=2
    ),
    "rank 0 before its vote, the store elsewhere": Death(
        "killed_before_vote", ("aborted",), False, arguments=(("victim", 0),), victim=0
    ),
    "the last rank between its count and the outcome": Death("committer_killed_before_outcome", ("aborted",), False),
    "the last rank between the outcome and the manifest": Death(
        "committer_killed_before_publishing", ("unknown",), False
    ),
    "the last rank once the manifest is there": Death("committer_killed_after_publishing", ("committed",), True),
    "the store's host as the last rank before the manifest": Death(
        "host_killed_as_committer", ("unknown",), False, host="rank0", arguments=(("after", False),), victim=0
    ),
    "the store's host as the last rank once the manifest is there": Death(
        "host_killed_as_committer", ("committed",), True, host="rank0", arguments=(("after", True),), victim=0
    ),
}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Results]]:
    """Every death in a world of its own, all at a time: their ranks mostly wait for the dead."""
    base = tmp_path_factory.mktemp("deaths")
    with ExitStack() as stack:
        launched = {}
        for number, (name, death) in enumerate(DEATHS.items()):
            root = base / f"run-{number}"
            case = Case(f"{CASES}:{death.function}", {"root": str(root), **dict(death.arguments)}, "death")
            world = Launch(death.size, [case], base / f"world-{number}", store_host=death.host, deadline_seconds=75)
            launched[name] = root, stack.enter_context(world)
        return {name: (root, launch.join()) for name, (root, launch) in launched.items()}


def loaded(root: Path, step: int) -> dict[str, object]:
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        state: dict[str, object] = {name: torch.zeros(30_000) for name in "abc"} | {"step": 0}
        assert manager.load(state, step) == step
        return state


def assert_whole(root: Path, step: int) -> None:
    found, expected = loaded(root, step), state_of(step)
    assert found["step"] == step
    for name in "abc":
        assert torch.equal(found[name], expected[name]), f"step {step}: {name}"  # type: ignore[arg-type]
    folder = root / f"step-{step:012d}"
    assert list(holdfast.open_checkpoint(folder).verify()) == []


@pytest.mark.parametrize("name", list(DEATHS))
def test_a_death_leaves_the_truth_behind(worlds: dict[str, tuple[Path, Results]], name: str) -> None:
    root, results = worlds[name]
    death = DEATHS[name]
    killed = [rank for rank, status in enumerate(results.exits) if status == -signal.SIGKILL]
    assert len(killed) == 1, f"exits {results.exits}:\n{results.logs()}"
    assert death.victim in (None, killed[0])
    for rank in range(death.size):
        outcome = results.outcome("death", rank)
        if rank in killed:
            assert outcome is None
            continue
        assert outcome is not None, results.logs()
        assert outcome.error is None, f"{outcome.error}: {outcome.message}\n{outcome.trace}"
        value = outcome.value
        assert isinstance(value, dict)
        assert value["said"] in death.said, f"{value}\n{results.logs()}"
        if value["said"] == "committed":
            assert_whole(root, 2)
        else:
            assert value["error"] == "UnavailableError", value
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        assert manager.steps() == ([1, 2] if death.committed else [1])
    assert_whole(root, 1)
    if death.committed:
        assert_whole(root, 2)

    # A new job on the same root saves the step that failed, or the next one.
    step = 3 if death.committed else 2
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        manager.load(state_of(0))
        manager.save(step, state_of(step)).wait()
        assert manager.latest == step
    assert_whole(root, step)
    assert_whole(root, 1)
    attempts = [path for path in (root / f"step-{step:012d}").iterdir() if path.is_dir() and path.name != "reports"]
    assert len(attempts) == 1, "what the dead attempt left is gone once the step is committed"


@pytest.mark.long
def test_a_slow_committer_that_wakes_late_destroys_nothing(tmp_path: Path) -> None:
    """The committer is stopped after it won the outcome; a new job commits the step; then the old one goes on."""
    root = tmp_path / "run"
    case = Case(f"{CASES}:stopped_committer", {"root": str(root)}, "stopped")
    with Launch(2, [case], tmp_path / "world", deadline_seconds=90) as launch:
        sleeper = int(launch.wait_for("stopped").read_text())
        launch.wait_for(f"stopped.{1 - sleeper}.json")
        fresh = state_of(77) | {"step": 2}
        with holdfast.CheckpointManager(root, process_group=False) as manager:
            assert manager.load(state_of(0)) == 1
            manager.save(2, fresh).wait()
        launch.processes[sleeper].send_signal(signal.SIGCONT)
        results = launch.join()
    waiting, woken = results.of("stopped")[1 - sleeper], results.of("stopped")[sleeper]
    assert isinstance(waiting.value, dict), waiting
    assert waiting.value["said"] == "unknown", waiting
    assert isinstance(woken.value, dict), woken
    assert woken.value["said"] == "failed", woken
    assert woken.value["error"] == "ConflictError", woken
    found = loaded(root, 2)
    for name in "abc":
        assert torch.equal(found[name], fresh[name])  # type: ignore[arg-type]
    assert list(holdfast.open_checkpoint(root / "step-000000000002").verify()) == []
    assert_whole(root, 1)
