"""`holdfast cp`: copies a run or a checkpoint from any store to any other, and keeps hard links."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.arguments import AsJson, SingleWriter, settings_with
from holdfast.cli.exit_status import complain, ended_well
from holdfast.cli.progress import shown_progress
from holdfast.cli.screen import Screen, attributes, print_result
from holdfast.errors import InvalidError, counted, first_three, printable, shown_bytes


def cp(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A run, or a checkpoint.")],
    destination: Annotated[str, typer.Argument(metavar="DEST", help="A new folder, or one of an unfinished copy.")],
    step: Annotated[
        str | None,
        typer.Option(
            "--step", metavar="STEP", help="Copy this step of a run alone: a number, tag, 300@1f2e or latest."
        ),
    ] = None,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave damaged steps of a run out, and complete the copy.")
    ] = False,
    single_writer: SingleWriter = False,
    as_json: AsJson = False,
) -> None:
    """Copy a whole run, or one checkpoint, from any store to any other. After an interruption, run it again.

    Every file is proven by its digest on the way. Packs that steps share are stored once there too.
    """
    with ended_well():
        settings = settings_with(single_writer=single_writer)
        if skip_damaged and (step is not None or not api.is_run(src)):
            raise InvalidError("--skip-damaged leaves steps of a run out; expected a run without --step")
        try:
            with shown_progress("copying") as bar:
                if step is None and api.is_run(src):
                    report = api.copy_run(src, destination, skip_damaged=skip_damaged, observer=bar, settings=settings)
                else:
                    report = api.copy_checkpoint(src, destination, step=step, observer=bar, settings=settings)
        except KeyboardInterrupt:
            complain(f"interrupted; the copy at {destination} is not complete. Run the same command again: it goes on")
            raise
        print_result(report, _show, _document, as_json=as_json)


def _show(screen: Screen, report: api.CopyReport) -> None:
    screen.line(
        f"{counted(report.steps, 'step')}: copied {shown_bytes(report.bytes)} in {counted(report.files, 'file')}, made "
        f"{counted(report.linked, 'link')}{'; the redo log is not copied' * report.leaves_log}",
        style="green",
    )
    if report.duplicated:
        refused = counted(report.duplicated, "link")
        screen.line(f"the destination refused {refused}: shared packs are stored several times there", style="yellow")
    for damage in report.damages:
        place = "" if damage.start is None else f" bytes [{damage.start}, {damage.stop})"
        screen.line(printable(f"damaged: {damage.file}{place}: {damage.message}"), style="red")
    if report.left_out:
        why = "damaged, or changed meanwhile" if report.damages else "since they changed meanwhile"
        screen.line(f"left out, {why}: steps {first_three(report.left_out)}", style="yellow")


def _document(report: api.CopyReport) -> dict[str, object]:
    return {
        "root": report.url,
        **attributes(report, "steps", "files", "bytes", "linked", "duplicated", "leaves_log"),
        "left_out": list(report.left_out),
        "damages": [
            {"file": damage.file, **attributes(damage, "start", "stop", "message"), "tensor": damage.fqn}
            for damage in report.damages
        ],
    }
