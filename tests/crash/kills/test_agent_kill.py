"""SIGKILL at any call that an agent makes to either place: the root has the step whole or not at all.

The next agent completes the step. The near tier stays whole until an agent, or `holdfast drain --remove`, empties it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import pytest

import holdfast
from holdfast import api
from holdfast._face import wiring
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.shelf import ShelfStore
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.base.clock import SystemClock
from holdfast.stored.repository.two_roots import TwoRoots
from holdfast.training.runs.tiers.agent import Agent, Patience, run_agent
from holdfast.training.runs.tiers.offline_drain import NearDrain
from tests.crash.kills.sweeping import fates_of_kills
from tests.doubles.faults import Faults, FaultySyscalls
from tests.support.crashed_run import SETTINGS, Ending, expected_fingerprint, fingerprint, training_state
from tests.support.server_folders import steps_in

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to write to"),
    pytest.mark.timeout(1800),
    pytest.mark.long,
]

STRIDE = int(os.environ.get("AGENT_STRIDE", "97"))
"""Every so many-th call is met; `make campaign-memory` meets all."""


@pytest.fixture
def place() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def manager_at(place: Path) -> holdfast.CheckpointManager:
    near = holdfast.Tier(place / "near", every=1, keep_last=2)
    return holdfast.CheckpointManager(
        place / "root", every=100, near=near, process_group=False, preemption=False, settings=SETTINGS
    )


def save_and_die(place: Path) -> None:
    """Save a step near alone, in a process that is killed; nothing is in the root."""
    pid = os.fork()
    if not pid:
        manager = manager_at(place)
        manager.load(training_state(0))
        manager.maybe_save(10, training_state(10)).wait("near")  # type: ignore[union-attr]
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    assert steps_in(place / "near") == [10] and steps_in(place / "root") == []


def watch(place: Path, faults: Faults | None = None) -> None:
    """Be the agent of the dead job, to its end."""
    syscalls = None if faults is None else cast(Syscalls, FaultySyscalls(Syscalls(), faults))
    near = ShelfStore(place / "near", settings=SETTINGS, syscalls=syscalls)
    run = TwoRoots(near, LocalStore(place / "root", settings=SETTINGS, syscalls=syscalls))
    drain = NearDrain(run, SystemClock(), wiring.codecs())
    run_agent(near.url, Agent(drain, SystemClock(), SETTINGS.lease_seconds, Patience(0.0, 0.0), is_memory=True))


def judge(place: Path, ending: Ending) -> bool:
    """Return whether a killed agent has left the step in the root: whole then; the next agent ends all the same."""
    near, root = place / "near", place / "root"
    found = steps_in(root) == [10]
    assert found or not ending.acknowledged
    if found:
        assert list(holdfast.open_checkpoint(root / "step-000000000010").verify()) == []
    assert found or steps_in(near) == [10], "the only copy is gone"
    if (near / "holdfast.json").exists():
        watch(place)
        assert api.agent_status(str(near)).state == "ended" and not api.agent_status(str(near)).error
    assert steps_in(root) == [10]
    if steps_in(near):  # After the release of the lease the next agent finds nothing to do, and leaves the memory.
        assert api.drain(str(near), remove=True, settings=SETTINGS).steps == ()
    # Folders without files may stay of an agent that was killed while it removed them.
    assert not [path for path in (*near.glob("step-*/**/*"), *near.glob(".spare-*")) if path.is_file()]
    with manager_at(place) as manager:
        state = training_state(0)
        assert manager.load(state) == 10 and fingerprint(state) == expected_fingerprint(10)
        manager.close(wait=False)
    assert list(holdfast.open_checkpoint(root / "step-000000000010").verify()) == []
    assert not [*root.glob("copying/*")], "the drain removes what a killed one left"
    return found


def test_an_agent_that_is_killed_at_any_call_leaves_the_rest_to_the_next(
    place: Path, record_property: Callable[[str, object], None]
) -> None:
    save_and_die(place / "run")
    (place / "run").rename(place / "template")
    fates, _ = fates_of_kills(place / "template", place / "run", watch, judge, range(1, 20_000, STRIDE))
    print(f"{len(fates)} kills, {fates.count(True)} left the step in the root")
    record_property("agents killed", len(fates))
    assert fates == sorted(fates) and set(fates) == {False, True}
