"""What a job loads: resolved by rank 0, given to every rank, and of a large index as much as each rank needs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from holdfast.checkpoint.coverage import RequireStored, require_covered, stored_by
from holdfast.checkpoint.index_loading import given_frames, listing_at, resolved_frames
from holdfast.checkpoint.location import CheckpointLocation
from holdfast.clock import Clock
from holdfast.coordination.job import error_from, error_text, is_absence
from holdfast.errors import CheckpointError, CorruptError, MissingError
from holdfast.format.index.foreign_index import decode_foreign, encode_foreign, index_foreign
from holdfast.format.index.index import Index
from holdfast.format.index.split_index import SplitIndex
from holdfast.leases.reader import ReaderLease
from holdfast.loading.step_choice import StepDamage, StepSelector
from holdfast.ports.comm import Comm
from holdfast.repository.catalog import short_packs
from holdfast.types.manifest import Manifest
from holdfast.types.reports import SkippedStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a job loads."""

    location: CheckpointLocation
    """Where it lies."""

    manifest: Manifest
    """Its commit record."""

    index: Index | SplitIndex
    """Its tensors and pieces."""

    require_stored: RequireStored
    """Refuses tensors of which a piece is not there."""

    passed_over: tuple[SkippedStep, ...]
    """Newer steps that are damaged."""

    newer: tuple[int, ...]
    """Newer steps that exist and were not asked for."""


@dataclass(frozen=True, slots=True)
class _ResolvedStep:
    frames: Sequence[bytes]
    manifest: Manifest
    index: Index | SplitIndex
    short: Mapping[str, tuple[int, CheckpointError]]
    is_listed: bool


def resolve(
    comm: Comm,
    clock: Clock,
    home: CheckpointLocation,
    choice: StepSelector,
    wrong: StepDamage | None = None,
    lease: ReaderLease | None = None,
) -> Resolved | None:
    """Let rank 0 choose, read and judge manifest and index, once per job, and give them to every rank.

    Of an index in several files it gives the overview, and each rank reads and judges what it needs. Of another
    system's checkpoint it gives what a format listed.

    Args:
        comm: The ranks that load together.
        clock: For chance.
        home: Where checkpoints lie, on every rank.
        choice: Asked on rank 0.
        wrong: What the ranks found wrong with what was resolved before, if anything was.
        lease: Told on rank 0 what is read, so that nobody collects it.
    Returns:
        What is to be loaded; None if there is nothing.
    """
    frames: list[bytes] = []
    own = None
    judged: _ResolvedStep | None = None
    if comm.rank == 0:
        location = None
        try:
            location = choice.next(wrong)
            while location is not None:
                try:
                    judged = _judged(location, clock, whole=choice.falls_back)
                    if lease is not None:
                        lease.begin(location, judged.manifest)
                    break
                except (CorruptError, MissingError) as error:
                    location = choice.next(StepDamage(error, frozenset((0,)), is_absence(error)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for a word
            own = error
        head = {
            "error": error_text(own) if own else None,
            "folder": location.folder if location else None,
            "step": location.step if location else None,
            "listed": judged is not None and judged.is_listed,
            "short": {
                name: [there, error_text(error)] for name, (there, error) in (judged.short if judged else {}).items()
            },
            "passed_over": [[each.step, each.why] for each in choice.passed_over],
            "newer": list(choice.newer),
        }
        frames = [json.dumps(head).encode(), *(judged.frames if judged else ())]
    sent = comm.broadcast(msgspec.msgpack.encode(frames) if comm.rank == 0 else None)
    frames = msgspec.msgpack.decode(sent, type=list[bytes])
    head = json.loads(frames[0])
    if head["error"] is not None:
        raise own if own is not None else error_from(head["error"], "rank 0: ")
    if head["folder"] is None:
        return None
    location = replace(home, folder=head["folder"], step=head["step"])
    if judged is not None:
        manifest, index = judged.manifest, judged.index
    else:
        given = frames[1:]
        manifest, index = decode_foreign(given, location.url) if head["listed"] else resolved_frames(given, location)
    told = {name: (there, error_from(text)) for name, (there, text) in head["short"].items()}
    passed_over = tuple(SkippedStep(step, why) for step, why in head["passed_over"])
    return Resolved(location, manifest, index, stored_by(index, told), passed_over, tuple(head["newer"]))


def _judged(location: CheckpointLocation, clock: Clock, *, whole: bool) -> _ResolvedStep:
    """Read and judge a checkpoint before it is given away, so that damage is one rank's error and not every rank's.

    Args:
        place: Where it lies.
        clock: For chance.
        whole: Whether it is damage that a pack is cut short of which perhaps nothing is wanted.
    Raises:
        CheckpointError: It is damaged, or cannot be read.
    """
    listing = listing_at(location)
    short: Mapping[str, tuple[int, CheckpointError]] = {}
    if listing is None:
        frames = given_frames(location)
        manifest, index = resolved_frames(frames, location)
        short = short_packs(location.store, location.folder, manifest, location.packs_of(manifest))
        damaged = next((error for _, error in short.values() if isinstance(error, CorruptError)), None)
        if whole and damaged is not None:
            raise damaged
    else:
        manifest, index = index_foreign(listing, location.url)
        frames = encode_foreign(manifest, index)
    if isinstance(index, Index):
        require_covered(index, clock, location.url)
    return _ResolvedStep(frames, manifest, index, short, listing is not None)
