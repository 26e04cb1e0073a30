"""SIGKILL at every operation of a whole save that changes something: the old checkpoint or the new one, whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import pytest
import torch

from holdfast.backends.stores.local import LocalStore
from holdfast.errors import ConflictError
from holdfast.settings import Settings
from tests.crash.kills.judging import Judged
from tests.crash.kills.sweeping import swept_by
from tests.doubles.faults import Faults, FaultyStore, kill_process
from tests.property.life import Switch
from tests.support.crashed_run import (
    COMPRESSED,
    LAZY,
    NEW,
    OLD,
    Ending,
    attempted,
    committed_at,
    go_back,
    in_child,
    local_store,
    paths_under,
    require_clean,
    require_no_timeline_lost,
    require_whole,
    run_at,
    training_state,
)

pytestmark = [
    # The fork happens while threads of earlier tests may stand idle; the child uses none of their locks.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(300),
]

BETWEEN = 15
"""A step between the old one and the new one."""

Saver = Callable[[Path, Faults], None]
Points = tuple[Collection[str] | None, int]
"""Calls that count, None for all, and the distance of those at which a process dies."""

EVERY_CALL: Points = None, 1
"""All calls count, and the process dies at each."""


def save_over_syscalls(root: Path, faults: Faults) -> None:
    """Calls to the operating system count: fallocate, pwrite, ftruncate, fsync, link, mkdir, unlink …"""
    run = run_at(local_store(root, faults))
    run.save(NEW, training_state(NEW)).wait()


def save_lazily_over_store(root: Path, faults: Faults, settings: Settings = LAZY) -> None:
    """Every call to the store counts, while what is being saved is trained on."""
    run = run_at(FaultyStore(local_store(root), faults), settings=settings)
    state = training_state(NEW)
    handle = run.save(NEW, state)
    optimizer = state["optimizer"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.step()
    handle.wait()


def save_compressed_over_store(root: Path, faults: Faults) -> None:
    """The same, and tensors are compressed."""
    save_lazily_over_store(root, faults, COMPRESSED)


def save_over_board(root: Path, faults: Faults) -> None:
    """Every call to the job's key-value store counts: set, get_many, add, compare_set …"""
    run = run_at(local_store(root), board_faults=faults)
    run.save(NEW, training_state(NEW)).wait()


def save_over_store(root: Path, faults: Faults) -> None:
    """Every call to the store counts, as where the store is not a file system."""
    run = run_at(FaultyStore(local_store(root), faults))
    run.save(NEW, training_state(NEW)).wait()


def save_what_is_partly_frozen_over_store(root: Path, faults: Faults) -> None:
    """Every call to the store counts, from a load on; what did not change since is left where it was loaded from."""
    run = run_at(FaultyStore(local_store(root), faults))
    run.load(training_state(NEW), OLD)
    report = run.save(NEW, training_state(NEW)).wait()
    assert report is not None and report.unchanged_bytes == 12_000


def save_again_over_store(root: Path, faults: Faults) -> None:
    """Every call to the store counts in the second save of a process, which asks less than its first."""
    switch = Switch()
    run = run_at(FaultyStore(local_store(root), switch))
    run.save(BETWEEN, training_state(BETWEEN)).wait()
    switch.now = faults
    report = run.save(NEW, training_state(NEW)).wait()
    assert report is not None and report.unchanged_bytes == 12_000


def sweep(template: Path, work: Path, save: Saver, expected: set[int], points: Points = EVERY_CALL) -> list[str]:
    """Kill a save at one point after another until it lives; return what became of each."""
    names, stride = points
    judged = Judged[str]()
    fates = []
    for at in range(1, 2000, stride):
        root = work / str(at)
        if template.exists():
            shutil.copytree(template, root)
        ending = in_child(partial(save, root, Faults(kill_process(), at=at, names=names)))
        assert ending.killed != ending.acknowledged, "it either died or said that it was done"
        try:
            fates.append(judged.fate(root, ending, partial(old_or_new, root, ending, expected)))
        except BaseException as error:
            error.add_note(f"killed at operation {at}; files: {sorted(paths_under(root))}")
            raise
        shutil.rmtree(root, ignore_errors=not root.exists())
        if ending.acknowledged:
            print(f"{judged.deaths} deaths left {judged.contents} contents")
            return fates
    raise AssertionError("the save never came to its end")


def old_or_new(root: Path, ending: Ending, expected: set[int]) -> str:
    """Require that the old step or the new one is whole, and that training resumes; return which."""
    survived = set(run_at(local_store(root)).steps())
    assert survived in (expected, expected | {NEW})
    if ending.acknowledged:
        assert NEW in survived, "an acknowledged checkpoint was lost"
    if NEW in survived:
        require_whole(root, survived)
    resume(root, committed=NEW in survived)
    require_whole(root, expected | {NEW})
    require_clean(root, NEW, found_committed=NEW in survived)
    return "new" if NEW in survived else "old"


def resume(root: Path, *, committed: bool) -> None:
    """Save the same step again, as the training that resumes from the old one would."""
    run = run_at(local_store(root))
    try:
        _, error = attempted(run, NEW, training_state(NEW))
    finally:
        # What holds the root would write into it while it is being removed.
        run.close()
    if committed:
        assert isinstance(error, ConflictError), error
    else:
        assert error is None, error


@pytest.fixture
def template(in_memory: Path) -> Path:
    """A root with one committed step."""
    root = in_memory / "template"
    committed_at(root, OLD)
    return root


@pytest.mark.long
@pytest.mark.parametrize(
    "save",
    [
        save_over_syscalls,
        save_over_board,
        save_over_store,
        save_lazily_over_store,
        save_compressed_over_store,
        save_what_is_partly_frozen_over_store,
    ],
)
def test_old_or_new_whole_wherever_the_process_dies(template: Path, in_memory: Path, save: Saver) -> None:
    points = swept_by("SWEEP_STRIDE") if save is save_over_syscalls else EVERY_CALL
    fates = sweep(template, in_memory, save, {OLD}, points)
    print(f"{save.__name__}: {len(fates)} points, {fates.count('old')} left the old step, {fates.count('new')} the new")
    assert fates.count("old") >= 5, "most of a save comes before its commit"
    assert fates == sorted(fates, reverse=True), "once committed, always committed"


def test_a_second_save_of_a_process_dies_anywhere(template: Path, in_memory: Path) -> None:
    fates = sweep(template, in_memory, save_again_over_store, {OLD, BETWEEN})
    assert fates.count("old") >= 5, "most of a save comes before its commit"
    assert fates == sorted(fates, reverse=True), "once committed, always committed"


def go_back_over_syscalls(root: Path, faults: Faults) -> None:
    """Load the old step, and save at the number of the newer one: there every call to the operating system counts."""
    switch = Switch()
    go_back(local_store(root, switch), switch, faults)


def go_back_over_store(root: Path, faults: Faults) -> None:
    """The same, and every call to the store counts."""
    switch = Switch()
    go_back(FaultyStore(local_store(root), switch), switch, faults)


@pytest.mark.long
@pytest.mark.parametrize(
    ("save", "points"), [(go_back_over_syscalls, swept_by("GO_BACK_STRIDE")), (go_back_over_store, EVERY_CALL)]
)
def test_going_back_dies_anywhere_and_no_step_of_either_timeline_is_lost(
    in_memory: Path, save: Saver, points: Points
) -> None:
    names, stride = points
    committed_at(in_memory / "template", OLD, NEW)
    judged = Judged[str]()
    fates = []
    for at in range(1, 2000, stride):
        root = in_memory / str(at)
        shutil.copytree(in_memory / "template", root)
        ending = in_child(partial(save, root, Faults(kill_process(), at=at, names=names)))
        judge = partial(require_no_timeline_lost, root, acknowledged=ending.acknowledged)
        fates.append(judged.fate(root, ending, judge))
        shutil.rmtree(root)
        if ending.acknowledged:
            break
    print(f"{save.__name__}: {len(fates)} points, {fates.count('old')} left the old step, {fates.count('new')} the new")
    assert fates == sorted(fates, reverse=True), "once committed, always committed"


@pytest.mark.long
def test_first_save_of_a_run_dies_anywhere(in_memory: Path) -> None:
    fates = sweep(in_memory / "none", in_memory / "runs" / "deep", save_over_syscalls, set(), swept_by("SWEEP_STRIDE"))
    assert "old" in fates
    assert "new" in fates


def test_a_store_is_a_store_of_the_same_class_as_the_users() -> None:
    """The rig saves through the real local store, not through a stand-in."""
    assert isinstance(local_store(Path("unused"), Faults()), LocalStore)
