"""The results: stored in `latest.json`, merged part by part, and shown on the screen."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.goals import GOALS, Goal
from bench.paired import median_interval
from bench.part import Measured, Params, Part, Round, Spread

RESULTS = Path(__file__).parent / "results"
LATEST = RESULTS / "latest.json"

Latest = dict[str, object]


def path_of(device: str) -> Path:
    """Return the file of results for states on a device. The pages show those of host memory."""
    return LATEST if device == "cpu" else RESULTS / device / LATEST.name


def read(path: Path = LATEST) -> Latest:
    """Return the earlier results; an empty object if there are none in this layout."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    return found if "parts" in found else {}


def merged(latest: Latest, part: Part, params: Params, measured: Measured) -> Latest:
    """Return the results with the keys of one part replaced; all others stay."""
    keys = part.keys(measured.rounds, params)
    parts = dict(latest.get("parts", {}))  # type: ignore[call-overload]
    gone = {name for key in parts.get(part.name, {}).get("keys", []) for name in names_of(key)}
    parts[part.name] = {
        "keys": list(keys),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "is_full": params == part.full,
        "params": params,
        "ranks": part.ranks,
        "with": software(),
        "notes": measured.notes,
        "rounds": [{name: round(value, 5) for name, value in each.items()} for each in measured.rounds],
    }
    if part.values is not None:
        intervals = {key: median_interval(each) for key, each in part.values(measured.rounds, params).items()}
        parts[part.name]["intervals"] = {
            key: [round(bound, 4) for bound in interval] for key, interval in intervals.items() if interval is not None
        }
    flat = {name: value for name, value in latest.items() if name != "parts" and name not in gone}
    return {**flat, **columns_of(keys), "parts": parts}


def with_results_beside(latest: Latest, folder: Path = RESULTS) -> Latest:
    """Return the results with the keys that other measurements left in JSON files beside `latest.json`.

    This is where the simulation of scale and the counting of reads come in: each writes a file of its own there with
    flat keys; those that `goals` knows are taken.
    """
    found: Latest = {}
    for path in sorted(folder.glob("*.json")):
        if path.name == LATEST.name:
            continue
        beside = json.loads(path.read_text())
        for goal in GOALS:
            if goal.key in beside:
                # What was counted or simulated once has no spread.
                found |= {name: beside.get(name, beside[goal.key]) for name in names_of(goal.key)}
    return {**latest, **found}


def write(latest: Latest, path: Path = LATEST) -> None:
    """Write the results, keys in the order of the goals."""
    known = [name for goal in GOALS for name in names_of(goal.key)]
    ordered = {name: latest[name] for name in known if name in latest} | latest
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(ordered, indent=1) + "\n")


def rounds_of(latest: Latest, part: str) -> list[Round]:
    """Return what one part measured, round by round."""
    return latest.get("parts", {}).get(part, {}).get("rounds", [])  # type: ignore[attr-defined,no-any-return]


def software() -> dict[str, str | int | None]:
    """Return the versions of the software that the bench used."""
    found: dict[str, str | int | None] = {"python": platform.python_version(), "cores": os.cpu_count()}
    for name in ("holdfast", "torch", "torch_checkpointing", "safetensors"):
        found[name] = version_of(name)
    return found


def version_of(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def lines(latest: Latest) -> list[str]:
    """Return the table for the screen."""
    shown = [f"  {'':34} {'median':>9} {'lowest':>9} {'highest':>9} {'goal':>7} {'floor':>7}"]
    for goal in GOALS:
        if goal.key in latest:
            median, low, high = (short(latest[name]) for name in names_of(goal.key))
            promised = f"{bound(goal, goal.goal):>7} {bound(goal, goal.floor):>7}"
            state = {"missed": "  below the floor", "floor": "  floor", "goal": "  goal"}
            verdict = state.get(goal.reached(float(latest[goal.key])), "")  # type: ignore[arg-type]
            shown.append(f"  {goal.key:34} {median:>9} {low:>9} {high:>9} {promised}{verdict}")
    for name, part in latest.get("parts", {}).items():  # type: ignore[attr-defined]
        shown += [f"  {name}: {note}" for note in part["notes"]]
    return shown


def is_any_missed(latest: Latest, keys: Collection[str]) -> bool:
    """Return whether one of some keys is below its floor."""
    return any(goal.reached(float(latest[goal.key])) == "missed" for goal in GOALS if goal.key in keys)  # type: ignore[arg-type]


def columns_of(spreads: Mapping[str, Spread]) -> dict[str, float]:
    """Return the columns of all keys, by their names in a file of results."""
    return {
        name: round(value, 4)
        for key, spread in spreads.items()
        for name, value in zip(names_of(key), asdict(spread).values(), strict=True)
    }


def names_of(key: str) -> tuple[str, str, str]:
    """Return the column names of median, lowest and highest of a key."""
    return key, f"{key}_min", f"{key}_max"


def bound(goal: Goal, promised: float | None) -> str:
    """Return a goal or a floor as text."""
    if promised is None:
        return ""
    return f"{'≤' if goal.less_is_better else '≥'} {promised:g}"


def short(value: object) -> str:
    """Return a number as short text."""
    assert isinstance(value, int | float), value
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
