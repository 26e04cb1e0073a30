"""The garbage collector is held off for as long as anybody asks, and comes back as it was."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import ItemsView, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast._face.wiring import shared_job
from holdfast.base.types.reports import SaveReport
from holdfast.core.engine.gc_pause import GcPause
from holdfast.settings import Settings
from tests.unit.ranks import PATIENT, World, saved, sharded


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_blocks_nest_and_the_last_one_out_brings_it_back() -> None:
    with GcPause():
        with GcPause():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_brings_it_back_too() -> None:
    with pytest.raises(ValueError, match="lost"), GcPause():
        raise ValueError("lost")
    assert gc.isenabled()


def test_who_switched_it_off_for_good_keeps_it_off() -> None:
    gc.disable()
    with GcPause():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_it_may_end_twice_and_begin_twice() -> None:
    pause, other = GcPause(), GcPause()
    pause.begin()
    pause.begin()
    other.begin()
    pause.end()
    pause.end()
    assert not gc.isenabled()
    other.end()
    assert gc.isenabled()


def test_who_switches_it_off_between_two_ends_keeps_it_off() -> None:
    pause = GcPause()
    pause.begin()
    pause.end()
    gc.disable()
    pause.end()
    assert not gc.isenabled()


def test_one_that_is_forgotten_ends() -> None:
    GcPause().begin()
    assert gc.isenabled()


def test_a_save_that_waits_its_turn_holds_it_off_no_more(tmp_path: Path) -> None:
    """Whatever is saved before it may take minutes, and other threads leave garbage meanwhile."""
    settings, go_on = Settings(), threading.Event()
    shared_job(False, settings).commits.submit(go_on.wait)
    state = {"a": torch.ones(4)}
    saving = threading.Thread(target=holdfast.save, args=(tmp_path / "c", state), kwargs={"process_group": False})
    saving.start()
    try:
        deadline = time.monotonic() + 30
        while not any(tmp_path.rglob("*.safetensors")) or not gc.isenabled():
            assert time.monotonic() < deadline, "the collector is held off"
            time.sleep(0.01)
        assert saving.is_alive()
    finally:
        go_on.set()
        saving.join()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_forked_meanwhile_has_its_collector() -> None:
    with GcPause():
        child = os.fork()
        if not child:
            with GcPause():
                off = not gc.isenabled()
            os._exit(0 if off and gc.isenabled() else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_the_collector_runs_while_a_save_waits_for_slow_ranks() -> None:
    paused = threading.Event()

    class Watched(dict[str, object]):
        def items(self) -> ItemsView[str, object]:  # type: ignore[override]
            if not gc.isenabled():
                paused.set()
            return super().items()

    def part(rank: int, run: CheckpointManager) -> object:
        is_met = True
        if rank == 1:
            # This rank calls only once the other one waits for it with the collector on.
            is_met = paused.wait(120.0)
            end = time.monotonic() + 120.0
            while not gc.isenabled() and time.monotonic() < end:
                time.sleep(0.01)
            is_met = is_met and gc.isenabled()
        return is_met, saved(run, 1, Watched(w=sharded(2)))

    settings = replace(PATIENT, agreement_timeout_seconds=300.0)
    for is_met, report in World(2, settings=settings).play(part):  # type: ignore[misc]
        assert is_met
        assert isinstance(report, SaveReport), report
