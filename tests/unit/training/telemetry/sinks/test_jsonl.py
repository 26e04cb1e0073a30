"""Lines of JSON: one for each beginning and each end, whole whatever else writes to the file."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import InvalidError, MissingError
from holdfast.observers import (
    Began,
    Decided,
    Ended,
    KindCoding,
    KindDecision,
    LogInterrupted,
    LogRedone,
    LogSealed,
    Operation,
    Progress,
    RankReport,
    jsonl,
)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_in_lines(tmp_path: Path) -> None:
    state = {"w": torch.ones(5000)}
    with holdfast.CheckpointManager(
        tmp_path / "run", process_group=False, observers=[jsonl(tmp_path / "rank-{rank}.jsonl")]
    ) as manager:
        report = manager.save(3, state).wait()
        with pytest.raises(MissingError):
            manager.load(state, 9)
    assert report is not None
    began, ended, failed = lines(tmp_path / "rank-0.jsonl")
    assert (began["event"], began["verb"], began["step"], began["rank"]) == ("began", "save", 3, 0)
    assert began["url"] == f"{tmp_path}/run/step-000000000003"
    assert (ended["event"], ended["id"], ended["bytes"], ended["tensors"]) == ("ended", report.attempt, 20_000, 1)
    assert ended["committed_seconds"] == report.committed_seconds <= ended["seconds"] + 1e-5
    assert ended["phases"] == {each.name: each.seconds for each in report.phases}
    assert ended["time"] >= began["time"]
    assert (failed["event"], failed["verb"], failed["error"]) == ("failed", "load", "MissingError")
    assert "no committed step 9" in failed["message"]


def test_decisions_on_codecs_are_lines_and_a_field_of_the_end(tmp_path: Path) -> None:
    own = jsonl(tmp_path / "events.jsonl")
    operation = Operation("save", 3, "x", 0, 1)
    own.on_event(Decided(operation, {"float32 exp_avg": KindDecision(True, "because")}, 0.5, 100.0))
    coding = KindCoding("float32 exp_avg", "planes", 120, 100, 1.2, 7e8, 1e9, 0.5, 0.6, "because")
    own.on_event(Ended(RankReport(operation, "0" * 16, "h", 1, 0.0, 1.0, (), 120, {}, (coding,))))
    decided, ended = lines(tmp_path / "events.jsonl")
    assert (decided["event"], decided["step"], decided["predicted_seconds"]) == ("decided", 3, 0.5)
    assert decided["time"] == "1970-01-01T00:01:40.000+00:00"
    assert decided["decisions"] == {"float32 exp_avg": {"is_coded": True, "why": "because"}}
    (shown,) = ended["codings"]
    assert (shown["kind"], shown["codec"], shown["ratio"], shown["why"]) == (
        "float32 exp_avg",
        "planes",
        1.2,
        "because",
    )


def test_lines_of_many_writers_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def write(rank: int) -> None:
        own = jsonl(path)
        for step in range(200):
            own.on_event(Began(Operation("save", step, "x" * 500, rank, 8), 0.0))
            own.on_event(Progress(1, 2))

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    found = lines(path)
    for rank in range(8):
        assert [each["step"] for each in found if each["rank"] == rank] == list(range(200))


def test_a_file_that_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    own = jsonl(tmp_path / "events.jsonl")
    own.on_event(Began(Operation("save", 1, "x", 0, 1), 0.0))
    (tmp_path / "events.jsonl").rename(tmp_path / "old.jsonl")
    own.on_event(Began(Operation("save", 2, "x", 0, 1), 0.0))
    assert [each["step"] for each in lines(tmp_path / "old.jsonl")] == [1]
    assert [each["step"] for each in lines(tmp_path / "events.jsonl")] == [2]


def test_a_path_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="path is int"):
        jsonl(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match="there is no folder"):
        jsonl(tmp_path / "absent" / "events.jsonl")


def test_interruptions_and_redos_of_a_log_are_lines_and_seals_are_none(tmp_path: Path) -> None:
    own = jsonl(tmp_path / "events.jsonl")
    own.on_event(LogSealed(11, "x", 2, 1, 100, 0.0, 11))
    own.on_event(LogInterrupted(12, "x", 2, "because", 100.0))
    own.on_event(LogRedone(17, "x", 2, 10, 7, 0.5, 101.0))
    assert lines(tmp_path / "events.jsonl") == [
        {
            "time": "1970-01-01T00:01:40.000+00:00", "event": "interrupted", "verb": "log", "step": 12, "url": "x",
            "rank": 2, "why": "because",
        },
        {
            "time": "1970-01-01T00:01:41.000+00:00", "event": "redone", "verb": "log", "step": 17, "url": "x",
            "rank": 2, "base": 10, "records": 7, "seconds": 0.5,
        },
    ]  # fmt: skip
