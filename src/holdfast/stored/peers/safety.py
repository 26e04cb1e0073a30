"""How safe a step is in the memory of the nodes: whether it can be read, and how many nodes may go."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from holdfast.base.types.manifest import Manifest
from holdfast.core.format.names import step_folder, step_of_pack
from holdfast.core.plan.parity import Survival
from holdfast.errors import first_three
from holdfast.stored.peers.parity_files import AttemptPlaces, ParityTable, attempt_of
from holdfast.stored.peers.union import PeerStore


@dataclass(frozen=True, slots=True)
class StepSafety:
    """How safe a step is."""

    survival: Survival
    """Whether all packs are there, or can be read."""

    lost: tuple[str, ...] = ()
    """Nodes whose packs are read through parity."""

    groups: int = 0
    """Groups that have packs of the step."""

    safe_groups: int = 0
    """Those that stand the loss of any one of their nodes."""

    @property
    def text(self) -> str:
        """The same in words."""
        if self.survival is Survival.PARTIAL:
            return "cannot be read: too many nodes are lost"
        if self.survival is Survival.DEGRADED:
            return f"without {first_three(self.lost)}: no second node of a group may go"
        if self.safe_groups < self.groups:
            return "no node may go: not protected"
        more = f", up to {self.groups} of different groups" if self.groups > 1 else ""
        return f"any 1 node may go{more}"


def step_safety(store: PeerStore, manifest: Manifest) -> StepSafety:
    """Return how safe a step is, by the packs and parity that are there.

    Args:
        store: The folders of all nodes.
        manifest: The manifest of the step.
    """
    keys = pack_keys(manifest)
    attempts = {attempt: store.places_of(attempt) for attempt in {attempt_of(key) or "" for key in keys}}
    lost, groups, unsafe = set[str](), set[str](), set[str]()
    for key in keys:
        places = attempts[attempt_of(key) or ""]
        group = places.group_of(key)
        is_there = key in places.holders
        if group is None:
            if not is_there:
                return StepSafety(Survival.PARTIAL)
            groups.add(holder := places.holders[key])
            unsafe.add(holder)
            continue
        name = ",".join(group.table.nodes)
        groups.add(name)
        absent = _absent(group.table, places)
        if not is_there and (len(absent) > 1 or len(group.nodes) < len(group.table.nodes) - 1):
            return StepSafety(Survival.PARTIAL)
        if absent:
            lost |= {*absent}
        if absent or len(group.nodes) < len(group.table.nodes):
            unsafe.add(name)
    survival = Survival.DEGRADED if lost else Survival.WHOLE
    return StepSafety(survival, tuple(sorted(lost)), len(groups), len(groups) - len(unsafe))


def pack_keys(manifest: Manifest) -> list[str]:
    """Return the keys of the packs that a step needs, also those of older steps."""
    own = f"{step_folder(manifest.step or 0)}{manifest.attempt}/"
    return [each.name if step_of_pack(each.name) is not None else own + each.name for each in manifest.packs]


def _absent(table: ParityTable, places: AttemptPlaces) -> Collection[str]:
    """Return the nodes of a group that lack a pack of theirs."""
    return [
        node
        for node, packs in zip(table.nodes, table.packs, strict=True)
        if any(key not in places.holders for key in packs)
    ]
