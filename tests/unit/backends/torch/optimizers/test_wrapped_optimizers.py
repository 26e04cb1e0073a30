"""Optimizers that hold others, and optimizers that keep state outside `state`: nothing of them is left out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import holdfast
from holdfast.errors import InvalidError
from tests.support.held_optimizers import HoldsOptimizers


class Container(HoldsOptimizers):
    """One optimizer for each parameter, under a name of its own."""

    held_in = "inner"

    def __init__(self, model: nn.Module) -> None:
        self.inner = [torch.optim.AdamW([parameter], lr=0.1) for parameter in model.parameters()]
        super().__init__(list(model.parameters()), {})

    def state_dict(self) -> dict[str, Any]:
        return {str(number): each.state_dict() for number, each in enumerate(self.inner)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for number, each in enumerate(self.inner):
            each.load_state_dict(state_dict[str(number)])


class TitanContainer(HoldsOptimizers):
    """As torchtitan's: its `state_dict` steps optimizers that have no state yet."""

    def __init__(self, model: nn.Module) -> None:
        self.model_parts = list(model.children())
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in self.model_parts]
        super().__init__(list(model.parameters()), {"lr": 0.1})

    def state_dict(self) -> dict[str, Any]:
        return self._flattened()

    def _flattened(self) -> dict[str, Any]:
        flat = partial(get_optimizer_state_dict, options=StateDictOptions(flatten_optimizer_state_dict=True))
        return {key: value for part in map(flat, self.model_parts, self.optimizers) for key, value in part.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        for part, each in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, each, state_dict, options=options)


class Sam(torch.optim.Optimizer):
    """As SAM is usually written: it shares the groups of the optimizer inside, and keeps state of its own."""

    def __init__(self, model: nn.Module, *, keeps_old: bool = False) -> None:
        super().__init__(model.parameters(), {"rho": 0.05, "lr": 0.1})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, lr=0.1)
        self.param_groups, self.keeps_old = self.base_optimizer.param_groups, keeps_old

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.base_optimizer.step()
        for parameter in self.param_groups[0]["params"] if self.keeps_old else ():
            # The update depends on it, so that a load without it goes on differently.
            old = self.state[parameter].get("old_p", torch.zeros_like(parameter))
            parameter.data.add_(old, alpha=0.01)
            self.state[parameter]["old_p"] = parameter.data.clone()


class Lookahead(torch.optim.Optimizer):
    """Slow weights and a count in attributes; `state` is shared with the optimizer inside."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer, self.count = torch.optim.AdamW(model.parameters(), lr=0.1), 0
        self.param_groups, self.defaults = self.optimizer.param_groups, self.optimizer.defaults
        self.state = self.optimizer.state
        self.slow = [[each.detach().clone() for each in group["params"]] for group in self.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.count += 1
        if self.count % 2 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for parameter, each in zip(group["params"], slow, strict=True):
                    each.add_(parameter.detach() - each, alpha=0.5)
                    parameter.data.copy_(each)

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.optimizer.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["base"])
        self.count = state_dict["count"]
        for own, saved in zip(self.slow, state_dict["slow"], strict=True):
            for into, each in zip(own, saved, strict=True):
                into.copy_(each)


class LookaheadByParameter(torch.optim.Optimizer):
    """Slow weights in its own `state`; the `state_dict` has parameters as keys, which nothing can store."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        super().__init__(model.parameters(), {"alpha": 0.5})
        self.param_groups = self.optimizer.param_groups
        for parameter in model.parameters():
            self.state[parameter]["slow_params"] = parameter.detach().clone()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for parameter, own in self.state.items():
            own["slow_params"].add_(parameter.detach() - own["slow_params"], alpha=0.5)
            parameter.data.copy_(own["slow_params"])

    def state_dict(self) -> dict[str, Any]:
        return {"lookahead_state": self.state, "base_optimizer": self.optimizer.state_dict()}


class Flat(torch.optim.Optimizer):
    """Keeps one flat buffer for all parameters, and holds no other optimizer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.buffers = torch.zeros(sum(each.numel() for each in model.parameters()))

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        self.buffers.mul_(0.9).add_(torch.cat([each.grad.flatten() for each in parameters]))
        for parameter, part in zip(parameters, self.buffers.split([each.numel() for each in parameters]), strict=True):
            parameter.data.sub_(part.view_as(parameter), alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "buffers": self.buffers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.buffers.copy_(state_dict["buffers"])


class SlowLookahead(Lookahead):
    """Its slow weights begin with the second step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.slow = []

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if self.count == 1:
            self.slow = [[each.detach().clone() for each in group["params"]] for group in self.param_groups]
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self.slow else self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.slow = [[torch.empty_like(each) for each in group] for group in state_dict["slow"]]
        super().load_state_dict(state_dict)


class Averaging(torch.optim.AdamW):
    """Keeps averages beside the whole state of each parameter, and holds no other optimizer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.averages = [each.detach().clone() for each in self.param_groups[0]["params"]]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for parameter, average in zip(self.param_groups[0]["params"], self.averages, strict=True):
            average.lerp_(parameter.detach(), 0.1)
            parameter.data.lerp_(average, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "averages": self.averages}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for own, saved in zip(self.averages, state_dict["averages"], strict=True):
            own.copy_(saved)
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


class Copying(torch.optim.AdamW):
    """Returns copies of its moments, and holds no other optimizer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)

    def state_dict(self) -> dict[str, Any]:
        stated = super().state_dict()
        state = {key: {name: each.clone() for name, each in own.items()} for key, own in stated["state"].items()}
        return {**stated, "state": state}


def accelerated(model: nn.Module) -> torch.optim.Optimizer:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    return AcceleratedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))


Build = Callable[[nn.Module], torch.optim.Optimizer]
BY_PARAMETER: dict[str, Build] = {
    "container": Container,
    "torchtitan": TitanContainer,
    "sam": Sam,
    "sam with state": partial(Sam, keeps_old=True),
    "lookahead by parameter": LookaheadByParameter,
    "accelerate": accelerated,
    "copies": Copying,
}
AS_OBJECT: dict[str, Build] = {"lookahead": Lookahead, "flat": Flat, "averages": Averaging}


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, times: int) -> float:
    for _ in range(times):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("name", [*BY_PARAMETER, *AS_OBJECT])
def test_a_resume_goes_on_as_if_uninterrupted(tmp_path: Path, name: str, steps: int) -> None:
    build = {**BY_PARAMETER, **AS_OBJECT}[name]
    model = net()
    optimizer = build(model)
    advance(model, optimizer, steps) if steps else None
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer}, process_group=False)
    expected = advance(model, optimizer, 5)
    fresh = net(seed=1)
    other = build(fresh)
    report = holdfast.load(tmp_path / "c", {"model": fresh, "optimizer": other}, process_group=False)
    assert report.missing == report.unexpected == ()
    assert advance(fresh, other, 5) == expected
    # Once more into the same objects, which have state now.
    holdfast.load(tmp_path / "c", {"model": fresh, "optimizer": other}, process_group=False)
    assert advance(fresh, other, 5) == expected


@pytest.mark.parametrize("name", BY_PARAMETER)
def test_state_inside_is_stored_by_parameter(tmp_path: Path, name: str) -> None:
    model = net()
    optimizer = BY_PARAMETER[name](model)
    advance(model, optimizer, 2)
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer}, process_group=False)
    assert "optimizer.state.1.weight.exp_avg" in holdfast.open_checkpoint(tmp_path / "c").tensors


def test_state_that_begins_with_a_later_step_is_saved(tmp_path: Path) -> None:
    model, fresh = net(), net(seed=1)
    optimizer, other = SlowLookahead(model), SlowLookahead(fresh)
    advance(model, optimizer, 1)
    holdfast.save(tmp_path / "before", {"model": model, "optimizer": optimizer}, process_group=False)
    advance(model, optimizer, 4)
    holdfast.save(tmp_path / "after", {"model": model, "optimizer": optimizer}, process_group=False)
    expected = advance(model, optimizer, 5)
    holdfast.load(tmp_path / "after", {"model": fresh, "optimizer": other}, process_group=False)
    assert advance(fresh, other, 5) == expected


def test_a_state_dict_is_called_alike_with_and_without_state(tmp_path: Path) -> None:
    # It may be a collective, and which parameters have state differs by rank.
    model, calls = net(), []

    class Counting(Copying):
        def state_dict(self) -> dict[str, Any]:
            calls.append(len(self.state))
            return super().state_dict()

    optimizer = Counting(model)
    for number, steps in enumerate((0, 1, 1)):
        advance(model, optimizer, steps) if steps else None
        holdfast.save(tmp_path / str(number), {"model": model, "optimizer": optimizer}, process_group=False)
    assert calls == [0, 4, 4]


def test_a_container_and_one_optimizer_load_each_other(tmp_path: Path) -> None:
    model, other = net(), net(seed=1)
    container, single = TitanContainer(model), torch.optim.AdamW(other.parameters(), lr=0.1)
    advance(model, container, 3)
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": container}, process_group=False)
    expected = advance(model, container, 2)
    holdfast.load(tmp_path / "c", {"model": other, "optimizer": single}, process_group=False)
    holdfast.save(tmp_path / "d", {"model": other, "optimizer": single}, process_group=False)
    assert advance(other, single, 2) == expected
    third = net(seed=2)
    second = TitanContainer(third)
    holdfast.load(tmp_path / "d", {"model": third, "optimizer": second}, process_group=False)
    assert advance(third, second, 2) == expected


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", [*BY_PARAMETER, *AS_OBJECT])
def test_collecting_steps_nothing_and_runs_no_hook_of_a_step(tmp_path: Path, name: str, steps: int) -> None:
    model = net()
    optimizer = {**BY_PARAMETER, **AS_OBJECT}[name](model)
    advance(model, optimizer, steps) if steps else None
    optimizer.zero_grad()
    fired: list[str] = []
    inside = [*getattr(optimizer, "optimizers", getattr(optimizer, "inner", []))]
    inside += [each for key in ("optimizer", "base_optimizer") if (each := getattr(optimizer, key, None)) is not None]
    for each in inside or [optimizer]:
        each.register_step_pre_hook(lambda *_: fired.append("step"))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    counts = [float(state["step"]) for each in inside for state in each.state.values()]
    rates = [group["lr"] for each in inside for group in each.param_groups]
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer}, process_group=False)
    holdfast.load(tmp_path / "c", {"model": model, "optimizer": optimizer}, process_group=False)
    assert fired == []
    assert [float(state["step"]) for each in inside for state in each.state.values()] == counts
    assert [group["lr"] for each in inside for group in each.param_groups] == rates
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Hidden(TitanContainer):
    """Keeps tensors that only a `state_dict` that may step would show."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.averages = [each.detach().clone() for each in model.parameters()]


def test_state_that_only_a_call_that_may_step_would_show_is_refused(tmp_path: Path) -> None:
    model = net()
    optimizer = Hidden(model)
    advance(model, optimizer, 1)
    with pytest.raises(InvalidError, match=r"optimizer: Hidden keeps tensors in averages, .*may step it"):
        holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer}, process_group=False)
    assert not (tmp_path / "c").exists()
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer}, skip="optimizer", process_group=False)


def test_state_outside_of_sharded_parameters_is_refused(tmp_path: Path) -> None:
    model = net()
    optimizer = Lookahead(model)
    advance(model, optimizer, 1)
    state = {key: holdfast.Sharded(each, tuple(each.shape), (0,) * each.ndim) for key, each in model.named_parameters()}
    with pytest.raises(InvalidError, match=r"optimizer: Lookahead keeps slow, count outside .*sharded"):
        holdfast.save(tmp_path / "c", {"model": state, "optimizer": optimizer}, process_group=False)
    assert not (tmp_path / "c").exists()


def test_what_a_checkpoint_lacks_of_a_wrapper_is_missing(tmp_path: Path) -> None:
    model = net()
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    with pytest.raises(InvalidError, match=r"2 missing from the checkpoint: optimizer\.count, optimizer\.slow"):
        holdfast.load(tmp_path / "c", {"model": model, "optimizer": Lookahead(model)})


class Partial(HoldsOptimizers):
    """Its own groups lack parameters that an optimizer inside steps."""

    def __init__(self, model: nn.Module, own: list[nn.Parameter]) -> None:
        self.optimizers = [torch.optim.AdamW(model.parameters())]
        super().__init__([{"params": own}], {})


@pytest.mark.parametrize("held", [0, 2])
def test_groups_that_lack_parameters_stepped_inside_are_refused(tmp_path: Path, held: int) -> None:
    model = net()
    optimizer = Partial(model, [*model.parameters()][:held])
    advance(model, optimizer, 1)
    state = {"model": model, "optimizer": optimizer}
    with pytest.raises(InvalidError, match=rf"optimizer: AdamW inside Partial steps 4 .* Partial hold {held}, not all"):
        holdfast.save(tmp_path / "c", state, process_group=False)
    assert not (tmp_path / "c").exists()
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer.optimizers[0]}, process_group=False)
    with pytest.raises(InvalidError, match=rf"optimizer: AdamW inside Partial steps 4 .* Partial hold {held}, not all"):
        holdfast.load(tmp_path / "c", state, process_group=False)


def test_an_optimizer_that_is_only_referred_to_does_not_count(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model[0].parameters())
    optimizer.other = torch.optim.AdamW(model[1].parameters())  # type: ignore[attr-defined]
    advance(model, optimizer, 1)
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer}, process_group=False)
    names = holdfast.open_checkpoint(tmp_path / "c").tensors
    assert {name[:17] for name in names if name.startswith("optimizer")} == {"optimizer.state.0"}


def test_two_optimizers_that_disagree_are_refused(tmp_path: Path) -> None:
    model = net()
    optimizer = Sam(model)
    advance(model, optimizer, 1)
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(4, 3)
    with pytest.raises(InvalidError, match=r"optimizer: Sam and an optimizer inside it keep different state 'exp_avg'"):
        holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer}, process_group=False)


@pytest.mark.parametrize("build", [Sam, Lookahead])
def test_a_lazy_save_copies_such_state_at_the_call(tmp_path: Path, build: Build) -> None:
    model = net()
    optimizer = build(model)
    advance(model, optimizer, 1)
    expected = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    settings = holdfast.Settings(staging="lazy")
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False, settings=settings) as manager:
        handle = manager.save(1, {"model": model, "optimizer": optimizer})
        assert handle.staged.done()
        with torch.no_grad():
            model[0].weight.zero_()
        report = handle.wait()
        assert report is not None and report.staging == "copy"
        manager.load({"model": model, "optimizer": optimizer})
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())
