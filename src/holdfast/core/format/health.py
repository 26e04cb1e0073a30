"""Encode and decode the health of a checkpoint: for the manifest as JSON, for a rank's part as msgpack."""

from __future__ import annotations

import itertools
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.base.types.health import Expectation, Health, ReplicaGroup, Replicas
from holdfast.core.format.index.columns import decode_column, encode_column
from holdfast.core.format.sealed_json import RankNumber, Text, convert
from holdfast.errors import CorruptError

_COUNT_MAX = 1 << 62


def encode_health(health: Health) -> dict[str, object]:
    """Return health as a JSON object. Fields that were not checked are absent."""
    document: dict[str, object] = {}
    if health.nonfinite is not None:
        document |= {"nonfinite": dict(health.nonfinite), "new": dict(health.new)}
    if health.divergent is not None:
        document["divergent"] = {fqn: list(ranks) for fqn, ranks in health.divergent.items()}
    if health.undecided:
        document["undecided"] = list(health.undecided)
    if health.hosts:
        document["hosts"] = {str(rank): host for rank, host in health.hosts.items()}
    return document


class _HealthDocument(msgspec.Struct):
    nonfinite: dict[Text, Annotated[int, msgspec.Meta(ge=1, le=_COUNT_MAX)]] | None = None
    new: dict[Text, Annotated[int, msgspec.Meta(ge=0, le=_COUNT_MAX)]] | None = None
    divergent: dict[Text, Annotated[tuple[RankNumber, ...], msgspec.Meta(min_length=1)]] | None = None
    undecided: tuple[Text, ...] = ()
    hosts: dict[Annotated[str, msgspec.Meta(pattern=r"\A(0|[1-9][0-9]{0,4})\Z")], Text] = {}

    def __post_init__(self) -> None:
        counts, divergent = self.nonfinite or {}, self.divergent or {}
        if not all(before < counts.get(fqn, 0) for fqn, before in (self.new or {}).items()):
            raise ValueError(f"new is {str(self.new)[:80]!r}; expected smaller counts than nonfinite has")
        if not all(rank < later for ranks in divergent.values() for rank, later in itertools.pairwise(ranks)):
            raise ValueError(f"divergent is {str(divergent)[:80]!r}; expected ascending ranks")
        if not divergent.keys() >= set(self.undecided):
            raise ValueError(f"undecided is {str(self.undecided)[:80]!r}; expected FQNs of divergent tensors")


def decode_health(entry: object, where: str) -> Health | None:
    """Return the health that a manifest records; None if nothing was checked.

    Raises:
        CorruptError: A field is impossible.
    """
    if entry is None:
        return None
    document = convert(entry, _HealthDocument, f"{where}: health")
    return Health(
        nonfinite=document.nonfinite,
        new=document.new or {},
        divergent=document.divergent,
        undecided=document.undecided,
        hosts={int(rank): host for rank, host in document.hosts.items()},
    )


class ReplicaGroupDocument(msgspec.Struct):
    """A `ReplicaGroup` in a part; its positions are a column."""

    holders: bytes
    positions: tuple[int, bytes]
    digests: bytes


class ReplicasDocument(msgspec.Struct):
    """The `Replicas` of a rank in a part."""

    host: str
    speaker: int
    names: list[str]
    groups: list[ReplicaGroupDocument]


CountedDocument = dict[str, tuple[Annotated[int, msgspec.Meta(ge=1, le=_COUNT_MAX)], Expectation]]
"""The `Counted` of a rank in a part."""


def replicas_document(replicas: Replicas | None) -> ReplicasDocument | UnsetType:
    """Return the replicas of a rank for a part; UNSET, which is not stored, if they were not compared."""
    if replicas is None:
        return UNSET
    groups = [
        ReplicaGroupDocument(group.holders, encode_column(group.positions), group.digests) for group in replicas.groups
    ]
    return ReplicasDocument(replicas.host, replicas.speaker, list(replicas.names), groups)


def replicas_in(document: ReplicasDocument | UnsetType, where: str) -> Replicas | None:
    """Return the replicas in a part; None if they were not compared.

    Raises:
        CorruptError: A digest lacks its tensor, or a tensor its digest.
    """
    if isinstance(document, UnsetType):
        return None
    groups = []
    for group in document.groups:
        positions = tuple(decode_column(group.positions, where).tolist())
        is_ascending = all(position < later for position, later in itertools.pairwise(positions))
        if len(group.digests) != 8 * len(positions) or not is_ascending:
            raise CorruptError(
                f"{where}: {len(group.digests)} bytes of replica digests for {len(positions)} tensors; expected 8 "
                "bytes each, in ascending order of tensors. Read another copy"
            )
        groups.append(ReplicaGroup(group.holders, positions, group.digests))
    return Replicas(document.host, document.speaker, tuple(document.names), tuple(groups))
