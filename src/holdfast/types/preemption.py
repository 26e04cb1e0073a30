"""What a run does when it is told to end."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass

from holdfast.errors import InvalidError


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """Which signals tell a training loop to save and end, and how long it has."""

    signals: tuple[str, ...] = ("SIGTERM", "SIGINT")
    """Names of signals, such as `SIGUSR1` for Slurm's `--signal`."""

    grace_seconds: float = 30.0
    """From the signal until whoever sent it kills the process."""

    def __post_init__(self) -> None:
        names: object = self.signals
        if not isinstance(names, tuple) or not names:
            raise InvalidError(f"Preemption(signals={names!r}): expected a tuple of names, such as ('SIGTERM',)")
        for name in names:
            if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
                raise InvalidError(
                    f"Preemption(signals=…): {str(name)[:80]!r}; expected names of signals that a process may handle, "
                    "such as 'SIGTERM', 'SIGINT' or 'SIGUSR1'"
                )
        seconds: object = self.grace_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise InvalidError(
                f"Preemption(grace_seconds={seconds!r}): expected a positive, finite number of seconds; for no "
                "preemption at all, CheckpointManager(…, preemption=False)"
            )
