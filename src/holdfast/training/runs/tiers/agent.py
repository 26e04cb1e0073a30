"""The agent of a near tier: a process that brings the newest step to the root if a killed job does not come back.

A job drains by itself, so the agent only watches the writer lease, as the near tier shows it. States; each is in
`agent.json` of the near tier:

    watching  -> orphaned    the job was killed or has ended, and the root lacks steps
    watching  -> ended       the job has ended, and the root lacks nothing; or SIGTERM while a job lives
    watching  -> lingering   the same of a near tier in memory that was not emptied
    orphaned  -> watching    another job has taken the next epoch
    orphaned  -> draining    `orphan_seconds` have passed; at once after SIGTERM
    draining  -> lingering   the root has each due step and the newest one
    draining  -> orphaned    the root failed, and is asked again later; or a job came back meanwhile, and is seen next
    lingering -> watching    a job has taken the next epoch
    lingering -> ended       `linger_seconds` have passed; a near tier in memory is emptied, as a job does at its end
    orphaned  -> ended       the other nodes of peers do not answer
    any       -> ended       the near tier is gone, or was emptied

A job lives if the process that made its manager lives (`job.json` near, from the manager to its close), if a process of
the job on this node of peers lives (`job.lock` there), or if the lease is held: by a living process, or with a
heartbeat within the lease time where processes cannot be seen. A job that comes back during a drain finds the lease
free before its first save: the drain stops at the next bytes.

The agent has no part in a commit. Killed at any point, it leaves a drain that the next job, `holdfast drain` or another
agent goes on with.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace

from holdfast.base.clock import Clock
from holdfast.base.types.epoch import Holder
from holdfast.base.types.events import Event
from holdfast.core.format.names import RUN_FILE
from holdfast.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    InvalidError,
    MissingError,
    first_three,
)
from holdfast.stored.leases.process import can_be_seen, is_gone, is_same_process, is_this_process
from holdfast.stored.leases.seen import WriterWatch
from holdfast.stored.repository.catalog import read_run_id
from holdfast.training.runs.tiers.agent_files import (
    LOCK_FILE,
    LOG_FILE,
    STATUS_FILE,
    AgentStatus,
    NodeWatch,
    State,
    agent_lock,
    is_agent_running,
    job_at,
    leave_node,
    read_status,
)
from holdfast.training.runs.tiers.offline_drain import NearDrain

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 60.0
_POLLS_PER_ORPHAN = 20
_POLL_SECONDS_MIN, _POLL_SECONDS_MAX = 0.05, 1.0
_BEGIN_SECONDS = 20.0
"""After this time an agent that was started and has no lock is started again."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an agent waits."""

    orphan_seconds: float
    """Time without a job after which the agent drains."""

    linger_seconds: float
    """Time after the drain for which the near tier stays, so that a late job finds its steps near."""


class Agent:
    """The agent of one near tier. One thread runs; a handler of a signal calls `hurry`."""

    def __init__(
        self,
        drain: NearDrain,
        clock: Clock,
        lease_seconds: float,
        patience: Patience,
        *,
        is_memory: bool,
        node: NodeWatch | None = None,
    ) -> None:
        """Watch nothing yet.

        Args:
            drain: Drains both places without a job.
            clock: The time.
            lease_seconds: Longest time without a heartbeat of a job whose process cannot be seen from here.
            patience: How long to wait.
            is_memory: Whether the near tier is in memory, and is emptied at the end.
            node: Of a near tier of peers, the node of this agent.
        """
        self._drain = replace(drain, observer=self)
        self._clock, self._lease_seconds, self._patience = clock, lease_seconds, patience
        self._near, self._is_memory = drain.run.near, is_memory
        self._node = node or NodeWatch(self._near)
        self._folder = self._node.folder
        self.is_hurried = False  # No event: a handler that sets one may have interrupted its wait.
        """Whether a signal has asked for the end."""
        self._seen: tuple[str, float] = "", 0.0
        """The job in `job.json` whose process cannot be seen from here, and when that job was first seen."""
        self._known_at = clock.monotonic_seconds()
        """When the near tier last said whether a job lives."""
        self._is_silent = False
        """Whether the near tier did not say so since."""
        self._lacking: tuple[int, ...] | None = None
        """Steps that the root lacked when the near tier last said so, without a job since; None if that is unknown."""
        self._writers = WriterWatch(self._near, clock, lease_seconds)
        self._state: State = "watching"
        poll_seconds = min(patience.orphan_seconds / _POLLS_PER_ORPHAN, _POLL_SECONDS_MAX)
        self._poll_seconds = max(poll_seconds, _POLL_SECONDS_MIN) * self._node.polls_every

    def hurry(self) -> None:
        """End soon: drain at once if no job lives."""
        self.is_hurried = True

    def on_event(self, event: Event) -> None:
        """Stop a drain whose job has come back; called with the progress of the drain."""
        if self._has_manager():
            raise ConflictError(f"{self._near.url}: a job has come back, and drains by itself; this drain ends")

    def run(self) -> None:
        """Watch until the end.

        Raises:
            InvalidError: The root is of another run.
        """
        while self._is_there():
            if self._watched() or self._orphaned():
                break
        is_over = self._has_folder() and not self.is_hurried and not self._node.is_job_here()
        if is_over and self._is_memory and self._folder is not self._near:
            leave_node(self._folder, self._lacking)

    def _has_folder(self) -> bool:
        return os.path.exists(os.path.join(self._folder.url, LOCK_FILE)) and self._node.is_current()

    def _is_there(self) -> bool:
        # The folder may go or be emptied while the agent runs; nothing of it is made again.
        is_there = self._has_folder()
        try:
            return is_there and (self._near.size(RUN_FILE) > 0 or self._has_manager())
        except MissingError:
            if not is_there or self._has_manager():
                return is_there
            self._lacking = ()  # The near tier was emptied once the root had all.
            return False
        except CheckpointError:
            return is_there

    def _watched(self) -> bool:
        """Return once no job lives; True at the end of the agent."""
        self._enter("watching")
        try:
            error = self._drain.root_error()
        except InvalidError as other_run:
            self._enter("ended", error=str(other_run))
            raise
        if error:
            logger.warning("%s: a drain would fail: %s", self._near.url, error)
            self._enter("watching", error=error)
        while self._has_job():
            if self.is_hurried or not self._is_there():
                self._enter("ended")
                return True
            self._clock.sleep(self._poll_seconds)
        return False

    def _orphaned(self) -> bool:
        """Wait for a job, then drain, and wait again; True at the end of the agent, False once a job lives."""
        waiting = self._waiting()
        if waiting == () and self._has_released():  # By a job that has drained; of peers, also by another agent.
            if not self._is_memory:
                self._enter("ended")
                return True
            return self._lingered()
        self._enter("orphaned", waiting, seconds=self._patience.orphan_seconds)
        start = self._clock.monotonic_seconds()
        if self._job_within(self._patience.orphan_seconds):
            return False
        retry_seconds = max(min(_RETRY_SECONDS, self._patience.orphan_seconds), 1.0)
        while self._is_there() and not self._drained():
            if self.is_hurried or self._state == "ended":
                return True
            if self._job_within(retry_seconds):
                return False
            if self._is_left_alone(start):
                self._enter("ended", self._lacking, "the other nodes do not answer")
                return True
        return self._lingered()

    def _is_left_alone(self, start: float) -> bool:
        """Return whether the other nodes of peers have been silent for the whole patience after a moment."""
        silent_seconds = self._clock.monotonic_seconds() - max(self._known_at, start)
        is_over = silent_seconds > self._patience.orphan_seconds + self._patience.linger_seconds
        return self._is_silent and is_over and self._folder is not self._near

    def _lingered(self) -> bool:
        """Leave the near tier for a late job, then empty it in memory; True at the end of the agent."""
        if self._is_there():
            self._enter("lingering", seconds=self._patience.linger_seconds)
            if self._job_within(self._patience.linger_seconds):
                return False
            if self._is_memory and not self.is_hurried and not self._has_manager():
                self._empty()
        self._enter("ended")
        return True

    def _job_within(self, seconds: float) -> bool:
        """Return whether a job came within some seconds; False at once after SIGTERM."""
        start = self._clock.monotonic_seconds()
        while self._clock.monotonic_seconds() - start < seconds and self._is_there():
            if self._has_job():
                return True
            if self.is_hurried:
                return False
            self._clock.sleep(self._poll_seconds)
        return False

    def _drained(self) -> bool:
        self._enter("draining", self._waiting())
        try:
            report = self._drain.execute(self._lease_seconds, remove=False)
        except CheckpointError as error:
            # The same again, however often: a damaged step, or a near tier that is gone.
            is_final = isinstance(error, CorruptError | MissingError)
            logger.warning("%s: nothing more is drained%s: %s", self._near.url, "" if is_final else " for now", error)
            self._enter("ended" if is_final else "orphaned", self._waiting(), str(error))
            return False
        steps = f"steps [{first_three(report.steps)}] are in the root" if report.steps else "the root lacks no step"
        logger.info("%s: no job came back; %s", self._near.url, steps)
        self._lacking = ()
        return True

    def _empty(self) -> None:
        try:
            self._drain.execute(self._lease_seconds, remove=True)
        except CheckpointError as error:
            logger.warning("%s: the near tier stays: %s", self._near.url, error)

    def _waiting(self) -> tuple[int, ...] | None:
        """Return the steps that the root lacks; None if that is unknown."""
        with suppress(CheckpointError):
            self._lacking = self._drain.planned().steps if read_run_id(self._near) is not None else ()
            return self._lacking
        return None

    # -------------------------------------------------------------------------------------------------- the job

    def _has_job(self) -> bool:
        """Return whether a job lives. While the near tier does not answer, nothing is certain, and nothing is done; but
        not for longer than a job may be away.
        """
        now = self._clock.monotonic_seconds()
        try:
            has_job = self._has_manager() or self._has_lease()
        except CheckpointError as error:
            if not self._is_silent:
                logger.warning("%s: whether a job lives is unknown: %s", self._near.url, error)
            self._is_silent = True
            # Of peers, the agents of other nodes may have ended, or their nodes are lost.
            return now - self._known_at < self._patience.orphan_seconds
        self._known_at, self._is_silent = now, False
        if has_job:
            self._lacking = None
        return has_job

    def _has_manager(self) -> bool:
        if self._node.is_job_here():
            return True
        with suppress(MissingError, ValueError, TypeError):
            holder = job_at(self._near)
            if can_be_seen(holder):
                return not is_gone(holder)
            # Of another container or host: it has as long as an orphan until its first save takes the lease.
            now = self._clock.monotonic_seconds()
            if holder.nonce != self._seen[0]:
                self._seen = holder.nonce, now
            return now - self._seen[1] < self._patience.orphan_seconds
        return False

    def _has_lease(self) -> bool:
        writer = self._writers.look()
        if writer is None:
            return True  # The job has not saved yet.
        return writer.state == "holds" and (writer.holder is None or not self._is_drain(writer.holder))

    def _is_drain(self, holder: Holder) -> bool:
        """Return whether a lease is that of a drain: its own, whose root has failed since; or another agent's."""
        with suppress(MissingError, ValueError, TypeError):
            return is_this_process(holder) or not is_same_process(holder, job_at(self._near))
        return False

    def _has_released(self) -> bool:
        with suppress(CheckpointError):
            writer = self._writers.look()
            return writer is not None and writer.state == "released"
        return False

    def _enter(
        self, state: State, waiting: Sequence[int] | None = (), error: str = "", *, seconds: float | None = None
    ) -> None:
        self._state = state
        logger.info("%s: %s", self._near.url, state)
        root, now = self._drain.run.root.url, self._clock.unix_seconds()
        status = AgentStatus(self._folder.url, root, os.getpid(), state, now, tuple(waiting or ()), error, seconds)
        # A full near tier must not end the agent: it may be the reason why the job died.
        with suppress(CheckpointError):
            if os.path.exists(os.path.join(self._folder.url, LOCK_FILE)):
                self._folder.put(STATUS_FILE, json.dumps(asdict(status)).encode(), durable=False)


def run_agent(near: str, agent: Agent) -> None:
    """Run an agent in this process until its end; SIGTERM and SIGINT end it soon.

    Raises:
        ConflictError: Another process is the agent.
    """
    with agent_lock(near), hurried_by_signals(agent):
        agent.run()


@contextmanager
def hurried_by_signals(agent: Agent) -> Iterator[None]:
    """Let SIGTERM and SIGINT hurry an agent, for a block on the main thread."""
    with ExitStack() as ended:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                ended.callback(signal.signal, number, signal.signal(number, lambda *_: agent.hurry()))
        yield


class AgentStarter:
    """Starts the agent of a near tier from a job, and starts it again if it was killed. On rank 0."""

    def __init__(self, near: str, command: Sequence[str], clock: Clock) -> None:
        """Start nothing yet.

        Args:
            near: The folder.
            command: The command of the agent.
            clock: Measures how long an agent takes to begin.
        """
        self._near, self._command, self._clock = near, command, clock
        self._begun: float | None = None
        """When an agent was started that has not been seen yet."""

    def require(self) -> None:
        """Start the agent unless one runs; never waits for it. The near tier exists."""
        now = self._clock.monotonic_seconds()
        if is_agent_running(self._near):
            self._begun = None
        elif self._begun is None or now - self._begun > _BEGIN_SECONDS:
            self._begun = now
            self._start()

    def error(self) -> str:
        """Return why the agent that runs could not read the root, or drain; empty if it could."""
        status = read_status(self._near)
        return status.error if status is not None and status.is_running else ""

    def _start(self) -> None:
        log = os.open(os.path.join(self._near, LOG_FILE), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            # By a shell that ends at once, so the agent is no child that this process must await. A session of its own:
            # Ctrl-C in the terminal, and a launcher that ends its group, do not reach the agent.
            subprocess.run(
                ["/bin/sh", "-c", '"$@" &', "sh", *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                check=False,
            )
        finally:
            os.close(log)
