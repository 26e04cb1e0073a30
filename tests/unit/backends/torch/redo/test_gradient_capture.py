"""What a capture refuses, what interrupts it, and what becomes an after-image."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.backends.torch.framework import TorchFramework
from holdfast.backends.torch.local_shards import Ranks
from holdfast.base.ports.framework import Selection
from holdfast.errors import InvalidError, UnavailableError
from tests.support.redo_log.recorded_training import FRAMEWORK, HeapMemory, Log, log_of, redo, whole_regions


class Plain:
    """A training of one layer."""

    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **hyperparameters: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(6, 4)
        self.optimizer = kind(self.model.parameters(), lr=0.1, **hyperparameters)  # type: ignore[call-arg]

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 6)).square().sum().backward()

    def train(self) -> None:
        self.backward()
        self.optimizer.step()

    def bits(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))


@pytest.fixture
def plain() -> Plain:
    training = Plain()
    training.train()
    return training


class Own(torch.optim.SGD):
    """A class that nobody vouches for."""


class Centred(torch.optim.AdamW):
    """A class with a step around that of its base class: torch calls the hooks of a step twice."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.sub_(parameter.grad.mean())
        return super().step(closure)


def refusal(state: dict[str, Any], selection: Selection | None = None) -> str:
    with pytest.raises(InvalidError) as caught:
        FRAMEWORK.capture(state, selection or Selection(), (), HeapMemory())
    return str(caught.value)


def test_another_class_is_refused_by_name_unless_the_caller_vouches_for_it() -> None:
    training = Plain(Own)
    message = refusal(training.state())
    assert "optimizer: " in message
    assert "Own" in message
    assert "Differential(optimizers=(Own,))" in message
    log = log_of(training.state(), vouched=(Own,))
    training.train()
    assert log.boundary(1) is not None


def test_a_step_around_the_step_of_the_base_class_is_recorded_once() -> None:
    plain = Plain(Centred)
    plain.train()
    base, log = copy.deepcopy(plain), log_of(plain.state(), vouched=(Centred,))
    for step in (1, 2):
        plain.train()
        record = log.boundary(step)
        assert record is not None, log.capture.interrupted
        assert len(record.calls) == 1
    assert redo(base.state(), log.records) == []
    torch.testing.assert_close(base.bits(), plain.bits(), rtol=0, atol=0)


def test_lbfgs_is_refused() -> None:
    assert "LBFGS calls a closure" in refusal(Plain(torch.optim.LBFGS).state())


def test_a_step_in_backward_is_refused() -> None:
    training = Plain()
    training.model.weight.register_post_accumulate_grad_hook(lambda _: None)
    assert "hooks that run in backward" in refusal(training.state())


def test_a_compiled_step_is_refused() -> None:
    training = Plain()
    training.optimizer.step = torch.compile(training.optimizer.step, backend="eager")  # type: ignore[method-assign]
    assert "compiled step" in refusal(training.state())


def test_a_state_without_an_optimizer_is_refused() -> None:
    assert "no optimizer" in refusal({"model": nn.Linear(2, 2)})


@pytest.mark.parametrize("skip", ["model.bias", "optimizer", "optimizer.state.*"])
def test_a_selection_without_a_part_that_steps_need_is_refused(skip: str) -> None:
    message = refusal(Plain().state(), Selection(skip=(skip,)))
    assert "optimizer: " in message
    assert "skip=" in message


def test_a_parameter_outside_the_state_is_refused() -> None:
    training = Plain()

    training.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert refusal(training.state())


@pytest.mark.filterwarnings("ignore")
def test_fsdp1_is_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        module = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with pytest.raises(InvalidError, match="model: FSDP1 moves its parameters"):
            two_ranks = TorchFramework(Ranks(0, 2, lambda rank: rank))
            two_ranks.capture({"model": module, "optimizer": optimizer}, Selection(), (), HeapMemory())
    finally:
        dist.destroy_process_group()


class Wrapper(torch.optim.Optimizer):
    """Shares state and groups with the optimizer inside, as Accelerate's wrapper does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()


def test_an_optimizer_inside_a_wrapper_is_captured(plain: Plain) -> None:
    state = {"model": plain.model, "optimizer": Wrapper(plain.optimizer)}
    log = log_of(state)
    base = copy.deepcopy(plain)
    plain.backward()
    state["optimizer"].step()
    record = log.boundary(1)
    assert record is not None
    assert [call.path for call in record.calls] == ["optimizer"]
    assert redo({"model": base.model, "optimizer": Wrapper(base.optimizer)}, log.records) == []
    torch.testing.assert_close(base.bits(), plain.bits(), rtol=0, atol=0)


def move_memory(training: Plain) -> None:
    training.model.weight.data = training.model.weight.data + 1


def change_in_place(training: Plain) -> None:
    with torch.no_grad():
        training.model.bias.mul_(2)


def change_a_moment(training: Plain) -> None:
    training.optimizer.state[training.model.weight]["exp_avg"].mul_(0.5)


def load(training: Plain) -> None:
    saved = copy.deepcopy(training.optimizer.state_dict())
    saved["state"][0]["exp_avg"] += 1
    training.optimizer.load_state_dict(saved)


@pytest.mark.parametrize("change", [move_memory, change_in_place, change_a_moment, load])
def test_a_change_outside_of_a_step_becomes_an_after_image_in_its_place(
    plain: Plain, change: Callable[[Plain], None]
) -> None:
    log = log_of(plain.state())
    base = copy.deepcopy(plain)
    plain.train()
    change(plain)
    plain.train()
    record = log.boundary(2)
    assert record is not None, log.capture.interrupted
    assert record.images
    assert {image.after_call for image in record.images} == {1}
    plain.train()
    change(plain)
    record = log.boundary(3)
    assert record is not None
    assert {image.after_call for image in record.images} == {1}
    assert redo(base.state(), log.records) == []
    torch.testing.assert_close(base.bits(), plain.bits(), rtol=0, atol=0)


def test_a_write_to_data_in_place_is_found_by_the_sums(plain: Plain) -> None:
    base, log = copy.deepcopy(plain), log_of(plain.state())
    for step in range(70):
        plain.train()
        if step == 3:
            plain.model.weight.data[0, 0] += 1  # Moves neither address nor version counter.
        assert log.boundary(step) is not None
    assert "model.weight" in redo(base.state(), log.records)


def test_a_large_average_written_through_data_is_recorded(plain: Plain) -> None:
    """`average.data.mul_(…)` is an idiom of old averages."""
    average = torch.zeros(1 << 19)
    log = log_of(plain.state() | {"average": average})
    base, redone = copy.deepcopy(plain), average.clone()
    for step in (1, 2):
        plain.train()
        average.data.mul_(0.9).add_(step)
        record = log.boundary(step)
        assert record is not None
        assert [image.fqn for image in record.images] == ["average"]
    assert redo(base.state() | {"average": redone}, log.records) == []
    assert torch.equal(redone, average)


def interruption(training: Plain, change: Callable[[], object], log: Log | None = None) -> str:
    log = log or log_of(training.state())
    training.train()
    assert log.boundary(1) is not None
    change()
    training.train()
    assert log.boundary(2) is None
    for captured in log.records:
        captured.release()
    assert log.memory.lent == 0
    message = log.capture.interrupted
    log.capture.begin(2, whole_regions(log.capture))
    return message


def test_a_hook_that_was_registered_after_that_of_the_log_interrupts_once(plain: Plain) -> None:
    log = log_of(plain.state())
    hook = lambda *_: None  # noqa: E731
    assert "a step hook" in interruption(plain, lambda: plain.optimizer.register_step_pre_hook(hook), log)
    plain.train()
    assert log.boundary(3) is not None  # `begin` has moved the hooks of the log.


def test_a_closure_interrupts(plain: Plain) -> None:
    assert "closure" in interruption(plain, lambda: plain.optimizer.step(lambda: 0.0))


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_a_step_that_the_loop_compiles_interrupts(plain: Plain) -> None:
    assert "was compiled" in interruption(plain, torch.compile(lambda: plain.optimizer.step(), backend="eager"))


def test_a_step_that_raises_interrupts(plain: Plain) -> None:
    def fail() -> None:
        plain.optimizer.param_groups[0]["betas"] = None
        with pytest.raises(TypeError):
            plain.optimizer.step()
        plain.optimizer.param_groups[0]["betas"] = (0.9, 0.999)

    assert "a step did not end" in interruption(plain, fail)


def test_a_sparse_gradient_interrupts_at_its_first_sight() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = log_of({"model": model, "optimizer": optimizer})
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert log.boundary(1) is None
    assert "model.weight: its gradient is sparse" in log.capture.interrupted


def test_another_group_interrupts(plain: Plain) -> None:
    group = {"params": [nn.Parameter(torch.zeros(2))]}
    assert "a group or parameter was added" in interruption(plain, lambda: plain.optimizer.add_param_group(group))


def test_a_replaced_tensor_interrupts(plain: Plain) -> None:
    plain.model.register_buffer("seen", torch.zeros(2))
    assert "model.seen: was replaced" in interruption(plain, lambda: setattr(plain.model, "seen", torch.ones(2)))


def test_memory_that_does_not_come_interrupts(plain: Plain) -> None:
    log = log_of(plain.state())

    def refuse(count: int) -> memoryview:
        raise UnavailableError(f"no {count} bytes")

    log.memory.take = refuse  # type: ignore[method-assign]
    plain.train()
    assert log.boundary(1) is None
    assert "no " in log.capture.interrupted


def test_gradients_that_no_step_consumed_are_not_resumable(plain: Plain) -> None:
    log = log_of(plain.state())

    def resumable(step: int) -> bool:
        record = log.boundary(step)
        assert record is not None
        return record.not_resumable == ""

    plain.train()
    assert resumable(1)  # What a step leaves behind does not count.
    plain.optimizer.zero_grad(set_to_none=False)
    assert resumable(2)
    plain.backward()
    assert not resumable(3)
    plain.optimizer.step()
    assert resumable(4)
    plain.backward()
    assert not resumable(5)
    plain.optimizer.zero_grad()
    assert resumable(6)


def test_closing_removes_the_hooks(plain: Plain) -> None:
    log = log_of(plain.state())
    plain.train()
    log.capture.close()
    assert log.memory.lent == 0
    plain.train()
    assert log.boundary(1) is None
    assert log.capture.interrupted == "closed"
    assert log.memory.lent == 0


def test_another_class_flag_or_version_is_unlike(plain: Plain) -> None:
    log = log_of(plain.state())
    plain.train()
    record = log.boundary(1)
    assert record is not None
    assert FRAMEWORK.redo(plain.state(), Selection()).unlike(record) == ""
    for other in (Plain(torch.optim.Adam), Plain(foreach=True)):
        assert FRAMEWORK.redo(other.state(), Selection()).unlike(record).startswith("optimizer was ")
