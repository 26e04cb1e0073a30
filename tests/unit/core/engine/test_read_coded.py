"""What is coded comes back bit for bit, whatever is asked for; only what it needs is read; damage is named."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._face import wiring
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import chunk_count, chunk_range
from holdfast.base.geometry.region import FlatRange, Region, region_boxes
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.readable import Buffers, ByteRanges, OnRange, Readable
from holdfast.base.types.plan import LoadPlan, Piece, WantedBoxes, give_slot_bytes
from holdfast.core.engine.read import execute
from holdfast.core.engine.target import HostTarget
from holdfast.core.plan.reads import load_plan, longest_read
from holdfast.errors import CorruptError
from holdfast.settings import PAGE_BYTES, Settings
from tests.support.coded_states import ATTEMPT, CHUNK, CodedPieces, stored_training, training_values
from tests.support.tuning import tuned

SETTINGS = tuned(Settings(chunk_bytes=CHUNK), window_bytes=CHUNK, read_window_bytes=4 * CHUNK, windows_in_flight=2)
SHAPE = (60, 211)
"""Rows that end inside a chunk, and a last chunk that is odd."""

REGIONS: dict[str, list[Region]] = {
    "whole": [Box.whole(SHAPE)],
    "rows": [Box((0, 0), (23, 211)), Box((23, 0), SHAPE)],
    "columns": [Box((0, 0), (60, 100)), Box((0, 100), SHAPE)],
    "flat": [FlatRange(0, 5001), FlatRange(5001, math.prod(SHAPE))],
}
STORED = {name: stored_training(SHAPE, regions, seed=number) for number, (name, regions) in enumerate(REGIONS.items())}


def read(stored: CodedPieces, wanted: Sequence[tuple[str, Box]], files: Readable | None = None) -> LoadPlan:
    """Read boxes, and require that every element is what was saved."""
    plan = load_plan([WantedBoxes(fqn, (box,)) for fqn, box in wanted], stored.near, SETTINGS._tuning.read_window_bytes)
    targets = [HostTarget(stored.pieces[fqn][0].tensor.dtype, box) for fqn, box in wanted]
    for target in targets:
        target.array.view(np.uint8)[...] = 0xA5
    execute(plan, stored.packs_in(files or stored.store), targets, SETTINGS, wiring.codecs())
    for (fqn, box), target in zip(wanted, targets, strict=True):
        expected = stored.values[fqn][box.relative_to((0, 0))]
        assert target.array.tobytes() == expected.tobytes(), f"{fqn} {box}"
    return plan


def needed_bytes(stored: CodedPieces, wanted: Sequence[tuple[str, Box]]) -> int:
    """Stored bytes of the chunks that overlap wanted boxes, and of the chunks of pairs that these are coded against."""
    needed: set[tuple[str, int, int]] = set()

    def need(piece: Piece, number: int) -> None:
        needed.add((piece.pack, *piece.stored_range(number)))
        if piece.codec_of(number) == "residual":
            assert piece.coding is not None and piece.coding.pair is not None
            need(piece.coding.pair, number // 2)

    for fqn, box in wanted:
        for piece in stored.pieces[fqn]:
            numbers = np.arange(math.prod(SHAPE)).reshape(SHAPE)
            inside = set(numbers[box.relative_to((0, 0))].reshape(-1).tolist())
            own = np.concatenate(
                [numbers[each.relative_to((0, 0))].reshape(-1) for each in region_boxes(piece.region, SHAPE)]
            )
            for number in range(chunk_count(piece.bytes, CHUNK)):
                start, stop = chunk_range(piece.bytes, CHUNK, number)
                if inside.intersection(own[start // piece.tensor.itemsize : stop // piece.tensor.itemsize].tolist()):
                    need(piece, number)
    return sum(stop - start for _, start, stop in needed)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[str, Box]:
    edges = [sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)))) for n in SHAPE]
    start, stop = zip(*((a, b if b > a else a + 1) for a, b in edges), strict=True)
    return draw(st.sampled_from("wmv")), Box(start, stop)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(STORED)), st.lists(boxes(), min_size=1, max_size=4))
def test_any_boxes_are_read_bit_for_bit_and_no_other_byte(name: str, wanted: list[tuple[str, Box]]) -> None:
    plan = read(STORED[name], wanted)
    assert plan.bytes == needed_bytes(STORED[name], wanted)


def everything() -> list[tuple[str, Box]]:
    return [(fqn, Box.whole(SHAPE)) for fqn in "wmv"]


@pytest.mark.parametrize("name", STORED)
def test_the_whole_state_is_read_once(name: str) -> None:
    stored = STORED[name]
    data_bytes = sum(len(data) - PAGE_BYTES for data in stored.packs.values())
    assert read(stored, everything()).bytes == data_bytes


def test_weights_need_no_masters_and_masters_need_their_pairs() -> None:
    stored = STORED["rows"]
    of = {fqn: sum(piece.stored_bytes for piece in stored.pieces[fqn]) for fqn in "wmv"}
    assert of["m"] < 0.55 * sum(piece.bytes for piece in stored.pieces["m"]), "masters are coded against weights"
    whole = Box.whole(SHAPE)
    assert read(stored, [("w", whole)]).bytes == of["w"]
    assert read(stored, [("m", whole)]).bytes == of["m"] + of["w"]
    assert read(stored, [("v", whole)]).bytes == of["v"]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(STORED)),
    st.lists(boxes(), min_size=1, max_size=4),
    st.integers(1, 6 * CHUNK),
    st.booleans(),
)
def test_a_run_is_cut_between_units_and_fits_into_the_buffer(
    name: str, wanted: list[tuple[str, Box]], run_bytes_max: int, whole: bool
) -> None:
    stored = STORED[name]
    plan = load_plan([WantedBoxes(fqn, (box,)) for fqn, box in wanted], stored.near, run_bytes_max, whole_units=whole)
    bases = [chunk for run in plan.runs for base in run.bases for chunk in base.chunks]
    assert len({id(base) for base in bases}) == len(bases), "a base lies in one run"
    own = {(chunk.piece.pack, chunk.offset) for run in plan.runs for chunk in run.chunks}
    assert not own.intersection((base.piece.pack, base.offset) for base in bases), "and is read nowhere else"
    for run in plan.runs:
        assert [chunk.base for chunk in run.chunks if chunk.base is not None] == [] or run.bases
        memory = sum(give_slot_bytes(part.stop - part.start) for part in (run, *run.bases))
        assert memory <= longest_read(run_bytes_max, CHUNK, coded=True)
        assert all(a.offset + a.stored_bytes == b.offset for a, b in pairwise(run.chunks))
        assert all(chunk.parts or chunk.base is not None for chunk in run.chunks)
        if whole:
            units = {id(chunk.base): [] for chunk in run.chunks if chunk.base is not None}
            for chunk in run.chunks:
                if chunk.base is not None:
                    units[id(chunk.base)].append(chunk.number)
            for chunk in run.chunks:
                if chunk.base is not None:
                    last = chunk_count(chunk.piece.bytes, CHUNK) - 1
                    first = chunk.number // 2 * 2
                    assert units[id(chunk.base)] == [n for n in (first, first + 1) if n <= last]


def mixed() -> CodedPieces:
    """Weights in a plain pack; masters of which some units are coded otherwise, and bits that no codec shortens."""
    made = CodedPieces(MemoryStore("coded-by-hand-mixed"))
    masters, weights = training_values(SHAPE, 9)
    noise = np.random.default_rng(3).integers(0, 1 << 32, SHAPE, dtype=np.uint32).view(np.float32)
    whole = Box.whole(SHAPE)
    pair = made.add(TensorSpec("w", "bfloat16", SHAPE), whole, weights, "r00000.safetensors", [])
    codecs = ["residual", "planes", "zstd"]
    made.add(TensorSpec("m", "float32", SHAPE), whole, masters, "coded/r00000.safetensors", codecs, pair)
    made.add(TensorSpec("v", "float32", SHAPE), whole, noise, "coded/r00000.safetensors", ["zstd"])
    made.finish()
    return made


def test_chunks_of_several_codecs_and_raw_ones_stand_side_by_side() -> None:
    stored = mixed()
    (masters,), (noise,) = stored.pieces["m"], stored.pieces["v"]
    found = {masters.codec_of(number) for number in range(chunk_count(masters.bytes, CHUNK))}
    assert found == {"residual", "planes", "zstd"}
    assert noise.stored_bytes == noise.bytes, "no codec shortens noise"
    read(stored, everything())
    read(stored, [("m", Box((11, 3), (47, 200)))])


class FlipsOnTheWay(ForwardingStore):
    """Flips a bit in what the first reads of a pack return, as a network may."""

    def __init__(self, inner: MemoryStore, at: int, reads: int) -> None:
        super().__init__(inner)
        self.at, self.left = at, reads

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        flips = any(start <= self.at < stop for start, stop in ranges) and self.left > 0
        self.left -= flips
        for number, ((start, stop), buffer) in enumerate(zip(ranges, buffers, strict=True)):
            self._inner.read_into(key, [(start, stop)], [buffer])
            if flips and start <= self.at < stop:
                buffer[self.at - start] ^= 1
            if on_range is not None:
                on_range(number, buffer)


@pytest.mark.parametrize("fqn", ("w", "m", "v"))
def test_a_bit_that_was_flipped_on_the_way_is_read_again(fqn: str, caplog: pytest.LogCaptureFixture) -> None:
    stored = STORED["whole"]
    at = stored.pieces[fqn][0].stored_range(2)[0] + 40
    read(stored, everything(), FlipsOnTheWay(stored.store, at, 1))
    assert "right when they were read again" in caplog.text
    with pytest.raises(CorruptError):
        read(stored, everything(), FlipsOnTheWay(stored.store, at, 2))


def test_every_damage_is_named_or_read_by_nobody() -> None:
    """A flipped bit of a stored byte is found wherever the byte is needed, and keeps nobody else from reading."""
    stored = stored_training((40, 211), [Box.whole((40, 211))], seed=5)
    (pack,) = stored.packs
    whole = stored.store.get(ATTEMPT + pack, 1 << 30)
    drawn = np.random.default_rng(1).choice(np.arange(PAGE_BYTES, len(whole)), 120, replace=False)
    for at in drawn.tolist():
        changed = bytearray(whole)
        changed[at] ^= 1 << (at % 8)
        stored.store.put(ATTEMPT + pack, bytes(changed))
        hit = {
            fqn: number
            for fqn in "wmv"
            for piece in stored.pieces[fqn]
            for number in range(chunk_count(piece.bytes, CHUNK))
            for start, stop in [piece.stored_range(number)]
            if start <= at < stop
        }
        ((damaged, number),) = hit.items()
        start, stop = stored.pieces[damaged][0].stored_range(number)
        for fqn in "wmv":
            plan = load_plan(
                [WantedBoxes(fqn, (Box.whole((40, 211)),))], stored.near, SETTINGS._tuning.read_window_bytes
            )
            target = HostTarget(stored.pieces[fqn][0].tensor.dtype, Box.whole((40, 211)))
            needs = damaged == fqn or (fqn, damaged) == ("m", "w")
            if not needs:
                execute(plan, stored.packs_in(stored.store), [target], SETTINGS, wiring.codecs())
                assert target.array.tobytes() == stored.values[fqn].tobytes()
                continue
            with pytest.raises(CorruptError) as caught:
                execute(plan, stored.packs_in(stored.store), [target], SETTINGS, wiring.codecs())
            said = str(caught.value)
            assert damaged in said and pack in said and f"{start}–{stop}" in said, said
            assert re.search(rf"chunk {number}\b", said), said
            assert fqn == damaged or "m:" in said
    stored.store.put(ATTEMPT + pack, whole)


def test_a_pack_of_pairs_that_is_missing_is_named() -> None:
    stored = mixed()
    stored.store.delete([ATTEMPT + "r00000.safetensors"])
    with pytest.raises(CorruptError, match=r"w: .*/r00000\.safetensors: the pack is missing"):
        read(stored, [("m", Box.whole(SHAPE))])


def test_what_is_coded_against_a_pair_that_nobody_lists_is_refused() -> None:
    stored = mixed()
    (masters,) = stored.pieces["m"]
    assert masters.coding is not None
    masters.coding.pair = None  # type: ignore[misc]
    with pytest.raises(CorruptError, match=r"m: .*chunk 0 is coded against chunk 0 of 'w'"):
        read(stored, [("m", Box.whole(SHAPE))])
