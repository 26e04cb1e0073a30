"""Opens a near tier of peers: the ranks agree on roster and secret, and each node gets an agent that serves its folder.

Steps, on each rank; the ranks meet after the first and the second:

    stated    node, domain, host, and the secret and roster that the folder of the node has
    served    on the lowest rank of each node: folder and secret are there, and the agent answers with a proof
    joined    each rank has the roster and the store of all nodes; the lowest rank has put the roster into the folder
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import msgspec

from holdfast._face.near_folder import near_folder_at, require_outside_root
from holdfast._face.peers.nodes import (
    node_folder,
    store_of,
)
from holdfast._face.peers.own_node import OwnNode, Served
from holdfast._face.peers.statement import StatedNode, require_named, secret_of, stated
from holdfast.backends.stores.local import LocalStore
from holdfast.base.ports.store import Store
from holdfast.core.engine.child_python import command_of
from holdfast.core.plan.placement import RosterNode, grouping
from holdfast.errors import first_three
from holdfast.policies import PEERS_SCHEME, Tier
from holdfast.settings import Settings
from holdfast.stored.peers.roster import Roster
from holdfast.stored.peers.union import PeerStore
from holdfast.training.coordination.job import Job, error_text, raise_together
from holdfast.training.runs.tiers.protecting import PeerGroup

logger = logging.getLogger(__name__)


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
        ConflictError: Another job has the folder of a node open.
        UnavailableError: The agent of a node does not start, or a node cannot reach its group.
    """
    url = str(tier.path)
    require_outside_root(url, os.path.realpath(url.removeprefix(PEERS_SCHEME)), root)
    own, statements = stated(url, root, settings, job)
    leads = [each.node for each in statements].index(own.node) == job.comm.rank
    require_named(statements)
    names = {each.node: each for each in statements}
    grouping([RosterNode(name, each.domain) for name, each in names.items()], tier.group)  # Refuses a wrong group.
    secret = secret_of(statements, job)
    folder = near_folder_at(node_folder(url, own.node), settings)
    node = OwnNode(folder, own, root.url, secret, partial(_command, tier, root, settings, own, folder.url), job.clock)
    newest = max(each.made for each in statements)
    # Of the rosters of earlier jobs the newest alone: one of 1,000 nodes has 90 kB, and all ranks get each.
    tells = leads and own.made == newest > 0
    try:
        answers = _together(job, partial(node.serve, tells=tells) if leads else bytes)
        served = [msgspec.json.decode(each, type=Served) for each in answers if each]
        earlier = next((each.earlier for each in served if each.earlier is not None), None)
        roster = _roster_of(tier, root, served, earlier, job)
        store = store_of(url, roster, own.node, {own.node: folder}, secret)
        _together(job, partial(node.join, roster) if leads else bytes)
    except BaseException:
        node.release()
        raise
    group = PeerGroup(
        own=own.node,
        node_of_rank=tuple(each.node for each in statements),
        group_of=roster.group_of,
        node_share=roster.grouping.node_share,
        timeout_seconds=tier.protect_timeout_seconds,
        protect=partial(node.protect, tier.max_bytes_per_second) if leads else None,
        require_agent=node.require_agent if leads else None,
        release=node.release,
        note_replicated=partial(_forget_former, store, node if leads else None),
    )
    if job.comm.rank == 0:
        _tell(url, roster)
        if earlier is not None:
            _tell_of_lost(url, earlier, {each.node: each.made for each in statements})
    return PeerPlace(store, folder, group)


def _forget_former(store: PeerStore, node: OwnNode | None) -> None:
    if store.forget_former() and node is not None:
        node.forget_former()


def _command(tier: Tier, root: Store, settings: Settings, own: StatedNode, folder: str, port: int) -> Sequence[str]:
    request = {
        "url": str(tier.path),
        "node": own.node,
        "folder": folder,
        "root": root.url,
        "host": own.address,
        "port": port,
        "orphan_seconds": tier.orphan_seconds,
        "linger_seconds": tier.linger_seconds,
        "settings": asdict(settings),
    }
    return [*command_of("holdfast._face.agent_api:main"), json.dumps(request)]


def _roster_of(tier: Tier, root: Store, served: Sequence[Served], earlier: Roster | None, job: Job) -> Roster:
    members = tuple(each.member for each in served)
    names = {each.name for each in members}
    former = () if earlier is None else tuple(each for each in earlier.all if each.name not in names)
    made = float(job.comm.broadcast(str(job.clock.unix_seconds()).encode() if job.comm.rank == 0 else None))
    return Roster(root.url, tier.group, members, former, made)


def _together(job: Job, work: Callable[[], bytes]) -> Sequence[bytes]:
    """Do some work on each rank, and return what each has; raise on all after a failure on one."""
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


def _tell_of_lost(url: str, earlier: Roster, made: Mapping[str, float]) -> None:
    """Tell if no keeper of the last job has a folder any more: nothing else knows of the last near steps.

    Args:
        url: The near tier.
        earlier: The newest roster that a node of this job has.
        made: When the roster of each node of this job was made; 0 without one.
    """
    keepers = earlier.grouping.keepers
    if all(made.get(name, earlier.made) < earlier.made for name in keepers):
        logger.warning(
            "%s: nodes [%s] kept the manifests of the last job, and have lost their folders: steps that only the near "
            "tier had are lost. The run goes on from older ones, or from the root",
            url,
            first_three(keepers),
        )
