"""Writes the tables and pictures of README and docs from `latest.json`. No number in them is typed by hand."""

from __future__ import annotations

import os
from pathlib import Path

from bench.goals import GOALS
from bench.job import ROOT
from bench.plots import FOLDER, PICTURES
from bench.report import Latest, bound, names_of, short

README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

README_KEYS = (
    "save_vs_limit",
    "save_vs_limit_huge_pages",
    "save_vs_dcp",
    "save_p90_vs_dcp_p90",
    "save_vs_torch_checkpointing",
    "load_cold_vs_limit",
    "load_cold_vs_limit_huge_pages",
    "load_cold_vs_dcp",
    "load_warm_vs_dcp",
    "stall_copy_vs_memcpy",
    "stall_lazy_seconds_per_gib",
    "train_slowdown",
    "tiny_save_vs_dcp",
    "tiny_load_vs_dcp",
)
"""What the first screen of the README shows, as far as it was measured; docs/performance.md shows all."""


def put_blocks(latest: Latest) -> None:
    """Update README and docs/performance.md."""
    put_block(README, block(latest, README, README_KEYS))
    put_block(PERFORMANCE, block(latest, PERFORMANCE))


def block(latest: Latest, page: Path, keys: tuple[str, ...] | None = None) -> str:
    """Return the text between the markers of a page: the table, its conditions, and the pictures."""
    rows = ["| measured by `make bench` | median | lowest–highest | goal | floor |", "|-|-|-|-|-|"]
    for goal in GOALS:
        if goal.key in latest and (keys is None or goal.key in keys):
            median, low, high = (short(latest[name]) for name in names_of(goal.key))
            name = goal.meaning if keys is not None else f"`{goal.key}`: {goal.meaning}"
            rows.append(f"| {name} | {median} | {low}–{high} | {bound(goal, goal.goal)} | {bound(goal, goal.floor)} |")
    return "\n".join([BEGIN, *rows, "", *_circumstances(latest), "", *_pictures(latest, page), END])


def put_block(page: Path, text: str) -> None:
    """Replace the text between the markers of a page.

    Raises:
        ValueError: The page has no markers.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: no {BEGIN} … {END}; the block goes between them")
    page.write_text(before + text + after)


def _circumstances(latest: Latest) -> list[str]:
    parts: dict[str, dict[str, object]] = latest.get("parts", {})  # type: ignore[assignment]
    if not parts:
        return []
    smaller = [name for name, part in parts.items() if not part["is_full"]]
    used: dict[str, object] = next(reversed(parts.values()))["with"]  # type: ignore[assignment]
    large: dict[str, int] = parts.get("large", {}).get("params", {})  # type: ignore[assignment]
    said = [
        f"State: {large['mib'] / 1024:g} GiB of DTensors on {parts['large']['ranks']} gloo ranks." if large else "",
        f"Machine: {used['cores']} cores, torch {used['torch']}. Only the ratios carry over to other machines.",
        f"Run with smaller sizes than the full bench: {', '.join(smaller)}." if smaller else "",
    ]
    return [each for each in said if each]


def _pictures(latest: Latest, page: Path) -> list[str]:
    folder = Path(os.path.relpath(FOLDER, page.parent))
    return [
        f'<img src="{folder / picture.name}.png" width="49%" alt="{picture.question}">'
        for picture in PICTURES
        if picture.can_be_drawn(latest)
    ]
