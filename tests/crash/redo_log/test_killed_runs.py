"""A killed run goes on at its last sealed step, and ends with the very bits of the run that was never killed."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.gloo_worlds import Case, Launch, Results

pytestmark = pytest.mark.long

TRAIN = "tests.crash.redo_log.recorded_run:train"

LAYOUTS = [("ddp", 1), ("ddp", 2), ("fsdp", 2)]
if os.environ.get("REDO_LAYOUTS") == "all":
    LAYOUTS += [("hsdp", 4), ("fsdp-tp", 4), ("tp", 2), ("pp", 2), ("8bit", 1)]

KILLS = int(os.environ.get("REDO_KILLS", "3"))
"""Kills at random."""


def _world(size: int, scratch: Path, **arguments: object) -> Results:
    with Launch(size, [Case(TRAIN, arguments, "train")], scratch) as launch:
        return launch.join()


def _ended(size: int, scratch: Path, **arguments: object) -> list[dict[str, object]]:
    values = _world(size, scratch, **arguments).values("train")
    return [value for value in values if isinstance(value, dict)]


def _digests(values: Sequence[dict[str, object]]) -> list[object]:
    return [value["digest"] for value in values]


@pytest.mark.parametrize(("layout", "size"), LAYOUTS)
def test_a_killed_run_goes_on_at_the_very_step(tmp_path: Path, layout: str, size: int) -> None:
    if layout == "8bit":
        pytest.importorskip("torchao", reason="torchao is not installed: pip install holdfast[interop]")
    whole = _ended(size, tmp_path / "whole", root=str(tmp_path / "a"), layout=layout)
    root = str(tmp_path / "b")
    _world(size, tmp_path / "killed", root=root, layout=layout, kill_at=27)

    again = _ended(size, tmp_path / "again", root=root, layout=layout)

    assert [(each["start"], each["base"], each["redone"], each["why"]) for each in again] == [(27, 15, 12, "")] * size
    assert _digests(again) == _digests(whole)


def test_a_log_changes_nothing_that_is_trained(tmp_path: Path) -> None:
    logged = _ended(1, tmp_path / "logged", root=str(tmp_path / "a"))
    plain = _ended(1, tmp_path / "plain", root=str(tmp_path / "b"), differential=False)

    assert _digests(logged) == _digests(plain)


def test_a_missing_segment_ends_the_redo_on_every_rank(tmp_path: Path) -> None:
    root = tmp_path / "b"
    # Long steps: a segment each.
    _world(2, tmp_path / "killed", root=str(root), kill_at=27, pause=0.1)
    (log,) = (path for path in (root / "log").iterdir())
    (log / "r00001" / f"{24:012d}.safetensors").unlink()

    again = _ended(2, tmp_path / "again", root=str(root))

    assert [(each["start"], each["redone"]) for each in again] == [(23, 8)] * 2
    whole = _ended(2, tmp_path / "whole", root=str(tmp_path / "a"))
    assert _digests(again) == _digests(whole)


def test_a_damaged_base_costs_no_step(tmp_path: Path) -> None:
    root = tmp_path / "b"
    _world(1, tmp_path / "killed", root=str(root), kill_at=33)
    (pack,) = (root / f"step-{30:012d}").rglob("r00000.safetensors")
    with pack.open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"damaged")

    again = _ended(1, tmp_path / "again", root=str(root))

    assert [(each["start"], each["base"], each["redone"]) for each in again] == [(33, 15, 18)]
    assert _digests(again) == _digests(_ended(1, tmp_path / "whole", root=str(tmp_path / "a")))


def test_another_number_of_ranks_takes_the_base(tmp_path: Path) -> None:
    root = str(tmp_path / "b")
    _world(2, tmp_path / "killed", root=root, kill_at=20)

    again = _ended(1, tmp_path / "again", root=root)

    assert [(each["start"], each["why"]) for each in again] == [(15, "the log is of 2 ranks, and 1 load")]


def test_a_run_without_the_log_goes_on_from_it(tmp_path: Path) -> None:
    root = str(tmp_path / "b")
    _world(1, tmp_path / "killed", root=root, kill_at=20)

    again = _ended(1, tmp_path / "again", root=root, differential=False)
    assert again[0]["start"] == 20
    # Its bases state no log: what was recorded counts no more.
    third = _ended(1, tmp_path / "third", root=root, steps=41)
    assert (third[0]["start"], third[0]["redone"]) == (30, 0)
    shutil.rmtree(root)


LIVES_STEPS = 120
"""More steps than two lives can take: a rank that trains no step after a load has rank 0's statistics."""


@pytest.fixture(scope="module")
def whole_lives(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """Return how the run ends that is never killed at random."""
    folder = tmp_path_factory.mktemp("whole")
    return _ended(2, folder / "whole", root=str(folder / "a"), every=7, steps=LIVES_STEPS)


@pytest.mark.parametrize("seed", range(KILLS))
def test_kills_at_random_lose_two_steps_at_most(
    tmp_path: Path, seed: int, whole_lives: list[dict[str, object]]
) -> None:
    """Both ranks are killed at any moment: of training, a seal, a base or a collection."""
    chance, root, scratch, steps = random.Random(seed), str(tmp_path / "b"), tmp_path, LIVES_STEPS
    for life in range(2):
        after = chance.uniform(0.05, 1.5)
        _world(2, scratch / f"life-{life}", root=root, pause=0.03, every=7, steps=steps, kill_after=after)
    last = [_last_step(scratch / "life-1" / f"step.{rank}") for rank in range(2)]

    again = _ended(2, scratch / "again", root=root, every=7, steps=steps)

    assert again[0]["start"] == again[1]["start"]
    start = again[0]["start"]
    assert isinstance(start, int)
    assert max(last) - 3 <= start <= max(last), (start, last)
    assert max(last) < steps, "the last life ended by itself"
    assert _digests(again) == _digests(whole_lives)
    shutil.rmtree(root)


def _last_step(path: Path) -> int:
    return int(path.read_text().splitlines()[-1].split()[0])
