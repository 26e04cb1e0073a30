"""What the bench makes of its rounds: ratios, merged results, tables that nobody types."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from bench import pages, report
from bench.goals import GOALS, Goal
from bench.large import keys as large_keys
from bench.part import Measured, Params, Part, Round, Spread, in_turn, slowest_tenths_ratio, times_as_fast
from bench.parts import PARTS
from bench.training import keys as training_keys

ROUNDS: list[Round] = [
    {"ours": 1.0, "a": 3.0, "b": 2.0},
    {"ours": 2.0, "a": 3.0, "b": 5.0},
    {"ours": 1.0, "a": 4.0, "b": 9.0},
    {"ours": 0.1},
]


def part(name: str, *keys: str, value: float) -> Part:
    def of(rounds: object, params: Params) -> dict[str, Spread]:
        return {key: Spread(value, value - 1, value + 1) for key in keys}

    sizes = {"full": {"mib": 2}, "quick": {"mib": 1}}
    return Part(name=name, question="?", ranks=1, measure=lambda folder, params: MEASURED, keys=of, **sizes)


MEASURED = Measured([{"ours": 1.0}], ["said"])


def test_a_ratio_is_taken_against_the_best_of_its_own_round() -> None:
    assert times_as_fast(ROUNDS, "ours", ["a", "b"]) == Spread(2.0, 1.5, 4.0)


def test_the_slowest_tenths_are_compared_for_the_rival_that_does_best_by_them() -> None:
    rounds: list[Round] = [{"ours": 1.0, "steady": 3.0, "swings": 2.0} for _ in range(20)]
    for number in (3, 9, 12):
        rounds[number]["swings"] = 20.0
    found = slowest_tenths_ratio(rounds, "ours", ["steady", "swings"])
    assert found == Spread(3.0, 3.0, 3.0)
    assert slowest_tenths_ratio(rounds, "ours", ["swings"]).median == pytest.approx(20.0)


def test_nobody_always_goes_first() -> None:
    entries = ["a", "b", "c", "d"]
    firsts = [in_turn(entries, number)[0] for number in range(8)]
    assert set(firsts) == set(entries)
    assert all(sorted(in_turn(entries, number)) == entries for number in range(8))
    before = [in_turn(entries, number).index("a") < in_turn(entries, number).index("b") for number in range(8)]
    assert before.count(True) == 4


def test_training_is_compared_by_whole_time() -> None:
    rounds: list[Round] = [{"with": 6.0, "without": 5.0}, {"with": 5.0, "without": 6.0}, {"with": 6.6, "without": 5.0}]
    assert training_keys(rounds, {})["train_slowdown"] == Spread(pytest.approx(17.6 / 16), 5 / 6, 6.6 / 5)


def test_what_the_large_part_measures_becomes_every_key_it_owns() -> None:
    chance = random.Random(5)
    saves = ["save", "save_dcp_1", "save_dcp_2", "limit_write_1x4", "limit_write_8x1", "huge_write_1x4"]
    thorough = ["save_meta_1", "save_torch_save", "save_safetensors", "limit_read_1x4", "huge_read_1x4"]
    thorough += [f"load_{kind}{who}" for kind in ("cold", "warm") for who in ("", "_dcp_1", "_dcp_2")]
    rounds = []
    for number in range(6):
        names = saves + (thorough if number % 3 == 0 else [])
        rounds.append({name: chance.uniform(1.0, 2.0) for name in names})
    found = large_keys(rounds, {})
    limits = [min(each["limit_write_1x4"], each["limit_write_8x1"]) / each["save"] for each in rounds]
    assert found["save_vs_limit"].low == min(limits)
    assert found["save_vs_limit_huge_pages"].low == min(each["huge_write_1x4"] / each["save"] for each in rounds)
    assert found["load_cold_vs_limit"].high == max(rounds[n]["limit_read_1x4"] / rounds[n]["load_cold"] for n in (0, 3))
    assert "save_vs_torch_checkpointing" in found
    assert "save_vs_torch_checkpointing" not in large_keys(
        [{name: s for name, s in each.items() if name != "save_meta_1"} for each in rounds], {}
    )


def test_a_part_that_ran_alone_leaves_the_others_as_they_were() -> None:
    latest = report.merged({}, part("one", "save_vs_dcp", "gone", value=2.0), {"mib": 2}, MEASURED)
    latest = report.merged(latest, part("two", "load_cold_vs_dcp", value=3.0), {"mib": 1}, MEASURED)
    assert (latest["save_vs_dcp"], latest["save_vs_dcp_min"], latest["load_cold_vs_dcp_max"]) == (2.0, 1.0, 4.0)
    latest = report.merged(latest, part("one", "save_vs_dcp", value=5.0), {"mib": 2}, MEASURED)
    assert latest["save_vs_dcp"] == 5.0
    assert not [name for name in latest if name.startswith("gone")], "a key that its part no longer measures is no key"
    parts = latest["parts"]
    assert isinstance(parts, dict)
    assert (parts["one"]["is_full"], parts["two"]["is_full"]) == (True, False)
    assert parts["two"]["params"] == {"mib": 1}
    assert report.rounds_of(latest, "two") == [{"ours": 1.0}]


def test_results_that_lie_beside_are_taken_by_the_keys_that_are_known(tmp_path: Path) -> None:
    beside = {"commit_seconds_16384": 8.0, "index_bytes_per_chunk": 39, "index_bytes_per_chunk_max": 41, "other": 1}
    (tmp_path / "scale.json").write_text(json.dumps(beside))
    (tmp_path / "latest.json").write_text(json.dumps({"commit_seconds_16384": 99.0}))
    found = report.with_results_beside({"save_vs_dcp": 2.0}, tmp_path)
    assert found["commit_seconds_16384"] == found["commit_seconds_16384_min"] == 8.0
    assert (found["index_bytes_per_chunk_min"], found["index_bytes_per_chunk_max"]) == (39, 41)
    assert found["save_vs_dcp"] == 2.0
    assert "other" not in found


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    latest = report.merged({}, part("one", "save_vs_dcp", value=2.0), {"mib": 2}, MEASURED)
    report.write(latest, tmp_path / "latest.json")
    assert report.read(tmp_path / "latest.json") == latest


@pytest.mark.parametrize(
    ("measured", "less_is_better", "verdict"),
    [
        (1.5, False, "goal"),
        (1.49, False, "floor"),
        (1.04, False, "missed"),
        (1.05, True, "goal"),
        (1.2, True, "floor"),
        (1.51, True, "missed"),
    ],
)
def test_goal_and_floor_are_told_apart(measured: float, less_is_better: bool, verdict: str) -> None:
    bounds = (1.05, 1.5) if less_is_better else (1.5, 1.05)
    assert Goal("key", "meaning", *bounds, less_is_better=less_is_better).reached(measured) == verdict


def test_floors_are_easier_than_goals() -> None:
    assert len({goal.key for goal in GOALS}) == len(GOALS)
    for goal in GOALS:
        assert (goal.goal is None) == (goal.floor is None)
        if goal.goal is not None and goal.floor is not None:
            assert goal.reached(goal.goal) == "goal"
            assert goal.reached(goal.floor) in ("floor", "goal")
            assert dataclasses.replace(goal, goal=goal.floor, floor=goal.goal).reached(goal.floor) == "goal"


def test_the_tables_say_what_was_measured_last() -> None:
    latest = report.read()
    blocks = {pages.README: pages.first_screen(latest), pages.PERFORMANCE: pages.block(latest, pages.PERFORMANCE)}
    for page, text in blocks.items():
        assert text in page.read_text(), f"{page.name}: `python -m bench --readme` fills it"


def test_the_first_screen_has_six_rows_of_keys_that_are_measured() -> None:
    assert len(pages.ROWS) == 6
    assert {key for _, *keys in pages.ROWS for key in keys if key is not None} <= {goal.key for goal in GOALS}


def test_every_picture_that_is_shown_is_there() -> None:
    latest = report.read()
    for picture in pages.PICTURES:
        assert picture.part in PARTS
        assert (pages.FOLDER / f"{picture.name}.png").exists() == picture.can_be_drawn(latest)


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("no place\n")
    with pytest.raises(ValueError, match="no <!-- bench:begin -->"):
        pages.put_block(tmp_path / "page.md", "table")
    assert (tmp_path / "page.md").read_text() == "no place\n"


def test_a_block_replaces_the_one_before(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter\n")
    pages.put_block(page, pages.block({"save_vs_dcp": 2.0, "save_vs_dcp_min": 1.0, "save_vs_dcp_max": 3.0}, page))
    text = page.read_text()
    assert "old" not in text
    meaning = "durable save: speed ÷ PyTorch DCP (best of the round)"
    assert f"| `save_vs_dcp`: {meaning} | 2.00 | 1.00–3.00 |" in text
    assert text.startswith("before\n") and text.endswith("\nafter\n")
