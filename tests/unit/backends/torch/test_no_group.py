"""A rank of several that has no process group: it is told so, before the ranks compete for one root."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import holdfast

STATE = {"w": torch.ones(3)}


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.fixture
def group() -> Iterator[None]:
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_without_a_group_a_manager_and_a_save_by_path_are_refused(tmp_path: Path) -> None:
    for call in (
        lambda: holdfast.CheckpointManager(tmp_path / "run"),
        lambda: holdfast.save(tmp_path / "one", STATE),
        lambda: holdfast.async_save(tmp_path / "one", STATE),
    ):
        with pytest.raises(holdfast.InvalidError, match=r"WORLD_SIZE=2: .*no process group; .*init_process_group") as e:
            call()
        assert "process_group=False" in str(e.value) and "a root of its own" in str(e.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("two_ranks")
def test_a_rank_that_saves_for_itself_says_so_and_any_rank_may_load(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        manager.save(1, STATE).wait()
    holdfast.save(tmp_path / "one", STATE, process_group=False)
    assert holdfast.load(tmp_path / "one", {"w": torch.zeros(3)}).loaded == ("w",)


@pytest.mark.parametrize("stated", ["", "1", "many"])
def test_one_rank_needs_no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", stated)
    with holdfast.CheckpointManager(tmp_path) as manager:
        manager.save(1, STATE).wait()


@pytest.mark.usefixtures("group")
def test_a_manager_made_before_the_group_is_refused_at_its_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    early = holdfast.CheckpointManager(tmp_path / "run", every=1)
    alone = holdfast.CheckpointManager(tmp_path / "alone", process_group=False)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    for call in (lambda: early.save(1, STATE), lambda: early.maybe_save(1, STATE), lambda: early.load(dict(STATE))):
        with pytest.raises(holdfast.InvalidError, match=r"made before init_process_group.* 2 ranks") as e:
            call()
        assert "process_group=False" in str(e.value)
    early.close()
    assert not (tmp_path / "run").exists()
    with alone:
        alone.save(1, STATE).wait()
