"""Opens the near tier that a caller names, and refuses a folder that can be none."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence

from holdfast._face import wiring
from holdfast._face.agent_api import agent_command
from holdfast._face.near_folder import near_folder_at, require_outside_root
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.shelf import ShelfStore, is_in_memory
from holdfast.base.ports.store import Store
from holdfast.core.engine.memory_limits import memory_domains
from holdfast.errors import InvalidError
from holdfast.policies import Tier
from holdfast.settings import Differential, Settings
from holdfast.training.coordination.job import Job, error_text
from holdfast.training.runs.tiers.near import NearPlace
from holdfast.training.runs.tiers.protecting import PeerGroup

logger = logging.getLogger(__name__)

_MEMORY_SHARE = 4
"""A near tier in memory takes a quarter: training and DataLoader workers need the rest."""


def near_at(
    tier: object, root: Store, settings: Settings, job: Job, differential: Differential | None = None
) -> NearPlace:
    """Return the near tier of a run; of peers a collective.

    Args:
        tier: As the caller passed it.
        root: The root of the run.
        settings: How to reach storage.
        job: The ranks.
        differential: The redo log that the caller wants; None for none.
    Raises:
        InvalidError: It is no `Tier`, is the root, lies in the root or around it, or belongs to another user; or the
            run has a redo log.
    """
    if not isinstance(tier, Tier):
        raise InvalidError(f"near={str(tier)[:80]!r}: expected holdfast.Tier('/local/folder', every=10)")
    if differential is not None:
        raise InvalidError(f"near={tier.path} with differential: a redo log needs one place; expected one of the two")
    if tier.has_peers:
        return _peers(tier, root, settings, job)
    path = os.path.realpath(os.path.expanduser(str(tier.path)))
    at_root = require_outside_root(str(tier.path), path, root)
    if at_root and is_in_memory(at_root):
        logger.warning(
            "%s: the root is in memory, so a reboot loses the run; expected a disk or an object store. A folder in "
            "memory is a near tier: near=holdfast.Tier(…)",
            root.url,
        )
    is_memory = is_in_memory(path)
    _require_own_folder(tier, path, is_memory)
    if is_memory:
        os.makedirs(path, mode=0o700, exist_ok=True)
        if os.stat(path).st_mode & 0o077:
            raise InvalidError(
                f"near={tier.path}: other users may look into the folder; expected mode 0700, since all users of "
                f"the host share its memory. Nothing was touched. chmod 700 {path}"
            )
    store = near_folder_at(path, settings)
    command = agent_command(tier, path, root, settings) if tier.agent else ()
    return _place(tier, store, store, is_memory, agent=command)


def _peers(tier: Tier, root: Store, settings: Settings, job: Job) -> NearPlace:
    try:
        from holdfast._face.peers.place import peers_at  # The wire needs h11, of the extra `agent`.
    except InvalidError as error:
        # The other ranks, whose nodes have h11, wait for the statement of this one.
        job.comm.all_gather(json.dumps({"error": error_text(error)}).encode())
        raise

    if not wiring.is_named_by_url(root):
        raise InvalidError(
            f"near={tier.path}: no agent can open the root {root.url}; expected a path or a URL as the root"
        )
    peers = peers_at(tier, root, settings, job)
    return _place(tier, peers.store, peers.folder, is_in_memory(peers.folder.url), peers=peers.group)


def _place(
    tier: Tier,
    store: Store,
    folder: LocalStore,
    is_memory: bool,
    *,
    agent: Sequence[str] = (),
    peers: PeerGroup | None = None,
) -> NearPlace:
    keep_last = tier.keep_last if tier.keep_last is not None else 1 if is_memory else 2
    assert not isinstance(tier.every, int), "the tier has made a policy of a number"
    bytes_max = tier.bytes_max
    if is_memory and bytes_max is None:
        bytes_max = _memory_for(folder)
    spares = (folder.spare_bytes, folder.drop_spares) if isinstance(folder, ShelfStore) else None
    own = folder if peers is not None else None
    return NearPlace(store, tier.every, keep_last, bytes_max, is_memory, spares, agent, peers, own)


def _require_own_folder(tier: Tier, path: str, is_memory: bool) -> None:
    if os.path.exists(path) and not os.path.isdir(path):
        raise InvalidError(
            f"near={tier.path}: is no folder; expected a folder. Nothing was touched. Choose another path"
        )
    if os.path.isdir(path) and (owner := os.stat(path).st_uid) != os.geteuid():
        raise InvalidError(
            f"near={tier.path}: belongs to user {owner}, and this process is user {os.geteuid()}; expected a folder of "
            "this user. Nothing was touched. Choose another folder"
        )
    named = os.path.abspath(os.path.expanduser(str(tier.path)))
    if os.path.islink(named) and (is_memory or is_in_memory(os.path.dirname(named))):
        raise InvalidError(
            f"near={tier.path}: is a link to {path}; expected a folder, since any user may make links in the memory of "
            f"the host. Nothing was touched. Name the folder, or remove the link: rm {named}"
        )


def _memory_for(store: LocalStore) -> int:
    """Return how many bytes a near tier in memory may have, since the caller does not say."""
    held = sum(entry.bytes for entry in store.list())
    on_mount, on_host = store.free_bytes() or 0, min(domain.free_bytes for domain in memory_domains())
    return (min(on_mount, on_host) + held) // _MEMORY_SHARE
