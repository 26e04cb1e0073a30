"""The bench of the redo log: its keys, its exit status, and the notes of killed ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import differential
from bench.differential_kills import Notes, lost
from bench.differential_parts import DIFFERENTIAL_PARTS
from bench.goals import GOALS
from bench.part import Measured, Params, Part

ROUNDS: dict[str, dict[str, float]] = {
    "overhead": {"cpu_with": 1.01, "cpu_without": 1.0, "stall_with": 1.0, "stall_without": 1.0},
    "overhead_coded": {"cpu_with": 1.05, "cpu_without": 1.0, "stall_with": 1.0, "stall_without": 1.0},
    "boundary": {"with": 0.003, "without": 0.001},
    "records": {"record_ratio_fp32": 3.0, "record_ratio_fp32_coded": 3.5, "record_ratio_bf16_clipped_coded": 8.0},
    "kills": {"steps": 1.0, "seconds": 1.5},
    "kills_short": {"steps": 2.0, "seconds": 0.1},
    "redo": {"redo": 0.3, "bare": 0.25, "redo_mib": 110.0, "step_mib": 100.0},
}
"""What one round of each part may have measured."""


def run(part: Part, params: Params, folder: Path, variables: dict[str, str]) -> Measured:
    assert params == part.quick and not variables
    return Measured([ROUNDS[part.name]] * 7, [])


def test_every_part_measures_the_keys_that_are_listed_for_it() -> None:
    assert set(differential.KEYS) == set(DIFFERENTIAL_PARTS) == set(ROUNDS)
    for name, part in DIFFERENTIAL_PARTS.items():
        assert set(part.keys([ROUNDS[name]] * 2, {})) == set(differential.KEYS[name]) <= {goal.key for goal in GOALS}


def test_rounds_become_keys(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert differential.main(["--quick", "--json", str(path), "--folder", str(tmp_path)], run=run) == 0
    found = json.loads(path.read_text())
    assert (found["boundary_ms_1000_parameters"], found["record_ratio_fp32"]) == (2.0, 3.0)
    assert (found["rpo_steps_worst"], found["rpo_seconds_p95"]) == (1.0, 0.1)
    assert (found["redo_vs_step"], found["redo_peak_extra_mib"]) == (1.2, 10.0)


@pytest.mark.parametrize(
    ("key", "upper", "status"),
    [
        ("redo_overhead", 1.02, 0),
        ("redo_overhead", 1.04, 1),
        ("redo_overhead_coded", 1.06, 0),
        ("redo_overhead_coded", 1.08, 1),
    ],
)
def test_the_upper_end_of_the_overhead_counts(tmp_path: Path, key: str, upper: float, status: int) -> None:
    def measured(*_: object, **__: object) -> Measured:
        rounds = [{**ROUNDS["overhead"], "cpu_with": upper if number < 3 else 1.0} for number in range(12)]
        return Measured(rounds, [])

    command = ["--quick", "--json", str(tmp_path / "out.json"), "--folder", str(tmp_path), "--only", key]
    assert differential.main(command, run=measured) == status


def test_a_kill_costs_the_steps_after_the_one_that_was_loaded(tmp_path: Path) -> None:
    (tmp_path / "notes.0").write_text("loaded 3 \n4 10.0\n5 10.5\nbase\n6 11.0\n7 11.")
    (tmp_path / "notes.1").write_text("loaded 3 the log ends\n4 10.0\n5 10.5\nbase\n6 11.0\n7 11.6\n")
    killed = Notes.of_ranks(tmp_path / "notes")
    assert [(each.loaded, each.why, max(each.ends)) for each in killed] == [(3, "", 6), (3, "the log ends", 7)]
    assert lost(killed, 6) == {"steps": 1, "seconds": pytest.approx(0.6), "step_seconds": pytest.approx(0.5)}
    # Every rank had sealed a step that no rank had ended.
    assert lost(killed, 8)["steps"] == lost(killed, 8)["seconds"] == 0


def test_notes_that_do_not_exist_yet_are_empty(tmp_path: Path) -> None:
    assert not any(each.is_loaded or each.has_base for each in Notes.of_ranks(tmp_path / "notes"))
