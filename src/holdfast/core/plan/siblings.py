"""Finds sibling meshes, whose ranks are replicas, and the names under which ranks hold unrelated tensors.

Siblings are disjoint meshes of equal shape that hold the same FQN with equal dtype, shape and placements. So
`fully_shard(mesh["dp"])` leaves each module that the tensor-parallel plan does not name: once for each rank of `tp`.
Ranks at equal coordinates of siblings hold equal pieces. Meshes are known by digest, because a rank states only that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.base.geometry.tensor import Mesh
from holdfast.base.geometry.value_class import value_class
from holdfast.errors import first_three

Ranks = tuple[int, ...]

NO_FAMILY = -1
"""In place of the number of a family: the tensor is on one mesh only."""


@value_class
class TensorOnMesh:
    """How the ranks of one class hold a DTensor."""

    slot: int
    """Number of its mesh among the meshes of a rank, in the order of the rank's tensors."""

    dtype: str
    """Element type."""

    global_shape: tuple[int, ...]
    """Shape of the whole tensor."""

    placements: tuple[str, ...]
    """One per mesh dimension, as text."""

    is_state: bool = False
    """Whether it is state of an optimizer."""


@dataclass(frozen=True, slots=True)
class _Mismatch:
    """Why meshes are not one family."""

    text: str
    """The meshes or the ranks that differ."""

    is_absence: bool = False
    """Whether a rank of a mesh holds nothing under the name."""


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks whose states have equal layouts up to the ranks of their meshes."""

    ranks: Ranks
    """The ranks, ascending."""

    slots: Sequence[Mapping[str, Sequence[int]]]
    """By slot: the digests of the meshes in that slot, each with the ranks of the class that are on it."""


@dataclass(frozen=True, slots=True)
class Siblings:
    """The families of sibling meshes of a job."""

    families: tuple[tuple[str, ...], ...]
    """Digests of the meshes of each family, at least two."""

    slots: tuple[tuple[int, ...], ...]
    """By class and slot: number of the family of most tensors in the slot, or `NO_FAMILY`."""

    exceptions: Mapping[str, int]
    """By FQN: number of the family of a tensor that differs from its slot, or `NO_FAMILY`."""


class SiblingSearch:
    """The search for siblings among the meshes that the ranks of a job state."""

    def __init__(
        self, classes: Sequence[RankClass], meshes: Mapping[str, Mesh], first_ranks: Mapping[str, int]
    ) -> None:
        """Find nothing yet.

        Args:
            classes: The classes of ranks.
            meshes: Meshes by digest. A mesh is absent if its first rank does not state it.
            first_ranks: First rank of every mesh, by digest.
        """
        self._classes, self._meshes, self._first_ranks = classes, meshes, first_ranks
        self._numbers: dict[tuple[str, ...], int] = {}

    def of_one_class(self) -> Siblings | None:
        """Return the siblings of a job of one class without the names of its tensors; None if meshes do not match."""
        (only,) = self._classes
        if any(self._mismatch(slot) for slot in only.slots):
            return None
        slots = tuple(self._family(slot) for slot in only.slots)
        return Siblings(tuple(self._numbers), (slots,), {})

    def by_name(
        self, tensors: Sequence[Mapping[str, TensorOnMesh]], plain: Sequence[Mapping[str, object]]
    ) -> tuple[Siblings, list[str], list[str]]:
        """Return the siblings, and texts: of names whose holders are no replicas of each other, and of absent state.

        State of an optimizer is absent where its parameter has not been stepped yet.

        Args:
            tensors: By class the DTensors of each rank, by FQN.
            plain: By class the plain tensors of each rank, by FQN.
        """
        held: dict[str, list[tuple[int, TensorOnMesh]]] = {}
        for number, each in enumerate(tensors):
            for fqn, tensor in each.items():
                held.setdefault(fqn, []).append((number, tensor))
        texts, unstepped = self._plain_and_sharded(held, plain), list[str]()
        # A model has thousands of names on a few combinations of meshes.
        known: dict[tuple[tuple[int, TensorOnMesh], ...], tuple[int, _Mismatch | None]] = {}
        families: dict[str, int] = {}
        votes: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        for fqn, holders in held.items():
            key = tuple(holders)
            if key not in known:
                known[key] = self._judged(key)
            family, problem = known[key]
            if problem is not None:
                is_unstepped = problem.is_absence and holders[0][1].is_state
                (unstepped if is_unstepped else texts).append(f"{fqn} ({problem.text})")
            families[fqn] = family
            for number, tensor in holders:
                votes[number, tensor.slot][family] += 1
        slots = tuple(
            tuple(_most_common(votes.get((number, slot))) for slot in range(len(each.slots)))
            for number, each in enumerate(self._classes)
        )
        exceptions = {
            fqn: families[fqn]
            for fqn, holders in held.items()
            if any(slots[number][tensor.slot] != families[fqn] for number, tensor in holders)
        }
        return Siblings(tuple(self._numbers), slots, exceptions), texts, unstepped

    def _judged(self, holders: tuple[tuple[int, TensorOnMesh], ...]) -> tuple[int, _Mismatch | None]:
        """Return the family of tensors that some classes hold under one name, and the problem if there is one."""
        meshes: dict[str, list[int]] = {}
        for number, tensor in holders:
            for digest, ranks in self._classes[number].slots[tensor.slot].items():
                meshes.setdefault(digest, []).extend(ranks)
        (first_class, first), *others = holders
        for number, tensor in others:
            if _content(tensor) != _content(first):
                one, other = self._ranks_text(first_class), self._ranks_text(number)
                text = f"{_format_tensor(first)} on {one} ≠ {_format_tensor(tensor)} on {other}"
                return NO_FAMILY, _Mismatch(text)
        problem = self._mismatch(meshes)
        return (self._family(meshes) if problem is None else NO_FAMILY), problem

    def _family(self, digests: Mapping[str, object]) -> int:
        if len(digests) < 2:
            return NO_FAMILY
        return self._numbers.setdefault(tuple(sorted(digests)), len(self._numbers))

    def _mismatch(self, stated: Mapping[str, Sequence[int]]) -> _Mismatch | None:
        """Return why meshes are not one family; None if they are.

        Args:
            stated: Digests of meshes, each with the ranks on it that hold the tensor.
        """
        meshes = [self._meshes.get(digest) for digest in stated]
        for mesh, (digest, ranks) in zip(meshes, stated.items(), strict=True):
            absent = [self._first_ranks[digest]] if mesh is None else sorted(set(mesh.ranks).difference(ranks))
            if absent:
                # A rank holds one tensor of a name. So if meshes overlap, a rank is absent from one of them.
                lacking = f"ranks [{first_three(sorted(ranks))}] hold it on {self._mesh_text(digest)}"
                other = next((other for other, held in stated.items() if absent[0] in held), None)
                if other is None:
                    return _Mismatch(f"{lacking}; ranks [{first_three(absent)}] do not hold it", is_absence=True)
                at = self._mesh_text(other)
                return _Mismatch(f"{lacking}; rank {absent[0]} holds it on {at}: the meshes overlap")
            assert mesh is not None, "an unknown mesh lacks its first rank"
            if meshes[0] is not None and mesh.shape != meshes[0].shape:
                return _Mismatch(f"{format_mesh(meshes[0])} and {format_mesh(mesh)} have different sizes")
        return None

    def _mesh_text(self, digest: str) -> str:
        mesh = self._meshes.get(digest)
        return f"a mesh that begins with rank {self._first_ranks[digest]}" if mesh is None else format_mesh(mesh)

    def _plain_and_sharded(
        self, held: Mapping[str, Sequence[tuple[int, TensorOnMesh]]], plain: Sequence[Mapping[str, object]]
    ) -> list[str]:
        return [
            f"{fqn} (a plain tensor on {self._ranks_text(number)}, a DTensor on {self._ranks_text(held[fqn][0][0])})"
            for number, each in enumerate(plain)
            for fqn in each
            if fqn in held
        ]

    def _ranks_text(self, number: int) -> str:
        return f"ranks [{first_three(self._classes[number].ranks)}]"


def format_mesh(mesh: Mesh) -> str:
    """Return a mesh for a message, at most three of its ranks."""
    return f"mesh {list(mesh.shape)} of ranks [{first_three(mesh.ranks)}]"


def _content(tensor: TensorOnMesh) -> tuple[object, ...]:
    return tensor.dtype, tensor.global_shape, tensor.placements


def _format_tensor(tensor: TensorOnMesh) -> str:
    return f"{tensor.dtype} {list(tensor.global_shape)} [{', '.join(tensor.placements)}]"


def _most_common(votes: Counter[int] | None) -> int:
    return NO_FAMILY if votes is None else votes.most_common(1)[0][0]
