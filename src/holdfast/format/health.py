"""Health as a manifest and a part hold it."""

from __future__ import annotations

import itertools

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.errors import CorruptError
from holdfast.format.index.columns import packed, unpacked
from holdfast.format.names import WORLD_SIZE_MAX
from holdfast.format.values import values
from holdfast.types.health import Counted, Expectation, Health, ReplicaGroup, Replicas

_COUNT_MAX = 1 << 62


def encode_health(health: Health) -> dict[str, object]:
    """Return the object that a manifest holds; each field only where it says something."""
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


def decode_health(entry: object, where: str) -> Health | None:
    """Return the health that a manifest holds, None if nothing was looked at.

    Raises:
        CorruptError: It says something impossible.
    """
    if entry is None:
        return None
    if not isinstance(entry, dict):
        raise CorruptError(f"{where}: health is {str(entry)[:80]!r}; expected an object")
    nonfinite = _whole_by_name(entry, "nonfinite", where, lowest=1)
    new = _whole_by_name(entry, "new", where, lowest=0) or {}
    divergent = entry.get("divergent")
    if divergent is not None and (
        not isinstance(divergent, dict)
        or not all(map(_is_name, divergent))
        or not all(map(_are_ranks, divergent.values()))
    ):
        raise CorruptError(f"{where}: divergent is {str(divergent)[:80]!r}; expected lists of ranks by FQN")
    undecided = entry.get("undecided", [])
    if not isinstance(undecided, list) or not all(_is_name(fqn) and fqn in (divergent or {}) for fqn in undecided):
        raise CorruptError(f"{where}: undecided is {str(undecided)[:80]!r}; expected FQNs of divergent tensors")
    if not all(had < (nonfinite or {}).get(fqn, 0) for fqn, had in new.items()):
        raise CorruptError(f"{where}: new is {str(new)[:80]!r}; expected less than what was counted of each")
    return Health(
        nonfinite=nonfinite,
        new=new,
        divergent=None if divergent is None else {fqn: tuple(ranks) for fqn, ranks in divergent.items()},
        undecided=tuple(undecided),
        hosts=_hosts(entry.get("hosts", {}), where),
    )


def _whole_by_name(entry: dict[object, object], name: str, where: str, *, lowest: int) -> dict[str, int] | None:
    found = entry.get(name)
    if found is None:
        return None
    if isinstance(found, dict) and all(
        _is_name(fqn) and type(count) is int and lowest <= count <= _COUNT_MAX for fqn, count in found.items()
    ):
        return found
    raise CorruptError(f"{where}: {name} is {str(found)[:80]!r}; expected whole numbers from {lowest} by FQN")


def _hosts(found: object, where: str) -> dict[int, str]:
    if isinstance(found, dict):
        numbers = {rank: _rank_in(rank) for rank in found}
        if all(_is_name(host) for host in found.values()) and None not in numbers.values():
            return {number: str(found[rank]) for rank, number in numbers.items() if number is not None}
    raise CorruptError(f"{where}: hosts is {str(found)[:80]!r}; expected names by rank")


def _rank_in(text: object) -> int | None:
    if not isinstance(text, str) or not text.isascii() or not text.isdecimal() or len(text) > 9:
        return None
    return int(text) if str(int(text)) == text and int(text) < WORLD_SIZE_MAX else None


def _is_name(name: object) -> bool:
    return isinstance(name, str) and values.is_json_scalar(name)


def _are_ranks(found: object) -> bool:
    return (
        isinstance(found, list)
        and bool(found)
        and all(type(rank) is int and 0 <= rank < WORLD_SIZE_MAX for rank in found)
        and all(one < two for one, two in itertools.pairwise(found))
    )


class ReplicaGroupDocument(msgspec.Struct):
    """What a rank holds together with the same others, as a part has it."""

    holders: bytes
    positions: tuple[int, bytes]
    digests: bytes


class ReplicasDocument(msgspec.Struct):
    """What a rank says of its copies, as a part has it."""

    host: str
    speaker: int
    names: list[str]
    groups: list[ReplicaGroupDocument]


CountedDocument = dict[str, tuple[int, Expectation]]
"""What a rank counted, as a part has it."""


def counted_document(counted: Counted | None) -> CountedDocument | UnsetType:
    """Return what a part has of non-finite elements; nothing where they were not counted."""
    return UNSET if counted is None else dict(counted)


def counted_in(document: CountedDocument | UnsetType, where: str) -> Counted | None:
    """Return what a part says of non-finite elements.

    Raises:
        CorruptError: A count is impossible.
    """
    if isinstance(document, UnsetType):
        return None
    for fqn, (count, _) in document.items():
        if not 0 < count <= _COUNT_MAX:
            raise CorruptError(f"{where}: {count} non-finite elements of {fqn[:80]!r}; expected a positive number")
    return document


def replicas_document(replicas: Replicas | None) -> ReplicasDocument | UnsetType:
    """Return what a part has of copies; nothing where they were not compared."""
    if replicas is None:
        return UNSET
    groups = [ReplicaGroupDocument(each.holders, packed(each.positions), each.digests) for each in replicas.groups]
    return ReplicasDocument(replicas.host, replicas.speaker, list(replicas.names), groups)


def replicas_in(document: ReplicasDocument | UnsetType, where: str) -> Replicas | None:
    """Return what a part says of copies.

    Raises:
        CorruptError: A digest lacks its tensor, or a tensor its digest.
    """
    if isinstance(document, UnsetType):
        return None
    groups = []
    for group in document.groups:
        positions = tuple(unpacked(group.positions, where).tolist())
        if len(group.digests) != 8 * len(positions) or not all(one < two for one, two in itertools.pairwise(positions)):
            raise CorruptError(
                f"{where}: {len(group.digests)} bytes of digests of {len(positions)} tensors; expected 8 each"
            )
        groups.append(ReplicaGroup(group.holders, positions, group.digests))
    return Replicas(document.host, document.speaker, tuple(document.names), tuple(groups))
