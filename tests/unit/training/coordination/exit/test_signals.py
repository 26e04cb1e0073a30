"""Signals are taken while a loop runs, handed to whoever had them before, and given back as they were."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.base.clock import SystemClock
from holdfast.errors import InvalidError
from holdfast.settings import Preemption
from holdfast.training.coordination.exit.signals import Signals
from tests.support.forked_processes import REPOSITORY, environment


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    # What another test has left there is not what a process begins with.
    before = [signal.SIG_DFL, signal.default_int_handler, signal.SIG_DFL]
    found = [signal.signal(number, handler) for number, handler in zip(numbers, before, strict=True)]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, found, strict=True):
        signal.signal(number, handler)
    assert after == before


def taken(*names: str) -> Signals:
    signals = Signals(names, SystemClock())
    signals.take()
    return signals


def test_a_signal_is_noted_once_with_its_time_and_nothing_else_happens() -> None:
    signals = taken("SIGTERM", "SIGUSR1")
    assert signals.received is None
    start = SystemClock().monotonic_seconds()
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert signals.received is not None
    number, at = signals.received
    assert number == signal.SIGUSR1 and start <= at <= SystemClock().monotonic_seconds()
    signals.give_back(hand_on=False)


def test_a_second_interrupt_is_one() -> None:
    signals = taken("SIGINT")
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signals.give_back(hand_on=False)


def test_one_interrupt_after_another_signal_is_not_the_second() -> None:
    signals = taken("SIGTERM", "SIGINT")
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signals.give_back(hand_on=False)


def test_whoever_handled_a_signal_before_hears_of_it_too_and_is_back_afterwards() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    outer, inner = taken("SIGUSR1"), taken("SIGUSR1")
    signal.raise_signal(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]
    assert outer.received is not None and inner.received is not None
    # Out of order: what is over passes signals through, and does not take away what stands above it.
    outer.give_back(hand_on=True)
    signal.raise_signal(signal.SIGUSR1)
    inner.give_back(hand_on=True)
    assert heard == [signal.SIGUSR1] * 2, "who has heard it is not told again"
    signal.raise_signal(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1] * 3
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_the_next_loop_of_a_process_that_did_not_end_is_as_the_first() -> None:
    first = taken("SIGINT")
    signal.raise_signal(signal.SIGINT)
    first.mute(SystemClock().monotonic_seconds() + 60)
    second = taken("SIGINT")
    signal.raise_signal(signal.SIGINT)
    assert second.received is not None
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    second.give_back(hand_on=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signals = taken("SIGUSR1")
    signal.raise_signal(signal.SIGUSR1)
    assert signals.received is None
    signals.give_back(hand_on=True)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_on_another_thread_nothing_is_taken_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1, thread_name_prefix="loop") as pool:
        signals = pool.submit(taken, "SIGTERM").result(10)
    assert signal.getsignal(signal.SIGTERM) is before
    assert "thread loop_0" in caplog.text and "main thread only" in caplog.text
    signals.give_back(hand_on=True)


SCRIPT = """
import os, signal, sys, time
from holdfast.training.coordination.exit.signals import Signals
from holdfast.base.clock import SystemClock
signals = Signals(("SIGTERM", "SIGUSR1"), SystemClock())
signals.take()
"""


def status_of(script: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + script], cwd=REPOSITORY, env=environment(), capture_output=True, timeout=60
    )
    return done.returncode if not done.stderr else -1000


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("signal.raise_signal(15); signals.give_back(hand_on=True); time.sleep(20)", -15),
        ("signal.raise_signal(15); signals.give_back(hand_on=False); sys.exit(3)", 3),
        ("signals.give_back(hand_on=True); signal.raise_signal(15); time.sleep(20)", -15),
        ("signal.raise_signal(15); signals.mute(time.monotonic() + 60); signal.raise_signal(15); sys.exit(3)", 3),
        ("signals.mute(time.monotonic() - 1); signal.raise_signal(15); time.sleep(20)", -15),
    ],
)
def test_a_signal_that_nobody_answered_does_in_the_end_what_it_would_have_done(script: str, status: int) -> None:
    assert status_of(script) == status


def test_a_forked_child_ends_at_once() -> None:
    script = """
child = os.fork()
if not child:
    time.sleep(20)
    os._exit(0)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
start = time.monotonic()
_, status = os.waitpid(child, 0)
sys.exit(9 if os.waitstatus_to_exitcode(status) == -15 and signals.received is None else 1)
"""
    assert status_of(script) == 9


@pytest.mark.parametrize("names", [(), ["SIGTERM"], ("SIGKILL",), ("SIGSTOP",), ("TERM",), (15,), "SIGTERM"])
def test_signals_that_nobody_can_handle_are_refused(names: object) -> None:
    with pytest.raises(InvalidError, match="expected"):
        Preemption(signals=names)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), True, "30"])
def test_a_grace_that_is_none_is_refused(seconds: object) -> None:
    with pytest.raises(InvalidError, match="preemption=False"):
        Preemption(grace_seconds=seconds)  # type: ignore[arg-type]
