"""Run the bench, or some of its parts, and write what they measured."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from bench import job, pages, plots, report
from bench.device import KINDS
from bench.part import Part
from bench.parts import PARTS


def main() -> None:
    """Run the chosen parts, print the results and write them. The results of other parts stay."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", default=os.environ.get("ONLY", ""), help=f"parts, by comma: {', '.join(PARTS)}")
    parser.add_argument(
        "--quick", action="store_true", default=bool(os.environ.get("QUICK")), help="small, in minutes (also QUICK=1)"
    )
    parser.add_argument(
        "--folder", type=Path, default=job.ROOT / "runs" / "bench", help="where checkpoints are written"
    )
    parser.add_argument(
        "--device", choices=KINDS, default=KINDS[0], help="where states lie; not every part can be asked"
    )
    parser.add_argument("--readme", action="store_true", help="measure nothing; bring plots and tables up to date")
    for name in ("mib", "rounds", "steps"):
        parser.add_argument(f"--{name}", type=int, help=f"instead of what the part would take for {name}")
    chosen = parser.parse_args()
    if not chosen.readme:
        for part in parts_of(parser, chosen.only, chosen.device):
            run(part, chosen)
    if chosen.device != KINDS[0]:
        print("\n".join(report.lines(report.read(report.path_of(chosen.device)))))
        print(f"written to {report.path_of(chosen.device).relative_to(job.ROOT)}")
        return
    latest = report.with_results_beside(report.read())
    report.write(latest)
    plots.draw_all(latest)
    pages.put_blocks(latest)
    print("\n".join(report.lines(latest)))
    print(f"written to {report.LATEST.relative_to(job.ROOT)}; plots, README.md and docs/performance.md follow it")


def parts_of(parser: argparse.ArgumentParser, only: str, device: str) -> list[Part]:
    """Return the chosen parts."""
    there = [name for name, part in PARTS.items() if device in part.devices]
    names = [name for name in only.split(",") if name] or there
    if unknown := [name for name in names if name not in there]:
        parser.error(f"--only {','.join(unknown)}: no such part on {device}; there are {', '.join(there)}")
    return [PARTS[name] for name in names]


def run(part: Part, chosen: argparse.Namespace) -> None:
    """Run one part and write its results at once, whatever the next part does."""
    params = dict(part.quick if chosen.quick else part.full)
    for name in params:
        given = getattr(chosen, "mib" if name.startswith("mib") else name, None)
        params[name] = params[name] if given is None else given
    start = time.perf_counter()
    print(f"{part.name}: {part.question} ({', '.join(f'{n} {v}' for n, v in params.items())})", flush=True)
    measured = job.run(part, params, chosen.folder, chosen.device)
    path = report.path_of(chosen.device)
    report.write(report.merged(report.read(path), part, params, measured), path)
    print(f"    {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
