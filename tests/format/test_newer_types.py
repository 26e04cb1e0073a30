"""The element types of format 1.5, written once, are read by every later version, and by a stranger."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import holdfast
from holdfast.core.format import sealed_json
from holdfast.errors import InvalidError
from tests.format import second_decoder, state
from tests.format.description import TYPES_CHECKPOINTS, TYPES_FOLDER, description
from tests.format.test_golden import LEAVES_NOTHING

SIZE_MAX = 30_000
CHECKPOINT = TYPES_FOLDER / TYPES_CHECKPOINTS[0]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((TYPES_FOLDER / "expected.json").read_text())
    return document


def test_every_tensor_reads_as_it_did(expected: dict[str, Any]) -> None:
    assert json.loads(json.dumps(description(CHECKPOINT))) == expected[TYPES_CHECKPOINTS[0]]
    assert list(holdfast.open_checkpoint(CHECKPOINT).verify()) == []
    assert sum(path.stat().st_size for path in TYPES_FOLDER.rglob("*") if path.is_file()) < SIZE_MAX


def test_loads_into_a_state_bit_for_bit() -> None:
    target, saved = state.newer_types(4), state.newer_types(3)
    holdfast.load(CHECKPOINT, target, process_group=False, settings=LEAVES_NOTHING)
    for name, tensor in saved.items():
        found = target[name]
        assert isinstance(found, torch.Tensor) and isinstance(tensor, torch.Tensor) and found.dtype == tensor.dtype
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_second_decoder_reads_every_tensor(expected: dict[str, Any]) -> None:
    checkpoint = second_decoder.Checkpoint(CHECKPOINT)
    found = {
        fqn: [dtype, list(shape), hashlib.sha256(data).hexdigest()]
        for fqn, (dtype, shape, data) in checkpoint.tensors().items()
    }
    assert found == expected[TYPES_CHECKPOINTS[0]]["tensors"]
    assert checkpoint.manifest["holdfast"]["format"] == [1, 5]
    assert checkpoint.manifest["newer_types"] == ["float4_e2m1fn_x2", "float8_e8m0fnu"]


def test_the_packs_are_files_that_safetensors_opens() -> None:
    found: dict[str, torch.dtype] = {}
    for pack in CHECKPOINT.rglob("*.safetensors"):
        with safe_open(pack, "pt") as opened:
            found |= {name: opened.get_tensor(name).dtype for name in opened.keys()}  # noqa: SIM118 - no mapping
    bits = torch.uint8  # Pairs are in a separate pack, as bytes.
    assert found == {"scales": torch.float8_e8m0fnu, "weights": bits, "pair": bits, "norm": torch.float32}


@pytest.mark.parametrize("known", [0, 3, 4])
def test_an_older_reader_names_the_version_and_takes_nothing_for_damage(
    known: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(CHECKPOINT, tmp_path / "c")
    monkeypatch.setattr(sealed_json, "FORMAT_MINOR_MAX", known)
    with pytest.raises(InvalidError, match=rf"1\.5.*1\.{known}.*newer Holdfast"):
        holdfast.load(tmp_path / "c", state.newer_types(4), process_group=False)


def test_a_checkpoint_without_them_keeps_its_version(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"w": torch.ones(3)}, process_group=False)
    document = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert document["holdfast"]["format"] < [1, 5] and "newer_types" not in document
