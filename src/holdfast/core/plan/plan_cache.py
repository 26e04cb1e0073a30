"""Caches the plans of saves until their inputs change."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from holdfast.base.types.plan import PackItem, PackPlan
from holdfast.core.format.pack import CodedHeaderBody, HeaderBody, coded_header_body, header_body
from holdfast.core.plan.packing import without
from holdfast.core.plan.pairs import Pairs

T = TypeVar("T")

_PLANS_MAX = 4
"""Plans kept: a job may save several layouts in turn, such as a whole state, a part of it, or gradients too."""

Holders = Mapping[str, tuple[int, ...]]
"""By FQN of each plain tensor and each tensor on sibling meshes, the ranks that hold it."""


PackHeader = HeaderBody | CodedHeaderBody
"""The part of a pack's header that is the same at every save; of a coded pack without pairs."""

LeftOut = frozenset[tuple[str, str]]
"""Pieces that are not written: name of their pack, and FQN."""


@dataclass(slots=True)
class Pairing:
    """The pairs among the pieces of a plan, which the first save by the plan looks for."""

    pairs: Pairs | None = None
    """What it found; None until then."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What one rank writes at every save of one layout."""

    packs: tuple[tuple[PackPlan, PackHeader], ...]
    """Its packs and their headers."""

    bytes: int
    """Bytes of tensors to write."""

    tensors: int
    """Number of tensors with something to write."""

    large: tuple[tuple[str, PackItem], ...]
    """Pieces large enough to compare with the base step, each with the name of its pack."""

    chunk_bytes: int
    """Raw bytes of each chunk but the last of a piece."""

    pairing: Pairing = field(default_factory=Pairing, compare=False)
    """Its pairs."""

    _without: dict[LeftOut, SavePlan] = field(default_factory=dict, compare=False)

    def without(self, left_out: LeftOut) -> SavePlan:
        """Return the plan without some pieces; the last result is cached."""
        if not left_out:
            return self
        if left_out not in self._without:
            packs = []
            for pack, body in self.packs:
                fqns = {fqn for name, fqn in left_out if name == pack.name}
                rest = without(pack, fqns)
                if rest.items:
                    packs.append(with_header(rest, self.chunk_bytes) if fqns else (pack, body))
            self._without.clear()
            self._without[left_out] = replace(save_plan(packs, self.chunk_bytes), pairing=self.pairing)
        return self._without[left_out]


def with_header(pack: PackPlan, chunk_bytes: int) -> tuple[PackPlan, PackHeader]:
    """Return a pack with the part of its header that is known before a save."""
    return pack, coded_header_body(pack, chunk_bytes) if pack.is_coded else header_body(pack)


def save_plan(
    packs: Sequence[tuple[PackPlan, PackHeader]], chunk_bytes: int, large_bytes_min: int | None = None
) -> SavePlan:
    """Return a plan with its totals.

    Args:
        packs: What is written.
        chunk_bytes: Raw bytes of each chunk but the last of a piece.
        large_bytes_min: Bytes of the smallest piece to compare with the base step; None: compare none.
    """
    items = [item for pack, _ in packs for item in pack.items]
    large = (
        ()
        if large_bytes_min is None
        else tuple((pack.name, item) for pack, _ in packs for item in pack.items if item.bytes >= large_bytes_min)
    )
    tensors = {item.tensor.fqn for item in items}
    return SavePlan(tuple(packs), sum(item.bytes for item in items), len(tensors), large, chunk_bytes)


class PlanCache(Generic[T]):
    """The plans of the layouts that were saved last, or what else follows from a layout.

    A plan depends only on this rank's shards and on the holders that the shards do not state. Both are
    compared at every save, so a layout that has changed on this rank or another is planned again.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[Holders, T]] = OrderedDict()

    def of(self, shards: bytes, holders: Holders, plan: Callable[[], T]) -> tuple[T, bool]:
        """Return the plan of a layout, and whether it is a new one.

        Args:
            shards: Digest of this rank's shards (FQNs, dtypes, shapes, layouts, regions, roles, in order), and of all
                else that decides the plan.
            holders: Holders of the plain tensors among them, and of those on sibling meshes.
            plan: Computes the plan.
        """
        known = self._known.get(shards)
        if known is not None and _are_equal(known[0], holders):
            self._known.move_to_end(shards)
            return known[1], False
        new_plan = plan()
        self._known[shards] = holders, new_plan
        while len(self._known) > _PLANS_MAX:
            self._known.popitem(last=False)
        return new_plan, True


def _are_equal(known: Holders, holders: Holders) -> bool:
    """Return whether both state the same ranks for the same tensors."""
    if known.keys() != holders.keys():
        return False
    # Tens of thousands of tensors share a few groups of thousands of ranks. Equal groups of two saves are different
    # objects, so `==` of the mappings would compare the ranks of each tensor.
    equal: dict[tuple[int, int], bool] = {}
    for fqn, ranks in holders.items():
        groups = id(known[fqn]), id(ranks)
        if groups not in equal:
            equal[groups] = known[fqn] == ranks
        if not equal[groups]:
            return False
    return True
