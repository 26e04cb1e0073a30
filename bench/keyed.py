"""Runs the parts that measure chosen keys, and writes the keys of each part when the part ends."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench import job, report
from bench.part import Measured, Part

Run = Callable[..., Measured]
"""Runs one part, as `job.run` does."""


def add_arguments(parser: argparse.ArgumentParser, results: Path) -> None:
    """Add the arguments of every bench of keys: `--only`, `--quick`, `--json` and `--folder`."""
    parser.add_argument("--only", default=os.environ.get("ONLY", ""), help="keys or parts, by comma; parts run whole")
    parser.add_argument(
        "--quick", action="store_true", default=bool(os.environ.get("QUICK")), help="a small trial (also QUICK=1)"
    )
    parser.add_argument("--json", type=Path, default=results, help="where the results go")
    parser.add_argument(
        "--folder", type=Path, default=job.ROOT / "runs" / results.stem, help="for what the bench writes meanwhile"
    )


def parts_of(
    parser: argparse.ArgumentParser, only: str, parts: Mapping[str, Part], keys: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the parts that measure the chosen keys.

    Args:
        parser: Refuses unknown names.
        only: Keys or parts, by comma; empty for all parts.
        parts: The parts by name.
        keys: The keys of each part.
    """
    wanted = [name for name in only.split(",") if name]
    known = {key: name for name in parts for key in (name, *keys[name])}
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"--only {','.join(unknown)}: unknown; expected keys or parts, some of {', '.join(known)}")
    chosen = {known[name] for name in wanted} or set(parts)
    return [name for name in parts if name in chosen]


def measure_each(
    parts: Sequence[Part],
    run: Run,
    chosen: argparse.Namespace,
    variables: Callable[[], Mapping[str, str]] = dict,
    packages: Sequence[str] = (),
) -> bool:
    """Run parts in turn; return whether all of them ended. The results of a part are written when the part ends.

    Args:
        parts: What to measure.
        run: Runs one part.
        chosen: The arguments of the command.
        variables: Returns the environment variables for the ranks, before the first part.
        packages: Packages whose versions go to the results.
    """
    left = [part.name for part in parts]
    try:
        given = variables()
        for part in parts:
            params = dict(part.quick if chosen.quick else part.full)
            start, load = time.perf_counter(), os.getloadavg()[0]
            print(f"{part.name}: {part.question}", flush=True)
            measured = run(part, params, chosen.folder / "job", variables=given)
            latest = report.merged(report.read(chosen.json), part, params, measured)
            # What else ran is a fact of the results.
            found = {"load_average_before": load, **{package: report.version_of(package) for package in packages}}
            latest["parts"][part.name]["with"] |= found  # type: ignore[index]
            report.write(latest, chosen.json)
            left.remove(part.name)
            print(f"    {time.perf_counter() - start:.0f} s; load average before it {load:.1f}", flush=True)
    except KeyboardInterrupt:
        print(f"interrupted; --only {','.join(left)} measures the rest", flush=True)
        return False
    return True
