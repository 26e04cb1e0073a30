"""The header of a coded pack: its length is known before its numbers are, and it states every piece again."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import FlatRange
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.plan import Coding, PackItem, PackPlan, Piece
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.pack import (
    HeaderEntry,
    coded_header_body,
    entries_of,
    entry_of,
    header_of,
    is_apart,
    stated_pieces,
)
from holdfast.errors import CorruptError, InvalidError
from holdfast.settings import PAGE_BYTES
from tests.unit.core.format.coded import ATTEMPT, CHUNK, PACK, coded_packs, coding_of
from tests.unit.core.format.documents import little_memory

PROVENANCE = {"step": "7", "attempt": ATTEMPT, "rank": "3"}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(coded_packs())
def test_a_header_states_its_pieces_and_keeps_to_its_bound(case: tuple[PackPlan, dict[str, str], list[Coding]]) -> None:
    pack, pairs, drawn = case
    body = coded_header_body(pack, CHUNK).with_pairs(pairs.values())
    header = body.header(PROVENANCE, drawn)
    assert len(header) == body.header_bytes(PROVENANCE)
    assert len(header) % PAGE_BYTES == 0 and struct.unpack("<Q", header[:8])[0] == len(header) - 8
    assert json.loads(header[8:])["__metadata__"]["holdfast.attempt"] == ATTEMPT
    stated = {piece.tensor.fqn: piece for piece in stated_pieces(header, PACK, "here")}
    entries = {entry.fqn: entry for entry in entries_of(header, "here")}
    at = len(header)
    for item, coding in zip(pack.items, drawn, strict=True):
        piece = stated[item.tensor.fqn]
        assert (piece.tensor, piece.region, piece.coding) == (item.tensor, item.region, coding)
        assert (piece.start, piece.stop, piece.chunk_bytes) == (at, at + coding.starts[-1], CHUNK)
        indexed = Piece(item.tensor, item.region, PACK, at, b"", CHUNK, coding)
        assert entry_of(indexed) == entries[item.tensor.fqn]
        at = piece.stop


def sample() -> tuple[PackPlan, list[Coding]]:
    weight = TensorSpec("w", "bfloat16", (10, 512))
    master = TensorSpec("m", "float32", (10, 512))
    items = (
        PackItem(weight, FlatRange(512, 5120), 0, 0),
        PackItem(master, Box((1, 0), (10, 512)), 9216, 1),
    )
    codings = [
        coding_of(9216, [3000, 4096, 1000], ["planes", "", "planes"]),
        coding_of(18432, [2048, 2048, 4096, 1, 1024], ["residual", "residual", "", "zstd", "residual"], "w"),
    ]
    return PackPlan(PACK, items), codings


def sample_header() -> bytes:
    pack, codings = sample()
    return coded_header_body(pack, CHUNK).with_pairs(["w"]).header(PROVENANCE, codings)


@pytest.mark.parametrize("fqn", ["w", "model.w", 'a "quoted" \\ name', "é", "\U0001f600", "\x01\n", "x" * 4000])
def test_a_bound_grows_by_what_the_name_of_a_pair_takes(fqn: str) -> None:
    pack, codings = sample()
    body = coded_header_body(pack, CHUNK)

    def text_bytes(pair: str) -> int:
        named = [codings[0], replace(codings[1], pair_fqn=pair)]
        return len(body.with_pairs(["x" * 9000]).header(PROVENANCE, named)[8:].rstrip())

    grown = body.with_pairs([fqn]).longest_bytes - body.with_pairs(["u"]).longest_bytes
    assert grown == text_bytes(fqn) - text_bytes("u")
    assert body.with_pairs([]).longest_bytes == body.longest_bytes
    assert body.with_pairs(["u"]).longest_bytes - body.longest_bytes == len(r",\"pair\":\"u\"")


def test_codecs_that_no_chunk_uses_are_left_out_and_so_is_a_pair_that_none_needs() -> None:
    pack, codings = sample()
    wordy = [
        Coding(("zstd", "planes"), bytes([2, 0, 2]), codings[0].starts, ""),
        Coding(("zstd", "planes"), bytes([1, 0, 0, 1, 0]), (0, 9, 4105, 8201, 8202, 10250), "w"),
    ]
    header = coded_header_body(pack, CHUNK).with_pairs(["w"]).header(PROVENANCE, wordy)
    weight, master = stated_pieces(header, PACK, "here")
    assert weight.coding == codings[0]
    assert master.coding == Coding(("zstd",), bytes([1, 0, 0, 1, 0]), wordy[1].starts, "")
    assert b'\\"pair\\"' not in header


def test_the_entry_of_a_plain_piece_is_that_of_its_header() -> None:
    item = PackItem(TensorSpec("w", "bfloat16", (10, 512)), Box((1, 0), (10, 512)), 0, 0)
    for name, apart in (("r00000.safetensors", False), ("enc/r00000.safetensors", True)):
        assert is_apart(name) is apart is is_apart(f"step-000000000001/{ATTEMPT}/{name}")
        header = header_of(PackPlan(name, (item,)), PROVENANCE)
        piece = Piece(item.tensor, item.region, name, len(header), b"", CHUNK)
        assert entries_of(header, "here") == [entry_of(piece)]
        assert isinstance(entry_of(piece), HeaderEntry)


def test_a_header_that_is_too_large_for_stock_readers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pack, _ = sample()
    monkeypatch.setattr("holdfast.core.format.pack.HEADER_BYTES_MAX", 64)
    with pytest.raises(InvalidError, match="shorter names"):
        coded_header_body(pack, CHUNK).header_bytes(PROVENANCE)


Change = Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], None]


def changed(change: Change) -> bytes:
    """Return the sample's header after a change of its document, metadata and notes."""
    document = json.loads(sample_header()[8:])
    metadata = document["__metadata__"]
    notes = json.loads(metadata["holdfast.pieces"])
    change(document, metadata, notes)
    if "holdfast.pieces" in metadata and isinstance(metadata["holdfast.pieces"], str):
        metadata["holdfast.pieces"] = json.dumps(notes)
    text = json.dumps(document).encode()
    return struct.pack("<Q", len(text)) + text


def note(fqn: str, **fields: object) -> Change:
    return lambda document, metadata, notes: notes[fqn].update(fields)


def meta(name: str, value: object) -> Change:
    return lambda document, metadata, notes: metadata.update({name: value})


IMPOSSIBLE: dict[str, Change] = {
    "no note": lambda document, metadata, notes: notes.pop("w"),
    "no chunk size": lambda document, metadata, notes: metadata.pop("holdfast.chunk_bytes"),
    "a chunk size that is no number": meta("holdfast.chunk_bytes", "4k"),
    "a chunk size of other digits": meta("holdfast.chunk_bytes", "٤٠٩٦"),
    "a number as chunk size": meta("holdfast.chunk_bytes", 4096),
    "another chunk size": meta("holdfast.chunk_bytes", "8192"),
    "a chunk size of no page": meta("holdfast.chunk_bytes", "4097"),
    "a chunk size of exabytes": meta("holdfast.chunk_bytes", "9" * 5000),
    "a chunk size of 0": meta("holdfast.chunk_bytes", "0"),
    "a list of shapes": meta("holdfast.global_shapes", "[]"),
    "a negative shape": meta("holdfast.global_shapes", '{"w":[-10,512],"m":[10,512]}'),
    "a fraction of a shape": meta("holdfast.global_shapes", '{"w":[10.0,512],"m":[10,512]}'),
    "fewer chunks than lengths": note("w", chunks=[1, 0]),
    "fewer chunks than the piece": note("w", chunks=[1, 0], lengths=[4000, 4096]),
    "more chunks than the piece": note("w", chunks=[1, 0, 1, 0], lengths=[2999, 4096, 1000, 1]),
    "a length of 0": note("w", lengths=[4000, 4096, 0]),
    "a negative length": note("w", lengths=[3001, 4096, -1]),
    "a coded chunk that is not shorter": note("w", lengths=[4096, 4096, 1024]),
    "a raw chunk that is shorter": note("w", lengths=[3000, 4095, 1001]),
    "lengths that do not add up": note("w", lengths=[2999, 4096, 1000]),
    "a length of exabytes": note("w", lengths=[1 << 60, 4096, 1000]),
    "a length beyond 64 bits": note("w", lengths=[1 << 70, 4096, 1000]),
    "a length that is a fraction": note("w", lengths=[3000.0, 4096, 1000]),
    "a codec that is not listed": note("w", chunks=[2, 0, 1]),
    "a codec beyond a byte": note("w", chunks=[256, 0, 1]),
    "a negative codec": note("w", chunks=[-1, 0, 1]),
    "true as a codec": note("w", chunks=[True, 0, 1]),
    "256 codecs": note("w", codecs=["planes"] * 256),
    "codecs as text": note("w", codecs="planes"),
    "another element type": note("w", dtype="float64"),
    "an unknown element type": note("w", dtype="float42"),
    "no region": note("w", flat=None),
    "two regions": note("w", box=[[1, 0], [10, 512]]),
    "a region from its end": note("w", flat=[5120, 512]),
    "a region beyond the tensor": note("w", flat=[1024, 5632]),
    "a negative region": note("w", flat=[-512, 4096]),
    "a region of exabytes": note("w", flat=[0, 1 << 61]),
    "a box beyond the tensor": note("m", box=[[2, 0], [11, 512]]),
    "a box of another dimension": note("m", box=[[1], [10]]),
    "no pair": note("m", pair=""),
    "a number as pair": note("m", pair=7),
}


def test_the_sample_is_sound() -> None:
    assert stated_pieces(changed(lambda *_: None), PACK, "here")


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_number_in_a_header_is_corrupt(name: str) -> None:
    header = changed(IMPOSSIBLE[name])
    with little_memory(), pytest.raises(CorruptError, match="here"):
        stated_pieces(header, PACK, "here")


def test_one_stored_byte_for_more_than_4096_raw_ones_is_corrupt() -> None:
    spec = TensorSpec("w", "int8", (3 * CHUNK,))
    pack = PackPlan(PACK, (PackItem(spec, Box((0,), (3 * CHUNK,)), 0, 0),))
    body = coded_header_body(pack, 3 * CHUNK)
    one, three = (Coding(("zstd",), b"\1", (0, stored), "") for stored in (1, 3))
    assert stated_pieces(body.header(PROVENANCE, [three]), PACK, "here")[0].coding == three
    with pytest.raises(CorruptError, match="w of shape"):
        stated_pieces(body.header(PROVENANCE, [one]), PACK, "here")


def test_a_codec_of_a_newer_version_is_not_taken_for_damage() -> None:
    header = changed(note("w", codecs=["wavelets"]))
    with pytest.raises(InvalidError, match=r"wavelets.*1\.5.*newer Holdfast"):
        stated_pieces(header, PACK, "here")


def test_every_flipped_byte_of_a_header_is_refused_or_states_other_pieces() -> None:
    header = sample_header()
    text = len(header.rstrip(b" "))
    for at in range(0, text, 3):
        flipped = header[:at] + bytes([header[at] ^ (1 << at % 8)]) + header[at + 1 :]
        try:
            for piece in stated_pieces(flipped, PACK, "here"):
                assert piece.coding is not None and piece.coding.starts[-1] == piece.stop - piece.start
                raw = piece.region.numel * piece.tensor.itemsize
                assert len(piece.coding.numbers) == -(-raw // piece.chunk_bytes)
                assert math.prod(piece.tensor.global_shape) >= piece.region.numel
        except (CorruptError, InvalidError):
            pass


def test_headers_of_plain_packs_are_as_ever() -> None:
    """Recorded before there were coded packs."""
    spec = TensorSpec("w.é", "bfloat16", (10, 512))
    items = (
        PackItem(spec, Box((1, 0), (10, 512)), 0, 0),
        PackItem(replace(spec, fqn="b"), Box((0, 0), (1, 4)), 9216, 0),
    )
    flat = PackItem(replace(spec, dtype="complex32"), FlatRange(3, 700), 0, 0)
    headers = (
        header_of(PackPlan("r00000.safetensors", items), PROVENANCE),
        header_of(PackPlan("enc/r00000.safetensors", (flat,)), PROVENANCE),
        header_of(PackPlan("r00000.safetensors", ()), PROVENANCE),
    )
    assert [hex_digest_of(header) for header in headers] == [
        "e33e730f51d98d1f3b90e27c0cecaf22",
        "0d1f80ab315fb040eb8e62bcc52e73fe",
        "60725418671a32c12df7386848f92fbb",
    ]
