"""Rank 0's judgement of meshes in the agreement on a save: siblings are replicas, others under one name are refused.

Each rank states digests of its meshes. Only their first ranks state the meshes themselves.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from holdfast.base.geometry.mesh_packing import packed, unpacked
from holdfast.base.geometry.rank_ranges import ranks_in
from holdfast.base.geometry.tensor import Mesh
from holdfast.base.types.health import with_drift
from holdfast.core.format.digest import short_digest_of
from holdfast.core.plan.declared_parts import ReplicaDivisions
from holdfast.core.plan.rank_differences import Drift
from holdfast.core.plan.siblings import RankClass, Siblings, SiblingSearch, TensorOnMesh, format_mesh
from holdfast.errors import InvalidError, first_three
from holdfast.training.coordination.agreement.records import (
    DescribedState,
    Plain,
    SaveVerdict,
    SiblingMeshes,
    Stated,
    ranks_of,
)
from holdfast.training.coordination.job import Job
from holdfast.training.coordination.message_codec import decode_message, encode_message

_Holders = Mapping[str, tuple[int, ...]]
"""By FQN, ranks in ascending order."""

_Read = Callable[[str, Sequence[int]], list[bytes]]
"""Returns what ranks published under a name."""

_Samples = Mapping[int, Mapping[str, str]]
"""By family and FQN the digest of samples, hex."""


def encode_tensors(tensors: Mapping[str, TensorOnMesh]) -> bytes:
    """Return the record of the DTensors of the lowest rank of a class, by FQN."""
    return zlib.compress(encode_message(tensors), 1)


def publish_samples(
    verdict: SaveVerdict,
    state: DescribedState,
    rank: int,
    classes: Sequence[Sequence[int]],
    publish: Callable[[str, bytes], None],
) -> None:
    """Publish what a verdict asks of this rank: one digest per family, or the samples by name."""
    assert verdict.siblings is not None, "samples are asked of siblings"
    is_named = rank in ranks_in(verdict.name or ())
    if not (verdict.compare or is_named):
        return
    own_class = next(number for number, ranks in enumerate(classes) if rank in ranks)
    samples = state.sibling_samples(verdict.siblings, own_class)
    if is_named:
        publish("names", zlib.compress(encode_message(samples), 1))
    elif samples:
        publish("samples", encode_message(_family_digests(samples)))


def siblings_in(verdict: SaveVerdict, state: DescribedState, class_number: int) -> tuple[_Holders, _Holders]:
    """Return by FQN the ranks that hold what this rank holds of each tensor on sibling meshes, and those that write it.

    All of them share the writing. If replicas drift, the mesh with the lowest rank writes: a parameter and its moments
    must come from one replica.
    """
    if verdict.siblings is None:
        return {}, {}
    holders = state.sibling_holders(verdict.siblings, class_number)
    if verdict.drift is None:
        return holders, holders
    return holders, state.sibling_holders(verdict.siblings, class_number, lowest_only=True)


def _family_digests(samples: _Samples) -> dict[int, str]:
    """Return one digest per family, so that equal siblings exchange a few bytes."""
    return {
        family: short_digest_of(*(f"{fqn}\0{digest}".encode("utf-8", "surrogatepass") for fqn, digest in names)).hex()
        for family, names in ((family, sorted(by_name.items())) for family, by_name in samples.items())
    }


class MeshJudgement:
    """What rank 0 knows of the meshes of all ranks, in one save."""

    def __init__(self, save_name: str, classes: Sequence[Sequence[Stated]]) -> None:
        """Sort the meshes by class and slot.

        Args:
            save_name: Name of the save, for messages.
            classes: The statements of each class.
        """
        self._save_name = save_name
        self._meshes: dict[str, Mesh] = {}
        first_ranks: dict[str, int] = {}
        for each in chain.from_iterable(classes):
            for stated in each.statement.meshes:
                first_ranks[stated.digest] = stated.first
                if stated.mesh is not None and stated.digest not in self._meshes:
                    (self._meshes[stated.digest],) = unpacked([stated.mesh])
        self._search = SiblingSearch([_rank_class(members) for members in classes], self._meshes, first_ranks)
        self._siblings = self._search.of_one_class() if len(classes) == 1 else None
        self._different: list[tuple[int, list[list[int]]]] = []
        """Families with different samples: number, and the ranks at one position of its meshes by their samples."""
        self._replicas = ReplicaDivisions()
        self._groups: list[tuple[int, ...]] = []
        """The replicas of tensors with coordinates. Each group is a family, whose meshes are its single ranks."""

    def add(self, replicas: ReplicaDivisions) -> None:
        """Take note of the replicas of tensors with coordinates."""
        self._replicas, self._groups = replicas, replicas.groups

    @property
    def are_matched_without_names(self) -> bool:
        """Whether all meshes of the one class are siblings, so that no rank must name its tensors."""
        return self._siblings is not None

    @property
    def siblings(self) -> SiblingMeshes | None:
        """The siblings as every rank receives them; None if each tensor is on one mesh."""
        found = self._found
        families = [packed(self._family(number)) for number in range(self._families)]
        return SiblingMeshes(families, found.slots, found.exceptions, self._replicas) if families else None

    @property
    def sibling_ranks(self) -> tuple[int, ...]:
        """The ranks on sibling meshes, ascending."""
        meshes = (mesh for number in range(self._families) for mesh in self._family(number))
        return tuple(sorted({rank for mesh in meshes for rank in mesh.ranks}))

    def judge_names(
        self, tensors: Sequence[bytes], plain: Sequence[Plain], declared: Sequence[Collection[str]]
    ) -> frozenset[str]:
        """Find the siblings by name; return the FQNs of all DTensors.

        Args:
            tensors: By class the DTensors that its lowest rank published.
            plain: By class its plain tensors.
            declared: By class the names of which its ranks declare parts.
        Raises:
            InvalidError: Ranks hold unrelated tensors under one name, or one is a tensor subclass on some ranks only.
        """
        named = [decode_message(zlib.decompress(record), dict[str, TensorOnMesh]) for record in tensors]
        self._require_one_class(named, declared)
        self._siblings, texts, unstepped = self._search.by_name(named, plain)
        if unstepped and not texts:
            raise InvalidError(
                f"{self._save_name}: optimizers of some ranks of a mesh have no state of a parameter that others have "
                f"stepped: {first_three(unstepped)}. Expected state on every rank of the mesh; a parameter without a "
                "gradient (an expert without tokens, frozen on one rank) is not stepped. Give it a gradient of zeros "
                "there before optimizer.step(), or leave the state out with skip="
            )
        if not texts:
            return frozenset(fqn for each in named for fqn in each)
        raise InvalidError(
            f"{self._save_name}: ranks hold one name on meshes that are no replicas of each other: "
            f"{first_three(texts)}. Expected one mesh, or disjoint meshes of equal shape with equal dtype, shape and "
            "placements. If these are different modules (e.g. two pipeline stages that reuse a name), give each a name "
            "of its own. Otherwise build the module on one mesh, or on mesh['dp'] of one init_device_mesh"
        )

    def _require_one_class(
        self, named: Sequence[Mapping[str, TensorOnMesh]], declared: Sequence[Collection[str]]
    ) -> None:
        """Refuse a DTensor that is a plain tensor on some ranks, and in parts below its name on others.

        Raises:
            InvalidError: Names the first three.
        """
        everywhere = {fqn for each in named for fqn in each}
        mixed = {
            outer
            for held, parts in zip(named, declared, strict=True)
            for fqn in parts
            for outer in (fqn[:at] for at, letter in enumerate(fqn) if letter == ".")
            if outer in everywhere and outer not in held
        }
        if mixed:
            raise InvalidError(
                f"{self._save_name}: on some ranks a tensor subclass, on others a plain tensor: "
                f"{first_three(sorted(mixed))}. Expected one class on all ranks of its mesh: as an optimizer does that "
                "quantises large parts only, where the split is uneven. Use a number of ranks that divides its length, "
                "or leave it out with skip="
            )

    def differing_ranks(self, ranks: Sequence[int], read: _Read) -> list[int]:
        """Return pairs of ranks whose samples differ, one pair per family; empty if all siblings are equal.

        Args:
            ranks: The ranks that were asked for samples.
            read: Returns what they published under a name.
        Raises:
            CheckpointError: A rank refused.
        """
        records = zip(ranks, read("samples", ranks), strict=True)
        digests = {rank: decode_message(record, dict[int, str]) for rank, record in records}
        for number in range(self._families):
            # Ranks at equal positions of siblings hold equal pieces.
            for ranks in zip(*(mesh.ranks for mesh in self._family(number)), strict=True):
                groups: dict[str | None, list[int]] = {}
                for rank in ranks:
                    groups.setdefault(digests[rank].get(number), []).append(rank)
                if len(groups) > 1:
                    self._different.append((number, [*groups.values()]))
                    break
        return sorted({group[0] for _, groups in self._different for group in groups[:2]})

    def judge_difference(self, verdict: SaveVerdict, ranks: Sequence[int], read: _Read, job: Job) -> SaveVerdict:
        """Return the verdict with the tensors that drift, if the save keeps those of the lowest mesh.

        Args:
            verdict: The verdict that asked for samples by name.
            ranks: The ranks that it asked.
            read: Returns what they published under a name.
            job: Its settings decide.
        Raises:
            InvalidError: The save keeps none of them; the message names the tensors.
        """
        records = [zlib.decompress(record) for record in read("names", ranks)]
        samples = {
            rank: decode_message(record, dict[int, dict[str, str]]) for rank, record in zip(ranks, records, strict=True)
        }
        texts: list[str] = []
        drift = Drift()
        for number, groups in self._different:
            first, other = (group[0] for group in groups[:2])
            by_name, other_by_name = samples[first][number], samples[other][number]
            differing = [fqn for fqn in sorted(by_name) if by_name[fqn] != other_by_name.get(fqn)]
            meshes = {rank: mesh for mesh in self._family(number) for rank in mesh.ranks}
            names = [format_mesh(meshes[rank]) for rank in (first, other)]
            if number >= len(self._found.families):
                names = [f"rank {first}", f"rank {other} with equal coordinates"]
            texts += [f"{fqn} ({names[0]} ≠ {names[1]})" for fqn in differing]
            for fqn in differing:
                drift.add(fqn, groups)
        if job.settings.replicas == "refuse":
            raise InvalidError(
                f"{self._save_name}: replicas hold different values under one name: {first_three(texts)}. "
                "Expected equal copies on sibling meshes, and in equal boxes on ranks with equal coordinates. If these "
                "are different modules (e.g. two pipeline stages that reuse a name), give each a name of its own. If "
                "they are replicas, training has made them diverge: broadcast them from one rank, or save those of the "
                "lowest mesh or rank with Settings(replicas='lowest')"
            )
        if job.is_first_occurrence("siblings differ"):
            job.warn_once(self._save_name, drift.warning("those of the mesh with the lowest rank"))
        return replace(verdict, name=None, drift=with_drift(drift.health, verdict.drift))

    @property
    def _found(self) -> Siblings:
        assert self._siblings is not None, "meshes are matched before siblings are asked for"
        return self._siblings

    @property
    def _families(self) -> int:
        return len(self._found.families) + len(self._groups)

    def _family(self, number: int) -> list[Mesh]:
        """Return the meshes of a family by their first ranks."""
        group = number - len(self._found.families)
        if group >= 0:
            return [Mesh((1,), (rank,)) for rank in self._groups[group]]
        return sorted((self._meshes[digest] for digest in self._found.families[number]), key=lambda mesh: mesh.ranks)


def _rank_class(members: Sequence[Stated]) -> RankClass:
    slots: list[dict[str, list[int]]] = [{} for _ in members[0].statement.meshes]
    for each in members:
        for slot, stated in zip(slots, each.statement.meshes, strict=True):
            slot.setdefault(stated.digest, []).extend(each.ranks)
    return RankClass(
        tuple(ranks_of(members)), [{digest: sorted(ranks) for digest, ranks in slot.items()} for slot in slots]
    )
