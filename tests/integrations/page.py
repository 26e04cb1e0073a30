"""Writes what `make integrations` found into `docs/integrations.md`: `python -m tests.integrations.page`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.goals import Goal

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "integrations.md"
RESULTS = ROOT / "bench" / "results" / "integrations"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

GOALS = {
    goal.key: goal
    for goal in (
        Goal("dcp_stall", "time that `async_save` blocks training: DCP ÷ ours", 4, 2),
        Goal("dcp_save", "durable save: DCP ÷ ours", 1.5, 1.05),
        Goal("titan_stall", "time that a save blocks training: its DCP manager, async ÷ ours", 4, 2),
        Goal("titan_save", "durable save: its DCP manager ÷ ours", 1.5, 1.05),
        Goal("trainer_save", "durable save, optimizer included: Trainer ÷ ours", 1.5, 1.05),
        Goal("accelerate_save", "durable save, optimizer included: Accelerate ÷ ours", 1.5, 1.05),
        Goal("lightning_save", "durable save, optimizer included: Lightning ÷ ours", 1.5, 1.05),
        Goal("fabric_save", "durable save, optimizer included: Fabric ÷ ours", 1.5, 1.05),
        Goal(
            "integration_overhead", "a save through the integration ÷ `holdfast.save`", 1.02, 1.1, less_is_better=True
        ),
        Goal(
            "integration_overhead_background", "a background save ÷ that of a `CheckpointManager`", less_is_better=True
        ),
        Goal("background_until_committed", "a background save until its commit ÷ `holdfast.save`"),
    )
}


def page_of(text: str, results: dict[str, dict[str, Any]]) -> str:
    """Return the page with the tables of all results between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [*_times(results), "", *_kills(results)]
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}"


def _times(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| | key | | median | 95 % interval | goal | floor | |"
    yield "|-|-|-|-|-|-|-|-|"
    for name, result in results.items():
        for key, found in result.get("measure", {}).get("found", {}).get("keys", {}).items():
            goal = GOALS.get(key, Goal(key, found["of"]))
            low, high = found["interval"] or ("", "")
            sign = "≤" if goal.less_is_better else "≥"
            bounds = ["" if bound is None else f"{sign} {bound}" for bound in (goal.goal, goal.floor)]
            cells = [name, f"`{key}`", goal.meaning, found["median"], f"{low}–{high}", *bounds]
            yield f"| {' | '.join(map(str, cells))} | {goal.reached(found['median'])} |"


def _kills(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| | killed in | ours, one rank | ours, all ranks | its own, one rank | its own, all ranks |"
    yield "|-|-|-|-|-|-|"
    for name, result in results.items():
        rows = result.get("kills", {}).get("found", [])
        for phase in dict.fromkeys(row["phase"] for row in rows):
            cells = [
                _cell(row)
                for keeper in ("holdfast", "own")
                for killed in ("one", "all")
                for row in rows
                if (row["keeper"], row["phase"], row["killed"]) == (keeper, phase, killed)
            ]
            yield f"| {name} | {phase} | {' | '.join(cells)} |"


def _cell(row: dict[str, Any]) -> str:
    if row["error"]:
        return "does not resume"
    start = "begins anew" if row["resumed_from"] is None else f"step {row['resumed_from']}"
    return start if row["is_identical"] else f"{start}, **other values**"


def main() -> None:
    """Write the page."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    PAGE.write_text(page_of(PAGE.read_text(), results))


if __name__ == "__main__":
    main()
