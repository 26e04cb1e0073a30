"""A fit with packs: exact ones leave gradients equal to the bit, bounded ones are within the bound and the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import holdfast.activations as activations
from holdfast.activations.runtime import attach
from holdfast.activations.runtime.packings import pack
from holdfast.activations.runtime.peak import peak_bytes
from holdfast.errors import InvalidError

WIDTH, BLOCKS = 256, 6
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Slow(torch.autograd.Function):
    """A slow forward and a fast backward: to run again takes far longer than to pack, on any machine."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        made = torch.polygamma(2, rows + 9.0)
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (made,) = ctx.saved_tensors
        return gradient * made


class Gamma(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.gate = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.rand(WIDTH))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = Slow.apply(rows * self.scale)  # type: ignore[no-untyped-call]
        return rows + made * self.gate


class SlowDropout(torch.autograd.Function):
    """A mask that is slow to draw again."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        mask = torch.polygamma(2, torch.rand_like(rows) + 9.0) > -0.011
        ctx.save_for_backward(mask)
        return rows * mask

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (mask,) = ctx.saved_tensors
        return gradient * mask


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        dropped: torch.Tensor = SlowDropout.apply(rows * self.scale)  # type: ignore[no-untyped-call]
        return rows + dropped


def model_of(block: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[block() for _ in range(BLOCKS)])


def step_of(model: nn.Module, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        loss: torch.Tensor = model(rows.detach().requires_grad_()).square().mean()
        loss.backward()
        return loss

    return step


def rows_of(count: int = 128) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))


def actions_of(plan: activations.ActivationPlan) -> set[str]:
    columns = [plan.solved.column_of(unit) for unit in range(len(plan.solved.choice))]
    return {action for column in columns for _, action in column.store}


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize(("bound", "budget", "action"), [(0.02, "78%", "q8"), (0.25, "74%", "q4")])
def test_a_bounded_pack_saves_a_recomputation(
    bound: float, budget: str, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = model_of(Gamma), rows_of()
    step = step_of(model, rows)
    plan = activations.fit(model, step, budget=budget, error_bound=bound)
    solved = plan.solved
    assert action in actions_of(plan)
    assert plan.measured_peak_bytes <= solved.budget_bytes
    assert abs(solved.predicted_peak_bytes / plan.measured_peak_bytes - 1) < 0.02
    assert solved.is_measured and "(estimated)" not in plan.explain()
    assert 0 < plan.gradient_errors[""] < bound
    assert set(plan.gradient_errors) == {"", *(name for name, _ in model.named_parameters())}
    assert "relative error of the gradient" in plan.explain()

    worst: list[float] = []

    def checked(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        packed = pack(tensor, *args, **kwargs)
        if packed is not None:
            error = (packed.unpack().double() - tensor.double()).abs().max()
            worst.append(float(error / (bound * tensor.double().square().mean().sqrt())))
        return packed

    monkeypatch.setattr(attach, "pack", checked)
    expected = step().detach()
    plain = gradients_of(model)
    with plan.apply(model) as managed:
        model.zero_grad()
        assert torch.equal(step().detach(), expected)
        assert 0 < max(worst) < 1
        error = sum((one - other).square().sum() for one, other in zip(gradients_of(model), plain, strict=True))
        assert 0 < error.sqrt() < bound * sum(each.square().sum() for each in plain) ** 0.5  # type: ignore[union-attr]
        # No pack fits a step of NaN: all runs again, within the budget.
        rows.fill_(torch.nan)
        model.zero_grad()
        _, peak = peak_bytes(step, CPU)
        assert peak <= solved.budget_bytes
        assert ", 0 overflows" not in managed.report()
        overflowed = gradients_of(model)
    model.zero_grad()
    step()
    for one, other in zip(overflowed, gradients_of(model), strict=True):
        assert torch.equal(one.isnan(), other.isnan()) and one.isnan().any()


def test_without_a_bound_a_packed_mask_leaves_gradients_equal_to_the_bit() -> None:
    model, rows = model_of(Dropping), rows_of()
    step = step_of(model, rows)
    plan = activations.fit(model, step, budget="94%")
    assert actions_of(plan) & {"bits", "sparse"} and not plan.gradient_errors
    assert abs(plan.solved.predicted_peak_bytes / plan.measured_peak_bytes - 1) < 0.02
    found = []
    for managed in (None, plan.apply(model)):
        torch.manual_seed(3)
        model.zero_grad()
        step()
        found.append(gradients_of(model))
        assert managed is None or ", 0 overflows" in managed.report()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("bound", [-0.1, 1.5, float("nan"), float("inf"), True, "0.02", None])
def test_an_error_bound_is_a_number_from_0_to_1(bound: Any) -> None:
    model = model_of(Gamma)
    with pytest.raises(InvalidError, match=r"error_bound=.*expected a number from 0 .* such as 0\.02"):
        activations.fit(model, step_of(model, rows_of(8)), budget="50%", error_bound=bound)
