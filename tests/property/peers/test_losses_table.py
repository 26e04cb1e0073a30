"""The table in docs/memory.md: the share of all losses of k nodes at once that the memory of the others stands."""

from __future__ import annotations

from itertools import combinations
from math import comb
from pathlib import Path

import pytest

from holdfast.core.plan.parity import Survival, survival
from holdfast.core.plan.placement import RosterNode, grouping

PAGE = Path(__file__).parents[3] / "docs" / "memory.md"
ROWS = ((3, None), (8, None), (16, 2), (16, None), (64, None), (1000, None))
"""Nodes, and `Tier.group`."""


def groups_of(nodes: int, group: int | None) -> tuple[tuple[str, ...], ...]:
    return grouping([RosterNode(f"n{number:04}", f"n{number:04}") for number in range(nodes)], group).groups


def share(groups: tuple[tuple[str, ...], ...], lost: int) -> float:
    """Return the share of losses that take at most one node of each group: an elementary symmetric polynomial."""
    ways = [1, *[0] * lost]
    for members in groups:
        for number in range(lost, 0, -1):
            ways[number] += ways[number - 1] * len(members)
    return ways[lost] / comb(sum(map(len, groups)), lost)


def stands(groups: tuple[tuple[str, ...], ...], lost: set[str]) -> bool:
    names = {name for members in groups for name in members}
    there = names - lost
    return survival(groups, dict.fromkeys(names, 1), there, there) is not Survival.PARTIAL


@pytest.mark.parametrize(("nodes", "group"), [(3, None), (8, None), (16, 2), (16, None)])
def test_the_closed_form_is_that_of_the_real_placement(nodes: int, group: int | None) -> None:
    groups = groups_of(nodes, group)
    names = [name for members in groups for name in members]
    for lost in (1, 2, 3):
        found = [stands(groups, {*each}) for each in combinations(names, lost)]
        assert sum(found) / len(found) == pytest.approx(share(groups, lost))


def test_the_page_has_the_table() -> None:
    lines = ["| nodes | group | 1 lost | 2 lost | 3 lost | memory of a node |", "|-|-|-|-|-|-|"]
    for nodes, group in ROWS:
        groups = groups_of(nodes, group)
        sizes = sorted({len(members) for members in groups})
        shares = " | ".join(f"{share(groups, lost):.1%}" for lost in (1, 2, 3))
        named = "default" if group is None else f"`group={group}`"
        lines.append(
            f"| {nodes:,} | {named}: {' or '.join(map(str, sizes))} | {shares} | {1 + 1 / (sizes[0] - 1):.2f} shares |"
        )
    table = "\n".join(lines)
    assert table in PAGE.read_text(), f"expected in {PAGE}:\n{table}"
