"""`make campaign`: kills, power cuts, races and drawn faults on this machine, part by part, for over an hour.

A part is tests of the suite with larger numbers. All parts are run, whether one fails or not.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.campaign.record import ROOT

Run = Callable[[Sequence[str], Mapping[str, str]], int]
"""Runs a command with an environment; returns the exit status."""


@dataclass(frozen=True)
class Part:
    """Tests that are run together."""

    files: tuple[str, ...]
    test_seconds_max: int = 0
    """Seconds after which a test is stopped; 0: those of the suite."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment of these tests only."""


PARTS = {
    "races": Part(("tests/crash/writers/test_epoch_races.py",)),
    "clocks": Part(("tests/crash/writers/test_epoch_clock.py",)),
    "fencing": Part(("tests/crash/kills/test_epoch_kill.py",)),
    "collecting": Part(("tests/crash/kills/test_collect_kill.py",)),
    "tagging": Part(("tests/crash/kills/test_tag_move_kill.py",)),
    "repairing": Part(("tests/crash/kills/test_repair_kill.py",)),
    "saving": Part(("tests/crash/kills/test_kill_sweep.py", "tests/crash/kills/test_power_cut.py")),
    "overwriting": Part(("tests/crash/kills/test_overwrite_kill.py",)),
    "preemptions": Part(("tests/distributed/jobs/test_preemption.py",)),
    "discarding": Part(("tests/crash/kills/test_discard_kill.py",)),
    "removing": Part(("tests/crash/kills/test_remove_kill.py", "tests/crash/writers/test_remove_beside.py")),
    "draining": Part(("tests/crash/kills/test_drain_kill.py",)),
    "importing": Part(("tests/crash/kills/test_import_kill.py",)),
    "lives": Part(("tests/property/test_life_of_a_run.py", "tests/property/test_two_roots.py"), 3600),
    "properties": Part(
        (
            "tests/property/test_any_mesh_to_any_mesh.py",
            "tests/property/test_unchanged.py",
            "tests/property/test_compressed.py",
        ),
        7200,
        {"PROPERTY_TIMES": "120"},
    ),
    "compressed": Part(
        ("tests/crash/damage/test_compressed_flips.py", "tests/distributed/matrix/test_matrix.py"), 7200
    ),
    "io_errors": Part(("tests/crash/faults/test_io_errors.py",)),
    "differential": Part(
        (
            "tests/crash/redo_log/test_flips.py",
            "tests/crash/redo_log/test_damaged_ranks.py",
            "tests/crash/redo_log/test_store_faults.py",
            "tests/crash/redo_log/test_departures.py",
            "tests/crash/redo_log/test_every_optimizer.py",
            "tests/crash/redo_log/test_killed_runs.py",
            "tests/crash/redo_log/test_cut_and_faults.py",
            "tests/property/test_life_of_a_logged_run.py",
        ),
        3600,
        {
            "DEPARTURES": "520",
            "REDO_LAYOUTS": "all",
            "REDO_KILLS": "100",
            "REDO_CUTS": "50",
            "LOGGED_LIVES": "2000",
            "LOGGED_STEPS": "12",
        },
    ),
    "activations": Part(
        (
            "tests/unit/activations/runtime/test_random_units.py",
            "tests/unit/activations/runtime/test_bounded.py",
            "tests/unit/activations/runtime/test_parity.py",
            "tests/distributed/jobs/test_activations.py",
        ),
        3600,
        {"RANDOM_MODULES": "10000", "HOSTILE_TENSORS": "100000", "PARITY_STEPS": "600"},
    ),
    "layouts": Part(("tests/property/test_layouts.py",), 3600, {"PROPERTY_TIMES": "30"}),
    "elastic": Part(("tests/crash/elastic/test_elastic.py",), 3600, {"ELASTIC_ROUNDS": "3"}),
    "data": Part(
        ("tests/property/test_data_lives.py", "tests/distributed/jobs/test_data.py"),
        3600,
        {"DATA_LIVES": "20000", "DATA_RANK_LIVES": "20"},
    ),
    "failed_saves": Part(("tests/distributed/failures/test_failed_saves.py",)),
}
"""By name, in the order of a whole campaign."""


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def main(arguments: Sequence[str] | None = None, run: Run = _run) -> int:
    """Run the parts that are asked for; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.local_parts", description=__doc__)
    parser.add_argument("--only", default="", help=f"parts, by comma: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=100, help="races, preemptions, and a fifth of the lives of runs")
    parser.add_argument("--faults", type=int, default=1000, help="faults drawn for saves of trainings")
    asked = parser.parse_args(arguments)
    names = tuple(filter(None, asked.only.split(","))) or tuple(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--only: no part {', '.join(unknown)}; expected some of {', '.join(PARTS)}")
    numbers = _numbers(asked.rounds, asked.faults)
    failed = [name for name in names if not _is_well(name, numbers, run)]
    print("campaign: passed" if not failed else f"campaign: FAILED: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def _numbers(rounds: int, faults: int) -> dict[str, str]:
    """Return the variables by which the tests take every case, or so many."""
    strides = ("COLLECT_STRIDE", "TAG_STRIDE", "GO_BACK_STRIDE", "SWEEP_STRIDE", "COMPRESSED_STRIDE", "DRAIN_STRIDE")
    return dict.fromkeys(strides, "1") | {
        "POWER_CUTS_ON": "ext4,xfs",
        "JUDGE_EVERY": "1",
        "EPOCH_RACE_ROUNDS": str(rounds),
        "PREEMPTION_ROUNDS": str(rounds),
        "LIFE_EXAMPLES": str(5 * rounds),
        "FLIPPED_BYTES": "all",
        "COMPRESSED_LAYOUTS": "all",
        "FAULTS": str(faults),
    }


def _is_well(name: str, numbers: Mapping[str, str], run: Run) -> bool:
    part, began = PARTS[name], time.monotonic()
    print(f"campaign: {name}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-s", *part.files]
    if seconds := part.test_seconds_max:
        # The stacks that faulthandler prints come after those of the stopped test.
        command += ["--timeout", str(seconds), "-o", f"faulthandler_timeout={seconds + 60}"]
    is_well = run(command, {**os.environ, **numbers, **part.variables}) == 0
    print(f"campaign: {name}: {'passed' if is_well else 'FAILED'} in {time.monotonic() - began:.0f} s", flush=True)
    return is_well


if __name__ == "__main__":
    sys.exit(main())
