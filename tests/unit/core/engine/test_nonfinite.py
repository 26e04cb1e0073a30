"""Non-finite elements of every type, counted as torch counts them."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.geometry.dtype import DTYPES, PAIRS
from holdfast.base.ports.framework import Selection
from holdfast.base.types.plan import PlannedPack
from holdfast.core.engine.nonfinite import nonfinite_count
from holdfast.core.engine.writing.write import PackWriter
from holdfast.core.format.pack import header_of
from holdfast.core.plan.ownership import Owned
from holdfast.core.plan.packing import packs_of
from holdfast.settings import PAGE_BYTES, Settings
from tests.doubles.framework import GlobalTensor, NumpyFramework
from tests.support.tuning import tuned

FLOATING = [name for name, dtype in DTYPES.items() if dtype.floating and name != PAIRS]
INTEGRAL = [name for name in DTYPES if name not in FLOATING]
EVERY_BIT_PATTERN = [name for name in FLOATING if DTYPES[name].itemsize <= 2]


def by_torch(name: str, data: bytes) -> int:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, name))
    # torch's own isfinite takes neither float8 nor halves of complex numbers.
    wide = tensor.to(torch.complex128) if tensor.is_complex() else tensor.to(torch.float64)
    return int((~torch.isfinite(wide)).sum())


@pytest.mark.parametrize("name", EVERY_BIT_PATTERN)
def test_every_bit_pattern_of_one_and_two_bytes(name: str) -> None:
    width = DTYPES[name].itemsize
    found = 0
    for pattern in range(1 << 8 * width):
        data = pattern.to_bytes(width, "little")
        found += nonfinite_count(name, data)
    every = np.arange(1 << 8 * width, dtype=f"<u{width}").tobytes()
    assert nonfinite_count(name, every) == found == by_torch(name, every) > 0


@pytest.mark.parametrize("name", FLOATING)
@given(seed=st.integers(0, 2**32), spread=st.sampled_from(["any bits", "large exponents", "finite"]))
@settings(max_examples=30, deadline=None)
def test_random_bit_patterns(name: str, seed: int, spread: str) -> None:
    chance = np.random.default_rng(seed)
    count = int(chance.integers(1, 300))
    if spread == "finite":
        numbers = torch.from_numpy(chance.uniform(-200, 200, count))
        data = numbers.to(getattr(torch, name)).view(torch.uint8).numpy().tobytes()
        assert nonfinite_count(name, data) == 0
    else:
        raw = chance.integers(0, 256, count * DTYPES[name].itemsize, dtype=np.uint8)
        if spread == "large exponents":
            raw |= np.where(chance.random(raw.size) < 0.5, 0x7F, 0).astype(np.uint8)
        data = raw.tobytes()
    assert nonfinite_count(name, data) == by_torch(name, data)


@pytest.mark.parametrize("name", INTEGRAL)
def test_other_types_have_none(name: str) -> None:
    assert nonfinite_count(name, b"\xff" * 64) == nonfinite_count(name, b"\x7f" * 64) == 0


@pytest.mark.parametrize("name", FLOATING)
def test_nothing_has_none(name: str) -> None:
    assert nonfinite_count(name, b"") == 0


@given(
    sizes=st.lists(st.integers(0, 4 * PAGE_BYTES), min_size=1, max_size=12),
    chunk_pages=st.sampled_from([1, 2, 4]),
    window_pages=st.sampled_from([1, 3, 4]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_a_pack_is_counted_whole_wherever_windows_and_chunks_end(
    sizes: list[int], chunk_pages: int, window_pages: int, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    state, expected = {}, {}
    for number, size in enumerate(sizes):
        array = chance.standard_normal(size).astype([np.float16, np.float32, np.float64][number % 3])
        bad = chance.random(size) < chance.choice([0.0, 0.001, 0.5])
        array[bad] = chance.choice(np.array([np.nan, np.inf, -np.inf], dtype=array.dtype), int(bad.sum()))
        state[f"t{number}"] = GlobalTensor(str(array.dtype), array)
        if bad.any():
            expected[f"t{number}"] = int(bad.sum())
    shards = list(NumpyFramework(0).collect(state, Selection()).shards)
    whole = [Owned(number, each.shard.pieces[0]) for number, each in enumerate(shards)]
    (pack,) = packs_of(0, [each.shard for each in shards], whole, 1 << 20)
    planned = PlannedPack("0123456789abcdef/r00000.safetensors", header_of(pack, {}), pack)
    options = tuned(
        Settings(chunk_bytes=chunk_pages * PAGE_BYTES, count_nonfinite=True), window_bytes=window_pages * PAGE_BYTES
    )
    writer = PackWriter(MemoryStore(uuid.uuid4().hex), options)
    assert writer.write(planned, [each.source for each in shards]).nonfinite == expected
