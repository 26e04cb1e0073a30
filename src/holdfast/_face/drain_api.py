"""The public function that drains a near tier without a job."""

from __future__ import annotations

from holdfast._face import wiring
from holdfast.base.clock import SystemClock
from holdfast.base.ports.observer import Observer
from holdfast.core.format.step_name import step_name
from holdfast.errors import InvalidError
from holdfast.settings import Settings
from holdfast.training.runs.tiers.offline_drain import DrainReport, NearDrain


def drain(
    near: str,
    root: wiring.Path | None = None,
    *,
    step: int | str | None = None,
    remove: bool = False,
    dry_run: bool = False,
    observer: Observer | None = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> DrainReport:
    """Copy the steps of a near tier that are due at the root, and the newest one, to the root. Needs no torch.

    For runs without a job; a job drains by itself. After an interruption the same call goes on.

    Example:
        report = holdfast.api.drain("nvme/run-8")
        print(report.steps, report.bytes)
    Args:
        near: The folder of the near tier.
        root: The root; None for the one that the near tier names. An empty root gets the run back.
        step: One step alone: its number, `300@1f2e`, a tag, or `latest`.
        remove: Whether to empty the near tier at the end.
        dry_run: Only report what would be copied.
        observer: Receives the progress of each step.
        settings: How to reach storage.
    Raises:
        MissingError: The folder is no near tier, or has no such step.
        InvalidError: The root is of another run, or `remove` is given with `step`.
        ConflictError: A job writes to the run; the message names it.
        CorruptError: A step is damaged near; all others are drained, and nothing is removed.
        UnavailableError: Storage failed; the same call goes on.
    """
    if remove and step is not None:
        raise InvalidError(f"step={step!r} with remove: other steps would be lost; expected one of the two")
    request = NearDrain(
        wiring.two_roots(near, root, settings),
        SystemClock(),
        wiring.codecs(),
        None if step is None else step_name(step),
        observer,
    )
    return request.planned() if dry_run else request.execute(settings.lease_seconds, remove=bool(remove))
