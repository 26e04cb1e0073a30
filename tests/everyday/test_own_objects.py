"""A training script with objects of its own and a log that people read: what it is told, and when."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import ConflictError, InvalidError
from tests.unit.cli.running import holdfast as command


class Game:
    """Stands for an environment that a script has given `state_dict`."""

    def __init__(self, *, broken: bool = False) -> None:
        self.steps, self._broken = 0, broken

    def state_dict(self) -> dict[str, object]:
        if self._broken:
            raise AttributeError("no such thing")
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.steps = state["moves"]  # type: ignore[assignment]


@pytest.mark.parametrize("per_rank", [False, True])
def test_an_object_whose_state_cannot_be_taken_is_named(per_rank: bool, tmp_path: Path) -> None:
    game = Game(broken=True)
    state = {"games": {"first": holdfast.PerRank(game) if per_rank else game}}
    said = r"games\.first: Game\.state_dict\(\) failed: AttributeError: no such thing"
    with pytest.raises(InvalidError, match=said):
        holdfast.save(tmp_path / "c", state, process_group=False)


def test_an_object_that_does_not_find_its_state_is_named_with_the_error(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"game": Game()}, process_group=False)
    with pytest.raises(InvalidError, match=r"game: Game\.load_state_dict refused it: KeyError: 'moves'"):
        holdfast.load(tmp_path / "c", {"game": Game()}, process_group=False)


def test_a_last_step_that_is_saved_twice_is_no_other_writer(tmp_path: Path) -> None:
    state = {"weights": torch.zeros(1 << 20)}
    with holdfast.CheckpointManager(tmp_path, every=10, process_group=False) as manager:
        manager.load(state)
        manager.maybe_save(10, state)
        second = manager.save(10, state)
        with pytest.raises(ConflictError, match=r"an earlier save of this job|already there") as caught:
            second.wait()
        assert "another writer" not in str(caught.value)
        assert manager.steps() == [10]


def test_the_log_of_a_run_counts_in_units_and_has_no_epoch_of_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="holdfast")
    settings = holdfast.Settings(collect_grace_seconds=0)
    state = {"weights": torch.zeros(1 << 18)}
    with holdfast.CheckpointManager(tmp_path, keep_last=1, settings=settings, process_group=False) as manager:
        for step in (1, 2):
            state["weights"] += 1
            manager.save(step, state).wait()
    assert "collected steps [1]: 1.0 MiB freed" in caplog.text
    assert "this job holds the writer lease, epoch 1 of the lease" in caplog.text


def test_inspect_shows_a_value_of_each_rank_in_words(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"rng": holdfast.RngState()}, process_group=False)
    assert "  rng: one value of each rank" in command("inspect", tmp_path / "c").out.splitlines()
