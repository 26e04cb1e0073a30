"""Loops that count backwards or catch Ctrl-C: a restart has the very bits that the loop had at the step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.backends.torch.redo.gradient_capture import TorchGradientCapture
from tests.unit.training.redo_log.test_lives import Training, loaded


@pytest.mark.parametrize(
    ("fallen", "expected"),
    [
        (range(12, 16), 15),  # Below the last record, above the newest base.
        (range(5, 9), 17),  # Below the newest base: as ever, a restart takes the highest number.
    ],
)
def test_step_numbers_that_fall(tmp_path: Path, fallen: range, expected: int) -> None:
    training, live = Training(tmp_path), dict[int, str]()
    for number in (*range(1, 18), *fallen):
        training.run(number, number)
        live[number] = training.digest()
    training.die()

    again, found = loaded(tmp_path)
    assert found == expected
    assert again.digest() == live[found]
    again.manager.close()


Place = Callable[[Training, pytest.MonkeyPatch], None]


class Interrupted:
    """Raises at the first call."""

    def __init__(self, then: Callable[..., object] = lambda *_: None) -> None:
        self._then, self.was_raised = then, False

    def __call__(self, *args: object, **kwargs: object) -> object:
        if not self.was_raised:
            self.was_raised = True
            raise KeyboardInterrupt
        return self._then(*args, **kwargs)


def _before_the_step(training: Training, patch: pytest.MonkeyPatch) -> None:
    hooks = training.optimizer._optimizer_step_pre_hooks
    (key,) = hooks
    patch.setitem(hooks, -1, Interrupted())
    hooks.move_to_end(key)


def _in_the_hook_of_the_log(training: Training, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TorchGradientCapture, "add_call", Interrupted(TorchGradientCapture.add_call))


def _in_the_step(training: Training, patch: pytest.MonkeyPatch) -> None:
    module = sys.modules[torch.optim.Adam.__module__]
    patch.setattr(module, "adam", Interrupted(module.adam))


def _after_the_step(training: Training, patch: pytest.MonkeyPatch) -> None:
    training.optimizer._optimizer_step_post_hooks[-1] = Interrupted()  # After that of the log.


@pytest.mark.parametrize("place", [_before_the_step, _in_the_hook_of_the_log, _in_the_step, _after_the_step])
def test_ctrl_c_in_a_step_that_the_loop_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    training, live = Training(tmp_path), dict[int, str]()
    for number in range(1, 14):
        training.run(number, number)
    place(training, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        training.step(14)
    for number in (14, 15):  # The number again, with the gradients of both tries.
        training.run(number, number)
        live[number] = training.digest()
    training.die()

    again, found = loaded(tmp_path)
    assert found == 15
    assert again.digest() == live[found]
    again.manager.close()


@pytest.mark.parametrize("place", [_before_the_step, _in_the_hook_of_the_log, _in_the_step, _after_the_step])
def test_ctrl_c_in_a_step_that_ends_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    training = Training(tmp_path)
    training.run(1, 13)
    expected = training.digest()
    place(training, monkeypatch)
    with pytest.raises(KeyboardInterrupt), training.manager:
        training.step(14)

    again, found = loaded(tmp_path)
    assert (found, again.digest()) == (13, expected)
    again.manager.close()
