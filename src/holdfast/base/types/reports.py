"""The report of a save or load on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from holdfast.base.types.coding import KindCoding
from holdfast.base.types.events import Phase


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A newer step that a load skipped."""

    step: int
    """The step."""

    why: str
    """Its damage."""


Staged = Literal["lazy", "copy", "none"]

Tier = Literal["near", "root"]
"""A place of a run."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The report of a save on one rank."""

    step: int | None
    """Training iteration; None for a checkpoint saved by path."""

    url: str
    """URL of the checkpoint."""

    attempt: str
    """Name of the folder with its files."""

    bytes: int
    """Bytes of tensors that this rank wrote."""

    unchanged_bytes: int
    """Bytes of tensors that it did not write, because an earlier step of the run holds the same bytes."""

    tensors: int
    """Number of tensors of which this rank wrote at least a part."""

    planned: bool
    """Whether this save made a new plan; False if it used the plan of an earlier save."""

    staging: Staged
    """How the state was copied. `lazy`: during training. `copy`: before the call returned. `none`: it was written
    before the call returned, because the caller waits or its copies do not fit into `arena_bytes_max`."""

    staged_seconds: float
    """Seconds from the call until training could change the state freely."""

    fence_seconds: float
    """Seconds for which the fence blocked training after the call; 0 unless the save was lazy."""

    waited_seconds: float
    """Seconds for which copies waited for memory of an earlier save, or of this save's own writes."""

    committed_seconds: float
    """Seconds from the call until the checkpoint was durable and visible."""

    divergent: tuple[str, ...]
    """Names that differed between ranks: buffers, objects and values, and the first replicas that drift
    (`Settings.replicas`). The lowest rank's were saved."""

    skipped: tuple[str, ...]
    """Names that `only` and `skip` left out."""

    unhealthy: tuple[str, ...] = ()
    """Findings against the checkpoint, one text each; of many, the first. They name tensors with new non-finite values,
    and replicas that differ. Empty without findings, and without checks (`Settings.count_nonfinite`,
    `compare_replicas`, `replicas="lowest"`)."""

    untagged: tuple[str, ...] = ()
    """On rank 0, the tags that the step did not get, a text each with the reason: another step has it, or storage
    failed. The step is saved all the same."""

    phases: tuple[Phase, ...] = ()
    """Phases of this rank, by start."""

    retries: int = 0
    """Requests to an object store that this process made again during the save."""

    retry_seconds: float = 0.0
    """Seconds of the save in which at least one request was being made again."""

    throttled: int = 0
    """Requests that the store refused or left unanswered because it had too much to do."""

    stored_bytes: int = 0
    """Bytes that the packs of this rank hold for these tensors: fewer than `bytes` where they are coded."""

    codings: tuple[KindCoding, ...] = ()
    """How this rank stored each kind of tensors, and why, the largest kinds first. Empty without `compression`."""

    tier: Tier = "root"
    """Where the step was saved: in the root, or in the near tier."""


@dataclass(frozen=True, slots=True)
class StepDrainReport:
    """The report of the drain of one step on one rank."""

    bytes: int
    """Bytes of files that this rank copied to the root."""

    files: int
    """Number of these files."""

    retries: int
    """Requests to an object store that this process made again during the drain."""

    retry_seconds: float
    """Seconds of the drain in which at least one request was being made again."""

    throttled: int
    """Requests that the store refused or left unanswered because it had too much to do."""


@dataclass(frozen=True, slots=True)
class PartlyFilled:
    """A tensor of another shape than was saved, of which a load filled the overlap."""

    fqn: str
    """Its name in the state."""

    filled: tuple[int, ...]
    """Elements along each dimension that were filled, from index 0; the others kept their values."""

    shape: tuple[int, ...]
    """Its global shape."""

    stored_shape: tuple[int, ...]
    """Global shape in the checkpoint."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The report of a load on one rank."""

    step: int | None
    """Step of the checkpoint; None for one saved by path."""

    loaded: tuple[str, ...]
    """FQNs filled on this rank."""

    missing: tuple[str, ...]
    """Names that the state has on at least one rank and the checkpoint lacks. Of other ranks' names only those that fit
    into 1 MiB."""

    unexpected: tuple[str, ...]
    """Names that the checkpoint has under the passed keys and the state lacks on every rank."""

    skipped: tuple[str, ...]
    """Names that `only` and `skip` left unchanged."""

    bytes: int
    """Bytes that this rank read from storage."""

    exchanged_bytes: int
    """Bytes that other ranks read and sent to this rank."""

    tensors: int
    """Number of tensors of this rank's state under the passed keys: tied ones count once, skipped ones do not."""

    tensor_bytes: int
    """Bytes of these tensors in this rank's memory."""

    loaded_bytes: int
    """Bytes of them that came from the checkpoint: all, unless names are missing."""

    seconds: float
    """Seconds from the call until the state was filled."""

    partial: tuple[PartlyFilled, ...] = ()
    """Tensors of this rank that `partial` filled in part, and the state of optimizers that goes with them."""

    passed_over: tuple[SkippedStep, ...] = ()
    """Damaged newer steps that a load of the newest step skipped, newest first."""

    phases: tuple[Phase, ...] = ()
    """Phases of this rank, by start."""

    discarded: tuple[str, ...] = ()
    """Newer steps that `discard_newer` discarded, by number and digest: no resume takes them, and they are removed
    after the grace of the garbage collection."""

    left: tuple[SkippedStep, ...] = ()
    """Newer steps that `discard_newer` could not discard, each with the reason, such as a tag."""

    retries: int = 0
    """Requests to an object store that this process made again during the load."""

    retry_seconds: float = 0.0
    """Seconds of the load in which at least one request was being made again."""

    throttled: int = 0
    """Requests that the store refused or left unanswered because it had too much to do."""

    sources: Mapping[str, int] = field(default_factory=dict)
    """Bytes that this rank read, by the URL of the root they came from; of a near tier of peers, by `own node`, `node
    NAME` and `parity of node NAME`."""

    base_step: int | None = None
    """The checkpoint from which the redo log was followed to `step`; None if `step` is the checkpoint itself."""

    redone_steps: int = 0
    """Records of the redo log that were redone after the checkpoint."""

    redo_seconds: float = 0.0
    """Seconds of `seconds` that redoing took."""

    why_not_further: str = ""
    """Why the redo ended before the last record of the log, or did not begin; empty if it reached the last record."""
