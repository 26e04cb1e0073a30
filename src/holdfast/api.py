"""The public functions: save, load, open and read a checkpoint. Those that need no job come from `offline_api`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from holdfast import policies
from holdfast._face import wiring
from holdfast._face.arguments import Globs, require_bool, require_state, selection_of
from holdfast.base.geometry.region import FlatRange, Region
from holdfast.base.geometry.sharded import Sharded
from holdfast.base.layouts.layout import Layouts, layouts_of
from holdfast.base.types.diff import Change, Diff, NameOnly, TensorDiff, TieDiff, ValueDiff, Verdict
from holdfast.base.types.reports import LoadReport, SaveReport
from holdfast.base.types.values import FrameworkValue, Group, PerRankRef, Skipped, TensorRef
from holdfast.core.engine.background import end_idle_threads
from holdfast.core.plan.forecast import Forecast
from holdfast.errors import InvalidError
from holdfast.settings import Settings
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.codings import StoredForm
from holdfast.stored.checkpoint.verify import Damage
from holdfast.stored.repository.tags import Tag
from holdfast.training.coordination.job import Job
from holdfast.training.loading.load import load_checkpoint
from holdfast.training.loading.load_request import LoadRequest
from holdfast.training.loading.named_step import finder_of
from holdfast.training.loading.rename_rules import Renames
from holdfast.training.loading.step_choice import StepChoice
from holdfast.training.saving.handle import SaveHandle
from holdfast.training.saving.misuse import refuse_call
from holdfast.training.saving.save import begin_save, save_and_wait
from holdfast.training.saving.target import Collect, SaveTarget, path_save

if TYPE_CHECKING:
    from holdfast._face.agent_api import agent, agent_status, nodes_status
    from holdfast._face.checkpoint_manager import CheckpointManager
    from holdfast._face.checkpoint_words import provenance
    from holdfast._face.comparison import diff
    from holdfast._face.drain_api import drain
    from holdfast._face.export_wiring import EXPORT_DTYPES
    from holdfast._face.observing import alerts, reports, watch_run
    from holdfast._face.offline_api import (
        collect,
        copy_checkpoint,
        copy_run,
        export,
        import_checkpoint,
        is_run,
        list_steps,
        log_verification,
        remove_steps,
        repair,
        tag,
        trace,
        untag,
    )
    from holdfast._face.run_words import agent_notes, shown_age, shown_time, step_table
    from holdfast._face.value_words import value_lines, value_text
    from holdfast._face.whole_state import read
    from holdfast.base.layouts.explain import explain
    from holdfast.base.layouts.layout import shipped
    from holdfast.offline.copying.copy_run import CopyReport
    from holdfast.offline.diff.statistics import statistics
    from holdfast.offline.diff.values import value_document
    from holdfast.offline.export.request import ExportReport
    from holdfast.offline.imports.import_step import ImportReport
    from holdfast.offline.repair.repair import RepairReport, StepRepair
    from holdfast.stored.checkpoint.verify_log import LogVerification
    from holdfast.stored.repository.logs import RunLog
    from holdfast.training.runs.listing import RunRecord, StepRecord
    from holdfast.training.runs.removal.garbage_collection import CollectReport
    from holdfast.training.runs.removal.named_steps import RemovedSteps
    from holdfast.training.runs.tiers.agent_files import AgentStatus, NodeStatus
    from holdfast.training.runs.tiers.offline_drain import DrainReport
    from holdfast.training.runs.watch import RunWatch
    from holdfast.training.telemetry.alerts import Alert, AlertRules
    from holdfast.training.telemetry.log_lines import shown_seconds
    from holdfast.training.telemetry.trace import Trace
    from holdfast.training.telemetry.work import works_of

__all__ = [
    "save", "async_save", "load", "open_checkpoint", "read", "CheckpointManager", "Checkpoint", "SaveHandle",
    "SaveReport", "LoadReport",
    "list_steps", "is_run", "tag", "untag", "Tag", "RunRecord", "StepRecord", "RunLog", "policies",
    "end_idle_threads",
    "collect", "CollectReport", "remove_steps", "RemovedSteps", "repair", "RepairReport", "StepRepair", "Damage",
    "log_verification", "LogVerification",
    "copy_run", "copy_checkpoint", "CopyReport", "export", "ExportReport", "EXPORT_DTYPES", "import_checkpoint",
    "ImportReport",
    "drain", "DrainReport", "agent", "agent_notes", "agent_status", "AgentStatus",
    "nodes_status", "NodeStatus",
    "diff", "Diff", "Change", "Verdict", "TensorDiff", "TieDiff", "ValueDiff", "NameOnly", "value_document",
    "explain", "shipped", "statistics",
    "FlatRange", "FrameworkValue", "Forecast", "Group", "PerRankRef", "Region", "Sharded", "Skipped", "StoredForm",
    "TensorRef",
    "trace", "Trace", "watch_run", "RunWatch", "alerts", "Alert", "AlertRules", "reports", "works_of",
    "step_table", "provenance", "value_lines", "value_text", "shown_age", "shown_seconds", "shown_time",
]  # fmt: skip

_HOMES = {
    name: module
    for module, names in {
        "holdfast._face.agent_api": "AgentStatus NodeStatus agent agent_status nodes_status",
        "holdfast._face.checkpoint_manager": "CheckpointManager",
        "holdfast._face.checkpoint_words": "provenance",
        "holdfast._face.comparison": "diff",
        "holdfast._face.drain_api": "DrainReport drain",
        "holdfast._face.export_wiring": "EXPORT_DTYPES",
        "holdfast._face.observing": "alerts reports watch_run",
        "holdfast._face.run_words": "agent_notes shown_age shown_time step_table",
        "holdfast._face.value_words": "value_lines value_text",
        "holdfast._face.whole_state": "read",
        "holdfast.base.layouts.explain": "explain",
        "holdfast.base.layouts.layout": "shipped",
        "holdfast.offline.diff.statistics": "statistics",
        "holdfast.offline.diff.values": "value_document",
        "holdfast.offline.repair.repair": "StepRepair",
        "holdfast.stored.checkpoint.verify_log": "LogVerification",
        "holdfast.stored.repository.logs": "RunLog",
        "holdfast.training.runs.listing": "StepRecord",
        "holdfast.training.runs.watch": "RunWatch",
        "holdfast.training.telemetry.alerts": "Alert AlertRules",
        "holdfast.training.telemetry.log_lines": "shown_seconds",
        "holdfast.training.telemetry.work": "works_of",
    }.items()
    for name in names.split()
}
"""Modules of names that neither this module nor `offline_api` holds."""

if not TYPE_CHECKING:  # A type checker that saw this function would accept any name.

    def __getattr__(name: str) -> object:
        """Return a public name of another module; the first access imports that module.

        A job that only saves and loads by path does not wait for these modules.
        """
        if name not in __all__:
            raise AttributeError(f"module 'holdfast.api' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES.get(name, "holdfast._face.offline_api")), name)
        globals()[name] = value
        return value


def save(
    path: wiring.Path,
    state: Mapping[str, object],
    *,
    only: Globs = None,
    skip: Globs = None,
    grads: bool = False,
    overwrite: bool = False,
    process_group: wiring.ProcessGroup = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> SaveReport:
    """Save one checkpoint and return once the checkpoint is committed. Every rank of the group calls.

    Example:
        report = holdfast.save("checkpoints/final", {"model": model, "optimizer": optimizer, "epoch": 3})
        print(report.bytes, report.committed_seconds)
    Args:
        path: The folder that becomes the checkpoint. Without `overwrite`, the folder must not hold a checkpoint.
        state: Nested dict of modules, optimizers, objects with `state_dict`/`load_state_dict`, tensors and values.
        only: Save only FQNs that match one of these patterns; each must match a name on some rank.
        skip: Leave out FQNs that match one of these patterns.
        grads: Save gradients too, each under the FQN of the parameter plus `.grad`, for a save amid gradient
            accumulation. Otherwise such a save is refused if the optimizer or wrapper reveals the accumulation.
        overwrite: Replace a checkpoint at the path. The old checkpoint stays whole until the new checkpoint is
            committed. The next overwrite deletes the old files, `settings.collect_grace_seconds` later at the earliest.
        process_group: None for the default group, False for this process alone, or a group.
        settings: How to save.
    Raises:
        InvalidError: The state or the call is wrong, or ranks disagree; or `overwrite` at a step of a run, at a run, or
            at files that Holdfast did not write. Nothing was written.
        ConflictError: The path already holds a checkpoint, or another job overwrites the path; nothing was written.
        UnavailableError: Storage, the key-value store or a rank failed, or the outcome is unknown.
    """
    job, request = _request(path, state, (only, skip, grads), process_group, settings, overwrite=overwrite)
    if isinstance(request, InvalidError):
        raise refuse_call(job, request).failure or request
    return save_and_wait(job, *request)


def async_save(
    path: wiring.Path,
    state: Mapping[str, object],
    *,
    only: Globs = None,
    skip: Globs = None,
    grads: bool = False,
    overwrite: bool = False,
    process_group: wiring.ProcessGroup = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> SaveHandle:
    """Begin to save one checkpoint; return once the state is copied and training may change it.

    Hashing, writing and the commit run in the background. The copies take at most `settings.arena_bytes_max` of host
    memory. A state that does not fit is written before this returns.

    With `settings.staging="lazy"` this returns at once. Parameters and optimizer state are copied while training runs.
    The next step of any `torch.optim.Optimizer`, `load_state_dict` of a passed object, and a load by Holdfast wait for
    the remaining copies. If a tensor changes before its copy, the save fails and nothing is committed.

    Arguments as `save`.

    Example:
        handle = holdfast.async_save("checkpoints/background", state)
        optimizer.step()  # Training goes on.
        handle.wait()
    Raises:
        InvalidError: The state or the call is wrong, or ranks disagree, and these ranks never agreed on a save before.
            Nothing was written. `SaveHandle.wait` raises all other errors.
    """
    job, request = _request(path, state, (only, skip, grads), process_group, settings, overwrite=overwrite)
    return refuse_call(job, request) if isinstance(request, InvalidError) else begin_save(job, *request)


def _request(
    path: wiring.Path,
    state: Mapping[str, object],
    chosen: tuple[Globs, Globs, bool],
    process_group: wiring.ProcessGroup,
    settings: Settings,
    *,
    overwrite: bool,
) -> tuple[Job, tuple[SaveTarget, Collect] | InvalidError]:
    """Return the job, the target and the state of a save by path, or the error of the call on this rank."""
    try:
        require_state(state, "save(path, state)")
        require_bool("overwrite", overwrite)
        selection, location = selection_of(*chosen), wiring.saved_at(path, settings, overwrite=overwrite)
    except InvalidError as misuse:
        if wiring.comm_of(process_group).world_size == 1:
            raise
        # The first of these jobs is a collective: the other ranks would wait for this one.
        return wiring.shared_job(process_group, settings), misuse
    job = wiring.shared_job(process_group, settings)
    return job, path_save(job, location, state, selection, overwrite=overwrite)


def load(
    path: wiring.Path,
    state: Mapping[str, object],
    *,
    step: int | str | None = None,
    best: str | tuple[str, str] | None = None,
    strict: bool = True,
    cast: bool = False,
    only: Globs = None,
    skip: Globs = None,
    grads: bool = False,
    layout: Layouts = None,
    rename: Mapping[str, str] | None = None,
    partial: Iterable[str] | None = None,
    hyperparameters: bool = True,
    process_group: wiring.ProcessGroup = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> LoadReport:
    """Fill a state from one checkpoint, on any mesh. Every rank of the group calls.

    Modules, optimizers and tensors are filled in place; plain values in the dict are replaced. Only the passed
    top-level keys are compared: `load(path, {"model": model})` from a whole training checkpoint succeeds.

    Example:
        holdfast.load("checkpoint", {"model": model, "optimizer": optimizer})
        holdfast.load("run-7", {"model": model}, best=("accuracy", "max"), skip="*.bias")
    Args:
        path: The checkpoint; with `step` or `best` the root of a run.
        state: The state to fill.
        step: A step of the run: its number, a tag (`"best"`), `"300@1f2e"`, or `"latest"`, the newest valid one.
        best: The name of a metric: the committed step with the lowest value. `("accuracy", "max")`: the highest value.
        strict: Raise if names are missing or unexpected; otherwise fill the matching names and report the rest.
        cast: Allow a tensor to be filled from another dtype; floats and integers never fill each other.
        only: Fill only FQNs that match one of these patterns; each must match a name on some rank.
        skip: Leave FQNs that match one of these patterns as they are.
        grads: Set the saved gradients, and remove gradients of parameters that had no gradient. Otherwise, gradients in
            the checkpoint are unexpected names, since a run that resumes without gradients trains differently.
        layout: Rules that make the tensors of the state from those of the checkpoint: a shipped name, the path of a
            rule file, a `holdfast.Layout`, or a list of these, applied one after the other. docs/layout-language.md
            has the language.
        rename: How names in the checkpoint become names of the state, as `{"module.": "", "backbone": "encoder"}`: the
            first segments of a name below its top-level key; of the whole name, if no name matches there. A `*` stands
            for any characters and is carried over, as in `{"*.attn.*": "*.attention.*"}`. Each rule applies to the
            result of the rules before. The state of optimizers follows the names of the parameters.
        partial: Tensors, by patterns, whose saved shape may differ, such as a resized vocabulary. The common part, from
            index 0 in each dimension, is filled, in the state of optimizers too; the rest does not change, and is zero
            in new state. `LoadReport.partial` lists these tensors.
        hyperparameters: Whether to fill hyperparameters of optimizers; False keeps, for example, a new learning rate.
        process_group: None for the default group, False for this process alone, or a group.
        settings: How to load.
    Raises:
        InvalidError: The state does not fit; nothing was changed on any rank.
        MissingError: There is no checkpoint, step or tag.
        CorruptError: Stored bytes differ from the saved bytes; the state may be partly filled.
    """
    require_state(state, "load(path, state)")
    job = wiring.loading_job(process_group, settings)
    selection = selection_of(only, skip, grads, partial, hyperparameters=hyperparameters, cast=cast)
    request = LoadRequest(state, selection, strict, Renames.of(rename), layouts_of(layout))
    if step is None and best is None:
        return load_checkpoint(job, StepChoice(wiring.location_at(path, settings), is_path=True), request)
    return load_checkpoint(job, StepChoice(wiring.home_at(path, settings), finder_of(step, best)), request)


def open_checkpoint(
    path: wiring.Path,
    *,
    step: int | str | None = None,
    layout: Layouts = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> Checkpoint:
    """Open a checkpoint read-only. A checkpoint reads lazily, never communicates, and needs no torch.

    Example:
        checkpoint = holdfast.open_checkpoint("run-7", step="latest")
        for name, tensor in checkpoint.tensors.items():
            print(name, tensor.dtype, tensor.shape)
        first_rows = checkpoint.read("model.weight", slice(0, 2))
    Args:
        path: The checkpoint; with `step` the root of a run.
        step: A step of the run: its number, a tag (`"best"`), `"300@1f2e"`, or `"latest"`, the newest valid one.
        layout: Rules that make the tensors from those that are stored, as for `load`.
        settings: How to read.
    Raises:
        MissingError: There is no checkpoint, step or tag.
        InvalidError: The path is the root of a run and no step is given, or the reverse; or the format is newer.
        CorruptError: The manifest is damaged.
    """
    return wiring.checkpoint_at(path, settings, step, layout)
