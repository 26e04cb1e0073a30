"""Reports and traces of real gloo ranks: each rank's own, and the same in the trace that the command makes of them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.backends.stores.local import LocalStore
from holdfast.base.types.events import RankReport
from holdfast.settings import Settings
from holdfast.stored.repository.reports import reports_in
from tests.support.forked_processes import environment
from tests.support.gloo_worlds import Case, run_world
from tests.unit.training.telemetry.traced import require_sound

RANKS = 2


@dataclass(frozen=True)
class Observed:
    root: Path
    log: Path
    said: list[Any]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    folder = tmp_path_factory.mktemp("observing")
    root, log = folder / "run", folder / "events.jsonl"
    case = Case("tests.distributed.saves.observing_cases:save_and_load", {"path": str(root), "log": str(log)})
    return Observed(root, log, run_world(RANKS, [case], folder / "world").values("save_and_load"))


def reports_of(root: Path, step: int) -> dict[tuple[str, int], RankReport]:
    store = LocalStore(root, settings=Settings())
    found = [each for _, each in reports_in(store, f"step-{step:012d}/")]
    assert all(isinstance(each, RankReport) for each in found), found
    return {(each.operation.verb, each.operation.rank): each for each in found}  # type: ignore[union-attr]


def test_every_rank_left_what_it_said_of_itself(observed: Observed) -> None:
    for rank, said in enumerate(observed.said):
        one, two, loaded = said["reports"]
        for told, report in (
            (one, reports_of(observed.root, 1)["save", rank]),
            (two, reports_of(observed.root, 2)["save", rank]),
            (loaded, reports_of(observed.root, 2)["load", rank]),
        ):
            assert [[each["name"], each["start_seconds"], each["seconds"]] for each in told["phases"]] == [
                [each.name, each.start_seconds, each.seconds] for each in report.phases
            ]
            assert told["bytes"] == report.bytes > 0
            assert report.seconds <= told["seconds"] + 0.05, "no longer than it took, seen from outside"
            assert report.operation.world_size == RANKS
    assert reports_of(observed.root, 1).keys() == {("save", 0), ("save", 1)}
    (file,) = (observed.root / f"step-{1:012d}" / "reports").iterdir()
    assert file.name.endswith("-r00000.json"), "the ranks of one node share a file"


def test_phases_account_for_the_time(observed: Observed) -> None:
    for step in (1, 2):
        for report in reports_of(observed.root, step).values():
            covered, end = 0.0, 0.0
            for each in report.phases:
                covered += max(each.stop_seconds - max(each.start_seconds, end), 0.0)
                end = max(end, each.stop_seconds)
            assert end <= report.seconds
            assert report.seconds - covered <= 0.1 + 0.2 * report.seconds, report


def test_the_trace_says_what_the_reports_say(observed: Observed, tmp_path: Path) -> None:
    for path, steps in ((observed.root, (1, 2)), (observed.root / "step-000000000002", (2,))):
        output = tmp_path / "x.json"
        done = subprocess.run(
            [sys.executable, "-m", "holdfast.cli", "trace", str(path), "-o", str(output)],
            capture_output=True, text=True, timeout=60, check=False, env=environment(),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert f"{len(steps)} save{'s' * (len(steps) > 1)} and 1 load, {RANKS} ranks" in done.stdout
        document = json.loads(output.read_text())
        reports = [each for step in steps for each in reports_of(observed.root, step).values()]
        require_sound(document, reports)
        names = {each["args"]["name"] for each in document["traceEvents"] if each["name"] == "process_name"}
        assert names == {"rank 0", "rank 1"}


def test_ranks_share_a_file_of_lines(observed: Observed) -> None:
    lines = [json.loads(line) for line in observed.log.read_text().splitlines()]
    for rank in range(RANKS):
        own = [(each["verb"], each["event"], each["step"]) for each in lines if each["rank"] == rank]
        assert sorted(own) == sorted(
            (verb, event, step)
            for verb, step in (("save", 1), ("save", 2), ("load", 2))
            for event in ("began", "ended")
        )
        ended = [each for each in lines if each["rank"] == rank and each["event"] == "ended"]
        for each in ended:
            report = reports_of(observed.root, each["step"])[each["verb"], rank]
            assert (each["id"], each["bytes"]) == (report.id, report.bytes)
            for name, seconds in each["phases"].items():
                told = sum(phase.seconds for phase in report.phases if phase.name == name)
                assert abs(seconds - told) < 1e-5
