"""Replays: what they give back, skip and run, and how they refuse."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from holdfast.activations.profile.unit_profile import UnitColumn
from holdfast.activations.runtime.attach import AttachedUnits, attach, trace_units
from holdfast.activations.runtime.column_program import ColumnProgram
from holdfast.activations.runtime.traced import UnitTrace
from holdfast.errors import InvalidError
from tests.unit.activations.runtime.random_units import column, keep_all, needed_by, packs, run_with

WIDTH = 8


class Unit(nn.Module):
    """A unit whose forward is a function."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.ModuleList(modules)

    def forward(self, x: torch.Tensor, *rest: Any, **named: Any) -> Any:
        return self.function(self, x, *rest, **named)


def trace_of(unit: nn.Module, *args: Any, **kwargs: Any) -> UnitTrace:
    model = nn.Sequential(deepcopy(unit))
    return trace_units(model, ["0"], lambda: model[0](*args, **kwargs))["0"]


def managed(unit: nn.Module, chosen: UnitColumn | None, *args: Any, **kwargs: Any) -> tuple[nn.Module, AttachedUnits]:
    """A copy of a unit under a column; whole recompute without one."""
    trace = trace_of(unit, *args, **kwargs)
    model = nn.Sequential(deepcopy(unit))
    program = ColumnProgram(trace, chosen or whole_recompute(trace), pack=packs(1, 0.0))
    return model, attach(model, {"0": program})


def whole_recompute(trace: UnitTrace) -> UnitColumn:
    return column({}, run_with(trace, set()))


def overload_numbers(trace: UnitTrace, name: str) -> list[int]:
    return [op.number for op in trace.ops if op.overload == name]


def gradients(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    call(x).square().sum().backward()
    return x.grad


def two_draws(x: torch.Tensor) -> torch.Tensor:
    first = torch.rand_like(x)
    y = x.sin() * first
    second = torch.rand_like(x)
    return y.cos() * second


def test_the_second_draw_is_the_forwards_where_the_first_is_stored() -> None:
    unit = Unit(lambda self, x: two_draws(x))
    x = torch.randn(4, WIDTH)
    trace = trace_of(unit, x.requires_grad_())
    first, second = overload_numbers(trace, "aten.rand_like.default")
    stored = {first}
    model, _ = managed(unit, column({first: "keep"}, run_with(trace, stored)), x)
    assert second in run_with(trace, stored)
    expected = gradients(two_draws, x.detach())
    assert torch.equal(gradients(model, x.detach()), expected)


def test_torchs_selective_checkpoint_draws_the_first_numbers_again() -> None:
    """The fault that a replay avoids, recorded by the version of torch: a later torch may mend it."""
    calls = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is torch.ops.aten.rand_like.default:
            calls.append(op)
            return CheckpointPolicy.MUST_SAVE if len(calls) == 1 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def call(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            two_draws, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )

    x = torch.randn(4, WIDTH)
    is_equal = torch.equal(gradients(call, x), gradients(two_draws, x))
    if torch.__version__.startswith("2.13"):
        assert not is_equal


def test_buffers_of_a_batch_norm_change_once_a_step() -> None:
    unit = Unit(lambda self, x: self.inner[0](x.tanh()).sin() * x, nn.BatchNorm1d(WIDTH))
    plain, x = deepcopy(unit), torch.randn(6, WIDTH)
    trace = trace_of(unit, x.clone().requires_grad_())
    (norm,) = overload_numbers(trace, "aten.native_batch_norm.default")
    assert trace.ops[norm].has_effect
    with pytest.raises(InvalidError, match="has an effect"):
        ColumnProgram(trace, whole_recompute(trace))
    model, _ = managed(unit, column({norm: "keep"}, run_with(trace, {norm})), x.clone().requires_grad_())
    for _ in range(3):
        assert torch.equal(gradients(model, x), gradients(plain, x))
    assert int(plain.inner[0].num_batches_tracked) == 3
    for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine._version == theirs._version


def mlp(self: Unit, x: torch.Tensor) -> torch.Tensor:
    return self.inner[1](functional.gelu(self.inner[0](x)))


def mlp_unit() -> Unit:
    torch.manual_seed(0)
    return Unit(mlp, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def test_a_changed_parameter_is_the_error_of_autograd() -> None:
    x = torch.randn(4, WIDTH)
    model, _ = managed(mlp_unit(), None, x.clone().requires_grad_())
    loss = model(x.clone().requires_grad_()).sum()
    with torch.no_grad():
        model[0].inner[0].bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_changed_kept_tensor_is_the_error_of_autograd() -> None:
    unit = Unit(lambda self, x: self.inner[0](x).exp(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(4, WIDTH)
    trace = trace_of(unit, x.clone().requires_grad_())
    (number,) = overload_numbers(trace, "aten.exp.default")
    assert trace.ops[number].is_storable
    other = needed_by(trace) - {number}
    model, _ = managed(unit, column({number: "keep"}, run_with(trace, {number}) | other), x.clone().requires_grad_())
    output = model(x.clone().requires_grad_())
    output.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_call_that_runs_other_ops_is_named() -> None:
    flag = {"uses_sine": True}
    unit = Unit(lambda self, x: (x.exp().sin() if flag["uses_sine"] else x.exp().cos()).tanh())
    x = torch.randn(4, WIDTH)
    model, _ = managed(unit, None, x.clone().requires_grad_())
    flag["uses_sine"] = False
    loss = model(x.clone().requires_grad_()).sum()
    with pytest.raises(InvalidError, match=r"unit 0: op 2 is aten.cos.default; expected aten.sin.default"):
        loss.backward()
    flag["uses_sine"] = True
    assert torch.equal(gradients(model, x), gradients(deepcopy(unit), x))


def test_a_call_that_saves_other_tensors_is_refused_in_forward() -> None:
    flag = {"more": False}
    unit = Unit(lambda self, x: x.exp().sin().exp() if flag["more"] else x.exp().sin())
    x = torch.randn(4, WIDTH)
    model, _ = managed(unit, None, x.clone().requires_grad_())
    flag["more"] = True
    with pytest.raises(InvalidError, match="autograd saved more than 2 tensors"):
        model(x.clone().requires_grad_())
    flag["more"] = False
    assert torch.equal(gradients(model, x), gradients(deepcopy(unit), x))


def test_of_a_column_that_leaves_out_what_backward_or_an_op_needs_more_runs() -> None:
    x = torch.randn(4, WIDTH)
    unit = Unit(lambda self, x: (x.exp() + 1).sin())
    exp = overload_numbers(trace_of(unit, x.clone().requires_grad_()), "aten.exp.default")[0]
    unread = Unit(lambda self, x: (x.sum(-1, keepdim=True) + 1).sin())
    add = overload_numbers(trace_of(unread, x.clone().requires_grad_()), "aten.add.Tensor")[0]
    for plain, chosen in ((unit, column({exp: "keep"}, set())), (unread, column({}, {add}))):
        model, _ = managed(deepcopy(plain), chosen, x.clone().requires_grad_())
        assert torch.equal(gradients(model, x), gradients(plain, x))


@pytest.mark.parametrize("stored", ["aten.addmm.default", "aten.exp.default", "aten.sin.default"])
def test_memory_goes_with_the_graph(stored: str) -> None:
    """No cycle holds what a call stores or a replay makes: neither after a backward, nor where none runs."""
    seen: list[weakref.ref[torch.Tensor]] = []

    def noted(made: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(made))
        return made

    def forward(self: Unit, x: torch.Tensor) -> torch.Tensor:
        made = noted(noted(self.inner[0](x)).exp())
        return self.inner[1](noted(made.sin()).exp()).sin()

    x = torch.randn(4, WIDTH)
    unit = Unit(forward, *mlp_unit().inner)
    trace = trace_of(unit, x.clone().requires_grad_())
    kept = set(overload_numbers(trace, stored)[:1])
    model, _ = managed(unit, column(dict.fromkeys(kept, "keep"), run_with(trace, kept)), x.clone().requires_grad_())
    seen.clear()
    gc.collect()
    gc.disable()
    try:
        model(x.clone().requires_grad_()).sum().backward()
        model(x.clone().requires_grad_()).sum()
        assert len(seen) >= 8
        assert all(each() is None for each in seen)
    finally:
        gc.enable()


def test_an_error_in_forward_leaves_no_hooks() -> None:
    flag = {"fails": False}

    def fails(self: Unit, x: torch.Tensor) -> torch.Tensor:
        made = x.exp()
        if flag["fails"]:
            raise ValueError("of the user")
        return made.sin()

    x = torch.randn(4, WIDTH)
    model, _ = managed(Unit(fails), None, x.clone().requires_grad_())
    flag["fails"] = True
    with pytest.raises(ValueError, match="of the user"):
        model(x.clone().requires_grad_())
    flag["fails"] = False
    y = x.clone().requires_grad_()
    y.exp().sum().backward()
    assert torch.equal(y.grad, x.exp())
    assert torch.equal(gradients(model, x), gradients(Unit(fails), x))


def test_released_tensors_are_run_again_for_another_part_of_the_graph() -> None:
    def two(self: Unit, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.inner[0](x)
        return made.tanh().exp(), made.sin().exp()

    x = torch.randn(4, WIDTH)
    unit = Unit(two, nn.Linear(WIDTH, WIDTH))
    trace = trace_of(unit, x.clone().requires_grad_())
    (tanh,) = overload_numbers(trace, "aten.tanh.default")
    model, _ = managed(unit, column({tanh: "keep"}, run_with(trace, {tanh})), x.clone().requires_grad_())

    def step(called: nn.Module) -> list[torch.Tensor]:
        y = x.clone().requires_grad_()
        first, second = called(y)
        made = list(torch.autograd.grad(first.sum(), y, retain_graph=True))
        return [*made, *torch.autograd.grad(second.sum(), y, retain_graph=True), *torch.autograd.grad(first.sum(), y)]

    for mine, theirs in zip(step(model), step(deepcopy(unit)), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("overflow", [0.0, 0.5, 1.0])
def test_packs_that_overflow_are_run_again(overflow: float) -> None:
    torch.manual_seed(0)
    unit = Unit(lambda self, x: functional.dropout(mlp(self, functional.dropout(x, 0.2)), 0.3), *mlp_unit().inner)
    x = torch.randn(64, WIDTH)
    trace = trace_of(unit, x.clone().requires_grad_())
    chosen = column(dict.fromkeys(needed_by(trace), "copy"), set())
    model = nn.Sequential(deepcopy(unit))
    attached = attach(model, {"0": ColumnProgram(trace, chosen, pack=packs(5, overflow))})
    for _ in range(4):
        assert torch.equal(gradients(model, x), gradients(unit, x))
    assert (attached.counts.overflows > 0) == (overflow > 0)
    assert attached.counts.overflows <= 4 * len(needed_by(trace))


def test_masks_as_bits_need_no_replay() -> None:
    unit = Unit(lambda self, x: torch.where(x > 0, x.exp(), x.sin()))
    x = torch.randn(64, WIDTH)
    trace = trace_of(unit, x.clone().requires_grad_())
    (mask,) = overload_numbers(trace, "aten.gt.Scalar")
    chosen = column({each: "bits" if each == mask else "keep" for each in needed_by(trace)}, set())
    program = ColumnProgram(trace, chosen, pack=packs(1, 0.0))
    assert not program.is_replayed
    model = nn.Sequential(deepcopy(unit))
    attach(model, {"0": program})
    assert torch.equal(gradients(model, x), gradients(unit, x))


def test_a_checkpoint_around_managed_units() -> None:
    x = torch.randn(4, WIDTH)
    model, _ = managed(mlp_unit(), None, x.clone().requires_grad_())
    found = gradients(lambda y: checkpoint(lambda z: model(z.sin()), y, use_reentrant=False), x)
    assert torch.equal(found, gradients(lambda y: mlp_unit()(y.sin()), x))


def test_what_no_replay_can_repeat_is_said() -> None:
    x = torch.randn(4, WIDTH).requires_grad_()

    class Cache:
        pass

    def keeps(self: Unit, y: torch.Tensor) -> torch.Tensor:
        self.last = y.detach()
        return y.exp()

    def in_place(self: Unit, y: torch.Tensor) -> torch.Tensor:
        return y.exp().mul(2), y.detach().add_(1)

    def unseen_kernel(self: Unit, y: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(y)
        # A kernel that is called without torch would write here.
        return y.exp() * made

    reasons = {
        "argument 1": trace_of(Unit(lambda self, y, cache: y.exp()), x, Cache()),
        "attribute": trace_of(Unit(keeps), x),
        "numpy": trace_of(Unit(lambda self, y: y.exp() * float(y.detach().numpy().sum())), x),
        "tolist": trace_of(Unit(lambda self, y: y.exp() * y.detach().tolist()[0][0]), x),
        "shape of": trace_of(Unit(lambda self, y: y[y > 0].exp()), x),
        "Python's random": trace_of(Unit(lambda self, y: y.exp() * random.random()), x),
        "in place": trace_of(Unit(in_place), x),
        "memory of op": trace_of(Unit(unseen_kernel), x),
        "draws of": trace_of(Unit(lambda self, y: y.exp() * torch.poisson(y.detach().abs())), x),
    }
    for words, trace in reasons.items():
        assert words in trace.why_not
        assert not trace.profile(("0",)).is_replayable
        ColumnProgram(trace, keep_all(trace))
    hooked = mlp_unit()
    hooked.inner[0].register_forward_hook(lambda *_: None)
    assert "hooks" in trace_of(hooked, x).why_not


def test_units_that_a_plan_cannot_manage_are_said() -> None:
    x = torch.randn(4, WIDTH).requires_grad_()
    checkpoints = trace_of(Unit(lambda self, y: checkpoint(torch.sin, y.exp(), use_reentrant=False)), x)
    assert "activation checkpointing" in checkpoints.refused
    backward = trace_of(Unit(lambda self, y: torch.autograd.grad(y.exp().sum(), y, create_graph=True)[0]), x)
    assert "backward inside the forward" in backward.refused
    with pytest.raises(InvalidError, match="backward inside the forward"):
        ColumnProgram(backward, keep_all(backward))


def test_a_tensor_of_a_closure_is_not_read_again() -> None:
    outside = torch.randn(WIDTH)
    unit = Unit(lambda self, y: (y.exp() * outside).sin())
    trace = trace_of(unit, torch.randn(4, WIDTH).requires_grad_())
    (product,) = overload_numbers(trace, "aten.mul.Tensor")
    assert trace.ops[product].has_effect
    assert not trace.why_not
