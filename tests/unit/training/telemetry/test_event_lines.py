"""Lines of events are read once; damaged ones are shown, and tell nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.errors import MissingError
from holdfast.training.telemetry.event_lines import EventLines


def line(event: str, rank: int, step: int, second: int = 0, **more: object) -> str:
    fields = {"time": f"2026-01-01T00:00:{second:02}.000+00:00", "event": event, "verb": "save", "step": step}
    return json.dumps({**fields, "rank": rank, "world_size": 2, "url": "root", **more}) + "\n"


def test_a_try_is_open_until_each_rank_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(line("began", 0, 100) + line("began", 1, 100))
    lines = EventLines([str(path)], ["root"])
    lines.refresh()
    assert sorted(lines.open["save", 100]) == [0, 1]
    with path.open("a") as file:
        file.write(line("ended", 0, 100, 3, host="a"))
    lines.refresh()
    assert sorted(lines.open["save", 100]) == [1] and lines.hosts == {0: "a"}
    with path.open("a") as file:
        file.write(line("failed", 1, 100, 4, error="UnavailableError", message="no space"))
    lines.refresh()
    assert not lines.open
    assert [(each.rank, each.step, each.message) for each in lines.failed] == [(1, 100, "no space")]


def test_a_killed_try_ends_with_a_later_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(line("began", 0, 100) + line("began", 0, 200, 5) + line("ended", 0, 200, 6))
    lines = EventLines([str(path)], ["root"])
    lines.refresh()
    assert not lines.open


def test_a_half_line_waits_and_damage_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = line("began", 0, 100)
    path.write_text('{"event": "began"}\nno json\n' + whole[:20])
    lines = EventLines([str(path)], ["root"])
    lines.refresh()
    assert not lines.open
    assert [each.split(" is damaged")[0] for each in lines.damaged] == [f"{path}: line 1", f"{path}: line 2"]
    with path.open("a") as file:
        file.write(whole[20:] + line("unheard-of", 0, 1) + '{"time": "' + "9" * 400 + '"}\n')
    lines.refresh()
    assert sorted(lines.open["save", 100]) == [0]
    assert len(lines.damaged) == 3  # An event of a later version is ignored.
    path.write_text(line("began", 0, 300))  # A log rotation.
    lines.refresh()
    assert ("save", 300) in lines.open


def test_a_longer_file_at_the_same_path_is_read_from_its_start(tmp_path: Path) -> None:
    path, fresh = tmp_path / "events.jsonl", tmp_path / "fresh"
    path.write_text("no json\n" + line("began", 0, 100))
    lines = EventLines([str(path)], ["root"])
    lines.refresh()
    assert len(lines.damaged) == 1
    fresh.write_text(line("ended", 0, 100) + line("began", 0, 200) + line("began", 1, 200))
    assert fresh.stat().st_size > path.stat().st_size
    fresh.replace(path)
    lines.refresh()
    assert {key: sorted(ranks) for key, ranks in lines.open.items()} == {("save", 200): [0, 1]}
    assert not lines.damaged, "the new file has no damaged line"


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no-such"):
        EventLines([str(tmp_path / "no-such")], ["root"])


def after(tmp_path: Path, *told: str) -> EventLines:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(told))
    lines = EventLines([str(path)], ["root"])
    lines.refresh()
    return lines


def test_a_failure_is_over_once_its_rank_has_ended_a_later_save(tmp_path: Path) -> None:
    told = [line("failed", 0, 200, 50), line("failed", 1, 200, 50), line("ended", 0, 150, 2)]
    assert [each.rank for each in after(tmp_path, *told).failed] == [1]
    assert [each.rank for each in after(tmp_path, *told, line("ended", 1, 100, verb="load")).failed] == [1]
    assert after(tmp_path, *told, line("ended", 1, 150)).failed == []


def test_a_rank_stays_named_once_its_tries_are_over(tmp_path: Path) -> None:
    told = [line("began", 3, 100), line("ended", 3, 100), line("logged", 5, 100), "no json\n"]
    assert after(tmp_path, *told).named == {3, 5}


def test_a_begin_is_over_after_going_back_with_fewer_ranks_or_once_the_rank_does_more(tmp_path: Path) -> None:
    killed = [line("began", rank, 300) for rank in (0, 1)]
    assert sorted(after(tmp_path, *killed, line("began", 0, 200)).open["save", 300]) == [1]
    fewer = after(tmp_path, *killed, line("began", 0, 400, world_size=1))
    assert {key: sorted(ranks) for key, ranks in fewer.open.items()} == {("save", 300): [0], ("save", 400): [0]}
    load = line("began", 0, 300, verb="load")
    assert sorted(after(tmp_path, load, line("began", 0, 400)).open) == [("save", 400)]
    assert sorted(after(tmp_path, load, line("began", 0, 400, verb="load")).open) == [("load", 400)]
    assert ("load", 300) in after(tmp_path, load, line("began", 0, 400, verb="drain")).open


def test_lines_on_other_runs_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    path = tmp_path / "events.jsonl"
    ours = [f"{tmp_path}/run/step-1", f"{tmp_path}/link", f"own://{tmp_path}/run", "s3://bucket/run/step-2", ""]
    urls = [*ours, f"{tmp_path}/run-2", "s3://bucket/ru", "s3://other/run"]
    path.write_text("".join(line("failed", rank, 100, url=url) for rank, url in enumerate(urls)))
    lines = EventLines([str(path)], [f"{tmp_path}/run", "s3://bucket/run"])
    lines.refresh()
    assert [urls[each.rank] for each in lines.failed] == ours
    assert lines.named == {*range(len(ours))}


def test_a_file_that_was_removed_is_named_until_it_is_back(tmp_path: Path) -> None:
    lines = after(tmp_path, line("began", 0, 100))
    path = tmp_path / "events.jsonl"
    path.rename(tmp_path / "moved")
    lines.refresh()
    assert [str(path) in each for each in lines.damaged] == [True]
    path.write_text(line("began", 1, 100))
    lines.refresh()
    assert not lines.damaged
