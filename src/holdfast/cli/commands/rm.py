"""`holdfast rm`: removes steps of a run by name."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.arguments import AsJson, Grace, Root, SingleWriter, say_grace, settings_with
from holdfast.cli.exit_status import NOT_DONE, ended_well
from holdfast.cli.screen import Screen, attributes, print_result
from holdfast.errors import printable, shown_bytes


def rm(
    root: Root,
    steps: Annotated[
        list[str],
        typer.Argument(metavar="STEP…", help="The steps: number, tag or latest; 300@1f2e for a superseded one."),
    ],
    tagged: Annotated[bool, typer.Option("--tagged", help="Remove tagged steps too, with their tags.")] = False,
    all_steps: Annotated[
        bool, typer.Option("--all", help="Allow to remove the last step that a resume could take.")
    ] = False,
    grace: Grace = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    single_writer: SingleWriter = False,
    as_json: AsJson = False,
) -> None:
    """Remove steps of a run. Packs that other steps refer to stay.

    Nothing is removed if one of the steps does not exist or has a tag, or if no step would stay that a resume could
    take. A step that somebody reads stays: run the command again (exit status 2). The command is refused while a job
    writes to the run. An interruption leaves every step complete or gone; the same command ends the removal.
    """
    with ended_well():
        if not dry_run and not as_json:
            say_grace(grace)
        report = api.remove_steps(
            root,
            steps,
            tagged=tagged,
            all_steps=all_steps,
            dry_run=dry_run,
            grace_seconds=grace,
            settings=settings_with(single_writer=single_writer),
        )
        print_result(report, partial(_show, dry_run), partial(_document, dry_run), as_json=as_json)
        if report.left and not dry_run:
            raise typer.Exit(NOT_DONE)


def _show(dry_run: bool, screen: Screen, report: api.RemovedSteps) -> None:
    verb = "would be removed" if dry_run else "removed"
    steps = f"steps {', '.join(report.steps)}" if report.steps else "no step"
    screen.line(f"{verb}: {steps}; {report.files} files, {shown_bytes(report.bytes)}")
    if report.gone:
        screen.line(f"steps {', '.join(report.gone)} were removed before, by a removal that did not end")
    for step, why in report.left.items():
        screen.line(f"step {step} stays: {printable(', '.join(why))}", style="yellow")


def _document(dry_run: bool, report: api.RemovedSteps) -> dict[str, object]:
    removed = attributes(report, "steps", "files", "bytes", "gone")
    return {"dry_run": dry_run, "removed": removed, "left": dict(report.left)}
