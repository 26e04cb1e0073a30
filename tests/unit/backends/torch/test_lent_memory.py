"""Memory of the caller's tensors that a save or load reads or fills: it stays the caller's, and stays resizable."""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.backends.torch.containers import small_tensor
from holdfast.backends.torch.local_shards import LocalPart, bits_of, bytes_of
from holdfast.backends.torch.state.watched import watched_in
from holdfast.backends.torch.tensors import TorchSource
from holdfast.base.geometry.box import Box
from holdfast.base.types.per_rank import PerRank
from holdfast.errors import InvalidError
from tests.house.source import PACKAGE, tree_of

LARGE = (300, 100)
"""A shape whose bytes are neither joined with others nor sampled whole."""

OWN_ARRAYS = {"comm.py": 4, "tensors.py": 1}
"""How often a file of the room calls `numpy()`: on tensors that Holdfast has made for itself."""


def tensors() -> dict[str, torch.Tensor]:
    """Return a tensor of each kind of memory, most of them larger than what is joined with others."""
    return {
        "float32": torch.randn(LARGE),
        "bfloat16": torch.randn(LARGE).bfloat16(),
        "float8_e4m3fn": torch.randn(400, 200).to(torch.float8_e4m3fn),
        "bool": torch.randn(400, 200) > 0,
        "complex64": torch.randn(LARGE, dtype=torch.complex64),
        "complex128": torch.randn(LARGE, dtype=torch.complex128),
        "transposed": torch.randn(LARGE).t(),
        "every other column": torch.randn(300, 400)[:, ::2],
        "parameter": torch.nn.Parameter(torch.randn(LARGE)),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "shared": torch.randn(LARGE).share_memory_(),
        "of an array": torch.from_numpy(torch.randn(LARGE).numpy()),
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().flatten().view(torch.uint8)


def resizable(state: dict[str, torch.Tensor]) -> dict[str, bool]:
    return {name: tensor.untyped_storage().resizable() for name, tensor in state.items()}


def awaited(path: Path, state: dict[str, torch.Tensor]) -> None:
    holdfast.save(path, state, process_group=False)


def copied(path: Path, state: dict[str, torch.Tensor]) -> None:
    holdfast.async_save(path, state, process_group=False).wait()


def copied_lazily(path: Path, state: dict[str, torch.Tensor]) -> None:
    model = torch.nn.ParameterDict({"weight": state["parameter"]})
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[state["parameter"]] |= {name: each for name, each in state.items() if name != "parameter"}
    settings = holdfast.Settings(staging="lazy", verify_lazy_copy=True)
    whole = {"model": model, "optimizer": optimizer}
    report = holdfast.async_save(path, whole, process_group=False, settings=settings).wait()
    assert report is not None and report.staging == "lazy"


def compressed(path: Path, state: dict[str, torch.Tensor]) -> None:
    holdfast.save(path, state, process_group=False, settings=holdfast.Settings(compression="on"))


def watched_at_each_step(path: Path, state: dict[str, torch.Tensor]) -> None:
    whole = {**state, "own": PerRank({"counts": state["float32"]})}
    with holdfast.CheckpointManager(path, process_group=False) as manager:
        for step in (1, 2):
            manager.save(step, whole).wait()
        manager.load(whole)
        manager.save(2, whole).wait()


@pytest.mark.parametrize("save", (awaited, copied, copied_lazily, compressed, watched_at_each_step))
def test_a_save_leaves_memory_resizable(tmp_path: Path, save: Callable[[Path, dict[str, torch.Tensor]], None]) -> None:
    state = tensors()
    before, contents = resizable(state), {name: each.detach().clone() for name, each in state.items()}
    assert [name for name, can_grow in before.items() if not can_grow] == ["of an array"]
    save(tmp_path / "run", state)
    assert resizable(state) == before
    for name, each in state.items():
        assert torch.equal(bits(each), bits(contents[name])), name
    state["float32"].resize_(600, 100)
    state["bfloat16"].untyped_storage().resize_(0)


@pytest.mark.parametrize("cast", (False, True))
def test_a_load_leaves_memory_resizable(tmp_path: Path, cast: bool) -> None:
    saved, target = tensors(), tensors()
    holdfast.save(tmp_path / "c", saved, process_group=False)
    if cast:
        target["float32"] = torch.zeros(LARGE, dtype=torch.float64)
    before = resizable(target)
    holdfast.load(tmp_path / "c", target, process_group=False, cast=cast)
    assert resizable(target) == before
    assert torch.equal(target["float32"], saved["float32"].to(target["float32"].dtype))
    for name in target.keys() - {"float32"}:
        assert torch.equal(bits(target[name]), bits(saved[name])), name


def test_samples_small_values_and_digests_leave_memory_resizable() -> None:
    for name, tensor in tensors().items():
        before = tensor.untyped_storage().resizable()
        source = TorchSource([LocalPart(Box.whole(tuple(tensor.shape)), tensor.detach())], [tensor])
        for whole_bytes in (0, 1 << 20):
            source.sample(64, 1024, whole_bytes=whole_bytes, shift=0.5)
        small_tensor(name, tensor, tensor.numel())
        assert [*watched_in(PerRank(tensor), name)]
        assert tensor.untyped_storage().resizable() == before, name


def test_only_tensors_of_holdfast_itself_are_shown_to_numpy_by_torch() -> None:
    """`Tensor.numpy()` keeps a storage from being resized. `bits_of` and `bytes_of` do not."""
    found: dict[str, int] = {}
    for path in (PACKAGE / "backends" / "torch").rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr == "numpy":
                found[path.name] = found.get(path.name, 0) + 1
    assert found == OWN_ARRAYS


@pytest.mark.parametrize("lend", (lambda each: memoryview(bits_of(each)).cast("B"), bytes_of), ids=("bits", "bytes"))
def test_lent_memory_outlives_its_tensor(lend: Callable[[torch.Tensor], memoryview]) -> None:
    tensor = torch.arange(1 << 18, dtype=torch.int64)
    lent, expected = lend(tensor), tensor.numpy().tobytes()
    tensor.data = torch.zeros(1 << 18, dtype=torch.int64)
    del tensor
    gc.collect()
    others = [torch.zeros(1 << 18, dtype=torch.int64) for _ in range(4)]
    assert bytes(lent) == expected
    del others


def test_lent_memory_is_that_of_the_tensor() -> None:
    tensor = torch.zeros(4, 3, dtype=torch.int16)
    bytes_of(tensor[1])[2:4] = b"\x01\x02"
    bits_of(tensor.t()[2:, 1:])[:] = 7
    assert tensor.tolist() == [[0, 0, 0], [0, 0x0201, 7], [0, 0, 7], [0, 0, 7]]


@pytest.mark.parametrize("of", ("nothing", "a part"))
def test_memory_that_ends_before_the_tensor_is_not_read(of: str) -> None:
    tensor = torch.zeros(10, 4)[2:]
    tensor.untyped_storage().resize_(0 if of == "nothing" else 100)
    source = TorchSource([LocalPart(Box.whole((8, 4)), tensor)], [tensor])
    for read in (
        lambda: source.copy_into(Box.whole((8, 4)), 0, 128, memoryview(bytearray(128))),
        lambda: bits_of(tensor),
    ):
        with pytest.raises(InvalidError, match=r"ends at byte 160 of its storage, which has (0|100): its memory was"):
            read()
