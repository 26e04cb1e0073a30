"""Measures an integration beside the framework's own checkpointing: paired rounds on two ranks."""

from __future__ import annotations

import importlib
import json
import statistics
import time
from pathlib import Path

from bench.paired import median_interval
from tests.integrations.world import start

ROUNDS = 9


def measure(
    framework: str, scratch: Path, *, rounds: int = ROUNDS, deadline_seconds: float = 900.0
) -> dict[str, object]:
    """Return seconds of every round and the ratios of the keys of one framework."""
    scratch.mkdir(parents=True)
    place = scratch / "place"
    place.mkdir()
    spec: dict[str, object] = {"folder": str(place), "rounds": rounds, "results": str(scratch)}
    processes = start(framework, "measure", 2, spec, scratch)
    deadline = time.monotonic() + deadline_seconds
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        for process in processes:
            process.send_signal(9)
    for path in sorted(scratch.glob("error-*.json")):
        raise AssertionError(f"{framework}: {path.read_text()}")
    by_rank = [_lines(scratch / f"rounds-{rank}.jsonl") for rank in (0, 1)]
    # A save takes as long as its slower rank.
    every = [{name: max(first[name], second[name]) for name in first} for first, second in zip(*by_rank, strict=True)]
    assert len(every) == rounds, f"{len(every)} of {rounds} rounds; see {scratch}"
    keys = importlib.import_module(f"bench.integrations.{framework}").KEYS
    return {
        "rounds": every,
        "keys": {key: _ratio(every, *names) for key, names in keys.items() if names[0] in every[0]},
    }


def _ratio(every: list[dict[str, float]], numerator: str, denominator: str) -> dict[str, object]:
    ratios = [times[numerator] / times[denominator] for times in every]
    interval = median_interval(ratios)
    return {
        "of": f"{numerator} / {denominator}",
        "median": round(statistics.median(ratios), 3),
        "interval": None if interval is None else [round(end, 3) for end in interval],
    }


def _lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
