"""The store of all nodes, made from a roster: for the ranks of a job, for the agents, and for a reader on one node."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from holdfast._face.near_folder import near_folder_at
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.peers.peer import Peer
from holdfast.base.ports.store import Store
from holdfast.base.wire.framing import Credentials
from holdfast.errors import InvalidError, MissingError
from holdfast.policies import PEERS_SCHEME
from holdfast.settings import Settings
from holdfast.stored.peers.roster import Member, Roster, read_roster
from holdfast.stored.peers.union import PeerStore

SECRET_BYTES = 32
_SECRET_FILE = ".secret"
"""In the folder of each node. No store lends a hidden name."""

_CALL_SECONDS = 30.0
"""Deadline of one call of an agent."""


def node_folder(url: str, node: str) -> str:
    """Return the path of the folder of a node, from the URL of the near tier."""
    return os.path.join(os.path.realpath(url.removeprefix(PEERS_SCHEME)), node)


def read_secret(folder: str) -> bytes:
    """Return the secret in the folder of a node; empty without one.

    Raises:
        InvalidError: Other users can read the secret.
    """
    path = Path(folder, _SECRET_FILE)
    try:
        if path.stat().st_mode & 0o077:
            raise InvalidError(f"{path}: other users can read the secret of the run; expected mode 0600. Remove {path}")
        secret = path.read_bytes()
    except FileNotFoundError:
        return b""
    return secret if len(secret) == SECRET_BYTES else b""


def write_secret(folder: str, secret: bytes) -> None:
    """Store the secret in the folder of a node."""
    part = Path(folder, f"{_SECRET_FILE}.{os.getpid()}")
    with suppress(FileNotFoundError):
        part.unlink()
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    part.replace(Path(folder, _SECRET_FILE))


def credentials_of(run: str, secret: bytes, node: str) -> Credentials:
    """Return the credentials of a node for both ends: a header takes no other characters of the root's URL."""
    return Credentials(quote(run, safe="/:@"), secret, node)


def peer_at(member: Member, run: str, secret: bytes) -> Peer:
    """Return the client of the agent of a node."""
    return Peer((member.host, member.port), credentials_of(run, secret, member.name), _CALL_SECONDS)


def store_of(url: str, roster: Roster, own: str, folders: Mapping[str, Store], secret: bytes) -> PeerStore:
    """Return the folders of all nodes as one store.

    Args:
        url: The URL of the near tier.
        roster: The nodes.
        own: The node of this process.
        folders: Folders that this process reads without an agent, by node; that of `own` is there.
        secret: The secret of the run.
    """
    nodes = {
        each.name: folders[each.name] if each.name in folders else peer_at(each, roster.run, secret)
        for each in roster.all
    }
    former = frozenset(each.name for each in roster.former)
    return PeerStore(url, nodes, own, roster.grouping.keepers, former)


def seen_from_here(url: str, settings: Settings) -> PeerStore:
    """Return the store of all nodes, for a process on one of them: by the newest roster of this host.

    Folders of this host are read without their agents, but for one of an earlier job whose node lives elsewhere now.

    Raises:
        MissingError: This host has no folder of a node.
    """
    own, found = _rosters_here(url, settings)
    members = {each.name: each for each in found[own][0].all}
    folders = {name: folder for name, (roster, folder) in found.items() if members.get(name) in roster.all}
    return store_of(url, found[own][0], own, folders, read_secret(node_folder(url, own)))


def roster_seen_from_here(url: str, settings: Settings) -> tuple[Roster, Mapping[str, Peer]]:
    """Return the newest roster of this host, and the client of each agent. Errors as `seen_from_here`."""
    own, found = _rosters_here(url, settings)
    roster, secret = found[own][0], read_secret(node_folder(url, own))
    return roster, {each.name: peer_at(each, roster.run, secret) for each in roster.all}


def _rosters_here(url: str, settings: Settings) -> tuple[str, Mapping[str, tuple[Roster, LocalStore]]]:
    """Return the node with the newest roster, and by node the rosters and folders of this host."""
    base, found = os.path.realpath(url.removeprefix(PEERS_SCHEME)), dict[str, tuple[Roster, LocalStore]]()
    with suppress(FileNotFoundError):
        for name in sorted(os.listdir(base)):
            folder = near_folder_at(os.path.join(base, name), settings)
            if os.path.isdir(folder.url) and (roster := read_roster(folder)) is not None:
                found[name] = roster, folder
    if not found:
        raise MissingError(
            f"{url}: this host has no folder of a node with a roster; expected one. Run this on a node of the job"
        )
    return max(found, key=lambda name: found[name][0].made), found
