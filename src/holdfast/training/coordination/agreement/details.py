"""What ranks publish if their statements differ, in bytes that do not grow with the job.

The lowest rank of a class publishes all details, once for the class. A rank that differs from it reads them and
publishes only the entries that differ. Rank 0 publishes for each class which ranks share its plain tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from holdfast.base.geometry.rank_ranges import RankRanges, rank_ranges, ranks_in
from holdfast.base.geometry.tensor import Role
from holdfast.core.format.digest import short_digest_of
from holdfast.training.coordination.agreement.records import Details
from holdfast.training.coordination.message_codec import decode_message, encode_message

_DIGESTS_MAX = 8
"""Most entries for which a rank states a digest each. One digest stands for all others."""

_EXTRA_MAX = 8
"""Most names that a rank lists of those that the lowest rank of its class lacks."""

_DIGEST_BYTES = 8

_UNEVEN_CHARACTERS_MIN, _UNEVEN_CHARACTERS_PER_RANK = 16 << 10, 32
"""Most characters of the names that only some ranks have, in a verdict: every rank receives it."""


@dataclass(frozen=True, slots=True)
class RankDifference:
    """How the entries of one rank differ from those of the lowest rank of its class.

    Bits number the entries of the lowest rank: those that must agree by name, then the others by name.
    """

    differing: bytes = b""
    """One bit for each entry that differs, compressed."""

    absent: bytes = b""
    """One bit for each entry that this rank lacks, compressed; empty if it lacks none."""

    digests: bytes = b""
    """This rank's digests of the first entries that differ, and one digest for all the others."""

    extra: Mapping[str, str] = field(default_factory=dict)
    """Digests by name of entries that the lowest rank lacks."""

    lossy: Sequence[str] = ()
    """Names in `extra` of which one rank's cannot stand for all."""


def encode_details(details: Details) -> bytes:
    """Return the record of the lowest rank of a class."""
    # Names of one state resemble each other, so they compress well.
    return zlib.compress(encode_message(details), 1)


def decode_details(record: bytes) -> Details:
    """Return the details that `encode_details` wrote."""
    return decode_message(zlib.decompress(record), Details)


def encode_difference(lowest: Details, own: Details) -> bytes:
    """Return the record of a rank that differs from the lowest rank of its class."""
    entries, own_entries = entries_of(lowest), entries_of(own)
    numbers: list[int] = []
    absent: list[int] = []
    digests: list[bytes] = []
    for number, (key, digest) in enumerate(entries.items()):
        if key not in own_entries:
            absent.append(number)
        elif own_entries[key] != digest:
            numbers.append(number)
            digests.append(bytes.fromhex(own_entries[key]))
    parts = digests[:_DIGESTS_MAX]
    if len(digests) > _DIGESTS_MAX:
        parts.append(short_digest_of(*digests[_DIGESTS_MAX:]))
    extra = {key[1]: own_entries[key] for key in sorted({*own_entries} - {*entries})[:_EXTRA_MAX]}
    difference = RankDifference(
        _bits_of(numbers, len(entries)),
        _bits_of(absent, len(entries)),
        b"".join(parts),
        extra,
        [name for name in own.lossy if name in extra],
    )
    return encode_message(difference)


def silent_ranks(asked: Sequence[int], classes: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Return the ranks that described nothing, by the lowest rank of their class, whose state is theirs too."""
    described = {*asked}
    return {ranks[0]: [rank for rank in ranks if rank not in described] for ranks in classes}


def details_by_rank(
    asked: Sequence[int], classes: Sequence[Sequence[int]], read: Callable[[Sequence[int]], Sequence[bytes]]
) -> tuple[dict[int, Details], frozenset[str]]:
    """Return the details of every rank that published some, and names that only some ranks of a class have.

    Those of the lowest rank of a class are whole. Those of another rank hold the entries in which any rank differs.

    Args:
        asked: The ranks.
        classes: Ranks of each class, ascending.
        read: Returns what some ranks published.
    """
    lowest_of = {rank: ranks[0] for ranks in classes for rank in ranks}
    lowest_ranks = sorted({lowest_of[rank] for rank in asked})
    lowest = dict(zip(lowest_ranks, map(decode_details, read(lowest_ranks)), strict=True))
    others = [rank for rank in asked if lowest_of[rank] != rank]
    records = dict(zip(others, read(others), strict=True))
    # Many ranks may differ in the same way: one record is decoded once.
    keys = {rank: (lowest_of[rank], record) for rank, record in records.items()}
    entries = {rank: list(entries_of(each)) for rank, each in lowest.items()}
    found = {key: decode_difference(lowest[key[0]], entries[key[0]], key[1]) for key in {*keys.values()}}
    names = {name for each, _ in found.values() for name in (*each.agreeing, *each.other)}
    uneven = frozenset(name for _, names in found.values() for name in names)
    filled = {key: _filled(lowest[key[0]], *found[key], names) for key in found}
    details = {**lowest, **{rank: filled[key] for rank, key in keys.items()}}
    return {rank: details[rank] for rank in sorted(details)}, uneven


def fitting_names(names: Collection[str], world_size: int) -> tuple[str, ...]:
    """Return the first of some names, as many as a verdict may carry. Ranks ask for the others again."""
    characters_left = max(_UNEVEN_CHARACTERS_MIN, _UNEVEN_CHARACTERS_PER_RANK * world_size)
    fitting: list[str] = []
    for name in sorted(names):
        characters_left -= len(name)
        if characters_left < 0:
            break
        fitting.append(name)
    return tuple(fitting)


def _filled(lowest: Details, differing: Details, uneven: Collection[str], names: Collection[str]) -> Details:
    """Return the entries of a rank under some names: those that differ, and those equal to the lowest rank's."""
    agreeing = {name: lowest.agreeing[name] for name in names if name in lowest.agreeing and name not in uneven}
    other = {name: lowest.other[name] for name in names if name in lowest.other and name not in uneven}
    return replace(differing, agreeing={**agreeing, **differing.agreeing}, other={**other, **differing.other})


def decode_difference(
    lowest: Details, keys: Sequence[tuple[bool, str]], record: bytes
) -> tuple[Details, frozenset[str]]:
    """Return the entries of a rank that differ from those of the lowest rank of its class, and names that one lacks.

    Args:
        lowest: Details of the lowest rank.
        keys: Its keys in `entries_of`, which a class computes once.
        record: What the rank published.
    """
    difference = decode_message(record, RankDifference)
    agreeing: dict[str, str] = {}
    other: dict[str, str] = dict(difference.extra)
    for place, number in enumerate(_numbers_in(difference.differing, len(keys))):
        start = min(place, _DIGESTS_MAX) * _DIGEST_BYTES
        is_other, name = keys[number]
        (other if is_other else agreeing)[name] = difference.digests[start : start + _DIGEST_BYTES].hex()
    absent = {keys[number][1] for number in _numbers_in(difference.absent, len(keys))}
    lossy = [*(name for name in lowest.lossy if name in other), *difference.lossy]
    return Details(lowest.location, {}, agreeing, other, lossy), frozenset(absent.union(difference.extra))


def entries_of(details: Details) -> dict[tuple[bool, str], str]:
    """Return the digest of each entry, in the order in which bits number them. The key says whether it may differ."""
    return {
        (is_other, name): digests[name]
        for is_other, digests in ((False, details.agreeing), (True, details.other))
        for name in sorted(digests)
    }


def _bits_of(numbers: Sequence[int], count: int) -> bytes:
    if not numbers:
        return b""
    bits = np.zeros(count, dtype=np.uint8)
    bits[numbers] = 1
    return zlib.compress(np.packbits(bits).tobytes(), 1)


def _numbers_in(bits: bytes, count: int) -> list[int]:
    if not bits:
        return []
    return np.flatnonzero(np.unpackbits(np.frombuffer(zlib.decompress(bits), dtype=np.uint8), count=count)).tolist()


def mismatches(details_of: Mapping[int, Details]) -> list[str]:
    """Return a text for each plain tensor of which ranks state different dtypes, shapes or roles."""
    texts: list[str] = []
    shapes: dict[str, tuple[int, tuple[str, tuple[int, ...], Role]]] = {}
    for rank, details in details_of.items():
        for fqn, plain in details.plain.items():
            first_rank, first = shapes.setdefault(fqn, (rank, plain))
            if first != plain:
                texts.append(
                    f"{fqn} ({_format_plain(first)} on rank {first_rank} ≠ {_format_plain(plain)} on rank {rank})"
                )
    return texts


def _format_plain(plain: tuple[str, tuple[int, ...], Role]) -> str:
    dtype, shape, role = plain
    return f"{role.value} of {dtype} {list(shape)}"


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """Plain tensors of one class that other classes hold too."""

    groups: Sequence[tuple[RankRanges, Sequence[str]]]
    """Numbers of the classes that share some tensors, and the FQNs of those."""

    def encode(self) -> bytes:
        """Return the record that rank 0 sets for one class."""
        return zlib.compress(encode_message(self), 1)

    @classmethod
    def decode(cls, record: bytes) -> SharedTensors:
        """Return the value that `encode` wrote."""
        return decode_message(zlib.decompress(record), cls)

    def holders(self, classes: Sequence[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the ranks that hold each of the tensors, ascending.

        Args:
            classes: Ranks of each class.
        """
        holders: dict[str, tuple[int, ...]] = {}
        for numbers, fqns in self.groups:
            ranks = tuple(sorted(rank for number in ranks_in(numbers) for rank in classes[number]))
            holders.update(dict.fromkeys(fqns, ranks))
        return holders


def shared_tensors(plain_by_class: Sequence[Iterable[str]]) -> dict[int, SharedTensors]:
    """Return the plain tensors that several classes hold, by number of each class that holds any.

    Args:
        plain_by_class: FQNs of the plain tensors of each class.
    """
    numbers_of: dict[str, list[int]] = {}
    for number, fqns in enumerate(plain_by_class):
        for fqn in fqns:
            numbers_of.setdefault(fqn, []).append(number)
    groups: dict[tuple[int, ...], list[str]] = {}
    for fqn, numbers in numbers_of.items():
        if len(numbers) > 1:
            groups.setdefault(tuple(numbers), []).append(fqn)
    groups_of: dict[int, list[tuple[RankRanges, Sequence[str]]]] = {}
    for combination, fqns in groups.items():
        ranges = rank_ranges(combination)
        for number in combination:
            groups_of.setdefault(number, []).append((ranges, fqns))
    return {number: SharedTensors(tuple(each)) for number, each in groups_of.items()}
