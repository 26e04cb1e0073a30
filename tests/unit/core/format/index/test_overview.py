"""An index cut into files by tensors and bands of rows: nothing is lost, and what is wanted is found in few files."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import region_boxes
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.core.format.index.columns import encode_column
from holdfast.core.format.index.index import Index, IndexMerger
from holdfast.core.format.index.index_builder import IndexBuilder
from holdfast.core.format.index.index_file import decode_index, encode_index
from holdfast.core.format.index.overview import Overview, bands_touched, decode_overview, encode_overview, split
from holdfast.errors import CorruptError
from tests.property.held import flat_runs, guillotine
from tests.unit.core.format.documents import little_memory

CHUNK = 4096


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    """Some tensors, each in pieces of one kind; at least one piece."""
    listing = IndexBuilder(CHUNK)
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        spec = TensorSpec(f"t{number}", "float32", shape)
        parts = draw(st.integers(1, 30))
        for at, region in enumerate(draw(st.one_of(flat_runs(math.prod(shape), parts), guillotine(shape, parts)))):
            digests = bytes([number, at]) * 8 * -(-4 * region.numel // CHUNK)
            listing.add(spec, region, f"enc/r{at:05d}.safetensors", 4096 + 65536 * 4 * number, digests)
    return listing.index()


def by_rows(tensors: int = 3, rows: int = 512) -> Index:
    listing = IndexBuilder(CHUNK)
    for number in range(tensors):
        spec = TensorSpec(f"t{number}", "uint8", (rows, 8))
        for row in range(rows):
            listing.add(spec, Box((row, 0), (row + 1, 8)), f"r{row:05d}.safetensors", 4096 + 8 * number, bytes(16))
        listing.add(TensorSpec(f"t{number}.step", "uint8", ()), Box((), ()), "r00000.safetensors", number, bytes(16))
    return listing.index()


@settings(max_examples=300, deadline=None)
@given(indexes(), st.integers(1, 40), st.data())
def test_splitting_loses_nothing_and_says_where_everything_is(
    index: Index, chunks_max: int, data: st.DataObject
) -> None:
    parts, overview = split(index, chunks_max)
    again = decode_overview(encode_overview(overview), len(parts), "here")
    assert dict(again.table.specs) == dict(index.tensors)
    assert (again.spans == overview.spans).all() and again.bands == overview.bands
    files = [decode_index(encode_index(part), "here") for part in parts]
    merging = IndexMerger(CHUNK, again.table)
    for number, each in enumerate(files):
        again.require_within(number, each, "here")
        merging.add(each, "here")
    assert merging.merged() == index
    assert sum(each.pieces.count for each in files) == index.pieces.count
    spec = data.draw(st.sampled_from(list(index.tensors.values())))
    shape = spec.global_shape
    edges = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    box = Box(tuple(a for a, _ in edges), tuple(b for _, b in edges))
    found = again.files_for(spec.fqn, box)
    for number, each in enumerate(files):
        for piece in each.pieces_of(spec.fqn):
            if any(part.intersect(box) is not None for part in region_boxes(piece.region, shape)):
                assert number in found


def test_a_few_rows_of_everything_lie_in_few_files() -> None:
    index = by_rows()
    parts, overview = split(index, 16)
    assert len(parts) == 65
    assert all(part.pieces.count <= 32 for part in parts)
    wanted = {number for n in range(3) for number in overview.files_for(f"t{n}", Box((100, 0), (104, 8)))}
    assert len(wanted) == 1, "a band of a run of tensors, and not the file of what is held whole"
    assert len(overview.files_for("t1", Box((0, 0), (512, 8)))) == 64
    assert overview.files_for("t1.step", Box((), ())) == [64]


@settings(max_examples=300, deadline=None)
@given(indexes(), st.integers(1, 40))
def test_no_file_reaches_three_times_as_far_as_what_it_holds(index: Index, chunks_max: int) -> None:
    parts, overview = split(index, chunks_max)
    for part, (*_, first_band, stop_band) in zip(parts, overview.spans.tolist(), strict=True):
        first, stop = bands_touched(part.pieces, part.table, overview.bands)
        rows = np.array([(*spec.global_shape, 1)[0] for spec in part.tensors.values()])[part.pieces.tensors]
        whole = (rows <= 1) | ((first == 0) & (stop * -(-rows // overview.bands) >= rows))
        assert whole.all() or (not whole.any() and stop_band - first_band < 3 * (stop - first).min())


@pytest.mark.parametrize("reach", [3, 4, 5, 16])
def test_pieces_that_reach_over_several_bands_are_not_read_by_all(reach: int) -> None:
    listing = IndexBuilder(CHUNK)
    for number in range(16):
        spec = TensorSpec(f"t{number:02d}", "uint8", (512, 8))
        rows = 1 if number % 2 else 4 * reach
        for row in range(0, 512, rows):
            region = Box((row, 0), (min(row + rows, 512), 8))
            listing.add(spec, region, f"r{number:05d}.safetensors", 8 * row, bytes(16))
    parts, overview = split(listing.index(), 32)
    assert overview.bands == 128
    for row in (0, 200, 511):
        wanted = {n for number in range(16) for n in overview.files_for(f"t{number:02d}", Box((row, 0), (row + 1, 8)))}
        read = [fqn for n in wanted for fqn in map(list(parts[n].tensors).__getitem__, parts[n].pieces.tensors)]
        far = sum(int(fqn[1:]) % 2 == 0 for fqn in read)
        assert 8 <= far <= 8 * 3, "the one piece of each that holds the row, and its neighbours"
        assert len(read) - far <= 8 * 4 * 3


def test_an_index_of_whole_tensors_is_cut_by_tensor() -> None:
    listing = IndexBuilder(CHUNK)
    for number in range(100):
        spec = TensorSpec(f"t{number:03d}", "uint8", (4,))
        listing.add(spec, Box.whole((4,)), "r00000.safetensors", 4096 + 4 * number, bytes(16))
    parts, overview = split(listing.index(), 10)
    assert overview.bands == 1
    assert [part.pieces.count for part in parts] == [10] * 10
    assert overview.files_for("t055", Box.whole((4,))) == [5]


def document(**fields: object) -> bytes:
    parts, overview = split(by_rows(2, 8), 4)
    found = msgspec.msgpack.decode(encode_overview(overview))
    found["files"] = len(parts)
    found |= fields
    return msgspec.msgpack.encode(found)


FILES = len(split(by_rows(2, 8), 4)[0])


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"chunk_bytes": 0}, id="chunks of nothing"),
        pytest.param({"bands": 0}, id="no bands"),
        pytest.param({"bands": 1 << 40}, id="very many bands"),
        pytest.param({"fqns": ["t0", "t0.step", "t1", "t1"]}, id="a name twice"),
        pytest.param({"shapes": encode_column([8, 8, 8])}, id="shapes too short"),
        pytest.param({"shapes": encode_column([1 << 62, 8, 8, 8])}, id="a shape that no memory holds"),
        pytest.param({"dtypes": ["__class__"]}, id="an unknown dtype"),
        pytest.param({"file_bands_first": encode_column([0])}, id="a file too few"),
        pytest.param({"file_bands_first": encode_column([9] * FILES)}, id="bands backwards"),
        pytest.param({"file_tensors_first": encode_column([4] * FILES)}, id="tensors backwards"),
        pytest.param({"file_tensors_stop": encode_column([5] * FILES)}, id="tensors beyond the last"),
        pytest.param({"file_tensors_stop": (3, b"abc")}, id="a width of three"),
    ],
)
def test_an_impossible_overview_is_corrupt(fields: dict[str, object]) -> None:
    assert decode_overview(document(), FILES, "here").bands >= 1
    with little_memory(), pytest.raises(CorruptError, match="here"):
        decode_overview(document(**fields), FILES, "here")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_overview_bytes_are_never_another_error(data: st.DataObject) -> None:
    raw = bytearray(document())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with little_memory():
        try:
            decode_overview(bytes(raw), FILES, "here")
        except CorruptError as error:
            assert "here" in str(error)


def test_a_file_that_lists_what_it_is_not_said_to_is_corrupt() -> None:
    parts, overview = split(by_rows(2, 64), 8)
    number = next(n for n, part in enumerate(parts) if "t0" in part.tensors)
    overview.require_within(number, parts[number], "here")

    def altered(column: int, value: int) -> Overview:
        spans = overview.spans.copy()
        spans[number, column] = value
        return replace(overview, spans=spans)

    for other in (altered(0, 1), altered(1, 0), altered(2, 60), altered(3, 0)):
        with pytest.raises(CorruptError, match="here"):
            other.require_within(number, parts[number], "here")
    with pytest.raises(CorruptError, match="chunk_bytes"):
        replace(overview, chunk_bytes=2 * CHUNK).require_within(number, parts[number], "here")
    stranger = IndexBuilder(CHUNK)
    stranger.add(TensorSpec("t0", "int8", (64, 8)), Box((0, 0), (1, 8)), "r00000.safetensors", 0, bytes(16))
    with pytest.raises(CorruptError, match="lists"):
        overview.require_within(number, stranger.index(), "here")
    assert np.all(overview.spans[:, 0] < overview.spans[:, 1])
