"""`holdfast tag`, and what `ls` shows of metrics and tags."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import holdfast as package
from holdfast.api import shown_age
from tests.unit.cli.running import holdfast


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """A root whose steps carry metrics."""
    root = tmp_path / "told"
    with package.CheckpointManager(root, process_group=False) as manager:
        manager.save(10, {"a": 1}, metrics={"loss": 0.125, "psnr": math.nan})
        manager.save(20, {"a": 2}, metrics={"loss": 1e-9})
        manager.save(30, {"a": 3})
    return root


def test_tags_are_given_listed_and_taken_away(told: Path) -> None:
    assert holdfast("tag", told).out == "no tags yet\n"
    for name in ("paper", "v1.0"):
        assert (holdfast("tag", told, 10, name).status, holdfast("tag", told, 10, name).out) == (0, "")
    listed = holdfast("tag", told).out.splitlines()
    assert [line.split()[:2] for line in listed] == [["TAG", "STEP"], ["paper", "10"], ["v1.0", "10"]]
    document = holdfast("tag", told, "--json").json()
    assert [(each["tag"], each["step"], each["held"]) for each in document["tags"]] == [
        ("paper", 10, True),
        ("v1.0", 10, True),
    ]
    assert holdfast("tag", told, "--remove", "paper").status == 0
    assert [each["tag"] for each in holdfast("tag", told, "--json").json()["tags"]] == ["v1.0"]
    assert holdfast("verify", told / "step-000000000010").status == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((20, "paper"), "tag 'paper' names step 10; expected a free name"),
        ((40, "new"), "no committed step 40"),
        ((10, "../new"), "expected 1 to 100 of letters"),
        ((10, ".new"), "expected 1 to 100 of letters"),
        ((10,), "expected: holdfast tag ROOT STEP NAME"),
        (("--remove", "nobody"), "no tag 'nobody'; there are: paper"),
        ((10, "x", "--remove", "paper"), "--remove takes the name alone"),
    ],
)
def test_what_cannot_be_tagged_is_refused_in_one_line(told: Path, arguments: tuple[object, ...], said: str) -> None:
    assert holdfast("tag", told, 10, "paper").status == 0
    ended = holdfast("tag", told, *arguments)
    assert (ended.status, ended.out) == (2, "")
    assert said in ended.err and len(ended.err.splitlines()) == 1
    assert [each["tag"] for each in holdfast("tag", told, "--json").json()["tags"]] == ["paper"]


def test_tag_of_one_checkpoint_is_refused(told: Path) -> None:
    ended = holdfast("tag", told / "step-000000000010", 10, "paper")
    assert ended.status == 2 and "not the root of a run" in ended.err


def test_a_damaged_tag_and_one_whose_step_is_gone_are_told(told: Path) -> None:
    for step, name in ((10, "damaged"), (20, "gone"), (30, "held")):
        assert holdfast("tag", told, step, name).status == 0
    (told / "tags/damaged.json").write_bytes(b"{}")
    (told / "step-000000000020/manifest.json").unlink()
    ended = holdfast("tag", told)
    assert "gone: step 20 is gone, or was saved again since" in ended.out
    assert "damaged: " in ended.out and "damaged.json" in ended.out
    document = holdfast("tag", told, "--json").json()
    assert [(each["tag"], each["held"]) for each in document["tags"]] == [("gone", False), ("held", True)]
    assert list(document["damaged"]) == ["damaged"]
    # Either is taken away like any other.
    assert holdfast("tag", told, "--remove", "damaged").status == 0
    assert holdfast("tag", told, "--remove", "gone").status == 0
    assert holdfast("tag", told).out.split()[3:5] == ["held", "30"]


def test_ls_shows_metrics_and_tags_where_there_are_any(told: Path) -> None:
    assert "TAGS" not in holdfast("ls", told).out
    assert holdfast("tag", told, 30, "paper").status == 0
    header, *rows = [line.split() for line in holdfast("ls", told).out.splitlines()]
    assert header[-2:] == ["METRICS", "TAGS"]
    assert rows[0][-3:] == ["loss=0.125", "psnr=nan", "-"]
    assert rows[1][-2:] == ["loss=1e-09", "-"]
    assert rows[2][-2:] == ["-", "paper"]
    steps = holdfast("ls", told, "--json").json()["steps"]
    assert [each["metrics"] for each in steps] == [{"loss": 0.125, "psnr": "NaN"}, {"loss": 1e-9}, {}]
    assert [each["tags"] for each in steps] == [[], [], ["paper"]]


def test_inspect_shows_metrics(told: Path) -> None:
    lines = [line.split() for line in holdfast("inspect", told / "step-000000000010").out.splitlines()]
    assert ["metrics", "loss=0.125", "psnr=nan"] in lines
    document = holdfast("inspect", told / "step-000000000010", "--json").json()
    assert document["metrics"] == {"loss": 0.125, "psnr": "NaN"}
    assert holdfast("inspect", told / "step-000000000030", "--json").json()["metrics"] == {}


def test_ages_are_for_people() -> None:
    now = datetime(2026, 3, 1, 12, tzinfo=UTC)

    def age(**ago: float) -> str:
        return shown_age((now - timedelta(**ago)).isoformat(timespec="seconds"), now)

    assert [age(seconds=0), age(seconds=119), age(minutes=2), age(minutes=119), age(hours=47), age(days=2)] == [
        "0 s",
        "119 s",
        "2 min",
        "119 min",
        "47 h",
        "2 d",
    ]
    # Clocks differ, and old checkpoints say what they like.
    assert [age(seconds=-5), shown_age("yesterday", now), shown_age("2026-03-01", now)] == ["-", "-", "-"]
