"""Kills this process in a named phase of one of its saves: from within for Holdfast, where the phases are known."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.training.telemetry.operation import OperationTrace

PHASES = {
    "staging": ("plan", "end"),
    "writing": ("write", "begin"),
    "voting": ("part", "end"),
    "publishing": ("publish", "begin"),
    "after": ("publish", "end"),
}
"""Where a save is killed: phases of `docs/observing.md`, at their begin or end."""

_ORDINAL = "_ordinal_of_integration_kill"


def kill_in(phase: str, save: int, marker: Path) -> None:
    """Kill this process when it comes to a phase of its n-th save.

    Args:
        phase: One of `PHASES`.
        save: Which save of this process, from 1.
        marker: File that appears just before the kill.
    """
    name, edge = PHASES[phase]
    saves: list[Any] = []
    plain = OperationTrace.phase

    def ordinal_of(trace: Any) -> int:
        if not hasattr(trace, _ORDINAL):
            if trace.operation.verb == "save":
                saves.append(trace)
            setattr(trace, _ORDINAL, len(saves) if trace.operation.verb == "save" else 0)
            if len(saves) == save:
                # A small training is faster than its saves in the background: what was saved before must be whole.
                _await_ends(saves[:-1])
        return int(getattr(trace, _ORDINAL))

    def end_here() -> None:
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def phase_or_end(trace: Any, reached: str) -> Iterator[None]:
        is_here = ordinal_of(trace) == save and reached == name
        if is_here and edge == "begin":
            end_here()
        with plain(trace, reached):
            yield
        if is_here and edge == "end":
            end_here()

    OperationTrace.phase = phase_or_end  # type: ignore[method-assign]


def _await_ends(saves: list[Any]) -> None:
    # A rank that does not commit is not told of the end by a caller that plans itself.
    end = time.monotonic() + 5
    while time.monotonic() < end and not all(trace._is_over for trace in saves):
        time.sleep(0.001)
