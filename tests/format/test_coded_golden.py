"""Checkpoints with coded pieces, written once by format 1.4, are read by every later version, and by a stranger."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from tests.format import coded_state, second_decoder, state
from tests.format.description import CODED_CHECKPOINTS, CODED_FOLDER, EXPECTED, description
from tests.format.test_golden import LEAVES_NOTHING, leaves

SIZE_MAX = 400_000
STATES: dict[str, tuple[Callable[[int], state.State], int]] = {
    "every-codec": (coded_state.training, 3),
    "reusing/step-000000000002": (coded_state.going_on, 2),
    "reusing/step-000000000004": (coded_state.going_on, 4),
    "sharded": (coded_state.training, 9),
    "split": (coded_state.training, 9),
}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((CODED_FOLDER / EXPECTED.name).read_text())
    return document


@pytest.fixture(scope="module")
def opened() -> dict[str, second_decoder.Checkpoint]:
    return {name: second_decoder.Checkpoint(CODED_FOLDER / name) for name in CODED_CHECKPOINTS}


@pytest.mark.parametrize("name", CODED_CHECKPOINTS)
def test_every_tensor_and_value_reads_as_it_did(name: str, expected: dict[str, Any]) -> None:
    assert json.loads(json.dumps(description(CODED_FOLDER / name))) == expected[name]


@pytest.mark.parametrize("name", CODED_CHECKPOINTS)
def test_whole(name: str) -> None:
    assert list(holdfast.open_checkpoint(CODED_FOLDER / name).verify()) == []


@pytest.mark.parametrize("name", CODED_CHECKPOINTS)
def test_loads_into_a_state_bit_for_bit(name: str) -> None:
    make, seed = STATES[name]
    target = make(seed + 1)
    report = holdfast.load(CODED_FOLDER / name, target, settings=LEAVES_NOTHING)
    assert report.missing == report.unexpected == ()
    assert leaves(target) == leaves(make(seed))


@pytest.mark.parametrize("name", CODED_CHECKPOINTS)
def test_a_second_decoder_reads_every_tensor(
    name: str, expected: dict[str, Any], opened: dict[str, second_decoder.Checkpoint]
) -> None:
    found = {
        fqn: [dtype, list(shape), hashlib.sha256(data).hexdigest()]
        for fqn, (dtype, shape, data) in opened[name].tensors().items()
    }
    assert found == expected[name]["tensors"]
    assert opened[name].manifest["holdfast"]["format"] == [1, 4]


@pytest.mark.parametrize("name", CODED_CHECKPOINTS)
def test_headers_state_what_the_index_lists(name: str, opened: dict[str, second_decoder.Checkpoint]) -> None:
    """So an index can be made again from the packs."""
    listed = [piece for piece in opened[name].pieces if piece.codecs is not None]
    packs = {piece.pack for piece in listed}
    stated = [piece for pack in packs for piece in second_decoder.stated_pieces(pack)]
    assert all(piece in stated for piece in listed)
    if not name.startswith("reusing"):
        assert sorted(stated, key=repr) == sorted(listed, key=repr)
    by_region = {piece.region: piece for piece in opened[name].pieces}
    for piece in listed:
        pair = by_region.get((piece.pair, *piece.region[1:]))
        raw = second_decoder.raw_of(piece, pair and opened[name].raw(pair), pair.dtype if pair else "")
        assert raw == opened[name].raw(piece)


def test_golden_files_are_small_and_hold_what_they_should(opened: dict[str, second_decoder.Checkpoint]) -> None:
    files = [path for path in CODED_FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < SIZE_MAX
    used = {(codec, piece.dtype) for each in opened.values() for piece in each.pieces for codec in piece.codecs or ()}
    for case in (
        ("planes", "float16"), ("planes", "bfloat16"), ("planes", "float32"), ("planes", "float64"),
        ("residual", "float32"), ("dictionary", "float32"), ("sparse", "int32"), ("sparse", "complex64"),
        ("zstd", "int64"), ("", "uint8"),
    ):  # fmt: skip
        assert case in used, case
    pieces = opened["every-codec"].pieces
    paired = {piece.pair: piece for piece in pieces if piece.pair}
    assert {piece.dtype for piece in pieces if piece.fqn in paired} == {"bfloat16", "float16"}
    assert any(len(piece.lengths) > 2 for piece in paired.values()), "chunks of both halves of a pair's chunk"
    sharded = [
        piece for piece in opened["sharded"].pieces if piece.pair and piece.numel < 4608 and piece.shape[0] == 48
    ]
    assert len(sharded) == 2, "a pair of each rank"
    split = opened["split"].manifest
    assert "overview" in split and len(split["indexes"]) > 2
    reused = [piece for piece in opened["reusing/step-000000000004"].pieces if "step-000000000002" in str(piece.pack)]
    assert any(piece.pair for piece in reused)
