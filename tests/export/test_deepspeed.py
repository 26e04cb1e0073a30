"""Checkpoints that DeepSpeed wrote, exported from where they lie: what its engine held, and what its script makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from holdfast import api
from holdfast.base.types.export import ExportOptions
from tests.export.sources import bits, exported
from tests.unit.backends.foreign.deepspeed.test_fixtures import FIXTURES, FOLDERS, fqn_of, reference, trustworthy


@pytest.mark.parametrize(("case", "kind"), FOLDERS)
def test_what_the_engine_held_is_in_the_files(tmp_path: Path, case: str, kind: str) -> None:
    exported(FIXTURES / case / kind, tmp_path / "out", ExportOptions(model_only=False))
    again = api.open_checkpoint(tmp_path / "out")
    compared = 0
    for key, expected in reference(case).items():
        if trustworthy(case, key):
            assert bits(again.read(fqn_of(key), framework="torch")) == bits(expected), key  # type: ignore[arg-type]
            compared += 1
    assert compared == (12 if case == "zero2rr_dp2" else 36)


@pytest.mark.parametrize("case", ["zero3_dp4"])
def test_the_model_alone_is_what_zero_to_fp32_makes(tmp_path: Path, case: str) -> None:
    exported(FIXTURES / case / "ckpt", tmp_path / "out", ExportOptions(dtype="float32"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = load_file(FIXTURES / case / "ref_zero_to_fp32.safetensors")
    assert found.keys() & expected.keys()
    for name in found.keys() & expected.keys():
        assert torch.equal(found[name], expected[name].float()), name
