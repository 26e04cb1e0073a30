"""Chooses and makes the implementations for the public functions: stores, jobs, formats, checkpoints, exports."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from functools import cache
from types import MappingProxyType

from holdfast._face.foreign_paths import foreign_at, foreign_in, names_object
from holdfast._face.near_folder import near_folder_at
from holdfast._face.own_store import is_store, require_store
from holdfast.backends.alone import AloneComm
from holdfast.backends.stores.foreign import References
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.memory import MemoryStore
from holdfast.backends.stores.objects.address import SCHEMES
from holdfast.base.clock import SystemClock
from holdfast.base.layouts.layout import Layouts, layouts_of
from holdfast.base.ports.codec import Codec, Codecs
from holdfast.base.ports.comm import Comm
from holdfast.base.ports.gradients import RecordingFramework
from holdfast.base.ports.store import Store
from holdfast.base.types.values import FrameworkValue
from holdfast.core.format.names import MANIFEST_FILE, RUN_FILE, is_superseded_name, step_of_folder
from holdfast.errors import CheckpointError, CorruptError, InvalidError, MissingError
from holdfast.policies import PEERS_SCHEME
from holdfast.settings import Settings
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.repository.catalog import exists, read_run_id, require_root, root_of_near
from holdfast.stored.repository.near_tier import read_near
from holdfast.stored.repository.two_roots import TwoRoots
from holdfast.training.coordination.absent_ranks import CallWatch
from holdfast.training.coordination.job import Job
from holdfast.training.loading.named_step import finder_of
from holdfast.training.loading.resolve import location_named

logger = logging.getLogger(__name__)

Path = str | os.PathLike[str] | Store
ProcessGroup = object
"""None, False, or a `torch.distributed.ProcessGroup`."""

DEFAULT_SETTINGS = Settings()


def store_at(path: object, settings: Settings) -> Store:
    """Return the store at a path or URL; a store of the user as it is.

    Raises:
        InvalidError: It is not a path, its scheme is not supported, or the store lacks a method.
    """
    if is_store(path):
        return require_store(path)
    if not isinstance(path, str | os.PathLike):
        hint = " The arguments are swapped: the path comes first" if isinstance(path, dict) else ""
        raise InvalidError(
            f"path is {type(path).__name__}; expected a folder as str or Path, or a holdfast.Store.{hint}"
        )
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise InvalidError(f"path={text!r}; expected a folder as str or Path")
    scheme, separator, rest = text.partition("://")
    if not separator:
        # Many a config file says ~, and no shell expands it there.
        return local_at(os.path.expanduser(text), settings)
    if scheme == "file":
        return local_at(rest, settings)
    if scheme == "memory" and rest:
        return MemoryStore(rest)
    if scheme in SCHEMES:
        # Imported at the first such URL: a run on disks does without.
        from holdfast.backends.stores.objects.store import ObjectStore
        from holdfast.backends.stores.wrappers.retrying import RetryingStore

        return RetryingStore(ObjectStore(text, settings=settings), settings)
    if scheme == "memory":
        raise InvalidError("path: memory:// has no name; expected memory://NAME")
    # Any other name is one of fsspec, or a mistake that this says.
    from holdfast.backends.stores.fsspec.store import REQUESTS_IN_FLIGHT_MAX, FileSystemStore
    from holdfast.backends.stores.wrappers.retrying import RetryingStore

    return RetryingStore(
        FileSystemStore(text, settings=settings), settings, requests_in_flight_max=REQUESTS_IN_FLIGHT_MAX
    )


def run_of(root: Store, settings: Settings, near: str | None = None, *, writes: bool = False) -> Store:
    """Return the run at a root: with the near tier, if the caller names one, or this host has the one of the record.

    A caller that holds the writer lease without the near tier fences the steps that only the near tier has.

    Raises:
        InvalidError: The caller names another folder; or the root is a near tier itself, and the caller writes.
    """
    record = None
    with suppress(CorruptError):
        record = read_near(root)
    if writes:
        require_root(root)
    path = near or ("" if record is None else record.url)
    if not path:
        return root
    try:
        store = near_store_at(path, settings)
        if root_of_near(store) == root.url and read_run_id(store) == read_run_id(root):
            return TwoRoots(store, root)
    except CheckpointError:
        if near is not None:
            raise
    if near is not None:
        raise InvalidError(
            f"{near}: is not the near tier of {root.url}; expected the folder that CheckpointManager got as near"
        )
    logger.warning(
        "%s: the near tier %s on host %s is not seen here; steps that the root lacks are not listed, and count no more "
        "once this host has written to the run",
        root.url,
        path,
        "" if record is None else record.host,
    )
    return root


def two_roots(near: str, root: Path | None, settings: Settings) -> TwoRoots:
    """Return the near tier at a folder, and the root: as the caller names it, or as the near tier does.

    Raises:
        MissingError: The folder is no near tier, and the caller names no root.
    """
    store = near_store_at(near, settings)
    root = root_of_near(store) if root is None else root
    if not root:
        raise MissingError(f"{near}: no near tier of a run; expected a folder whose holdfast.json names a root")
    return TwoRoots(store, store_at(root, settings))


def local_at(path: str, settings: Settings) -> LocalStore:
    return LocalStore(path, settings=settings, mode_from=(RUN_FILE, MANIFEST_FILE))


def near_store_at(near: str, settings: Settings) -> Store:
    """Return a near tier: a folder, or that of all nodes; raises `MissingError` on a host without a node."""
    if not near.startswith(PEERS_SCHEME):
        return near_folder_at(near, settings)
    from holdfast._face.peers.nodes import seen_from_here

    return seen_from_here(near, settings)


def for_copy_of(source: object, settings: Settings) -> Settings:
    """Return the settings for a copy or an export: no user may read it who may not read the source.

    Args:
        source: The path, URL or store of a run or checkpoint.
        settings: Of the caller. If they name permission bits, these count.
    """
    is_url = isinstance(source, str) and "://" in source and not source.startswith("file://")
    # A URL has no permission bits. And the URL of a user's store opens nothing.
    if is_url or settings.file_mode is not None or not isinstance(store := store_at(source, settings), LocalStore):
        return settings
    return replace(settings, file_mode=store.found_mode())


def copy_store_at(path: object, source: object, settings: Settings) -> Store:
    """Return the store at a path for a copy of a run or checkpoint; a run that is there already keeps its bits."""
    store = store_at(path, settings)
    is_new = isinstance(store, LocalStore) and store.found_mode() is None
    return store_at(path, for_copy_of(source, settings)) if is_new else store


def parent_of(store: Store, settings: Settings) -> tuple[Store, str] | None:
    """Return the store of the folder above a store, and the name of the store in it; None if it has none above."""
    if isinstance(store, LocalStore):
        parent, name = os.path.split(os.path.realpath(store.url))
        return local_at(parent, settings), name
    scheme, _, rest = store.url.partition("://")
    above, slash, name = rest.rpartition("/")
    if not is_named_by_url(store) or not slash or not above:
        return None
    return store_at(f"{scheme}://{above}", settings), name


def is_named_by_url(store: Store) -> bool:
    """Return whether another process, or a later call, opens the same store by its URL.

    A store in the memory of this process is named by its object alone, and so is a store of the user.
    """
    if isinstance(store, LocalStore):
        return True
    from holdfast.backends.stores.wrappers.retrying import RetryingStore

    return isinstance(store, RetryingStore)


def require_apart(first: Store, second: Store) -> None:
    """Refuse two folders of which one is the other, or inside it.

    Raises:
        InvalidError: They are not apart.
    """
    if isinstance(first, LocalStore) == isinstance(second, LocalStore):
        is_local = isinstance(first, LocalStore)
        paths = [(os.path.realpath(store.url) if is_local else store.url) + "/" for store in (first, second)]
        if paths[0].startswith(paths[1]) or paths[1].startswith(paths[0]):
            raise InvalidError(f"{second.url}: is or contains {first.url}, or is inside it; expected a folder apart")


@cache
def codecs() -> Codecs:
    """Return the codecs by name, in the order in which they are tried.

    Imported when a chunk is to be coded or decoded: a plain save does without.
    """
    from holdfast.backends.codecs.dictionary import DictionaryCodec
    from holdfast.backends.codecs.planes import PlanesCodec
    from holdfast.backends.codecs.residual import ResidualCodec
    from holdfast.backends.codecs.sparse import SparseCodec
    from holdfast.backends.codecs.zstd import ZstdCodec

    known: tuple[Codec, ...] = (ResidualCodec(), SparseCodec(), DictionaryCodec(), PlanesCodec(), ZstdCodec())
    return MappingProxyType({codec.name: codec for codec in known})


def require_files(source: Store, run: Store) -> None:
    """Require a checkpoint and a run on file systems: a step refers to files there only.

    Raises:
        InvalidError: One of them is not.
    """
    for store in (source, run):
        if not isinstance(store, LocalStore | MemoryStore):
            raise InvalidError(
                f"{store.url}: a step refers to files between two paths of file systems only. Copy the bytes: --copy, "
                "copy=True"
            )


def location_at(path: object, settings: Settings) -> CheckpointLocation:
    """Return the location of one checkpoint to read: of Holdfast, or of another system.

    A step of a run that a newer timeline superseded is named by number and digest below the root: `ROOT/300@1f2e`.

    Raises:
        MissingError: No superseded step has this number and digest.
        InvalidError: It is not a path, or its scheme is not supported.
    """
    store = store_at(path, settings)
    url, is_local = store.url, isinstance(store, LocalStore)
    above = parent_of(store, settings) if not is_local and path is not store and names_object(str(path)) else None
    foreign = foreign_at(url) if is_local else foreign_in(*(above or (store, "")))
    is_name = path is not store and is_superseded_name(os.path.basename(url))
    if is_name and not (is_local and os.path.lexists(url)):
        return step_at(os.path.dirname(url), os.path.basename(url), settings)
    return CheckpointLocation(store, "", None, foreign, References(settings.allowed_roots), run_around(store, settings))


def run_around(store: Store, settings: Settings) -> Store | None:
    """Return the root of the run if a store is the folder of a step; None otherwise.

    A step may refer to packs of the steps beside it. Links are resolved: they may point to a step of a run.
    """
    above = parent_of(store, settings)
    return above[0] if above is not None and step_of_folder(above[1]) is not None else None


def saved_at(path: object, settings: Settings, *, overwrite: bool) -> CheckpointLocation:
    """Return the location of one checkpoint to save.

    Args:
        path: The path.
        settings: Permission bits of files.
        overwrite: Whether it may be replaced. The location then has what else is there: a file, or a step of a run.
    Raises:
        InvalidError: It is not a path, or its scheme is not supported.
    """
    store = store_at(path, settings)
    if not overwrite:
        return CheckpointLocation(store, "", None)
    foreign = foreign_at(store.url) if isinstance(store, LocalStore) else None
    return CheckpointLocation(store, "", None, foreign, root=run_around(store, settings))


def home_at(path: object, settings: Settings) -> CheckpointLocation:
    """Return the root of a run, to read its steps.

    Raises:
        InvalidError: It is not a path, or its scheme is not supported.
    """
    store = store_at(path, settings)
    return CheckpointLocation(store, "", None, references=References(settings.allowed_roots), root=store)


def step_at(root: object, step: object, settings: Settings) -> CheckpointLocation:
    """Return the location of one step of a run, for a process that reads alone.

    Args:
        root: The root of the run.
        step: Its number, number and digest, tag, or `latest`: the newest one that is not damaged.
        settings: How to read.
    Raises:
        InvalidError: The path is one checkpoint, or the name can be that of no step.
        MissingError: There is no such step or tag, or no run.
        CorruptError: `latest`, and every step is damaged.
    """
    return location_named(home_at(root, settings), finder_of(step), SystemClock())


def step_path(location: CheckpointLocation) -> str:
    """Return the path by which the location of one step of a run is opened.

    Raises:
        InvalidError: It is in the memory of this process, or in a store of the user.
    """
    if not is_named_by_url(location.store):
        raise InvalidError(f"{location.store.url}: a step has a path of its own on a file or object store only")
    if location.moved_manifest is None:
        return location.url
    return f"{location.store.url}/{location.step}@{location.digest}"


def repairable_at(path: object, settings: Settings) -> tuple[Store, int | None]:
    """Return the store to repair, and the step if the path is the folder of a step: the store is the root then.

    Raises:
        InvalidError: It is not a path, or its scheme is not supported.
    """
    store = store_at(path, settings)
    above = parent_of(store, settings)
    if above is not None:
        root, step = above[0], step_of_folder(above[1])
        if step is not None and exists(root, RUN_FILE):
            return root, step
    return store, None


def lone_job(settings: Settings) -> Job:
    """Return a job of this process alone that needs no torch."""
    return Job(AloneComm(), SystemClock(), settings, codecs=codecs())


def comm_of(process_group: ProcessGroup) -> Comm:
    """Return the `Comm` of a process group.

    Args:
        process_group: None for the default group (or one process, if torch.distributed is not initialised),
            False for this process alone, or a group.
    Raises:
        InvalidError: It is of another type, or PyTorch is not installed or of a version that cannot be used.
    """
    try:
        from holdfast.backends.torch import comm
    except ImportError as error:
        raise InvalidError(
            f"saving and loading states needs PyTorch, {_why_no_torch(error)}. "
            "open_checkpoint, ls, inspect and verify work without it"
        ) from error
    return comm.comm_of(process_group)


def require_group(process_group: ProcessGroup, comm: Comm) -> None:
    """Refuse to save as if this process were alone although it is one of several ranks.

    Args:
        process_group: As the caller passed it.
        comm: What `comm_of` returned for it.
    Raises:
        InvalidError: The message says how to mend it.
    """
    if process_group is None and comm.world_size == 1:
        from holdfast.backends.torch.comm import require_default_group_of_one

        require_default_group_of_one()


def framework_of(comm: Comm) -> RecordingFramework:
    """Return the framework of a job's states."""
    from holdfast.backends.torch.comm import ProcessGroupComm, SoloComm
    from holdfast.backends.torch.framework import TorchFramework
    from holdfast.backends.torch.local_shards import Ranks

    assert isinstance(comm, ProcessGroupComm | SoloComm)
    return TorchFramework(Ranks(comm.rank, comm.world_size, comm.rank_of_global))


def loading_job(process_group: ProcessGroup, settings: Settings) -> Job:
    """Return a job over a group that only loads; no collective."""
    comm = comm_of(process_group)
    return Job(comm, SystemClock(), settings, framework_of(comm), codecs=codecs(), saves=False)


def saving_job(process_group: ProcessGroup, settings: Settings, root: str) -> Job:
    """Return a new job over a group for the manager of a root; a collective of its ranks.

    Raises:
        InvalidError: This process is one of several ranks without a group.
    """
    comm = comm_of(process_group)
    require_group(process_group, comm)
    with CallWatch(comm, f"CheckpointManager({root})", "CheckpointManager(...)"):
        return _saving_job(comm, settings)


def _saving_job(comm: Comm, settings: Settings) -> Job:
    return Job(comm, SystemClock(), settings, framework_of(comm), codecs=codecs())


_JOBS_MAX = 4
"""Jobs kept for the saves by path of one group: one for each value of `Settings`, of those used last."""

_jobs: weakref.WeakKeyDictionary[object, OrderedDict[Settings, Job]] = weakref.WeakKeyDictionary()

_jobs_lock = threading.RLock()
"""Threads that save by path share one job. A signal handler that saves enters again, and the job that it made stays."""


def _forget_threads() -> None:
    """Do without what the lock of the parent says: a thread of it may have held the lock."""
    global _jobs_lock
    _jobs_lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_threads)


def shared_job(process_group: ProcessGroup, settings: Settings) -> Job:
    """Return the job that saves by path of a group and of equal settings share.

    A collective of its ranks at the first of them. Jobs of one group share connections and threads.

    Raises:
        InvalidError: This process is one of several ranks without a group.
    """
    comm = comm_of(process_group)
    require_group(process_group, comm)
    from holdfast.backends.torch.comm import SoloComm, group_of

    # A process alone has no group: the class of its comm is the key. A job refers to its group weakly, so the entry of
    # a group that is destroyed goes with it.
    key = SoloComm if isinstance(comm, SoloComm) else group_of(process_group)
    with _jobs_lock:
        jobs = _jobs.setdefault(key, OrderedDict())
        # A process that was forked has none of the threads.
        for inherited in [each for each, job in jobs.items() if job.is_inherited]:
            del jobs[inherited]
        job = jobs.get(settings)
        if job is None:
            living = next(iter(jobs.values()), None)
            with CallWatch(comm, "the first save by path with these settings", "save(path, state)"):
                made = _saving_job(comm, settings) if living is None else living.with_settings(settings)
            job = jobs.setdefault(settings, made)
        jobs.move_to_end(settings)
        # Every rank drops the same ones: each makes the same calls. A save in flight keeps its job until it ends.
        while len(jobs) > _JOBS_MAX:
            jobs.popitem(last=False)
        return job


def checkpoint_at(path: object, settings: Settings, step: object = None, layout: Layouts = None) -> Checkpoint:
    """Return the checkpoint at a path; with a step, that step of the run at the path. Layouts make its tensors."""
    layouts = layouts_of(layout)
    location = location_at(path, settings) if step is None else step_at(path, step, settings)
    return Checkpoint(location, settings, _to_torch, codecs=codecs(), layouts=layouts)


def _to_torch(array: object, dtype: str) -> object:
    """Return a torch tensor of a stored dtype from a numpy array of its bits."""
    try:
        from holdfast.backends.torch.containers import tensor_of
    except ImportError as error:
        raise InvalidError(f"framework='torch' needs PyTorch, {_why_no_torch(error)}") from error
    return tensor_of(array, dtype)


def built_by_torch(value: FrameworkValue) -> object:
    """Return the torch object of a neutral value.

    Raises:
        InvalidError: This torch has no such value, or PyTorch is not installed.
    """
    try:
        from holdfast.backends.torch.containers import put_together
    except ImportError as error:
        raise InvalidError(f"framework='torch' needs PyTorch, {_why_no_torch(error)}") from error
    return put_together(value, lambda leaf: leaf)


def _why_no_torch(error: ImportError) -> str:
    """Return what a failed import says of torch, and what to do: it is absent, or it has moved what Holdfast reads."""
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return "which is not installed: pip install 'holdfast[torch]'"
    return f"and what is installed cannot be used ({error}); for a tested version: pip install 'holdfast[torch]'"
