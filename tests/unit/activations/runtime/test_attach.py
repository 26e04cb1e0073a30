"""Attaching replaces the forward of instances alone; it comes off, copies and pickles as the plain module."""

from __future__ import annotations

import io
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from holdfast.activations.runtime.attach import AttachedUnits, attach, trace_units
from holdfast.activations.runtime.column_program import ColumnProgram
from holdfast.activations.runtime.frame import CallFrame, call_storing
from holdfast.activations.runtime.peak import peak_bytes
from holdfast.errors import InvalidError
from tests.unit.activations.runtime.random_units import column, keep_all, run_with

WIDTH, LENGTH = 32, 16


class Block(nn.Module):
    """A transformer block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.projected = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        rows, length, _ = x.shape
        heads = self.mixed(self.first(x)).view(rows, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        made = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.dropout(self.projected(made.transpose(1, 2).reshape(rows, length, WIDTH))) * scale
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.second(x)))))


class Gpt(nn.Module):
    """A language model of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = torch.arange(8 * LENGTH).reshape(8, LENGTH) % 50
NAMES = ["blocks.0", "blocks.1"]


def step(model: nn.Module) -> float:
    torch.manual_seed(4)
    loss = nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
    loss.backward()
    return loss.item()


def programs_of(model: nn.Module, *, recompute: bool = True) -> dict[str, ColumnProgram]:
    traced = deepcopy(model)
    traces = trace_units(traced, NAMES, lambda: step(traced))
    assert traces[NAMES[0]].fingerprint == traces[NAMES[1]].fingerprint
    return {
        name: ColumnProgram(trace, column({}, run_with(trace, set())) if recompute else keep_all(trace))
        for name, trace in traces.items()
    }


def attached(model: nn.Module, *, recompute: bool = True) -> AttachedUnits:
    return attach(model, programs_of(model, recompute=recompute))


def assert_equal_gradients(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_whole_recompute_of_a_gpt_equals_plain_with_a_lower_peak() -> None:
    plain, model = Gpt(), Gpt()
    units = attached(model)
    for each in (plain, model):  # Gradients exist before the window: the allocator reports no release of them.
        step(each)
        each.zero_grad(set_to_none=False)
    loss, plain_peak = peak_bytes(lambda: step(plain), torch.device("cpu"))
    mine, peak = peak_bytes(lambda: step(model), torch.device("cpu"))
    assert mine == loss
    assert_equal_gradients(model, plain)
    assert units.counts.planned == 4
    assert 0 < peak < 0.8 * plain_peak


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_peak_of_a_unit_is_measured_beside_a_step_that_stays_plain(dtype: torch.dtype | None) -> None:
    plain, model = Gpt(), Gpt()
    held = [id(each) for each in (*model.parameters(), *model.buffers())]

    def within() -> float:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            return step(model)

    traces = trace_units(model, NAMES[:1], within, error_bound=0.0)
    model.zero_grad()
    traces |= trace_units(model, NAMES[1:], within)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        step(plain)
    assert_equal_gradients(model, plain)
    assert [id(each) for each in (*model.parameters(), *model.buffers())] == held
    measured, estimated = (traces[name].profile((name,)) for name in NAMES)
    assert measured.fingerprint == estimated.fingerprint
    needed = sum(op.bytes for op in measured.ops[1:] if op.is_needed)
    for profile in (measured, estimated):
        assert needed < profile.recompute_workspace_bytes < 2 * needed


def test_kept_columns_install_nothing_in_the_call() -> None:
    plain, model = Gpt(), Gpt()
    attached(model, recompute=False)
    assert step(model) == step(plain)
    assert_equal_gradients(model, plain)


def test_store_only_with_all_kept_equals_plain() -> None:
    plain, model = Gpt(), Gpt()
    for name, program in programs_of(model, recompute=False).items():
        unit = model.get_submodule(name)
        forward = unit.forward

        def call(x: torch.Tensor, unit=unit, forward=forward, program=program, name=name) -> torch.Tensor:
            return call_storing(CallFrame(program, name, unit), forward, [x])

        unit.forward = call
    assert step(model) == step(plain)
    assert_equal_gradients(model, plain)


def test_the_number_of_a_device_is_no_part_of_a_fingerprint() -> None:
    model = Gpt()
    trace = trace_units(model, NAMES[:1], lambda: step(model))[NAMES[0]]

    def fingerprint_on(number: int) -> str:
        device = torch.device("cuda", number)
        saved = [replace(each, geometry=replace(each.geometry, device=device)) for each in trace.saved]
        return replace(trace, saved=tuple(saved)).fingerprint

    assert fingerprint_on(0) == fingerprint_on(1) != trace.fingerprint


def test_detach_restores_the_modules() -> None:
    model = Gpt()
    held = [dict(vars(each)) for each in model.modules()]
    keys = list(model.state_dict())
    units = attached(model)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == [name for name, _ in Gpt().named_modules()]
    assert type(model.blocks[0]) is Block
    with pytest.raises(InvalidError, match=r"blocks.0 is managed already"):
        attached(model)
    output = model(TOKENS)
    units.detach()
    units.detach()
    assert [dict(vars(each)) for each in model.modules()] == held
    assert model.blocks[0].forward.__func__ is Block.forward
    output.sum().backward()


def test_a_step_that_fails_leaves_no_trace() -> None:
    model = Gpt()

    def fails() -> None:
        step(model)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trace_units(model, NAMES, fails)
    assert "forward" not in vars(model.blocks[0])


def test_detach_restores_a_forward_of_the_instance() -> None:
    model = Gpt()
    own = model.blocks[0].forward = model.blocks[0].forward
    units = attached(model)
    step(model)
    assert units.counts.planned == 2
    assert torch.equal(deepcopy(model).eval()(TOKENS), deepcopy(model.eval())(TOKENS))
    units.detach()
    assert vars(model.blocks[0])["forward"] is own


@pytest.mark.parametrize("way", ["deepcopy", "save"])
def test_a_copy_is_a_plain_module_with_weights_of_its_own(way: str) -> None:
    model, plain = Gpt(), Gpt()
    units = attached(model)
    if way == "deepcopy":
        copied = deepcopy(model)
    else:
        stream = io.BytesIO()
        torch.save(model, stream)  # noqa: TID251 - users pickle whole modules
        stream.seek(0)
        copied = torch.load(stream, weights_only=False)  # noqa: TID251 - users pickle whole modules
    with torch.no_grad():
        for each in (copied, plain):
            each.blocks[0].up.weight.mul_(1.5)
    assert step(copied) == step(plain)
    assert_equal_gradients(copied, plain)
    assert units.counts.planned == 0
    again = deepcopy(copied)
    assert step(again) == step(plain)
    assert all(each.grad is None for each in model.parameters())


def test_a_copy_inside_the_unit_alone() -> None:
    model = Gpt()
    attached(model)
    copied = deepcopy(model.blocks[0])
    assert copied.forward.__self__ is copied


def test_other_signatures_are_recomputed_and_counted() -> None:
    model, plain = Gpt(), Gpt()
    units = attached(model)
    for each in (model, plain):
        torch.manual_seed(1)
        each(TOKENS[:3]).square().sum().backward()
    assert_equal_gradients(model, plain)
    assert (units.counts.planned, units.counts.other) == (0, 2)
    model.eval()
    model(TOKENS)
    assert units.counts.other == 4
    with torch.no_grad():
        model(TOKENS)
    assert units.counts.other == 4


def test_a_frozen_parameter_and_a_plain_argument_are_another_signature() -> None:
    model = Gpt()
    units = attached(model)
    x = torch.randn(8, LENGTH, WIDTH, requires_grad=True)
    model.blocks[0](x)
    model.blocks[0](x, 1.0)
    model.blocks[0](x, scale=1.0)
    assert (units.counts.planned, units.counts.other) == (1, 2)
    model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[0](x)
    with torch.autocast("cpu", torch.bfloat16):
        model.blocks[1](x)
    assert (units.counts.planned, units.counts.other) == (1, 4)
