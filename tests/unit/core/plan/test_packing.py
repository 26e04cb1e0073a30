"""How pieces lie in packs: pages first, aligned, no name twice, headers no longer than allowed."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.region import FlatRange, Region
from holdfast.base.geometry.tensor import Role, Shard, TensorSpec
from holdfast.base.types.plan import CODED_FOLDER, OPAQUE_FOLDER, PackPlan
from holdfast.core.format.names import is_pack_name, rank_of_pack
from holdfast.core.format.pack import coded_header_body, entries_of, header_entry, header_of
from holdfast.core.plan.coding.coded_pieces import CodingChoice, codec_for
from holdfast.core.plan.ownership import Owned
from holdfast.core.plan.packing import PackSizes, packs_of
from holdfast.errors import InvalidError
from holdfast.settings import PAGE_BYTES

MIB = 1 << 20
FQNS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).filter(lambda text: text != "__metadata__")


def plain(fqn: str, dtype: str, shape: tuple[int, ...]) -> Shard:
    return Shard(TensorSpec(fqn, dtype, shape), None, None, Role.PARAMETER, (Box.whole(shape),))


def flat(fqn: str, dtype: str, shape: tuple[int, ...]) -> Shard:
    """A flat range of numbers as long as they get."""
    region: Region = FlatRange(10**18, 10**18 + math.prod(shape))
    return Shard(TensorSpec(fqn, dtype, (1 << 31, 1 << 31, *shape)), None, (3,), Role.PARAMETER, (region,))


@st.composite
def shard_lists(draw: st.DrawFn) -> list[Shard]:
    lengths = st.sampled_from((0, 1, 3, 512, 1024, 1025, 4096, 8192))
    shards = []
    for fqn in draw(st.lists(FQNS, unique=True, max_size=12)):
        shape = tuple(draw(st.lists(lengths, max_size=2)))
        whole = draw(st.sampled_from((plain, flat)))
        shards.append(whole(fqn, draw(st.sampled_from(sorted(DTYPES))), shape))
    return shards


class EveryPiece(CodingChoice):
    """Codes every piece, of any size."""

    def codec(self, shard: Shard, region: Region) -> str:
        return codec_for(shard.tensor.dtype)


@settings(max_examples=100, deadline=None)
@given(shard_lists(), st.sampled_from((2 * PAGE_BYTES, 16 * PAGE_BYTES, MIB)))
@example([flat(f"{n}", "float8_e4m3fnuz", (1,) * 40) for n in range(400)], 16 * PAGE_BYTES)
@example([plain("\x01" * 100 + str(n), "float32", (20000,)) for n in range(80)], 16 * PAGE_BYTES)
def test_coded_packs_are_in_order_and_their_longest_headers_short(shards: list[Shard], header_bytes_max: int) -> None:
    owned = [Owned(number, shard.pieces[0]) for number, shard in enumerate(shards)]
    packs = packs_of(3, shards, owned, header_bytes_max, None, EveryPiece(PAGE_BYTES, 0, {}, ()))
    assert sorted(item.shard_number for pack in packs for item in pack.items) == list(range(len(shards)))
    assert [pack.name for pack in packs] == [
        f"{CODED_FOLDER}r00003{f'-{number}' if number else ''}.safetensors" for number in range(len(packs))
    ]
    assert all(is_pack_name(pack.name) and rank_of_pack(pack.name) == 3 for pack in packs)
    is_weight = [item.tensor.dtype in ("bfloat16", "float16") for pack in packs for item in pack.items]
    assert is_weight == sorted(is_weight, reverse=True)
    for pack in packs:
        assert len({item.tensor.fqn for item in pack.items}) == len(pack.items)
        offset = 0
        for item in pack.items:
            assert item.data_offset == offset and offset % item.tensor.itemsize == 0 and item.codec
            offset += item.bytes
        # The name of a pair is as long as its own.
        pairs = {item.tensor.fqn: item.tensor.fqn for item in pack.items}
        longest = coded_header_body(pack, PAGE_BYTES).with_pairs(pairs.values()).header_bytes({})
        assert len(pack.items) == 1 or longest <= header_bytes_max


@settings(max_examples=300, deadline=None)
@given(shard_lists(), st.sampled_from((PAGE_BYTES, 2 * PAGE_BYTES, MIB)))
@example([plain("\U0001f600" * 100 + str(n), "uint8", (1,)) for n in range(80)], 16 * PAGE_BYTES)
@example([plain('"\\' * 100 + str(n), "uint8", (1,)) for n in range(80)], 16 * PAGE_BYTES)
@example([plain("\x01" * 100 + str(n), "uint8", (1,)) for n in range(80)], 16 * PAGE_BYTES)
@example([flat(f"{n}", "float8_e4m3fnuz", ()) for n in range(400)], 16 * PAGE_BYTES)
@example([flat(f"{n}", "float8_e4m3fnuz", (1,) * 40) for n in range(400)], 16 * PAGE_BYTES)
@example([plain(f"{n}", "complex128", ()) for n in range(400)], 16 * PAGE_BYTES)
@example([plain(f"{n}", "complex128", (1,) * 40) for n in range(400)], 16 * PAGE_BYTES)
def test_every_pack_is_in_order_aligned_and_short(shards: list[Shard], header_bytes_max: int) -> None:
    owned = [Owned(number, shard.pieces[0]) for number, shard in enumerate(shards)]
    packs = packs_of(3, shards, owned, header_bytes_max)
    assert sorted(item.shard_number for pack in packs for item in pack.items) == list(range(len(shards)))
    for folder in ("", OPAQUE_FOLDER):
        names = [pack.name for pack in packs if pack.apart == bool(folder)]
        assert names == [f"{folder}r00003{f'-{number}' if number else ''}.safetensors" for number in range(len(names))]
    for pack in packs:
        for item in pack.items:
            raw = isinstance(item.region, Box) and bool(DTYPES[item.tensor.dtype].safetensors)
            assert pack.apart != raw, "what stock readers cannot make sense of lies apart, and nothing else"
    assert all(is_pack_name(pack.name) and rank_of_pack(pack.name) == 3 for pack in packs)
    for pack in packs:
        header = header_of(pack, {"step": "1", "attempt": "0" * 16, "rank": "3"})
        assert len(header) % PAGE_BYTES == 0
        assert len(header) <= header_bytes_max or len(pack.items) == 1
        at = 0
        paged = True
        for item in pack.items:
            assert item.data_offset == at
            assert at % item.tensor.itemsize == 0
            full_pages = item.bytes % PAGE_BYTES == 0 and item.bytes > 0
            assert paged or not full_pages, "a piece of whole pages lies behind a ragged one"
            paged = paged and full_pages
            at += item.bytes
        assert at == pack.data_bytes
        assert {(e.fqn, e.shape, e.start, e.stop) for e in entries_of(header, pack.name)} == {
            (
                i.tensor.fqn,
                header_entry(i.tensor.dtype, i.region, apart=pack.apart)[1],
                len(header) + i.data_offset,
                len(header) + i.data_offset + i.bytes,
            )
            for i in pack.items
        }


@settings(max_examples=60, deadline=None)
@given(shard_lists(), st.sampled_from((2, 3, 5, 9, 40)), st.sampled_from((PAGE_BYTES, 2 * PAGE_BYTES, MIB)))
def test_no_pack_is_larger_than_the_store_takes(shards: list[Shard], pages: int, header_bytes_max: int) -> None:
    limit = pages * PAGE_BYTES
    owned = [Owned(number, shard.pieces[0]) for number, shard in enumerate(shards)]

    def packed(of: list[Owned]) -> list[PackPlan]:
        return packs_of(3, shards, of, header_bytes_max, PackSizes(1 << 62, limit, 1))

    too_large = set()
    for part in owned:
        try:
            packed([part])
        except InvalidError as error:
            tensor = shards[part.shard_number].tensor
            assert tensor.fqn in str(error) and str(limit) in str(error)
            too_large.add(tensor.fqn)
            # Its header has room for metadata: at most a page more than is written.
            (alone,) = packs_of(3, shards, [part], header_bytes_max)
            header = header_of(alone, {"step": "1", "attempt": "0" * 16, "rank": "3"})
            assert len(header) + PAGE_BYTES + alone.data_bytes > limit or not tensor.fqn.isascii()
    if too_large:
        with pytest.raises(InvalidError) as failure:
            packed(owned)
        assert any(fqn in str(failure.value) for fqn in too_large)
    fitting = [part for part in owned if shards[part.shard_number].tensor.fqn not in too_large]
    packs = packed(fitting)
    assert sorted(item.shard_number for pack in packs for item in pack.items) == [part.shard_number for part in fitting]
    for pack in packs:
        header = header_of(pack, {"step": "9" * 12, "attempt": "0" * 16, "rank": "99999"})
        assert len(header) + pack.data_bytes <= limit
    assert packs_of(3, shards, owned, header_bytes_max, PackSizes(1 << 62, 1 << 62, 1)) == packs_of(
        3, shards, owned, header_bytes_max
    )


def test_several_pieces_of_one_name_lie_in_as_many_packs() -> None:
    boxes = tuple(Box((n,), (n + 1,)) for n in (0, 2, 4))
    shards = [Shard(TensorSpec("w", "float32", (6,)), None, (0,), Role.PARAMETER, boxes), plain("v", "uint8", (5,))]
    packs = packs_of(0, shards, [*(Owned(0, box) for box in boxes), Owned(1, Box((0,), (5,)))], MIB)
    assert [[(item.tensor.fqn, item.region) for item in pack.items] for pack in packs] == [
        [("w", boxes[0]), ("v", Box((0,), (5,)))],
        [("w", boxes[1])],
        [("w", boxes[2])],
    ]


def test_nothing_owned_is_no_pack() -> None:
    assert packs_of(0, [plain("w", "uint8", (5,))], [], MIB) == []


@settings(max_examples=100, deadline=None)
@given(shard_lists(), st.sampled_from((1, PAGE_BYTES, MIB)))
def test_packs_of_a_size_take_no_piece_once_they_have_it(shards: list[Shard], pack_bytes: int) -> None:
    owned = [Owned(number, shard.pieces[0]) for number, shard in enumerate(shards)]
    packs = packs_of(0, shards, owned, MIB, PackSizes(pack_bytes, 1 << 62, 1))
    assert sorted(item.shard_number for pack in packs for item in pack.items) == list(range(len(shards)))
    for pack in packs:
        assert pack.data_bytes <= 2 * pack_bytes or len([item for item in pack.items if item.bytes]) == 1
        assert pack.data_bytes - max(item.bytes for item in pack.items) < pack_bytes


def test_many_pieces_of_one_name_fill_packs_with_those_of_other_names() -> None:
    boxes = [Box((n,), (n + 1024,)) for n in range(0, 200 * 1024, 1024)]
    shards = [
        Shard(TensorSpec(name, "float32", (200 * 1024,)), None, (0,), Role.PARAMETER, tuple(boxes)) for name in "abcd"
    ]
    owned = [Owned(number, box) for number in range(4) for box in boxes]
    packs = packs_of(0, shards, owned, MIB, PackSizes(16 * PAGE_BYTES, 1 << 62, 1))
    assert sorted(
        piece for pack in packs for piece in ((i.shard_number, i.region.start) for i in pack.items)
    ) == sorted((part.shard_number, part.region.start) for part in owned)
    assert len(packs) == 200, "each pack holds a name once"


def test_many_names_are_split_by_the_header_cap() -> None:
    shards = [plain(f"layers.{n}.weight", "float32", (n,)) for n in range(500)]
    owned = [Owned(number, shard.pieces[0]) for number, shard in enumerate(shards)]
    packs = packs_of(0, shards, owned, 4 * PAGE_BYTES)
    assert len(packs) > 3
    assert len(packs) <= math.ceil(500 / 10)
