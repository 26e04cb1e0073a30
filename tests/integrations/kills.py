"""Kills this process in a named phase of one of its saves: from within for Holdfast, where the phases are known."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.telemetry.operation import OperationTrace

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
    seen = 0
    plain = OperationTrace.phase

    def ordinal_of(trace: Any) -> int:
        nonlocal seen
        if not hasattr(trace, _ORDINAL):
            seen += trace.operation.verb == "save"
            setattr(trace, _ORDINAL, seen if trace.operation.verb == "save" else 0)
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
