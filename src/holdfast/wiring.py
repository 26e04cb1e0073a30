"""The only file that chooses and builds implementations."""

from __future__ import annotations

import os
import weakref

from holdfast.errors import InvalidError
from holdfast.formats.dcp.format import DcpFormat
from holdfast.formats.deepspeed.format import DeepSpeedFormat
from holdfast.formats.huggingface_bin import HuggingFaceBinFormat
from holdfast.formats.safetensors import SafetensorsFormat
from holdfast.formats.torchsave import TorchSaveFormat
from holdfast.manager.checkpoint import Checkpoint
from holdfast.manager.job import Job
from holdfast.manager.place import Place
from holdfast.ports.clock import Clock, SystemClock
from holdfast.ports.comm import Comm
from holdfast.ports.format import Format
from holdfast.ports.framework import Framework
from holdfast.ports.store import Store
from holdfast.settings import Settings
from holdfast.spec.listing import Listing
from holdfast.stores.foreign import ForeignFiles
from holdfast.stores.local import LocalStore
from holdfast.stores.memory import MemoryStore

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


FORMATS: tuple[Format, ...] = (
    DcpFormat(),
    DeepSpeedFormat(),
    SafetensorsFormat(),
    HuggingFaceBinFormat(),
    TorchSaveFormat(),
)
"""Other systems' checkpoints that are read in place; the first that knows one lists it."""


class _Foreign:
    """What lies at a path of a file system and Holdfast did not write."""

    def __init__(self, path: str) -> None:
        self.name = os.path.basename(path) if os.path.isfile(path) else ""
        self.files = ForeignFiles(os.path.dirname(os.path.abspath(path)) if self.name else path)

    def listing(self) -> Listing | None:
        """Return what it holds; None if no format knows it."""
        known = next((each for each in FORMATS if each.recognises(self.files, self.name)), None)
        return None if known is None else known.listing(self.files, self.name)


def place_at(path: object, settings: Settings) -> Place:
    """Return the place of one checkpoint to be read: of Holdfast's, or of another system's.

    Raises:
        InvalidError: It is no path, or of a scheme not supported.
    """
    store = store_at(path, settings)
    if not isinstance(store, LocalStore):
        return Place(store, "", None)
    return Place(store, "", None, _Foreign(store.url.removeprefix("file://")))


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
    return Job(comm_of(process_group), clock(), settings)


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
        jobs[settings] = Job(comm, clock(), settings)
    return jobs[settings]


def checkpoint_at(path: object, settings: Settings) -> Checkpoint:
    """Return the checkpoint at a path."""
    return Checkpoint(place_at(path, settings), settings, _to_torch)


def _to_torch(array: object, dtype: str) -> object:
    """Return a numpy array as a torch tensor of its true dtype."""
    try:
        from holdfast.frameworks.torch.tensors import tensor_of
    except ImportError as error:
        raise InvalidError("framework='torch' needs PyTorch: pip install 'holdfast[torch]'") from error
    return tensor_of(array, dtype)
