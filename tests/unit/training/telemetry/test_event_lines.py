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
    lines = EventLines([str(path)])
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
    lines = EventLines([str(path)])
    lines.refresh()
    assert not lines.open


def test_a_half_line_waits_and_damage_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = line("began", 0, 100)
    path.write_text('{"event": "began"}\nno json\n' + whole[:20])
    lines = EventLines([str(path)])
    lines.refresh()
    assert not lines.open
    assert [each.split(" is damaged")[0] for each in lines.damaged] == [f"{path}: line 1", f"{path}: line 2"]
    with path.open("a") as file:
        file.write(whole[20:] + line("unheard-of", 0, 1) + '{"time": "' + "9" * 400 + '"}\n')
    lines.refresh()
    assert sorted(lines.open["save", 100]) == [0]
    assert len(lines.damaged) == 4
    path.write_text(line("began", 0, 300))  # A log rotation.
    lines.refresh()
    assert ("save", 300) in lines.open


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no-such"):
        EventLines([str(tmp_path / "no-such")])
