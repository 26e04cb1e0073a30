"""Looking for the pieces of a box among many, and for those of a pack, against asking each."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import region_boxes
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.index_builder import IndexBuilder
from holdfast.core.format.index.piece_columns import PieceIntervals
from tests.property.held import flat_runs, guillotine

CHUNK = 4096


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    """One tensor in many pieces of both kinds, listed in any order."""
    shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
    parts = draw(st.integers(1, 20))
    regions = draw(st.one_of(flat_runs(math.prod(shape), parts), guillotine(shape, parts)))
    regions += draw(st.one_of(st.just([]), flat_runs(math.prod(shape), parts)))
    listing = IndexBuilder(CHUNK)
    spec = TensorSpec("w", "uint8", shape)
    for number, region in enumerate(draw(st.permutations(regions))):
        pack = f"{draw(st.sampled_from(('', 'enc/')))}r{number % 3:05d}.safetensors"
        listing.add(spec, region, pack, 4096 * number, bytes([number]) * 16 if region.numel else b"")
    return listing.index()


@settings(max_examples=400, deadline=None)
@given(indexes(), st.data())
def test_no_piece_that_a_box_meets_is_passed_over(index: Index, data: st.DataObject) -> None:
    pieces = list(index.all_pieces())
    shape = pieces[0].tensor.global_shape
    edges = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    box = Box(tuple(a for a, _ in edges), tuple(b for _, b in edges))
    found = PieceIntervals(index.pieces, shape).near(box).tolist()
    assert found == sorted(set(found))
    met = {
        number
        for number, piece in enumerate(pieces)
        if any(each.intersect(box) is not None for each in region_boxes(piece.region, shape))
    }
    assert met <= set(found)
    # Boxes are told apart exactly; a flat range may only come near.
    boxes = {number for number, piece in enumerate(pieces) if isinstance(piece.region, Box)}
    assert not box.numel or set(found) & boxes <= {n for n in boxes if n in met or not pieces[n].region.numel}
    near = list(index.pieces_near("w", box))
    assert all(any(pieces[number] == piece for piece in near) for number in met)
    assert index.pieces_near("x", box) == index.pieces_of("x") == ()


@settings(max_examples=200, deadline=None)
@given(indexes())
def test_pieces_are_found_by_their_pack(index: Index) -> None:
    pieces = list(index.all_pieces())
    for pack in {piece.pack for piece in pieces}:
        assert index.pieces_in(pack) == sorted((p for p in pieces if p.pack == pack), key=lambda p: p.offset)
    assert index.pieces_in("r00009.safetensors") == []


@settings(max_examples=200, deadline=None)
@given(indexes())
def test_pieces_lie_by_where_they_start(index: Index) -> None:
    regions = [piece.region for piece in index.all_pieces()]
    # Coordinates that a flat range or a tensor lacks count as nought.
    starts = [((*each.start, 0, 0, 0) if isinstance(each, Box) else (each.start, 0, 0, 0))[:3] for each in regions]
    assert starts == sorted(starts)


def test_pieces_far_from_a_box_are_not_asked() -> None:
    listing = IndexBuilder(CHUNK)
    spec = TensorSpec("w", "uint8", (1000, 2))
    for n in range(1000):
        listing.add(spec, Box((n, 0), (n + 1, 2)), "r00000.safetensors", 2 * n, bytes(16))
    index = listing.index()
    found = index.pieces_near("w", Box((500, 0), (502, 2)))
    assert [piece.region for piece in found] == [Box((500, 0), (501, 2)), Box((501, 0), (502, 2))]


def test_a_large_index_makes_only_what_is_asked_for() -> None:
    listing = IndexBuilder(CHUNK)
    rows = 1 << 14
    specs = [TensorSpec(f"w{number:02d}", "uint8", (rows, 4)) for number in range(20)]
    for spec in specs:
        for row in range(rows):
            digest = row.to_bytes(16, "little")
            listing.add(spec, Box((row, 0), (row + 1, 4)), f"r{row % 7:05d}.safetensors", 4 * row, digest)
    index = listing.index()
    whole = index.pieces_of("w07")
    assert [piece.region.start[0] for piece in whole] == list(range(rows))
    assert [piece.digests for piece in whole] == [row.to_bytes(16, "little") for row in range(rows)]
    assert all(piece.tensor is specs[7] for piece in whole)
    (found,) = index.pieces_near("w19", Box((rows - 1, 1), (rows, 2)))
    assert found.pack == f"r{(rows - 1) % 7:05d}.safetensors"
    assert np.array_equal(np.unique(index.pieces.widths), [2])
