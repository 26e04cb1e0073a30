"""A model is fitted into a budget: the peak is within the budget, and each gradient is the plain one to the bit."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast.activations as activations
from holdfast.activations.runtime.peak import peak_bytes
from holdfast.errors import InvalidError

WIDTH, BLOCKS = 64, 4
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.drop(self.down(nn.functional.gelu(self.up(self.norm(rows)))))


class Network(nn.Module):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.seen = nn.BatchNorm1d(WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.seen(self.first(rows))
        for block in self.blocks:
            rows = block(rows)
        out: torch.Tensor = self.last(rows)
        return out


ROWS = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))


def step_of(model: nn.Module) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        loss: torch.Tensor = model(ROWS).square().mean()
        loss.backward()
        return loss

    return step


def bits(model: nn.Module) -> list[Any]:
    grads = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    return [*grads, *(each.clone() for each in model.buffers()), torch.get_rng_state()]


@pytest.fixture(scope="module")
def fitted() -> tuple[Network, activations.ActivationPlan]:
    model = Network()
    return model, activations.fit(model, step_of(model), budget="60%")


def test_a_fit_stays_within_the_budget_and_changes_nothing(
    fitted: tuple[Network, activations.ActivationPlan],
) -> None:
    model, plan = fitted
    fresh = Network()
    assert all(torch.equal(one, other) for one, other in zip(model.buffers(), fresh.buffers(), strict=True))
    assert all(each.grad is None for each in model.parameters())
    assert all("forward" not in vars(each) for each in model.modules())
    assert 0 < plan.measured_peak_bytes <= 0.6 * plan.solved.profile.keep_all_peak_bytes
    assert abs(plan.solved.predicted_peak_bytes / plan.measured_peak_bytes - 1) < 0.05
    assert "blocks.0" in plan.explain() and "measured: " in plan.explain()


def test_training_under_a_plan_equals_plain_training_to_the_bit(
    fitted: tuple[Network, activations.ActivationPlan], tmp_path: Path
) -> None:
    _, plan = fitted
    plan.save(tmp_path / "plan.json")
    found = []
    for is_planned in (False, True):
        model = Network()
        optimizer = torch.optim.AdamW(model.parameters())
        managed = activations.load_plan(tmp_path / "plan.json").apply(model) if is_planned else None
        torch.manual_seed(5)
        for _ in range(3):
            optimizer.zero_grad()
            step_of(model)()
            optimizer.step()
        found.append([*bits(model), *(each.clone() for each in model.parameters())])
        if managed is not None:
            assert f"{3 * BLOCKS} calls as planned, 0 of other signatures" in managed.report()
            model.zero_grad()
            _, peak = peak_bytes(step_of(model), CPU)
            assert peak <= plan.solved.budget_bytes
            managed.detach()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_another_budget_needs_no_model(fitted: tuple[Network, activations.ActivationPlan]) -> None:
    _, plan = fitted
    smaller = plan.resolve(budget=plan.measured_peak_bytes * 9 // 10)
    assert smaller.solved.predicted_peak_bytes < plan.solved.predicted_peak_bytes
    assert smaller.solved.predicted_slowdown >= plan.solved.predicted_slowdown
    with pytest.raises(InvalidError, match="expected at least"):
        plan.resolve(budget=1000)


def test_a_plan_of_another_model_names_the_first_op_that_differs(
    fitted: tuple[Network, activations.ActivationPlan],
) -> None:
    _, plan = fitted
    model = Network()
    model.blocks[0].norm = nn.Identity()  # type: ignore[union-attr]
    with plan.apply(model), pytest.raises(InvalidError, match=r"unit blocks\.0: op 1 is aten\..*expected aten\."):
        step_of(model)()
    with pytest.raises(InvalidError, match=r"has no module blocks\.3"):
        plan.apply(Network(blocks=3))


@pytest.mark.parametrize("budget", [0, -1, 0.4, True, "much", "0%", "12", "1e3MiB"])
def test_a_budget_must_say_what_it_counts(budget: Any) -> None:
    model = Network()
    with pytest.raises(InvalidError, match="expected bytes as a whole number"):
        activations.fit(model, step_of(model), budget=budget)


def _other_batch(model: Network) -> torch.Tensor:
    loss: torch.Tensor = model(ROWS[random.randint(0, 100) :]).square().mean()
    loss.backward()
    return loss


def _steps(model: Network) -> torch.Tensor:
    loss = step_of(model)()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss


def _no_backward(model: Network) -> torch.Tensor:
    out: torch.Tensor = model(ROWS).mean()
    return out


def _no_loss(model: Network) -> Any:
    step_of(model)()


class _Unseeded:
    """Batches that no generator of the fit restores."""

    numbers = iter(range(1000))


def _next_batch(model: Network) -> torch.Tensor:
    loss: torch.Tensor = model(ROWS[next(_Unseeded.numbers) :]).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (_next_batch, "expected the same batch"),
        (_steps, "Step no optimizer"),
        (_no_backward, "left no gradient"),
        (_no_loss, "expected a finite loss"),
    ],
)
def test_a_step_that_cannot_be_measured_is_refused(step: Callable[[Network], Any], message: str) -> None:
    model = Network()
    with pytest.raises(InvalidError, match=message):
        activations.fit(model, lambda: step(model), budget="50%")
    assert all(each.grad is None for each in model.parameters())


def test_batches_drawn_from_restored_generators_are_the_same_batch() -> None:
    model = Network()
    assert activations.fit(model, lambda: _other_batch(model), budget="90%").measured_peak_bytes


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "activations.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/activations.md", "exec"), {"__name__": "page"})
    assert (tmp_path / "plan.json").is_file()


def test_units_are_named_or_found() -> None:
    model = Network()
    with pytest.raises(InvalidError, match="matches no module"):
        activations.fit(model, step_of(model), budget="50%", units=["layers.*"])
    with pytest.raises(InvalidError, match=r"blocks\.0\.norm is inside blocks\.0"):
        activations.fit(model, step_of(model), budget="50%", units=["blocks.*", "blocks.*.norm"])
    with pytest.raises(InvalidError, match="no ModuleList or Sequential of alike blocks"):
        activations.fit(nn.Linear(3, 3), lambda: torch.zeros(()), budget="50%")


def test_gradients_before_a_fit_are_refused() -> None:
    model = Network()
    step_of(model)()
    with pytest.raises(InvalidError, match="has a gradient; expected none"):
        activations.fit(model, step_of(model), budget="50%")
    with pytest.raises(InvalidError, match="is a DataParallel"):
        activations.fit(nn.DataParallel(Network()), step_of(model), budget="50%")
    with pytest.raises(InvalidError, match=r"error_bound=0\.1"):
        activations.fit(Network(), step_of(model), budget="50%", error_bound=0.1)
