"""The roster: the nodes of a job, as a file in the folder of each node. Written by the node's own ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import msgspec

from holdfast.base.ports.store import Store
from holdfast.core.format.sealed_json import Text, decode_sealed, header, sealed
from holdfast.core.plan.placement import Grouping, RosterNode, grouping
from holdfast.stored.repository.publish import get_or_none

ROSTER_FILE = "roster.json"
"""In the folder of each node. The store of all nodes never reads the file."""

_KIND = "roster"
_BYTES_MAX = 16 << 20


class Member(msgspec.Struct, frozen=True):
    """A node of a roster, and where its agent listens."""

    name: Text
    """The name."""

    domain: Text
    """The failure domain."""

    host: Text
    """Address of its agent."""

    port: int
    """Port of its agent."""


class Roster(msgspec.Struct, frozen=True, dict=True):
    """The nodes of a job."""

    run: Text
    """The root of the run, which all agents of the run name to each other."""

    group: int | None
    """As `Tier.group`."""

    members: tuple[Member, ...]
    """The nodes of the job."""

    former: tuple[Member, ...] = ()
    """Nodes of earlier jobs that may still hold steps. They are asked, and nothing new is stored there."""

    made: float = 0.0
    """Wall-clock seconds since 1970, so that the newest of several rosters is known."""

    @cached_property
    def grouping(self) -> Grouping:
        """The groups and keepers of the members."""
        return grouping([RosterNode(each.name, each.domain) for each in self.members], self.group)

    @property
    def group_of(self) -> Mapping[str, tuple[str, ...]]:
        """By node, the nodes of its group."""
        return {name: members for members in self.grouping.groups for name in members}

    @property
    def all(self) -> tuple[Member, ...]:
        """Members and former nodes."""
        return (*self.members, *self.former)


def read_roster(folder: Store) -> Roster | None:
    """Return the roster in the folder of a node; None if there is none.

    Raises:
        CorruptError: The roster is damaged.
    """
    data = get_or_none(folder, ROSTER_FILE, _BYTES_MAX)
    return None if data is None else decode_sealed(data, _KIND, Roster, f"{folder.url}/{ROSTER_FILE}")[0]


def write_roster(folder: Store, roster: Roster) -> None:
    """Store the roster in the folder of a node."""
    fields = msgspec.json.decode(msgspec.json.encode(roster), type=dict[str, object])
    folder.put(ROSTER_FILE, sealed({**header(_KIND, minor=0), **fields}), durable=False)
