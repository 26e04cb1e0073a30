"""`holdfast verify`: read everything back and say what is not as it was saved."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.ending import DAMAGED, ended_well
from holdfast.cli.opening import opened
from holdfast.cli.progress import shown_progress
from holdfast.cli.screen import Screen, printable, shown_bytes, stdout
from holdfast.errors import CorruptError

DAMAGES_MAX = 50
"""Damages told one by one on a terminal."""


def verify(
    path: Annotated[str, typer.Argument(metavar="PATH", help="One checkpoint: a step-* folder, or a path saved to.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; see docs/cli.md.")] = False,
) -> None:
    """Read every byte of one checkpoint and check it. Exits with 0 if it is whole, with 1 if it is damaged."""
    with ended_well():
        try:
            checkpoint = opened(path)
        except CorruptError as error:
            damages, checked_bytes = [api.Damage("manifest.json", None, None, None, str(error))], 0
        else:
            damages, checked_bytes = _checked(checkpoint)
        if as_json:
            stdout().json(_document(path, damages, checked_bytes))
        else:
            _show(stdout(), damages, checked_bytes)
    if damages:
        raise typer.Exit(DAMAGED)


def _checked(checkpoint: api.Checkpoint) -> tuple[list[api.Damage], int]:
    """Return what is damaged, and how many bytes the manifest names."""
    with shown_progress("verifying") as bar:
        verification = checkpoint.verification(bar)
        return list(verification.damages()), verification.total_bytes


def _show(screen: Screen, damages: list[api.Damage], checked_bytes: int) -> None:
    if not damages:
        screen.line(f"whole: {shown_bytes(checked_bytes)} read and checked", style="green")
        return
    limit = DAMAGES_MAX if screen.interactive else None
    for damage in damages[:limit]:
        screen.line(_line(damage), style="red")
    if limit is not None and len(damages) > limit:
        screen.line(f"… and {len(damages) - limit:,} more: --json tells them all", style="dim")
    screen.line(f"damaged: {len(damages):,} place{'s' * (len(damages) != 1)}; load another step or read another copy")


def _line(damage: api.Damage) -> str:
    where = printable(damage.file)
    if damage.start is not None and damage.stop is not None:
        where += f" bytes {damage.start}-{damage.stop}"
    if damage.fqn is not None:
        where += f" ({printable(damage.fqn)})"
    return f"{where}: {printable(damage.message)}"


def _document(path: str, damages: list[api.Damage], checked_bytes: int) -> dict[str, object]:
    return {
        "path": path,
        "whole": not damages,
        "bytes": checked_bytes,
        "damages": [
            {"file": each.file, "start": each.start, "stop": each.stop, "tensor": each.fqn, "message": each.message}
            for each in damages
        ],
    }
