"""A run that keeps two steps on a disk with room for four: it deletes what it may, and saves again."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import api
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.errors import UnavailableError
from tests.support.mounted_file_systems import mounted, workplace

GRACE_SECONDS = 1.5


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 4.2 MiB: room for four steps of a MiB."""
    with workplace() as location, mounted("tmpfs", location / "m", kind="tmpfs", options="size=4300K") as mount:
        yield mount


def manager_at(root: Path, grace_seconds: float = GRACE_SECONDS) -> CheckpointManager:
    settings = holdfast.Settings(collect_grace_seconds=grace_seconds)
    return CheckpointManager(root, every=1, keep_last=2, process_group=False, settings=settings, preemption=False)


def state_at(step: int) -> dict[str, object]:
    return {"w": torch.full((250_000,), float(step))}


def is_saved(manager: CheckpointManager, step: int) -> bool:
    handle = manager.maybe_save(step, state_at(step))
    assert handle is not None
    try:
        handle.wait()
    except UnavailableError as error:
        assert "ENOSPC" in str(error)
        return False
    return True


def test_a_full_disk_fails_saves_for_one_grace_at_most(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, saved, failed_since, longest = small_disk / "run", [], 0.0, 0.0
    with manager_at(root) as manager:
        for step in range(1, 21):
            start = time.monotonic()
            if is_saved(manager, step):
                saved.append(step)
                failed_since = 0.0
            else:
                failed_since = failed_since or start
                longest = max(longest, start - failed_since)
            # What stays is never fewer than the policy keeps: nothing goes early.
            assert set(saved[-2:]) <= set(manager.steps())
            time.sleep(0.25)
    assert len(saved) >= 8, saved
    assert longest < GRACE_SECONDS + 0.75, "steps whose grace has run are still there"
    warnings = [record for record in caplog.records if "no room for the next save" in record.getMessage()]
    assert warnings and all(record.levelno == logging.WARNING for record in warnings)
    assert "are deleted when their grace has run" in warnings[0].getMessage()
    with manager_at(root) as manager:
        assert manager.steps() == saved[-2:]
        for step in saved[-2:]:
            assert list(api.open_checkpoint(root / f"step-{step:012d}").verify()) == []


def test_a_new_job_on_a_full_disk_deletes_what_the_last_one_left(small_disk: Path) -> None:
    root = small_disk / "run"
    manager = manager_at(root)
    assert [is_saved(manager, step) for step in (1, 2, 3, 4)] == [True] * 4
    manager.close(wait=False)
    with manager_at(root, grace_seconds=0.3) as manager:
        state = state_at(0)
        assert manager.load(state) == 4
        # No commit asks for a collection here: the failed save does.
        assert not is_saved(manager, 5)
        end = time.monotonic() + 60
        while manager.steps() != [3, 4]:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert is_saved(manager, 6)
    assert manager.steps() == [4, 6]
