"""`holdfast verify`: read everything back and say what is not as it was saved."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.ending import DAMAGED, ended_well
from holdfast.cli.opening import AllowRoot, opened
from holdfast.cli.progress import shown_progress
from holdfast.cli.screen import Screen, shown_bytes, stdout
from holdfast.errors import CorruptError, printable

DAMAGES_MAX = 50
"""Damages told one by one on a terminal."""


def verify(
    path: Annotated[str, typer.Argument(metavar="PATH", help="One checkpoint: a step-* folder, or a path saved to.")],
    deep: Annotated[
        bool, typer.Option("--deep", help="Of another system's checkpoint compare casts wholly, not in samples.")
    ] = False,
    allow_root: AllowRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; see docs/cli.md.")] = False,
) -> None:
    """Read every byte of one checkpoint and check it. Exits with 0 if it is whole, with 1 if it is damaged."""
    with ended_well():
        try:
            checkpoint = opened(path, allow_root)
        except CorruptError as error:
            own = os.path.exists(os.path.join(path.removeprefix("file://"), "manifest.json"))
            outcome = _Outcome([api.Damage("manifest.json" if own else "", None, None, None, str(error))])
        else:
            outcome = _checked(checkpoint, deep=deep)
        if as_json:
            stdout().json(_document(path, outcome))
        else:
            _show(stdout(), outcome)
    if outcome.damages:
        raise typer.Exit(DAMAGED)


@dataclass(frozen=True, slots=True)
class _Outcome:
    damages: list[api.Damage]
    checked_bytes: int = 0
    """Bytes the manifest names; of another system's checkpoint, those held against another copy."""
    notes: Sequence[str] = ()
    """What another system's checkpoint was held against, and how closely."""
    sampled: bool = False


def _checked(checkpoint: api.Checkpoint, *, deep: bool) -> _Outcome:
    with shown_progress("verifying") as bar:
        work = checkpoint.verification(bar, deep=deep)
        return _Outcome(list(work.damages()), work.total_bytes, [*checkpoint.remarks, *work.notes], work.sampled)


def _show(screen: Screen, outcome: _Outcome) -> None:
    damages = outcome.damages
    for note in outcome.notes:
        screen.line(printable(note), style="dim")
    if not damages:
        checked = shown_bytes(outcome.checked_bytes)
        done = f"held against other copies{' in samples' * outcome.sampled}" if outcome.notes else "read and checked"
        screen.line(f"whole: {checked} {done}", style="green")
        return
    limit = DAMAGES_MAX if screen.interactive else None
    for damage in damages[:limit]:
        screen.line(_line(damage), style="red")
    if limit is not None and len(damages) > limit:
        screen.line(f"… and {len(damages) - limit:,} more: --json tells them all", style="dim")
    screen.line(f"damaged: {len(damages):,} place{'s' * (len(damages) != 1)}; load another step or read another copy")


def _line(damage: api.Damage) -> str:
    where = printable(damage.file) or "listing"
    if damage.start is not None and damage.stop is not None:
        where += f" bytes {damage.start}-{damage.stop}"
    if damage.fqn is not None:
        where += f" ({printable(damage.fqn)})"
    return f"{where}: {printable(damage.message)}"


def _document(path: str, outcome: _Outcome) -> dict[str, object]:
    return {
        "path": path,
        "whole": not outcome.damages,
        "bytes": outcome.checked_bytes,
        "sampled": outcome.sampled,
        "notes": list(outcome.notes),
        "damages": [
            {"file": each.file, "start": each.start, "stop": each.stop, "tensor": each.fqn, "message": each.message}
            for each in outcome.damages
        ],
    }
