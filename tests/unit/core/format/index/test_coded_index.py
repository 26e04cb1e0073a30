"""An index of coded pieces: it comes back, however it is merged, split or carried, and a plain one is as it was."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import chunk_count
from holdfast.base.geometry.region import FlatRange, corners
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.manifest import FileRecord, Manifest
from holdfast.base.types.plan import Coding, PackItem, PackPlan, Piece
from holdfast.core.format.codec_names import needs_pair
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.index.index import Index, IndexMerger
from holdfast.core.format.index.index_builder import IndexBuilder
from holdfast.core.format.index.index_checks import cut_short, index_from, overview_from, require_pairs, require_places
from holdfast.core.format.index.index_file import decode_index, encode_index
from holdfast.core.format.index.overview import encode_overview, split
from holdfast.core.format.index.split_index import SplitIndex
from holdfast.core.format.part import RankPart, decode_part, encode_part
from holdfast.errors import CorruptError
from tests.property.held import flat_runs, guillotine
from tests.unit.core.format.coded import ATTEMPT, CHUNK, coding_of, codings, is_canonical
from tests.unit.core.format.documents import manifest

STEP_PACK = f"step-000000000001/{ATTEMPT}/coded/r00009.safetensors"


@st.composite
def coded_pieces(draw: st.DrawFn) -> list[Piece]:
    """Draw the pieces of some tensors, coded and plain; those of a master and its weight have the same regions."""
    pieces: list[Piece] = []
    at: dict[str, int] = {}

    def add(spec: TensorSpec, region: Box | FlatRange, pack: str, coding: Coding | None) -> Piece:
        count = region.numel * spec.itemsize
        digests = bytes([len(pieces) % 256]) * 16 * chunk_count(count, CHUNK)
        piece = Piece(spec, region, pack, at.get(pack, CHUNK), digests, CHUNK, coding)
        at[pack] = piece.offset + piece.stored_bytes
        pieces.append(piece)
        return piece

    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 60), max_size=3)))
        parts = draw(st.integers(1, 5))
        regions = draw(st.one_of(flat_runs(math.prod(shape), parts), guillotine(shape, parts)))
        weight, master = TensorSpec(f"w{number}", "bfloat16", shape), TensorSpec(f"m{number}", "float32", shape)
        # Of several pieces with one start, which only empty ones can have, the order is that of the merge.
        for part, region in enumerate(each for each in regions if each.numel or len(regions) == 1):
            coded = draw(st.sampled_from([f"coded/r{part % 3:05d}.safetensors", STEP_PACK]))
            plain = f"r{part % 3:05d}.safetensors"
            is_coded = draw(st.booleans())
            pair = add(
                weight,
                region,
                coded if is_coded else plain,
                draw(codings(2 * region.numel)) if is_coded else None,
            )
            if draw(st.booleans()):
                coding = draw(codings(4 * region.numel, weight.fqn))
                add(master, region, coded, replace(coding, pair=pair if coding.pair_fqn else None))
            else:
                add(master, region, plain, None)
    return sorted(pieces, key=lambda piece: (piece.tensor.fqn, corners(piece.region)))


def index_of(pieces: Sequence[Piece], tensors: Sequence[TensorSpec] = ()) -> Index:
    builder = IndexBuilder(CHUNK, tensors)
    for piece in pieces:
        builder.add(piece.tensor, piece.region, piece.pack, piece.offset, piece.digests, piece.coding)
    return builder.index()


def manifest_of(index: Index, files: Sequence[bytes], overview: bytes | None = None) -> Manifest:
    names = [f"index-{number:05d}.msgpack" for number in range(len(files))]
    return replace(
        manifest(),
        aliases={},
        tensors=len(index.tensors),
        tensor_bytes=sum(spec.global_bytes for spec in index.tensors.values()),
        packs=tuple(FileRecord(name, 1 << 40, "a" * 32) for name in index.packs),
        indexes=tuple(FileRecord(name, len(data), "b" * 32) for name, data in zip(names, files, strict=True)),
        overview=None if overview is None else FileRecord("overview.msgpack", len(overview), "c" * 32),
    )


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(coded_pieces(), st.randoms(use_true_random=False), st.integers(1, 9))
def test_codings_come_back_merged_in_any_order_and_split(
    pieces: list[Piece], chance: random.Random, chunks_max: int
) -> None:
    index = index_of(pieces)
    data = encode_index(index)
    again = decode_index(data, "here")
    assert list(index.all_pieces()) == list(again.all_pieces()) == pieces
    assert all(piece.coding is None or is_canonical(piece.coding) for piece in again.all_pieces())
    assert encode_index(again) == data
    require_pairs(again, "here")
    # Each rank's pieces, then merged in some order.
    specs = {piece.tensor.fqn: piece.tensor for piece in pieces}.values()
    of_ranks = [index_of([piece for piece in pieces if piece.pack == pack], [*specs]) for pack in index.packs]
    chance.shuffle(of_ranks)
    merging = IndexMerger(CHUNK)
    for each in of_ranks:
        part = RankPart(3, ATTEMPT, each, (), None, {}, ())
        merging.add(decode_part(encode_part(part), "here").index, "here")
    merged = merging.merged()
    assert merged == index and encode_index(merged) == data
    if pieces:
        parts, overview = split(index, chunks_max)
        files = [encode_index(part) for part in parts]
        overview_data = encode_overview(overview)
        whole = index_from(manifest_of(index, files, overview_data), [*files, overview_data], "here/")
        assert whole == index and encode_index(whole) == data


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(coded_pieces(), st.data())
def test_every_way_to_a_piece_gives_the_same_piece(pieces: list[Piece], data: st.DataObject) -> None:
    index = decode_index(encode_index(index_of(pieces)), "here")
    for pack in index.packs:
        found = index.pieces_in(pack)
        assert found == sorted((p for p in pieces if p.pack == pack), key=lambda p: (p.offset, p.stored_bytes))
        assert index.bytes_by_pack[pack] == sum(piece.stored_bytes for piece in found)
    spec = data.draw(st.sampled_from([piece.tensor for piece in pieces] or [TensorSpec("x", "int8", ())]))
    edges = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in spec.global_shape]
    box = Box(tuple(a for a, _ in edges), tuple(b for _, b in edges))
    of_tensor = [piece for piece in pieces if piece.tensor == spec]
    assert all(piece in of_tensor for piece in index.pieces_near(spec.fqn, box))
    paired = {piece.coding.pair_fqn for piece in of_tensor if piece.coding is not None} - {""}
    assert set(index.pairs_of(spec.fqn)) == paired


def rows(number: int, count: int = 4) -> list[Piece]:
    """Return the pieces of a weight and its master, of one row a rank, in coded packs."""
    weight, master = (TensorSpec(f"{kind}{number}", dtype, (count, 2048)) for kind, dtype in
                      (("w", "bfloat16"), ("m", "float32")))  # fmt: skip
    pieces = []
    for row in range(count):
        pack, region = f"coded/r{row:05d}.safetensors", Box((row, 0), (row + 1, 2048))
        at = CHUNK + 9192 * number
        pair = Piece(weight, region, pack, at, bytes(16), CHUNK, coding_of(4096, [3000], ["planes"]))
        coding = coding_of(8192, [2096, 4096], ["residual", ""], weight.fqn)
        at += 3000
        pieces += [pair, Piece(master, region, pack, at, bytes(32), CHUNK, replace(coding, pair=pair))]
    return pieces


def test_a_reader_of_a_split_index_reads_the_files_of_pairs_and_no_others() -> None:
    pieces = [piece for number in range(6) for piece in rows(number, 32)]
    index = index_of(pieces)
    parts, overview = split(index, 16)
    files = [encode_index(part) for part in parts]
    record = manifest_of(index, files, encode_overview(overview))
    asked: list[str] = []

    def read(records: Sequence[FileRecord]) -> list[bytes]:
        asked.extend(each.name for each in records)
        return [files[record.indexes.index(each)] for each in records]

    box = Box((3, 0), (4, 2048))
    needed = {record.indexes[number].name for fqn in ("m2", "w2") for number in overview.files_for(fqn, box)}
    stored = SplitIndex(overview, record, read, "here/")
    found = stored.read_for([("m2", box)])
    (piece,) = (piece for piece in found.pieces_near("m2", box) if piece.region == box)
    assert piece in pieces and piece.coding is not None and piece.coding.pair in pieces
    assert set(asked) == needed and len(asked) == len(needed) < len(files)
    # Of the weights alone, nothing of the masters is read; and every piece has its pair, asked one tensor at a time.
    asked.clear()
    SplitIndex(overview, record, read, "here/").read_for([("w2", box)])
    assert set(asked) == {record.indexes[number].name for number in overview.files_for("w2", box)}
    stored = SplitIndex(overview, record, read, "here/")
    for fqn in ("m5", "w5", "m0"):
        assert list(stored.pieces_of(fqn)) == [piece for piece in pieces if piece.tensor.fqn == fqn]
        assert stored.pairs_of(fqn) == ([fqn.replace("m", "w")] if fqn[0] == "m" else [])


def test_a_pack_adds_its_pieces_one_after_the_other() -> None:
    plan = PackPlan(
        "coded/r00000.safetensors",
        (
            PackItem(TensorSpec("w", "bfloat16", (4096,)), FlatRange(0, 4096), 0, 0),
            PackItem(TensorSpec("m", "float32", (2048,)), Box((0,), (2048,)), 8192, 1),
        ),
    )
    given_codings = [
        Coding(("zstd", "planes"), bytes([2, 0]), (0, 100, 4196), ""),
        Coding(("residual", "planes"), bytes([2, 2]), (0, 7, 20), "w"),
    ]
    builder = IndexBuilder(CHUNK)
    builder.add_pack(plan, 12288, [bytes(32), bytes(32)], given_codings)
    builder.add_pack(replace(plan, name="r00000.safetensors", items=()), 4096, [])
    master, weight = builder.index().all_pieces()
    assert (weight.offset, weight.stored_range(1), weight.bytes) == (12288, (12388, 16484), 8192)
    assert (master.offset, master.stored_range(0), master.codec_of(1)) == (16484, (16484, 16491), "planes")
    assert master.coding == Coding(("planes",), b"\1\1", (0, 7, 20), ""), "a pair that no chunk needs is left out"


@pytest.mark.parametrize("codec", [pytest.param(name, id=name) for name in ("", "planes", "residual")])
def test_pieces_may_fill_their_packs_but_no_more(codec: str) -> None:
    """Places go by stored bytes."""
    pieces = rows(0)
    if codec != "residual":
        pieces = [piece for piece in pieces if piece.tensor.fqn == "w0"]
    if not codec:
        pieces = [replace(piece, pack=piece.pack[6:], coding=None) for piece in pieces]
    index = index_of(pieces)
    ends = {pack: max(piece.offset + piece.stored_bytes for piece in pieces if piece.pack == pack)
            for pack in index.packs}  # fmt: skip
    whole = replace(manifest(), packs=tuple(FileRecord(name, end, "a" * 32) for name, end in ends.items()))
    require_places(index, whole, "here/")
    assert cut_short(index, {index.packs[0]: (ends[index.packs[0]], CorruptError("x"))}) == {}
    short = replace(whole, packs=(*whole.packs[1:], whole.packs[0]._replace(bytes=whole.packs[0].bytes - 1)))
    with pytest.raises(CorruptError, match="expected it within"):
        require_places(index, short, "here/")
    assert list(cut_short(index, {whole.packs[0].name: (short.packs[-1].bytes, CorruptError("x"))})) == [
        pieces[-1].tensor.fqn
    ]
    overlapping = [*pieces[:-1], replace(pieces[-1], pack=pieces[0].pack, offset=pieces[0].offset + 2999)]
    with pytest.raises(CorruptError, match="two pieces hold byte"):
        require_places(index_of(overlapping), replace(whole, packs=(FileRecord(pieces[0].pack, 1 << 30, "a" * 32),
                       *whole.packs[1:])), "here/")  # fmt: skip


def test_tensors_may_be_4096_times_as_large_as_their_coded_packs_alone() -> None:
    index = index_of(rows(0))
    parts, overview = split(index, 1)
    data = encode_overview(overview)
    record = manifest_of(index, [encode_index(part) for part in parts], data)
    total = record.tensor_bytes

    def of(coded: int, plain: int) -> Manifest:
        packs = (FileRecord("coded/r00000.safetensors", coded, "a" * 32), FileRecord("r1", plain, "a" * 32))
        return replace(record, packs=packs)

    assert total == 49152
    for sound in (of(12, 0), of(11, 4096), of(0, total)):
        assert overview_from(sound, data, "here/").table.count == 2
    for lying in (of(11, 4095), of(0, total - 1), of(0, 12)):
        with pytest.raises(CorruptError, match="of them coded"):
            overview_from(lying, data, "here/")


def test_a_pair_is_matched_by_its_whole_region() -> None:
    """Boxes, flat ranges and pieces without dimensions beside each other, some of which differ in one number."""
    shapes: list[tuple[tuple[int, ...], list[Box | FlatRange]]] = [
        ((4, 512), [Box((0, 0), (4, 256)), Box((0, 256), (2, 512)), Box((2, 256), (4, 512))]),
        ((2048,), [FlatRange(0, 1024), Box((1024,), (2048,))]),
        ((1, 1024), [FlatRange(0, 1024)]),
        ((), [Box((), ())]),
    ]
    pieces: list[Piece] = []
    for number, (shape, regions) in enumerate(shapes):
        for region in regions:
            weight, master = TensorSpec(f"w{number}", "float16", shape), TensorSpec(f"m{number}", "float32", shape)
            pair = Piece(weight, region, "r00000.safetensors", 0, bytes(16), CHUNK)
            coding = coding_of(4 * region.numel, [2], ["residual"], weight.fqn)
            digests = bytes(16)
            pieces += [
                pair,
                Piece(master, region, "coded/r00000.safetensors", 0, digests, CHUNK, replace(coding, pair=pair)),
            ]
    index = index_of(pieces)
    require_pairs(index, "here")
    assert sorted(index.all_pieces(), key=repr) == sorted(pieces, key=repr)
    assert int((index.pair_pieces >= 0).sum()) == len(pieces) // 2


def unlike(**fields: object) -> list[Piece]:
    """Return the pieces of a weight and its master, something of the weight changed."""
    pieces = rows(0)
    return [replace(piece, **fields) if piece.tensor.fqn == "w0" else piece for piece in pieces]  # type: ignore[arg-type]


WRONG_PAIRS = {
    "missing": [piece for piece in rows(0) if piece.tensor.fqn == "m0"],
    "missing for one region": rows(0)[1:],
    "of another region": [replace(rows(0)[0], region=FlatRange(0, 2048)), *rows(0)[1:]],
    "of another shape": unlike(tensor=TensorSpec("w0", "bfloat16", (8, 2048))),
    "of another dimension": [
        replace(piece, tensor=TensorSpec("w0", "bfloat16", (8192,)), region=FlatRange(2048 * at, 2048 * at + 2048))
        if piece.tensor.fqn == "w0"
        else replace(piece, region=FlatRange(2048 * at, 2048 * at + 2048))
        for at, piece in ((piece.region.start[0], piece) for piece in rows(0))  # type: ignore[index]
    ],
    "of 16 bits and no float": unlike(tensor=TensorSpec("w0", "int16", (4, 2048))),
    "of 32 bits": unlike(tensor=TensorSpec("w0", "float32", (4, 2048)), digests=bytes(32), coding=None,
                         pack="r00000.safetensors"),
    "of two masters": [
        *rows(0),
        *(
            replace(piece, tensor=replace(piece.tensor, fqn="other"))
            for piece in rows(0)
            if piece.tensor.fqn == "m0"
        ),
    ],
    "itself": [
        replace(piece, coding=replace(piece.coding, pair_fqn="m0")) if piece.tensor.fqn == "m0" else piece
        for piece in rows(0)
    ],
    "in a circle": [
        replace(piece, coding=replace(piece.coding, pair_fqn="m1" if piece.tensor.fqn == "m0" else "m0"))
        for piece in (*rows(0), *rows(1))
        if piece.tensor.fqn[0] == "m"
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_PAIRS)
def test_a_pair_that_no_writer_makes_is_corrupt(name: str) -> None:
    index = decode_index(encode_index(index_of(WRONG_PAIRS[name])), "here")
    assert index.pieces_of("m0"), "values can be made before pairs are judged"
    with pytest.raises(CorruptError, match=r"here: .*coded against"):
        require_pairs(index, "here")
    if not name.startswith("missing") and name != "of another region":
        with pytest.raises(CorruptError, match="coded against"):
            require_pairs(index, "here", whole=False)
    require_pairs(decode_index(encode_index(index_of(rows(0))), "here"), "here")


def test_a_plain_index_is_as_ever_and_has_no_columns_of_codings() -> None:
    """The digests were recorded before there were coded packs."""
    spec = TensorSpec("w.é", "bfloat16", (10, 512))
    items = (
        PackItem(spec, Box((1, 0), (10, 512)), 0, 0),
        PackItem(replace(spec, fqn="b"), Box((0, 0), (1, 4)), 9216, 0),
    )
    builder = IndexBuilder(CHUNK)
    builder.add_pack(PackPlan("r00000.safetensors", items), 4096, [b"0123456789abcdef" * 3, b"fedcba9876543210"])
    flat = replace(spec, fqn="c", dtype="complex32")
    builder.add(flat, FlatRange(3, 700), f"step-000000000001/{ATTEMPT}/enc/r00001.safetensors", 4096, b"0" * 16)
    builder.add(spec, Box((0, 0), (1, 512)), "r00001.safetensors", 8192, b"1" * 16)
    index = builder.index()
    parts, overview = split(index, 2)
    part = encode_part(RankPart(3, ATTEMPT, index, (), None, {}, ()))
    data = [encode_index(index), part, encode_overview(overview), *map(encode_index, parts)]
    assert list(map(hex_digest_of, data)) == [
        "d76d8fc8604e39e68a9fb7a53ec83329",
        "f013cb7f86391ec45d0c51a931496b72",
        "e7c65f76b2e737fa2c7847b337e6f06a",
        "68168dafd52caac81cb883f58ed761a8",
        "6aeafe3673a9e5250f155ddfda441d5a",
    ]
    merging = IndexMerger(CHUNK)
    for each in parts:
        merging.add(each, "here")
    again = [index, decode_index(data[0], "here"), decode_part(part, "here").index, *parts, merging.merged()]
    assert [each.pieces.coding for each in again] == [None] * len(again)
    assert index.pieces.between(0, 1).coding is index.pieces.taken(np.arange(1)).coding is None


def test_an_index_file_of_plain_pieces_of_a_coded_checkpoint_has_no_codings() -> None:
    plain = [replace(piece, tensor=replace(piece.tensor, fqn=f"z{n}"), pack="r00000.safetensors", coding=None)
             for n, piece in enumerate(rows(0))]  # fmt: skip
    index = index_of([*rows(0), *plain])
    parts, _ = split(index, 4)
    with_coding = [b"coding" in encode_index(part) for part in parts]
    assert True in with_coding and False in with_coding
    for part in parts:
        assert decode_index(encode_index(part), "here") == part


def test_a_coded_chunk_takes_little_of_an_index() -> None:
    """The floor of the issue is 44 bytes."""
    spec, chunks = TensorSpec("model.layers.0.weight", "bfloat16", (64 << 19,)), 64
    coding = Coding(("planes",), b"\1" * chunks, tuple(700_001 * number for number in range(chunks + 1)), "")
    builder = IndexBuilder(1 << 20)
    for number in range(64):
        tensor = replace(spec, fqn=f"model.layers.{number}.weight")
        pack = f"coded/r{number:05d}.safetensors"
        builder.add(tensor, Box((0,), (64 << 19,)), pack, 4096, bytes(16 * chunks), coding)
    assert len(encode_index(builder.index())) / (64 * chunks) < 34


def test_no_codec_of_a_plain_kind_needs_a_pair() -> None:
    assert [name for name in ("dictionary", "planes", "residual", "sparse", "zstd", "") if needs_pair(name)] == [
        "residual"
    ]
