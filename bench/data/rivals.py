"""Resumes on other ranks and workers, of ours and its rivals: one driver, one process for each resume.

A job trains 10 steps of 12 of 497 samples. Its states resume on other ranks, to the end of the epoch. Samples lost and
seen twice are counted, and the steps of each rank: ranks with unequal numbers of steps wait for each other for ever.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import conditions
from bench.data.resume import RESULT, Ranks
from bench.data.systems import CONTENDERS, Contender
from bench.part import Measured, Params, Part, Round, Spread
from bench.report import version_of

PACKAGES = tuple(dict.fromkeys(package for each in CONTENDERS.values() for package in each.packages))

CHANGES = (
    ("4x2", "4x2"),
    ("2x2", "1x2"),
    ("4x2", "3x2"),
    ("4x2", "2x2"),
    ("2x2", "4x2"),
    ("4x2", "4x3"),
    ("4x2", "4x0"),
)
"""Ranks and workers before and after. The first change is none: what it loses, an epoch without a resume loses too."""

QUICK_CHANGES = 3
COLUMNS = ("system", "version", "ranks × workers", "lost", "twice", "outcome")
_ERROR_CHARACTERS_MAX = 160


class Hung(Exception):
    """A resume did not end."""


class Failed(Exception):
    """The job before the resume failed."""


def measure(root: Path, params: Params) -> Measured:
    """Resume each system after each change; a round is a change, and the notes are rows of a table."""
    notes = [_row(COLUMNS), _row("-" * len(COLUMNS))]
    changes = CHANGES[: params["changes"]]
    rounds: list[Round] = [
        {"before_ranks": before.ranks, "before_workers": before.workers, "ranks": after.ranks, "workers": after.workers}
        for before, after in (map(Ranks.parsed, change) for change in changes)
    ]
    for name, contender in CONTENDERS.items():
        version = version_of(contender.packages[0])
        if missing := [package for package in contender.packages if version_of(package) is None]:
            notes.append(
                _row([contender.title, version or "", "", "", "", f"not shown: {missing[0]} is not installed"])
            )
            continue
        folder = root / name
        folder.mkdir(parents=True)
        try:
            if contender.write is not None:
                _run(name, folder, seconds=params["seconds"])
            for change, found in zip(changes, rounds, strict=True):
                if (ranks := _ranks_of(contender, change)) is None:
                    continue
                numbers, *cells = _resumed(name, folder, ranks, params["seconds"])
                found |= {f"{name}_{key}": value for key, value in numbers.items()}  # type: ignore[union-attr]
                shown = " → ".join(each.replace("x", " × ") for each in ranks)
                notes.append(_row([contender.title, version or "", shown, *map(str, cells)]))
                conditions.say(notes[-1])
        except (Failed, Hung) as error:
            notes.append(_row([contender.title, version or "", "", "", "", f"not shown: {error}"]))
            conditions.say(notes[-1])
    return Measured(rounds, notes)


def _ranks_of(contender: Contender, change: tuple[str, str]) -> tuple[str, str] | None:
    """Return ranks and workers before and after; None if the system has no workers, and nothing else changes."""
    if contender.has_workers:
        return change
    before, after = map(Ranks.parsed, change)
    if before.workers != after.workers:
        return None
    return str(Ranks(before.ranks, 0)), str(Ranks(after.ranks, 0))


def _resumed(name: str, folder: Path, ranks: tuple[str, str], seconds: int) -> tuple[Round, str, str, str]:
    """Return numbers of a resume, and the cells of its row: lost, seen twice, outcome."""
    try:
        found = json.loads(_run(name, folder, *ranks, seconds=seconds))
    except Hung as error:
        return {"hung": 1.0}, "", "", str(error)
    if "error" in found:
        return {"refused": 1.0}, "", "", f"refused: {found['error'][:_ERROR_CHARACTERS_MAX]}"
    return {key: float(value) for key, value in found.items()}, str(found["lost"]), str(found["doubled"]), _said(found)


def _said(found: dict[str, int]) -> str:
    said = "exactly once" if not found["lost"] and not found["doubled"] else "resumed"
    if found["steps_min"] != found["steps_max"]:
        said += f"; ranks take {found['steps_min']} to {found['steps_max']} steps"
    return said


def _run(name: str, folder: Path, *ranks: str, seconds: int) -> str:
    """Run a driver; return its result.

    Raises:
        Hung: It took longer. It and its workers are killed.
        Failed: It failed.
    """
    variables = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-m", "bench.data.resume", name, str(folder), *ranks]
    with (folder / "errors").open("w+") as errors:
        driver = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=variables, start_new_session=True
        )
        try:
            printed, _ = driver.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise Hung(f"hung: no end within {seconds} s") from None
        finally:
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
                driver.communicate()
        errors.seek(0)
        last = next((line for line in reversed(errors.read().splitlines()) if line.strip()), "")
    results = [line.removeprefix(RESULT) for line in printed.splitlines() if line.startswith(RESULT)]
    if driver.returncode or (ranks and not results):
        raise Failed(last[:_ERROR_CHARACTERS_MAX] or f"exit status {driver.returncode}")
    return results[-1] if results else ""


def _row(cells: Sequence[str]) -> str:
    return "|" + "|".join(cell.replace("|", "/") for cell in cells) + "|"


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return no key: what rivals do has neither goal nor floor."""
    return {}


PART = Part(
    name="rivals",
    question="Which samples are lost or seen twice after a resume on other ranks or workers?",
    ranks=1,
    full={"changes": len(CHANGES), "seconds": 120},
    quick={"changes": QUICK_CHANGES, "seconds": 60},
    measure=measure,
    keys=keys,
)
