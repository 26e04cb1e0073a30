"""A damaged, cut or missing segment ends the redo at the step before, with the very bits of that step.

The suite draws some bytes; with `FLIPPED_BYTES=all`, as in `make campaign`, every byte of headers and records is
flipped, and 300 bytes of each kind are met by a load.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch

import holdfast
from holdfast.errors import CorruptError
from holdfast.stored.repository.logs import Segment, records_in
from tests.support.redo_log.logged_runs import Loader, Logged, logged, memory_store
from tests.unit.training.redo_log.test_lives import Training

IS_WHOLE = os.environ.get("FLIPPED_BYTES") == "all"
READ, LOADED, CUTS = (1 << 30, 300, 100) if IS_WHOLE else (250, 16, 12)
"""Bytes of header and records that a read meets; bytes of each kind, and cuts, that a load meets."""


@pytest.fixture(scope="module", params=[1, 3], ids=["a-record-each", "three-records-each"])
def run(request: pytest.FixtureRequest) -> Logged:
    return logged(
        memory_store(),
        range(1, 2),
        *(range(first, first + request.param) for first in range(2, 8, request.param)),
        differential=holdfast.Differential(flush_every=request.param),
    )


@pytest.fixture(scope="module")
def loader(run: Logged) -> Iterator[Loader]:
    loader = Loader(run)
    assert loader.load() == (run.last, "")
    yield loader
    loader.close()


class Replaced:
    """Has other bytes in the place of a segment for the length of a block; None removes the segment."""

    def __init__(self, run: Logged, segment: Segment, data: bytes | None) -> None:
        self._store, self._key, self._data = run.store, segment.key, data
        self._whole = run.store.get(segment.key, 1 << 30)

    def __enter__(self) -> None:
        self._store.delete([self._key])
        if self._data is not None:
            self._store.put(self._key, self._data)

    def __exit__(self, *_: object) -> None:
        self._store.put(self._key, self._whole)


def flipped(run: Logged, segment: Segment, at: int, bit: int) -> Replaced:
    changed = bytearray(run.store.get(segment.key, 1 << 30))
    changed[at] ^= 1 << bit
    return Replaced(run, segment, bytes(changed))


def step_before(run: Logged, segment: Segment, at: int) -> int:
    """Return the last step that a load may reach if a byte of a segment is another one."""
    for record in records_in(run.store, segment).values():
        for piece in (piece for pieces in record.pieces.values() for piece in pieces):
            if piece.offset <= at < piece.offset + piece.stored_bytes:
                return record.previous
    return min(record.previous for record in records_in(run.store, segment).values())


def places(run: Logged, *, of_payload: bool) -> list[tuple[Segment, int]]:
    """Return the bytes of payload, or those of headers and records."""
    found = []
    for segment in run.segments():
        tensors = [
            piece
            for record in records_in(run.store, segment).values()
            for pieces in record.pieces.values()
            for piece in pieces
        ]
        payload = {at for piece in tensors for at in range(piece.offset, piece.offset + piece.stored_bytes)}
        found += [(segment, at) for at in range(segment.bytes) if (at in payload) is of_payload]
    return found


def test_every_byte_of_header_and_record_is_proven(run: Logged) -> None:
    chance, found = random.Random(1), places(run, of_payload=False)
    if IS_WHOLE:
        found = [(segment, at) for segment, at in found if segment == run.segments()[-1]]
    for segment, at in chance.sample(found, min(READ, len(found))):
        bit = chance.randrange(8)
        with flipped(run, segment, at, bit):
            try:
                records_in(run.store, segment)
            except CorruptError:
                continue
            except Exception as error:
                raise AssertionError(f"{segment.key}: bit {bit} of byte {at}") from error
        raise AssertionError(f"{segment.key}: bit {bit} of byte {at} is not seen")


@pytest.mark.parametrize("of_payload", [False, True], ids=["header-or-record", "payload"])
def test_a_load_ends_before_a_flipped_byte(run: Logged, loader: Loader, of_payload: bool) -> None:
    chance = random.Random(2)
    for segment, at in chance.sample(places(run, of_payload=of_payload), LOADED):
        bit = chance.randrange(8)
        with flipped(run, segment, at, bit):
            step, why = loader.load()
        assert step == step_before(run, segment, at), (segment.key, at, bit, why)
        # The last segment of a killed run may be torn: a log that ends there is whole.
        assert why or (segment == run.segments()[-1] and not of_payload), (segment.key, at, bit)
    assert loader.load() == (run.last, "")


def test_a_load_ends_before_a_missing_segment(run: Logged, loader: Loader) -> None:
    for segment in run.segments():
        before = step_before(run, segment, 0)
        with Replaced(run, segment, None):
            step, why = loader.load()
        assert step == before
        assert bool(why) is (segment != run.segments()[-1]), why
    assert loader.load() == (run.last, "")


def test_a_load_ends_before_a_cut_segment(run: Logged, loader: Loader) -> None:
    chance = random.Random(3)
    for number in range(CUTS):
        segment = chance.choice(run.segments())
        length = (0, 1, 8, segment.bytes - 1)[number] if number < 4 else chance.randrange(segment.bytes)
        before = step_before(run, segment, 0)
        with Replaced(run, segment, run.store.get(segment.key, 1 << 30)[:length]):
            assert loader.load()[0] == before, (segment.key, length)
    assert loader.load() == (run.last, "")


class Accumulating(Training):
    """A training whose optimizer steps at every third boundary: training can go on from these alone."""

    def step(self, number: int) -> None:
        self.model(torch.randn(5, 6)).square().mean().backward()
        if number % 3 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if number >= 3:
            self.manager.maybe_save(number, self.state)


@pytest.mark.parametrize(("damaged", "expected"), [(12, 9), (6, 3)])
def test_a_damaged_record_after_an_accumulation_ends_the_redo_before_all_of_it(damaged: int, expected: int) -> None:
    store = memory_store()
    training, digests = Accumulating(store, every=1000), {}
    for step in range(1, 16):
        training.run(step, step)
        digests[step] = training.digest()
    training.die()
    run = Logged(store, digests)
    (segment,) = (segment for segment in run.segments() if segment.first == damaged)
    loader = Loader(run)
    with flipped(run, segment, segment.bytes - 1, 0):
        step, why = loader.load()
    assert (step, f"step {damaged} cannot be redone" in why) == (expected, True)
    assert loader.load() == (15, "")
    loader.close()
