"""The garbage collector is held off for as long as anybody asks, and comes back as it was."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from holdfast.manager.collector import CollectorPause


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_blocks_nest_and_the_last_one_out_brings_it_back() -> None:
    with CollectorPause():
        with CollectorPause():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_brings_it_back_too() -> None:
    with pytest.raises(ValueError, match="lost"), CollectorPause():
        raise ValueError("lost")
    assert gc.isenabled()


def test_who_switched_it_off_for_good_keeps_it_off() -> None:
    gc.disable()
    with CollectorPause():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_it_may_end_twice_and_begin_twice() -> None:
    pause, other = CollectorPause(), CollectorPause()
    pause.begin()
    pause.begin()
    other.begin()
    pause.end()
    pause.end()
    assert not gc.isenabled()
    other.end()
    assert gc.isenabled()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_forked_meanwhile_has_its_collector() -> None:
    with CollectorPause():
        child = os.fork()
        if not child:
            with CollectorPause():
                off = not gc.isenabled()
            os._exit(0 if off and gc.isenabled() else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
