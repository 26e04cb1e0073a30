"""Which chunks a load reads, and what of them goes where, against every element counted one by one."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import chunk_count
from holdfast.base.geometry.region import FlatRange, Region
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.plan import Piece, WantedBoxes
from holdfast.core.plan.reads import load_plan

CHUNK = 64
"""Far smaller than any real chunk, so that small tensors have many."""


@st.composite
def two_boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    cut = draw(st.integers(0, shape[0])) if shape else 0
    if 0 < cut < (shape[0] if shape else 0):
        rest = shape[1:]
        return [Box((0,) * len(shape), (cut, *rest)), Box((cut, *(0,) * len(rest)), shape)]
    return [Box.whole(shape)]


@st.composite
def flat_ranges(draw: st.DrawFn, numel: int) -> list[Region]:
    cuts = draw(st.lists(st.integers(0, numel), max_size=14))  # also more than are asked one by one
    return [FlatRange(a, b) for a, b in pairwise([0, *sorted(cuts), numel])]


def elements_of(region: Region, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the global numbers of a region's elements, in the order in which they are stored."""
    if isinstance(region, FlatRange):
        return numbers.reshape(-1)[region.start : region.stop]
    return numbers[region.relative_to((0,) * numbers.ndim)].reshape(-1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[TensorSpec, list[Piece], list[WantedBoxes]]:
    shape = draw(st.lists(st.integers(1, 9), max_size=4).map(tuple))
    spec = TensorSpec("w", draw(st.sampled_from(("uint8", "int16", "float32", "complex64", "complex128"))), shape)
    regions = draw(st.one_of(two_boxes(shape), flat_ranges(math.prod(shape))))
    pieces: list[Piece] = []
    ends = [4096, 4096]
    for region in regions:
        pack = draw(st.integers(0, 1))
        digests = bytes(16 * chunk_count(region.numel * spec.itemsize, CHUNK))
        pieces.append(Piece(spec, region, f"r{pack:05d}.safetensors", ends[pack], digests, CHUNK))
        ends[pack] += pieces[-1].bytes

    def wanted_box() -> Box:
        edges = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        return Box(tuple(a for a, _ in edges), tuple(b for _, b in edges))

    wanted = [
        WantedBoxes("w", tuple(wanted_box() for _ in range(draw(st.integers(1, 2)))))
        for _ in range(draw(st.integers(1, 2)))
    ]
    return spec, pieces, wanted


@settings(max_examples=400, deadline=None)
@given(cases(), st.sampled_from((1, CHUNK, 3 * CHUNK, 1 << 20)))
def test_the_plan_places_every_wanted_element_from_its_own_byte(
    case: tuple[TensorSpec, list[Piece], list[WantedBoxes]], run_bytes_max: int
) -> None:
    spec, pieces, wanted = case
    plan = load_plan(wanted, lambda *_: pieces, run_bytes_max)
    item, shape = spec.itemsize, spec.global_shape
    numbers = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    origin = (0,) * len(shape)
    # What lies in each pack: the global number of the element each run of bytes belongs to.
    element_at = {
        (piece.pack, piece.offset + item * n): int(number)
        for piece in pieces
        for n, number in enumerate(elements_of(piece.region, numbers))
    }
    placed = [np.full(shape, -1, dtype=np.int64) for _ in wanted]
    seen = set()
    for run in plan.runs:
        assert run.start == run.chunks[0].offset
        assert run.stop - run.start <= max(run_bytes_max, run.chunks[0].bytes)
        at = run.start
        for chunk in run.chunks:
            assert chunk.offset == at
            at += chunk.bytes
            assert (run.pack, chunk.offset) not in seen
            seen.add((run.pack, chunk.offset))
            assert chunk.parts
            for part in chunk.parts:
                assert part.source_box.contains(part.box)
                assert 0 <= part.source_start <= chunk.bytes - part.source_box.numel * item
                source = np.array(
                    [
                        element_at[run.pack, chunk.offset + part.source_start + item * n]
                        for n in range(part.source_box.numel)
                    ]
                ).reshape(part.source_box.shape)
                assert (source == numbers[part.source_box.relative_to(origin)]).all()
                placed[part.wanted_number][part.box.relative_to(origin)] = source[
                    part.box.relative_to(part.source_box.start)
                ]
        assert run.stop == at
    needed = set()
    for each, filled in zip(wanted, placed, strict=True):
        expected = np.full(shape, -1, dtype=np.int64)
        for box in each.boxes:
            expected[box.relative_to(origin)] = numbers[box.relative_to(origin)]
        assert (filled == expected).all()
        for (pack, offset), number in element_at.items():
            if expected.reshape(-1)[number] >= 0:
                (piece,) = (p for p in pieces if p.pack == pack and p.offset <= offset < p.offset + p.bytes)
                needed.add((pack, offset - (offset - piece.offset) % CHUNK))
    assert seen == needed
    assert plan.bytes == sum(run.stop - run.start for run in plan.runs)


def test_neighbouring_chunks_are_read_together_and_no_further() -> None:
    spec = TensorSpec("w", "uint8", (10 * CHUNK,))
    piece = Piece(spec, Box.whole(spec.global_shape), "r00000.safetensors", 4096, bytes(160), CHUNK)
    plan = load_plan([WantedBoxes("w", (Box.whole(spec.global_shape),))], lambda *_: [piece], 4 * CHUNK)
    assert [(run.start - 4096) // CHUNK for run in plan.runs] == [0, 4, 8]
    far = (Box((0,), (1,)), Box((5 * CHUNK,), (5 * CHUNK + 1,)))
    assert len(load_plan([WantedBoxes("w", far)], lambda *_: [piece], 1 << 20).runs) == 2


def test_what_is_not_stored_is_not_read() -> None:
    assert load_plan([WantedBoxes("w", (Box((0,), (5,)),))], lambda *_: [], 4096).runs == ()
