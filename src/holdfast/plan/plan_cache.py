"""Plans of saves, kept for as long as what they depend on stays what it was."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from holdfast.format.pack import HeaderBody, header_body
from holdfast.plan.packing import without
from holdfast.types.plan import PackItem, PackPlan

_KEPT = 4
"""Layouts that a training saves in turn: a whole state, a part of it, gradients too."""

Holders = Mapping[str, tuple[int, ...]]
"""By FQN of each plain tensor, the ranks that hold it."""


LeftOut = frozenset[tuple[str, str]]
"""Pieces that are not written: name of the pack that they would lie in, and FQN."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What one rank writes whenever it saves one layout."""

    packs: tuple[tuple[PackPlan, HeaderBody], ...]
    """Its packs, with what their headers say every time."""

    bytes: int
    """Bytes of tensors."""

    tensors: int
    """Tensors of which something is written."""

    large: tuple[tuple[str, PackItem], ...]
    """Pieces worth comparing with what is stored, each with the name of its pack."""

    _without: dict[LeftOut, SavePlan] = field(default_factory=dict, compare=False)

    def without(self, left_out: LeftOut) -> SavePlan:
        """Return the plan for when some pieces need not be written; the last one asked for is kept."""
        if not left_out:
            return self
        if left_out not in self._without:
            packs = []
            for pack, body in self.packs:
                fqns = {fqn for name, fqn in left_out if name == pack.name}
                rest = without(pack, fqns)
                if rest.items:
                    packs.append((rest, header_body(rest)) if fqns else (pack, body))
            self._without.clear()
            self._without[left_out] = save_plan(tuple(packs))
        return self._without[left_out]


def save_plan(packs: tuple[tuple[PackPlan, HeaderBody], ...], large_bytes_min: int | None = None) -> SavePlan:
    """Return a plan, with what there is to count of it.

    Args:
        packs: What is written.
        large_bytes_min: The smallest piece worth comparing with what is stored; None: none is.
    """
    items = [item for pack, _ in packs for item in pack.items]
    large = (
        ()
        if large_bytes_min is None
        else tuple((pack.name, item) for pack, _ in packs for item in pack.items if item.bytes >= large_bytes_min)
    )
    return SavePlan(packs, sum(item.bytes for item in items), len({item.tensor.fqn for item in items}), large)


class PlanCache:
    """The plans of the layouts saved last.

    A plan depends on this rank's shards and on who else holds its plain tensors, and on nothing else. Both are
    compared at every save, so that a layout that changed here or elsewhere is planned anew.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[Holders, SavePlan]] = OrderedDict()

    def of(self, shards: bytes, holders: Holders, plan: Callable[[], SavePlan]) -> tuple[SavePlan, bool]:
        """Return the plan of a layout, and whether it had to be made.

        Args:
            shards: Digest of this rank's shards: FQNs, dtypes, shapes, layouts, regions, roles, in order.
            holders: Who holds the plain ones among them.
            plan: Makes the plan.
        """
        known = self._known.get(shards)
        if known is not None and known[0] == holders:
            self._known.move_to_end(shards)
            return known[1], False
        made = plan()
        self._known[shards] = holders, made
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return made, True
