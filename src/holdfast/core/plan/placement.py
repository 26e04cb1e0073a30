"""Places nodes into groups that protect each other, and names the keepers of small objects.

Nodes are sorted by failure domain and dealt to the groups in turn. So the nodes of one domain are in different groups,
as long as the domain has no more nodes than there are groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import InvalidError

_SMALL_ROSTER, _GROUP_OF_SMALL, _GROUP = 8, 2, 4


@dataclass(frozen=True, slots=True)
class RosterNode:
    """A node of a job."""

    name: str
    """Its name; no two nodes of a roster have the same."""

    domain: str
    """The failure domain: nodes with the same domain are lost together, as those behind one switch."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups and keepers of a roster. The same nodes in any order give the same grouping."""

    groups: tuple[tuple[str, ...], ...]
    """Names of the nodes of each group. The position of a name is the number of the member."""

    keepers: tuple[str, ...]
    """Names of at most three keepers, in the order in which they are asked. The first two are members of one group."""

    large_domains: tuple[str, ...]
    """Domains with more nodes than there are groups: the loss of such a domain takes two members of one group."""

    @property
    def node_share(self) -> float:
        """The part of a step that a node of the smallest group stores with parity, if all nodes write equally much."""
        sizes = [len(group) for group in self.groups]
        return (1 + 1 / (min(sizes) - 1)) / sum(sizes) if len(self.groups[0]) > 1 else 1.0


def grouping(nodes: Sequence[RosterNode], group: int | None = None) -> Grouping:
    """Return the groups and the keepers of a roster.

    There are `max(1, N // group)` groups, whose sizes differ by at most one. No group has fewer than `min(group, N)`
    nodes or more than `2 * group - 1`. One node alone is a group of its own, without protection.

    Args:
        nodes: The roster, in any order.
        group: Smallest number of nodes of a group; None: 2 in a roster of fewer than 8 nodes, else 4.
    Raises:
        InvalidError: The roster is empty or has a name twice; `group` is below 2 or above the number of nodes.
    """
    count = len(nodes)
    if not count:
        raise InvalidError("the roster has no nodes; expected at least one. Start an agent on each node of the job")
    if group is not None and not 2 <= group <= count:
        raise InvalidError(
            f"Tier(group={group}): expected 2 to {count}, the number of nodes; pass a smaller group, or leave it out"
            if count > 1
            else f"Tier(group={group}): the job has one node, and nothing protects one node alone. Leave group out"
        )
    twice = [name for name, times in Counter(node.name for node in nodes).items() if times > 1]
    if twice:
        raise InvalidError(
            f"node {twice[0]!r} is in the roster twice; expected a name of its own for each node. Set HOLDFAST_NODE"
        )
    ordered = sorted(nodes, key=lambda node: (node.domain, node.name))
    default = _GROUP_OF_SMALL if count < _SMALL_ROSTER else _GROUP
    groups_count = max(1, count // (group or default))
    groups = [ordered[first::groups_count] for first in range(groups_count)]
    sizes = Counter(node.domain for node in ordered)
    return Grouping(
        groups=tuple(tuple(node.name for node in members) for members in groups),
        keepers=tuple(node.name for node in _keepers(groups, ordered)),
        large_domains=tuple(sorted(domain for domain, size in sizes.items() if size > groups_count)),
    )


def _keepers(groups: Sequence[Sequence[RosterNode]], ordered: Sequence[RosterNode]) -> list[RosterNode]:
    """Return the keepers, in different domains as far as there are such; the first two are members of one group.

    So a loss that takes all keepers always takes two members of one group. Such a loss has taken packs anyway: keepers
    never make a loss worse.
    """
    mixed = next((each for each in groups if each[0].domain != each[-1].domain), groups[0])
    pair = [*mixed[:1], *mixed[1:][-1:]]
    others = [node for node in ordered if node not in pair]
    elsewhere = [node for node in others if node.domain not in {each.domain for each in pair}]
    return [*pair, *(elsewhere or others)[:1]]
