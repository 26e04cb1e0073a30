"""A run is closed while a collection is under way that does not end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import cast

import pytest

from holdfast.clock import SystemClock
from holdfast.runs.collection.background_collection import Background
from holdfast.runs.collection.garbage_collection import CheckpointGC, Marked
from holdfast.runs.collection.inventory import Inventory
from holdfast.types.removal import Unreferenced


class HungCollector:
    """A collector whose storage does not answer until it is told to."""

    url = "/runs/7"

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def mark(self, others: Sequence[Marked]) -> Marked:
        self.has_begun.set()
        self.may_end.wait(60)
        return Marked(Inventory("", {}, {}, Unreferenced(), ()), Unreferenced(), "")


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
