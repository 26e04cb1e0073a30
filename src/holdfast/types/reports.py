"""What one save or one load did, on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.types.events import Phase


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A step that was not taken although it is newer."""

    step: int
    """The step."""

    why: str
    """What is wrong with it."""


Staged = Literal["lazy", "copy", "none"]


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What one rank's save did."""

    step: int | None
    """Training iteration; None for a checkpoint saved by path."""

    url: str
    """URL of the checkpoint."""

    attempt: str
    """Folder of its files."""

    bytes: int
    """Bytes of tensors this rank wrote."""

    unchanged_bytes: int
    """Bytes of tensors it did not write, for an earlier step of the run holds the same."""

    tensors: int
    """Tensors this rank wrote something of."""

    planned: bool
    """Whether it had to be decided what this rank writes; False where the plan of an earlier save stood."""

    staging: Staged
    """How the state was taken. `lazy`: while training went on. `copy`: before the call returned. `none`: it was written
    before the call returned, since it was awaited anyhow or its copies did not fit `arena_bytes_max`."""

    staged_seconds: float
    """From the call until training might change the state as it liked."""

    fence_seconds: float
    """How long the fence blocked training after the call; 0 unless the save was lazy."""

    waited_seconds: float
    """How long copies waited for an earlier save, or this one's own windows, to give memory back."""

    committed_seconds: float
    """From the call until the checkpoint was durable and visible."""

    divergent: tuple[str, ...]
    """Buffers and values that differed between ranks; the lowest rank's were saved."""

    skipped: tuple[str, ...]
    """What `only` and `skip` left out."""

    unhealthy: tuple[str, ...] = ()
    """What was found against the checkpoint, in words, the first of many: tensors with new non-finite values, replicas
    that differ. Empty where nothing was, or nothing was looked at (`Settings.count_nonfinite`, `compare_replicas`)."""

    phases: tuple[Phase, ...] = ()
    """What this rank did meanwhile, by when it began."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one load did."""

    step: int | None
    """Step of the checkpoint; None for one saved by path."""

    loaded: tuple[str, ...]
    """FQNs filled on this rank."""

    missing: tuple[str, ...]
    """Names the state has on some rank and the checkpoint lacks."""

    unexpected: tuple[str, ...]
    """Names the checkpoint has under the keys passed, and the state lacks on every rank."""

    skipped: tuple[str, ...]
    """Names that `only` and `skip` left alone."""

    bytes: int
    """Bytes this rank read from storage."""

    exchanged_bytes: int
    """Bytes that other ranks read and gave to this one."""

    tensors: int
    """Tensors this rank's state holds under the keys passed, tied ones once; without what was skipped."""

    tensor_bytes: int
    """Bytes of these in this rank's memory."""

    loaded_bytes: int
    """Bytes of them that came from the checkpoint: all of them, unless names are missing."""

    seconds: float
    """From the call until the state was filled."""

    passed_over: tuple[SkippedStep, ...] = ()
    """Newer steps that are damaged, newest first, where the newest whole one was asked for."""

    phases: tuple[Phase, ...] = ()
    """What this rank did meanwhile, by when it began."""
