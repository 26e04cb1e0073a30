"""SIGKILL and errors at every operation of a load that discards: a restart resumes the old step or the loaded one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.api import list_steps
from holdfast.checkpoint_manager import CheckpointManager
from holdfast.clock import SystemClock
from holdfast.ports.store import Store
from holdfast.repository.catalog import read_run_id
from holdfast.runs.collection.chosen_steps import ChosenNames
from holdfast.runs.collection.garbage_collection import CheckpointGC
from holdfast.testing.faults import Faults, FaultyStore
from tests.crash.rig import (
    committed_at,
    expected_fingerprint,
    fingerprint,
    local_store,
    paths_under,
    run_at,
    step_path,
    training_state,
)
from tests.crash.sweeping import fates_of_kills, judge_after_errors

pytestmark = [
    # The fork happens while threads of earlier tests may stand idle; the child uses none of their locks.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(600),
]

STEPS, BACK, ANEW = (10, 20, 30, 40), 20, 30
STRIDE = int(os.environ.get("COLLECT_STRIDE", "13"))
"""Every so many-th call to the operating system is met, and of a store's operations every third; `make campaign` meets
all."""


def collect(store: Store, run: CheckpointManager) -> None:
    """Do at once what the background does after the grace."""
    parts, run_id = run._parts, read_run_id(store)
    assert run_id is not None
    parts.writer_lease.hold(run_id)
    choice = ChosenNames(is_all=True)
    CheckpointGC(store, SystemClock(), None, parts.writer_lease, parts.pins, choice).collect(0, lambda _: False)


def discard(store: Store) -> None:
    run = run_at(store)
    run._parts.collecting = None
    try:
        assert run.load(training_state(0), BACK, discard_newer=True) == BACK
        assert run.load_report is not None and (run.load_report.discarded or run.load_report.left)
        collect(store, run)
    finally:
        run.close()


def over_syscalls(root: Path, faults: Faults) -> None:
    discard(local_store(root, faults))


def over_store(root: Path, faults: Faults) -> None:
    discard(FaultyStore(local_store(root), faults))


def require_goes_on(root: Path) -> str:
    """Require that a restart resumes a whole step, that every step is whole or gone, and that the next writer ends it.

    Returns:
        `old` if a restart resumes the newest step of before, `back` if it resumes the loaded one.
    """
    run = run_at(local_store(root))
    run._parts.collecting = None
    loaded = training_state(0)
    resumed = run.load(loaded)
    assert resumed in (BACK, STEPS[-1])
    assert fingerprint(loaded) == expected_fingerprint(resumed)
    fate = "back" if resumed == BACK else "old"
    assert run.steps() == [step for step in STEPS if step <= resumed]
    for record in list_steps(root).steps:
        if record.manifest is not None:
            assert run.load(loaded, f"{record.step}@{record.manifest.digest}") == record.step
            assert fingerprint(loaded) == expected_fingerprint(record.step)
    if fate == "back":
        run.load(loaded)
        run.save(ANEW, training_state(ANEW + 1)).wait()
        collect(local_store(root), run)
        left = [record.name for record in list_steps(root).steps if record.manifest is not None]
        assert left == ["10", "20", "30"], "what was discarded is gone, and nothing else"
        assert not step_path(root, STEPS[-1]).exists()
        assert not [path for path in paths_under(root) if path.startswith(("collecting/", "timelines/", "readers/"))]
        assert run.load(loaded) == ANEW and fingerprint(loaded) == expected_fingerprint(ANEW + 1)
    run.close()
    return fate


@pytest.fixture
def template(in_memory: Path) -> Path:
    committed_at(in_memory / "template", *STEPS)
    return in_memory / "template"


@pytest.mark.parametrize("way", [over_syscalls, over_store])
def test_killed_anywhere(in_memory: Path, template: Path, way: Callable[[Path, Faults], None]) -> None:
    points = range(1, 4000, 3 * STRIDE if way is over_syscalls else 1 + 2 * (STRIDE > 1))
    fates, judged = fates_of_kills(template, in_memory / "root", way, lambda root, _: require_goes_on(root), points)
    assert fates[-1] == "back"
    assert fates == sorted(fates, reverse=True), "what was discarded stays so"
    assert set(fates) == {"old", "back"}
    print(f"{way.__name__}: {judged.deaths} deaths left {judged.contents} contents: 0 steps wrong, 0 unreadable")


def test_an_error_at_any_operation_loses_nothing(in_memory: Path, template: Path) -> None:
    points = range(1, 2000, 1 + 3 * (STRIDE > 1))
    assert judge_after_errors(template, in_memory / "root", over_store, require_goes_on, points) > 20
