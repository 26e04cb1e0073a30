"""What a job loads: rank 0 chooses, reads and judges it, and sends it to every rank."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from holdfast.base.clock import Clock
from holdfast.base.types.manifest import Manifest
from holdfast.core.engine.background import side_by_side
from holdfast.core.format.digest import short_digest_of
from holdfast.core.format.index.foreign_index import decode_foreign, encode_foreign, index_foreign
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.split_index import SplitIndex
from holdfast.errors import CheckpointError, CorruptError, MissingError
from holdfast.stored.checkpoint.coverage import RequireStored, require_covered, stored_by
from holdfast.stored.checkpoint.index_loading import index_frames, manifest_or_listing, resolved_frames
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.checkpoint.pack_sizes import short_packs
from holdfast.stored.leases.reader import ReaderLease
from holdfast.stored.repository.catalog import manifest_in
from holdfast.training.coordination.job import Job, error_from, error_text, is_absence
from holdfast.training.loading.messages import ChosenStep
from holdfast.training.loading.named_step import StepQuery
from holdfast.training.loading.run_visibility import require_no_run_elsewhere
from holdfast.training.loading.step_choice import Candidate, Candidates, StepChoice, StepDamage


@dataclass(frozen=True, slots=True)
class Resolved:
    """The checkpoint that a job loads, the same on every rank."""

    location: CheckpointLocation
    """Where it is stored."""

    manifest: Manifest
    """Its commit record."""

    index: Index | SplitIndex
    """Its tensors and pieces."""

    require_stored: RequireStored
    """Refuses a tensor with a piece in the missing part of a pack."""

    chosen: ChosenStep
    """What rank 0 sent, without the frames."""

    require_unchanged: Callable[[], None]
    """On rank 0, once all ranks have read: refuses another system's files that were replaced since they were listed."""


_SoundStep = tuple[ChosenStep, Manifest, Index | SplitIndex, Callable[[], None]]
"""A checkpoint that rank 0 found sound: the message for every rank, the manifest, the index, and `require_unchanged`.
"""


def resolve(
    job: Job,
    home: CheckpointLocation,
    candidates: Candidates,
    damage: StepDamage | None,
    lease: ReaderLease,
    documents: Sequence[str] = (),
) -> Resolved | None:
    """Return what the job loads, None if there is nothing; a collective.

    Storage is read once per job, by rank 0. It sends a whole index, or the overview of an index in several files, of
    which each rank then reads and judges the files that it needs. For another system's checkpoint it sends the listing.

    Args:
        job: The ranks that load together.
        home: Where checkpoints are stored; each rank may have a store of its own.
        candidates: The checkpoints that rank 0 may choose.
        damage: What the ranks found in the checkpoint that was resolved before.
        lease: On rank 0, protects the step from deletion.
        documents: Names of files that lie with the checkpoint and are wanted too.
    Raises:
        CheckpointError: Rank 0 cannot choose or read a checkpoint; on every rank.
        UnavailableError: Rank 0 finds no run, and another rank does; on every rank.
    """
    sound: _SoundStep | None = None
    own: Exception | None = None
    message = None
    if job.comm.rank == 0:
        chosen = ChosenStep()
        try:
            sound = _next_sound_step(candidates, damage, lease, job.clock)
            if sound is not None:
                # The same for the same reader: a job that evaluates every checkpoint replaces its own reports there.
                reader = platform.node().encode(), str(job.comm.world_size).encode()
                chosen = replace(sound[0], reader_id=short_digest_of(*reader).hex())
                chosen = replace(chosen, documents=_found(documents, home, chosen))
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer, whatever the error is
            own = error
            stands = damage is not None and error is damage.error
            chosen = ChosenStep(error=error_text(error), is_damage=stands)
        message = chosen.encode()
    chosen = ChosenStep.decode(job.comm.broadcast(message))
    if chosen.is_damage and damage is not None:
        raise damage.error
    if chosen.error is not None:
        raise own if own is not None else error_from(chosen.error, "rank 0: ")
    if chosen.folder is None:
        require_no_run_elsewhere(job, home.store)
        return None
    location = replace(home, folder=chosen.folder, step=chosen.step).at(chosen.places)
    require_unchanged = _stays
    if sound is not None:
        _, manifest, index, require_unchanged = sound  # Rank 0 reuses its decoded objects.
    elif chosen.is_foreign:
        manifest, index = decode_foreign(chosen.frames, location.url)
    else:
        manifest, index = resolved_frames(chosen.frames, location)
    require_stored = stored_by(index, chosen.short_packs)
    return Resolved(location, manifest, index, require_stored, replace(chosen, frames=()), require_unchanged)


def _found(names: Sequence[str], home: CheckpointLocation, chosen: ChosenStep) -> dict[str, bytes]:
    """Return the files of these names that lie with a checkpoint."""
    place = replace(home, folder=chosen.folder or "", step=chosen.step).at(chosen.places)
    return {name: data for name in names if (data := place.document(name)) is not None}


def _stays() -> None:
    """Do nothing: Holdfast never rewrites a file, and of other systems' files rank 0 alone knows what was listed."""


def _next_sound_step(
    candidates: Candidates, damage: StepDamage | None, lease: ReaderLease, clock: Clock
) -> _SoundStep | None:
    """Return the first candidate that rank 0 finds sound; None if there is nothing to load.

    Rank 0 judges before it sends: damage of a manifest or index is then one rank's error, not every rank's.

    Raises:
        CheckpointError: No checkpoint can be read.
    """
    with suppress(StopIteration):
        while True:
            candidate = candidates.send(damage)
            try:
                lease.announce(candidate.location)
                return _judge(candidate, clock, partial(lease.begin, candidate.location))
            except (CorruptError, MissingError) as error:
                # Rank 0 alone found it. If there is no other candidate, `send` raises the error again.
                damage = StepDamage(error, frozenset((0,)), is_absence(error))
    return None


def location_named(home: CheckpointLocation, find: StepQuery | None, clock: Clock) -> CheckpointLocation:
    """Return the location of a step, for a process that reads alone. It records no damage.

    Args:
        home: The root of the run.
        find: Finds the step; None for the newest one whose manifest, index and sizes of packs are undamaged.
        clock: Source of randomness.
    Raises:
        MissingError: There is no such step or tag, or no run.
        CorruptError: Every step is damaged, or the tag is.
        InvalidError: The path is one checkpoint.
    """
    candidates, damage = StepChoice(home, find).candidates(), None
    while True:
        candidate = candidates.send(damage)
        try:
            if find is None:
                _judge(candidate, clock, lambda manifest: None)
            return candidate.location
        except (CorruptError, MissingError) as error:
            damage = StepDamage(error, frozenset((0,)), is_absence(error))


def _frames_and_short_packs(
    location: CheckpointLocation, data: bytes, begin: Callable[[Manifest], None]
) -> tuple[list[bytes], Mapping[str, tuple[int, CheckpointError]]]:
    """Return what rank 0 reads for every rank, and the packs that are too short; all of it at once.

    Args:
        location: The checkpoint.
        data: Its manifest.
        begin: Called with it, before anything else is read.
    Raises:
        CheckpointError: The manifest or the index is damaged, or cannot be read.
    """
    manifest = manifest_in(location.folder, data, location.manifest_url)
    # Before other files are asked for: one that is missing because the step is being deleted is no damage.
    begin(manifest)
    frames = [data]
    short: dict[str, tuple[int, CheckpointError]] = {}
    side_by_side(
        lambda: frames.extend(index_frames(location, manifest)),
        lambda: short.update(short_packs(location.store, location.folder, manifest, location.packs_of(manifest))),
    )
    return frames, short


def _judge(candidate: Candidate, clock: Clock, begin: Callable[[Manifest], None]) -> _SoundStep:
    """Read and check the manifest and index of a checkpoint.

    Args:
        candidate: The checkpoint.
        clock: Source of randomness.
        begin: Called once the manifest is read: the reader lease begins. It raises if the step is being deleted.
    Raises:
        CheckpointError: It is damaged, or cannot be read.
    """
    location = candidate.location
    content = manifest_or_listing(location)
    short: Mapping[str, tuple[int, CheckpointError]] = {}
    require_unchanged = _stays
    if isinstance(content, bytes):
        frames, short = _frames_and_short_packs(location, content, begin)
        manifest, index = resolved_frames(frames, location)
        damaged = next((error for _, error in short.values() if isinstance(error, CorruptError)), None)
        if candidate.requires_whole and damaged is not None:
            raise damaged
    else:
        manifest, index = index_foreign(content, location.url)
        frames = encode_foreign(manifest, index)
        assert location.foreign is not None, "its files were listed"
        require_unchanged = partial(location.foreign.require_unchanged, content.files)
    if isinstance(index, Index):
        require_covered(index, clock, location.url)
    chosen = ChosenStep(
        folder=location.folder,
        step=location.step,
        places=candidate.places,
        is_foreign=not isinstance(content, bytes),
        short_packs=short,
        passed_over=candidate.passed_over,
        newer=candidate.newer,
        discards=candidate.discards,
        frames=frames,
    )
    return chosen, manifest, index, require_unchanged
