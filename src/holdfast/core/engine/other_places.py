"""Reads a run that one place does not have whole: each chunk from the first place of its pack that has it whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from holdfast.base.ports.packs import Stored
from holdfast.base.ports.ranges import view_for_range
from holdfast.base.types.plan import ChunkRead, ReadRun, give_slot_bytes
from holdfast.core.engine.placing import Placing, pack_expected, require_digest, verify_and_place_all
from holdfast.errors import CheckpointError, CorruptError, MissingError, UnavailableError
from holdfast.settings import PAGE_BYTES


def read_elsewhere(run: ReadRun, placing: Placing, buffer: memoryview, error: CheckpointError) -> list[memoryview]:
    """Read a run and its bases chunk by chunk, and place them; return their views as `read_through`.

    Args:
        run, placing, buffer: As for `read_through`.
        error: Why the first read of the run failed.
    Raises:
        CheckpointError: `error`, if no pack of the run has another place.
        CorruptError: No place has a chunk whole; the message names the damage in each place.
        UnavailableError: No place has a chunk whole, and one of them cannot be read now.
    """
    if not any(placing.packs(part.pack).others for part in (run, *run.bases)):
        raise error
    bases: dict[int, memoryview] = {}  # Stored bytes, by the identity of the chunk.
    views, at = [], 0
    for part in (*run.bases, run):  # Whole bases first: they decode the chunks that are checked.
        view = view_for_range(buffer[at:], part.start, part.stop, PAGE_BYTES)
        _fill(view, part, bases, placing)
        bases |= {id(chunk): _stored(chunk, view, part) for chunk in part.chunks}
        views.append(view)
        at += give_slot_bytes(part.stop - part.start)
    data = [views[-1], *views[:-1]]
    verify_and_place_all(run, data, placing)
    return data


def _fill(view: memoryview, part: ReadRun, bases: Mapping[int, memoryview], placing: Placing) -> None:
    """Read every chunk of one pack from the first place that has it whole."""
    stored = placing.packs(part.pack)
    found: list[dict[int, CheckpointError]] = []
    left: Sequence[ChunkRead] = part.chunks
    for place in (stored, *stored.others):
        found.append(_read(left, place, view, part, bases, placing))
        count = sum(chunk.stored_bytes for chunk in left if chunk.offset not in found[-1])
        if count and place is not stored:
            placing.note_elsewhere(part.pack, stored, place, count, next(iter(found[0].values())))
        left = [chunk for chunk in left if chunk.offset in found[-1]]
        if not left:
            return
    named = [errors[left[0].offset] for errors in found]
    kind = UnavailableError if any(isinstance(error, UnavailableError) for error in named) else CorruptError
    # A chunk that is absent here and damaged there is damaged: a load must not wait for its file to appear.
    cause = max(named, key=lambda error: not isinstance(error.__cause__, MissingError))
    raise kind("; and ".join(map(str, named))) from cause


def _read(
    chunks: Sequence[ChunkRead],
    place: Stored,
    view: memoryview,
    part: ReadRun,
    bases: Mapping[int, memoryview],
    placing: Placing,
) -> dict[int, CheckpointError]:
    """Read chunks from one place; return the errors of those that are not whole there, by offset."""
    ranges = [(chunk.offset, chunk.offset + chunk.stored_bytes) for chunk in chunks]
    if len(chunks) == len(part.chunks):
        ranges = [(part.start, part.stop)]  # With one read, however many chunks it has.
    try:
        with pack_expected(part, place):
            buffers = [view[start - part.start : stop - part.start] for start, stop in ranges]
            place.files.read_into(place.key, ranges, buffers)
    except (CorruptError, UnavailableError) as error:
        is_short = isinstance(error, CorruptError) and not isinstance(error.__cause__, MissingError)
        if not is_short or len(chunks) == 1:
            return {chunk.offset: error for chunk in chunks}
        each = (_read([chunk], place, view, part, bases, placing) for chunk in chunks)
        return dict(chain.from_iterable(errors.items() for errors in each))
    errors: dict[int, CheckpointError] = {}
    for chunk in chunks:
        try:
            decoder, base = placing.decoder, chunk.base
            raw_base = None if base is None else decoder.raw_base(base, bases[id(base)], place.url)
            raw = decoder.raw(chunk, _stored(chunk, view, part), raw_base, place.url)
            require_digest(chunk, raw, place.url)
        except CorruptError as error:
            errors[chunk.offset] = error
    return errors


def _stored(chunk: ChunkRead, view: memoryview, part: ReadRun) -> memoryview:
    return view[chunk.offset - part.start :][: chunk.stored_bytes]
