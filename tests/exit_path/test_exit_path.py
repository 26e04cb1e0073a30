"""Leaving needs no Holdfast: stock readers open the packs of an attempt as they lie."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

import holdfast
from tests.exit_path.writer import RANKS, STEP, expected_tensors

WRITER = Path(__file__).with_name("writer.py")
REPOSITORY = WRITER.parents[2]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two real gloo processes saved."""
    folder = tmp_path_factory.mktemp("exit")
    source = Path(holdfast.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{REPOSITORY}", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, WRITER, str(rank), folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [process.communicate(timeout=120)[0].decode() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * RANKS, "\n".join(said)
    return folder


@pytest.fixture(scope="module")
def layouts(folder: Path) -> Path:
    return attempt_of(folder / "layouts")


@pytest.fixture(scope="module")
def training(folder: Path) -> Path:
    return attempt_of(folder / "run" / f"step-{STEP:012d}")


def attempt_of(checkpoint: Path) -> Path:
    return checkpoint / holdfast.open_checkpoint(checkpoint).manifest.attempt


def add_leftover(attempt: Path) -> Path:
    """Put a dead attempt beside one: packs of the same names and keys, other bytes, and a half one."""
    dead = attempt.with_name("00000000deadbeef")
    shutil.copytree(attempt, dead)
    for pack in dead.glob("*.safetensors"):
        data = bytearray(pack.read_bytes())
        header_bytes = 8 + int.from_bytes(data[:8], "little")
        data[header_bytes:] = bytes(each ^ 0x55 for each in data[header_bytes:])
        pack.write_bytes(data)
    (dead / "r00001-1.safetensors").write_bytes(b"\x00" * 5000)
    return dead


def read_by_dcp(attempt: Path, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fill whole tensors in one process through PyTorch's own reader."""
    state = {fqn: torch.full_like(tensor.view(torch.uint8), 0xAA).view(tensor.dtype) if tensor.ndim and tensor.numel()
             else torch.zeros_like(tensor) for fqn, tensor in wanted.items()}  # fmt: skip
    with warnings.catch_warnings():
        # It warns of itself, not of the checkpoint.
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=HuggingFaceStorageReader(path=str(attempt)), no_dist=True)
    return state


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for fqn, tensor in expected.items():
        assert (found[fqn].dtype, found[fqn].shape) == (tensor.dtype, tensor.shape), fqn
        assert bits(found[fqn]) == bits(tensor), fqn


# ----------------------------------------------------------------------------------------------- stock safetensors


@pytest.mark.parametrize("leftover", [False, True], ids=["alone", "beside a dead attempt"])
def test_stock_safetensors_reads_every_pack_bit_exactly(folder: Path, tmp_path: Path, leftover: bool) -> None:
    """Each key is a piece: at the offsets that the pack itself states, it is that part of the whole tensor."""
    import json

    checkpoint = Path(shutil.copytree(folder / "layouts", tmp_path / "layouts"))
    attempt = attempt_of(checkpoint)
    if leftover:
        add_leftover(attempt)
    expected = expected_tensors()
    rebuilt = {fqn: torch.zeros_like(tensor) for fqn, tensor in expected.items()}
    covered = dict.fromkeys(expected, 0)
    packs = sorted(attempt.glob("*.safetensors"))
    assert len(packs) > RANKS, "more than one pack per rank"
    for pack in packs:
        loaded = load_file(pack)
        with safe_open(pack, framework="pt") as file:
            metadata = file.metadata()
            assert set(file.keys()) == set(loaded)
            offsets = json.loads(metadata["DCP_SHARDING_INFO"])
            assert set(offsets) == set(loaded)
            for fqn, piece in loaded.items():
                assert bits(file.get_tensor(fqn)) == bits(piece)
                start = offsets[fqn]["saved_offsets"]
                where = tuple(slice(a, a + n) for a, n in zip(start, piece.shape, strict=True))
                rebuilt[fqn][where] = piece
                covered[fqn] += piece.numel()
    assert_same(rebuilt, expected)
    assert covered == {fqn: tensor.numel() for fqn, tensor in expected.items()}, "each element is in one pack"


def test_stock_safetensors_reads_packs_into_numpy_too(training: Path, folder: Path) -> None:
    whole = load_numpy(folder / "whole.safetensors")
    pieces = [load_numpy(pack) for pack in sorted(training.glob("*.safetensors"))]
    weight = np.concatenate([each["model.0.weight"] for each in pieces if "model.0.weight" in each])
    assert weight.tobytes() == whole["model.0.weight"].tobytes()


# ------------------------------------------------------------------------------------ PyTorch's Hugging Face reader


def test_pytorch_reads_every_dtype_and_layout_resharded(layouts: Path) -> None:
    expected = expected_tensors()
    assert_same(read_by_dcp(layouts, expected), expected)


def test_pytorch_reads_a_real_training_state(training: Path, folder: Path) -> None:
    expected = load_file(folder / "whole.safetensors")
    assert len(expected) == 6 * 4
    assert_same(read_by_dcp(training, expected), expected)


def test_pytorch_is_not_disturbed_by_a_dead_attempt_in_the_same_step(folder: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(folder / "run", tmp_path / "run"))
    attempt = attempt_of(run / f"step-{STEP:012d}")
    dead = add_leftover(attempt)
    expected = load_file(folder / "whole.safetensors")
    assert_same(read_by_dcp(attempt, expected), expected)
    (dead / "r00001-1.safetensors").unlink()
    wrong = read_by_dcp(dead, expected)
    assert any(bits(wrong[fqn]) != bits(expected[fqn]) for fqn in expected), "the dead attempt could have disturbed"


def test_a_rank_that_holds_nothing_leaves_no_pack_that_stock_tools_trip_over(folder: Path, tmp_path: Path) -> None:
    attempt = attempt_of(folder / "lopsided")
    assert_same(read_by_dcp(attempt, {"only": torch.ones(1, 5)}), {"only": torch.ones(1, 5)})
    consolidate_safetensors_files(str(attempt), str(tmp_path), {"only": 1})
    (merged,) = tmp_path.glob("*.safetensors")
    assert_same(load_file(merged), {"only": torch.ones(1, 5)})


# ------------------------------------------------------------------------------------------------ the consolidation


def is_mergeable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.ndim >= 1 and tensor.numel() > 0


@pytest.mark.parametrize("leftover", [False, True], ids=["alone", "beside a dead attempt"])
def test_pytorch_merges_floating_tensors_of_every_layout(folder: Path, tmp_path: Path, leftover: bool) -> None:
    checkpoint = Path(shutil.copytree(folder / "layouts", tmp_path / "layouts"))
    attempt = attempt_of(checkpoint)
    if leftover:
        add_leftover(attempt)
    expected = {fqn: tensor for fqn, tensor in expected_tensors().items() if is_mergeable(tensor)}
    assert len({tensor.dtype for tensor in expected.values()}) == 8
    (tmp_path / "merged").mkdir()
    consolidate_safetensors_files(str(attempt), str(tmp_path / "merged"), dict.fromkeys(expected, 1))
    (merged,) = (tmp_path / "merged").glob("*.safetensors")
    assert_same(load_file(merged), expected)


def test_pytorch_merges_a_real_model_into_two_files(training: Path, folder: Path, tmp_path: Path) -> None:
    expected = {fqn: each for fqn, each in load_file(folder / "whole.safetensors").items() if each.ndim >= 1}
    files = {fqn: 1 + fqn.startswith("optimizer") for fqn in expected}
    consolidate_safetensors_files(str(training), str(tmp_path), files)
    found = {}
    for merged in tmp_path.glob("*.safetensors"):
        found |= load_file(merged)
    assert_same(found, expected)
    assert sum(math.prod(each.shape) for each in found.values()) > 3 * 33 * 65


# ------------------------------------------------------------------------------------------------------- and ourselves


def test_holdfast_reads_the_same_beside_a_dead_attempt(folder: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(folder / "layouts", tmp_path / "layouts"))
    add_leftover(attempt_of(checkpoint))
    opened = holdfast.open_checkpoint(checkpoint)
    expected = expected_tensors()
    assert_same({fqn: opened.read(fqn, framework="torch") for fqn in opened.tensors}, expected)
    assert list(opened.verify()) == []
