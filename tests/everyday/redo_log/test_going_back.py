"""A user goes back to a step that only a record holds, or to a base, and trains on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from holdfast import Differential
from holdfast.backends.torch.redo.step_redo import TorchStepRedo
from holdfast.base.types.redo import Record
from tests.unit.training.redo_log.test_lives import Training, loaded


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with the bases 1 and 20, and records to step 27."""
    first = Training(tmp_path, every=20)
    first.run(1, 27)
    first.die()
    return tmp_path


def test_the_next_save_names_the_step_that_was_loaded(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    again, _ = loaded(root, 24)
    again.run(25, 26)
    assert "step 24 was loaded and newer steps or records exist; this save begins timeline 2" in caplog.text
    assert "step 20 was loaded and" not in caplog.text
    assert (again.manager.steps(), again.manager.latest, again.manager.recoverable) == ([1, 20, 25], 25, 26)
    again.manager.close()


def test_discarding_newer_steps_discards_newer_records_too(root: Path) -> None:
    again = Training(root)
    assert again.manager.load(again.state, 20, discard_newer=True) == 20
    again.die()

    third, found = loaded(root)
    assert found == 20
    third.run(21, 23)
    third.die()
    fourth, found = loaded(root)
    assert found == 23
    fourth.manager.close()


def test_a_load_in_the_same_process_goes_to_its_last_step(tmp_path: Path) -> None:
    training = Training(tmp_path, differential=Differential(flush_every=50))
    for number in range(1, 8):
        training.step(number)
        training.manager.wait()
    expected = training.digest()
    assert training.manager.load(training.state) == 7
    assert training.digest() == expected
    training.manager.close()


def _raise(_: Sequence[str]) -> Sequence[str]:
    raise MemoryError("no room for a step")


def _depart(_: Sequence[str]) -> Sequence[str]:
    return ["model.0.weight"]


@pytest.mark.parametrize("end", [_raise, _depart])
def test_a_base_alone_after_failed_redos_trains_on_as_the_dead_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[Sequence[str]], Sequence[str]]
) -> None:
    first = Training(tmp_path)
    first.run(1, 13)
    expected = first.digest()
    first.die()
    apply = TorchStepRedo.apply

    def failing(redo: TorchStepRedo, record: Record) -> Sequence[str]:
        found = apply(redo, record)
        return end(found) if record.step == 12 else found

    monkeypatch.setattr(TorchStepRedo, "apply", failing)
    again, found = loaded(tmp_path)
    assert found == 10
    again.run(11, 13)
    assert again.digest() == expected
    again.manager.close()
