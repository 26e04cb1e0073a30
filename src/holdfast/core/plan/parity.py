"""Parity of a group of nodes: the ranges that each member pulls, and the ranges that give a lost pack back.

The stream of a node is its packs of one attempt, by key, end to end. In a group of m members each stream is cut into
m - 1 segments, and member p's segment s is in the parity of member (p + 1 + s) mod m. So each parity is the XOR of one
segment of every other member. A segment that is shorter than the parity counts as padded with zeros.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

import numpy as np

from holdfast.errors import CorruptError, MissingError, UnavailableError


@dataclass(frozen=True, slots=True)
class PackStream:
    """The packs of one node and one attempt, end to end."""

    keys: tuple[str, ...]
    """Keys of the packs, ascending."""

    starts: tuple[int, ...]
    """Offset of each pack in the stream, and the bytes of the stream."""

    @classmethod
    def of(cls, packs: Mapping[str, int]) -> PackStream:
        """Return the stream of packs.

        Args:
            packs: Bytes of each pack, by key.
        """
        keys = tuple(sorted(packs))
        return cls(keys, tuple(accumulate((packs[key] for key in keys), initial=0)))

    @property
    def bytes(self) -> int:
        """Bytes of the stream."""
        return self.starts[-1]

    def offset_of(self, key: str, start: int, stop: int) -> int:
        """Return the offset at which a range of a pack begins in the stream.

        Raises:
            MissingError: The stream has no such pack.
            CorruptError: The range is not within the pack.
        """
        number = bisect_right(self.keys, key) - 1
        if number < 0 or self.keys[number] != key:
            raise MissingError(f"{key}: not among the {len(self.keys)} packs of the node. Read another copy")
        pack_bytes = self.starts[number + 1] - self.starts[number]
        if not 0 <= start <= stop <= pack_bytes:
            raise CorruptError(
                f"{key}: bytes {start} to {stop} of {pack_bytes}; expected a range within the pack. The index and the "
                "table of the group differ: read another copy"
            )
        return self.starts[number] + start

    def packs_in(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Yield key, start and stop of each range of a pack in a range of the stream; nothing beyond the end."""
        number = bisect_right(self.starts, start) - 1
        while number < len(self.keys) and self.starts[number] < stop:
            first, end = self.starts[number], self.starts[number + 1]
            if max(first, start) < min(end, stop):
                yield self.keys[number], max(first, start) - first, min(end, stop) - first
            number += 1


@dataclass(frozen=True, slots=True)
class ParityInput:
    """A range of bytes of one member, and its place in the XOR."""

    member: int
    """Number of the member that has the bytes."""

    key: str | None
    """The pack; None: the parity of the member."""

    start: int
    """First byte within the pack or the parity."""

    stop: int
    """The byte after the last one."""

    at: int
    """Place of the first byte in the target."""


@dataclass(frozen=True, slots=True)
class Stripe:
    """The streams of a group, by number of the member."""

    streams: tuple[PackStream, ...]

    def parity_bytes(self, member: int) -> int:
        """Return the bytes of a member's parity: the longest segment that is in it; 0 in a group of one."""
        return max((self._segment_bytes(other) for other in self._others(member)), default=0)

    def pulls(self, member: int) -> list[ParityInput]:
        """Return the ranges of other members' packs whose XOR is the parity of a member."""
        length = self.parity_bytes(member)
        return [each for other in self._others(member) for each in self._in_parity(other, member, 0, length, 0)]

    def rebuild(self, member: int, key: str, start: int, stop: int, lost: Collection[int]) -> list[ParityInput]:
        """Return the ranges whose XOR is a range of a pack of a lost member.

        Args:
            member: The lost member.
            key, start, stop: The range of the pack.
            lost: Numbers of all lost members.
        Raises:
            UnavailableError: A second member is lost, or the group has no other member.
            MissingError: The member had no such pack.
            CorruptError: The range is not within the pack.
        """
        first = self.streams[member].offset_of(key, start, stop)
        if start == stop:
            return []
        if len(self.streams) == 1 or len({*lost, member}) > 1:
            raise UnavailableError(
                f"{key}: members {sorted({*lost, member})} of a group of {len(self.streams)} are lost; expected one "
                "lost member of a group of at least two. Read the step from the root"
            )
        inputs: list[ParityInput] = []
        segment_bytes = self._segment_bytes(member)
        at, last = first, first + stop - start
        while at < last:
            segment, offset = divmod(at, segment_bytes)
            end = min(last - at, segment_bytes - offset) + offset
            keeper = (member + 1 + segment) % len(self.streams)
            inputs.append(ParityInput(keeper, None, offset, end, at - first))
            for other in self._others(keeper):
                if other != member:
                    inputs += self._in_parity(other, keeper, offset, end, at - first)
            at += end - offset
        return inputs

    def _others(self, member: int) -> Iterator[int]:
        return (other for other in range(len(self.streams)) if other != member)

    def _segment_bytes(self, member: int) -> int:
        return -(-self.streams[member].bytes // (len(self.streams) - 1))

    def _in_parity(self, member: int, keeper: int, start: int, stop: int, at: int) -> Iterator[ParityInput]:
        """Yield the ranges of a member's packs that are in bytes `start` to `stop` of a keeper's parity."""
        stream, segment_bytes = self.streams[member], self._segment_bytes(member)
        first = (keeper - member - 1) % len(self.streams) * segment_bytes
        at -= start
        place = first + start
        for key, begin, end in stream.packs_in(place, first + min(stop, segment_bytes)):
            yield ParityInput(member, key, begin, end, at + place - first)
            place += end - begin


def xor_into(target: bytearray | memoryview, at: int, data: bytes | bytearray | memoryview) -> None:
    """XOR bytes into a target, in place.

    Args:
        target: Writable bytes, which begin as zeros.
        at: Place of the first byte.
        data: The bytes of one `ParityInput`, or a part of them.
    """
    part = np.frombuffer(target, np.uint8, len(data), at) if len(data) else np.empty(0, np.uint8)
    np.bitwise_xor(part, np.frombuffer(data, np.uint8), out=part)


class Survival(Enum):
    """How much of a step is there."""

    WHOLE = "whole"
    """All packs are there."""

    DEGRADED = "degraded"
    """All packs can be read, some through parity."""

    PARTIAL = "partial"
    """Some packs cannot be read."""


def survival(
    groups: Iterable[Sequence[str]],
    stream_bytes: Mapping[str, int],
    there: Collection[str],
    protected: Collection[str],
) -> Survival:
    """Return how much of a step is there.

    Args:
        groups: Names of the nodes of each group that the step was saved with.
        stream_bytes: Bytes of the packs of each node, by name.
        there: Nodes that have their packs of the step. A set: looked up once a node.
        protected: Nodes that have their whole parity of the step. A set.
    """
    found = Survival.WHOLE
    for members in groups:
        lost = [name for name in members if name not in there]
        if not any(stream_bytes[name] for name in lost):
            continue
        others_hold = all(name in protected for name in members if name not in lost)
        if len(lost) > 1 or len(members) == 1 or not others_hold:
            return Survival.PARTIAL
        found = Survival.DEGRADED
    return found
