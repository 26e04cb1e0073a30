"""Messages between the ranks of a load: rank 0's chosen step, and the status of every rank.

Fields that are not bytes are JSON: another system's names may contain lone surrogates, which MessagePack strings cannot
hold.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from holdfast.base.ports.framework import UnmatchedPattern
from holdfast.base.types.reports import SkippedStep
from holdfast.errors import CheckpointError
from holdfast.training.coordination.message_codec import decode_message, encode_message
from holdfast.training.loading.exchange import NO_OFFER, Offer


@dataclass(frozen=True, slots=True)
class ChosenStep:
    """What rank 0 sends to every rank: the checkpoint to load, or why there is none."""

    error: str | None = None
    """Why rank 0 cannot choose, as an `error_text`."""

    is_damage: bool = False
    """Whether that is the damage which the ranks found: nothing has taken the place of the damaged checkpoint."""

    folder: str | None = None
    """The checkpoint's folder in the home; None: there is nothing to load."""

    step: int | None = None
    """Its step; None for a checkpoint by path."""

    places: tuple[int, ...] = ()
    """Which of near tier (0) and root (1) hold it, in the order of reading; empty if the run has one place."""

    is_foreign: bool = False
    """Whether another system wrote it."""

    short_packs: Mapping[str, tuple[int, CheckpointError]] = field(default_factory=dict)
    """Packs that are shorter than recorded, by name: the bytes that exist, and the error for a tensor in the rest."""

    passed_over: tuple[SkippedStep, ...] = ()
    """Newer steps that are damaged."""

    newer: tuple[int, ...] = ()
    """Newer steps that exist and were not asked for, ascending."""

    discards: bool = False
    """Whether rank 0 discards them after the load."""

    reader_id: str = ""
    """16 hex digits that name the reading job in its reports."""

    documents: Mapping[str, bytes] = field(default_factory=dict)
    """Files that lie with the checkpoint, in which layouts find sizes, by name."""

    frames: Sequence[bytes] = ()
    """The manifest, and the index or its overview, encoded."""

    def encode(self) -> bytes:
        """Return the message."""
        return msgspec.msgpack.encode([encode_message(replace(self, frames=())), *self.frames])

    @staticmethod
    def decode(data: bytes) -> ChosenStep:
        """Return the value that `encode` wrote."""
        head, *frames = msgspec.msgpack.decode(data, type=list[bytes])
        return replace(decode_message(head, ChosenStep), frames=frames)


UnfitKind = Literal["shape", "dtype", "number", "kind"]


@dataclass(frozen=True, slots=True)
class Unfit:
    """A name of the state that cannot take what the checkpoint has under it."""

    kind: UnfitKind
    """What differs: the shape or dtype of a tensor, floats and integers, or the kind of the value."""

    text: str
    """The name, what was saved, and what is there."""

    fqn: str = ""
    """The name, if it must not be listed as missing or unexpected."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The status that each rank sends to every rank after planning: whether it can load, and what it would read."""

    error: str | None = None
    """Why it cannot, as an `error_text`."""

    missing: tuple[str, ...] = ()
    """Names that its state has and the checkpoint lacks."""

    unnamed: int = 0
    """Number of such names beyond those in `missing`."""

    unexpected: tuple[str, ...] = ()
    """Names that the checkpoint has and its state lacks."""

    unmatched: tuple[UnmatchedPattern, ...] = ()
    """Patterns of `only` and `skip` that match no name of its state; of `skip`, also none in the checkpoint."""

    unfit: tuple[Unfit, ...] = ()
    """Names of its state that cannot take what the checkpoint has; of many, the first."""

    call: str = ""
    """The arguments that change what the load does and must agree on all ranks, as text."""

    fills: bool = False
    """Whether it fills anything, or says why not. The record holds it, not the texts."""

    offer: Offer = NO_OFFER
    """What it would read, for an exchange."""

    def encode(self) -> bytes:
        """Return everything but the offer; empty if there is nothing to say."""
        texts = replace(self, offer=NO_OFFER, fills=False)
        # Names of one state resemble each other, so they compress well.
        return zlib.compress(encode_message(texts), 1) if texts != RankStatus() else b""

    @staticmethod
    def decode(data: bytes) -> RankStatus:
        """Return the value that `encode` wrote."""
        return decode_message(zlib.decompress(data), RankStatus)
