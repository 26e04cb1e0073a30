"""What a handle tells whom: moments, timeouts, and failures said once."""

from __future__ import annotations

import gc
import io
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest
import torch

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.types.reports import SaveReport
from holdfast.errors import CorruptError, InvalidError, UnavailableError
from holdfast.training.coordination.job import error_from, error_text
from holdfast.training.saving.handle import SaveHandle, typed
from tests.doubles.faults import FaultPoint, Faults, FaultyStore, raise_error
from tests.unit.ranks import World, fresh_store, plain, saved, sharded

REPORT = SaveReport(7, "memory://x", "0" * 16, 1, 0, 1, True, "copy", 0.1, 0.0, 0.0, 0.2, (), ())


def test_moments_come_one_after_the_other() -> None:
    handle = SaveHandle("save of step 7")
    assert handle.failure is None
    handle.reach_staged()
    assert handle.wait("staged", timeout=0.01) is None
    assert not handle.replicated.done()
    handle.reach_committed(REPORT)
    assert handle.wait("replicated", timeout=0.01) is None
    assert handle.wait(timeout=0.01) == REPORT
    assert handle.committed.result(0.01) == REPORT
    assert handle.failure is None


def test_a_failure_right_after_the_timeout_of_a_wait_is_raised() -> None:
    class EndsLate(Future[SaveReport]):
        def result(self, timeout: float | None = None) -> SaveReport:
            if timeout is not None and not self.done():
                self.set_exception(UnavailableError("no space"))
                raise TimeoutError
            return super().result(timeout)

    handle = SaveHandle("save of step 7")
    handle.committed = EndsLate()
    with pytest.raises(UnavailableError, match="no space"):
        handle.wait(timeout=0.01)
    assert handle.was_awaited


def test_a_wait_that_runs_out_says_so_and_the_save_goes_on() -> None:
    handle = SaveHandle("save of step 7")
    with pytest.raises(TimeoutError, match=r"save of step 7: not committed within 0.01 s; the save goes on"):
        handle.wait(timeout=0.01)
    assert not handle.was_awaited
    handle.reach_staged()
    handle.reach_committed(REPORT)
    assert handle.wait() == REPORT


def test_an_unknown_moment_is_invalid() -> None:
    with pytest.raises(InvalidError, match="finished"):
        SaveHandle("save").wait("finished")  # type: ignore[arg-type]


def test_a_failure_sets_every_moment_not_yet_reached() -> None:
    handle = SaveHandle("save", awaited=True)
    handle.reach_staged()
    error = CorruptError("bad")
    handle.fail(error)
    assert handle.wait("staged") is None
    for moment in ("replicated", "committed"):
        with pytest.raises(CorruptError, match="bad"):
            handle.wait(moment)  # type: ignore[arg-type]
    assert handle.failure is error


def test_a_failure_nobody_waits_for_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    handle = SaveHandle("save of step 7")
    with caplog.at_level(logging.DEBUG, logger="holdfast"):
        handle.fail(UnavailableError("disk full"))
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == (
        "save of step 7 failed: UnavailableError: disk full "
        "(failure 1 in a row; no save of this process has been committed)"
    )
    assert not handle.was_awaited
    with pytest.raises(UnavailableError):
        handle.wait()
    assert handle.was_awaited
    assert len(caplog.records) == 1


def test_a_failure_somebody_waits_for_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    handle = SaveHandle("save")
    waiting = threading.Event()

    def wait() -> BaseException | None:
        waiting.set()
        try:
            handle.wait(timeout=20.0)
        except UnavailableError as error:
            return error
        return None

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(wait)
        waiting.wait(10.0)
        while not handle._waiting:
            pass
        handle.fail(UnavailableError("disk full"))
        assert isinstance(found.result(10.0), UnavailableError)
    assert caplog.records == []
    assert handle.was_awaited


def test_a_failure_of_a_caller_that_always_waits_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    SaveHandle("save", awaited=True).fail(UnavailableError("disk full"))
    assert caplog.records == []


def test_was_awaited_tells_only_of_failures() -> None:
    handle = SaveHandle("save")
    handle.reach_staged()
    handle.reach_committed(REPORT)
    handle.wait()
    assert not handle.was_awaited


def broken_run() -> tuple[World, Faults]:
    """A world of one rank whose packs cannot be written until it is healed."""
    world = World(1)
    faults = Faults(raise_error(UnavailableError), names={"upload"}, lasting=True)
    return World(1, store=world.store, stores={0: FaultyStore(world.store, faults)}), faults


def test_wait_and_close_raise_what_nobody_was_told() -> None:
    world, faults = broken_run()

    def part(rank: int, run: CheckpointManager) -> object:
        run.save(1, {"w": plain(1.0)})
        with pytest.raises(UnavailableError, match="upload"):
            run.wait()
        run.wait()
        lost = run.save(2, {"w": plain(1.0)})
        wait([lost.committed], timeout=20.0)
        faults.heal()
        good = saved(run, 3, {"w": plain(1.0)})
        with pytest.raises(UnavailableError, match="upload"):
            run.close()
        run.close()
        return good

    assert [type(each) for each in world.play(part)] == [SaveReport]
    assert world.committed() == [3]


def test_what_was_told_is_not_raised_again() -> None:
    world, _ = broken_run()

    def part(rank: int, run: CheckpointManager) -> object:
        assert isinstance(saved(run, 1, {"w": plain(1.0)}), UnavailableError)
        run.wait()
        run.close()
        return "closed"

    assert world.play(part) == ["closed"]


def kept_after(run: CheckpointManager, count: int, end: Callable[[SaveHandle], object]) -> list[str]:
    """Save steps one after the other, each until it has ended; return the names of the handles that are still kept."""
    kept: weakref.WeakSet[SaveHandle] = weakref.WeakSet()
    for step in range(count):
        handle = run.save(step, {"w": plain(1.0)})
        kept.add(handle)
        end(handle)
    del handle
    gc.collect()
    return sorted(each.name for each in kept)


def test_the_manager_keeps_no_handle_of_a_failure_that_was_raised(caplog: pytest.LogCaptureFixture) -> None:
    # A captured record would keep the error, whose traceback refers to the handle.
    caplog.set_level(logging.CRITICAL, logger="holdfast")
    world, _ = broken_run()

    def part(rank: int, run: CheckpointManager) -> object:
        def see_it_fail(handle: SaveHandle) -> None:
            with pytest.raises(UnavailableError, match="upload"):
                handle.wait()

        return kept_after(run, 5, see_it_fail)

    assert world.play(part) == [["save of step 4"]], "the last one, until the next save"


def test_several_failures_are_raised_as_one_with_all_as_its_cause() -> None:
    world, _ = broken_run()

    def part(rank: int, run: CheckpointManager) -> object:
        for step in (1, 2, 3):
            run.save(step, {"w": plain(1.0)})
        with pytest.raises(UnavailableError) as raised:
            run.close()
        return raised.value.__cause__

    (cause,) = world.play(part)
    assert isinstance(cause, ExceptionGroup)
    assert len(cause.exceptions) == 3


def test_of_many_failures_that_nobody_awaits_the_first_and_the_last_are_kept(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.CRITICAL, logger="holdfast")
    monkeypatch.setattr("holdfast.training.runs.saves_in_flight._FAILURES_HALF", 2)
    world, _ = broken_run()

    def part(rank: int, run: CheckpointManager) -> object:
        kept = kept_after(run, 9, lambda handle: wait([handle.committed], timeout=30.0))
        # What has ended is looked through when the next save begins.
        assert kept == [f"save of step {step}" for step in (0, 1, 6, 7, 8)]
        with pytest.raises(UnavailableError, match="upload") as raised:
            run.wait()
        run.wait()
        return raised.value.__cause__

    (cause,) = world.play(part)
    assert isinstance(cause, ExceptionGroup), cause
    assert cause.message == "9 saves failed; the errors of 4 of them are in the log only"
    assert len(cause.exceptions) == 5


def test_a_closed_run_saves_and_loads_no_more() -> None:
    def part(rank: int, run: CheckpointManager) -> object:
        run.close()
        with pytest.raises(InvalidError, match="closed"):
            run.save(1, {"w": plain(1.0)})
        return "refused"

    assert World(1).play(part) == ["refused"]


@pytest.mark.parametrize("step", (-1, True, 1.0, "1", None, 10**12))
def test_a_step_that_is_no_step_is_invalid(step: object) -> None:
    def part(rank: int, run: CheckpointManager) -> object:
        with pytest.raises(InvalidError, match="step="):
            run.save(step, {"w": plain(1.0)})  # type: ignore[arg-type]
        return "refused"

    assert World(1).play(part) == ["refused"]


def test_close_waits_for_saves_under_way() -> None:
    world = World(2)

    def part(rank: int, run: CheckpointManager) -> object:
        handles = [run.save(step, {"w": plain(1.0)}) for step in range(5)]
        run.close()
        return [handle.committed.done() for handle in handles]

    assert world.play(part) == [[True] * 5] * 2
    assert world.committed() == [0, 1, 2, 3, 4]


class Strange(Exception):
    """Of a package that a store uses."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TypeError("not subscriptable"), InvalidError),
        (UnicodeEncodeError("utf-8", "\udce9", 0, 1, "surrogates not allowed"), InvalidError),
        (KeyError("w"), InvalidError),
        (AssertionError("it was opened"), InvalidError),
        (RecursionError("too deep"), InvalidError),
        (io.UnsupportedOperation("fileno"), UnavailableError),
        (OSError(28, "No space left"), UnavailableError),
        (TimeoutError("no answer"), UnavailableError),
        (MemoryError("no room"), UnavailableError),
        (torch.OutOfMemoryError("no room"), UnavailableError),
        (RuntimeError("can't start new thread"), UnavailableError),
        (Strange("connection reset"), UnavailableError),
        (CorruptError("damaged"), CorruptError),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else type(each).__name__,
)
def test_a_foreign_error_becomes_what_its_caller_must_do(error: Exception, kind: type[Exception]) -> None:
    """Of the same type, and with the same words, on the rank that met it and on the others."""
    ours = typed(error, "save of step 7")
    assert type(ours) is kind and type(error_from(error_text(error))) is kind
    assert str(error) in str(ours) and str(error) in str(error_from(error_text(error)))
    assert ours is error or (ours.__cause__ is error and str(ours).startswith("save of step 7: "))
    assert (kind is InvalidError) == ("not of storage. Another try fails too" in str(ours))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=repr)
def test_an_interrupted_save_is_no_failure_of_storage(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    handle = SaveHandle("save of step 7")
    with caplog.at_level(logging.DEBUG, logger="holdfast"):
        handle.fail(typed(error, handle.name))
    (record,) = caplog.records
    name = type(error).__name__
    assert record.levelno == logging.WARNING and "failed" not in record.getMessage()
    assert record.getMessage().startswith(f"save of step 7 ended: save of step 7: interrupted by {name}. ")
    with pytest.raises(UnavailableError, match=f"save of step 7: interrupted by {name}"):
        handle.wait()


@pytest.mark.parametrize(("error", "kind"), [(TypeError, InvalidError), (OSError, UnavailableError)])
@pytest.mark.parametrize("operation", ["upload", "upload.write", "put_if_absent"])
def test_a_defect_on_one_rank_is_not_blamed_on_storage_on_any(
    error: type[Exception], kind: type[Exception], operation: str
) -> None:
    def fail(_: FaultPoint) -> None:
        raise error("a defect")

    store = fresh_store()
    world = World(2, store=store, stores={1: FaultyStore(store, Faults(fail, names={operation}, lasting=True))})
    for outcome in world.play(lambda rank, run: saved(run, 1, {"w": sharded(2)})):
        assert type(outcome) is kind and f"{error.__name__}: a defect" in str(outcome), outcome
