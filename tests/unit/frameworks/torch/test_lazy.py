"""Saves taken lazily: the live state is read while training goes on, and the fence holds what would change it."""

from __future__ import annotations

import copy
import os
import pickle  # noqa: TID251 - what users do to their models
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import InvalidError, UnavailableError
from holdfast.manager.handle import SaveReport
from holdfast.manager.load import LoadRequest
from holdfast.manager.run import Run
from holdfast.ports.framework import Selection
from holdfast.testing.faults import Operation
from tests.distributed.faulty import PATIENT, Trigger, run_with

WINDOW = PATIENT.window_bytes
LAZY = replace(PATIENT, staging="lazy", arena_bytes_max=3 * WINDOW)
"""Room for far less than the state, so that copying cannot run ahead of the gate."""


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

    def _wait(self, operation: Operation) -> None:
        assert self.opened.wait(60.0)

    def open_after(self, seconds: float) -> None:
        threading.Timer(seconds, self.opened.set).start()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def run_at(root: Path, gate: Gate, **settings: object) -> Run:
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
    handle = run.save(1, training.state, Selection())
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
    settings = replace(LAZY, arena_bytes_max=6 * WINDOW, lazy_verify=True)
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
    ("change", "lazy_verify"),
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
    tmp_path: Path, gate: Gate, change: Callable[[Training], None], lazy_verify: bool
) -> None:
    training = Training()
    run = run_at(tmp_path, gate, lazy_verify=lazy_verify)
    handle = run.save(1, training.state, Selection())
    change(training)
    gate.opened.set()
    training.step()
    with pytest.raises(InvalidError, match=r"step 1: .*(2\.weight).* changed while being taken lazily"):
        handle.wait(timeout=60.0)
    assert run.steps() == []
    assert list(tmp_path.rglob("*.safetensors")) == []
    expected = training.values()
    assert isinstance(run.save(2, training.state, Selection()).wait(timeout=60.0), SaveReport)
    if change is not in_place_on_a_moment:
        require_equal(loaded(tmp_path, 2), expected)
    run.close()


def test_a_change_once_all_is_copied_is_nobodys_business(tmp_path: Path, gate: Gate) -> None:
    training = Training()
    run = run_at(tmp_path, gate, arena_bytes_max=1 << 20, lazy_verify=True)
    expected = training.values()
    handle = run.save(1, training.state, Selection())
    handle.wait("staged", timeout=60.0)
    for change in (in_place, through_data, through_numpy, rebinding):
        change(training)
    gate.opened.set()
    handle.wait(timeout=60.0)
    require_equal(loaded(tmp_path, 1), expected)
    run.close()


def load_model(training: Training, run: Run, state: dict[str, dict[str, torch.Tensor]]) -> None:
    training.model.load_state_dict(state["model"])


def load_optimizer(training: Training, run: Run, state: dict[str, dict[str, torch.Tensor]]) -> None:
    training.optimizer.load_state_dict(state["optimizer"])


def load_checkpoint(training: Training, run: Run, state: dict[str, dict[str, torch.Tensor]]) -> None:
    assert run.load(LoadRequest(training.state, Selection(), strict=True, cast=False), 0) == 0


@pytest.mark.parametrize("load", [load_model, load_optimizer, load_checkpoint])
def test_loading_waits_for_the_copies(
    tmp_path: Path, gate: Gate, load: Callable[[Training, Run, dict[str, dict[str, torch.Tensor]]], None]
) -> None:
    training = Training()
    run = run_at(tmp_path, gate)
    gate.opened.set()
    run.save(0, training.state, Selection()).wait(timeout=60.0)
    gate.opened.clear()
    earlier = copy.deepcopy({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()})
    training.step()
    expected = training.values()
    handle = run.save(1, training.state, Selection())
    assert not handle.staged.done()
    gate.open_after(0.1)
    load(training, run, earlier)
    assert isinstance(handle.wait(timeout=60.0), SaveReport)
    require_equal(loaded(tmp_path, 1), expected)
    run.close()


def test_an_optimizer_that_steps_in_backward_has_its_state_copied_at_the_call(tmp_path: Path) -> None:
    training = Training()
    each_own = {each: torch.optim.SGD([each], lr=0.1) for each in training.model.parameters()}
    for each in training.model.parameters():
        each.register_post_accumulate_grad_hook(lambda parameter: each_own[parameter].step())
    with holdfast.CheckpointManager(
        tmp_path, process_group=False, settings=replace(LAZY, arena_bytes_max=None)
    ) as manager:
        handle = manager.save(1, {"model": training.model})
        assert handle.staged.done()
        report = handle.wait()
        assert report is not None and report.staging == "copy"


def test_gradients_are_copied_at_the_call(tmp_path: Path) -> None:
    training = Training()
    training.backward()
    with holdfast.CheckpointManager(
        tmp_path, process_group=False, settings=replace(LAZY, arena_bytes_max=None)
    ) as manager:
        report = manager.save(1, training.state, grads=True).wait()
        assert report is not None and report.staging == "copy"
        report = manager.save(2, training.state, skip="*.grad").wait()
        assert report is not None and report.staging == "lazy"


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
    handle = run.save(1, {**training.state, "metric": metric, "counts": counts, "in": [metric.total]}, Selection())
    metric.total += 1
    counts += 1
    gate.opened.set()
    assert isinstance(handle.wait(timeout=60.0), SaveReport)
    checkpoint = holdfast.open_checkpoint(tmp_path / "step-000000000001")
    assert checkpoint.read("metric.total").tolist() == [1.0, 1.0, 1.0]  # type: ignore[attr-defined]
    assert checkpoint.read("counts").tolist() == [0, 1, 2]  # type: ignore[attr-defined]
    run.close()


def test_while_storage_stalls_training_runs_on_until_a_save_must_wait(tmp_path: Path, gate: Gate) -> None:
    training = Training()
    state_bytes = sum(each.nbytes for each in training.values().values())
    budget = (state_bytes // WINDOW + 8) * WINDOW
    run = run_at(tmp_path, gate, arena_bytes_max=budget)
    handles = [run.save(1, training.state, Selection())]
    for _ in range(5):
        training.step()
    handles.append(run.save(2, training.state, Selection()))
    training.backward()
    assert handles[0].staged.done() and not handles[1].staged.done()
    gate.open_after(0.3)
    training.optimizer.step()
    reports = [handle.wait(timeout=60.0) for handle in handles]
    assert run._job.arena._made * WINDOW <= budget
    first, second = (report for report in reports if report is not None)
    assert first.fence_seconds < 0.2 and first.waited_seconds == 0.0
    assert second.fence_seconds > 0.2 and second.waited_seconds > 0.2
    assert run.steps() == [1, 2]
    run.close()


def test_a_write_that_fails_lets_training_through(tmp_path: Path) -> None:
    def fail(operation: Operation) -> None:
        raise UnavailableError("full")

    training = Training()
    trigger = Trigger(fail, ["upload.write"], at=None, armed=True)
    run = run_with(tmp_path, store=trigger, process_group=False, settings=LAZY)
    for step in range(4):
        handle = run.save(step, training.state, Selection())
        training.step()
        with pytest.raises(UnavailableError, match="full"):
            handle.wait(timeout=60.0)
    trigger.armed = False
    expected = training.values()
    handle = run.save(9, training.state, Selection())
    training.step()
    assert isinstance(handle.wait(timeout=60.0), SaveReport)
    require_equal(loaded(tmp_path, 9), expected)
    run.close()


def test_a_model_that_is_being_saved_can_be_copied_pickled_and_trained_in_a_fork(tmp_path: Path, gate: Gate) -> None:
    training = Training()
    run = run_at(tmp_path, gate)
    handle = run.save(1, training.state, Selection())
    twin = copy.deepcopy(training.model)
    pickle.dumps(training.model)
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


@pytest.mark.parametrize("name", ["staging"])
def test_settings_refuse_what_they_do_not_know(name: str) -> None:
    with pytest.raises(InvalidError, match="staging='eager'; expected 'copy' or 'lazy'"):
        replace(LAZY, **{name: "eager"})  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("staging", ["copy", "lazy"])
def test_copies_come_after_what_the_stream_of_the_call_was_given_before_it(tmp_path: Path, staging: str) -> None:
    weights = torch.zeros(1 << 20, device="cuda")
    settings = replace(LAZY, staging=staging, arena_bytes_max=None)  # type: ignore[arg-type]
    manager = holdfast.CheckpointManager(tmp_path, process_group=False, settings=settings)
    with manager, torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(1 << 30)
        weights.fill_(1.0)
        manager.save(1, {"weights": weights}).wait()
    found = holdfast.open_checkpoint(tmp_path / "step-000000000001").read("weights")
    assert (found == 1.0).all()  # type: ignore[attr-defined]
