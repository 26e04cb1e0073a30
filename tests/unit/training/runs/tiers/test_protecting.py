"""Steps that the nodes of peers protect: when the step before one of them is collected."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast._face import wiring
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.local import LocalStore
from holdfast.errors import UnavailableError
from holdfast.policies import EveryNSteps
from holdfast.settings import Settings
from holdfast.training.runs.tiers.near import NearPlace
from holdfast.training.runs.tiers.protecting import PeerGroup
from tests.support.forked_processes import await_within
from tests.support.server_folders import steps_in

SETTINGS = Settings(collect_grace_seconds=0.0)
LOOK_SECONDS = 0.5
Protect = Callable[[str, dict[str, dict[str, int]], float], None]
"""Longer than the collection after a commit takes to look, and to find nothing that may go."""


def group_with(protect: Protect, note_replicated: Callable[[], None]) -> PeerGroup:
    return PeerGroup(
        own="a",
        node_of_rank=("a",),
        group_of={"a": ("a", "b")},
        node_share=1.0,
        timeout_seconds=30.0,
        protect=protect,
        require_agent=None,
        release=lambda: None,
        note_replicated=note_replicated,
    )


def run_over(folder: Path, protect: Protect, note_replicated: Callable[[], None] = lambda: None) -> CheckpointManager:
    near_folder, root = (LocalStore(folder / name, settings=SETTINGS) for name in ("near", "root"))
    near = NearPlace(near_folder, EveryNSteps(1), 1, peers=group_with(protect, note_replicated))
    return CheckpointManager.over(root, wiring.saving_job(False, SETTINGS, root.url), near=near)


def test_a_failure_ends_its_own_step_and_no_other(tmp_path: Path) -> None:
    failing = ["protect", "", "note", ""]

    def protect(attempt: str, packs: dict[str, dict[str, int]], seconds: float) -> None:
        if failing[0] == "protect":
            raise OSError("no agent")

    def note_replicated() -> None:
        if failing[0] == "note":
            raise OSError("the folder is full")

    with run_over(tmp_path, protect, note_replicated) as run:
        for step in range(1, 5):
            handle = run.save(step, {"w": torch.full((1000,), float(step))}, near_only=True)
            if failing[0] == "protect":
                with pytest.raises(UnavailableError, match="step 1 is near, and not protected: OSError: no agent"):
                    handle.wait("replicated")
            else:
                handle.wait("replicated")
            failing.pop(0)
        run.close(wait=False)


def test_a_step_goes_once_the_next_one_is_protected_and_not_with_the_step_after(tmp_path: Path) -> None:
    may_end = threading.Event()
    may_end.set()

    def protect(attempt: str, packs: dict[str, dict[str, int]], seconds: float) -> None:
        assert may_end.wait(30.0)

    with run_over(tmp_path, protect) as run:
        run.save(1, {"w": torch.ones(1000)}, near_only=True).wait("replicated")
        may_end.clear()
        second = run.save(2, {"w": torch.ones(1000)}, near_only=True)
        second.wait("near")
        assert not may_end.wait(LOOK_SECONDS)
        assert steps_in(tmp_path / "near") == [1, 2], "nothing protects the second step yet"
        may_end.set()
        second.wait("replicated")
        await_within(30.0, lambda: steps_in(tmp_path / "near") == [2])
        run.close(wait=False)


def test_steps_do_not_pile_up_while_one_is_protected_for_long(tmp_path: Path) -> None:
    may_end, asked = threading.Event(), threading.Event()
    may_end.set()

    def protect(attempt: str, packs: dict[str, dict[str, int]], seconds: float) -> None:
        asked.set()
        assert may_end.wait(30.0)

    with run_over(tmp_path, protect) as run:
        run.save(1, {"w": torch.ones(1000)}, near_only=True).wait("replicated")
        may_end.clear()
        asked.clear()
        run.save(2, {"w": torch.ones(1000)}, near_only=True).wait("near")
        assert asked.wait(30.0)
        for step in range(3, 8):
            last = run.save(step, {"w": torch.ones(1000)}, near_only=True)
            last.wait("near")
        await_within(30.0, lambda: steps_in(tmp_path / "near") == [1, 2, 7])
        may_end.set()
        last.wait("replicated")
        await_within(30.0, lambda: steps_in(tmp_path / "near") == [7])
        run.close(wait=False)
