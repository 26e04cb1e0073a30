"""Compares two checkouts of Holdfast in interleaved rounds: `python -m bench.compare BEFORE AFTER`.

Each round runs every measurement once with each checkout, one directly after the other. BEFORE runs first in rounds
1, 3, 5 and so on, AFTER in the others. `bench.measurements` holds what is measured; rivals take no part. `bench.paired`
holds the statistics: per key the median of BEFORE ÷ AFTER over the rounds and its 95 % interval. Above 1, AFTER needs
less. A key falls if its median is below 0.97 and its interval does not contain 1. Bytes and counts that never vary are
compared for equality.

This checkout's bench code measures both packages, so that a change of the bench cannot look like a change of
Holdfast. The code uses public names only, and knows the older names of renamed settings. `scale` is the exception: it
uses internals, so each checkout runs its own `bench.scale`.

The command copies `src` and `bench` of both checkouts first and measures the copies. It never writes into a checkout,
and a checkout may be edited meanwhile. It writes the JSON file after each measurement. After Ctrl-C the same command
continues with the first round that is missing. More `--rounds` and another `--only` add to the same file. The command
refuses a file whose checkouts or bench code differ from today's.

Exit status: 0 if no key fell. 1 if a key fell, is missing in AFTER, or needs more rounds. 2 for a wrong call. 3 if a
measurement failed. 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench import job, report
from bench.measurements import MEASUREMENTS, Measurement, Side
from bench.paired import FAILED, Amounts, Pair, Row, rows_of

SIDES = ("before", "after")
COPIED = ("src", "bench")
HEADER = ("key", "rounds", "before", "after", "before ÷ after", "95 % interval", "verdict")


class UsageError(Exception):
    """The call is wrong; the message says why and what to do."""


@dataclass(slots=True)
class Comparison:
    """What is compared, and the rounds measured so far."""

    subject: dict[str, object]
    """What all rounds have in common: both checkouts, the bench code, the size of the states."""

    rounds: dict[str, list[Pair]] = field(default_factory=dict)
    """Rounds of each measurement, by its name."""

    def rows(self, names: Sequence[str]) -> list[Row]:
        """Return the rows of some measurements."""
        return [row for name in names for row in rows_of(self.rounds.get(name, []))]

    def save(self, path: Path) -> None:
        """Replace the file in one step, so that a kill leaves a whole one."""
        content = {
            "subject": self.subject,
            "with": report.software(),
            "keys": {row.key: asdict(row) for row in self.rows(list(self.rounds))},
            "rounds": {name: [asdict(pair) for pair in pairs] for name, pairs in self.rounds.items()},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(path)


def main(arguments: Sequence[str] | None = None, measurements: Mapping[str, Measurement] = MEASUREMENTS) -> int:
    """Compare; return the exit status."""
    parser = _parser(measurements)
    chosen = parser.parse_args(arguments)
    # Processes of other working directories get this path.
    chosen.folder = chosen.folder.resolve()
    chosen.json = chosen.json or chosen.folder / "rounds.json"
    try:
        names = _names(chosen.only, measurements)
        if chosen.rounds < 1:
            raise UsageError(f"--rounds {chosen.rounds}; expected at least 1")
        if unmet := [reason for name in names if (reason := measurements[name].unmet(chosen.folder))]:
            raise UsageError("; ".join(unmet))
        code = copied(job.ROOT, chosen.folder / "copy-bench", ("bench",))
        sides = [side_of(name, getattr(chosen, name), chosen.folder / f"copy-{name}", code) for name in SIDES]
        commits = {name: commit_of(getattr(chosen, name)) for name in SIDES}
        comparison = resumed(chosen.json, subject_of(sides, commits, is_quick=chosen.quick))
    except UsageError as error:
        parser.error(str(error))
    try:
        measure(comparison, [measurements[name] for name in names], sides, chosen)
    except KeyboardInterrupt:
        print(f"interrupted; the same command continues after the rounds in {chosen.json}", flush=True)
        return 130
    except SystemExit as error:
        print(f"{error}\nThe same command continues after the rounds in {chosen.json}.", file=sys.stderr)
        return 3
    rows = comparison.rows(names)
    print("\n".join(_lines(rows)))
    if chosen.markdown:
        chosen.markdown.parent.mkdir(parents=True, exist_ok=True)
        chosen.markdown.write_text("\n".join(_markdown(comparison, rows)) + "\n")
    return int(any(row.verdict in FAILED for row in rows))


def measure(
    comparison: Comparison, measurements: Sequence[Measurement], sides: Sequence[Side], chosen: argparse.Namespace
) -> None:
    """Run the rounds that are missing; write each measurement once both sides have it."""
    for number in range(chosen.rounds):
        for measurement in measurements:
            pairs = comparison.rounds.setdefault(measurement.name, [])
            if len(pairs) > number:
                continue
            start = time.perf_counter()
            amounts: dict[str, Amounts] = {}
            for side in sides if number % 2 == 0 else sides[::-1]:
                amounts[side.name] = measurement.measure(side, chosen.folder, chosen.quick)
            pairs.append(Pair(amounts["before"], amounts["after"]))
            comparison.save(chosen.json)
            seconds = time.perf_counter() - start
            progress = f"round {number + 1} of {chosen.rounds}, {measurement.name} ({seconds:.0f} s)"
            print(f"{progress}: {_ratios(pairs[-1])}", flush=True)


def subject_of(sides: Sequence[Side], commits: Mapping[str, str | None], *, is_quick: bool) -> dict[str, object]:
    """Return what all rounds of a comparison have in common."""
    digests = {side.name: {"commit": commits[side.name], "digest": digest_of(side.root)} for side in sides}
    return {**digests, "bench": digest_of(sides[0].code), "quick": is_quick}


def resumed(path: Path, subject: dict[str, object]) -> Comparison:
    """Return the comparison that a file holds, or a new one if there is no file.

    Raises:
        UsageError: The file holds something else, or a comparison of other checkouts.
    """
    if not path.exists():
        return Comparison(subject)
    try:
        content = json.loads(path.read_text())
        rounds = {
            name: [Pair(Amounts(**pair["before"]), Amounts(**pair["after"])) for pair in pairs]
            for name, pairs in content["rounds"].items()
        }
        earlier = {name: _identity_of(value) for name, value in content["subject"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: not a file of this command; pass another --json") from error
    if changed := [name for name, value in subject.items() if earlier.get(name) != _identity_of(value)]:
        raise UsageError(f"{path}: has rounds of another {', '.join(changed)}; remove it, or pass another --json")
    return Comparison(subject, rounds)


def side_of(name: str, checkout: Path, folder: Path, code: Path) -> Side:
    """Copy a checkout, compile its package, and check that a process of this side imports that package.

    Raises:
        UsageError: The path is no checkout of Holdfast, or its package cannot be imported.
    """
    if not (checkout / "src" / "holdfast" / "__init__.py").is_file():
        raise UsageError(f"{checkout}: no checkout of Holdfast; expected src/holdfast/__init__.py in it")
    side = Side(name, copied(checkout, folder), code)
    # Both sides get byte code, as an installed package has it.
    compileall.compile_dir(side.root / "src", quiet=1)
    command = [sys.executable, "-c", "import holdfast; print(holdfast.__file__)"]
    environment = {**os.environ, **side.variables}
    answer = subprocess.run(command, cwd=side.root, env=environment, capture_output=True, text=True)
    if answer.stdout.strip() != str(side.root / "src" / "holdfast" / "__init__.py"):
        raise UsageError(f"{checkout}: its package cannot be imported: {(answer.stdout + answer.stderr)[-1000:]}")
    return side


def copied(checkout: Path, folder: Path, parts: Sequence[str] = COPIED) -> Path:
    """Copy parts of a checkout into a folder, which is emptied first; return the folder.

    Raises:
        UsageError: Emptying the folder would remove the checkout, or the folder is inside a copied part.
    """
    checkout, folder = checkout.resolve(), folder.resolve()
    if checkout.is_relative_to(folder) or any(folder.is_relative_to(checkout / part) for part in parts):
        raise UsageError(f"{folder}: copying {checkout} into it would overwrite the checkout; pass another --folder")
    shutil.rmtree(folder, ignore_errors=True)
    for part in parts:
        if (checkout / part).is_dir():
            shutil.copytree(checkout / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    return folder


def digest_of(checkout: Path, parts: Sequence[str] = COPIED) -> str:
    """Return the digest of a checkout's Python files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for part in parts for path in (checkout / part).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(checkout)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def commit_of(checkout: Path) -> str | None:
    """Return the commit of a checkout, None if it is no git checkout."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() or None


def _parser(measurements: Mapping[str, Measurement]) -> argparse.ArgumentParser:
    folder = job.ROOT / "runs" / "compare"
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="checkout of the code before a change")
    parser.add_argument("after", type=Path, help="checkout of the code after it")
    parser.add_argument("--rounds", type=int, default=7, help="rounds in all; at least 6 give an interval (default: 7)")
    parser.add_argument("--only", default="", help=f"measurements, by comma: {', '.join(measurements)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="small states: a trial that proves nothing")
    parser.add_argument("--json", type=Path, help="where rounds are kept (default: rounds.json in --folder)")
    parser.add_argument("--markdown", type=Path, help="where the table is written as Markdown")
    parser.add_argument(
        "--folder", type=Path, default=folder, help="where checkpoints are written (default: runs/compare)"
    )
    return parser


def _names(only: str, measurements: Mapping[str, Measurement]) -> list[str]:
    names = [name for name in only.split(",") if name] or list(measurements)
    if unknown := [name for name in names if name not in measurements]:
        raise UsageError(f"--only {','.join(unknown)}: unknown; expected some of {', '.join(measurements)}")
    return list(dict.fromkeys(names))


def _identity_of(value: object) -> object:
    """Return the part of a subject's entry that must not change: files may be committed between two rounds."""
    return value["digest"] if isinstance(value, dict) else value


def _ratios(pair: Pair) -> str:
    """Return one round in a line: every ratio, and the exact amounts that differ."""
    rows = list(rows_of([pair]))
    ratios = [f"{row.key} {row.ratio:.2f}" for row in rows if row.ratio is not None]
    others = [f"{row.key} {row.verdict}" for row in rows if row.ratio is None and row.verdict != "equal"]
    return ", ".join(ratios + others) or "equal"


def _cells(row: Row) -> tuple[str, ...]:
    interval = "" if row.interval is None else "–".join(f"{bound:.3f}" for bound in row.interval)
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    return row.key, str(row.rounds), _number(row.before), _number(row.after), ratio, interval, row.verdict


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.5g}"


def _lines(rows: Sequence[Row]) -> list[str]:
    """Return the table and its summary for the screen."""
    table = [HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(HEADER))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in table
    ]
    return [*lines, *_summary(rows)]


def _markdown(comparison: Comparison, rows: Sequence[Row]) -> list[str]:
    """Return the table as Markdown, with what was compared above it."""
    commits = [comparison.subject[name]["commit"] for name in ("before", "after")]  # type: ignore[index]
    size = "small states; a trial that proves nothing" if comparison.subject["quick"] else "full states"
    above = f"Before: {commits[0]}. After: {commits[1]}. Sizes: {size}."
    table = [HEADER, ("-",) * len(HEADER), *(_cells(row) for row in rows)]
    return [above, "", *(f"| {' | '.join(cells)} |" for cells in table), "", *_summary(rows)]


def _summary(rows: Sequence[Row]) -> list[str]:
    """Return how to read the table, and which keys did not pass."""
    failed = [row.key for row in rows if row.verdict in FAILED]
    summary = [f"A ratio above 1 means that AFTER needs less. {len(rows) - len(failed)} of {len(rows)} keys passed."]
    return [*summary, f"Did not pass: {', '.join(failed)}."] if failed else summary


if __name__ == "__main__":
    sys.exit(main())
