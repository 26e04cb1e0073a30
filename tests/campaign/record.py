"""What a campaign has done so far: kept block by block, so that the same command goes on after Ctrl-C."""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[2]
CAMPAIGN = os.environ.get("CAMPAIGN") or "stores"
"""Which campaign: `stores`, `tiers` or `memory`."""
FOLDER = ROOT / "runs" / f"{CAMPAIGN}-campaign"
"""Outputs of the processes, and what is done so far."""
RESULTS = ROOT / "bench" / "results" / f"{CAMPAIGN}-campaign.json"

_BLOCKS = "blocks.jsonl"
_OPTIONS = "options.json"
_SOFTWARE = ("obstore", "boto3", "torch", "numpy", "hypothesis")


@dataclass(frozen=True)
class Options:
    """What is asked for. The same options with the same seed do the same."""

    seed: int
    rounds: int
    """Races of each server."""
    faults: int
    """Saves and loads through the proxy with faults, of each server."""
    kills: int
    """Killed clients, and killed servers, of each server."""
    examples: int
    """Examples of the property test."""
    only: tuple[str, ...] = ()
    """Names of servers, or `server/part`; empty: all."""

    def wants(self, server: str, part: str) -> bool:
        """Return whether a part of a server is asked for."""
        return not self.only or server in self.only or f"{server}/{part}" in self.only

    def to_json(self) -> str:
        """Return them for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what `to_json` wrote."""
        found = json.loads(text)
        return cls(**{**found, "only": tuple(found["only"])})


@dataclass(frozen=True)
class Block:
    """One piece of a part: what is done again whole after an interruption."""

    server: str
    part: str
    number: int
    seed: int
    asked: int
    """Rounds of it."""
    done: int
    """Rounds that went as they must; all of them, or none of a block that failed."""
    seconds: float
    software: str
    """Server and version."""
    counts: Mapping[str, int] = field(default_factory=dict)
    failure: str = ""
    """What went wrong; empty if nothing did."""
    commit: str = field(default_factory=lambda: _commit())
    """Of Holdfast."""


def options_now(environment: Mapping[str, str]) -> Options:
    """Return what the variables ask for; without a seed that of an interrupted campaign, or a new one."""
    quick = bool(environment.get("QUICK"))

    def count(name: str, whole: int, short: int) -> int:
        return int(environment.get(name) or (short if quick else whole))

    options = Options(
        seed=int(environment.get("SEED") or 0),
        rounds=count("ROUNDS", 1000, 20),
        faults=count("FAULTS", 500, 24),
        kills=count("KILLS", 100, 6),
        examples=count("EXAMPLES", 1000, 30),
        only=tuple(filter(None, environment.get("ONLY", "").split(","))),
    )
    before = _options_before()
    if not options.seed:
        goes_on = before is not None and replace(before, seed=0) == options
        seed = before.seed if goes_on and before is not None else random.SystemRandom().randrange(1, 1 << 31)
        options = replace(options, seed=seed)
    return options


def _options_before() -> Options | None:
    path = FOLDER / _OPTIONS
    if not path.exists():
        return None
    return Options.from_json(path.read_text())


class Record:
    """The blocks that are done."""

    def __init__(self, options: Options) -> None:
        """Go on where a campaign with the same options was interrupted, or begin anew."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        self.options = options
        self._path = FOLDER / _BLOCKS
        if _options_before() != options:
            self._path.unlink(missing_ok=True)
            (FOLDER / _OPTIONS).write_text(options.to_json())

    def blocks(self) -> list[Block]:
        """Return the blocks that are done."""
        if not self._path.exists():
            return []
        return [Block(**json.loads(line)) for line in self._path.read_text().splitlines()]

    def has(self, server: str, part: str, number: int) -> bool:
        """Return whether a block is done."""
        return any((each.server, each.part, each.number) == (server, part, number) for each in self.blocks())

    def add(self, block: Block) -> None:
        """Keep a block. A line is written by one call, so an interruption leaves it out or whole."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(block)) + "\n")

    def end(self) -> None:
        """Forget the blocks: the next campaign begins anew."""
        self._path.unlink(missing_ok=True)
        (FOLDER / _OPTIONS).unlink(missing_ok=True)


def write_results(record: Record, wanted: Iterable[tuple[str, str, int]], canary: Mapping[str, object]) -> bool:
    """Write the file of results; return whether everything that was asked for went well.

    Args:
        record: What is done.
        wanted: Server, part and rounds of all that was asked for.
        canary: What was looked through for credentials, and what was found.
    """
    blocks, parts, is_well = record.blocks(), [], not canary.get("found")
    for server, part, asked in wanted:
        own = [each for each in blocks if (each.server, each.part) == (server, part)]
        done = sum(each.done for each in own)
        failures = [f"block {each.number}, seed {each.seed}: {each.failure}" for each in own if each.failure]
        outcome = "failed" if failures else "passed" if done >= asked else "not complete"
        is_well = is_well and outcome == "passed"
        parts.append(
            {
                "server": server,
                "software": own[-1].software if own else "",
                "commits": sorted({each.commit for each in own}),
                "part": part,
                "outcome": outcome,
                "rounds_asked": asked,
                "rounds_passed": done,
                "seconds": round(sum(each.seconds for each in own), 1),
                "counts": dict(sorted(summed(each.counts for each in own).items())),
                "failures": failures,
            }
        )
    RESULTS.write_text(
        json.dumps(
            {
                "campaign": f"make campaign-{CAMPAIGN}",
                "outcome": "passed" if is_well else "failed or not complete",
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "seed": record.options.seed,
                "options": asdict(record.options),
                "machine": {
                    "processors": os.cpu_count(),
                    "kernel": platform.release(),
                    "python": platform.python_version(),
                },
                "software": _software(),
                "parts": parts,
                "canary": dict(canary),
            },
            indent=2,
        )
        + "\n"
    )
    return is_well


def summed(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Return the sums of counts, and the largest of those whose names end in `_max`."""
    total = Counter[str]()
    for each in counts:
        for name, value in each.items():
            total[name] = max(total[name], value) if name.endswith("_max") else total[name] + value
    return total


def _software() -> dict[str, str]:
    found = {}
    for name in ("holdfast", *_SOFTWARE):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@cache
def _commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return asked.stdout.strip()
