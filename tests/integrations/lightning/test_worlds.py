"""Trainings on several ranks: under DDP and FSDP2, of Trainer and of Fabric, resumed on other numbers of ranks."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

lightning = pytest.importorskip("lightning")

import holdfast  # noqa: E402
from tests.integrations.lightning.worlds import Ended, world  # noqa: E402

LAYOUTS = ("sharded", "fsdp1", "ddp", "fabric", "fabric-ddp")


def results_of(ranks: list[Ended]) -> list[dict[str, Any]]:
    assert [rank.status for rank in ranks] == [0] * len(ranks)
    return [rank.result for rank in ranks if rank.result is not None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Trainings that nothing interrupts, by layout."""
    folder = tmp_path_factory.mktemp("whole")
    return {layout: results_of(world(2, layout, folder / layout, steps=6)) for layout in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_training_is_the_same_and_loads_on_other_ranks(
    layout: str, tmp_path: Path, whole: dict[str, list[dict[str, Any]]]
) -> None:
    first = results_of(world(2, layout, tmp_path / "run", steps=4))
    for ranks in (1, 3):
        shutil.copytree(tmp_path / "run", tmp_path / f"on-{ranks}")
        for result in results_of(world(ranks, layout, tmp_path / f"on-{ranks}", steps=4, resume=True)):
            assert (result["resumed_from"], result["digests"]) == (4, first[0]["digests"])
    for result, expected in zip(
        results_of(world(2, layout, tmp_path / "run", steps=6, resume=True)), whole[layout], strict=True
    ):
        assert (result["resumed_from"], result["digests"]) == (4, expected["digests"])
        assert result["losses"] == expected["losses"][4:]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saves_in_the_background_are_whole_at_the_end(
    layout: str, tmp_path: Path, whole: dict[str, list[dict[str, Any]]]
) -> None:
    first = world(2, layout, tmp_path / "run", steps=6, LIGHTNING_BACKGROUND="1")
    resumed = world(2, layout, tmp_path / "run", steps=6, resume=True)
    for result in (*results_of(first), *results_of(resumed)):
        assert result["digests"] == whole[layout][0]["digests"]
    assert results_of(resumed)[0]["resumed_from"] == 6


@pytest.mark.parametrize("layout", ["sharded", "ddp"])
@pytest.mark.parametrize(("point", "save"), [("saving", 1), ("whole", 1), ("moved", 1), ("whole", 3), ("removing", 3)])
def test_a_kill_between_save_and_path_loses_no_checkpoint(
    layout: str, point: str, save: int, tmp_path: Path, whole: dict[str, list[dict[str, Any]]]
) -> None:
    """In each turn the newest is saved, then the one before is removed, then `last.ckpt` is replaced."""
    variables = {"LIGHTNING_TOP_K": "1", "LIGHTNING_KILL": f"{point}:{save}"}
    killed = world(2, layout, tmp_path / "run", steps=6, **variables)
    assert killed[0].status == -signal.SIGKILL
    # Lightning takes every folder that it lists for a checkpoint, so each must be one.
    for path in (tmp_path / "run").glob("*.ckpt"):
        assert holdfast.open_checkpoint(path).objects["global_step"] in (2, 4)
    resumed = results_of(world(2, layout, tmp_path / "run", steps=6, resume=True, LIGHTNING_TOP_K="1"))
    assert resumed[0]["resumed_from"] == (None if save == 1 else 2)
    assert [result["digests"] for result in resumed] == [result["digests"] for result in whole[layout]]
    assert not list((tmp_path / "run").glob(".holdfast-removed-*"))


@pytest.mark.parametrize(
    ("before", "after"), [("sharded", "ddp"), ("ddp", "sharded"), ("fabric", "fabric-ddp"), ("fabric-ddp", "fabric")]
)
def test_a_training_goes_on_under_another_strategy(
    before: str, after: str, tmp_path: Path, whole: dict[str, list[dict[str, Any]]]
) -> None:
    results_of(world(2, before, tmp_path / "run", steps=4))
    resumed = results_of(world(2, after, tmp_path / "run", steps=6, resume=True))
    assert resumed[0]["resumed_from"] == 4
    assert resumed[0]["digests"] == whole[before][0]["digests"] == whole[after][0]["digests"]
