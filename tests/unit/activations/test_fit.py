"""A model is fitted into a budget: the peak is within the budget, and each gradient is the plain one to the bit."""

from __future__ import annotations

import os
import random
import re
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast.activations as activations
from holdfast.activations.plan import bytes_of
from holdfast.activations.runtime.peak import peak_bytes
from holdfast.activations.solve.master import least_peak
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
    assert "blocks.0" in plan.explain() and "measured by the fit: peak " in plan.explain()


def test_training_under_a_plan_equals_plain_training_to_the_bit(
    fitted: tuple[Network, activations.ActivationPlan], tmp_path: Path
) -> None:
    _, plan = fitted
    plan.save(tmp_path / "plan.json")
    loaded = activations.load_plan(tmp_path / "plan.json")
    assert loaded.measured_peak_bytes == plan.measured_peak_bytes and loaded.summary().curve
    found = []
    for is_planned in (False, True):
        model = Network()
        optimizer = torch.optim.AdamW(model.parameters())
        managed = loaded.apply(model) if is_planned else None
        torch.manual_seed(5)
        for _ in range(3):
            optimizer.zero_grad()
            step_of(model)()
            optimizer.step()
        found.append([*bits(model), *(each.clone() for each in model.parameters())])
        if managed is not None:
            report = managed.report()
            assert f"{3 * BLOCKS} calls as planned, 0 of other signatures, 0 overflows" in report
            for fact in (
                "predicted peak ",
                "measured by the fit: peak ",
                " run again; ",
                "outside: ",
                "optimizer",
            ):
                assert fact in report
            model.zero_grad()
            _, peak = peak_bytes(step_of(model), CPU)
            assert peak <= plan.solved.budget_bytes
            managed.detach()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_the_budget_of_plain_training_is_never_refused() -> None:
    """Where gradients are most of a step, a prediction may be above the measured peak."""
    model = Network()
    few = ROWS[:32]

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(few).square().mean()
        loss.backward()
        return loss

    plan = activations.fit(model, step, budget="100%")
    assert plan.measured_peak_bytes <= plan.solved.budget_bytes == plan.solved.profile.keep_all_peak_bytes


def test_weights_that_autocast_casts_count_where_a_unit_runs_plain() -> None:
    """A replay casts the weights again; plain units hold the casts until backward."""
    model = Network()

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = model(ROWS).float().square().mean()
        loss.backward()
        return loss

    plan = activations.fit(model, step, budget="70%")
    (unit,) = plan.solved.profile.classes
    assert unit.cast_bytes == 2 * (model.blocks[0].up.weight.numel() + model.blocks[0].down.weight.numel())
    assert plan.measured_peak_bytes <= plan.solved.budget_bytes
    # The gradients are a fifth of this small step, and all those of a unit count at once.
    assert abs(plan.solved.predicted_peak_bytes / plan.measured_peak_bytes - 1) < 0.06


def test_a_terminal_shows_the_progress_of_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pseudo-terminal gets the number of each step on one line; a file gets nothing."""
    reader, writer = os.openpty()
    with open(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        activations.fit(model := Network(2), step_of(model), budget="90%")
        shown = ""
        # The kernel passes bytes on behind the write: one read may get a part of them.
        while not shown.endswith("\r\n") and select.select([reader], [], [], 10.0)[0]:
            shown += os.read(reader, 1 << 16).decode()
    assert "\rholdfast: fit: step 1 of about 25\rholdfast: fit: step 2" in shown and shown.endswith("\r\n")


def test_another_budget_needs_no_model(fitted: tuple[Network, activations.ActivationPlan]) -> None:
    _, plan = fitted
    # On a busy machine the plan itself may be near the least budget.
    least = least_peak(plan.solved.profile, plan.solved.columns).bytes
    larger, smaller = (
        plan.resolve(budget=budget) for budget in (plan.solved.profile.keep_all_peak_bytes, least * 103 // 100)
    )
    assert smaller.solved.predicted_peak_bytes < larger.solved.predicted_peak_bytes
    assert smaller.solved.predicted_slowdown >= larger.solved.predicted_slowdown
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


@pytest.mark.parametrize(("package", "extra"), [("torch", "torch"), ("scipy", "activations")])
def test_a_missing_package_is_named_before_anything_is_measured(package: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; from holdfast import InvalidError, activations\n"
        "try: activations.fit(None, None, budget='50%')\nexcept InvalidError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"activations.fit needs {package}; run: pip install 'holdfast[{extra}]'\n", done.stderr


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


def test_gradients_that_a_step_brings_are_no_new_memory() -> None:
    model = Network()
    gradients = {name: torch.zeros_like(each) for name, each in model.named_parameters()}

    def step() -> torch.Tensor:
        for name, each in model.named_parameters():
            each.grad = gradients[name].zero_()
        return step_of(model)()

    plan = activations.fit(model, step, budget="60%")
    assert plan.measured_peak_bytes <= 0.6 * plan.solved.profile.keep_all_peak_bytes
    assert plan.solved.profile.gradient_bytes == (0,) * BLOCKS


def test_a_norm_that_is_unfrozen_later_counts_each_step_once(
    fitted: tuple[Network, activations.ActivationPlan],
) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows + self.down(nn.functional.gelu(self.norm(self.up(rows))))

    torch.manual_seed(0)
    model = nn.Sequential(*[Normed() for _ in range(3)]).eval()
    plan = activations.fit(model, step_of(model), budget="70%")
    model.zero_grad()
    with plan.apply(model) as managed:
        step_of(model)()
        model.train()
        step_of(model)()
        assert "3 calls as planned, 3 of other signatures" in managed.report()
    assert [each.norm.num_batches_tracked.item() for each in model] == [1, 1, 1]  # type: ignore[union-attr, operator]


def test_a_call_with_gradients_in_eval_mode_does_not_keep_the_plan_from_training(
    fitted: tuple[Network, activations.ActivationPlan],
) -> None:
    _, plan = fitted
    model = Network()
    with plan.apply(model) as managed:
        model.eval()
        model(ROWS[:7])
        model.train()
        step_of(model)()
        assert f"{BLOCKS} calls as planned, {BLOCKS} of other signatures" in managed.report()


class Noting(Block):
    """A block that leaves a value in an attribute, in a meter or in an argument."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.notes, self.temperature = place, {"aux": torch.zeros(())}, 1.0

    def forward(self, rows: torch.Tensor, notes: dict[str, torch.Tensor]) -> torch.Tensor:
        out = super().forward(rows * self.temperature)
        if self.place != "nowhere":
            (notes if self.place == "argument" else self.notes)["aux"] = out.detach().abs().mean()
        return out


@pytest.mark.parametrize("place", ["attribute", "argument"])
def test_values_that_a_unit_leaves_are_those_of_the_plain_unit(place: str) -> None:
    found = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        blocks = nn.ModuleList(Noting(place) for _ in range(2))
        first, notes = nn.Linear(8, WIDTH), {"aux": torch.zeros(())}

        def step(first: nn.Module = first, blocks: nn.ModuleList = blocks, notes: Any = notes) -> torch.Tensor:
            rows = first(ROWS)
            for block in blocks:
                rows = block(rows, notes)
            loss: torch.Tensor = rows.square().mean()
            loss.backward()
            return loss

        model = nn.ModuleDict({"first": first, "blocks": blocks})
        torch.manual_seed(3)
        if is_planned:
            try:
                plan = activations.fit(model, step, budget="95%")
            except InvalidError as error:
                assert "argument" in str(error) or "expected at least" in str(error)
                return
            plan.apply(model)
        torch.manual_seed(3)
        step()
        found.append([notes["aux"], *(each.notes["aux"] for each in blocks)])  # type: ignore[union-attr, index]
    assert found[0] == found[1]


def test_an_attribute_that_changes_before_backward_is_an_error() -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Noting("nowhere") for _ in range(3))
    first = nn.Linear(8, WIDTH)
    model = nn.ModuleDict({"first": first, "blocks": blocks})

    def loss_of() -> torch.Tensor:
        rows = first(ROWS)
        for block in blocks:
            rows = block(rows, {})
        loss: torch.Tensor = rows.square().mean()
        return loss

    def step() -> torch.Tensor:
        loss = loss_of()
        loss.backward()
        return loss

    plan = activations.fit(model, step, budget="60%")
    with plan.apply(model):
        loss = loss_of()
        for block in blocks:
            block.temperature = 0.5  # type: ignore[assignment]
        with pytest.raises(InvalidError, match="changed since forward"):
            loss.backward()


def test_a_fit_restores_a_buffer_that_a_step_replaces() -> None:
    class Counting(Network):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return super().forward(rows)

    model = Counting()
    activations.fit(model, step_of(model), budget="80%")
    assert model.count.item() == 0


def test_a_process_group_needs_torch_distributed() -> None:
    model, group = Network(), dist.ProcessGroup(dist.HashStore(), 0, 1)
    with pytest.raises(InvalidError, match=r"torch\.distributed is not initialised"):
        activations.fit(model, step_of(model), budget="50%", process_group=group)
    with pytest.raises(InvalidError, match="process_group is int; expected None, False or a ProcessGroup"):
        activations.fit(model, step_of(model), budget="50%", process_group=3)


def test_arguments_of_other_types_are_refused() -> None:
    model = Network()
    bad: list[tuple[Any, ...]] = [(3, step_of(model), None), (model, None, None), (model, step_of(model), 5)]
    for other, step, units in bad:
        with pytest.raises(InvalidError, match="expected a"):
            activations.fit(other, step, budget="50%", units=units)
    assert bytes_of(10**400, 1) == bytes_of("9" * 400 + "B", 1) == 1 << 60
