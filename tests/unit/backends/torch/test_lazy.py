"""Saves taken lazily: the live state is read while training goes on, and the fence holds what would change it."""

from __future__ import annotations

import copy
import gc
import os
import pickle  # noqa: TID251 - what users do to their models
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.torch.fence import close_fence
from holdfast.backends.torch.state import collect
from holdfast.backends.torch.tensors import TorchSource
from holdfast.backends.torch.tickets import Unsure
from holdfast.base.types.reports import SaveReport
from holdfast.errors import InvalidError, UnavailableError
from holdfast.training.saving.handle import SaveHandle
from holdfast.training.saving.transfer import Transfer
from tests.doubles.faults import FaultPoint
from tests.support.faulty_run import PATIENT, Trigger, run_with

WINDOW = PATIENT._tuning.window_bytes
LAZY = replace(PATIENT, staging="lazy", arena_bytes_max=3 * WINDOW)
"""Room for far less than the state, so that copying cannot run ahead of the gate."""


STALL_SECONDS = float(os.environ.get("HOLDFAST_STALL_SECONDS", "0.4"))
"""How long storage stands still in the test of that."""


class Training:
    """A model with buffers that change in forward, and an optimizer with state."""

    def __init__(self, **hyperparameters: object) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.Linear(96, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **hyperparameters)  # type: ignore[arg-type]
        self.generator = torch.Generator().manual_seed(4)
        self.step()

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "data": {"seen": [1, 2]}}

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 64, generator=self.generator)).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def values(self) -> dict[str, torch.Tensor]:
        """Return a copy of every tensor."""
        found = {f"model.{name}": each.detach().clone() for name, each in self.model.state_dict().items()}
        for number, each in enumerate(self.optimizer.state.values()):
            found |= {f"optimizer.{number}.{key}": value.clone() for key, value in each.items()}
        return found


class Gate:
    """Holds writes back until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.trigger = Trigger(self._wait, ["upload.write"], at=None, armed=True)

    def _wait(self, operation: FaultPoint) -> None:
        assert self.opened.wait(120.0)

    def open_after(self, seconds: float) -> None:
        threading.Timer(seconds, self.opened.set).start()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def run_at(root: Path, gate: Gate, **settings: object) -> CheckpointManager:
    return run_with(root, store=gate.trigger, process_group=False, settings=replace(LAZY, **settings))  # type: ignore[arg-type]


def loaded(root: Path, step: int) -> dict[str, torch.Tensor]:
    other = Training()
    for each in other.model.parameters():
        each.data.zero_()
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        assert manager.load(other.state, step) == step
    return other.values()


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.equal(found[name], each), name


def in_place(training: Training) -> None:
    with torch.no_grad():
        training.model[2].weight.add_(1.0)


def in_place_on_a_moment(training: Training) -> None:
    training.optimizer.state[training.model[2].weight]["exp_avg"].mul_(2.0)


def rebinding(training: Training) -> None:
    training.model[2].weight.data = torch.zeros(64, 96)


def swapping_storage(training: Training) -> None:
    with torch.no_grad():
        training.model[2].weight.set_(torch.zeros(64, 96))


def through_data(training: Training) -> None:
    training.model[2].weight.data.add_(1.0)


def through_numpy(training: Training) -> None:
    training.model[2].weight.detach().numpy()[:] = 0.0


def test_forward_and_backward_go_on_and_the_step_waits(tmp_path: Path, gate: Gate) -> None:
    training = Training()
    run = run_at(tmp_path, gate)
    expected = training.values()
    handle = run.save(1, training.state)
    assert not handle.staged.done()
    training.backward()
    assert not handle.staged.done(), "forward and backward wait for nothing"
    assert not torch.equal(training.model[1].running_mean, expected["model.1.running_mean"]), "buffers have moved on"
    gate.open_after(0.2)
    start = time.monotonic()
    training.optimizer.step()
    assert time.monotonic() - start > 0.1 and handle.staged.done()
    report = handle.wait(timeout=60.0)
    assert isinstance(report, SaveReport) and report.staging == "lazy"
    assert report.fence_seconds > 0.1 and report.waited_seconds > 0.1
    require_equal(loaded(tmp_path, 1), expected)
    run.close()


@pytest.mark.parametrize("hyperparameters", [{"fused": True}, {"foreach": True}, {"amsgrad": True}], ids=str)
def test_a_training_saved_lazily_at_every_step_is_saved_as_by_blocking(
    tmp_path: Path, hyperparameters: dict[str, bool]
) -> None:
    training = Training(**hyperparameters)
    settings = replace(LAZY, arena_bytes_max=6 * WINDOW, verify_lazy_copy=True)
    expected = {}
    with holdfast.CheckpointManager(tmp_path / "lazy", process_group=False, settings=settings) as manager:
        for step in range(6):
            training.step()
            expected[step] = training.values()
            holdfast.save(tmp_path / f"blocking-{step}", training.state, process_group=False)
            manager.save(step, training.state)
    for step, values in expected.items():
        other = Training(**hyperparameters)
        holdfast.load(tmp_path / f"blocking-{step}", other.state, process_group=False)
        require_equal(other.values(), values)
        require_equal(loaded(tmp_path / "lazy", step), values)


@pytest.mark.parametrize(
    ("change", "verify_lazy_copy"),
    [
        (in_place, False),
        (in_place_on_a_moment, False),
        (rebinding, False),
        (swapping_storage, False),
        (through_data, True),
        (through_numpy, True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_change_behind_the_fence_aborts_the_save(
    tmp_path: Path, gate: Gate, change: Callable[[Training], None], verify_lazy_copy: bool
) -> None:
    training = Training()
    run = run_at(tmp_path, gate, verify_lazy_copy=verify_lazy_copy)
    handle = run.save(1, training.state)
    change(training)
    gate.opened.set()
    training.step()
    with pytest.raises(InvalidError, match=r"step 1: .*(2\.weight).* changed while being copied lazily"):
        handle.wait(timeout=60.0)
    assert run.steps() == []
    assert list(tmp_path.rglob("*.safetensors")) == []
    expected = training.values()
    assert isinstance(run.save(2, training.state).wait(timeout=60.0), SaveReport)
    if change is not in_place_on_a_moment:
        require_equal(loaded(tmp_path, 2), expected)
    run.close()


MEMORY_CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "less by set_": lambda moment: moment.set_(torch.ones(7)),
    "more by data": lambda moment: setattr(moment, "data", torch.ones(100, 96)),
    "of another dtype by data": lambda moment: setattr(moment, "data", torch.ones(2, 3, dtype=torch.float64)),
    "less by resize_": lambda moment: moment.resize_(3, 5),
    "more by resize_": lambda moment: moment.resize_(640, 960),
    "freed": lambda moment: moment.untyped_storage().resize_(0),
    "of half the bytes": lambda moment: moment.untyped_storage().resize_(moment.nbytes // 2),
    "of other strides": lambda moment: setattr(moment, "data", torch.ones(96, 64).t()),
}
"""What offloading or growing code does to a moment's memory, behind the fence."""


@pytest.mark.parametrize(
    ("change", "moment"),
    [
        *((change, torch.ones(64, 96)) for change in MEMORY_CHANGES),
        *((change, torch.ones(2, 96)) for change in ("less by set_", "more by data", "freed")),
        *((change, torch.ones(96, 64).t()) for change in ("freed", "of half the bytes")),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, torch.Tensor) else value,
)
def test_a_moment_that_gets_other_memory_aborts_the_save(
    tmp_path: Path, gate: Gate, change: str, moment: torch.Tensor
) -> None:
    """Whatever becomes of the copy then, the error has the cause; and no freed memory is read."""
    model = nn.Linear(64, 96)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[model.bias]["momentum_buffer"] = moment = moment.clone()
    run = run_at(tmp_path, gate)
    handle = run.save(1, {"model": model, "optimizer": optimizer})
    MEMORY_CHANGES[change](moment)
    gate.opened.set()
    with pytest.raises(InvalidError, match=r"step 1: .*bias\.momentum_buffer changed while being copied lazily"):
        handle.wait(timeout=60.0)
    assert run.steps() == []
    run.close()


def test_a_change_once_all_is_copied_is_nobodys_business(tmp_path: Path, gate: Gate) -> None:
    training = Training()
    run = run_at(tmp_path, gate, arena_bytes_max=1 << 20, verify_lazy_copy=True)
    expected = training.values()
    handle = run.save(1, training.state)
    handle.wait("staged", timeout=60.0)
    for change in (in_place, through_data, through_numpy, rebinding):
        change(training)
    gate.opened.set()
    handle.wait(timeout=60.0)
    require_equal(loaded(tmp_path, 1), expected)
    run.close()


def test_a_change_before_it_is_known_that_all_is_copied_aborts_the_save(tmp_path: Path, gate: Gate) -> None:
    """An operation that was writing while the last copy was made is counted only when it is over."""
    training = Training()
    run = run_at(tmp_path, gate, arena_bytes_max=1 << 20)
    handle = run.save(1, training.state)
    transfer_of(handle)._staging.wait()
    in_place(training)
    training.step()
    gate.opened.set()
    with pytest.raises(InvalidError, match="changed while being copied lazily"):
        handle.wait(timeout=60.0)
    gate.opened.clear()  # A save checks for changes once its last byte is written, too.
    handle = run.save(2, training.state)
    transfer_of(handle)._staging.wait()
    in_place(training)
    gate.opened.set()
    with pytest.raises(InvalidError, match="changed while being copied lazily"):
        handle.wait(timeout=60.0)
    assert run.steps() == []
    run.close()


def transfer_of(handle: SaveHandle) -> Transfer:
    transfer = handle.in_flight._transfer  # type: ignore[union-attr]
    assert isinstance(transfer, Transfer)
    return transfer


def test_who_is_told_that_all_is_staged_may_step_at_once(tmp_path: Path, gate: Gate) -> None:
    training = Training()
    run = run_at(tmp_path, gate)
    expected = training.values()
    handle = run.save(1, training.state)
    handle.staged.add_done_callback(lambda _: training.optimizer.step())
    gate.opened.set()
    assert isinstance(handle.wait(timeout=60.0), SaveReport)
    require_equal(loaded(tmp_path, 1), expected)
    run.close()


def test_ctrl_c_in_the_midst_of_closing_the_fence_holds_nobody_up(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    run = run_at(tmp_path, gate)

    def interrupted(objects: list[nn.Module | torch.optim.Optimizer], settle: Callable[[], None]) -> None:
        close_fence(objects, settle)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(collect, "close_fence", interrupted)
        run.save(1, training.state)
    training.step()
    gate.opened.set()
    assert isinstance(run.save(2, training.state).wait(timeout=60.0), SaveReport)
    run.close()


def test_a_save_that_failed_holds_nothing_of_the_state(tmp_path: Path) -> None:
    def fail(operation: FaultPoint) -> None:
        raise UnavailableError("full")

    training = Training()
    trigger = Trigger(fail, ["upload.write"], at=None, armed=True)
    run = run_with(tmp_path, store=trigger, process_group=False, settings=LAZY)
    handle = run.save(1, training.state)
    with pytest.raises(UnavailableError):
        handle.wait(timeout=60.0)
    held = weakref.ref(training.model[0].weight)
    del training
    deadline = time.monotonic() + 60.0
    # The threads of the save end a moment after its handle tells the failure.
    while held() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert held() is None
    del handle
    run._saves._handles.clear()
    run.close()


def load_model(training: Training, run: CheckpointManager, state: dict[str, dict[str, torch.Tensor]]) -> None:
    training.model.load_state_dict(state["model"])


def load_optimizer(training: Training, run: CheckpointManager, state: dict[str, dict[str, torch.Tensor]]) -> None:
    training.optimizer.load_state_dict(state["optimizer"])


def load_part(training: Training, run: CheckpointManager, state: dict[str, dict[str, torch.Tensor]]) -> None:
    inner = {name.removeprefix("2."): each for name, each in state["model"].items() if name.startswith("2.")}
    training.model[2].load_state_dict(inner)


def load_checkpoint(training: Training, run: CheckpointManager, state: dict[str, dict[str, torch.Tensor]]) -> None:
    assert run.load(training.state, 0) == 0


@pytest.mark.parametrize("load", [load_model, load_part, load_optimizer, load_checkpoint])
def test_loading_waits_for_the_copies(
    tmp_path: Path, gate: Gate, load: Callable[[Training, CheckpointManager, dict[str, dict[str, torch.Tensor]]], None]
) -> None:
    training = Training()
    run = run_at(tmp_path, gate)
    gate.opened.set()
    run.save(0, training.state).wait(timeout=60.0)
    gate.opened.clear()
    earlier = copy.deepcopy({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()})
    training.step()
    expected = training.values()
    handle = run.save(1, training.state)
    assert not handle.staged.done()
    gate.open_after(0.1)
    load(training, run, earlier)
    assert isinstance(handle.wait(timeout=60.0), SaveReport)
    require_equal(loaded(tmp_path, 1), expected)
    run.close()


def copied_by(root: Path, state: dict[str, object], **arguments: object) -> str:
    """Return how a manager that would be lazy takes a state."""
    settings = replace(LAZY, arena_bytes_max=None)
    with holdfast.CheckpointManager(root, process_group=False, settings=settings) as manager:
        manager._position.starts_over = True
        handle = manager.save(len(manager.steps()), state, **arguments)  # type: ignore[arg-type]
        report = handle.wait()
        assert report is not None
        return report.staging


@pytest.mark.parametrize("as_dict", [False, True])
def test_an_optimizer_that_steps_in_backward_has_its_state_copied_at_the_call(
    tmp_path: Path, as_dict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    state = training.state
    if as_dict:
        state = {"model": dict(training.model.named_parameters()), "optimizer": training.optimizer}
    assert copied_by(tmp_path, state) == "lazy"
    training.model[2].weight.register_post_accumulate_grad_hook(lambda parameter: parameter.data.sub_(parameter.grad))
    assert copied_by(tmp_path, state) == "copy"
    assert "not lazily: parameters have hooks that run in backward" in caplog.text


def test_gradients_are_copied_at_the_call(tmp_path: Path) -> None:
    training = Training()
    training.backward()
    assert copied_by(tmp_path, training.state, grads=True) == "copy"
    assert copied_by(tmp_path, training.state, skip="*.grad") == "lazy"


def test_what_no_optimizer_of_the_state_steps_is_copied_at_the_call(tmp_path: Path) -> None:
    training = Training()
    assert copied_by(tmp_path, {"model": training.model}) == "copy"
    assert copied_by(tmp_path, {"model": training.model.state_dict()}) == "copy"
    assert copied_by(tmp_path, {"values": {"epoch": 3}}) == "copy"


def test_more_than_little_that_must_be_copied_has_all_of_it_copied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the memory that a copy takes, however little a lazy save would have."""
    training = Training()
    state = {**training.state, "buffers": {str(n): torch.zeros(1 << 18) for n in range(65)}}
    for _ in range(2):
        assert copied_by(tmp_path, state) == "copy"
    assert len(re.findall(r"not lazily: 6815\d{4} bytes of it are neither parameters", caplog.text)) == 2


def test_tensors_that_no_optimizer_guards_are_copied_at_the_call(tmp_path: Path, gate: Gate) -> None:
    """A metric that sums up in forward would else change behind the fence at every step."""

    class Metric:
        def __init__(self) -> None:
            self.total = torch.ones(3)

        def state_dict(self) -> dict[str, object]:
            return {"total": self.total}

        def load_state_dict(self, state: dict[str, object]) -> None:
            self.total = state["total"]  # type: ignore[assignment]

    training, metric = Training(), Metric()
    run = run_at(tmp_path, gate)
    counts = torch.arange(3)
    average = copy.deepcopy(training.model)
    variance = training.model[1].running_var
    was = {"model.2.weight": average[2].weight.detach().clone(), "variance": variance.clone()}
    # The buffer comes under a name in a dict before the module's own, which is then its alias.
    state = {"a": {"variance": variance}, **training.state, "average": average}
    handle = run.save(1, {**state, "metric": metric, "counts": counts, "in": [metric.total]})
    metric.total += 1
    counts += 1
    training.backward()
    torch._foreach_mul_([each.data for each in average.parameters()], 0.5)
    gate.opened.set()
    assert isinstance(handle.wait(timeout=60.0), SaveReport)
    checkpoint = holdfast.open_checkpoint(tmp_path / "step-000000000001")
    assert checkpoint.read("metric.total").tolist() == [1.0, 1.0, 1.0]  # type: ignore[attr-defined]
    assert checkpoint.read("counts").tolist() == [0, 1, 2]  # type: ignore[attr-defined]
    assert torch.equal(torch.from_numpy(checkpoint.read("average.2.weight")), was["model.2.weight"])  # type: ignore[arg-type]
    assert torch.equal(torch.from_numpy(checkpoint.read("a.variance")), was["variance"])  # type: ignore[arg-type]
    run.close()


def test_while_storage_stalls_training_runs_on_until_a_save_must_wait(tmp_path: Path, gate: Gate) -> None:
    training = Training()
    state_bytes = sum(each.nbytes for each in training.values().values())
    budget = (state_bytes // WINDOW + 8) * WINDOW
    run = run_at(tmp_path, gate, arena_bytes_max=budget)
    handles = [run.save(1, training.state)]
    for _ in range(5):
        training.step()
    handles.append(run.save(2, training.state))
    training.backward()
    assert handles[0].staged.done() and not handles[1].staged.done()
    gate.open_after(STALL_SECONDS)
    training.optimizer.step()
    reports = [handle.wait(timeout=60.0) for handle in handles]
    assert run._job.arena._count * WINDOW <= budget
    first, second = (report for report in reports if report is not None)
    assert first.fence_seconds < second.fence_seconds and first.waited_seconds == 0.0
    assert second.fence_seconds > STALL_SECONDS - 0.2 and second.waited_seconds > STALL_SECONDS - 0.2
    assert run.steps() == [1, 2]
    run.close()


def test_a_write_that_fails_lets_training_through(tmp_path: Path) -> None:
    def fail(operation: FaultPoint) -> None:
        raise UnavailableError("full")

    training = Training()
    trigger = Trigger(fail, ["upload.write"], at=None, armed=True)
    run = run_with(tmp_path, store=trigger, process_group=False, settings=LAZY)
    for step in range(4):
        handle = run.save(step, training.state)
        training.step()
        with pytest.raises(UnavailableError, match="full"):
            handle.wait(timeout=60.0)
    trigger.armed = False
    expected = training.values()
    handle = run.save(9, training.state)
    training.step()
    assert isinstance(handle.wait(timeout=60.0), SaveReport)
    require_equal(loaded(tmp_path, 9), expected)
    run.close()


@pytest.mark.parametrize("staging", ["copy", "lazy"])
def test_where_waiting_for_copies_fails_nobody_says_that_all_is_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, staging: Literal["copy", "lazy"]
) -> None:
    """Such waits are a device's only: its tickets stand in for it here, with host memory's copies behind them."""
    copy_into, copy_together = TorchSource.copy_into, TorchSource.copy_together

    def refused(*arguments: object) -> Unsure:
        copy_into(*arguments)  # type: ignore[arg-type]
        return Unsure(RuntimeError("not permitted when stream is capturing"))

    def refused_together(*arguments: object) -> Unsure:
        copy_together(*arguments)  # type: ignore[arg-type]
        return Unsure(RuntimeError("not permitted when stream is capturing"))

    training = Training()
    settings = replace(LAZY, staging=staging, arena_bytes_max=None)
    with holdfast.CheckpointManager(tmp_path, process_group=False, settings=settings) as manager:
        monkeypatch.setattr(TorchSource, "copy_into", refused)
        monkeypatch.setattr(TorchSource, "copy_together", staticmethod(refused_together))
        handle = manager.save(1, training.state)
        training.step()
        with pytest.raises(UnavailableError, match="not permitted"):
            handle.wait("staged", timeout=20.0)
        with pytest.raises(UnavailableError, match="not permitted"):
            handle.wait(timeout=20.0)
        assert "waiting for a device's copies failed, and they may go on (RuntimeError: not permitted" in caplog.text
        monkeypatch.undo()
        expected = training.values()
        manager.save(2, training.state).wait(timeout=20.0)
        assert manager.steps() == [2]
    require_equal(loaded(tmp_path, 2), expected)


def test_a_model_that_is_being_saved_can_be_copied_pickled_and_trained_in_a_fork(tmp_path: Path, gate: Gate) -> None:
    training = Training()
    run = run_at(tmp_path, gate)
    handle = run.save(1, training.state)
    twin = copy.deepcopy(training.model)
    pickled = pickle.dumps(training.model)
    assert b"holdfast" not in pickled, "whoever loads it may not have it installed"
    pickle.loads(pickled).load_state_dict(twin.state_dict())
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # As a loader's worker does: those of the parent are not here.
        # The threads that copy are not here: a fence that waited for them would wait for ever.
        training.optimizer.step()
        training.model.load_state_dict(twin.state_dict())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not handle.staged.done()
    gate.opened.set()
    assert isinstance(handle.wait(timeout=60.0), SaveReport)
    run.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # The compiler's own.
@pytest.mark.parametrize("is_compiled_first", [False, True])
def test_a_compiled_step_waits_and_is_not_compiled_anew(tmp_path: Path, gate: Gate, is_compiled_first: bool) -> None:
    """Whether it was compiled before the first lazy save, which sets the fence, or in it."""
    training = Training()
    step = torch.compile(training.optimizer.step, backend="aot_eager")
    if is_compiled_first:
        training.backward()
        step()
    run = run_at(tmp_path, gate)
    graphs = []
    for number in range(4):
        training.backward()
        gate.opened.clear()
        expected = training.values()
        handle = run.save(number, training.state)
        gate.open_after(0.05)
        step()
        assert handle.staged.done()
        handle.wait(timeout=60.0)
        require_equal(loaded(tmp_path, number), expected)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[1:] == graphs[:1] * 3
    run.close()


class Wrapping(torch.optim.Optimizer):
    """As accelerate's: an optimizer by its type alone, whose hooks are those of the one inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["inner"], name)


def test_an_optimizer_that_takes_no_hooks_is_saved_lazily_all_the_same(tmp_path: Path) -> None:
    training = Training()
    inner = training.optimizer
    wrapping = Wrapping(inner)
    wrapping.state, wrapping.param_groups = inner.state, inner.param_groups
    assert copied_by(tmp_path, {"model": training.model, "optimizer": wrapping}) == "lazy"


def test_settings_refuse_a_staging_they_do_not_know() -> None:
    with pytest.raises(InvalidError, match="staging='eager'; expected 'copy' or 'lazy'"):
        replace(LAZY, staging="eager")  # type: ignore[arg-type]
