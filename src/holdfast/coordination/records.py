"""The records that a save agreement exchanges through the key-value store, with their encodings."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holdfast.coordination.rank_ranges import rank_ranges, ranks_in
from holdfast.coordination.save_context import SaveContext
from holdfast.geometry.tensor import Role

Plain = Mapping[str, tuple[str, tuple[int, ...], Role]]
"""Plain tensors by FQN: dtype, global shape, role."""

_STATEMENT = struct.Struct("<q8s8s8s8s")
_REFUSAL_PREFIX = b"!"


@dataclass(frozen=True, slots=True)
class Statement:
    """The statement of one rank at the start of a save, 40 bytes."""

    step: int
    """The step being saved; -1 for a save by path."""

    location: bytes
    """8-byte digest of the URL of the location."""

    layout: bytes
    """8-byte fingerprint of all inputs of a plan; ranks with equal fingerprints form a class."""

    agreeing: bytes
    """8-byte digest of samples of the plain tensors that must agree."""

    other: bytes
    """8-byte digest of the plain tensors and values that may differ."""

    def encode(self) -> bytes:
        """Return the statement as 40 bytes."""
        return _STATEMENT.pack(self.step, self.location, self.layout, self.agreeing, self.other)

    @classmethod
    def decode(cls, record: bytes) -> Statement:
        """Return the statement that `encode` wrote."""
        return cls(*_STATEMENT.unpack(record))


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
    """Digest of each buffer and value that may differ, hex."""

    def encode(self) -> bytes:
        """Return the details as JSON."""
        plain = {fqn: [dtype, list(shape), role.value] for fqn, (dtype, shape, role) in self.plain.items()}
        return json.dumps([self.location, plain, dict(self.agreeing), dict(self.other)]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Details:
        """Return the details that `encode` wrote."""
        location, plain, agreeing, other = json.loads(data)
        table = {fqn: (dtype, tuple(shape), Role(role)) for fqn, (dtype, shape, role) in plain.items()}
        return cls(location, table, agreeing, other)


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
    """Buffers and values that differ between ranks."""

    context: SaveContext
    """Rank 0's decisions for every rank."""

    def holders_of(self, fqn: str) -> tuple[int, ...]:
        """Return the ranks that hold a plain tensor of this rank."""
        return self.shared.get(fqn, self.class_ranks)

    def holders_of_each(self, fqns: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Return the ranks that hold each of this rank's plain tensors."""
        holders = dict.fromkeys(fqns, self.class_ranks)
        holders.update((fqn, ranks) for fqn, ranks in self.shared.items() if fqn in holders)
        return holders


@dataclass(frozen=True, slots=True)
class SaveVerdict:
    """Rank 0's decision on one numbered save; exactly one of `refused`, `describe` and `context` is set."""

    save_id: tuple[int, str]
    """Step and digest of the location. Distinguishes a retry of this save from another save with the same number."""

    refused: str | None = None
    """The error that every rank raises, as `error_text` wrote it."""

    describe: tuple[int, ...] | None = None
    """Ranks that must publish details before the final verdict."""

    classes: tuple[tuple[int, ...], ...] = ()
    """Ranks by layout, ascending; empty if all ranks have one layout."""

    divergent: tuple[str, ...] = ()
    """Buffers and values that differ between ranks."""

    context: SaveContext | None = None
    """Rank 0's decisions, if the save goes ahead."""

    def encode(self) -> bytes:
        """Return the verdict as ASCII: the compare-and-set of c10d's stores passes text only."""
        document = {
            "save_id": self.save_id,
            "refused": self.refused,
            "describe": None if self.describe is None else rank_ranges(self.describe),
            "classes": [rank_ranges(ranks) for ranks in self.classes],
            "divergent": self.divergent,
            "context": None if self.context is None else self.context.encode(),
        }
        return json.dumps(document).encode("ascii")

    @classmethod
    def decode(cls, data: bytes) -> SaveVerdict:
        """Return the verdict that `encode` wrote."""
        document = json.loads(data)
        step, location = document["save_id"]
        describe, context = document["describe"], document["context"]
        return cls(
            save_id=(step, location),
            refused=document["refused"],
            describe=None if describe is None else ranks_in(describe),
            classes=tuple(ranks_in(ranges) for ranges in document["classes"]),
            divergent=tuple(document["divergent"]),
            context=None if context is None else SaveContext.decode(context),
        )


def encode_refusal(error_text: str) -> bytes:
    """Return the record that a rank sets instead of its statement if it cannot save."""
    return _REFUSAL_PREFIX + error_text.encode()


def refusal_in(record: bytes) -> str | None:
    """Return the error text of a refusal; None if the record is a statement."""
    # A statement may begin with the same byte. Its length tells them apart: no error text is that short.
    if record.startswith(_REFUSAL_PREFIX) and len(record) != _STATEMENT.size:
        return record[len(_REFUSAL_PREFIX) :].decode()
    return None
