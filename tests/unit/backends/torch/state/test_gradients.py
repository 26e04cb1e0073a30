"""Gradients: a run saved in the middle of accumulation goes on as if nothing had happened, or is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import InvalidError


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def training(seed: int) -> tuple[nn.Sequential, torch.optim.Optimizer, dict[str, object]]:
    model = net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, {"model": model, "optimizer": optimizer}


def micro_batch(model: nn.Module, number: int) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
    (model(x).square().mean() / 2).backward()


def test_a_run_saved_between_two_micro_batches_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer, state = training(1)
    micro_batch(model, 1)
    report = holdfast.save(tmp_path / "c", state, grads=True)
    assert report.tensors == 4 + 4
    micro_batch(model, 2)
    optimizer.step()

    resumed, resumed_optimizer, state = training(2)
    holdfast.load(tmp_path / "c", state, grads=True)
    micro_batch(resumed, 2)
    resumed_optimizer.step()
    for own, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(own, other)


def test_gradients_go_by_the_names_of_their_parameters(tmp_path: Path) -> None:
    model, _, state = training(1)
    micro_batch(model, 1)
    holdfast.save(tmp_path / "c", state, grads=True)
    checkpoint = holdfast.open_checkpoint(tmp_path / "c")
    grad = model[0].weight.grad
    assert grad is not None
    assert torch.equal(checkpoint.read("model.0.weight.grad", framework="torch"), grad)  # type: ignore[arg-type]
    assert sum(name.endswith(".grad") for name in checkpoint.tensors) == 4


def test_a_parameter_without_a_gradient_ends_without_one(tmp_path: Path) -> None:
    model, _, state = training(1)
    micro_batch(model, 1)
    model[0].bias.grad = None
    holdfast.save(tmp_path / "c", state, grads=True)
    other, _, state = training(2)
    micro_batch(other, 7)
    kept = other[0].weight.grad
    report = holdfast.load(tmp_path / "c", state, grads=True)
    assert other[0].bias.grad is None
    assert other[0].weight.grad is kept, "what is there is filled in place"
    assert kept is not None and torch.equal(kept, model[0].weight.grad)  # type: ignore[arg-type]
    assert report.missing == report.unexpected == ()

    plain, _, state = training(3)
    holdfast.save(tmp_path / "none", state)
    micro_batch(plain, 1)
    holdfast.load(tmp_path / "none", state, grads=True)
    assert all(each.grad is None for each in plain.parameters())


def test_gradients_that_nobody_asked_for_are_unexpected(tmp_path: Path) -> None:
    model, _, state = training(1)
    micro_batch(model, 1)
    holdfast.save(tmp_path / "c", state, grads=True)
    other, _, state = training(2)
    with pytest.raises(InvalidError, match=r"4 unexpected.*model\.0\.bias\.grad.*pass grads=True.*skip='\*\.grad'"):
        holdfast.load(tmp_path / "c", state)
    holdfast.load(tmp_path / "c", state, skip="*.grad")
    holdfast.load(tmp_path / "c", state, strict=False)
    assert all(each.grad is None for each in other.parameters())
    assert torch.equal(other[0].weight, model[0].weight)


def test_skip_leaves_a_gradient_as_it_is(tmp_path: Path) -> None:
    model, _, state = training(1)
    micro_batch(model, 1)
    report = holdfast.save(tmp_path / "c", state, grads=True, skip="model.2.*.grad")
    assert set(report.skipped) == {"model.2.weight.grad", "model.2.bias.grad"}
    other, _, state = training(2)
    micro_batch(other, 9)
    before = other[0].weight.grad.clone()  # type: ignore[union-attr]
    holdfast.load(tmp_path / "c", state, grads=True, skip=["model.0.weight.grad", "model.2.weight.grad"])
    assert torch.equal(other[0].weight.grad, before)  # type: ignore[arg-type]
    assert torch.equal(other[0].bias.grad, model[0].bias.grad)  # type: ignore[arg-type]
    assert other[2].weight.grad is not None and other[2].bias.grad is None


def test_a_tied_parameter_has_one_gradient(tmp_path: Path) -> None:
    def tied(seed: int) -> nn.ModuleDict:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["embed"].weight  # type: ignore[assignment]
        return model

    model = tied(1)
    model["head"](model["embed"](torch.arange(5))).sum().backward()
    holdfast.save(tmp_path / "c", {"model": model}, grads=True)
    assert sorted(holdfast.open_checkpoint(tmp_path / "c").tensors) == ["model.embed.weight", "model.embed.weight.grad"]
    other = tied(2)
    holdfast.load(tmp_path / "c", {"model": other}, grads=True)
    assert torch.equal(other["head"].weight.grad, model["embed"].weight.grad)  # type: ignore[arg-type]


def test_tensors_of_a_dict_and_declared_ones_have_gradients_too(tmp_path: Path) -> None:
    def state(fill: float) -> dict[str, object]:
        loose, whole = (torch.full((2, 3), fill, requires_grad=True) for _ in range(2))
        declared = holdfast.Sharded(whole, (2, 3), start=(0, 0))
        return {"weights": {"loose": loose, "declared": declared, "mask": torch.ones(2)}}

    def tensors(state: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor]:
        return state["weights"]["loose"], state["weights"]["declared"].tensor  # type: ignore[index, attr-defined]

    saved, loaded = state(1.0), state(0.0)
    loose, declared = tensors(saved)
    (loose * 2 + declared * torch.arange(3.0)).sum().backward()
    holdfast.save(tmp_path / "c", saved, grads=True)
    holdfast.load(tmp_path / "c", loaded, grads=True)
    for own, other in zip(tensors(saved), tensors(loaded), strict=True):
        assert torch.equal(own.grad, other.grad)  # type: ignore[arg-type]


def test_a_sparse_gradient_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(InvalidError, match=r"model\.weight\.grad: torch\.sparse_coo"):
        holdfast.save(tmp_path / "c", {"model": model}, grads=True)
    holdfast.save(tmp_path / "c", {"model": model}, grads=True, skip="*.grad")


def test_accelerate_says_when_it_accumulates(tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(net(1), torch.optim.AdamW(net(1).parameters()))
    optimizer.optimizer.param_groups[0]["params"] = list(model.parameters())
    state = {"model": model, "optimizer": optimizer}

    def micro(number: int) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 3), float(number))).sum())
            optimizer.step()
            optimizer.zero_grad()

    holdfast.save(tmp_path / "begin", state)
    micro(1)
    with pytest.raises(InvalidError, match=r"optimizer: AcceleratedOptimizer .* accumulation.*grads=True"):
        holdfast.save(tmp_path / "middle", state)
    holdfast.save(tmp_path / "middle", state, grads=True)
    micro(2)
    holdfast.save(tmp_path / "end", state)
    assert not any(".grad" in name for name in holdfast.open_checkpoint(tmp_path / "end").tensors)
    holdfast.load(tmp_path / "middle", state, grads=True)
    assert all(each.grad is not None for each in model.parameters())


def test_a_parameter_that_is_frozen_for_the_moment_keeps_its_gradient(tmp_path: Path) -> None:
    model, _, state = training(1)
    micro_batch(model, 1)
    model.requires_grad_(False)
    holdfast.save(tmp_path / "c", state, grads=True)
    other, _, state = training(2)
    other.requires_grad_(False)
    micro = other[0].weight
    micro.grad = torch.ones_like(micro)
    holdfast.load(tmp_path / "c", state, grads=True)
    for own, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(own.grad, loaded.grad)  # type: ignore[arg-type]


def test_gradients_that_have_no_name_are_refused(tmp_path: Path) -> None:
    loose = torch.ones(2, requires_grad=True)
    loose.sum().backward()
    with pytest.raises(InvalidError, match=r"params\.0\.grad: the gradient of a tensor in a list"):
        holdfast.save(tmp_path / "c", {"params": [loose]}, grads=True)
    holdfast.save(tmp_path / "c", {"params": [loose]}, grads=True, skip="*.grad")
    other = torch.ones(2, requires_grad=True)
    declared = holdfast.Sharded([other, loose], (4,), [(0,), (2,)])
    with pytest.raises(InvalidError, match=r"w\.grad: .*declared by hand"):
        holdfast.save(tmp_path / "d", {"w": declared}, grads=True)


def test_a_declared_parameter_of_no_dimension_has_a_gradient(tmp_path: Path) -> None:
    def state() -> tuple[torch.Tensor, dict[str, object]]:
        whole = torch.tensor(2.0, requires_grad=True)
        return whole, {"w": holdfast.Sharded(whole, (), start=())}

    whole, saved = state()
    (whole * 3).backward()
    holdfast.save(tmp_path / "c", saved, grads=True)
    whole, loaded = state()
    holdfast.load(tmp_path / "c", loaded, grads=True)
    assert whole.grad == 3.0


def test_gradients_of_a_dtype_of_their_own(tmp_path: Path) -> None:
    def parameter() -> nn.Parameter:
        made = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        made.grad_dtype = torch.float32
        return made

    saved, loaded = parameter(), parameter()
    saved.grad = torch.tensor([1e-8, 1.0, 2.0])
    holdfast.save(tmp_path / "c", {"w": saved}, grads=True)
    holdfast.load(tmp_path / "c", {"w": loaded}, grads=True)
    assert loaded.grad is not None and torch.equal(loaded.grad, saved.grad)
    plain = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(InvalidError, match=r"w\.grad \(float32 saved, bfloat16 wanted\)"):
        holdfast.load(tmp_path / "c", {"w": plain}, grads=True)
    holdfast.load(tmp_path / "c", {"w": plain}, grads=True, cast=True)
    assert plain.grad is not None and plain.grad.dtype == torch.bfloat16


class Accumulating(torch.optim.SGD):
    """Says what Accelerate's optimizers say between two micro-batches."""

    class _Says:
        sync_gradients = False

    gradient_state = _Says()


def test_what_is_left_out_may_accumulate(tmp_path: Path) -> None:
    model = net(1)
    state = {"model": model, "optimizer": Accumulating(model.parameters()), "epoch": 1}
    micro_batch(model, 1)
    with pytest.raises(InvalidError, match=r"optimizer: Accumulating .*skip='\*\.grad'"):
        holdfast.save(tmp_path / "c", state)
    holdfast.save(tmp_path / "c", state, skip="*.grad")
    holdfast.save(tmp_path / "d", state, only="epoch")


def test_a_parameter_called_grad_is_no_gradient(tmp_path: Path) -> None:
    model = nn.Module()
    model.inner = nn.Module()
    model.inner.grad = nn.Parameter(torch.ones(2))
    holdfast.save(tmp_path / "c", {"model": model})
    with pytest.raises(InvalidError, match=r"unexpected.*model\.inner\.grad.*strict=False"):
        holdfast.load(tmp_path / "c", {"model": nn.Module()})
