"""Plain tensors with coordinates in one process: every place of a state, every verb."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.errors import InvalidError
from tests.support.located_tensors import Piece, carrying, part_of
from tests.support.tuning import tuned

WHOLE = torch.arange(40.0).reshape(8, 5)
SWAPPED: list[Piece] = [((4, 0), (0, 0), (4, 5)), ((0, 0), (5, 0), (4, 5))]
"""Both halves in the other order, with a row of padding between them."""
SHAPE = (9, 5)


def swapped(whole: torch.Tensor = WHOLE) -> torch.Tensor:
    return part_of(whole, SHAPE, SWAPPED)


def parameter(value: torch.Tensor | None = None) -> torch.nn.Parameter:
    local = torch.nn.Parameter(torch.zeros(SHAPE) if value is None else value.detach().clone())
    return carrying(local, WHOLE.shape, SWAPPED)


def adam(weight: torch.nn.Parameter, steps: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([weight])
    for number in range(steps):
        weight.grad = torch.full(SHAPE, 1.0 + number)
        optimizer.step()
    return optimizer


class Layer(torch.nn.Module):
    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("seen", carrying(torch.zeros(SHAPE), WHOLE.shape, SWAPPED))


def test_a_module_and_its_optimizer(tmp_path: Path) -> None:
    layer = Layer(parameter(swapped()))
    optimizer = adam(layer.weight, 2)
    holdfast.save(tmp_path / "c", {"model": layer, "optimizer": optimizer})
    stored = holdfast.open_checkpoint(tmp_path / "c")
    assert stored.tensors["optimizer.state.weight.exp_avg"].shape == (8, 5)
    assert np.array_equal(stored.read("model.weight")[4:], layer.weight.detach()[:4].numpy())
    fresh = Layer(parameter())
    again = torch.optim.AdamW([fresh.weight])
    holdfast.load(tmp_path / "c", {"model": fresh, "optimizer": again})
    kept, moments = optimizer.state[layer.weight], again.state[fresh.weight]
    for start, stop in ((0, 4), (5, 9)):
        assert torch.equal(fresh.weight[start:stop], layer.weight[start:stop])
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(moments[key][start:stop], kept[key][start:stop])
    assert not fresh.weight[4].any() and not moments["exp_avg"][4].any(), "padding is not filled, and new one is zero"
    assert moments["step"] == 2


def test_state_with_coordinates_of_its_own_keeps_them(tmp_path: Path) -> None:
    weight = parameter(swapped())
    optimizer = adam(weight, 1)
    other: list[Piece] = [((0, 0), (0, 0), (8, 5))]
    moment = optimizer.state[weight]["exp_avg"] = part_of(WHOLE + 100, SHAPE, other)
    holdfast.save(tmp_path / "c", {"w": weight, "optimizer": optimizer})
    stored = holdfast.open_checkpoint(tmp_path / "c")
    assert np.array_equal(stored.read("optimizer.state.w.exp_avg"), (WHOLE + 100).numpy())
    assert np.array_equal(stored.read("w"), torch.cat([weight.detach()[5:], weight.detach()[:4]]).numpy())
    optimizer.state[weight]["exp_avg"] = carrying(torch.zeros(SHAPE), WHOLE.shape, other)
    holdfast.load(tmp_path / "c", {"w": weight, "optimizer": optimizer})
    assert torch.equal(optimizer.state[weight]["exp_avg"][:8], moment[:8])


def test_gradients_follow_their_parameter(tmp_path: Path) -> None:
    weight = parameter(swapped())
    weight.grad = swapped(WHOLE * 2)
    holdfast.save(tmp_path / "c", {"w": weight}, grads=True)
    assert np.array_equal(holdfast.open_checkpoint(tmp_path / "c").read("w.grad"), (WHOLE * 2).numpy())
    fresh = parameter()
    holdfast.load(tmp_path / "c", {"w": fresh}, grads=True)
    assert fresh.grad is not None and torch.equal(fresh.grad[5:], WHOLE[:4] * 2)


class Buffer:
    """An object whose state is a list of tensors."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = list(tensors)

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state["tensors"]


def test_lists_and_objects(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"list": [swapped(), torch.ones(2)], "object": Buffer(swapped(WHOLE + 1))})
    listed, owned = carrying(torch.zeros(SHAPE), (8, 5), SWAPPED), carrying(torch.zeros(SHAPE), (8, 5), SWAPPED)
    state: dict[str, Any] = {"list": [listed, torch.zeros(2)], "object": Buffer(owned)}
    holdfast.load(tmp_path / "c", state)
    assert state["list"][0] is listed and torch.equal(listed[:4], WHOLE[4:]) and torch.equal(listed[5:], WHOLE[:4])
    assert state["object"].tensors[0] is owned and torch.equal(owned[5:], WHOLE[:4] + 1)


@pytest.mark.parametrize("local_shape", [(12, 5), (3, 4, 5)])
def test_rows_that_merge_dimensions(tmp_path: Path, local_shape: tuple[int, ...]) -> None:
    whole = torch.arange(60).reshape(3, 4, 5)
    local = whole.clone().reshape(local_shape)
    zeros = (0,) * len(local_shape)
    holdfast.save(tmp_path / "c", {"w": carrying(local, whole.shape, [((0, 0, 0), zeros, (3, 4, 5))])})
    plain, merged = torch.zeros_like(whole), torch.zeros(14, 5, dtype=torch.int64)
    carrying(merged, whole.shape, [((1, 0, 0), (1, 0), (2, 4, 5)), ((0, 2, 0), (9, 0), (1, 2, 5))])
    holdfast.load(tmp_path / "c", {"w": plain})
    assert torch.equal(plain, whole)
    holdfast.load(tmp_path / "c", {"w": merged})
    assert torch.equal(merged[1:9], whole[1:].reshape(8, 5)) and torch.equal(merged[9:11], whole[0, 2:])
    assert not merged[0].any() and not merged[11:].any()
    slanted = torch.zeros(5, 12, dtype=torch.int64).t()
    holdfast.load(tmp_path / "c", {"w": carrying(slanted, whole.shape, [((0, 0, 0), (0, 0), (3, 4, 5))])})
    assert torch.equal(slanted, whole.reshape(12, 5))


def test_columns_padding_and_odd_dtypes(tmp_path: Path) -> None:
    whole = torch.arange(48, dtype=torch.uint8).reshape(6, 8).view(torch.float8_e8m0fnu)
    columns: list[Piece] = [((0, 5), (1, 0), (6, 3)), ((0, 0), (1, 4), (6, 5))]
    local = torch.zeros(8, 10, dtype=torch.float8_e8m0fnu)
    for (_, at), (row, column), (rows, width) in columns:
        local[row : row + rows, column : column + width] = whole[:, at : at + width]
    holdfast.save(tmp_path / "c", {"w": carrying(local, (6, 8), columns)})
    found = holdfast.open_checkpoint(tmp_path / "c").read("w")
    assert np.array_equal(found, whole.view(torch.uint8).numpy())


def test_an_empty_tensor_and_one_of_no_dimension(tmp_path: Path) -> None:
    state = {
        "empty": carrying(torch.zeros(0, 3), (0, 3), []),
        "scalar": carrying(torch.tensor(2.5), (), [((), (), ())]),
    }
    holdfast.save(tmp_path / "c", state)
    fresh = {"empty": torch.zeros(0, 3), "scalar": carrying(torch.tensor(0.0), (), [((), (), ())])}
    report = holdfast.load(tmp_path / "c", fresh)
    assert fresh["scalar"] == 2.5 and report.missing == ()


def test_steps_share_what_did_not_change_and_lazy_staging_waits_for_the_step(tmp_path: Path) -> None:
    settings = tuned(holdfast.Settings(chunk_bytes=4096, staging="lazy"), unchanged_bytes_min=1)
    weight = parameter(swapped())
    optimizer = adam(weight, 1)
    state = {"w": weight, "optimizer": optimizer, "frozen": swapped()}
    before = weight.detach().clone()
    with holdfast.CheckpointManager(tmp_path / "run", settings=settings) as manager:
        first = manager.save(1, state)
        optimizer.step()
        first.wait()
        report = manager.save(2, state).wait()
        assert report.unchanged_bytes == WHOLE.nbytes
        manager.load(state, 1)
    assert torch.equal(weight[:4], before[:4]) and torch.equal(weight[5:], before[5:])


def test_exports_and_whole_reads(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"model": {"w": swapped()}})
    holdfast.export(tmp_path / "c", tmp_path / "hf", to="safetensors")
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["w"], WHOLE)
    assert torch.equal(holdfast.read(tmp_path / "c")["model"]["w"], WHOLE)


class Described(torch.Tensor):
    """A tensor that derives its coordinates."""

    global_shape = property(lambda self: (8, 5))
    global_offsets = property(lambda self: ((4, 0), (0, 0)))
    local_offsets = property(lambda self: ((0, 0), (5, 0)))
    local_sizes = property(lambda self: ((4, 5), (4, 5)))


def test_a_class_may_derive_the_attributes(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"w": swapped().as_subclass(Described)})
    assert np.array_equal(holdfast.open_checkpoint(tmp_path / "c").read("w"), WHOLE.numpy())


@pytest.mark.parametrize("absent", ["global_shape", "global_offsets", "local_offsets", "local_sizes"])
def test_a_part_of_the_attributes_is_refused(tmp_path: Path, absent: str) -> None:
    tensor = swapped()
    delattr(tensor, absent)
    for verb in (lambda: holdfast.save(tmp_path / "c", {"a": {"w": tensor}}),):
        with pytest.raises(InvalidError, match=rf"a\.w: carries .* without {absent}; expected all four") as refused:
            verb()
        assert "delete the others" in str(refused.value)
    assert not (tmp_path / "c").exists()


def test_a_shape_alone_is_no_coordinate(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    setattr(tensor, "global_shape", (3,))  # noqa: B010 - torch declares no such attribute
    holdfast.save(tmp_path / "c", {"w": tensor})
    assert holdfast.open_checkpoint(tmp_path / "c").tensors["w"].shape == (3,)


def test_a_declaration_by_hand_comes_first(tmp_path: Path) -> None:
    declared = holdfast.Sharded(swapped(), global_shape=SHAPE, start=(0, 0))
    holdfast.save(tmp_path / "c", {"w": declared})
    assert holdfast.open_checkpoint(tmp_path / "c").tensors["w"].shape == SHAPE


def test_wrong_coordinates_fill_nothing(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"v": torch.ones(3), "w": WHOLE})
    first = torch.zeros(3)
    overlapping: list[Piece] = [((4, 0), (0, 0), (4, 5)), ((0, 0), (3, 0), (4, 5))]
    for pieces, text in ((overlapping, "overlap"), ([((5, 0), (0, 0), (4, 5))], r"global_offsets\[0\]=\(5, 0\)")):
        target = carrying(torch.zeros(SHAPE), WHOLE.shape, pieces)
        with pytest.raises(InvalidError, match=rf"w: on rank 0: .*{text}"):
            holdfast.load(tmp_path / "c", {"v": first, "w": target})
        assert not target.any() and not first.any()


def test_another_whole_shape_is_refused_with_both(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"w": WHOLE})
    with pytest.raises(InvalidError, match=r"w: \(8, 6\) here and \(8, 5\) in the checkpoint"):
        holdfast.load(tmp_path / "c", {"w": carrying(torch.zeros(2, 6), (8, 6), [((0, 0), (0, 0), (2, 6))])})


def located(local: torch.Tensor, shape: object, local_offset: int, size: object = (4,)) -> torch.Tensor:
    """Return a tensor whose one box begins somewhere in it."""
    for name, value in {
        "global_shape": shape, "global_offsets": ((0,),), "local_offsets": ((local_offset,),), "local_sizes": (size,)
    }.items():  # fmt: skip
        setattr(local, name, value)
    return local


def test_names_that_view_one_buffer_keep_boxes_of_their_own(tmp_path: Path) -> None:
    bucket = torch.arange(8.0)
    state = {
        "first": located(bucket.view(8), (4,), 0),
        "second": located(bucket.view(8), (4,), 4),
        "tied": located(bucket.view(8), (4,), 4),
        "whole": located(bucket.view(8), (8,), 0, (8,)),
    }
    holdfast.save(tmp_path / "saved", state, process_group=False)
    found = holdfast.read(tmp_path / "saved")
    assert {name: value.tolist() for name, value in found.items()} == {  # type: ignore[attr-defined]
        "first": [0, 1, 2, 3], "second": [4, 5, 6, 7], "tied": [4, 5, 6, 7], "whole": list(range(8)),
    }  # fmt: skip
    assert dict(holdfast.open_checkpoint(tmp_path / "saved").manifest.aliases) == {"tied": "second"}
    bucket.zero_()
    holdfast.load(tmp_path / "saved", state, process_group=False)
    assert bucket.tolist() == list(range(8))


def test_coordinates_are_taken_once_they_are_corrected(tmp_path: Path) -> None:
    for number, wrong in enumerate([(4.0,), (True,), None]):
        with pytest.raises(InvalidError, match="expected integers"):
            holdfast.save(tmp_path / f"{number}", {"w": located(torch.ones(4), wrong, 0)}, process_group=False)
        right = (4,) if wrong != (True,) else (1,)
        size = right
        holdfast.save(tmp_path / f"{number}", {"w": located(torch.ones(4), right, 0, size)}, process_group=False)


def test_wrong_coordinates_of_a_parameter_are_refused_beside_its_optimizer(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    located(weight, None, 0)
    state = {"w": weight, "optimizer": torch.optim.SGD([weight], lr=0.1)}
    with pytest.raises(InvalidError, match="w: on rank 0: global_shape=None"):
        holdfast.save(tmp_path / "saved", state, process_group=False)
