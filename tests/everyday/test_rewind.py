"""After a loss spike a user goes back to an older step, throws the newer ones away, and trains on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Settings
from holdfast.api import list_steps, remove_steps

SOON = Settings(collect_grace_seconds=0.0)
OTHER_JOB = """
import sys, torch, holdfast
settings = holdfast.Settings(lease_seconds=0.6)
with holdfast.CheckpointManager(sys.argv[1], process_group=False, settings=settings) as manager:
    manager.load({"weights": torch.zeros(100)})
    manager.save(50, {"weights": torch.ones(100)}).wait()
    print("saved", flush=True)
    sys.stdin.read()
"""


def run_at(root: Path, settings: Settings = SOON, keep_last: int | None = None) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(root, every=10, keep_last=keep_last, process_group=False, settings=settings)


def train(root: Path, weights: torch.Tensor, start: int, stop: int, by: float, **options: int) -> None:
    """Load nothing or the newest step, train, and save every tenth step."""
    with run_at(root, **options) as manager:  # type: ignore[arg-type]
        manager.load({"weights": weights})
        for step in range(start, stop):
            weights += by
            manager.maybe_save(step, {"weights": weights})


def stored(root: Path) -> list[str]:
    """Return the steps that are stored, by name."""
    return [record.name for record in list_steps(root).steps if record.manifest is not None]


def require_left(root: Path, *steps: str) -> None:
    """Require that these steps are left, by their numbers, once the background has removed the others."""
    deadline = time.monotonic() + 30.0
    while [name.partition("@")[0] for name in stored(root)] != list(steps):
        assert time.monotonic() < deadline, f"left: {stored(root)}"
        time.sleep(0.02)


@pytest.mark.parametrize("keep_last", [None, 3])
def test_training_goes_on_from_the_older_step(tmp_path: Path, keep_last: int | None) -> None:
    weights = torch.zeros(100)
    train(tmp_path, weights, 1, 41, 1.0)
    with run_at(tmp_path, keep_last=keep_last) as manager:
        assert manager.load({"weights": weights}, 20, discard_newer=True) == 20
        assert manager.load_report is not None
        assert [name.partition("@")[0] for name in manager.load_report.discarded] == ["30", "40"]
        for step in range(21, 41):
            weights += 100
            manager.maybe_save(step, {"weights": weights})
    loaded = torch.zeros(100)
    with run_at(tmp_path) as manager:
        assert manager.load({"weights": loaded}) == 40 and loaded[0] == 20 + 20 * 100
    assert set(stored(tmp_path)) >= {"20", "30", "40"}


def test_a_restart_before_the_next_save_resumes_the_older_step(tmp_path: Path) -> None:
    weights = torch.zeros(100)
    train(tmp_path, weights, 1, 41, 1.0)
    with run_at(tmp_path, Settings()) as manager:
        manager.load({"weights": weights}, 20, discard_newer=True)
    with run_at(tmp_path) as manager:
        assert manager.load({"weights": weights}) == 20 and weights[0] == 20
        assert manager.steps() == [10, 20] and manager.latest == 20
        # The process before ended within the grace. This one saves, and so ends the removal.
        manager.save(25, {"weights": weights}).wait()
        require_left(tmp_path, "10", "20", "25")
    assert not list(tmp_path.glob("timelines/*")) and not list(tmp_path.glob("collecting/*"))


def test_a_tagged_step_stays_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = torch.zeros(100)
    train(tmp_path, weights, 1, 41, 1.0)
    with run_at(tmp_path) as manager:
        manager.tag(40, "spike")
        manager.load({"weights": weights}, 20, discard_newer=True)
        assert manager.load_report is not None
        assert [(left.step, left.why) for left in manager.load_report.left] == [(40, "tag spike")]
        require_left(tmp_path, "10", "20", "40")
    assert "step 40 (tag spike)" in caplog.text
    (name,) = (name for name in stored(tmp_path) if name.startswith("40@"))
    with run_at(tmp_path) as manager:
        assert manager.load({"weights": weights}) == 20, "no resume takes the tagged step"
        assert manager.load({"weights": weights}, name) == 40 and weights[0] == 40


def test_beside_another_job_nothing_happens(tmp_path: Path) -> None:
    train(tmp_path, torch.zeros(100), 1, 41, 1.0)
    command = [sys.executable, "-c", OTHER_JOB, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "saved\n"
        weights = torch.full((100,), -1.0)
        with run_at(tmp_path, Settings(lease_seconds=1.0)) as manager:
            with pytest.raises(holdfast.ConflictError, match=r"another job writes here.*The state was not changed"):
                manager.load({"weights": weights}, 20, discard_newer=True)
            assert weights[0] == -1 and manager.steps() == [10, 20, 30, 40, 50]
        other.communicate("end")
    with pytest.raises(holdfast.InvalidError, match="expected the step to go back to"):
        run_at(tmp_path).load({"weights": weights}, discard_newer=True)


def test_a_loop_that_saves_first_may_save_the_step_that_it_loaded(tmp_path: Path) -> None:
    """As in nanoGPT: the save is at the top of the loop, before the step is trained."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())

    def state(best: float) -> dict[str, object]:
        return {"model": model, "optimizer": optimizer, "rng": holdfast.RngState(), "best_loss": best}

    def take_a_step() -> None:
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    take_a_step()
    with run_at(tmp_path) as manager:
        manager.save(10, state(2.0)).wait()
    with run_at(tmp_path) as manager:
        assert manager.load(state(9.0)) == 10
        with torch.no_grad():
            torch.randn(3) + model(torch.randn(2, 4)).sum()  # An evaluation draws numbers.
        report = manager.save(10, state(2.0), tags=["resumed"]).wait()
        assert report is not None and (report.step, report.bytes) == (10, 0)
        assert list_steps(tmp_path).steps[0].tags == ("resumed",)
        take_a_step()
        with pytest.raises(
            holdfast.ConflictError, match=r"already there.*Save the state as another step.*discard_newer"
        ):
            manager.save(10, state(2.0)).wait()
        manager.save(11, state(1.5)).wait()
    remove_steps(tmp_path, 11, grace_seconds=0.0)
    with run_at(tmp_path) as manager:
        assert manager.load(state(9.0)) == 10
