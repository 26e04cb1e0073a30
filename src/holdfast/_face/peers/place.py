"""Opens a near tier of peers: the ranks agree on roster and secret, and each node gets an agent that serves its folder.

Steps, on each rank; the ranks meet after the first and the second:

    stated    node, domain, host, and the secret and roster that the folder of the node has
    served    on the lowest rank of each node: folder and secret are there, and the agent answers with a proof
    joined    each rank has the roster and the store of all nodes; the lowest rank has put the roster into the folder
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import signal
import socket
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import msgspec

from holdfast._face.near_folder import near_folder_at
from holdfast._face.peers.nodes import (
    SECRET_BYTES,
    node_folder,
    peer_at,
    read_secret,
    store_of,
    write_secret,
)
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.peers.peer import Peer
from holdfast.base.clock import Clock
from holdfast.base.ports.store import Store
from holdfast.core.engine.child_python import command_of
from holdfast.core.engine.memory_limits import host_identity
from holdfast.core.plan.placement import RosterNode, grouping
from holdfast.errors import CheckpointError, CorruptError, InvalidError, UnavailableError, first_three
from holdfast.policies import Tier
from holdfast.settings import Settings
from holdfast.stored.peers.roster import Member, Roster, read_roster, write_roster
from holdfast.stored.peers.union import PeerStore
from holdfast.training.coordination.job import Job, error_text, raise_together
from holdfast.training.runs.tiers.agent import AgentStarter
from holdfast.training.runs.tiers.agent_files import LOG_FILE, SERVING_FILE, is_agent_running, read_serving
from holdfast.training.runs.tiers.protecting import PeerGroup

logger = logging.getLogger(__name__)

_AGENT_SECONDS, _POLL_SECONDS = 60.0, 0.02
_SECRET_FILE_BYTES = 1 << 16


class _Statement(msgspec.Struct):
    """What a rank says of its node."""

    node: str = ""
    domain: str = ""
    machine: str = ""
    """The host since its boot, as no other host says it."""

    torch_node: str = ""
    """The number of the node for torchrun; empty without torchrun."""

    address: str = ""
    secret: str = ""
    """Hexadecimal digits; empty if the folder has none."""

    is_given: bool = False
    """Whether the secret is that of a file that the user names."""

    roster: Roster | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PeerPlace:
    """A near tier of peers, on one rank."""

    store: PeerStore
    """The folders of all nodes."""

    folder: LocalStore
    """The folder of the node of this rank."""

    group: PeerGroup
    """How the nodes protect each other."""


def peers_at(tier: Tier, root: Store, settings: Settings, job: Job) -> PeerPlace:
    """Open a near tier of peers; a collective.

    Raises:
        InvalidError: The environment of a node, the folder or the group is wrong; or the agent of a node cannot listen.
        UnavailableError: The agent of a node does not start, or a node cannot reach its group.
    """
    url = str(tier.path)
    own, statements = _stated(url, root, settings, job)
    leads = [each.node for each in statements].index(own.node) == job.comm.rank
    _require_named(statements)
    names = {each.node: each for each in statements}
    grouping([RosterNode(name, each.domain) for name, each in names.items()], tier.group)  # Refuses a wrong group.
    secret = _secret_of(statements, job)
    folder = near_folder_at(node_folder(url, own.node), settings)
    command = partial(_command, tier, root, settings, own, folder.url)
    first_command = partial(command, awaits_roster=True)

    def serve() -> bytes:
        port = _port_of_environment()
        write_secret(folder.url, secret)
        member = Member(own.node, own.domain, own.address, port)
        return msgspec.json.encode(_await_agent(folder, member, root.url, secret, first_command, job.clock))

    answers = _together(job, serve if leads else bytes)
    members = tuple(msgspec.json.decode(each, type=Member) for each in answers if each)
    roster = _roster_of(tier, root, members, statements, job)
    store = store_of(url, roster, own.node, {own.node: folder}, secret)
    mine = next(each for each in members if each.name == own.node)
    agent = peer_at(mine, root.url, secret)
    starter = AgentStarter(folder.url, command(mine.port), job.clock) if leads else None
    group = PeerGroup(
        own=own.node,
        node_of_rank=tuple(each.node for each in statements),
        group_of=roster.group_of,
        node_share=roster.grouping.node_share,
        timeout_seconds=tier.protect_timeout_seconds,
        protect=partial(_protect, agent, tier) if leads else None,
        require_agent=starter.require if starter is not None else None,
        note_replicated=partial(_forget_former, store, roster, folder if leads else None),
    )
    _together(job, partial(_join, roster, folder, own.node, secret) if leads else bytes)
    if job.comm.rank == 0:
        _tell(url, roster)
    return PeerPlace(store, folder, group)


def _forget_former(store: PeerStore, roster: Roster, folder: LocalStore | None) -> None:
    if store.forget_former() and folder is not None:
        write_roster(folder, msgspec.structs.replace(roster, former=()))


def _protect(agent: Peer, tier: Tier, attempt: str, packs: dict[str, dict[str, int]]) -> None:
    agent.protect(attempt, packs, tier.max_bytes_per_second, tier.protect_timeout_seconds)


def _stated(url: str, root: Store, settings: Settings, job: Job) -> tuple[_Statement, Sequence[_Statement]]:
    own = _Statement()
    failure: Exception | None = None
    try:
        _fill(own, url, root, settings)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for a statement, whatever the error is
        own, failure = _Statement(error=error_text(error)), error
    gathered = job.comm.all_gather(msgspec.json.encode(own))
    statements = [msgspec.json.decode(each, type=_Statement) for each in gathered]
    raise_together([each.error for each in statements], job.comm.rank, failure)
    return own, statements


def _fill(own: _Statement, url: str, root: Store, settings: Settings) -> None:
    own.node = os.environ.get("HOLDFAST_NODE") or platform.node()
    if not own.node or own.node.strip(".") != own.node or "/" in own.node:
        raise InvalidError(f"HOLDFAST_NODE={own.node!r}: expected a name without '/' and '.' at its ends")
    environment = os.environ.get("HOLDFAST_DOMAIN") or os.environ.get("SLURM_TOPOLOGY_ADDR")
    own.domain = environment or own.node
    own.machine = host_identity().hex()
    own.torch_node = "" if os.environ.get("HOLDFAST_NODE") else os.environ.get("GROUP_RANK", "")
    own.address = _own_address()
    path = node_folder(url, own.node)
    _make_private(path)
    given = os.environ.get("HOLDFAST_SECRET_FILE")
    own.is_given = bool(given)
    own.secret = (_given_secret(given) if given else read_secret(path)).hex()
    with suppress(CorruptError):
        roster = read_roster(near_folder_at(path, settings))
        own.roster = roster if roster is not None and roster.run == root.url else None


def _make_private(path: str) -> None:
    """Make the folder of a node, and refuse a folder that another user may look into, or put in the place of ours."""
    above = os.path.dirname(path)
    os.makedirs(above, mode=0o700, exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(path, mode=0o700)
    for folder, users, forbidden in ((above, (os.geteuid(), 0), 0o022), (path, (os.geteuid(),), 0o077)):
        status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid not in users or status.st_mode & forbidden:
            raise InvalidError(
                f"{folder}: is no folder, or belongs to user {status.st_uid} with mode {status.st_mode & 0o7777:04o}; "
                f"expected a folder of user {os.geteuid()} with mode 0700, since the secret of the run is there. "
                f"Nothing was touched. chmod 700 {folder}, or choose another folder"
            )


def _given_secret(path: str) -> bytes:
    try:
        status = os.stat(path)
        if status.st_mode & 0o077 or status.st_uid != os.geteuid():
            raise InvalidError(
                f"HOLDFAST_SECRET_FILE={path}: other users can read the file, or it belongs to another user; expected "
                f"mode 0600 of user {os.geteuid()}. chmod 600 {path}"
            )
        with open(path, "rb") as file:
            data = file.read(_SECRET_FILE_BYTES)
    except OSError as error:
        raise InvalidError(f"HOLDFAST_SECRET_FILE={path}: {error.strerror}; expected a file of the secret") from error
    if len(data.strip()) < SECRET_BYTES:
        raise InvalidError(
            f"HOLDFAST_SECRET_FILE={path}: {len(data.strip())} bytes; expected {SECRET_BYTES} or more. Make one: "
            "head -c 32 /dev/urandom | base64"
        )
    return hashlib.sha256(data.strip()).digest()


def _secret_of(statements: Sequence[_Statement], job: Job) -> bytes:
    """Return the secret of the run: the one of a file, else the one that most folders have, else a new one."""
    given = sorted({(each.secret, each.node) for each in statements if each.is_given})
    if len({secret for secret, _ in given}) > 1:
        raise InvalidError(
            f"HOLDFAST_SECRET_FILE: nodes {given[0][1]!r} and {given[-1][1]!r} have different secrets; expected one "
            "file for all. Copy the file to each node"
        )
    held = [secret for secret, _ in given] or sorted(each.secret for each in statements if each.secret)
    if held:
        return bytes.fromhex(max(held, key=held.count))
    fresh = job.clock.random_bytes(SECRET_BYTES) if job.comm.rank == 0 else None
    return job.comm.broadcast(fresh)


def _require_named(statements: Sequence[_Statement]) -> None:
    """Refuse nodes that cannot be told apart.

    Raises:
        InvalidError: Two hosts have one name, or torchrun says that one host is two nodes.
    """
    first: dict[str, _Statement] = {}
    for rank, each in enumerate(statements):
        other = first.setdefault(each.node, each)
        if other.machine != each.machine:
            raise InvalidError(
                f"rank {rank}: node {each.node!r} is on two hosts; expected a name of its own for each host. Set "
                "HOLDFAST_NODE"
            )
        if other.torch_node != each.torch_node:
            raise InvalidError(
                f"rank {rank}: nodes {other.torch_node} and {each.torch_node} of torchrun are on one host, "
                f"{each.node!r}; expected a name for each. Set HOLDFAST_NODE for each node"
            )


def _own_address() -> str:
    """Return the address by which this host reaches the host of the key-value store; local without one."""
    host = os.environ.get("MASTER_ADDR")
    if not host:
        return "127.0.0.1"
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # Sends nothing.
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InvalidError(
            f"MASTER_ADDR={host}: no address of this host reaches it ({error.strerror or error}); expected the host "
            "of rank 0"
        ) from error


def _port_of_environment() -> int:
    text = os.environ.get("HOLDFAST_PORT", "0")
    if not text.isdecimal() or int(text) > 65535:
        raise InvalidError(f"HOLDFAST_PORT={text!r}: expected a port, 1 to 65535, or nothing for a free one")
    return int(text)


def _command(
    tier: Tier,
    root: Store,
    settings: Settings,
    own: _Statement,
    folder: str,
    port: int,
    *,
    awaits_roster: bool = False,
) -> Sequence[str]:
    request = {
        "url": str(tier.path),
        "node": own.node,
        "folder": folder,
        "root": root.url,
        "host": own.address,
        "port": port,
        "awaits_roster": awaits_roster,
        "orphan_seconds": tier.orphan_seconds,
        "linger_seconds": tier.linger_seconds,
        "settings": asdict(settings),
    }
    return [*command_of("holdfast._face.agent_api:main"), json.dumps(request)]


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
            except InvalidError:  # Of another version, run, secret or address: an earlier job has left it.
                with suppress(ProcessLookupError):
                    os.kill(serving.pid, signal.SIGKILL)
            except UnavailableError:
                pass
        clock.sleep(_POLL_SECONDS)
    raise UnavailableError(
        f"node {wanted.name}: no agent answers at {wanted.host} within {_AGENT_SECONDS:.0f} s; expected one. Look at "
        f"{folder.url}/{LOG_FILE}"
    )


def _roster_of(
    tier: Tier, root: Store, members: tuple[Member, ...], statements: Sequence[_Statement], job: Job
) -> Roster:
    names = {each.name for each in members}
    known: dict[str, Member] = {}
    earlier = [each.roster for each in statements if each.roster is not None]
    for roster in sorted(earlier, key=lambda roster: roster.made):
        known |= {each.name: each for each in roster.all if each.name not in names}
    made = float(job.comm.broadcast(str(job.clock.unix_seconds()).encode() if job.comm.rank == 0 else None))
    return Roster(root.url, tier.group, members, tuple(known[name] for name in sorted(known)), made)


def _join(roster: Roster, folder: LocalStore, own: str, secret: bytes) -> bytes:
    """Put the roster into the folder of a node, and refuse a node that cannot reach its group: at once, not at a loss.

    Raises:
        UnavailableError: It cannot.
    """
    write_roster(folder, roster)
    own_group = roster.group_of[own]
    for member in roster.members:
        if member.name in own_group or member.name in roster.grouping.keepers:
            try:
                peer_at(member, roster.run, secret).size(SERVING_FILE)
            except CheckpointError as error:
                raise UnavailableError(
                    f"node {own} does not reach node {member.name} at {member.host}:{member.port}: {error}. Expected "
                    "an answer. Let nodes reach each other's ports, or fix one by HOLDFAST_PORT"
                ) from error
    return b""


def _together(job: Job, work: Callable[[], bytes]) -> Sequence[bytes]:
    """Do some work on each rank, and return what each has; raise on all if it failed on one."""
    failure: Exception | None = None
    answer = b""
    try:
        answer = b"+" + work()
    except Exception as error:  # noqa: BLE001 - the other ranks wait, whatever the error is
        failure, answer = error, b"-" + error_text(error).encode()
    answers = job.comm.all_gather(answer)
    texts = [each[1:].decode() if each[:1] == b"-" else None for each in answers]
    raise_together(texts, job.comm.rank, failure)
    return [each[1:] for each in answers]


def _tell(url: str, roster: Roster) -> None:
    names = first_three(each.name for each in roster.members)
    if len(roster.members) == 1:
        logger.warning("%s: the job has one node, %s: nothing protects its memory; expected two or more", url, names)
        return
    logger.info(
        "%s: nodes [%s] protect each other in groups of %s",
        url,
        names,
        first_three(sorted({len(each) for each in roster.grouping.groups})),
    )
    if large := roster.grouping.large_domains:
        logger.warning(
            "%s: domains [%s] have more nodes than there are groups: the loss of such a domain takes two nodes of one "
            "group, and the near steps with them; expected nodes of more domains, or a smaller Tier(group=…)",
            url,
            first_three(large),
        )
