"""Saves to an object store and loads from it, beside its bare client and DCP's ways: `python -m bench.stores URL`.

The server is at `AWS_ENDPOINT_URL`, with credentials in the vendor's variables. `make bench-stores` starts one: Ceph's
RADOS Gateway on loopback. Server and clients then share the cores, so only ratios count.

Each round runs every part once, each in processes of its own, and every contender with the same scheme and signing.
The rounds are written to a file as they come. After Ctrl-C the same command continues with the first one that is
missing. Once all are there, they go to `bench/results/stores.json`, and the file is removed.

Exit status: 0 if no key is below its floor, 1 if one is, 2 for a wrong call, 3 if a part failed, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from bench import job, report
from bench.compare import digest_of
from bench.job import ROOT
from bench.part import Measured, Params, Part, Round
from bench.parts import STORE_PARTS
from bench.store_place import VARIABLE

RESULTS = report.RESULTS / "stores.json"
ROUNDS_MIN = 7
PACKAGES = ("obstore", "s3fs", "s3torchconnector")

LIMITS = (
    "The server runs on the machine of the clients and shares its cores: a wall time has the server's work in it.",
    "Loopback has no latency and no lost packet. Only `stream_scaling` and `stall_100ms_seconds` have a proxy for it.",
    "Over plain HTTP Holdfast and its limit sign what they send. s3torchconnector does not: beside it neither signs.",
    "Two ranks save at most. No number here says how a service behaves under thousands.",
)
"""What the numbers cannot say; shown before they are measured, and written beside them."""


Run = Callable[..., Measured]
"""Runs one part, as `job.run` does."""


def main(arguments: Sequence[str] | None = None, parts: Mapping[str, Part] = STORE_PARTS, run: Run = job.run) -> int:
    """Measure; return the exit status."""
    parser = _parser(parts)
    chosen = parser.parse_args(arguments)
    names = [name for name in chosen.only.split(",") if name] or list(parts)
    if unknown := [name for name in names if name not in parts]:
        parser.error(f"--only {','.join(unknown)}: unknown; expected some of {', '.join(parts)}")
    if not chosen.url.startswith("s3://") or not chosen.url.removeprefix("s3://").partition("/")[2]:
        parser.error(f"{chosen.url}: expected s3://BUCKET/FOLDER")
    if not os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
        parser.error(
            "AWS_ENDPOINT_URL: expected the URL of a server over plain HTTP, for the proxies look into what passes; "
            "make bench-stores starts one"
        )
    rounds = chosen.rounds or (2 if chosen.quick else ROUNDS_MIN)
    subject = {"code": digest_of(ROOT), "quick": chosen.quick, "server": chosen.server, "with": _software()}
    kept = chosen.folder / "rounds.json"
    measured = _resumed(kept, subject)
    print("\n".join(f"  limit: {limit}" for limit in LIMITS), flush=True)
    try:
        for number in range(rounds):
            for name in names:
                if len(measured.setdefault(name, [])) <= number:
                    measured[name].append(_measured(run, parts[name], number, chosen))
                    _write(kept, {"subject": subject, "rounds": _as_json(measured)})
    except KeyboardInterrupt:
        print(f"interrupted; the same command continues after the rounds in {kept}", flush=True)
        return 130
    except SystemExit as error:
        print(f"{error}\nThe same command continues after the rounds in {kept}.", file=sys.stderr)
        return 3
    flat = _results({name: measured[name] for name in names}, parts, subject)
    _write(chosen.json, flat)
    kept.unlink()
    print("\n".join(report.lines(flat)))
    print(f"written to {chosen.json}; python -m bench --readme brings the pages up to date")
    return int(report.is_any_missed(flat, flat))


def _parser(parts: Mapping[str, Part]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.stores", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "url",
        help="s3://BUCKET/FOLDER; what is measured is written below it, and removed again unless the command is killed",
    )
    parser.add_argument("--rounds", type=int, help=f"rounds (default: {ROUNDS_MIN}; with --quick 2)")
    parser.add_argument("--only", default=os.environ.get("ONLY", ""), help=f"parts, by comma: {', '.join(parts)}")
    parser.add_argument(
        "--quick", action="store_true", default=bool(os.environ.get("QUICK")), help="small states (also QUICK=1)"
    )
    parser.add_argument("--server", default="unknown", help="what the server is, for the results")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "stores", help="for rounds, and for what is compared on a disk"
    )
    return parser


def _measured(run: Run, part: Part, number: int, chosen: argparse.Namespace) -> Measured:
    """Run one part once in its own processes."""
    params = _params(part, chosen.quick) | {"number": number}
    start, load = time.perf_counter(), os.getloadavg()[0]
    print(f"round {number + 1}, {part.name}: {part.question}", flush=True)
    measured = run(part, params, chosen.folder / "job", variables={VARIABLE: chosen.url})
    # What else ran is a fact of the round.
    for each in measured.rounds:
        each["load_average_before"] = load
    print(f"    {time.perf_counter() - start:.0f} s; load average before it {load:.1f}", flush=True)
    return measured


def _params(part: Part, quick: bool) -> Params:
    return dict(part.quick if quick else part.full)


def _results(
    measured: Mapping[str, list[Measured]], parts: Mapping[str, Part], subject: dict[str, object]
) -> report.Latest:
    """Return the keys of all parts, what they were measured with, and the rounds."""
    flat: dict[str, object] = {}
    rounds: dict[str, list[Round]] = {}
    for name, each in measured.items():
        rounds[name] = [one for turn in each for one in turn.rounds]
        flat |= report.columns_of(parts[name].keys(rounds[name], _params(parts[name], bool(subject["quick"]))))
    notes = list(dict.fromkeys(note for each in measured.values() for turn in each for note in turn.notes))
    return {**flat, "limits": list(LIMITS), "notes": notes, **subject, "rounds": rounds}


def _software() -> dict[str, object]:
    memory_kib = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        **report.software(),
        **{name: report.version_of(name) for name in PACKAGES},
        "memory_gib": round(int(memory_kib.split()[1]) / (1 << 20), 1),
    }


def _resumed(path: Path, subject: dict[str, object]) -> dict[str, list[Measured]]:
    """Return the rounds that an interrupted command left; none if they are of other code or of another server."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text())
    if content["subject"] != subject:
        print(f"{path} has rounds of other code, or of another server: beginning anew", flush=True)
        return {}
    return {name: [Measured(**one) for one in turns] for name, turns in content["rounds"].items()}


def _as_json(measured: Mapping[str, list[Measured]]) -> dict[str, list[dict[str, object]]]:
    """Return rounds as JSON has them."""
    return {name: [asdict(one) for one in turns] for name, turns in measured.items()}


def _write(path: Path, content: Mapping[str, object]) -> None:
    """Replace a file in one step, so that a kill leaves a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
