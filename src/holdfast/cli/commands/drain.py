"""`holdfast drain`: copies the steps of a near tier to the root, once no job does."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.arguments import AsJson, Near, SingleWriter, ToRoot, settings_with
from holdfast.cli.exit_status import complain, ended_well
from holdfast.cli.progress import shown_progress
from holdfast.cli.screen import Screen, attributes, print_result
from holdfast.errors import counted, first_three, shown_bytes


def drain(
    near: Near,
    to: ToRoot = None,
    step: Annotated[
        str | None, typer.Option("--step", metavar="STEP", help="One step alone: a number, tag, 300@1f2e or latest.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Empty the near tier at the end.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be copied.")] = False,
    single_writer: SingleWriter = False,
    as_json: AsJson = False,
) -> None:
    """Copy the steps of a near tier that are due at the root, and the newest one. After an interruption, run it again.

    A job drains by itself: the command is for runs that have ended. An empty root gets the run back.
    """
    with ended_well():
        settings = settings_with(single_writer=single_writer)
        try:
            with shown_progress("draining") as bar:
                report = api.drain(near, to, step=step, remove=remove, dry_run=dry_run, observer=bar, settings=settings)
        except KeyboardInterrupt:
            complain("interrupted; the near tier still has every step. Run the same command again: it goes on")
            raise
        print_result(report, partial(_show, dry_run, remove), partial(_document, dry_run), as_json=as_json)


def _show(dry_run: bool, remove: bool, screen: Screen, report: api.DrainReport) -> None:
    verb = "would be drained" if dry_run else "drained"
    steps = f"steps {', '.join(map(str, report.steps))}" if report.steps else "no step"
    screen.line(f"{verb} to {report.url}: {steps}; {counted(report.files, 'file')}, {shown_bytes(report.bytes)}")
    if report.left:
        if report.removed:
            fate = "removed with the near tier, which alone had them"
        else:
            fate = f"in the near tier alone{', and would be removed' * remove}; to drain one: --step N"
        screen.line(f"{counted(len(report.left), 'step')} [{first_three(report.left)}] {fate}", style="yellow")
    if report.removed:
        screen.line(f"{report.near} is empty")


def _document(dry_run: bool, report: api.DrainReport) -> dict[str, object]:
    document = attributes(report, "near", "url", "files", "bytes", "removed")
    return {**document, "steps": list(report.steps), "left": list(report.left), "dry_run": dry_run}
