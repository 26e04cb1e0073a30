"""The measurements of `bench.compare`: Holdfast's own times and amounts, without rivals and limits.

A measurement runs once per checkout and round, in processes that import the package of that checkout. One copy of the
bench code measures both checkouts, through public names only. `scale` uses internals, so each checkout runs its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import job
from bench.paired import Amounts
from bench.part import Params, Round, slowest_tenth
from bench.parts import PARTS

EXTRA_MIB_MIN = 1.0
"""Smaller amounts of memory count as this much: the ratio of two amounts near zero says nothing."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkouts."""

    name: str
    """`before` or `after`."""

    root: Path
    """A copy of its `src` and `bench`, so that nobody edits what is measured."""

    code: Path
    """The folder whose `bench` measures both sides."""

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables with which a process imports this checkout's package."""
        return {"PYTHONPATH": str(self.root / "src")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one run measures of one checkout."""

    name: str
    """What `--only` calls it."""

    measure: Callable[[Side, Path, bool], Amounts]
    """Measures a side with small states or full ones, in a folder that every measurement of the comparison shares;
    raises SystemExit where that fails."""

    unmet: Callable[[Path], str | None] = lambda folder: None
    """Returns the reason why it cannot run with a folder, None if it can."""


def of_part(
    name: str, full: Params, quick: Params, varying: Callable[[Sequence[Round]], dict[str, float]]
) -> Measurement:
    """Return the measurement of a part of the bench whose amounts all vary."""

    def measure(side: Side, folder: Path, is_quick: bool) -> Amounts:
        return Amounts(varying(_rounds(name, quick if is_quick else full, side, folder)), {})

    return Measurement(name=name, measure=measure)


def medians(rounds: Sequence[Round], **names: str) -> dict[str, float]:
    """Return the median of each contender of a part, by key."""
    return {key: statistics.median(each[name] for each in rounds) for key, name in names.items()}


def large_amounts(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the seconds of saves and loads of a large state."""
    return {
        **medians(rounds, save_seconds="save"),
        "save_p90_seconds": slowest_tenth([each["save"] for each in rounds]),
        **medians(rounds, load_cold_seconds="load_cold", load_warm_seconds="load_warm"),
    }


def stall_amounts(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the seconds for which a copying save blocks training."""
    return medians(rounds, stall_copy_seconds="stall_copy")


def lazy_amounts(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the seconds for which a lazy save blocks training, and those until it is committed."""
    return medians(rounds, stall_lazy_seconds="lazy_blocked", lazy_committed_seconds="lazy_committed")


def training_amounts(rounds: Sequence[Round]) -> dict[str, float]:
    """Return seconds with saves over seconds without: each process chooses its own batch, so both are needed."""
    return {"train_slowdown": sum(each["with"] for each in rounds) / sum(each["without"] for each in rounds)}


def tiny_amounts(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the seconds of 20,000 tiny tensors, and of five times as many."""
    return medians(
        rounds,
        tiny_save_seconds="tiny_save",
        tiny_load_seconds="tiny_load",
        tiny_save_more_seconds="tiny_save_more",
        tiny_load_more_seconds="tiny_load_more",
    )


def tiny_dtensor_amounts(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the seconds of 20,000 tiny DTensors."""
    return medians(rounds, tiny_dtensor_save_seconds="tiny_save", tiny_dtensor_load_seconds="tiny_load")


def memory_amounts(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the memory of the way of saving that needs most, as the bench does."""
    extra_mib = statistics.median(max(each.values()) for each in rounds)
    return {"save_peak_extra_mib": max(extra_mib, EXTRA_MIB_MIN)}


def measure_amplification(side: Side, folder: Path, is_quick: bool) -> Amounts:
    """Return the bytes that a job reads over those of its state. The plan alone determines them."""
    (cases,) = _rounds("amplification", {"mib": 48 if is_quick else 192}, side, folder)
    return Amounts({}, {f"reshard_{case}_read_amplification": ratio for case, ratio in cases.items()})


def measure_interop(side: Side, folder: Path, is_quick: bool) -> Amounts:
    """Return seconds and memory of loads in place and of exports. The first run writes the foreign checkpoints."""
    times = "1" if is_quick else "3"
    command = ["-m", "bench.interop", "--ours", times, "--folder", str(folder / "interop")]
    return Amounts(printed(command, side, side.code), {})


def unmet_by_interop(folder: Path) -> str | None:
    """Return what is missing to write DeepSpeed's checkpoints, None if they are there or can be written."""
    kinds = ("zero1", "zero1_tiny", "dcp")
    are_written = all((folder / "interop" / kind / "whole").exists() for kind in kinds)
    if are_written or importlib.util.find_spec("deepspeed"):
        return None
    return "interop needs DeepSpeed; install the extra `interop`, or leave interop out with --only"


def measure_scale(side: Side, folder: Path, is_quick: bool) -> Amounts:
    """Return what plan, commit and load plan of many ranks cost, measured by the checkout's own `bench.scale`."""
    ranks = "1024" if is_quick else "16384"
    command = ["-m", "bench.scale", "--json", "--ranks", ranks, "--root", str(folder / "scale")]
    found = printed(command, side, side.root)
    varying = {key: value for key, value in found.items() if "_seconds" in key or "_mib" in key}
    exact = {key: value for key, value in found.items() if key not in varying}
    return Amounts(varying, exact)


def printed(arguments: Sequence[str], side: Side, cwd: Path) -> dict[str, float]:
    """Run Python with a side's package; return the object that it printed as JSON.

    Raises:
        SystemExit: Python failed; the message ends with its error output.
    """
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **side.variables},
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise SystemExit(f"bench: {' '.join(arguments)} failed with {side.name}:\n{ended.stderr[-4000:]}")
    found = json.loads(ended.stdout[ended.stdout.index("{") :])
    assert isinstance(found, dict), found
    return found


def _rounds(name: str, params: Params, side: Side, folder: Path) -> list[Round]:
    sizes = {**params, "rivals": 0}
    measured = job.run(PARTS[name], sizes, folder / "job", root=side.code, variables=side.variables, progress=False)
    return measured.rounds


MEASUREMENTS: dict[str, Measurement] = {
    each.name: each
    for each in (
        of_part(
            "large",
            {"mib": 2048, "rounds": 5, "thorough_every": 1},
            {"mib": 512, "rounds": 3, "thorough_every": 1},
            large_amounts,
        ),
        of_part("stall", {"mib_per_rank": 1024, "rounds": 5}, {"mib_per_rank": 256, "rounds": 3}, stall_amounts),
        of_part("lazy", {"mib_per_rank": 1024, "rounds": 5}, {"mib_per_rank": 256, "rounds": 3}, lazy_amounts),
        of_part("training", {"steps": 40}, {"steps": 20}, training_amounts),
        # Three rounds, because the first save of a process also imports modules.
        of_part("tiny", {"tensors": 20_000, "rounds": 3}, {"tensors": 20_000, "rounds": 3}, tiny_amounts),
        of_part(
            "tiny_dtensor", {"tensors": 20_000, "rounds": 3}, {"tensors": 20_000, "rounds": 3}, tiny_dtensor_amounts
        ),
        of_part("memory", {"mib": 1024, "rounds": 1}, {"mib": 1024, "rounds": 1}, memory_amounts),
        Measurement(name="amplification", measure=measure_amplification),
        Measurement(name="interop", measure=measure_interop, unmet=unmet_by_interop),
        Measurement(name="scale", measure=measure_scale),
    )
}
"""In the order in which they run."""
