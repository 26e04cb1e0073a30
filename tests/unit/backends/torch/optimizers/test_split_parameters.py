"""Modules whose state-dict hooks store a parameter under other names: moments follow its regions, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast.errors import InvalidError

Split = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def rows(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(part.contiguous() for part in tensor.chunk(3))


def uneven(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.detach().split([8, 2, 2])


def columns(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.split([2, 1, 1], dim=1)


def copies(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As torchtitan's fused QKV: the heads of a group are together, so a part is a copy."""
    grouped = tensor.reshape(2, 3, 2, 4)
    return tuple(grouped[:, number].reshape(-1, 4) for number in range(3))


def incomplete(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (*tensor.chunk(3)[:2], tensor.detach()[4:8])


class Fused(nn.Module):
    """One weight, which is stored as three."""

    def __init__(self, split: Split = rows, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wqkv, self.out = nn.Linear(4, 12, bias=False), nn.Linear(12, 1)
        self.split = split
        self.seen: list[tuple[int, ...]] = []
        self.register_state_dict_post_hook(self.on_save)
        self.register_load_state_dict_pre_hook(self.on_load)

    @staticmethod
    def on_save(module: Any, state: dict[str, Any], prefix: str, _: object) -> None:
        weight = state.pop(f"{prefix}wqkv.weight")
        module.seen.append(id(weight))
        for name, part in zip("qkv", module.split(weight), strict=True):
            state[f"{prefix}w{name}.weight"] = part

    @staticmethod
    def on_load(module: Any, state: dict[str, Any], prefix: str, *_: object) -> None:
        dim = 1 if module.split is columns else 0
        parts = [state.pop(f"{prefix}w{name}.weight") for name in "qkv"]
        state[f"{prefix}wqkv.weight"] = torch.cat(parts, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.wqkv(x))


class Apart(nn.Module):
    """The same module with three weights."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wq, self.wk, self.wv = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.out = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.wq(x), self.wk(x), self.wv(x)], dim=1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, times: int) -> float:
    for _ in range(times):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).square().sum()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("split", [rows, uneven, columns])
@pytest.mark.parametrize("steps", [0, 3])
def test_moments_go_by_the_regions_of_the_parameter(tmp_path: Path, split: Split, steps: int) -> None:
    model = Fused(split)
    optimizer = adamw(model)
    advance(model, optimizer, steps) if steps else None
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer}, process_group=False)
    if steps:
        checkpoint = holdfast.open_checkpoint(tmp_path / "c")
        moments = optimizer.state[model.wqkv.weight]["exp_avg"]
        for name, part in zip("qkv", split(moments), strict=True):
            found = checkpoint.read(f"optimizer.state.w{name}.weight.exp_avg", framework="torch")
            assert torch.equal(found, part)  # type: ignore[arg-type]
    expected = advance(model, optimizer, 4)
    for stepped in (0, 2):
        fresh = Fused(split, seed=1)
        other = adamw(fresh)
        advance(fresh, other, stepped) if stepped else None
        report = holdfast.load(tmp_path / "c", {"model": fresh, "optimizer": other}, process_group=False)
        assert report.missing == report.unexpected == ()
        assert advance(fresh, other, 4) == expected
    assert {*model.seen} == {id(model.wqkv.weight)}, "a hook ran over something else than the parameter"


def test_a_fused_module_and_one_of_separate_weights_load_each_other(tmp_path: Path) -> None:
    model, apart = Fused(), Apart(seed=1)
    optimizer, other = adamw(model), adamw(apart)
    advance(model, optimizer, 3)
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer}, process_group=False)
    expected = advance(model, optimizer, 2)
    holdfast.load(tmp_path / "c", {"model": apart, "optimizer": other}, process_group=False)
    holdfast.save(tmp_path / "d", {"model": apart, "optimizer": other}, process_group=False)
    assert advance(apart, other, 2) == pytest.approx(expected, rel=1e-5)
    for source in ("c", "d"):
        third = Fused(seed=2)
        last = adamw(third)
        holdfast.load(tmp_path / source, {"model": third, "optimizer": last}, process_group=False)
        assert advance(third, last, 2) == expected


def test_state_by_number_fills_the_whole_parameter(tmp_path: Path) -> None:
    model = Fused()
    optimizer = adamw(model)
    advance(model, optimizer, 3)
    state = {"model": model, "optimizer": optimizer.state_dict()}
    holdfast.save(tmp_path / "c", state, process_group=False)
    expected = advance(model, optimizer, 2)
    fresh = Fused(seed=1)
    other = adamw(fresh)
    holdfast.load(tmp_path / "c", {"model": fresh, "optimizer": other}, process_group=False)
    assert advance(fresh, other, 2) == expected


def test_a_part_that_the_checkpoint_lacks_is_missing(tmp_path: Path) -> None:
    model = Fused()
    optimizer = adamw(model)
    advance(model, optimizer, 1)
    lacking = "optimizer.state.wk.weight.exp_avg"
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer}, skip=lacking, process_group=False)
    fresh = Fused()
    with pytest.raises(InvalidError, match=r"1 missing from the checkpoint: optimizer\.state\.wk\.weight\.exp_avg"):
        holdfast.load(tmp_path / "c", {"model": fresh, "optimizer": adamw(fresh)}, process_group=False)
    other = adamw(fresh)
    holdfast.load(tmp_path / "c", {"model": fresh, "optimizer": other}, strict=False, process_group=False)
    moments = other.state[fresh.wqkv.weight]["exp_avg"]
    assert torch.equal(moments[:4], optimizer.state[model.wqkv.weight]["exp_avg"][:4])
    assert not moments[4:8].any()


@pytest.mark.parametrize("split", [copies, incomplete])
def test_entries_that_do_not_split_the_memory_are_refused_with_the_reason(tmp_path: Path, split: Split) -> None:
    model = Fused(split)
    optimizer = adamw(model)
    advance(model, optimizer, 1)
    expected = (
        r"optimizer: model\.wqkv\.weight is not in the module's state_dict\(\), in which a hook or method has "
        r"wq\.weight, wk\.weight, wv\.weight instead, copies or other views .*dict\(module\.named_parameters\(\)\)"
    )
    with pytest.raises(InvalidError, match=expected):
        holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer}, process_group=False)
    assert not (tmp_path / "c").exists()
    # The way out that the message names.
    parameters = {"model": dict(model.named_parameters()), "optimizer": optimizer}
    holdfast.save(tmp_path / "c", parameters, process_group=False)
    expected_loss = advance(model, optimizer, 2)
    fresh = Fused(split, seed=1)
    other = adamw(fresh)
    state = {"model": dict(fresh.named_parameters()), "optimizer": other}
    holdfast.load(tmp_path / "c", state, process_group=False)
    assert advance(fresh, other, 2) == expected_loss


def test_a_sharded_parameter_that_is_split_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Fused()
        weight = distribute_tensor(model.wqkv.weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])
        model.wqkv.weight = nn.Parameter(weight)
        with pytest.raises(InvalidError, match=r"wv\.weight instead, and the parameter is sharded"):
            holdfast.save(tmp_path / "c", {"model": model, "optimizer": adamw(model)})
    finally:
        dist.destroy_process_group()


def test_state_of_another_shape_than_the_parameter_is_refused(tmp_path: Path) -> None:
    model = Fused()
    optimizer = torch.optim.Adafactor(model.parameters())
    advance(model, optimizer, 1)
    with pytest.raises(InvalidError, match=r"optimizer\.state\.wq\.weight\.row_var: has shape .* hook of the module"):
        holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer}, process_group=False)


def test_state_in_a_container_of_a_split_parameter_is_refused(tmp_path: Path) -> None:
    model = Fused()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.wqkv.weight]["averages"] = [torch.zeros(12, 4)]
    with pytest.raises(InvalidError, match=r"optimizer\.state\.wq\.weight\.averages\.0: is in a container, .* splits"):
        holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer}, process_group=False)
    state = {"model": dict(model.named_parameters()), "optimizer": optimizer}
    holdfast.save(tmp_path / "c", state, process_group=False)
    holdfast.load(tmp_path / "c", state, process_group=False)
    assert [each.shape for each in optimizer.state[model.wqkv.weight]["averages"]] == [(12, 4)]


def test_a_gradient_of_a_split_parameter_is_refused(tmp_path: Path) -> None:
    model = Fused()
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(InvalidError, match=r"model\.wqkv\.weight\.grad: a state-dict hook stores this parameter"):
        holdfast.save(tmp_path / "c", {"model": model}, grads=True, process_group=False)
    holdfast.save(tmp_path / "c", {"model": model}, grads=True, skip="*.grad", process_group=False)


def test_two_modules_with_split_parameters(tmp_path: Path) -> None:
    left, right = Fused(), Fused(seed=1)
    optimizer = torch.optim.AdamW([*left.parameters(), *right.parameters()], lr=0.1)
    (left(torch.ones(1, 4)) + right(torch.ones(1, 4))).sum().backward()
    optimizer.step()
    state = {"left": left, "right": right, "optimizer": optimizer}
    holdfast.save(tmp_path / "c", state, process_group=False)
    expected = optimizer.state[right.wqkv.weight]["exp_avg"].clone()
    optimizer.state.clear()
    holdfast.load(tmp_path / "c", state, process_group=False)
    assert torch.equal(optimizer.state[right.wqkv.weight]["exp_avg"], expected)
