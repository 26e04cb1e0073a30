"""The line that rank 0 logs of a committed save and of a load: what, how much, how long; for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.base.types.events import Phase
from holdfast.base.types.reports import LoadReport, SaveReport
from holdfast.errors import shown_bytes

_CALL_PHASES = ("collect", "agree", "plan", "compare")
"""Phases of a lazy save that block training in the call."""


def saved_line(report: SaveReport, tensor_bytes: int, metrics: Mapping[str, float]) -> str:
    """Return `step 300 saved: 1.2 GiB in 0.41 s (training waited 12 ms), coded to 71%, loss=2.31`.

    Args:
        report: The report of rank 0.
        tensor_bytes: Bytes of the checkpoint's tensors, on all ranks.
        metrics: The metrics of the step.
    """
    what = report.url if report.step is None else f"step {report.step}"
    verb = "saved near" if report.tier == "near" else "saved"
    blocked = blocked_seconds(report.staging, report.staged_seconds, report.fence_seconds, report.phases)
    parts = [
        f"{what} {verb}: {shown_bytes(tensor_bytes)} in {shown_seconds(report.committed_seconds)} "
        f"(training waited {shown_seconds(blocked)})"
    ]
    if 0 < report.stored_bytes < report.bytes:
        parts.append(f"coded to {report.stored_bytes / report.bytes:.0%}")
    return ", ".join(parts + [f"{name}={value:.4g}" for name, value in metrics.items()])


def loaded_line(report: LoadReport, url: str, world_size: int) -> str:
    """Return `step 300 loaded: 1.2 GiB on rank 0 of 8 in 0.41 s, 148 tensors, from /runs/7/step-000000000300`.

    Args:
        report: The report of rank 0; the bytes are those that it filled.
        url: Place of the checkpoint.
        world_size: How many ranks load. One rank alone is not named.
    """
    what = "loaded" if report.step is None else f"step {report.step} loaded"
    count = f"{report.tensors:,} tensor{'' if report.tensors == 1 else 's'}"
    size = shown_bytes(report.loaded_bytes) + (f" on rank 0 of {world_size}" if world_size > 1 else "")
    return f"{what}: {size} in {shown_seconds(report.seconds)}, {count}, from {url}"


def blocked_seconds(staging: str, staged_seconds: float, fence_seconds: float, phases: Iterable[Phase]) -> float:
    """Return how long a save blocked training."""
    if staging != "lazy":
        return staged_seconds
    # A lazy save blocks in its call and at the fence; its copies run beside training.
    return fence_seconds + sum(phase.seconds for phase in phases if phase.name in _CALL_PHASES)


def shown_seconds(seconds: float) -> str:
    """Return a duration for people: `12 ms`, `0.41 s`, `3 min 20 s`.

    Example:
        print(holdfast.api.shown_seconds(0.41))
    """
    if seconds < 0.0995:
        return f"{seconds * 1000:.3g} ms" if seconds < 0.00095 else f"{seconds * 1000:.0f} ms"
    if seconds < 99.5:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"
