"""Which memory of a torch target may be filled with stored bytes directly."""

from __future__ import annotations

import pytest
import torch

from holdfast.backends.torch.local_shards import LocalPart, LocalShards
from holdfast.backends.torch.tensors import TorchTarget
from holdfast.base.geometry.box import Box

WHOLE = Box((0, 0), (6, 4))


def target_of(*parts: tuple[Box, torch.Tensor], stored: str = "float32") -> TorchTarget:
    return TorchTarget(LocalShards((6, 4), None, None, tuple(LocalPart(box, local) for box, local in parts)), stored)


def test_rows_of_a_dense_tensor_are_one_run() -> None:
    local = torch.zeros(6, 4)
    memory = target_of((WHOLE, local)).memory(Box((2, 0), (5, 4)))
    assert memory is not None
    expected = torch.zeros(6, 4)
    expected[2:5] = torch.randn(3, 4)
    memory[:] = expected[2:5].numpy().tobytes()
    assert torch.equal(local, expected)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int64))
def test_any_dtype_is_its_bits(dtype: torch.dtype) -> None:
    local = torch.zeros(6, 4, dtype=dtype)
    memory = target_of((WHOLE, local), stored=str(dtype).removeprefix("torch.")).memory(WHOLE)
    assert memory is not None
    assert memory.nbytes == local.nbytes
    assert memory.format == "B"


def test_a_parameter_that_wants_gradients_is_filled_too() -> None:
    local = torch.nn.Parameter(torch.zeros(6, 4))
    memory = target_of((WHOLE, local)).memory(WHOLE)
    assert memory is not None
    memory[:] = torch.ones(6, 4).numpy().tobytes()
    assert bool((local == 1).all())


@pytest.mark.parametrize(
    ("local", "part"),
    (
        (torch.zeros(6, 4), Box((0, 1), (6, 3))),
        (torch.zeros(4, 6).t(), WHOLE),
        (torch.zeros(6, 8)[:, ::2], WHOLE),
        (torch.zeros(6, 4, dtype=torch.float64), WHOLE),
        (torch.zeros(6, 4, device="meta"), WHOLE),
        (torch.zeros(1, 1).expand(6, 4), WHOLE),
    ),
    ids=("columns", "transposed", "every other column", "another dtype", "another device", "expanded"),
)
def test_what_is_not_one_run_of_stored_bytes_has_none(local: torch.Tensor, part: Box) -> None:
    assert target_of((WHOLE, local)).memory(part) is None


def test_memory_shown_conjugated_has_none() -> None:
    assert target_of((WHOLE, torch.zeros(6, 4, dtype=torch.complex64).conj()), stored="complex64").memory(WHOLE) is None


def test_what_several_views_hold_is_copied_to_each() -> None:
    upper, lower = torch.zeros(4, 4), torch.zeros(4, 4)
    target = target_of((Box((0, 0), (4, 4)), upper), (Box((2, 0), (6, 4)), lower))
    assert target.memory(Box((2, 0), (4, 4))) is None
    memory = target.memory(Box((4, 0), (6, 4)))
    assert memory is not None
    memory[:] = torch.ones(2, 4).numpy().tobytes()
    assert not upper.any()
    assert bool((lower[2:] == 1).all())


@pytest.mark.parametrize("part", (WHOLE, Box((1, 1), (5, 3))))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_read_only_memory_of_a_store_is_copied_out_of(dtype: torch.dtype, part: Box) -> None:
    local, saved = torch.zeros(6, 4, dtype=dtype), torch.randn(6, 4)
    target_of((WHOLE, local)).place(part, memoryview(saved.numpy().tobytes()), WHOLE)
    rows, columns = (slice(start, stop) for start, stop in zip(part.start, part.stop, strict=True))
    assert torch.equal(local[rows, columns], saved[rows, columns].to(dtype))
    assert int(local.count_nonzero()) == part.numel
