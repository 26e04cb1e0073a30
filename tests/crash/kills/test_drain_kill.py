"""SIGKILL at any system call of a drain: the root has the step whole or not at all, and the next drain completes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.stored.publishing.outcome import OutcomeKind
from tests.crash.kills.sweeping import fates_of_kills
from tests.doubles.faults import Faults
from tests.support.crashed_run import Ending, local_store
from tests.unit.stored.copying.drained_run import drain_of, join, near_at, require_same, steps_in

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(600),
]

STRIDE = int(os.environ.get("DRAIN_STRIDE", "11"))
"""Every so many-th call to the operating system is met; `make campaign` meets all."""


def test_killed_anywhere(in_memory: Path) -> None:
    near = near_at(in_memory / "near", (10, 20))
    epoch = join(near, local_store(in_memory / "template"))

    def drain(root: Path, faults: Faults | None) -> None:
        step = drain_of(near, local_store(root, faults), 20)
        step.copy(step.lacking())
        assert step.publish(epoch).kind is OutcomeKind.COMMITTED

    def judge(root: Path, ending: Ending) -> bool:
        store = local_store(root)
        is_there = bool(steps_in(store))
        assert is_there or not ending.acknowledged
        assert not is_there or not drain_of(near, store, 20).lacking()
        drain(root, None)
        require_same(near, store, 20)
        return is_there

    points = range(1, 5000, STRIDE)
    fates, _ = fates_of_kills(in_memory / "template", in_memory / "root", drain, judge, points)
    assert fates == sorted(fates) and set(fates) == {False, True}
