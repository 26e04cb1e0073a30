"""`holdfast repair`: rebuilds damaged manifests and indexes."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.arguments import AllowRoot, AsJson, SingleWriter, settings_with
from holdfast.cli.exit_status import DAMAGED, ended_well
from holdfast.cli.progress import shown_progress
from holdfast.cli.screen import Screen, attributes, print_result
from holdfast.errors import printable

_STYLES = {"whole": "green", "repaired": "green", "damaged": "red", "unfinished": "yellow", "unreadable": "yellow"}


def repair(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A run, one step-* folder of it, or one checkpoint.")],
    step: Annotated[
        str | None,
        typer.Option(
            "--step",
            metavar="STEP",
            help="Only this step, as number, tag or latest, and read all of it. Default: all that look damaged.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing; print what would be done.")] = False,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="With --step: accept a fenced step, if all of it is intact.")
    ] = False,
    allow_root: AllowRoot = None,
    single_writer: SingleWriter = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild damaged manifests and indexes whose content digests prove, and print what is lost.

    The exit status is 0 if nothing is damaged any more, else 1.
    """
    with ended_well():
        settings = settings_with(allow_root, single_writer=single_writer)
        with shown_progress("reading back") as bar:
            report = api.repair(path, step, dry_run=dry_run, unfinished=unfinished, observer=bar, settings=settings)
        print_result(report, partial(_show, dry_run), partial(_document, dry_run), as_json=as_json)
    if not report.is_whole:
        raise typer.Exit(DAMAGED)


def _show(dry_run: bool, screen: Screen, report: api.RepairReport) -> None:
    if not report.steps:
        screen.line("nothing looks damaged; `holdfast verify` reads every byte of a step", style="green")
    for step in report.steps:
        would = "would be " * (dry_run and step.outcome == "repaired")
        what = "checkpoint" if step.step is None else f"step {step.step}"
        screen.line(f"{what}: {would}{step.outcome}", style=_STYLES[step.outcome])
        for action in step.done:
            screen.line(f"  {printable(action)}")
        for loss in step.lost:
            screen.line(f"  {'lost: ' * (step.outcome == 'damaged')}{printable(loss)}")
        if step.lost_tensors:
            # All of them: they are the result, not a message.
            screen.line(f"  lost of {len(step.lost_tensors)} tensors: {printable(', '.join(step.lost_tensors))}")


def _document(dry_run: bool, report: api.RepairReport) -> dict[str, object]:
    steps = [attributes(step, "step", "outcome", "done", "lost", "lost_tensors") for step in report.steps]
    return {"root": report.url, "dry_run": dry_run, "steps": steps}
