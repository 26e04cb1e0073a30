"""The records that a save agreement exchanges through the key-value store."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, Protocol

from holdfast.base.geometry.mesh_packing import PackedMeshes
from holdfast.base.geometry.rank_ranges import RankRanges
from holdfast.base.geometry.tensor import Role
from holdfast.base.ports.framework import UnmatchedPattern
from holdfast.base.types.health import Health
from holdfast.core.plan.declared_parts import DeclaredParts, DeclaredTensor, ReplicaDivisions, Sum
from holdfast.core.plan.siblings import TensorOnMesh
from holdfast.errors import CheckpointError, InvalidError, UnavailableError, first_three
from holdfast.training.coordination.message_codec import decode_message, encode_message
from holdfast.training.coordination.save_context import SaveContext

Plain = Mapping[str, tuple[str, tuple[int, ...], Role]]
"""Plain tensors by FQN: dtype, global shape, role."""

_STATEMENT = struct.Struct("<q8s8s8s8s8s8s")
_REFUSAL_PREFIX = b"!" * 8
"""Eight bytes that begin no statement: as a step they are above 2**61."""

_OVERWRITES = -2
"""Step of a save by path that may overwrite, in a statement."""

_MISUSE_PREFIX = b"?" * 8
"""Begins the refusal of a rank whose call is wrong."""


class StatedMesh(NamedTuple):
    """A mesh that holds tensors of a rank. Every rank sends one per mesh, so the record has no field names."""

    digest: str
    """Digest of shape and ranks, 16 hex digits."""

    first: int
    """First rank of the mesh."""

    mesh: PackedMeshes | None
    """The mesh itself, stated by its first rank only: all its ranks would be a number per rank and mesh."""


@dataclass(frozen=True, slots=True)
class Statement:
    """The statement of one rank at the start of a save: 56 bytes, the patterns that match nothing, and its meshes."""

    step: int
    """The step being saved; -1 for a save by path."""

    location: bytes
    """8-byte digest of the URL of the location."""

    layout: bytes
    """8-byte fingerprint of all inputs of a plan; ranks with equal fingerprints form a class."""

    agreeing: bytes
    """8-byte digest of samples of the plain tensors that must agree."""

    other: bytes
    """8-byte digest of the plain tensors and values that may differ, but for those that are known to differ."""

    known: bytes
    """8-byte digest of those that are known to differ."""

    parts: bytes = bytes(8)
    """8-byte sum of the declared parts (`core/plan/declared_parts.py`); zeros without any."""

    unmatched: tuple[UnmatchedPattern, ...] = ()
    """Patterns of `only` and `skip` that match no name of this rank's state."""

    meshes: tuple[StatedMesh, ...] = ()
    """The meshes of the rank's DTensors, in the order of the tensors."""

    overwrites: bool = False
    """Whether a save by path may replace a checkpoint."""

    is_loaded: bool = False
    """Whether the rank holds the step that is saved, as it loaded it."""

    compresses: bool = False
    """Whether the rank's settings let saves compress: then a weight and its master have one owner."""

    def encode(self) -> bytes:
        """Return the statement as 56 bytes, followed by patterns and meshes if there are any."""
        digests = self.location, self.layout, self.agreeing, self.other, self.known, self.parts
        head = _STATEMENT.pack(_OVERWRITES if self.overwrites else self.step, *digests)
        tail = self.unmatched, self.meshes, self.is_loaded, self.compresses
        return head + encode_message(tail) if any(tail) else head

    @classmethod
    def decode(cls, record: bytes) -> Statement:
        """Return the statement that `encode` wrote."""
        unmatched, meshes, is_loaded, compresses = _decoded_tail(record[_STATEMENT.size :])
        step, location, layout, agreeing, other, known, parts = _STATEMENT.unpack(record[: _STATEMENT.size])
        overwrites = step == _OVERWRITES
        step = -1 if overwrites else step
        return cls(
            step,
            location,
            layout,
            agreeing,
            other,
            known,
            parts,
            unmatched,
            meshes,
            overwrites,
            is_loaded=is_loaded,
            compresses=compresses,
        )


@dataclass(frozen=True, slots=True)
class Stated:
    """A statement and the ranks that made it.

    Most ranks of a layout state the same. If rank 0 looked at each, 16,384 statements would take 0.2 s longer.
    """

    statement: Statement
    ranks: Sequence[int]
    """Ascending. Of several, the one with the lowest rank is first."""


@lru_cache(maxsize=1024)
def _decoded_tail(tail: bytes) -> tuple[tuple[UnmatchedPattern, ...], tuple[StatedMesh, ...], bool, bool]:
    # Cached: rank 0 decodes one statement per rank, and thousands of them have equal meshes.
    if not tail:
        return (), (), False, False
    return decode_message(tail, tuple[tuple[UnmatchedPattern, ...], tuple[StatedMesh, ...], bool, bool])


@dataclass(frozen=True, slots=True)
class Details:
    """The facts behind a statement, by name; published by the ranks that rank 0 asks."""

    location: str
    """URL of the location."""

    plain: Plain
    """Its plain tensors."""

    agreeing: Mapping[str, str]
    """Sample digest of each plain tensor that must agree, hex."""

    other: Mapping[str, str]
    """Digest of each buffer, object and value that may differ, hex."""

    lossy: Sequence[str]
    """Names in `other` of which one rank's cannot stand for all: integer buffers of several elements, and objects."""

    declared: Mapping[str, DeclaredTensor] = field(default_factory=dict)
    """The tensors of which the rank declares parts."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result of an agreement, as one rank uses it."""

    sequence: int
    """Number of the save."""

    attempt: str
    """Id of the attempt."""

    class_ranks: tuple[int, ...]
    """Ranks with this rank's layout, ascending."""

    shared: Mapping[str, tuple[int, ...]]
    """If ranks form several classes: the ranks that hold each plain tensor, ascending."""

    is_leader: bool
    """Whether this rank writes values and provenance for its class."""

    divergent: tuple[str, ...]
    """Buffers, objects and values that differ between ranks."""

    drift: Health | None
    """The replicas that differ, if the save keeps the lowest rank's. Then that rank writes every plain tensor, and the
    mesh with the lowest rank writes every DTensor on siblings."""

    context: SaveContext
    """Rank 0's decisions for every rank."""

    siblings: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of this rank's DTensors on sibling meshes: the ranks of all siblings that hold the same part, ascending."""

    sibling_writers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of those, the ranks that write the part: all, or if replicas drift those of the mesh with the lowest rank."""

    @property
    def differing(self) -> tuple[str, ...]:
        """Every name that differs between ranks; of replicas that drift, the first."""
        drifting = (self.drift and self.drift.divergent) or {}
        return tuple(sorted({*self.divergent, *drifting}))

    def holders_of(self, fqn: str) -> tuple[int, ...]:
        """Return the ranks that hold a plain tensor of this rank."""
        return self.shared.get(fqn, self.class_ranks)

    def holders_of_each(self, fqns: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Return the ranks that hold each of this rank's plain tensors."""
        holders = dict.fromkeys(fqns, self.class_ranks)
        holders.update((fqn, ranks) for fqn, ranks in self.shared.items() if fqn in holders)
        return holders


@dataclass(frozen=True, slots=True)
class SiblingMeshes:
    """The families of sibling meshes of a job, as rank 0 sends them to every rank."""

    families: Sequence[Sequence[PackedMeshes]]
    """The meshes of each family."""

    slots: Sequence[Sequence[int]]
    """By class and slot: number of the family of the tensors in the slot, or `NO_FAMILY`."""

    exceptions: Mapping[str, int]
    """By FQN: number of the family of a tensor that differs from its slot."""

    replicas: ReplicaDivisions = field(default_factory=ReplicaDivisions)
    """The replicas of tensors with coordinates; their groups are numbered after the families."""

    def family_of(self, class_number: int, slot: int, fqn: str) -> int:
        """Return the number of the family of a tensor, or `NO_FAMILY`."""
        return self.exceptions.get(fqn, self.slots[class_number][slot])


@dataclass(frozen=True, slots=True)
class PartsQuestion:
    """A question about declared parts, which every rank answers: rank 0 looks for the tensors that are wrong."""

    number: int
    """Number of the question in its save, from 1."""

    intervals: Sequence[tuple[str, str]] = ()
    """First and last FQN of each interval of names; of each, a rank publishes the sum of what it declares."""

    fqns: Sequence[str] = ()
    """Tensors of which a rank publishes what it declares."""

    by_name: bool = False
    """Whether a rank publishes the sum of each tensor of which it declares a part."""

    @property
    def key(self) -> str:
        """Name of the answers, and of the verdict that follows."""
        return f"parts{self.number}"


class DescribedState(Protocol):
    """The state of a rank, described as far as rank 0 asks."""

    def details(self) -> Details:
        """Return the facts behind the statement, by name."""
        ...

    def declared_tensors(self) -> Mapping[str, DeclaredTensor]:
        """Return the tensors of which this rank declares parts, by FQN."""
        ...

    def whole_sum(self) -> Sum:
        """Return the sum of those tensors as a whole."""
        ...

    def part_sums(self) -> Mapping[str, Sum]:
        """Return the sum of what this rank declares of each tensor, by FQN."""
        ...

    def declared_parts(self, fqns: Collection[str]) -> Mapping[str, DeclaredParts]:
        """Return what this rank declares of some tensors, by FQN."""
        ...

    def tensors_on_meshes(self) -> Mapping[str, TensorOnMesh]:
        """Return the DTensors of this rank, by FQN."""
        ...

    def sibling_samples(self, siblings: SiblingMeshes, class_number: int) -> Mapping[int, Mapping[str, str]]:
        """Return by family and FQN the digest of samples of each tensor on sibling meshes, hex."""
        ...

    def sibling_holders(
        self, siblings: SiblingMeshes, class_number: int, *, lowest_only: bool = False
    ) -> Mapping[str, tuple[int, ...]]:
        """Return by FQN the ranks that hold what this rank holds of each tensor on sibling meshes, ascending.

        Args:
            siblings: The sibling meshes.
            class_number: The class of this rank.
            lowest_only: Whether of each family only the mesh with the lowest rank counts.
        """
        ...


@dataclass(frozen=True, slots=True)
class SaveVerdict:
    """Rank 0's decision on one numbered save: `refused`, `context`, or one question to the ranks.

    The questions are `describe`, `parts`, `compare` and `name`. Another verdict follows a verdict with a question.
    """

    save_id: tuple[int, str]
    """Step and digest of the location. Distinguishes a retry of this save from another save with the same number. No
    digest: the call is wrong on the rank that set the verdict, so it does not know which save the others make."""

    refused: str | None = None
    """The error of every rank, as `error_text` wrote it."""

    raises: bool = False
    """Whether the call raises the error, on every rank. Otherwise the handle holds it, on every rank."""

    has_all: bool = False
    """If refused: whether every rank had stated or refused by then. So no rank is at an earlier agreement any more."""

    describe: RankRanges | None = None
    """Ranks that must publish details before the next verdict."""

    parts: PartsQuestion | None = None
    """What every rank must publish of its declared parts before the next verdict."""

    compare: bool = False
    """Whether ranks with siblings must publish digests of samples before the next verdict."""

    name: RankRanges | None = None
    """Ranks that must publish their samples by name before the next verdict."""

    siblings: SiblingMeshes | None = None
    """The sibling meshes, if the job has any; set from `compare` on."""

    classes: Sequence[RankRanges] = ()
    """Ranks by layout, ascending; empty if all ranks have one layout."""

    divergent: tuple[str, ...] = ()
    """Buffers, objects and values that differ between ranks."""

    drift: Health | None = None
    """The replicas that differ, the first of many, if the save keeps the lowest rank's."""

    uneven: tuple[str, ...] = ()
    """Values that some ranks of a class lack."""

    sharing: RankRanges = ()
    """Numbers of the classes that hold plain tensors which other classes hold too: a record names those."""

    context: SaveContext | None = None
    """Rank 0's decisions, if the save goes ahead."""

    @property
    def next_key(self) -> str | None:
        """Name of the key of the verdict that follows; None if this verdict is the last."""
        if self.describe is not None:
            return "final"
        if self.parts is not None:
            return self.parts.key
        return "compared" if self.compare else "named" if self.name is not None else None

    @property
    def answer_key(self) -> str:
        """Name of the key under which a rank that is asked answers the question."""
        if self.describe is not None:
            return "details"
        if self.parts is not None:
            return self.parts.key
        return "samples" if self.compare else "names"


def encode_refusal(error_text: str, *, is_misuse: bool = False) -> bytes:
    """Return the record that a rank sets instead of its statement if it cannot save, or if its call is wrong."""
    return (_MISUSE_PREFIX if is_misuse else _REFUSAL_PREFIX) + error_text.encode()


def refusal_in(record: bytes) -> str | None:
    """Return the error text of a refusal; None if the record is a statement."""
    is_refusal = record.startswith((_REFUSAL_PREFIX, _MISUSE_PREFIX))
    return record[len(_REFUSAL_PREFIX) :].decode() if is_refusal else None


def is_misuse(record: bytes) -> bool:
    """Return whether a record is the refusal of a rank whose call is wrong."""
    return record.startswith(_MISUSE_PREFIX)


def ranks_listed(ranks: Sequence[int]) -> str:
    """Return ranks for a message, at most three of them."""
    return f"[{first_three(ranks)}]"


def ranks_of(stated: Iterable[Stated]) -> list[int]:
    """Return the ranks of some statements, ascending."""
    return sorted(chain.from_iterable(each.ranks for each in stated))


def ranks_that_differ(classes: Sequence[Sequence[Stated]]) -> list[int]:
    """Return the ranks whose values differ from those of the lowest rank of their class."""
    differing: list[int] = []
    for lowest, *others in classes:
        values = lowest.statement.agreeing, lowest.statement.other
        for each in others:
            if (each.statement.agreeing, each.statement.other) != values:
                differing += each.ranks
    return differing


def skew_error_of(name: str, stated: Sequence[Stated]) -> InvalidError | None:
    """Return the error if ranks save different steps, or to different paths."""
    by_step: dict[int, list[Stated]] = {}
    for each in stated:
        by_step.setdefault(each.statement.step, []).append(each)
    if len(by_step) > 1:
        steps = first_three(
            f"step {step} on ranks {ranks_listed(ranks_of(savers))}" for step, savers in sorted(by_step.items())
        )
        return InvalidError(
            f"save: ranks save different steps: {steps}; expected one step. Nothing was saved. "
            "Pass the same step on every rank"
        )
    elsewhere = [each for each in stated if each.statement.location != stated[0].statement.location]
    if elsewhere:
        return InvalidError(
            f"{name}: ranks {ranks_listed(ranks_of(elsewhere))} save to another path than rank 0; expected one path. "
            "Make it the same on every rank (a time or rank in it differs)"
        )
    return None


def overwrite_error_of(name: str, stated: Sequence[Stated]) -> InvalidError | None:
    """Return the error if only some ranks pass `overwrite=True`."""
    overwriting = ranks_of(each for each in stated if each.statement.overwrites)
    others = ranks_of(each for each in stated if not each.statement.overwrites)
    if not overwriting or not others:
        return None
    return InvalidError(
        f"{name}: ranks {ranks_listed(overwriting)} pass overwrite=True and ranks {ranks_listed(others)} do not; "
        "expected the same on every rank. Nothing was saved, and nothing was replaced. Make it the same on every rank"
    )


def compression_error_of(name: str, stated: Sequence[Stated]) -> InvalidError | None:
    """Return the error if only some ranks may compress: they would disagree about who writes what."""
    compressing = ranks_of(each for each in stated if each.statement.compresses)
    others = ranks_of(each for each in stated if not each.statement.compresses)
    if not compressing or not others:
        return None
    return InvalidError(
        f"{name}: settings.compression is 'on' or 'auto' on ranks {ranks_listed(compressing)} and 'off' on ranks "
        f"{ranks_listed(others)}; expected the same on every rank. Nothing was saved. Pass the same settings on every "
        "rank"
    )


def absence_error_of(name: str, absent: Sequence[int], world_size: int, limit: str) -> UnavailableError | None:
    """Return the error that names the ranks that did not call; None if every rank did."""
    if not absent:
        return None
    return UnavailableError(
        f"{name}: ranks {ranks_listed(absent)} did not call save {limit}; expected all {world_size} ranks. "
        "Every rank must call save; look at those ranks, or raise settings.agreement_timeout_seconds"
    )


def as_unavailable(error: Exception) -> UnavailableError:
    """Return a failure of the key-value store as one of our errors."""
    return error if isinstance(error, UnavailableError) else UnavailableError(str(error))


def as_failure(error: Exception) -> CheckpointError:
    """Return any failure of an agreement as one of our errors."""
    if isinstance(error, CheckpointError):
        return error
    text = str(error) if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
    return UnavailableError(text)
