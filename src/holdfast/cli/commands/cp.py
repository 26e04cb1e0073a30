"""`holdfast cp`: copies a run and keeps its hard links."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.ending import ended_well
from holdfast.cli.opening import AsJson, Root
from holdfast.cli.progress import shown_progress
from holdfast.cli.screen import Screen, attributes, counted, print_result
from holdfast.errors import first_three
from holdfast.telemetry.log_lines import shown_bytes


def cp(
    root: Root,
    destination: Annotated[str, typer.Argument(metavar="DEST", help="A new folder, or one of an unfinished copy.")],
    as_json: AsJson = False,
) -> None:
    """Copy a whole run, and store packs that its steps share once there too. After an interruption, run it again."""
    with ended_well():
        with shown_progress("copying") as bar:
            report = api.copy_run(root, destination, observer=bar)
        print_result(report, _show, _document, as_json=as_json)


def _show(screen: Screen, report: api.CopyReport) -> None:
    screen.line(
        f"{counted(report.steps, 'step')}: copied {shown_bytes(report.bytes)} in {counted(report.files, 'file')}, made "
        f"{counted(report.linked, 'link')}",
        style="green",
    )
    if report.duplicated:
        refused = counted(report.duplicated, "link")
        screen.line(f"the destination refused {refused}: shared packs are stored several times there", style="yellow")
    if report.left_out:
        steps = first_three(report.left_out)
        screen.line(f"left out, since they changed meanwhile: steps {steps}", style="yellow")


def _document(report: api.CopyReport) -> dict[str, object]:
    return {
        "root": report.url,
        **attributes(report, "steps", "files", "bytes", "linked", "duplicated"),
        "left_out": list(report.left_out),
    }
