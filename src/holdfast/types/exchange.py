"""Frozen plans of an exchange: what one rank reads for several, and what it is given by others."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.settings import PAGE_BYTES
from holdfast.types.plan import LoadPlan, ReadRun


def take_slot_bytes(count: int) -> int:
    """Return the memory that so many bytes are taken into: whole pages."""
    return -(-count // PAGE_BYTES) * PAGE_BYTES


def give_slot_bytes(count: int) -> int:
    """Return the memory that so many bytes are read into: whole pages, and one more at either end, as stores need."""
    return take_slot_bytes(count) + 2 * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Give:
    """A run that this rank reads and passes on."""

    run: ReadRun
    """What is read; this rank wants all of it too."""

    receivers: tuple[int, ...]
    """The other ranks that want it, ascending."""


@dataclass(frozen=True, slots=True)
class Take:
    """A run that another rank reads and passes to this one."""

    run: ReadRun
    """What comes, with what this rank wants of it."""

    reader: int
    """Who reads it."""


@dataclass(frozen=True, slots=True)
class ExchangeRound:
    """What one rank gives and takes in one collective, both in the order of the checkpoint's packs and offsets."""

    gives: tuple[Give, ...]
    """Runs it reads."""

    takes: tuple[Take, ...]
    """Runs it is given."""


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Everything one rank does in a load in which ranks pass bytes to each other."""

    rounds: tuple[ExchangeRound, ...]
    """As many on every rank; a round may be empty here."""

    alone: LoadPlan
    """What nobody else wants: read as in any load."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """How fast one rank was in the best of the rounds that were measured."""

    read_bytes: int
    """Bytes it read from storage."""

    read_seconds: float
    """How long that took, every chunk checked and placed."""

    moved_bytes: int
    """Bytes it sent or received, whichever is more."""

    moved_seconds: float
    """How long that took, every chunk that came checked again and placed."""
