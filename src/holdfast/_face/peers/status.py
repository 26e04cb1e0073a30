"""The nodes of peers, as a person asks for them: groups, agents, and the bytes on each node."""

from __future__ import annotations

import json
from collections.abc import Mapping

from holdfast._face.peers.nodes import roster_seen_from_here
from holdfast.base.ports.store import Store
from holdfast.core.engine.parallel_map import ordered_parallel_map
from holdfast.core.format.names import PARITY_FOLDER, is_pack_name
from holdfast.errors import CheckpointError
from holdfast.settings import Settings
from holdfast.stored.peers.parity_files import attempt_of
from holdfast.stored.peers.roster import Member
from holdfast.training.runs.tiers.agent_files import STATUS_FILE, NodeStatus

_BYTES_MAX = 1 << 16


def nodes_status(url: str, settings: Settings) -> tuple[NodeStatus, ...]:
    """Return the nodes of a near tier of peers, those of one group together.

    Raises:
        MissingError: This host has no folder of a node.
    """
    roster, stores = roster_seen_from_here(url, settings)
    number = {name: at for at, members in enumerate(roster.grouping.groups) for name in members}
    members = sorted(roster.all, key=lambda member: (number.get(member.name, len(number)), member.name))

    def look(member: Member) -> NodeStatus:
        return _status_of(member, number, roster.grouping.keepers, stores[member.name])

    return tuple(ordered_parallel_map(look, members))


def _status_of(member: Member, number: Mapping[str, int], keepers: tuple[str, ...], store: Store) -> NodeStatus:
    found = {"state": "silent", "error": ""}
    packs_bytes = parity_bytes = 0
    try:
        for entry in store.list(""):
            attempt = attempt_of(entry.key)
            if attempt is not None and is_pack_name(entry.key.removeprefix(attempt)):
                packs_bytes += entry.bytes
            elif entry.key.startswith(PARITY_FOLDER):
                parity_bytes += entry.bytes
        found |= json.loads(store.get(STATUS_FILE, _BYTES_MAX))
    except (CheckpointError, ValueError) as error:
        found["error"] = str(error)
    return NodeStatus(
        member.name,
        member.domain,
        number.get(member.name, -1),
        member.name in keepers,
        f"{member.host}:{member.port}",
        str(found["state"]),
        str(found["error"]),
        packs_bytes,
        parity_bytes,
    )
