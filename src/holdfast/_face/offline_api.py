"""The public functions that need no job and no torch: import, export, list, tag, repair, copy, collect,
remove, compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace

from holdfast._face import export_wiring, wiring
from holdfast.backends.stores.foreign import References
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.local_place import LocalPlace
from holdfast.base.clock import SystemClock
from holdfast.base.layouts.layout import Layouts
from holdfast.base.ports.observer import Observer
from holdfast.base.types.export import ExportOptions
from holdfast.core.format.names import MANIFEST_FILE, step_folder
from holdfast.core.format.step_name import step_name
from holdfast.errors import InvalidError
from holdfast.offline.copying.copy_checkpoint import CheckpointCopy
from holdfast.offline.copying.copy_run import CopyReport, RunCopy
from holdfast.offline.export.request import ExportReport, ExportRequest
from holdfast.offline.imports.copy import exported
from holdfast.offline.imports.import_step import ImportReport, import_step
from holdfast.offline.repair.repair import Repair, RepairReport
from holdfast.offline.repair.single import SingleRepair
from holdfast.policies import KeepPolicy
from holdfast.settings import Settings
from holdfast.stored.checkpoint.location import require_no_checkpoint
from holdfast.stored.checkpoint.verify_log import LogVerification
from holdfast.stored.repository.catalog import exists
from holdfast.stored.repository.logs import RunLog
from holdfast.stored.repository.tags import remove_tag
from holdfast.training.loading.named_step import find_named, number_of
from holdfast.training.loading.named_step import is_run as is_run_at
from holdfast.training.runs.listing import RunRecord, run_record
from holdfast.training.runs.removal.garbage_collection import CollectReport, collected
from holdfast.training.runs.removal.garbage_collection import planned as collection_planned
from holdfast.training.runs.removal.named_steps import RemovedSteps, StepRemoval
from holdfast.training.runs.tags import tag_step
from holdfast.training.telemetry.trace import Trace, trace_of


def import_checkpoint(
    src: wiring.Path,
    root: wiring.Path,
    *,
    step: int | None = None,
    from_step: int | str | None = None,
    copy: bool = False,
    layout: Layouts = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
    observer: Observer | None = None,
) -> ImportReport:
    """Make a checkpoint of another system a step of a run. One process calls; needs no torch.

    The step refers to the files of the source. The step records each file, the file size and the digest of every chunk,
    for which all bytes are read. Checksums in the files are compared before. A load must allow the folder of the files
    with `Settings(allowed_roots=(…,))`; a file that has changed is a `CorruptError`. With `copy` the bytes are copied
    into packs of the run, and the source may be deleted. A checkpoint of Holdfast can be imported with `copy` only.

    Example:
        report = holdfast.import_checkpoint("model.pt", "imported", step=0, copy=True)
        print(report.origin, report.tensors)
    Args:
        src: The checkpoint: a folder or file of any format that Holdfast reads.
        root: The folder of the run; created if the folder does not exist.
        step: The new step of the run; None for the step number of the source.
        from_step: The step of `src`, if that is the root of a run: a number, a tag, or `latest`.
        copy: Whether to copy the bytes. Bytes to or from a URL are always copied: a step refers to files of disks only.
        layout: Rules that make the tensors of the step, as for `load`. Without `copy` each must be whole in the files.
        settings: Bytes of a chunk, and reads in flight.
        observer: Receives progress.
    Raises:
        ConflictError: The step exists and was not touched, or a file of the source changed during the import.
        InvalidError: The checkpoint has no step number, or cannot be imported this way.
        MissingError: There is no checkpoint.
        CorruptError: The checkpoint is damaged; nothing was committed.
        UnavailableError: Storage failed, or the outcome is unknown.
    """
    with closing(wiring.lone_job(settings)) as job:
        store = wiring.copy_store_at(root, src, settings)
        if not copy:
            wiring.require_files(wiring.store_at(src, settings), store)
        source = wiring.checkpoint_at(src, settings, from_step, layout)
        held = wiring.run_of(store, settings, writes=True)
        return import_step(source, store, job, step, copied=copy, observer=observer, run=held)


def export(
    src: wiring.Path,
    dst: wiring.Path,
    *,
    to: str,
    step: int | str | None = None,
    shard_bytes: int | None = None,
    dtype: str | None = None,
    model_only: bool = True,
    memory_bytes: int = 1 << 30,
    workers: int = 1,
    layout: Layouts = None,
    observer: Observer | None = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> ExportReport:
    """Write a checkpoint, of any format that Holdfast reads, as files of another system. Needs no torch.

    All files appear at `dst` at once, durable; at a URL one by one, the file that names the others last. After an
    interruption, the same call resumes.

    Example:
        holdfast.export("run-7", "model-safetensors", to="safetensors", step="best", dtype="bfloat16")
    Args:
        src: The checkpoint; with `step` the root of a run.
        dst: The file or folder to create; the path must not exist.
        to: The format: `safetensors`, `torch` or `dcp` (docs/formats.md). `holdfast` copies everything into a
            checkpoint of Holdfast, in one process and not resumed; the options up to `memory_bytes` do not apply.
        step: A step of the run: its number, a tag, `"300@1f2e"`, or `"latest"`, the newest valid one.
        shard_bytes: Most bytes of tensors in a file. None: 5 GB; at a URL an eighth of the memory of a worker.
        dtype: Dtype for the floating tensors of the model: float32, float16 or bfloat16; None for the stored dtype.
        model_only: Whether to leave out everything but the model.
        memory_bytes, workers: Memory for data in flight of all workers together, and number of parallel processes.
        layout, observer: Rules that make the tensors of the files, as for `load`; receives progress.
        settings: How to read; with `to="holdfast"` also how to write, `compression` too.
    Raises:
        InvalidError: The call is wrong, or the format cannot hold the checkpoint.
        ConflictError: `dst` exists, or another process exports to `dst`; nothing was written.
        UnavailableError: The file system is full, or storage failed.
        CorruptError: Stored bytes differ from the saved bytes.
    """
    export_wiring.require_options(dtype, shard_bytes, layout, memory_bytes=memory_bytes, workers=workers)
    if step is not None and workers > 1:
        src, step = wiring.step_path(wiring.step_at(src, step, settings)), None
    if to == export_wiring.HOLDFAST:
        if dtype is not None or workers > 1:
            raise InvalidError(
                f"dtype={dtype!r}, workers={workers}; expected neither with to={to!r}: one process copies tensors as is"
            )
        checkpoint = wiring.checkpoint_at(src, settings, step, layout)
        store = wiring.copy_store_at(dst, checkpoint.url, settings)
        if isinstance(store, LocalStore):
            LocalPlace(store.url).require_outside(checkpoint.url)
        # No save reports: an export writes only the files that the `ExportReport` lists.
        with closing(wiring.lone_job(replace(settings, reports=False))) as job:
            return exported(checkpoint, store, job, observer)
    settings, shard_bytes = export_wiring.resources_of(dst, settings, memory_bytes, workers, shard_bytes)
    options = ExportOptions(shard_bytes=shard_bytes, dtype=dtype, model_only=bool(model_only))
    planned = export_wiring.export_of(src, dst, to, options, settings, step, layout)
    pool = export_wiring.export_pool(src, dst, to, options, settings) if workers > 1 else None
    return planned.run(ExportRequest(memory_bytes=memory_bytes, workers=workers), pool, observer)


def list_steps(
    root: wiring.Path, *, near: str | None = None, settings: Settings = wiring.DEFAULT_SETTINGS
) -> RunRecord:
    """Return every step under the root of a run: committed, damaged and unfinished. Read-only, needs no torch.

    Example:
        for step in holdfast.api.list_steps("run-7").steps:
            print(step.step, step.tags, step.quarantined)
    Args:
        root: The folder of the run.
        near: The near tier of the run; None for the folder that the root names, if this host has it.
        settings: How to reach storage.
    Raises:
        MissingError: The path holds no run.
        InvalidError: The path is one checkpoint.
    """
    return run_record(wiring.run_of(wiring.store_at(root, settings), settings, near))


def is_run(path: wiring.Path, *, settings: Settings = wiring.DEFAULT_SETTINGS) -> bool:
    """Return whether a path is the root of a run. Needs no torch.

    Example:
        holdfast.api.is_run("run-7")
    """
    return is_run_at(wiring.store_at(path, settings))


def tag(
    root: wiring.Path,
    step: int | str,
    name: str,
    *,
    move: bool = False,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> None:
    """Give a committed step of a run a tag; no change if the step has the tag already. Needs no torch.

    Example:
        holdfast.api.tag("run-7", 300, "release")
        holdfast.api.tag("run-7", "release", "best", move=True)
    Args:
        root: The folder of the run.
        step: The step: its number, `300@1f2e` for a superseded step, another tag of the step, or `latest`.
        name: The tag.
        move: Whether to move the tag if another step has the tag. At any time, one of the two steps has the tag.
        settings: How to reach storage.
    Raises:
        InvalidError: The name is not valid, or the path is one checkpoint.
        MissingError: There is no such step.
        ConflictError: Another step has the tag, and `move` is False; the tag did not change.
    """
    store = wiring.run_of(wiring.store_at(root, settings), settings, writes=True)
    require_no_checkpoint(store)
    tag_step(store, SystemClock(), step, name, move=bool(move))


def untag(root: wiring.Path, name: str, *, settings: Settings = wiring.DEFAULT_SETTINGS) -> None:
    """Remove a tag of a run; the step does not change. Needs no torch.

    Example:
        holdfast.api.untag("run-7", "best")
    Raises:
        InvalidError: The name is not valid, or the path is one checkpoint.
        MissingError: There is no such tag.
    """
    store = wiring.run_of(wiring.store_at(root, settings), settings, writes=True)
    require_no_checkpoint(store)
    remove_tag(store, name)


def trace(path: wiring.Path, *, step: int | str | None = None, settings: Settings = wiring.DEFAULT_SETTINGS) -> Trace:
    """Return a trace of the saves, loads and drains of a checkpoint, or of every step of a run, on all ranks.

    ui.perfetto.dev and chrome://tracing draw the `document`, written as JSON. Needs no torch.

    Example:
        with open("trace.json", "w") as file:
            json.dump(holdfast.api.trace("run-7").document, file)
    Args:
        path: The checkpoint, or the root of a run.
        step: One step of the run: its number, number and digest, a tag, or `latest`; None for all.
        settings: How to read.
    Raises:
        MissingError: The path holds no reports, or there is no such step or tag.
    """
    run = wiring.run_of(wiring.store_at(path, settings), settings)
    if step is None:
        return trace_of(run)
    named = step_name(step)
    # The reports of all saves of one number are in one folder, those that a newer timeline superseded too.
    number = find_named(run, named)[1].step if named.digest or named.tag else number_of(run, named)
    return trace_of(run, step_folder(number))


def repair(
    root: wiring.Path,
    step: int | str | None = None,
    *,
    dry_run: bool = False,
    unfinished: bool = False,
    observer: Observer | None = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> RepairReport:
    """Rebuild damaged manifests and indexes of a run from its other files, and report the losses.

    Only data whose digests prove that a save wrote the data is written. Every replaced file is kept under
    `quarantine/`. A run can resume from a step that is complete afterwards. No job may write to the run. Needs no
    torch.

    The folder of one step stands for that step of its run. A checkpoint outside a run is repaired from its own
    files alone, and replaced files are kept in its folder `replaced/`.

    Example:
        report = holdfast.api.repair("run-7", dry_run=True)
        print([(step.step, step.outcome) for step in report.steps])
    Args:
        root: The root of the run, the folder of one step, or one checkpoint.
        step: The step: its number, a tag, or `latest`; None: every step whose manifest, index, file sizes or quarantine
            show damage.
        dry_run: Write nothing, only report.
        unfinished: Accept the manifest of that step although the manifest is fenced (see `holdfast ls`), if all files
            in the manifest are intact.
        observer: Receives progress while a step is read back.
        settings: How to read, and how an index is split.
    Raises:
        MissingError: There is no such step, or no step at all.
        InvalidError: The call names a step of one checkpoint, or a step has a newer format.
        ConflictError: A job writes to the run.
        UnavailableError: Storage failed; the same call resumes.
    """
    store, of_path = wiring.repairable_at(root, settings)
    number = of_path
    if step is not None:
        if of_path is not None:
            raise InvalidError(f"{root}: is step {of_path} of a run already; expected no step, or the root of the run")
        number = number_of(store, step_name(step))
    if number is None and unfinished:
        raise InvalidError("unfinished=True without a step; expected the step to accept, as in step=100")
    repair_class = SingleRepair if number is None and exists(store, MANIFEST_FILE) else Repair
    request = repair_class(
        store, References(settings.allowed_roots), SystemClock(), settings,
        codecs=wiring.codecs(), dry_run=bool(dry_run), unfinished=bool(unfinished), observer=observer,
    )  # fmt: skip
    if not dry_run:
        request.hold_at(wiring.run_of(store, settings, writes=True))
    return request.run(number)


def copy_run(
    root: wiring.Path,
    destination: wiring.Path,
    *,
    skip_damaged: bool = False,
    observer: Observer | None = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> CopyReport:
    """Copy a whole run to another place, on any store. Files that steps share are stored once. Needs no torch.

    Every file that a manifest names is copied once, and checked against its digest on the way. A job may write to the
    run meanwhile. Steps that the job removes or saves again before the copy reaches them are left out and reported. If
    the process is interrupted or killed, the same call continues.

    Example:
        report = holdfast.api.copy_run("run-7", "archive/run-7")
        print(report.files, report.bytes)
    Args:
        root: The root of the run.
        destination: A new folder.
        skip_damaged: Whether to leave out damaged steps, rather than to refuse to complete the copy.
        observer: Receives progress, from several threads, one at a time.
        settings: How to reach storage, memory for objects in flight, permission bits of files. Without such bits, the
            copy has the bits of the run.
    Raises:
        MissingError: The path holds no run.
        ConflictError: The destination holds something else than an unfinished copy of this run.
        CorruptError: Steps are damaged; the message names the places. All other steps are copied.
        InvalidError: The path is one checkpoint, or one path is inside the other.
        UnavailableError: Storage failed; the same call continues.
    """
    source = wiring.store_at(root, settings)
    target = wiring.copy_store_at(destination, root, settings)
    wiring.require_apart(source, target)
    copy = RunCopy(source, target, SystemClock(), observer, codecs=wiring.codecs(), skip_damaged=bool(skip_damaged))
    return copy.run()


def log_verification(logs: Sequence[RunLog], *, observer: Observer | None = None) -> LogVerification:
    """Return a check of every byte of redo logs. Needs no torch.

    Example:
        damages = list(holdfast.api.log_verification(holdfast.api.list_steps("run-7").logs).damages())
    """
    return LogVerification(logs, wiring.codecs(), observer)


def copy_checkpoint(
    src: wiring.Path,
    destination: wiring.Path,
    *,
    step: int | str | None = None,
    observer: Observer | None = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> CopyReport:
    """Copy one checkpoint of Holdfast, or one step of a run, to a folder of its own, on any store. Needs no torch.

    The copy has all packs that the checkpoint needs, also packs of other steps. The bytes are checked against their
    digests on the way. If the process is interrupted or killed, the same call continues.

    Example:
        holdfast.api.copy_checkpoint("run-7", "archive/best", step="best")
    Args:
        src: The checkpoint; with `step` the root of a run.
        destination: A new folder.
        step: A step of the run: its number, a tag, `"300@1f2e"`, or `"latest"`, the newest valid one.
        observer: Receives progress.
        settings: As for `copy_run`.
    Raises:
        MissingError: There is no checkpoint.
        ConflictError: The destination holds something else than an unfinished copy of this checkpoint.
        CorruptError: The checkpoint is damaged; the message names the places.
        InvalidError: The checkpoint is of another system, or one path is inside the other.
        UnavailableError: Storage failed; the same call continues.
    """
    location = wiring.location_at(src, settings) if step is None else wiring.step_at(src, step, settings)
    target = wiring.copy_store_at(destination, location.url, settings)
    wiring.require_apart(location.store, target)
    return CheckpointCopy(location, target, SystemClock(), observer, codecs=wiring.codecs()).run()


def collect(
    root: wiring.Path,
    *,
    keep: KeepPolicy | None = None,
    dry_run: bool = False,
    grace_seconds: float | None = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> CollectReport:
    """Remove the steps of a run that a policy does not keep, and files of dead saves. Needs no torch.

    For runs without a writing job: a manager with `keep` does the same in the background. The newest valid step, the
    last healthy one, quarantined steps and steps with readers always stay. So do packs that a kept step refers to. If
    the process is killed, every step is complete or gone, and the next call resumes.

    Example:
        keep = policies.AnyOf(policies.LatestN(2), policies.Tagged())
        report = holdfast.api.collect("run-7", keep=keep, dry_run=True)
        print(report.steps, report.bytes)
    Args:
        root: The folder of the run.
        keep: Which steps stay, as in `holdfast.policies`; None for all steps.
        dry_run: Only report what would be removed.
        grace_seconds: Time between mark and removal; None for `settings.collect_grace_seconds`.
        settings: How to hold the writer lease.
    Raises:
        MissingError: The path holds no run.
        InvalidError: The path is one checkpoint, or the policy ranks by a metric that no step has.
        ConflictError: A job writes to the run; the message names it.
        CorruptError: A damaged file hides which steps must stay; nothing was removed.
        UnavailableError: Storage failed; the next call resumes.
    """
    grace = _grace_of(grace_seconds, settings)
    store = wiring.store_at(root, settings)
    if dry_run:
        return collection_planned(store, SystemClock(), keep)
    held = wiring.run_of(store, settings, writes=True)
    return collected(store, SystemClock(), keep, grace, settings.lease_seconds, held)


def remove_steps(
    root: wiring.Path,
    steps: Sequence[int | str] | int | str,
    *,
    tagged: bool = False,
    all_steps: bool = False,
    dry_run: bool = False,
    grace_seconds: float | None = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> RemovedSteps:
    """Remove steps of a run by name. For runs without a writing job. Needs no torch.

    Packs that other steps refer to stay. A step with a reader stays for now, and is in `left`. If the process is
    killed, every step is complete or gone; `collect` removes remaining files of a step that is gone.

    Example:
        removed = holdfast.api.remove_steps("run-7", [100], grace_seconds=0)
        print(removed.steps, removed.bytes)
    Args:
        root: The folder of the run.
        steps: Numbers or tags, or `latest`; a superseded step is named by number and digest, as `300@1f2e`.
        tagged: Whether steps with tags are removed too, together with these tags.
        all_steps: Whether the last step that a resume could take may be removed.
        dry_run: Only report the files that would be removed.
        grace_seconds: Time between mark and removal; None for `settings.collect_grace_seconds`.
        settings: How to hold the writer lease.
    Raises:
        MissingError: There is no such step, or the path holds no run; nothing was removed.
        ConflictError: A step has a tag, or a job writes to the run; nothing was removed.
        InvalidError: No step that a resume could take would stay, or the path is one checkpoint; nothing was removed.
        CorruptError: A manifest or tag cannot be read; nothing was removed.
        UnavailableError: Storage failed; call again.
    """
    grace = _grace_of(grace_seconds, settings)
    named = list(steps) if isinstance(steps, Iterable) and not isinstance(steps, str) else [steps]
    if not named:
        raise InvalidError("steps=[]; expected one step at least, as in steps=[100]")
    removal = StepRemoval(named, bool(tagged), bool(all_steps))
    store = wiring.run_of(wiring.store_at(root, settings), settings, writes=True)
    if dry_run:
        return removal.planned(store, SystemClock())
    return removal.execute(store, SystemClock(), grace, settings.lease_seconds)


def _grace_of(grace_seconds: float | None, settings: Settings) -> float:
    if grace_seconds is not None and not 0 <= grace_seconds < float("inf"):
        raise InvalidError(f"grace_seconds={grace_seconds!r}; expected a finite number of seconds, 0 or more")
    return settings.collect_grace_seconds if grace_seconds is None else grace_seconds
