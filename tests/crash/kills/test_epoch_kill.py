"""SIGKILL at every operation of taking an epoch, and the power cut at many: readable, nothing lost, taken at once."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from holdfast.base.clock import SystemClock
from holdfast.stored.leases.writer import WriterLease
from holdfast.stored.repository.epochs import current_fence, newest_epoch
from tests.crash.kills.judging import Judged
from tests.doubles.faults import Faults, kill_process
from tests.support.crashed_run import (
    NEW,
    NEXT,
    OLD,
    committed_at,
    in_child,
    local_store,
    paths_under,
    require_whole,
    run_at,
    training_state,
)
from tests.support.mounted_file_systems import FILE_SYSTEMS, acted_until_power_cut, copy_image, mounted, new_image

pytestmark = [
    pytest.mark.long,
    # The fork happens while threads of earlier tests may stand idle; the child uses none of their locks.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(300),
]

LEASE_SECONDS = 60.0
"""Nobody waits for it here."""

IMAGE_MIB = 16
CUTS = 25


class ClockWithoutSleep(SystemClock):
    """A clock that refuses to wait. A measured duration would depend on the load of the machine too."""

    def sleep(self, seconds: float) -> None:
        raise AssertionError(f"it waited for a corpse: {seconds} s")


def hold(root: Path, faults: Faults) -> None:
    """Take the epoch of a root; every call to the operating system counts."""
    WriterLease(local_store(root, faults), SystemClock(), LEASE_SECONDS).hold("run")


def nobody(root: Path) -> set[int]:
    return set()


def released(root: Path) -> set[int]:
    committed_at(root, OLD)
    return {OLD}


def killed(root: Path) -> set[int]:
    """The holder died after its save, without a word."""
    committed_at(root, OLD)

    def save_and_die() -> None:
        run_at(local_store(root)).save(NEW, training_state(NEW)).wait()
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(save_and_die).killed
    return {OLD, NEW}


def require_taken_over(root: Path, steps: set[int], at_least: int) -> None:
    """Require that nothing is lost, and that the next writer waits for nobody."""
    assert set(run_at(local_store(root)).steps()) == steps
    assert newest_epoch(local_store(root)) >= at_least, "an epoch that was taken was lost"
    committed_at(root, NEXT, clock=ClockWithoutSleep())
    assert set(run_at(local_store(root)).steps()) == {*steps, NEXT}
    assert current_fence(local_store(root)).accepted.keys() == steps


@pytest.mark.parametrize("before", [nobody, released, killed])
def test_killed_anywhere_while_taking_an_epoch(in_memory: Path, before: Callable[[Path], set[int]]) -> None:
    template, root = in_memory / "template", in_memory / "root"
    steps = before(template)
    begun = newest_epoch(local_store(template))
    judged = Judged[None]()
    for at in range(1, 1000):
        if template.exists():
            shutil.copytree(template, root)
        ending = in_child(partial(hold, root, Faults(kill_process(), at=at)))
        try:
            judged.fate(root, ending, partial(require_taken_over, root, steps, begun + ending.acknowledged))
        except BaseException as error:
            error.add_note(f"killed at operation {at}; files: {sorted(paths_under(root))}")
            raise
        if ending.acknowledged:
            break
        shutil.rmtree(root, ignore_errors=not root.exists())
    require_whole(root, {*steps, NEXT})
    print(f"{before.__name__}: {at} points, {judged.contents} contents, 0 unreadable, 0 steps lost, 0 waits")
    assert ending.acknowledged
    assert at > 40, "it takes many operations to take an epoch"


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
@pytest.mark.parametrize("before", [released, killed])
def test_power_cut_while_taking_an_epoch(in_memory: Path, before: Callable[[Path], set[int]], kind: str) -> None:
    template, image, mount = in_memory / "template", in_memory / "image", in_memory / "m"
    new_image(template, IMAGE_MIB, kind)
    with mounted(template, mount, options="loop", kind=kind):
        steps = before(mount / "root")
        begun = newest_epoch(local_store(mount / "root"))
    copy_image(template, image)
    with mounted(image, mount, options="loop", kind=kind):
        counted = Faults()
        hold(mount / "root", counted)
        total = counted.counted
    acknowledged = 0
    # The last one lies behind it: it was taken, and at once the power went.
    for at in sorted({1 + round(number * (total + 1) / (CUTS - 1)) for number in range(CUTS)}):
        copy_image(template, image)
        with mounted(image, mount, options="loop", kind=kind):
            returned = acted_until_power_cut(mount, at, partial(hold, mount / "root"))
        with mounted(image, mount, options="loop", kind=kind):
            try:
                require_taken_over(mount / "root", steps, begun + returned)
            except BaseException as error:
                error.add_note(f"power cut at operation {at} of {total}; found {sorted(paths_under(mount))}")
                raise
        acknowledged += returned
    print(f"{kind}, {before.__name__}: {CUTS} power cuts, {acknowledged} after it was taken, 0 lost")
    assert acknowledged >= 1
