"""A run is closed while a collection is under way that does not end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import cast

import pytest

from holdfast.base.clock import SystemClock
from holdfast.base.types.removal import Unreferenced
from holdfast.training.runs.removal.background_collection import Background
from holdfast.training.runs.removal.garbage_collection import CheckpointGC, Marked
from holdfast.training.runs.removal.inventory import Inventory


class HungCollector:
    """A collector whose storage does not answer until it is told to."""

    url = "/runs/7"

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def mark(self, others: Sequence[Marked]) -> Marked:
        self.has_begun.set()
        self.may_end.wait(60)
        return Marked(Inventory("", {}, {}, Unreferenced(), (), {}), Unreferenced(), "")


def test_ctrl_c_in_close_gives_up_the_lease_when_the_collection_ends() -> None:
    collector, released = HungCollector(), threading.Event()
    collecting = Background(cast(CheckpointGC, collector), 0.0, SystemClock())
    collecting.want()
    assert collector.has_begun.wait(60)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        collecting.close(released.set)
    timer.join()
    assert not released.is_set(), "nobody else may write while files are removed"
    collector.may_end.set()
    assert released.wait(60)


def test_a_request_for_room_while_the_run_is_closed_starts_nothing_after_the_lease_is_released() -> None:
    """The error of a save is set before its callbacks run, so a close may be faster than they are."""
    collector = HungCollector()
    collecting = Background(cast(CheckpointGC, collector), 0.0, SystemClock())
    wanting = threading.Thread(target=collecting.want)

    class Slow(threading.Event):
        def set(self) -> None:
            wanting.start()
            wanting.join(0.2)
            super().set()

    collecting._stopped = Slow()
    collecting.close(lambda: None)
    wanting.join(60)
    collector.may_end.set()
    assert not collector.has_begun.is_set(), "it collects without the lease"


def test_a_forked_child_closes_in_silence_and_leaves_the_lease_to_its_parent(caplog: pytest.LogCaptureFixture) -> None:
    collector, released = HungCollector(), threading.Event()
    collecting = Background(cast(CheckpointGC, collector), 0.0, SystemClock())
    collecting.want()
    assert collector.has_begun.wait(60)
    child = os.fork()
    if child == 0:
        status = 4
        try:
            collecting.close(released.set, lambda: True)
            status = bool(caplog.records) + 2 * released.is_set()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    collector.may_end.set()
    collecting.close(released.set)
    assert released.wait(60)
