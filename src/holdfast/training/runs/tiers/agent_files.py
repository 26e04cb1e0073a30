"""The files by which an agent, its job and people meet in the folder of a near tier."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Literal

from holdfast.base.clock import Clock
from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Holder
from holdfast.core.format.names import PARITY_FOLDER, step_of_folder
from holdfast.errors import CheckpointError, ConflictError, first_three
from holdfast.stored.leases.process import can_be_seen, is_gone, is_this_process, this_process

logger = logging.getLogger(__name__)

LOCK_FILE, STATUS_FILE, LOG_FILE, JOB_FILE = "agent.lock", "agent.json", "agent.log", "job.json"
SERVING_FILE, JOB_LOCK_FILE = "serving.json", "job.lock"
"""Names in the folder of the near tier. The process that holds the lock of the first is the agent."""

_JOB_BYTES_MAX = 1 << 16
_LOCK_TRIES, _LOCK_SECONDS = 20, 0.05

State = Literal["watching", "orphaned", "draining", "lingering", "ended"]


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """What an agent last wrote about itself."""

    near: str
    """The near tier."""

    root: str
    """The root."""

    pid: int
    """The process."""

    state: State
    """Its state."""

    since_unix_seconds: float
    """When the state began."""

    waiting: tuple[int, ...] = ()
    """Steps that the root lacks, as far as the agent knows."""

    error: str = ""
    """Why the root could not be read, or the last drain failed; empty if neither."""

    seconds: float | None = None
    """For how long the state lasts unless a job comes; None without a limit."""

    is_running: bool = False
    """Whether the process runs; found by the reader."""


@dataclass(frozen=True, slots=True)
class NodeWatch:
    """The place from which an agent watches: a node of peers; without peers the near tier itself."""

    folder: Store
    """The folder that has the files of the agent."""

    is_current: Callable[[], bool] = lambda: True
    """Whether the near tier is still made of the same nodes. If not, the watch ends."""

    is_job_here: Callable[[], bool] = lambda: False
    """Whether a job certainly lives on the node."""

    polls_every: int = 1
    """How much more seldom than one agent alone this one looks."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Where the agent of a node of peers listens."""

    pid: int
    """The process."""

    host: str = ""
    """Its address."""

    port: int = 0
    """Its port."""

    error: str = ""
    """Why it could not listen; empty if it does."""


def read_serving(folder: str) -> Serving | None:
    """Return where the last agent of a node listens; None if there was none."""
    with suppress(OSError, ValueError, TypeError), open(os.path.join(folder, SERVING_FILE), encoding="utf-8") as file:
        return Serving(**json.load(file))
    return None


def note_job(near: Store, clock: Clock, lease_seconds: float) -> str:
    """Tell an agent that a job has come, from the process of rank 0; return its nonce, empty beside a living job."""
    if has_other_job(near):
        return ""
    holder = this_process(clock, lease_seconds)
    near.put(JOB_FILE, json.dumps(asdict(holder)).encode(), durable=False)
    return holder.nonce


def forget_job(near: Store, nonce: str) -> None:
    """Tell an agent that the job of a nonce has ended."""
    with suppress(CheckpointError, ValueError, TypeError):
        if job_at(near).nonce == nonce:
            near.delete([JOB_FILE])


def has_other_job(near: Store) -> bool:
    """Return whether another process that lives has a manager of the run."""
    with suppress(CheckpointError, ValueError, TypeError):
        holder = job_at(near)
        return can_be_seen(holder) and not is_gone(holder) and not is_this_process(holder)
    return False


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node of peers."""

    node: str
    """Its name."""

    domain: str
    """Its failure domain."""

    group: int
    """Number of its group; -1 of a node of an earlier job."""

    keeper: bool
    """Whether the node holds manifests."""

    address: str
    """Address and port of its agent."""

    state: str
    """State of its agent; `silent` if the agent does not answer."""

    error: str
    """Why the agent does not answer, or its last error; empty if neither."""

    packs_bytes: int = 0
    """Bytes of packs there."""

    parity_bytes: int = 0
    """Bytes of parity there, for other nodes of the group."""


def has_job_file(near: Store) -> bool:
    """Return whether a job has come to a near tier, and has not ended; its process may be dead."""
    with suppress(CheckpointError):
        return near.size(JOB_FILE) > 0
    return False


def job_at(near: Store) -> Holder:
    """Return the process of the last manager; raises `MissingError`, or `ValueError` and `TypeError` of other bytes."""
    return Holder(**json.loads(near.get(JOB_FILE, _JOB_BYTES_MAX)))


def leave_node(folder: Store, lacking: Sequence[int] | None) -> None:
    """Remove the packs and parity of a node of peers if the root lacks no step: other agents may have ended before.

    Args:
        folder: The folder of the node.
        lacking: Steps that the root lacks; None if that is unknown.
    """
    keys = [entry.key for entry in folder.list("")]
    held = [key for key in keys if key.startswith(PARITY_FOLDER) or step_of_folder(key.partition("/")[0]) is not None]
    if held and lacking == ():
        folder.delete(held)
    elif held:
        steps = "any step" if lacking is None else f"steps [{first_three(lacking)}]"
        logger.warning("%s: keeps %d files: the root may lack %s", folder.url, len(held), steps)


@contextmanager
def agent_lock(near: str) -> Iterator[None]:
    """Be the agent of a near tier for a block.

    Raises:
        ConflictError: Another process is the agent.
    """
    path = os.path.join(near, LOCK_FILE)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        for _ in range(_LOCK_TRIES):  # A job that looks for an agent holds the lock for a moment.
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_LOCK_SECONDS)
        else:
            raise ConflictError(f"{near}: another agent runs; expected one. Ask for it: holdfast agent {near} --status")
        yield
    finally:
        os.close(fd)


def hold_job_lock(folder: str) -> int:
    """Show the agent of a node that a job lives there, until the descriptor is closed or the process is dead.

    Several processes may. The agent of a node cannot see the process in `job.json`, which is on the host of rank 0.
    """
    fd = os.open(os.path.join(folder, JOB_LOCK_FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)  # Waits for an agent that looks: a moment.
    return fd


def has_job_lock(folder: str) -> bool:
    """Return whether a process of a job holds the lock of a node."""
    return _is_locked(os.path.join(folder, JOB_LOCK_FILE))


def is_agent_running(near: str) -> bool:
    """Return whether a process is the agent of a near tier."""
    return _is_locked(os.path.join(near, LOCK_FILE))


def _is_locked(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def read_status(near: str) -> AgentStatus | None:
    """Return the last status of the agent of a near tier; None if there was none."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        with open(os.path.join(near, STATUS_FILE), encoding="utf-8") as file:
            fields = json.load(file)
        fields |= {"waiting": tuple(fields["waiting"]), "is_running": is_agent_running(near)}
        return AgentStatus(**fields)
    return None
