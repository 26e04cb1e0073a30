"""Flat ranges and packs apart as they are stored: the index's kinds, headers that tell enough to begin again."""

from __future__ import annotations

import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.region import FlatRange, Region
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.plan import PackItem, PackPlan, Piece
from holdfast.core.format.index.columns import decode_column, encode_column
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.index_builder import IndexBuilder
from holdfast.core.format.index.index_file import IndexDocument, decode_index, document_of, encode_index, index_of
from holdfast.core.format.pack import entries_of, header_entry, header_of
from holdfast.errors import CorruptError
from holdfast.training.saving.merge import require_exact_cover
from tests.property.held import flat_runs, guillotine

CHUNK = 4096
"""Bytes of a chunk."""


def piece(spec: TensorSpec, region: Region, number: int = 0) -> Piece:
    digests = b"".join(
        bytes([number % 256, chunk % 256]) * 8 for chunk in range(math.ceil(region.numel * spec.itemsize / CHUNK))
    )
    return Piece(spec, region, f"enc/r{number:05d}.safetensors", 4096, digests, CHUNK)


def index_with(*pieces: Piece, tensors: tuple[TensorSpec, ...] = ()) -> Index:
    listing = IndexBuilder(CHUNK, tensors)
    for each in pieces:
        listing.add(each.tensor, each.region, each.pack, each.offset, each.digests)
    return listing.index()


FLAT = TensorSpec("flat", "float32", (30, 70))
BOXED = TensorSpec("boxed", "float32", (30, 70))


def mixed() -> Index:
    return index_with(
        piece(FLAT, FlatRange(0, 1001), 0),
        piece(FLAT, FlatRange(1001, 2100), 1),
        piece(BOXED, Box((0, 0), (30, 35)), 2),
        piece(BOXED, Box((0, 35), (30, 70)), 3),
    )


# ------------------------------------------------------------------------------------------------- index


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    pieces = []
    for number in range(draw(st.integers(0, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=4)))
        spec = TensorSpec(f"t{number}", draw(st.sampled_from(sorted(DTYPES))), shape)
        parts = draw(st.integers(1, 5))
        for at, region in enumerate(draw(st.one_of(flat_runs(math.prod(shape), parts), guillotine(shape, parts)))):
            pieces.append(piece(spec, region, at))
    return index_with(*pieces)


@settings(max_examples=300, deadline=None)
@given(indexes())
def test_an_index_of_any_regions_comes_back_and_is_an_exact_cover(index: Index) -> None:
    again = decode_index(encode_index(index), "here")
    assert again == index
    require_exact_cover(again, 1, "here")


@settings(max_examples=300, deadline=None)
@given(indexes(), st.data())
def test_a_region_too_many_or_too_few_is_no_cover(index: Index, data: st.DataObject) -> None:
    filled = [each for each in index.all_pieces() if each.region.numel]
    if not filled:
        return
    chosen = data.draw(st.sampled_from(filled))
    for pieces in ([*index.all_pieces(), chosen], [each for each in index.all_pieces() if each is not chosen]):
        wrong = index_with(*pieces, tensors=(chosen.tensor,))
        with pytest.raises(Exception, match=f"{chosen.tensor.fqn} "):
            require_exact_cover(wrong, 1, "here")


def test_a_flat_range_and_a_box_of_one_tensor_cover_it_together() -> None:
    index = index_with(piece(FLAT, FlatRange(0, 700), 0), piece(FLAT, Box((10, 0), (30, 70)), 1))
    require_exact_cover(decode_index(encode_index(index), "here"), 1, "here")


def test_kinds_are_stored_only_where_a_flat_range_is() -> None:
    boxes = index_with(piece(BOXED, Box((0, 0), (30, 70))))
    assert document_of(boxes).piece_kinds is None
    kinds = document_of(mixed()).piece_kinds
    assert kinds is not None
    assert decode_column(kinds, "here").tolist() == [0, 0, 1, 1]


def test_an_index_written_before_there_were_flat_ranges_is_read() -> None:
    boxes = index_with(piece(BOXED, Box((0, 0), (30, 70))))
    document = msgspec.to_builtins(document_of(boxes), builtin_types=(bytes,))
    del document["piece_kinds"]
    assert decode_index(msgspec.msgpack.encode(document), "here") == boxes


def altered(**fields: object) -> IndexDocument:
    document = document_of(mixed())
    for name, value in fields.items():
        assert hasattr(document, name)
        setattr(document, name, value)
    return document


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"piece_kinds": None}, id="kinds missing"),
        pytest.param({"piece_kinds": encode_column([0, 0, 0, 0])}, id="a flat range called a box"),
        pytest.param({"piece_kinds": encode_column([1, 0, 1, 1])}, id="a box called a flat range"),
        pytest.param({"piece_kinds": encode_column([0, 0, 1, 2])}, id="an unknown kind"),
        pytest.param({"piece_kinds": encode_column([0, 0, 1, (1 << 63) - 1])}, id="a huge kind"),
        pytest.param({"piece_kinds": encode_column([0, 0, 1])}, id="a kind too few"),
        pytest.param({"piece_kinds": encode_column([0, 0, 1, 1, 1])}, id="a kind too many"),
        pytest.param({"piece_kinds": (3, b"123")}, id="a width of three"),
        pytest.param({"piece_stops": encode_column([30, 35, 30, 70, 1001, 2101])}, id="a range beyond its tensor"),
        pytest.param({"piece_starts": encode_column([0, 0, 0, 35, 0, 2100])}, id="a range of other bytes than digests"),
        pytest.param(
            {"piece_starts": encode_column([0, 0, 0, 35, 1002, 1001])}, id="a range that ends before it begins"
        ),
    ],
)
def test_hostile_kinds_are_corrupt(fields: dict[str, object]) -> None:
    document = altered(**fields)
    with pytest.raises(CorruptError, match="here"):
        index_of(document, "here")
    with pytest.raises(CorruptError, match="here"):
        decode_index(msgspec.msgpack.encode(document), "here")


def test_a_range_of_an_empty_tensor_and_of_one_without_dimensions() -> None:
    index = index_with(
        piece(TensorSpec("empty", "int8", (0, 3)), FlatRange(0, 0)),
        piece(TensorSpec("scalar", "int8", ()), FlatRange(0, 1)),
    )
    assert decode_index(encode_index(index), "here") == index
    require_exact_cover(index, 1, "here")


# ------------------------------------------------------------------------------------------------- packs


def test_a_pack_apart_says_in_its_header_what_stock_readers_need_not_know() -> None:
    items = (
        PackItem(TensorSpec("a", "complex128", (4, 8)), Box((1, 0), (3, 8)), 0, 0),
        PackItem(TensorSpec("b.ß", "bfloat16", (4, 8)), FlatRange(5, 26), 256, 1),
    )
    header = header_of(PackPlan("enc/r00000.safetensors", items), {"step": "7"})
    document = json.loads(header[8:])
    metadata = document.pop("__metadata__")
    assert document == {
        "a": {"dtype": "U8", "shape": [256], "data_offsets": [0, 256]},
        "b.ß": {"dtype": "U8", "shape": [42], "data_offsets": [256, 298]},
    }
    assert json.loads(metadata["holdfast.pieces"]) == {
        "a": {"dtype": "complex128", "box": [[1, 0], [3, 8]]},
        "b.ß": {"dtype": "bfloat16", "flat": [5, 26]},
    }
    assert json.loads(metadata["holdfast.global_shapes"]) == {"a": [4, 8], "b.ß": [4, 8]}
    assert "DCP_SHARDING_INFO" not in metadata, "PyTorch's reader would take bytes for a piece of the tensor"
    assert [(each.fqn, each.dtype, each.shape) for each in entries_of(header, "here")] == [
        ("a", "U8", (256,)),
        ("b.ß", "U8", (42,)),
    ]


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_an_entry_is_as_long_as_its_bytes(dtype: str) -> None:
    width = DTYPES[dtype].itemsize
    assert header_entry(dtype, FlatRange(3, 10), apart=True) == ("U8", (7 * width,))
    assert header_entry(dtype, Box((1, 2), (3, 5)), apart=True) == ("U8", (6 * width,))
    if DTYPES[dtype].safetensors:
        assert header_entry(dtype, Box((1, 2), (3, 5)), apart=False) == (DTYPES[dtype].safetensors, (2, 3))
    assert np.dtype(DTYPES[dtype].numpy).itemsize == width
