"""A checkpoint of flat ranges on storage: verified, damaged, and read by any index."""

from __future__ import annotations

import math
import uuid
from pathlib import Path
from types import EllipsisType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.errors import CorruptError
from holdfast.settings import Settings
from tests.support.tuning import tuned

SMALL = tuned(Settings(chunk_bytes=4096), window_bytes=8192)
SHAPE = (13, 5, 41)
NUMEL = math.prod(SHAPE)
CUTS = (0, 1, 7, 40, 41, 1000, 1234, 2050, 2600, NUMEL)
Selector = int | slice | EllipsisType

DTYPES = (torch.float32, torch.complex128, torch.bfloat16, torch.bool, torch.int64)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def whole(dtype: torch.dtype) -> torch.Tensor:
    random = torch.Generator().manual_seed(3)
    if dtype is torch.bool:
        return torch.randint(0, 2, SHAPE, generator=random).bool()
    raw = torch.randint(0, 256, (NUMEL * dtype.itemsize,), dtype=torch.uint8, generator=random)
    return raw.view(dtype).reshape(SHAPE)


def flat(tensor: torch.Tensor) -> holdfast.Sharded:
    """One process holds everything, as runs of the flattened tensor, listed from the last to the first."""
    starts = list(CUTS[:-1])[::-1]
    stops = list(CUTS[1:])[::-1]
    parts = [tensor.reshape(-1)[a:b].clone() for a, b in zip(starts, stops, strict=True)]
    return holdfast.Sharded(parts, global_shape=tensor.shape, flat_start=starts)


def bits(array: object) -> bytes:
    assert isinstance(array, np.ndarray)
    return array.tobytes()


def in_numpy(tensor: torch.Tensor) -> np.ndarray:  # type: ignore[type-arg]
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


@pytest.fixture(scope="module")
def checkpoint() -> holdfast.Checkpoint:
    path = f"memory://{uuid.uuid4().hex}"
    holdfast.save(path, {name_of(dtype): flat(whole(dtype)) for dtype in DTYPES}, settings=SMALL)
    return holdfast.open_checkpoint(path, settings=SMALL)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_it_is_whole_and_reads_as_one_tensor(checkpoint: holdfast.Checkpoint, dtype: torch.dtype) -> None:
    assert list(checkpoint.verify()) == []
    assert checkpoint.tensors[name_of(dtype)].shape == SHAPE
    assert bits(checkpoint.read(name_of(dtype))) == bits(in_numpy(whole(dtype)))
    again = checkpoint.read(name_of(dtype), framework="torch")
    assert isinstance(again, torch.Tensor)
    assert again.dtype == dtype
    assert bits(in_numpy(again)) == bits(in_numpy(whole(dtype)))


@st.composite
def selectors(draw: st.DrawFn) -> tuple[Selector, ...]:
    chosen: list[Selector] = []
    for length in SHAPE[: draw(st.integers(0, len(SHAPE)))]:
        edges = st.one_of(st.none(), st.integers(-length - 2, length + 2))
        chosen.append(
            draw(
                st.one_of(
                    st.integers(-length, length - 1),
                    st.builds(slice, edges, edges, st.one_of(st.none(), st.integers(1, 4))),
                )
            )
        )
    if draw(st.booleans()):
        at = draw(st.integers(0, len(chosen)))
        # What stands behind an Ellipsis counts from the last dimension, so that only slices fit everywhere.
        chosen[at:] = [..., *(each for each in chosen[at:] if isinstance(each, slice))]
    return tuple(chosen)


@settings(max_examples=300, deadline=None)
@given(selectors(), st.sampled_from(DTYPES))
def test_any_index_reads_what_numpy_would(
    checkpoint: holdfast.Checkpoint, index: tuple[Selector, ...], dtype: torch.dtype
) -> None:
    expected = in_numpy(whole(dtype))[(*index, ...) if ... not in index else index]
    found = checkpoint.read(name_of(dtype), index)
    assert isinstance(found, np.ndarray)
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


def test_only_the_chunks_that_are_needed_are_read(tmp_path: Path) -> None:
    """One row of a range of many chunks: the rest of the pack may be damaged and nobody notices."""
    tensor = torch.arange(100_003, dtype=torch.float32)
    part = holdfast.Sharded(tensor[:], global_shape=(100_003,), flat_start=0)
    holdfast.save(tmp_path / "c", {"t": part}, settings=SMALL)
    (pack,) = (tmp_path / "c").glob("*/enc/*.safetensors")
    flip(pack, 4096 + 4 * 50_000)
    checkpoint = holdfast.open_checkpoint(tmp_path / "c", settings=SMALL)
    found = checkpoint.read("t", slice(10_000, 10_100))
    assert isinstance(found, np.ndarray)
    assert found.tolist() == list(range(10_000, 10_100))
    with pytest.raises(CorruptError, match=r"t: .*enc/r00000\.safetensors"):
        checkpoint.read("t", slice(49_999, 50_001))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_damage_in_a_pack_apart_is_found_and_named(tmp_path: Path) -> None:
    parts = [torch.arange(3000.0), torch.arange(3000.0, 5000.0)]
    state = {"w": holdfast.Sharded(parts, global_shape=(50, 100), flat_start=[0, 3000]), "plain": torch.ones(5)}
    holdfast.save(tmp_path / "c", state, settings=SMALL)
    packs = sorted((tmp_path / "c").glob("*/enc/*.safetensors"))
    assert [pack.name for pack in packs] == ["r00000-1.safetensors", "r00000.safetensors"]
    checkpoint = holdfast.open_checkpoint(tmp_path / "c", settings=SMALL)
    assert list(checkpoint.verify()) == []
    for pack in packs:
        whole_bytes = pack.read_bytes()
        for at, fqn in ((4096 + 4097, "w"), (100, None), (len(whole_bytes) - 1, "w")):
            flip(pack, at)
            (damage,) = holdfast.open_checkpoint(tmp_path / "c", settings=SMALL).verify()
            assert damage.file.endswith(f"enc/{pack.name}")
            assert damage.fqn == fqn
            assert damage.start is not None and damage.stop is not None
            assert damage.start <= at < damage.stop
            pack.write_bytes(whole_bytes)
    packs[0].unlink()
    (damage,) = holdfast.open_checkpoint(tmp_path / "c", settings=SMALL).verify()
    assert damage.file.endswith(f"enc/{packs[0].name}")


def test_a_checkpoint_of_flat_ranges_beside_raw_packs_leaves_those_as_they_were(tmp_path: Path) -> None:
    """What stock readers look at holds only what they can read."""
    state = {"w": holdfast.Sharded(torch.arange(6.0), global_shape=(2, 3), flat_start=0), "plain": torch.ones(5)}
    holdfast.save(tmp_path / "c", state)
    from safetensors.torch import load_file

    (pack,) = (tmp_path / "c").glob("*/*.safetensors")
    assert {fqn: each.tolist() for fqn, each in load_file(pack).items()} == {"plain": [1.0] * 5}
    (apart,) = (tmp_path / "c").glob("*/enc/*.safetensors")
    raw = load_file(apart)["w"]
    assert raw.dtype is torch.uint8
    assert raw.view(torch.float32).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
