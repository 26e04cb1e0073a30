"""`holdfast repair`: manifests and indexes made again from what else is there."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.ending import DAMAGED, ended_well
from holdfast.cli.opening import AllowRoot
from holdfast.cli.progress import shown_progress
from holdfast.cli.screen import Screen, stdout
from holdfast.errors import printable
from holdfast.settings import Settings

_STYLES = {"whole": "green", "repaired": "green", "damaged": "red", "unfinished": "yellow"}


def repair(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The folder of a run, which holds step-* folders.")],
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", help="This step, read back wholly; otherwise each that looks damaged."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing; tell what would be done.")] = False,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Take in a fenced step, if all of it is whole; with --step.")
    ] = False,
    allow_root: AllowRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; see docs/cli.md.")] = False,
) -> None:
    """Make damaged manifests and indexes again where digests prove them, and tell what is lost.

    Exits with 0 if nothing is damaged any more, with 1 if something is.
    """
    with ended_well():
        settings = Settings(allowed_roots=tuple(allow_root or ()))
        with shown_progress("reading back") as bar:
            report = api.repair(root, step, dry_run=dry_run, unfinished=unfinished, observer=bar, settings=settings)
        if as_json:
            stdout().json(_document(report, dry_run=dry_run))
        else:
            _show(stdout(), report, dry_run=dry_run)
    if not report.is_whole:
        raise typer.Exit(DAMAGED)


def _show(screen: Screen, report: api.RepairReport, *, dry_run: bool) -> None:
    if not report.steps:
        screen.line("nothing looks damaged; `holdfast verify` reads every byte of a step", style="green")
    for each in report.steps:
        would = "would be " * (dry_run and each.outcome == "repaired")
        screen.line(f"step {each.step}: {would}{each.outcome}", style=_STYLES[each.outcome])
        for said in each.done:
            screen.line(f"  {printable(said)}")
        for said in each.lost:
            screen.line(f"  {'lost: ' * (each.outcome == 'damaged')}{printable(said)}")
        if each.lost_tensors:
            screen.line(f"  lost of {len(each.lost_tensors)} tensors: {printable(', '.join(each.lost_tensors))}")


def _document(report: api.RepairReport, *, dry_run: bool) -> dict[str, object]:
    return {
        "root": report.url,
        "dry_run": dry_run,
        "steps": [
            {
                "step": each.step,
                "outcome": each.outcome,
                "done": list(each.done),
                "lost": list(each.lost),
                "lost_tensors": list(each.lost_tensors),
            }
            for each in report.steps
        ],
    }
