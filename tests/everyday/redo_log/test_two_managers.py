"""Two managers with a redo log in one process, and a state whose steps become impossible to record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import InvalidError


def manager_at(root: Path) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(root, every=5, process_group=False, differential=True, preemption=False)


class Loop:
    """A small network, trained by a loop that may have several managers."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(6, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self, step: int, *managers: holdfast.CheckpointManager) -> None:
        self.model(torch.ones(1, 6)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for manager in managers:
            manager.maybe_save(step, self.state)
            manager.wait()
            assert manager._redo_log is not None and manager._redo_log._writer.drain()


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def first(loop: Loop, tmp_path: Path) -> Iterator[holdfast.CheckpointManager]:
    """A manager that records the optimizer of the loop."""
    with manager_at(tmp_path / "first") as manager:
        for step in (1, 2):
            loop.step(step, manager)
        yield manager


def test_a_second_manager_of_an_optimizer_is_refused(
    loop: Loop, first: holdfast.CheckpointManager, tmp_path: Path
) -> None:
    with manager_at(tmp_path / "second") as second:
        with pytest.raises(InvalidError, match=r"optimizer: torch.*SGD is recorded by another manager.*Close"):
            loop.step(3, second)
        assert second.steps() == []
        first.maybe_save(3, loop.state)
        loop.step(4, first)
        assert first.recoverable == 4


def _close(manager: holdfast.CheckpointManager) -> None:
    manager.close()


def _drop(manager: holdfast.CheckpointManager) -> None:
    """Keep nothing but what a dead process would not leave to other tests: threads and leases."""
    manager._parts.close(lambda: False)
    manager._job.close()


@pytest.mark.parametrize("end", [_close, _drop])
def test_a_manager_that_has_ended_does_not_count(
    loop: Loop, tmp_path: Path, end: Callable[[holdfast.CheckpointManager], None]
) -> None:
    first = manager_at(tmp_path / "first")
    loop.step(1, first)
    end(first)
    del first
    with manager_at(tmp_path / "second") as second:
        for step in (1, 2, 3):
            loop.step(step, second)
        assert second.recoverable == 3


def test_steps_that_can_be_recorded_no_more_do_not_end_training(
    loop: Loop, first: holdfast.CheckpointManager, caplog: pytest.LogCaptureFixture
) -> None:
    hook = loop.model.weight.register_post_accumulate_grad_hook(lambda _: None)
    assert first._redo_log is not None
    first._redo_log._interrupt(2, "because")
    for step in range(3, 12):
        loop.step(step, first)
    assert "has parameters with hooks that run in backward" in caplog.text
    assert first.steps()[-1] == 10 == first.recoverable
    hook.remove()
    for step in range(12, 17):
        loop.step(step, first)
    assert first.recoverable == 16
