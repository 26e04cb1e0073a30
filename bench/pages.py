"""Writes the tables and pictures of README and docs from `latest.json`. No number in them is typed by hand."""

from __future__ import annotations

import os
from pathlib import Path

from bench.goals import GOALS
from bench.job import ROOT
from bench.plots import FOLDER, PICTURES
from bench.report import Latest, names_of, short

README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

ROWS = (
    ("durable save", "save_vs_dcp", "save_vs_limit"),
    ("durable save, 90th percentile of the time", "save_p90_vs_dcp_p90", None),
    ("load of files on the disk, every digest checked", "load_cold_vs_dcp", "load_cold_vs_limit"),
    ("load of files in the page cache, every digest checked", "load_warm_vs_dcp", None),
    ("save of 20,000 tensors of 16 bytes", "tiny_save_vs_dcp", None),
    ("load of 20,000 tensors of 16 bytes", "tiny_load_vs_dcp", None),
)
"""The table of the README: each row has the keys of our speed ÷ DCP's, and of our speed ÷ the disk's."""


def put_blocks(latest: Latest) -> None:
    """Update README and docs/performance.md."""
    put_block(README, first_screen(latest))
    put_block(PERFORMANCE, block(latest, PERFORMANCE))


def first_screen(latest: Latest) -> str:
    """Return the text between the markers of the README: six rows, and how they were measured."""
    rows = ["| speed of Holdfast, median (lowest–highest) | ÷ PyTorch DCP | ÷ the bare disk |", "|-|-|-|"]
    rows += [f"| {name} | {_ratio(latest, dcp)} | {_ratio(latest, disk)} |" for name, dcp, disk in ROWS]
    return "\n".join([BEGIN, *rows, "", *_circumstances(latest), END])


def _ratio(latest: Latest, key: str | None) -> str:
    if key is None or key not in latest:
        return ""
    median, low, high = (short(latest[name]) for name in names_of(key))
    return f"**{median}** ({low}–{high})"


def block(latest: Latest, page: Path) -> str:
    """Return the text between the markers of a page: every key that was measured, the conditions, and the pictures."""
    rows = ["| key of `make bench` | median | lowest–highest |", "|-|-|-|"]
    for goal in GOALS:
        if goal.key in latest:
            median, low, high = (short(latest[name]) for name in names_of(goal.key))
            rows.append(f"| `{goal.key}`: {goal.meaning} | {median} | {low}–{high} |")
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
