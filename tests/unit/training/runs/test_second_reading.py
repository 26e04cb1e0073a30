"""Scenarios that a reader of the code found: each lost or kept something it should not have."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.geometry.tensor import MeshLayout, Placement
from holdfast.errors import InvalidError, UnavailableError
from holdfast.training.saving.handle import SaveHandle
from tests.doubles.framework import GlobalTensor
from tests.support.tuning import tuned
from tests.unit.ranks import HASTY, World, fresh_store, saved


def copied() -> GlobalTensor:
    """A tensor that placements state to be whole on both ranks."""
    return GlobalTensor("float32", np.ones((4, 3), np.float32), MeshLayout((2,), (0, 1), (Placement(None),)))


def alone(path: Path, state: dict[str, object]) -> None:
    holdfast.save(path, state, process_group=False)


def test_a_commit_leaves_folders_alone_that_only_look_like_attempts(tmp_path: Path) -> None:
    experiment = tmp_path / "0123456789abcdef"
    with holdfast.CheckpointManager(experiment, process_group=False) as manager:
        manager.save(7, {"x": torch.ones(3)}).wait()
        alone(tmp_path, {"y": torch.ones(3)})
        assert manager.steps() == [7]
    assert list(holdfast.open_checkpoint(experiment / "step-000000000007").verify()) == []


def test_a_tensor_that_no_rank_wrote_is_missed() -> None:
    """Two ranks see different tensors of one replica group, so each leaves some to the other."""
    world = World(2, settings=HASTY)

    def part(rank: int, run: CheckpointManager) -> object:
        state = {"a": copied()} | ({"z": copied()} if rank == 0 else {})
        return saved(run, 1, state)

    outcomes = world.play(part)
    if world.committed():
        assert set(world.pieces(1)) == {"a", "z"}
        assert all(world.pieces(1).values())
    else:
        assert all(isinstance(each, InvalidError) for each in outcomes), outcomes


def test_an_asyncio_timeout_cannot_cancel_a_save() -> None:
    futures: list[Future[object]] = [getattr(SaveHandle("save"), name) for name in ("staged", "committed")]
    assert not any(future.cancel() for future in futures)


def test_running_out_of_memory_does_not_end_training(tmp_path: Path) -> None:
    class Greedy:
        def state_dict(self) -> dict[str, object]:
            raise MemoryError("no room")

        def load_state_dict(self, state: dict[str, object]) -> None:
            raise AssertionError

    handle = holdfast.async_save(tmp_path / "c", {"greedy": Greedy()}, process_group=False)
    with pytest.raises(UnavailableError, match="no room"):
        handle.wait()


def test_a_state_saved_without_one_entry_does_not_take_it_away(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": layer, "optimizer": optimizer}
    holdfast.save(tmp_path / "c", state, skip=["*.exp_avg_sq"], process_group=False)
    with pytest.raises(InvalidError, match="exp_avg_sq"):
        holdfast.load(tmp_path / "c", state, process_group=False)
    report = holdfast.load(tmp_path / "c", state, strict=False, process_group=False)
    assert any(name.endswith("exp_avg_sq") for name in report.missing)
    optimizer.step()


def test_verify_reads_chunks_larger_than_its_windows(tmp_path: Path) -> None:
    alone(tmp_path / "c", {"x": torch.ones(1 << 20)})
    small = tuned(holdfast.Settings(), window_bytes=1 << 16)
    assert list(holdfast.open_checkpoint(tmp_path / "c", settings=small).verify()) == []


class Broken:
    """A store that fails with an error that is none of ours, once it is told to."""

    def __init__(self, store: MemoryStore) -> None:
        self._store, self.broken = store, False

    def __getattr__(self, name: str) -> object:
        if self.broken and name in ("size", "get"):
            raise RuntimeError(f"a fault in {name}")
        return getattr(self._store, name)


def test_an_error_that_is_none_of_ours_reaches_every_rank() -> None:
    """Else the other ranks wait for rank 0 until they time out, and say that it is gone."""
    store = fresh_store()
    broken = Broken(store)
    world = World(2, settings=HASTY, store=store, stores={0: broken})  # type: ignore[dict-item]
    state: dict[str, object] = {"a": copied()}
    assert not any(isinstance(each, Exception) for each in world.play(lambda _, run: saved(run, 1, state)))

    def save(rank: int, run: CheckpointManager) -> object:
        broken.broken |= rank == 0
        return saved(run, 2, state)

    def load(rank: int, run: CheckpointManager) -> object:
        broken.broken |= rank == 0
        return run.load(state, 1)

    for part in (save, load):
        broken.broken = False
        for outcome in world.play(part):
            assert isinstance(outcome, UnavailableError | RuntimeError)
            assert "a fault in" in str(outcome)


@pytest.mark.parametrize("put", [lambda path: path.symlink_to("elsewhere"), os.mkfifo], ids=["link", "pipe"])
def test_what_stands_in_place_of_a_manifest_does_not_keep_a_run_from_its_steps(
    tmp_path: Path,
    put: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    state: dict[str, object] = {"x": torch.ones(3)}
    with holdfast.CheckpointManager(tmp_path, process_group=False) as manager:
        for step in (1, 2):
            manager.save(step, state).wait()
        manifest = tmp_path / "step-000000000002" / "manifest.json"
        manifest.rename(manifest.with_name("elsewhere"))
        put(manifest)
        assert manager.steps() == [1]
        assert manager.load(state) == 1
        assert "step 2 is skipped" in caplog.text
        with pytest.raises(InvalidError, match=r"step-000000000002/manifest\.json"):
            manager.load(state, 2)
