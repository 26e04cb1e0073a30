"""Columns, index, part, pack header and names: round trips, and what hostile bytes meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import FlatRange, Region
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.manifest import FileRecord
from holdfast.base.types.plan import PackItem, PackPlan, Piece
from holdfast.base.types.values import Group
from holdfast.core.format.index.columns import decode_column, encode_column
from holdfast.core.format.index.index import Index, IndexMerger
from holdfast.core.format.index.index_builder import IndexBuilder
from holdfast.core.format.index.index_checks import index_from
from holdfast.core.format.index.index_file import IndexDocument, decode_index, document_of, encode_index, index_of
from holdfast.core.format.names import (
    STEP_MAX,
    index_name,
    is_attempt_folder,
    is_coded_pack_name,
    is_index_name,
    is_pack_name,
    is_part_name,
    part_name,
    rank_of_pack,
    step_folder,
    step_of_folder,
    step_of_pack,
)
from holdfast.core.format.pack import entries_of, header_of
from holdfast.core.format.part import RankPart, decode_part, encode_part
from holdfast.core.format.values import values
from holdfast.errors import CheckpointError, CorruptError, InvalidError
from tests.unit.core.format.documents import little_memory, manifest

CHUNK = 4096


def piece(fqn: str, dtype: str, shape: tuple[int, ...], region: Region, pack: str, offset: int) -> Piece:
    spec = TensorSpec(fqn, dtype, shape)
    count = -(-region.numel * spec.itemsize // CHUNK)
    return Piece(spec, region, pack, offset, bytes(range(16)) * count, CHUNK)


def index_with(*pieces: Piece, chunk_bytes: int = CHUNK) -> Index:
    listing = IndexBuilder(chunk_bytes)
    for each in pieces:
        listing.add(each.tensor, each.region, each.pack, each.offset, each.digests)
    return listing.index()


def small_pieces() -> tuple[Piece, ...]:
    return (
        piece("w", "float32", (70, 30), Box((0, 0), (35, 30)), "r00000.safetensors", 4096),
        piece("w", "float32", (70, 30), Box((35, 0), (70, 30)), "r00001.safetensors", 8192),
        piece("scalar", "bfloat16", (), Box((), ()), "r00000.safetensors", 12000),
        piece("empty", "int64", (0, 3), Box((0, 0), (0, 3)), "r00001-1.safetensors", 4096),
        piece("flat", "complex32", (9, 70), FlatRange(0, 101), "enc/r00001.safetensors", 4096),
        piece("flat", "complex32", (9, 70), FlatRange(101, 630), "enc/r00000.safetensors", 4096),
        piece("ß.ü", "bool", (5,), Box((0,), (5,)), "r00001.safetensors", 40000),
    )


def small_index() -> Index:
    return index_with(*small_pieces())


# ------------------------------------------------------------------------------------------------- columns


@given(st.lists(st.one_of(st.integers(0, 300), st.integers(0, (1 << 63) - 1)), max_size=50))
def test_columns_give_back_their_numbers_in_the_narrowest_width(numbers: list[int]) -> None:
    width, data = encode_column(numbers)
    assert width == next(w for w in (1, 2, 4, 8) if max(numbers, default=0) < 1 << 8 * w)
    assert len(data) == width * len(numbers)
    assert decode_column((width, data), "here", len(numbers)).tolist() == numbers


@pytest.mark.parametrize(
    "column",
    ((3, b"123"), (0, b""), (-1, b"1"), (2, b"123"), (8, b"\xff" * 8), (1 << 40, b"12")),
)
def test_impossible_columns_are_corrupt(column: tuple[int, bytes]) -> None:
    with pytest.raises(CorruptError, match="here"):
        decode_column(column, "here")


def test_a_column_of_another_length_is_corrupt() -> None:
    with pytest.raises(CorruptError, match="expected 3 numbers"):
        decode_column(encode_column([1, 2]), "here", 3)


# ------------------------------------------------------------------------------------------------- index


def test_an_index_comes_back() -> None:
    index = small_index()
    again = decode_index(encode_index(index), "here")
    assert again.tensors == index.tensors
    assert list(again.all_pieces()) == list(index.all_pieces()) == sorted(small_pieces(), key=lambda p: p.tensor.fqn)
    assert again.chunk_bytes == CHUNK
    assert decode_index(encode_index(index_with()), "here") == index_with()


def test_one_name_with_two_shapes_is_refused() -> None:
    other = piece("scalar", "float32", (), Box((), ()), "r00000.safetensors", 0)
    with pytest.raises(InvalidError, match="scalar"):
        index_with(*small_pieces(), other)
    merging = IndexMerger(CHUNK)
    merging.add(small_index(), "rank 2")
    with pytest.raises(InvalidError, match="rank 3: scalar"):
        merging.add(index_with(other), "rank 3")
    with pytest.raises(InvalidError, match="chunk_bytes"):
        merging.add(index_with(chunk_bytes=2 * CHUNK), "rank 3")


COLUMNS = (
    "dtype_numbers",
    "ndims",
    "shapes",
    "piece_tensors",
    "piece_packs",
    "piece_offsets",
    "piece_starts",
    "piece_stops",
    "piece_kinds",
)


def corruptions() -> Iterator[tuple[str, Callable[[IndexDocument], None]]]:
    def settle(name: str, value: object) -> Callable[[IndexDocument], None]:
        return lambda document: setattr(document, name, value)

    for name in COLUMNS:
        yield f"{name} empty", settle(name, (1, b""))
        yield f"{name} longer", lambda d, n=name: setattr(d, n, (getattr(d, n)[0], getattr(d, n)[1] + b"\0" * 8))
        yield f"{name} shorter", lambda d, n=name: setattr(d, n, (getattr(d, n)[0], getattr(d, n)[1][:-1]))
        yield f"{name} width 3", lambda d, n=name: setattr(d, n, (3, getattr(d, n)[1]))
        if name != "piece_offsets":
            # Where a piece lies is checked against its pack, which the index alone does not know.
            yield f"{name} huge", lambda d, n=name: setattr(d, n, (8, b"\xff" * 7 + b"\x7f" + huge_rest(getattr(d, n))))
    yield "chunk_bytes 0", settle("chunk_bytes", 0)
    yield "chunk_bytes negative", settle("chunk_bytes", -4096)
    yield "chunk_bytes 1", settle("chunk_bytes", 1)
    yield "chunk_bytes huge", settle("chunk_bytes", 1 << 60)
    yield "fqn twice", settle("fqns", ["empty", "flat", "scalar", "scalar", "w"])
    yield "fqn missing", settle("fqns", ["empty", "flat", "scalar", "w"])
    yield "dtype unknown", settle("dtypes", ["bfloat16", "bool", "complex32", "float33", "int64"])
    yield "dtypes missing", settle("dtypes", [])
    yield "pack of another step", settle("packs", [("step", "r00000.safetensors")] * 5)
    yield "pack outside", settle("packs", [("own", "../../etc/passwd")] * 5)
    yield "packs missing", settle("packs", [])
    yield "digests short", lambda d: setattr(d, "digests", d.digests[:-1])
    yield "digests long", lambda d: setattr(d, "digests", d.digests + bytes(16))
    yield "digests empty", settle("digests", b"")


def huge_rest(column: tuple[int, bytes]) -> bytes:
    width, data = column
    return np.frombuffer(data, f"<u{width}").astype("<u8").tobytes()[8:]


@pytest.mark.parametrize(("name", "corrupt"), list(corruptions()), ids=[name for name, _ in corruptions()])
def test_a_corrupted_field_of_an_index_is_corrupt(name: str, corrupt: Callable[[IndexDocument], None]) -> None:
    document = document_of(small_index())
    before = msgspec.msgpack.encode(document)
    corrupt(document)
    data = msgspec.msgpack.encode(document)
    assert data != before, f"{name} changed nothing"
    with little_memory(), pytest.raises(CorruptError, match="here"):
        decode_index(data, "here")


def require_error_of_ours(decode: Callable[[bytes], object], data: bytes) -> None:
    """Whatever the bytes are: a result or an error of ours, and no memory to speak of."""
    try:
        decode(data)
    except CheckpointError as error:
        assert isinstance(error, CorruptError | InvalidError)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_damaged_index_bytes_are_never_another_error(data: st.DataObject) -> None:
    raw = bytearray(encode_index(small_index()))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with little_memory():
        require_error_of_ours(lambda each: decode_index(each, "here"), bytes(raw))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_an_index_with_any_numbers_is_never_another_error(data: st.DataObject) -> None:
    document = document_of(small_index())
    numbers = st.one_of(st.integers(0, 80), st.integers(0, (1 << 64) - 1))
    for name in data.draw(st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=3, unique=True)):
        old = decode_column(getattr(document, name), "here")
        new = data.draw(st.lists(numbers, min_size=len(old), max_size=len(old)))
        setattr(document, name, (8, np.array(new, dtype="<u8").tobytes()))
    document.chunk_bytes = data.draw(st.sampled_from((1, 16, CHUNK, 1 << 40)))
    with little_memory():
        require_error_of_ours(lambda _: index_of(document, "here"), b"")


@pytest.mark.parametrize("chunk_bytes", (1, 3, 4094, 4097))
def test_a_chunk_that_ends_within_an_element_is_corrupt(chunk_bytes: int) -> None:
    spec = TensorSpec("w", "float64", (2,))
    digests = bytes(16 * -(-16 // chunk_bytes))
    whole = Piece(spec, Box((0,), (2,)), "r00000.safetensors", 0, digests, chunk_bytes)
    index = index_with(whole, chunk_bytes=chunk_bytes)
    with pytest.raises(CorruptError, match="chunk_bytes"):
        decode_index(encode_index(index), "here")


@pytest.mark.parametrize("cut", (0, 1, 10, 100, -1))
def test_a_truncated_index_is_corrupt(cut: int) -> None:
    with pytest.raises(CorruptError):
        decode_index(encode_index(small_index())[:cut], "here")


def test_a_piece_beyond_its_pack_is_corrupt() -> None:
    late = piece("late", "uint8", (9,), Box((0,), (9,)), "r00000.safetensors", (1 << 16) - 8)
    data = encode_index(index_with(*small_pieces(), late))
    record = FileRecord("index-00000.msgpack", len(data), "d" * 32)
    with pytest.raises(CorruptError, match="late"):
        index_from(replace(manifest(), indexes=(record,), tensors=6, tensor_bytes=10936), [data], "here/")
    assert index_from(manifest(), [encode_index(small_index())], "here/").tensors == small_index().tensors


def test_a_name_tied_to_nothing_is_corrupt() -> None:
    data = encode_index(small_index())
    for aliases in ({"tied": "nowhere"}, {"w": "w"}):
        with pytest.raises(CorruptError, match="tied"):
            index_from(replace(manifest(), aliases=aliases), [data], "here/")


def test_two_index_files_that_list_one_tensor_are_corrupt() -> None:
    data = encode_index(small_index())
    twice = replace(manifest(), indexes=manifest().indexes * 2)
    with pytest.raises(CorruptError, match="two index files list one tensor"):
        index_from(twice, [data, data], "here/")
    with pytest.raises(CorruptError, match="no index"):
        index_from(replace(manifest(), indexes=()), [], "here/")


# ------------------------------------------------------------------------------------------------- part


def part() -> RankPart:
    return RankPart(
        rank=1,
        attempt="0123456789abcdef",
        index=small_index(),
        packs=(FileRecord("r00001.safetensors", 1 << 16, "a" * 32),),
        tree=values.dumps(values.encode(Group("dict", {"a": 1}), "")),
        aliases={"tied": "w"},
        layouts=(((2, 2), ("Shard(0)", "Replicate"), 3),),
    )


def test_a_part_comes_back() -> None:
    for each in (part(), replace(part(), tree=None, aliases={}, layouts=(), packs=(), index=index_with())):
        assert decode_part(encode_part(each), "here") == each


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_damaged_part_bytes_are_never_another_error(data: st.DataObject) -> None:
    raw = bytearray(encode_part(part()))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with little_memory():
        require_error_of_ours(lambda each: decode_part(each, "here"), bytes(raw))


def test_a_part_with_a_pack_outside_is_corrupt() -> None:
    for record in (FileRecord("../r00000.safetensors", 1, ""), FileRecord("r00000.safetensors", -1, "")):
        with pytest.raises(CorruptError, match="pack"):
            decode_part(encode_part(replace(part(), packs=(record,))), "here")


# ------------------------------------------------------------------------------------------------- pack header


def header() -> bytes:
    items = (
        PackItem(TensorSpec("w", "float32", (70, 30)), Box((35, 0), (70, 30)), 0, 0),
        PackItem(TensorSpec("ß", "bool", (5,)), Box((0,), (5,)), 4200, 1),
    )
    return header_of(PackPlan("r00000.safetensors", items), {"step": "7"})


def test_a_header_comes_back() -> None:
    data = header()
    found = [(e.fqn, e.dtype, e.shape, e.start - len(data), e.stop - len(data)) for e in entries_of(data, "here")]
    assert found == [("w", "F32", (35, 30), 0, 4200), ("ß", "BOOL", (5,), 4200, 4205)]


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_damaged_header_bytes_are_never_another_error(data: st.DataObject) -> None:
    raw = bytearray(header())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, 500))] = data.draw(st.integers(0, 255))
    with little_memory():
        require_error_of_ours(lambda each: entries_of(each, "here"), bytes(raw))


@pytest.mark.parametrize(
    "entry",
    (
        '{"dtype":"F32","shape":5,"data_offsets":[0,4]}',
        '{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}',
        '{"dtype":"F32","shape":[1],"data_offsets":["a","b"]}',
        '{"dtype":"F32","shape":[1],"data_offsets":[0]}',
        '{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}',
        '{"dtype":"F33","shape":[1],"data_offsets":[0,4]}',
        "[]", "null", "7", '"x"',
    ),
)  # fmt: skip
def test_a_header_entry_of_another_kind_is_corrupt(entry: str) -> None:
    text = f'{{"w":{entry}}}'.encode()
    with pytest.raises(CorruptError, match="here"):
        entries_of(len(text).to_bytes(8, "little") + text, "here")


# ------------------------------------------------------------------------------------------------- frames and names


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_frames_come_back(frames: list[bytes]) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(frames), type=list[bytes]) == frames


@pytest.mark.parametrize("step", (0, 7, 10**9, STEP_MAX))
def test_step_folders_name_their_step(step: int) -> None:
    assert step_of_folder(step_folder(step).rstrip("/")) == step


@pytest.mark.parametrize(
    "name", ("step-1", "step-0000000000001", "step-00000000000a", "xstep-000000000001", "", "step-")
)
def test_other_folders_are_no_steps(name: str) -> None:
    assert step_of_folder(name) is None


def test_names_are_a_closed_set() -> None:
    for rank in (0, 7, 99_999):
        assert is_part_name(part_name(rank))
        assert is_pack_name(f"r{rank:05d}.safetensors")
        assert rank_of_pack(f"enc/r{rank:05d}-12.safetensors") == rank
        assert rank_of_pack(f"coded/r{rank:05d}.safetensors") == rank
    assert is_index_name(index_name(12))
    assert is_attempt_folder("0123456789abcdef")
    for bad in ("", "..", "../r00000.safetensors", "r00000.safetensors\n", "r0.safetensors", "/r00000.safetensors",
                "r00000.safetensors/x", "enc/enc/r00000.safetensors", "R00000.safetensors", "r00000.safetensors\0",
                "r٠٠٠٠٠.safetensors", "parts/r00000.safetensors", "coded/enc/r00000.safetensors",
                "coded/coded/r00000.safetensors", "Coded/r00000.safetensors"):  # fmt: skip
        assert not is_pack_name(bad), bad
        assert not is_part_name(bad.replace("safetensors", "msgpack").removeprefix("parts/")), bad
        assert not is_index_name(bad)
        assert not is_attempt_folder(bad)
    assert not is_attempt_folder("0123456789abcdeF")


def test_packs_of_coded_pieces_are_told_from_others() -> None:
    attempt = "step-000000001000/0123456789abcdef/"
    for name in ("coded/r00003.safetensors", "coded/r00003-1.safetensors", f"{attempt}coded/r00003.safetensors"):
        assert is_coded_pack_name(name), name
    assert step_of_pack(f"{attempt}coded/r00003.safetensors") == 1000
    for name in ("r00003.safetensors", "enc/r00003.safetensors", f"{attempt}enc/r00003.safetensors",
                 "file:///models/coded/r00003.safetensors", "coded/r00003.link", "coded/"):  # fmt: skip
        assert not is_coded_pack_name(name), name
