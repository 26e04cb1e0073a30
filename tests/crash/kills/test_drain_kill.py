"""SIGKILL at any call of a drain to either store: the root has the step whole or not at all.

The next drain completes the step.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from holdfast.base.ports.store import Store
from holdfast.stored.publishing.outcome import OutcomeKind
from tests.crash.kills.sweeping import fates_of_kills
from tests.doubles.faults import Faults, FaultyStore, kill_process
from tests.support.crashed_run import Ending, in_child, local_store
from tests.support.object_server import ObjectServer
from tests.unit.stored.copying.drained_run import drain_of, join, near_at, require_same, root_of, steps_in

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(600),
]

STRIDE = int(os.environ.get("DRAIN_STRIDE", "11"))
"""Every so many-th call is met; `make campaign` and `make campaign-tiers` meet all."""


def drained(near: Store, root: Store, epoch: int) -> None:
    step = drain_of(near, root, 20)
    step.copy(step.lacking())
    assert step.publish(epoch).kind is OutcomeKind.COMMITTED


def is_there(near: Store, root: Store, epoch: int, ending: Ending) -> bool:
    """Return whether a killed drain has left the step in the root: whole then, and acknowledged only then."""
    found = bool(steps_in(root))
    assert found or not ending.acknowledged
    assert not found or not drain_of(near, root, 20).lacking()
    drained(near, root, epoch)
    require_same(near, root, 20)
    return found


@pytest.mark.parametrize("called", ["root", pytest.param("near", marks=pytest.mark.long)])
def test_killed_anywhere(in_memory: Path, called: str) -> None:
    near = near_at(in_memory / "near", (10, 20))
    epoch = join(near, local_store(in_memory / "template"))

    def drain(root: Path, faults: Faults) -> None:
        stores = {"near": in_memory / "near", "root": root}
        near, store = (local_store(path, faults if name == called else None) for name, path in stores.items())
        drained(near, store, epoch)

    def judge(root: Path, ending: Ending) -> bool:
        return is_there(near, local_store(root), epoch, ending)

    points = range(1, 5000, STRIDE)
    fates, _ = fates_of_kills(in_memory / "template", in_memory / "root", drain, judge, points)
    assert fates == sorted(fates) and set(fates) == {False, True}


@pytest.mark.long
def test_killed_anywhere_with_a_root_of_objects(in_memory: Path, objects: ObjectServer) -> None:
    near, fates = near_at(in_memory / "near", (10, 20)), list[bool]()
    for at in range(1, 1000, STRIDE):
        root = root_of("objects", in_memory, objects)
        epoch, faults = join(near, root), Faults(kill_process(), at=at)
        stores = FaultyStore(near, faults), FaultyStore(root, faults)
        ending = in_child(partial(drained, *stores, epoch))
        try:
            fates.append(is_there(near, root, epoch, ending))
        except BaseException as error:
            error.add_note(f"killed at call {at}")
            raise
        if ending.acknowledged:
            break
    print(f"{len(fates)} kills, {fates.count(True)} left the step in the root")
    assert fates == sorted(fates) and set(fates) == {False, True}
