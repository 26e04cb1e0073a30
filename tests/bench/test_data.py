"""The bench of `holdfast.data`: its keys, its exit status, and resumes that are counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.data import __main__ as data
from bench.data import resume, rivals
from bench.data.parts import DATA_PARTS
from bench.data.positions import LARGE, SMALL
from bench.data.resume import Ranks
from bench.data.systems import CONTENDERS, SAMPLES, Batches, Loader, Place, System
from bench.goals import GOALS
from bench.part import Measured, Params, Part

ROUNDS: dict[str, dict[str, float]] = {
    "loader_1k": {"plain": 1.0, "loader": 1.0, "batches": 2.0},
    "loader_100k": {"plain": 0.96, "loader": 1.0, "batches": 0.96},
    "first_batch": {str(SMALL): 0.2, str(LARGE): 0.21},
    "order": {"full": 0.5, "blocks": 0.6, "in order": 0.4},
    "state": {"plain": 349.0, "mixture": 1168.0, "sources": 12.0},
    "saves": {"with": 0.0102, "without": 0.0100},
    "rivals": {"ranks": 4.0, "torchdata_lost": 0.0, "torchdata_doubled": 31.0},
}
"""What one round of each part may have measured."""


def run(part: Part, params: Params, folder: Path, variables: dict[str, str]) -> Measured:
    assert params == part.quick and not variables
    return Measured([ROUNDS[part.name]] * 14, [])


def test_every_part_measures_the_keys_that_are_listed_for_it() -> None:
    assert set(data.KEYS) == set(DATA_PARTS) == set(ROUNDS)
    for name, part in DATA_PARTS.items():
        assert set(part.keys([ROUNDS[name]] * 2, part.full)) == set(data.KEYS[name]) <= {goal.key for goal in GOALS}


def test_rounds_become_keys(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert data.main(["--quick", "--json", str(path), "--folder", str(tmp_path)], run=run) == 0
    found = json.loads(path.read_text())
    assert (found["loader_vs_plain_1k"], found["batches_vs_plain_1k"], found["loader_vs_plain_100k"]) == (1, 0.5, 0.96)
    assert (found["first_batch_large_vs_small"], found["order_peak_mib"]) == (1.05, 0.6)
    assert (found["state_bytes"], found["save_with_data_vs_without"]) == (400.0, 1.02)
    assert len(found["parts"]["rivals"]["rounds"]) == 14


@pytest.mark.parametrize(("loader", "status"), [(1.1, 0), (1.2, 1)])
def test_a_loader_below_the_floor_fails(tmp_path: Path, loader: float, status: int) -> None:
    def measured(*_: object, **__: object) -> Measured:
        return Measured([{**ROUNDS["loader_1k"], "loader": loader}] * 14, [])

    command = ["--quick", "--json", str(tmp_path / "out.json"), "--folder", str(tmp_path), "--only", "loader_1k"]
    assert data.main(command, run=measured) == status


@pytest.mark.parametrize("system", [Loader, Batches])
def test_ours_sees_every_sample_once(tmp_path: Path, system: type[System]) -> None:
    found = resume.outcome(system, tmp_path, Ranks(4, 0), Ranks(3, 0))
    assert found == {"lost": 0, "doubled": 0, "steps_min": 32, "steps_max": 32}


class Static:
    """A loader that splits the data set by rank, and counts the samples of its own part."""

    def __init__(self, place: Place) -> None:
        self._own, self._batch, self._at = range(SAMPLES)[place.rank :: place.ranks], place.batch, 0

    def steps(self) -> Iterator[Any]:
        while self._at < len(self._own):
            self._at += self._batch
            yield self._own[self._at - self._batch : self._at]

    def state(self) -> Any:
        return self._at

    def resume(self, state: Any) -> None:
        if state > 30:
            raise ValueError("another number of ranks\nand more")
        self._at = state


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (Ranks(4, 0), Ranks(4, 0), {"lost": 0, "doubled": 0, "steps_min": 32, "steps_max": 32}),
        (Ranks(4, 0), Ranks(3, 0), {"lost": 0, "doubled": 30, "steps_min": 34, "steps_max": 34}),
        (Ranks(2, 0), Ranks(4, 0), {"error": "ValueError: another number of ranks"}),
    ],
)
def test_samples_of_other_loaders_are_counted(
    tmp_path: Path, before: Ranks, after: Ranks, expected: dict[str, object]
) -> None:
    assert resume.outcome(Static, tmp_path, before, after) == expected


def test_rows_name_what_is_refused_hung_failed_and_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Callable[[], str]] = {
        "loader": lambda: '{"lost": 0, "doubled": 0, "steps_min": 32, "steps_max": 32}',
        "torchdata": lambda: '{"lost": 3, "doubled": 1, "steps_min": 31, "steps_max": 32}',
        "datasets_rows": lambda: '{"error": "ValueError: no | more"}',
        "datasets_shards": lambda: _raise(rivals.Hung("hung: no end within 60 s")),
        "datasets_alone": lambda: _raise(rivals.Failed("ImportError: none")),
    }

    def answer(name: str, *_: object, seconds: int) -> str:
        return answers.get(name, answers["loader"])()

    monkeypatch.setattr(rivals, "_run", answer)
    monkeypatch.setattr(rivals, "version_of", lambda package: None if package == "grain" else "1.0")
    measured = rivals.measure(tmp_path, {"changes": 1, "seconds": 60})
    rows = dict(zip(["head", "line", *CONTENDERS], [note.split("|")[3:-1] for note in measured.notes], strict=True))
    assert rows["loader"] == ["4 × 2 → 4 × 2", "0", "0", "exactly once"]
    assert rows["torchdata"] == ["4 × 2 → 4 × 2", "3", "1", "resumed; ranks take 31 to 32 steps"]
    assert rows["datasets_rows"] == ["4 × 2 → 4 × 2", "", "", "refused: ValueError: no / more"]
    assert rows["datasets_shards"] == ["4 × 2 → 4 × 2", "", "", "hung: no end within 60 s"]
    assert rows["datasets_alone"] == ["", "", "", "not shown: ImportError: none"]
    assert rows["grain"] == rows["grain_elastic"] == ["", "", "", "not shown: grain is not installed"]
    (found,) = measured.rounds
    assert (found["torchdata_lost"], found["datasets_rows_refused"], found["datasets_shards_hung"]) == (3, 1, 1)


def _raise(error: Exception) -> str:
    raise error


def test_a_driver_that_hangs_is_killed(tmp_path: Path) -> None:
    with pytest.raises(rivals.Hung, match="within 0 s"):
        rivals._run("loader", tmp_path, "1x0", "1x0", seconds=0)
    with pytest.raises(rivals.Failed, match="writes no data set"):
        rivals._run("loader", tmp_path, seconds=60)
