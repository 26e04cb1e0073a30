"""The statement of each rank on its node, before a near tier of peers is opened."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import platform
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from holdfast._face.near_folder import near_folder_at
from holdfast._face.peers.nodes import (
    SECRET_BYTES,
    node_folder,
    read_secret,
)
from holdfast.base.ports.store import Store
from holdfast.core.engine.memory_limits import host_identity
from holdfast.core.format.digest import short_digest_of
from holdfast.errors import CorruptError, InvalidError
from holdfast.settings import Settings
from holdfast.stored.peers.roster import read_roster
from holdfast.training.coordination.job import Job, error_text, raise_together

_SECRET_FILE_BYTES = 1 << 16


class StatedNode(msgspec.Struct):
    """The node of a rank, as the rank states."""

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

    made: float = 0.0
    """When the roster in the folder was made; 0 without one of this run."""

    error: str | None = None


def stated(url: str, root: Store, settings: Settings, job: Job) -> tuple[StatedNode, Sequence[StatedNode]]:
    own = StatedNode()
    failure: Exception | None = None
    try:
        _fill(own, url, root, settings)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for a statement, whatever the error is
        own, failure = StatedNode(error=error_text(error)), error
    gathered = job.comm.all_gather(msgspec.json.encode(own))
    statements = [msgspec.json.decode(each, type=StatedNode) for each in gathered]
    raise_together([each.error for each in statements], job.comm.rank, failure)
    return own, statements


def _fill(own: StatedNode, url: str, root: Store, settings: Settings) -> None:
    own.node = os.environ.get("HOLDFAST_NODE") or platform.node()
    if not own.node or own.node.strip(".") != own.node or "/" in own.node:
        raise InvalidError(f"HOLDFAST_NODE={own.node!r}: expected a name without '/' and '.' at its ends")
    own.machine = host_identity().hex()
    # The last part of Slurm's address is the node itself. Two pods of one host are lost together.
    switch = os.environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]
    own.domain = os.environ.get("HOLDFAST_DOMAIN") or switch or f"host-{short_digest_of(host_identity()).hex()[:8]}"
    own.torch_node = "" if os.environ.get("HOLDFAST_NODE") else os.environ.get("GROUP_RANK", "")
    own.address = _own_address()
    path = node_folder(url, own.node)
    make_private(path)
    given = os.environ.get("HOLDFAST_SECRET_FILE")
    own.is_given = bool(given)
    own.secret = (_given_secret(given) if given else read_secret(path)).hex()
    with suppress(CorruptError):
        roster = read_roster(near_folder_at(path, settings))
        own.made = roster.made if roster is not None and roster.run == root.url else 0.0


def make_private(path: str) -> None:
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


def secret_of(statements: Sequence[StatedNode], job: Job) -> bytes:
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


def require_named(statements: Sequence[StatedNode]) -> None:
    """Refuse nodes that cannot be told apart, or that other hosts do not reach.

    Raises:
        InvalidError: Two hosts have one name, torchrun says that one host is two nodes, or the address of a node is
            local although there are several hosts.
    """
    if len({each.machine for each in statements}) > 1:
        for each in statements:
            with suppress(ValueError):
                if ipaddress.ip_address(each.address).is_loopback:
                    raise InvalidError(
                        f"node {each.node!r}: MASTER_ADDR leads to {each.address} there, an address that no other host "
                        "reaches; expected one of the network. Set HOLDFAST_ADDRESS there"
                    )
    first: dict[str, StatedNode] = {}
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
    if address := os.environ.get("HOLDFAST_ADDRESS"):
        return address
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
