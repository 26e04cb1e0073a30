"""The node as its leading rank sees the node: folder, agent, and the lock that shows the job to the agent."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast._face.peers.nodes import (
    peer_at,
    read_secret,
    write_secret,
)
from holdfast._face.peers.statement import StatedNode, make_private
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import Clock
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, UnavailableError
from holdfast.stored.peers.roster import Member, Roster, read_roster, write_roster
from holdfast.training.runs.tiers.agent import AgentStarter
from holdfast.training.runs.tiers.agent_files import (
    LOG_FILE,
    SERVING_FILE,
    has_job_lock,
    hold_job_lock,
    is_agent_running,
    read_serving,
)

_AGENT_SECONDS, _POLL_SECONDS = 60.0, 0.02


class Served(msgspec.Struct):
    """A node whose agent serves."""

    member: Member
    earlier: Roster | None
    """The newest roster of an earlier job."""


class OwnNode:
    """The node, on the rank that leads the node."""

    def __init__(
        self,
        folder: LocalStore,
        own: StatedNode,
        run: str,
        secret: bytes,
        command: Callable[[int], Sequence[str]],
        clock: Clock,
    ) -> None:
        """Touch nothing yet.

        Args:
            folder: The folder of the node.
            own: The statement of the rank.
            run: The root of the run.
            secret: The secret of the run.
            command: Returns the command of the agent, by port.
            clock: Measures how long the agent takes.
        """
        self._folder, self._own, self._run, self._secret = folder, own, run, secret
        self._command, self._clock = command, clock
        self._lock: int | None = None
        self._roster: Roster | None = None
        self._member = Member(own.node, own.domain, own.address, 0)

    def serve(self, *, tells: bool) -> bytes:
        """Have the agent serve the folder; return the node, and the roster of the earlier job if wanted.

        Raises:
            ConflictError: Another job has the folder open. Its agent and its secret stay.
        """
        if has_job_lock(self._folder.url):
            raise ConflictError(
                f"node {self._own.node}: a living process has a manager over {self._folder.url}; expected one job for "
                "each folder. Nothing was touched. End that job or close its manager. To read beside a job: "
                "holdfast.load(root)"
            )
        self._lock = hold_job_lock(self._folder.url)
        write_secret(self._folder.url, self._secret)
        self._member = msgspec.structs.replace(self._member, port=_port_of_environment())
        self._member = _await_agent(self._folder, self._member, self._run, self._secret, self._command, self._clock)
        earlier = None
        with suppress(CorruptError):
            earlier = read_roster(self._folder) if tells else None
        return msgspec.json.encode(Served(self._member, earlier))

    def join(self, roster: Roster) -> bytes:
        """Put the roster into the folder, and refuse a node that cannot reach its group: at once, not at a loss.

        Raises:
            UnavailableError: It cannot.
        """
        self._roster = roster
        write_roster(self._folder, roster)
        own_group = roster.group_of[self._own.node]
        for member in roster.members:
            if member.name in own_group or member.name in roster.grouping.keepers:
                try:
                    peer_at(member, roster.run, self._secret).size(SERVING_FILE)
                except CheckpointError as error:
                    raise UnavailableError(self._unreached(member, error)) from error
        self._agent = peer_at(self._member, self._run, self._secret)
        self._starter = AgentStarter(self._folder.url, self._command(self._member.port), self._clock)
        return b""

    def _unreached(self, member: Member, error: CheckpointError) -> str:
        if member.name == self._own.node:
            return f"node {member.name}: its own agent has ended: {error}. Look at {self._folder.url}/{LOG_FILE}"
        return (
            f"node {self._own.node} does not reach node {member.name} at {member.host}:{member.port}: {error}. "
            "Expected an answer. Let nodes reach each other's ports, or set HOLDFAST_PORT and HOLDFAST_ADDRESS"
        )

    def protect(
        self, bytes_per_second: float | None, attempt: str, packs: dict[str, dict[str, int]], seconds: float
    ) -> None:
        """Have the agent make parity of an attempt."""
        self._agent.protect(attempt, packs, bytes_per_second, seconds)

    def require_agent(self) -> None:
        """Start a dead agent again; also in a folder that somebody has removed meanwhile."""
        if self._roster is not None and read_secret(self._folder.url) != self._secret:
            make_private(self._folder.url)
            self.release()
            self._lock = hold_job_lock(self._folder.url)
            write_secret(self._folder.url, self._secret)
            write_roster(self._folder, self._roster)
        self._starter.require()

    def forget_former(self) -> None:
        """Name the nodes of the job alone."""
        assert self._roster is not None, "the node has joined"
        self._roster = msgspec.structs.replace(self._roster, former=())
        write_roster(self._folder, self._roster)

    def release(self) -> None:
        """Show the agent that the job has ended."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _port_of_environment() -> int:
    text = os.environ.get("HOLDFAST_PORT", "0")
    if not text.isdecimal() or int(text) > 65535:
        raise InvalidError(f"HOLDFAST_PORT={text!r}: expected a port, 1 to 65535, or nothing for a free one")
    return int(text)


def _await_agent(
    folder: LocalStore,
    wanted: Member,
    run: str,
    secret: bytes,
    command: Callable[[int], Sequence[str]],
    clock: Clock,
) -> Member:
    """Return the node with the port of its agent, which has proven to know the secret; start the agent if need be."""
    starter = AgentStarter(folder.url, command(wanted.port), clock)
    deadline, has_started = clock.monotonic_seconds() + _AGENT_SECONDS, False
    while clock.monotonic_seconds() < deadline:
        serving = read_serving(folder.url)
        if not is_agent_running(folder.url):
            if has_started and serving is not None and serving.error:
                raise InvalidError(f"node {wanted.name}: {serving.error}")
            if not has_started and serving is not None:
                Path(folder.url, SERVING_FILE).unlink(missing_ok=True)
            starter.require()
            has_started = True
        elif serving is not None and not serving.error:
            member = msgspec.structs.replace(wanted, port=serving.port)
            try:
                if (serving.host, wanted.port or serving.port) != (wanted.host, serving.port):
                    raise InvalidError("the agent listens elsewhere")
                peer_at(member, run, secret).size(SERVING_FILE)
                return member
            except InvalidError as error:  # Of another version, run, secret or address: an earlier job has left it.
                _kill_agent(serving.pid, folder.url, error)
            except UnavailableError:
                pass
        clock.sleep(_POLL_SECONDS)
    raise UnavailableError(
        f"node {wanted.name}: no agent answers at {wanted.host} within {_AGENT_SECONDS:.0f} s; expected one. Look at "
        f"{folder.url}/{LOG_FILE}"
    )


def _kill_agent(pid: int, folder: str, error: InvalidError) -> None:
    """Kill the agent of a folder.

    Raises:
        InvalidError: The number is of another process, as where another container runs the agent.
    """
    try:
        if os.fsencode(folder) not in Path(f"/proc/{pid}/cmdline").read_bytes():
            raise InvalidError(
                f"{folder}: an agent that this process cannot end serves the folder: {error}. Expected an agent of "
                "this run. End it where it runs, as in another container, or choose another folder"
            )
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return  # The agent has ended.
