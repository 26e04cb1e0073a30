"""A save at the step just loaded must not be told that it is saved already, if a tensor or a name has changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import ConflictError


class Average:
    """A moving average, as user code has it: no module, and its tensors are in a dict."""

    def __init__(self) -> None:
        self.shadow = {"weight": torch.zeros(3000), "bias": torch.ones(3)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.shadow)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.shadow = {name: value.clone() for name, value in state.items()}


class Loader:
    """A loader whose position moves when anything looks at its samples."""

    position = 0

    def __iter__(self) -> Iterator[int]:
        yield self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.position = state["position"]


class Loop:
    """What a training loop has."""

    def __init__(self, root: Path) -> None:
        self.model, self.average = torch.nn.Linear(30, 30), Average()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, fused=True)
        self.other = root / "other"
        self.own = holdfast.PerRank({"residual": torch.zeros(3000)})
        self.state: dict[str, object] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "average": self.average,
            "own": self.own,
            "schedule": torch.optim.lr_scheduler.StepLR(self.optimizer, 10),
            "loader": Loader(),
            "random": holdfast.RngState(),
            "seen": {"samples": 5, "losses": [0.0, float("nan")], "by name": {"a": 1}},
        }

    @property
    def seen(self) -> dict[str, object]:
        """Plain values, as a load leaves them."""
        seen = self.state["seen"]
        assert isinstance(seen, dict)
        return seen


class CountedState(dict[str, torch.Tensor]):
    """A state that counts how many of its names it was asked for one after the other."""

    asked = 0

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            self.asked += 1
            yield name


def step_fused(loop: Loop) -> None:
    loop.model(torch.ones(30)).sum().backward()
    loop.optimizer.step()


def write_data(loop: Loop) -> None:
    loop.model.weight.data.add_(1)


def load_another(loop: Loop) -> None:
    holdfast.save(loop.other, {"model": torch.nn.Linear(30, 30)}, process_group=False)
    holdfast.load(loop.other, {"model": loop.model}, process_group=False)


def average(loop: Loop) -> None:
    loop.average.shadow["weight"] += 1


def drop_an_average(loop: Loop) -> None:
    del loop.average.shadow["bias"]


def write_own(loop: Loop) -> None:
    assert isinstance(loop.own.value, dict)
    loop.own.value["residual"].data.add_(1)


def add_a_name(loop: Loop) -> None:
    loop.state["epoch"] = 3


def set_hyperparameter(name: str, value: object) -> Callable[[Loop], None]:
    return lambda loop: loop.optimizer.param_groups[0].update({name: value})


def set_value(name: str, value: object) -> Callable[[Loop], None]:
    return lambda loop: loop.seen.update({name: value})


def move_schedule(loop: Loop) -> None:
    schedule = loop.state["schedule"]
    assert isinstance(schedule, torch.optim.lr_scheduler.StepLR)
    schedule.last_epoch += 1


def remove_value(loop: Loop) -> None:
    del loop.seen["samples"]


VALUE_CHANGES = {
    "optimizer.param_groups": [
        set_hyperparameter("lr", 0.2),
        set_hyperparameter("lr", 1),
        set_hyperparameter("momentum", 0.0),
        set_hyperparameter("nesterov", None),
    ],
    "schedule": [move_schedule],
    "seen": [
        set_value("samples", 6),
        set_value("samples", 5.0),
        set_value("samples", True),
        set_value("losses", [-0.0, float("nan")]),
        set_value("losses", (0.0, float("nan"))),
        set_value("by name", {"a": 1, "b": 2}),
        remove_value,
    ],
}
"""By path, changes of what is no tensor."""
VALUE_CASES = [
    pytest.param(path, change, id=f"{path}-{number}")
    for path, changes in VALUE_CHANGES.items()
    for number, change in enumerate(changes)
]


@pytest.mark.parametrize(("path", "change"), VALUE_CASES)
def test_a_changed_value_is_found_and_named(tmp_path: Path, path: str, change: Callable[[Loop], None]) -> None:
    loop = Loop(tmp_path)
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False, preemption=False) as manager:
        manager.save(1, loop.state).wait()
        manager.load(loop.state)
        change(loop)
        with pytest.raises(ConflictError, match=f"these values have changed: {path}"):
            manager.save(1, loop.state).wait()
        manager.load(loop.state)
        report = manager.save(1, loop.state).wait()
        assert report is not None and report.bytes == 0


def test_a_loop_that_has_only_drawn_has_changed_nothing(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False, preemption=False) as manager:
        manager.save(1, loop.state).wait()
        manager.load(loop.state)
        torch.randn(3)
        loader = loop.state["loader"]
        assert isinstance(loader, Loader)
        loader.position = 3
        report = manager.save(1, loop.state).wait()
        assert report is not None and report.bytes == 0


CHANGES = [step_fused, write_data, load_another, average, drop_an_average, write_own, add_a_name]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_moves_no_counter_is_found(tmp_path: Path, change: Callable[[Loop], None]) -> None:
    loop = Loop(tmp_path)
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False, preemption=False) as manager:
        manager.save(1, loop.state).wait()
        manager.load(loop.state)
        report = manager.save(1, loop.state).wait()
        assert report is not None and report.bytes == 0
        change(loop)
        with pytest.raises(ConflictError, match="already there"):
            manager.save(1, loop.state).wait()


def test_the_names_of_a_flat_state_are_not_compared_with_each_other(tmp_path: Path) -> None:
    count = 300
    state = CountedState({f"layer.{number}.weight": torch.full((4,), number / 2) for number in range(count)})
    with holdfast.CheckpointManager(tmp_path, process_group=False, preemption=False) as manager:
        manager.save(1, state).wait()
        state.asked = 0
        manager.load(state)
        report = manager.save(1, state).wait()
    assert report is not None and report.bytes == 0
    assert state.asked < 20 * count


def test_a_save_that_writes_nothing_is_staged_at_once(tmp_path: Path) -> None:
    """Training may go on although the commit thread is busy with another save: no byte of the state is copied."""
    loop = Loop(tmp_path)
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        manager.save(1, loop.state).wait()
        manager.load(loop.state, step=1)
        busy = threading.Event()
        manager._job.commits.submit(lambda: busy.wait(60))
        try:
            handle = manager.save(1, loop.state)
            assert handle.staged.done() and not handle.committed.done()
        finally:
            busy.set()
        report = handle.wait()
        assert report is not None and report.bytes == 0
