"""The only file that chooses and builds implementations."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.location import CheckpointLocation, ForeignPath, is_step_folder
from holdfast.clock import Clock, SystemClock
from holdfast.coordination.job import Job
from holdfast.coordination.signals import Signals
from holdfast.errors import InvalidError
from holdfast.frameworks.alone import AloneComm
from holdfast.offline.export.export import Export, ExportReport, WorkerPool
from holdfast.offline.export.workers import run_workers, worker_main
from holdfast.offline.imports.copy import exported
from holdfast.offline.imports.import_step import ImportReport, import_step
from holdfast.offline.repair.repair import Repair
from holdfast.policies import Policies
from holdfast.ports.comm import Comm
from holdfast.ports.foreign import Format, Writer
from holdfast.ports.framework import Framework
from holdfast.ports.observer import Observer
from holdfast.ports.store import Store
from holdfast.runs.preemption import PreemptionHandler
from holdfast.runs.run import Run
from holdfast.settings import Preemption, Settings
from holdfast.stores.destination import LocalDestination
from holdfast.stores.foreign import ForeignFiles
from holdfast.stores.local import LocalStore
from holdfast.stores.memory import MemoryStore
from holdfast.stores.references import References
from holdfast.types.export import ExportOptions
from holdfast.types.listing import ForeignListing

Path = str | os.PathLike[str]
ProcessGroup = object
"""None, False, or a `torch.distributed.ProcessGroup`."""

DEFAULT_SETTINGS = Settings()


def clock() -> Clock:
    """Return the machine's clock."""
    return SystemClock()


def store_at(path: object, settings: Settings) -> Store:
    """Return the store a path or URL names.

    Raises:
        InvalidError: It is no path, or of a scheme not supported.
    """
    if not isinstance(path, str | os.PathLike):
        hint = " The arguments are swapped: the path comes first" if isinstance(path, dict) else ""
        raise InvalidError(f"path is {type(path).__name__}; expected a folder as str or Path.{hint}")
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise InvalidError(f"path={text!r}; expected a folder as str or Path")
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalStore(text, settings=settings)
    if scheme == "file":
        return LocalStore(rest, settings=settings)
    if scheme == "memory" and rest:
        return MemoryStore(rest)
    raise InvalidError(f"path={text!r}: scheme {scheme}:// is not supported; expected a folder, file:// or memory://")


@cache
def formats() -> tuple[Format, ...]:
    """Return other systems' checkpoints that are read in place; the first that knows one lists it.

    Imported when something is there that is not ours: they take as long as all else that a command needs.
    """
    from holdfast.foreign.dcp.reader import DcpFormat
    from holdfast.foreign.deepspeed.reader import DeepSpeedFormat
    from holdfast.foreign.huggingface.bin_reader import HuggingFaceBinFormat
    from holdfast.foreign.huggingface.safetensors_reader import SafetensorsFormat
    from holdfast.foreign.torch.reader import TorchSaveFormat

    return (
        DcpFormat(),
        DeepSpeedFormat(),
        SafetensorsFormat(),
        HuggingFaceBinFormat(),
        TorchSaveFormat(),
    )


def foreign_at(path: str) -> ForeignPath:
    """Return the files at a path of a file system, whoever wrote them."""
    name = os.path.basename(path) if os.path.isfile(path) else ""
    files = ForeignFiles(os.path.dirname(os.path.abspath(path)) if name else path)

    def listing() -> ForeignListing | None:
        known = next((each for each in formats() if each.recognises(files, name)), None)
        if known is not None:
            return known.listing(files, name)
        from holdfast.foreign.incomplete import require_complete

        require_complete(files, name)
        return None

    return ForeignPath(files, name, listing, files.stamps, files.require_unchanged)


def location_at(path: object, settings: Settings) -> CheckpointLocation:
    """Return the place of one checkpoint to be read: of Holdfast's, or of another system's.

    Raises:
        InvalidError: It is no path, or of a scheme not supported.
    """
    store = store_at(path, settings)
    foreign, root = None, None
    if isinstance(store, LocalStore):
        lies = store.url.removeprefix("file://")
        foreign = foreign_at(lies)
        # A step may refer to packs of others beside it; a link to it, such as people make, leads there too.
        above, name = os.path.split(os.path.realpath(lies))
        root = LocalStore(above, settings=settings) if is_step_folder(name) else None
    return CheckpointLocation(store, "", None, foreign, References(settings.allowed_roots), root)


def run_at(
    root: object,
    process_group: ProcessGroup,
    settings: Settings,
    policies: Policies,
    observers: Sequence[Observer],
    preemption: Preemption | None,
) -> Run:
    """Return the run at a root, saved and loaded by the ranks of a group; a collective of them."""
    store = store_at(root, settings)
    job = new_job(process_group, settings)
    preemption_handler = None
    if preemption is not None:
        preemption_handler = PreemptionHandler(job, Signals(preemption.signals, job.clock), preemption.grace_seconds)
    references = References(settings.allowed_roots)
    return Run(store, job, references, policies, observers, preemption_handler)


@cache
def writers() -> tuple[Writer, ...]:
    """Return other systems' layouts that are written."""
    from holdfast.foreign.dcp.writer import DcpWriter
    from holdfast.foreign.huggingface.safetensors_writer import SafetensorsWriter
    from holdfast.foreign.torch.writer import TorchWriter

    return SafetensorsWriter(), TorchWriter(), DcpWriter()


HOLDFAST = "holdfast"
"""What our own checkpoints are called among formats."""


def export_again(source: object, destination: object, settings: Settings, observer: Observer | None) -> ExportReport:
    """Save a checkpoint once more, as one of our own; errors as `offline.imports.copy.exported`."""
    store = store_at(destination, settings)
    checkpoint = checkpoint_at(source, settings)
    if isinstance(store, LocalStore):
        LocalDestination(store.url.removeprefix("file://")).require_outside(checkpoint.url)
    # What is exported is made of the files that the report of it lists, and no others.
    job = Job(AloneComm(), clock(), replace(settings, reports=False))
    try:
        return exported(checkpoint, store, job, observer)
    finally:
        job.close()


def export_of(
    source: object, destination: object, to: object, options: ExportOptions, settings: Settings
) -> tuple[Export, LocalDestination]:
    """Return an export, laid out, and the destination it is on its way to.

    Raises:
        InvalidError: There is no such format, or it cannot hold what the checkpoint does, or a path is none.
        CheckpointError: The checkpoint cannot be read.
    """
    writer = next((each for each in writers() if each.name == to), None)
    if writer is None:
        raise InvalidError(f"to={to!r}; expected one of {', '.join(each.name for each in writers())}, {HOLDFAST}")
    store = store_at(destination, settings)
    if not isinstance(store, LocalStore):
        raise InvalidError(f"{store.url}: export writes files; expected a path of a file system")
    there = LocalDestination(store.url.removeprefix("file://"), file_mode=settings.file_mode)
    checkpoint = checkpoint_at(source, settings)
    there.require_outside(checkpoint.url)
    return Export(checkpoint, there, writer, options, clock()), there


def export_crew(source: object, destination: object, to: str, options: ExportOptions, settings: Settings) -> WorkerPool:
    """Return who carries out the shares of an export in processes of their own; arguments as `export_of`.

    Raises:
        InvalidError: Another process could not see the source.
    """
    if isinstance(store_at(source, settings), MemoryStore):
        raise InvalidError(f"{source}: lies in the memory of this process; expected workers=1")
    request: dict[str, object] = {
        "source": os.path.abspath(str(source).removeprefix("file://")),
        "destination": os.path.abspath(str(destination).removeprefix("file://")),
        "to": to,
        "options": asdict(options),
        "settings": asdict(settings),
    }
    return lambda shares, told: run_workers(_started_worker, request, shares, told)


_WORKER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from holdfast.wiring import export_worker; sys.exit(export_worker())"
)


def _started_worker() -> subprocess.Popen[str]:
    """Start a process that runs `export_worker`; not interrupted by the terminal, but gone when we are."""
    return subprocess.Popen(
        [sys.executable, "-c", _WORKER, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def export_worker() -> int:
    """Carry out the share of an export that standard input tells of; return an exit status."""
    logging.getLogger("holdfast").setLevel(logging.ERROR)  # Whoever asked has said what is to be said.

    def told(request: dict[str, Any]) -> Export:
        # JSON has lists where settings have tuples.
        chosen: dict[str, Any] = {
            name: tuple(each) if isinstance(each, list) else each for name, each in request["settings"].items()
        }
        settings = Settings(**chosen)
        options = ExportOptions(**request["options"])
        return export_of(request["source"], request["destination"], request["to"], options, settings)[0]

    return worker_main(sys.stdin.readline(), told)


def comm_of(process_group: ProcessGroup) -> Comm:
    """Return the ranks a call is made by.

    Args:
        process_group: None for the default group (or one process, if torch.distributed is not initialised),
            False for this process alone, or a group.
    Raises:
        InvalidError: It is none of these.
    """
    try:
        from holdfast.frameworks.torch import comm
    except ImportError as error:
        raise InvalidError(
            "saving and loading states needs PyTorch, which is not installed: pip install 'holdfast[torch]'. "
            "open_checkpoint, ls, inspect and verify work without it"
        ) from error
    return comm.comm_of(process_group)


def framework_of(comm: Comm) -> Framework:
    """Return the framework whose objects a state is made of."""
    from holdfast.frameworks.torch.comm import ProcessGroupComm, SoloComm
    from holdfast.frameworks.torch.framework import TorchFramework
    from holdfast.frameworks.torch.held import Ranks

    assert isinstance(comm, ProcessGroupComm | SoloComm)
    return TorchFramework(Ranks(comm.rank, comm.world_size, comm.rank_of_global))


def new_job(process_group: ProcessGroup, settings: Settings) -> Job:
    """Return a job of its own over a group; a collective of its ranks."""
    comm = comm_of(process_group)
    return Job(comm, clock(), settings, framework_of(comm))


def loading_job(process_group: ProcessGroup, settings: Settings) -> Job:
    """Return a job over a group that loads and never saves; no collective."""
    comm = comm_of(process_group)
    return Job(comm, clock(), settings, framework_of(comm), saves=False)


def imported(
    source: object, root: object, step: int | None, copied: bool, settings: Settings, observer: Observer | None
) -> ImportReport:
    """Make a checkpoint a step of a run, by this process alone."""
    store = store_at(root, settings)
    job = Job(AloneComm(), clock(), settings)
    try:
        return import_step(checkpoint_at(source, settings), store, job, step, copied=copied, observer=observer)
    finally:
        job.close()


def repair_of(
    root: object, settings: Settings, observer: Observer | None, *, dry_run: bool, unfinished: bool
) -> Repair:
    """Return what repairs the steps of a run."""
    references = References(settings.allowed_roots)
    store = store_at(root, settings)
    return Repair(store, references, clock(), settings, dry_run=dry_run, unfinished=unfinished, observer=observer)


_jobs: weakref.WeakKeyDictionary[object, dict[Settings, Job]] = weakref.WeakKeyDictionary()


class _Alone:
    """Stands for the group of one process."""


_ALONE = _Alone()


def shared_job(process_group: ProcessGroup, settings: Settings) -> Job:
    """Return the job that saves by path share, made at a group's first such save; then a collective of its ranks."""
    comm = comm_of(process_group)
    from holdfast.frameworks.torch.comm import SoloComm, group_of

    key = _ALONE if isinstance(comm, SoloComm) else group_of(process_group)
    jobs = _jobs.setdefault(key, {})
    if settings not in jobs or jobs[settings].is_inherited:
        jobs[settings] = Job(comm, clock(), settings, framework_of(comm))
    return jobs[settings]


def checkpoint_at(path: object, settings: Settings) -> Checkpoint:
    """Return the checkpoint at a path."""
    return Checkpoint(location_at(path, settings), settings, _to_torch)


def _to_torch(array: object, dtype: str) -> object:
    """Return a numpy array as a torch tensor of its true dtype."""
    try:
        from holdfast.frameworks.torch.tensors import tensor_of
    except ImportError as error:
        raise InvalidError("framework='torch' needs PyTorch: pip install 'holdfast[torch]'") from error
    return tensor_of(array, dtype)


def json_lines(path: object) -> Observer:
    """Return an observer that appends lines of JSON to a file."""
    from holdfast.telemetry.sinks.jsonl import JsonLines

    return JsonLines(path)


def prometheus_metrics(port: object, address: str, registry: object) -> Observer:
    """Return an observer that keeps metrics in a registry of Prometheus, and serve them if there is a port.

    Raises:
        InvalidError: prometheus-client is not installed, or the port or registry is none.
        UnavailableError: The port cannot be had.
    """
    try:
        from holdfast.telemetry.sinks.prometheus import observer_in, serve
    except ImportError as error:
        raise InvalidError(
            "observers.prometheus needs prometheus-client, which is not installed: pip install 'holdfast[metrics]'"
        ) from error
    observer = observer_in(registry)
    if port is not None:
        serve(port, address, registry)
    return observer


def terminal_progress() -> Observer:
    """Return an observer that draws bars on stderr.

    Raises:
        InvalidError: rich is not installed.
    """
    try:
        from holdfast.telemetry.sinks.progress_bar import on_stderr
    except ImportError as error:
        raise InvalidError(
            "observers.progress needs rich, which is not installed: pip install 'holdfast[cli]'"
        ) from error
    return on_stderr()
