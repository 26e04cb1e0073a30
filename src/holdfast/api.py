"""The public verbs: save, async_save, load, CheckpointManager, open_checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from fnmatch import fnmatchcase

from holdfast import policies, wiring
from holdfast.arguments import Globs, patterns_of, require_state, selection_of
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.location import require_no_checkpoint
from holdfast.checkpoint_manager import CheckpointManager
from holdfast.clock import SystemClock
from holdfast.coordination.job import Job
from holdfast.errors import InvalidError
from holdfast.format.names import require_step
from holdfast.geometry.region import FlatRange, Region
from holdfast.geometry.sharded import Sharded
from holdfast.loading.load import LoadRequest, load_checkpoint
from holdfast.offline.diff.compare import differences
from holdfast.offline.diff.values import value_document
from holdfast.offline.export.export import ExportReport, ExportRequest, carry_out_export
from holdfast.offline.imports.copy import exported
from holdfast.offline.imports.import_step import ImportReport, import_step
from holdfast.offline.repair.repair import Repair, RepairReport, StepRepair
from holdfast.plan.forecast import Forecast
from holdfast.policies import KeepPolicy
from holdfast.ports.framework import Selection
from holdfast.ports.observer import Observer
from holdfast.repository.tags import Tag
from holdfast.repository.verify import Damage
from holdfast.runs.garbage_collection import CollectReport, collected
from holdfast.runs.garbage_collection import planned as collection_planned
from holdfast.runs.listing import RunRecord, StepRecord, run_record
from holdfast.runs.tags import tag_step
from holdfast.runs.tags import untag as remove_tag
from holdfast.saving.handle import SaveHandle
from holdfast.saving.request import PathRequest
from holdfast.saving.save import begin_save, save_and_wait
from holdfast.settings import Settings
from holdfast.stores.destination import LocalDestination
from holdfast.stores.local import LocalStore
from holdfast.stores.references import References
from holdfast.telemetry.trace import Trace, trace_of
from holdfast.types.diff import Change, Diff, NameOnly, TensorDiff, TieDiff, ValueDiff, Verdict
from holdfast.types.export import SHARD_BYTES, ExportOptions
from holdfast.types.reports import LoadReport, SaveReport

__all__ = [
    "Change",
    "Checkpoint",
    "CollectReport",
    "Diff",
    "FlatRange",
    "Forecast",
    "Region",
    "Sharded",
    "CheckpointManager",
    "Damage",
    "ExportReport",
    "ImportReport",
    "LoadReport",
    "NameOnly",
    "RepairReport",
    "RunRecord",
    "SaveHandle",
    "SaveReport",
    "StepRecord",
    "StepRepair",
    "Tag",
    "TensorDiff",
    "TieDiff",
    "Trace",
    "ValueDiff",
    "Verdict",
    "async_save",
    "collect",
    "export",
    "diff",
    "import_checkpoint",
    "list_steps",
    "load",
    "open_checkpoint",
    "repair",
    "policies",
    "save",
    "tag",
    "untag",
    "trace",
    "value_document",
]


def save(
    path: wiring.Path,
    state: Mapping[str, object],
    *,
    only: Globs = None,
    skip: Globs = None,
    grads: bool = False,
    process_group: wiring.ProcessGroup = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> SaveReport:
    """Save one checkpoint and return once it is committed. Every rank of the group calls.

    Args:
        path: The folder that becomes the checkpoint; it must not hold one.
        state: Nested dict of modules, optimizers, anything with `state_dict`/`load_state_dict`, tensors, values.
        only: Save only FQNs that match one of these patterns.
        skip: Leave out FQNs that match one of these patterns.
        grads: Save gradients too, for a save in the middle of gradient accumulation: each under its parameter's FQN
            with `.grad` after it. Without it such a save is refused where the optimizer or wrapper tells.
        process_group: None for the default group, False for this process alone, or a group.
        settings: How to save.
    Raises:
        InvalidError: The state or the call is wrong, or ranks disagree; nothing was written.
        ConflictError: A checkpoint is there; it was not touched.
        UnavailableError: Storage, the key-value store or a rank failed, or the outcome is unknown.
    """
    return save_and_wait(*_request(path, state, selection_of(only, skip, grads), process_group, settings))


def async_save(
    path: wiring.Path,
    state: Mapping[str, object],
    *,
    only: Globs = None,
    skip: Globs = None,
    grads: bool = False,
    process_group: wiring.ProcessGroup = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> SaveHandle:
    """Begin to save one checkpoint; return once it is staged: copied, so that training may change the state.

    Hashing, writing and the commit go on in the background. The copies lie in host memory, at most
    `settings.arena_bytes_max`; a state that does not fit is written before this returns.

    With `settings.staging="lazy"` this returns at once, and parameters and optimizer state are copied while training
    goes on; the next step of any `torch.optim.Optimizer`, `load_state_dict` of what was passed, and Holdfast's own load
    wait until that is done. A tensor that changes before it is copied fails the save, and nothing is committed.

    Arguments as `save`.

    Raises:
        InvalidError: The state or the call is wrong, or ranks disagree; nothing was written. Everything else
            lives in the handle.
    """
    return begin_save(*_request(path, state, selection_of(only, skip, grads), process_group, settings))


def _request(
    path: wiring.Path,
    state: Mapping[str, object],
    selection: Selection,
    process_group: wiring.ProcessGroup,
    settings: Settings,
) -> tuple[Job, PathRequest]:
    require_state(state, "save(path, state)")
    job = wiring.shared_job(process_group, settings)
    return job, PathRequest(job, wiring.store_at(path, settings), state, selection)


def load(
    path: wiring.Path,
    state: Mapping[str, object],
    *,
    strict: bool = True,
    cast: bool = False,
    only: Globs = None,
    skip: Globs = None,
    grads: bool = False,
    process_group: wiring.ProcessGroup = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> LoadReport:
    """Fill a state from one checkpoint, on any mesh. Every rank of the group calls.

    Modules, optimizers and tensors are filled in place; plain values in the dict are replaced. Only the
    top-level keys passed are judged: `load(path, {"model": model})` from a whole training checkpoint succeeds.

    Args:
        path: The checkpoint.
        state: What to fill.
        strict: Raise if names are missing or unexpected; otherwise fill what matches and report the rest.
        cast: Allow a tensor to be filled from another dtype.
        only: Fill only FQNs that match one of these patterns.
        skip: Leave FQNs that match one of these patterns as they are.
        grads: Give parameters the gradients they were saved with, and none where they had none. Otherwise gradients
            in the checkpoint are unexpected, since training that resumes without them is another training.
        process_group: None for the default group, False for this process alone, or a group.
        settings: How to load.
    Raises:
        InvalidError: The state does not fit; nothing was changed on any rank.
        MissingError: There is no checkpoint.
        CorruptError: Stored bytes are not what was saved; the state may be partly filled.
    """
    require_state(state, "load(path, state)")
    job = wiring.loading_job(process_group, settings)
    location = wiring.location_at(path, settings)
    request = LoadRequest(state, selection_of(only, skip, grads), strict, cast)
    return load_checkpoint(job, location, request)


def open_checkpoint(path: wiring.Path, *, settings: Settings = wiring.DEFAULT_SETTINGS) -> Checkpoint:
    """Open a checkpoint read-only: lazy, never communicates, needs no torch.

    Raises:
        MissingError: There is no checkpoint.
        InvalidError: The path is the root of a run, or of a newer format.
        CorruptError: The manifest is damaged.
    """
    return wiring.checkpoint_at(path, settings)


def import_checkpoint(
    src: wiring.Path,
    root: wiring.Path,
    *,
    step: int | None = None,
    copy: bool = False,
    settings: Settings = wiring.DEFAULT_SETTINGS,
    observer: Observer | None = None,
) -> ImportReport:
    """Make a checkpoint of another system a step of a run; needs no torch, and this process alone calls.

    Its bytes stay where they are: the step names each file, its size and the digest of every chunk, for which all of it
    is read once. Whoever loads it must allow the folder of the files, `Settings(allowed_roots=(…,))`, and a file that
    changed since is `CorruptError`. With `copy` they are copied into packs of the run, and the source may go; a
    checkpoint of Holdfast's can be imported so, too.

    Args:
        src: The checkpoint: a folder or file of any format that Holdfast reads.
        root: The folder of the run; it becomes one if it is none.
        step: Which step it becomes; None for the one that the checkpoint tells.
        copy: Whether to copy its bytes.
        settings: Bytes of a chunk, and reads in flight.
        observer: Told of progress.
    Raises:
        ConflictError: The step exists and was not touched, or a file of the source was written again meanwhile.
        InvalidError: It tells no step, or cannot be imported so.
        MissingError: There is no checkpoint.
        CorruptError: The checkpoint is damaged; nothing was committed.
        UnavailableError: Storage failed, or the outcome is unknown.
    """
    with closing(wiring.lone_job(settings)) as job:
        store, source = wiring.store_at(root, settings), wiring.checkpoint_at(src, settings)
        return import_step(source, store, job, step, copied=copy, observer=observer)


EXPORT_DTYPES = ("float32", "float16", "bfloat16")
"""What the floating tensors of a model can be cast to on their way out."""


def export(
    src: wiring.Path,
    dst: wiring.Path,
    *,
    to: str,
    shard_bytes: int = SHARD_BYTES,
    dtype: str | None = None,
    model_only: bool = True,
    memory_bytes: int = 1 << 30,
    workers: int = 1,
    observer: Observer | None = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> ExportReport:
    """Write a checkpoint, Holdfast's or one it reads in place, as another system's files. Needs no torch.

    The files appear at `dst` all at once, when they are whole and durable. Until then they lie in a hidden folder
    beside it; the same call made again goes on there, however the first one ended.

    Args:
        src: The checkpoint.
        dst: What is to be made; nothing may be there.
        to: The format: `safetensors`, `torch` or `dcp` (docs/formats.md). `holdfast` copies everything into a
            checkpoint of our own, by one process and not resumed; the options up to `memory_bytes` do not apply to it.
        shard_bytes: Bytes of tensors in one file, at most, where the format has several.
        dtype: What the floating tensors of the model are cast to: float32, float16 or bfloat16; None: nothing.
        model_only: Whether to leave out what is not the model.
        memory_bytes: Memory for bytes on their way, of all workers together.
        workers: Processes that do it beside each other.
        observer: Told of progress.
        settings: How to read.
    Raises:
        InvalidError: The call is wrong, or the format cannot hold what the checkpoint does.
        ConflictError: Something is at `dst`, or another process is exporting to it; it was not touched.
        UnavailableError: There is no room, or storage failed.
        CorruptError: Stored bytes are not what was saved.
    """
    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise InvalidError(f"dtype={dtype!r}; expected one of {', '.join(EXPORT_DTYPES)}, or None")
    for name, value in (("shard_bytes", shard_bytes), ("memory_bytes", memory_bytes), ("workers", workers)):
        if type(value) is not int or value < 1:
            raise InvalidError(f"{name}={value!r}; expected a positive whole number")
    if to == wiring.HOLDFAST:
        if dtype is not None or workers > 1:
            raise InvalidError(
                f"dtype={dtype!r}, workers={workers}; expected neither with to={to!r}: one process copies all tensors "
                "as they are"
            )
        return _copy_to_holdfast(src, dst, settings, observer)
    options = ExportOptions(shard_bytes=shard_bytes, dtype=dtype, model_only=bool(model_only))
    request = ExportRequest(memory_bytes=memory_bytes, workers=workers)
    planned, destination = wiring.export_of(src, dst, to, options, settings)
    pool = wiring.export_pool(src, dst, to, options, settings) if workers > 1 else None
    return carry_out_export(planned, destination, request, SystemClock(), pool, observer)


def _copy_to_holdfast(
    src: wiring.Path, dst: wiring.Path, settings: Settings, observer: Observer | None
) -> ExportReport:
    store, checkpoint = wiring.store_at(dst, settings), wiring.checkpoint_at(src, settings)
    if isinstance(store, LocalStore):
        LocalDestination(store.url.removeprefix("file://")).require_outside(checkpoint.url)
    # No reports: the files of an export are those that its own report lists, and no others.
    with closing(wiring.lone_job(replace(settings, reports=False))) as job:
        return exported(checkpoint, store, job, observer)


def list_steps(root: wiring.Path, *, settings: Settings = wiring.DEFAULT_SETTINGS) -> RunRecord:
    """Return every step under the root of a run: committed, damaged and unfinished. Read-only, needs no torch.

    Raises:
        MissingError: Nothing of a run lies there.
        InvalidError: The path is one checkpoint.
    """
    return run_record(wiring.store_at(root, settings))


def tag(root: wiring.Path, step: int, name: str, *, settings: Settings = wiring.DEFAULT_SETTINGS) -> None:
    """Give a committed step of a run a name; nothing changes if it has it already. Needs no torch.

    Raises:
        InvalidError: It cannot be a name, or the path is one checkpoint.
        MissingError: There is no such step.
        ConflictError: The tag names another step; it was not touched.
    """
    store = wiring.store_at(root, settings)
    require_no_checkpoint(store)
    require_step(step)
    tag_step(store, SystemClock(), step, name)


def untag(root: wiring.Path, name: str, *, settings: Settings = wiring.DEFAULT_SETTINGS) -> None:
    """Take a name away from a step of a run; the step stays as it is. Needs no torch.

    Raises:
        InvalidError: It cannot be a name, or the path is one checkpoint.
        MissingError: There is no such tag.
    """
    store = wiring.store_at(root, settings)
    require_no_checkpoint(store)
    remove_tag(store, name)


def trace(path: wiring.Path, *, settings: Settings = wiring.DEFAULT_SETTINGS) -> Trace:
    """Return what every rank did in the saves and loads of a checkpoint, or of every step of a run, as a trace.

    Its `document`, written as JSON, is what ui.perfetto.dev and chrome://tracing draw. Needs no torch.

    Raises:
        MissingError: No rank left a report there.
    """
    return trace_of(wiring.store_at(path, settings))


def repair(
    root: wiring.Path,
    step: int | None = None,
    *,
    dry_run: bool = False,
    unfinished: bool = False,
    observer: Observer | None = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> RepairReport:
    """Make manifests and indexes of a run again from what else is there, and say what is lost where that cannot be.

    Nothing is written that digests do not prove to be what was saved. The bytes of every file that is replaced are kept
    under `quarantine/`; a step that is whole afterwards is resumed from again. No job may be writing to the run. Needs
    no torch.

    Args:
        root: The root of the run.
        step: The step; None: every step of which a look at manifest, index, sizes and quarantine finds anything wrong.
        dry_run: Write nothing, only tell.
        unfinished: Take in the manifest of that step though it does not count (`holdfast ls` shows it as fenced), if
            all that it names is whole.
        observer: Told of progress while a step is read back.
        settings: How to read, and how an index is split.
    Raises:
        MissingError: There is no such step, or none at all.
        InvalidError: The path is one checkpoint, or a step is of a newer format.
        ConflictError: A job is writing to the run.
        UnavailableError: Storage failed; the same call goes on where it was.
    """
    if step is not None:
        require_step(step)
    elif unfinished:
        raise InvalidError("unfinished=True without a step; expected the step that is to be taken in, as in step=100")
    store, references = wiring.store_at(root, settings), References(settings.allowed_roots)
    return Repair(
        store, references, SystemClock(), settings,
        dry_run=bool(dry_run), unfinished=bool(unfinished), observer=observer,
    ).run(step)  # fmt: skip


def collect(
    root: wiring.Path,
    *,
    keep: KeepPolicy | None = None,
    dry_run: bool = False,
    grace_seconds: float | None = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> CollectReport:
    """Remove the steps of a run that a policy does not keep, and what dead saves left. Needs no torch.

    For runs that no job writes to: a manager made with `keep` does the same behind training. The newest valid step, the
    last healthy one, those under quarantine and those that somebody reads always stay, and so do packs that a step
    which stays refers to. Killed at any moment it leaves every step whole or gone; calling it again goes on.

    Args:
        root: The folder of the run.
        keep: Which steps stay, as in `holdfast.policies`; None for all of them.
        dry_run: Whether only to tell what would be removed.
        grace_seconds: How long what is to go is marked before it goes; None for `settings.collect_grace_seconds`.
        settings: How to hold the right to write.
    Raises:
        MissingError: Nothing of a run lies there.
        InvalidError: The path is one checkpoint, or the policy ranks by a metric that no step has.
        ConflictError: A job writes to the run; the message names it.
        CorruptError: What must stay cannot be told; nothing was removed.
        UnavailableError: Storage failed; calling again goes on.
    """
    if grace_seconds is not None and not 0 <= grace_seconds < float("inf"):
        raise InvalidError(f"grace_seconds={grace_seconds!r}; expected a finite number of seconds, 0 or more")
    grace = settings.collect_grace_seconds if grace_seconds is None else grace_seconds
    store = wiring.store_at(root, settings)
    if dry_run:
        return collection_planned(store, SystemClock(), keep)
    return collected(store, SystemClock(), keep, grace, settings.lease_seconds)


def diff(
    a: wiring.Path | Checkpoint,
    b: wiring.Path | Checkpoint,
    *,
    tensors: Globs = None,
    cast: bool = False,
    full: bool = False,
    observer: Observer | None = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> Diff:
    """Return everything that differs between two checkpoints of any formats. Never communicates, needs no torch.

    Of two checkpoints of Holdfast's only that is read which the digests in their indexes do not show to be the same.

    Args:
        a, b: Their paths, or the checkpoints themselves.
        tensors: Compare only tensors of which a name matches one of these patterns, and no values.
        cast: Compare tensors of different types by value, each widened exactly; otherwise they are only said to be of
            different type.
        full: Read what digests settle too, so that norms are those of whole tensors.
        observer: Told of progress.
        settings: How to read.
    Raises:
        MissingError: One is not there.
        InvalidError: One is the root of a run.
        CorruptError: One is damaged.
    """
    opened = [each if isinstance(each, Checkpoint) else open_checkpoint(each, settings=settings) for each in (a, b)]
    patterns = None if tensors is None else patterns_of("tensors", tensors)

    def chosen(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns or ())

    return differences(*opened, chosen=None if patterns is None else chosen, cast=cast, full=full, observer=observer)
