"""What the ranks of a load send each other: rank 0's chosen step, and the status of every rank.

Names of tensors and files travel as JSON inside MessagePack: another system's names may contain lone surrogates,
which MessagePack strings cannot hold. Bytes travel beside it, unchanged. The sender is a rank of the same job, so
decoding checks nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast.coordination.job import error_from, error_text
from holdfast.errors import CheckpointError
from holdfast.loading.exchange import Offer
from holdfast.types.reports import SkippedStep


@dataclass(frozen=True, slots=True)
class ChosenStep:
    """What rank 0 sends to every rank: the checkpoint to load, or why there is none."""

    error: str | None = None
    """Why rank 0 cannot choose, as an `error_text`."""

    folder: str | None = None
    """The checkpoint's folder in the home; None: there is nothing to load."""

    step: int | None = None
    """Its step; None for a checkpoint by path."""

    is_foreign: bool = False
    """Whether another system wrote it."""

    short_packs: Mapping[str, tuple[int, CheckpointError]] = field(default_factory=dict)
    """Packs that are shorter than recorded, by name: the bytes that exist, and the error for a tensor in the rest."""

    passed_over: tuple[SkippedStep, ...] = ()
    """Newer steps that are damaged."""

    newer: tuple[int, ...] = ()
    """Newer steps that exist and were not asked for, ascending."""

    frames: Sequence[bytes] = ()
    """The manifest, and the index or its overview, encoded."""

    def encode(self) -> bytes:
        """Return the message."""
        head = [
            self.error,
            self.folder,
            self.step,
            self.is_foreign,
            [[name, count, error_text(error)] for name, (count, error) in self.short_packs.items()],
            [[skipped.step, skipped.why] for skipped in self.passed_over],
            self.newer,
        ]
        return msgspec.msgpack.encode([json.dumps(head).encode("ascii"), *self.frames])

    @staticmethod
    def decode(data: bytes) -> ChosenStep:
        """Return the value that `encode` wrote."""
        head, *frames = msgspec.msgpack.decode(data, type=list[bytes])
        error, folder, step, is_foreign, short_packs, passed_over, newer = json.loads(head)
        return ChosenStep(
            error,
            folder,
            step,
            is_foreign,
            {name: (count, error_from(text)) for name, count, text in short_packs},
            tuple(SkippedStep(*skipped) for skipped in passed_over),
            tuple(newer),
            frames,
        )


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What each rank sends to every rank once it has planned: whether it can load, and what it would read."""

    error: str | None
    """Why it cannot, as an `error_text`."""

    missing: Sequence[str]
    """Names that its state has and the checkpoint lacks."""

    unexpected: Sequence[str]
    """Names that the checkpoint has and its state lacks."""

    reader_id: str
    """16 hex digits that name the reading job in its reports."""

    offer: Offer
    """What it would read, for an exchange."""

    def encode(self) -> bytes:
        """Return the message."""
        head = json.dumps([self.error, self.missing, self.unexpected, self.reader_id]).encode("ascii")
        return msgspec.msgpack.encode([head, self.offer.encode()])

    @staticmethod
    def decode(data: bytes) -> RankStatus:
        """Return the value that `encode` wrote."""
        head, offer = msgspec.msgpack.decode(data, type=tuple[bytes, bytes])
        error, missing, unexpected, reader_id = json.loads(head)
        return RankStatus(error, missing, unexpected, reader_id, Offer.decode(offer))
