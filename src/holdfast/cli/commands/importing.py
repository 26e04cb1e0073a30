"""`holdfast import`: makes another system's checkpoint a step of a run."""

from __future__ import annotations

from shlex import quote
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.arguments import AllowRoot, AsJson, SingleWriter, chosen_step, settings_with
from holdfast.cli.exit_status import complain, ended_well
from holdfast.cli.layout_options import Layouts, with_layouts
from holdfast.cli.progress import shown_progress
from holdfast.cli.screen import Screen, attributes, print_result
from holdfast.errors import InvalidError, printable, shown_bytes


@with_layouts
def import_(
    src: Annotated[
        str, typer.Argument(metavar="SRC", help="A checkpoint of any format that Holdfast reads, or a run.")
    ],
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The folder of a run; created if it does not exist.")],
    copied: Annotated[
        bool, typer.Option("--copy", help="Copy its bytes into packs of the run; SRC may be deleted then.")
    ] = False,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="The step it becomes; default: its own step number.")
    ] = None,
    from_step: Annotated[
        str | None,
        typer.Option(
            "--from-step",
            metavar="STEP",
            help="If SRC is a run: the step, as number, tag or latest. Default: the newest valid one.",
        ),
    ] = None,
    compression: Annotated[
        str | None, typer.Option(metavar="on|off", help="With --copy: store tensors compressed, exactly. Default: off.")
    ] = None,
    layouts: Layouts = None,
    allow_root: AllowRoot = None,
    single_writer: SingleWriter = False,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint a step of a run. Without --copy the run refers to the files of SRC, which must not change.

    To or from a URL, --copy is needed.

    Every byte is read to compute digests, and before that for checksums that the files hold.
    """
    with ended_well():
        if compression is not None and not copied:
            raise InvalidError("--compression without --copy; expected both: without a copy no pack is written")
        settings = settings_with(allow_root, single_writer=single_writer, compression=compression)
        from_step = chosen_step(src, from_step, allow_root)
        try:
            with shown_progress("importing") as bar:
                report = api.import_checkpoint(
                    src,
                    root,
                    step=step,
                    from_step=from_step,
                    copy=copied,
                    layout=layouts,
                    settings=settings,
                    observer=bar,
                )
        except KeyboardInterrupt:
            complain("interrupted; no step was committed. Run the same command again: it starts again")
            raise
        print_result(report, _show, _document, as_json=as_json)


def _show(screen: Screen, report: api.ImportReport) -> None:
    how = "copied" if report.copied else "by reference"
    screen.line(
        f"step {report.step}: {report.tensors:,} tensors of {shown_bytes(report.bytes)}, {how}, from "
        f"{printable(report.origin or 'Holdfast')}",
        style="green",
    )
    screen.field("path", printable(report.url))
    if not report.copied:
        roots = [printable(root) for root in report.allowed_roots]
        screen.line("The step refers to its files, which must not change. To read it, allow their folder:")
        screen.field("commands", " ".join(f"--allow-root {quote(root)}" for root in roots))
        screen.field("Python", f"Settings(allowed_roots=({''.join(f'{root!r}, ' for root in roots).rstrip()}))")


def _document(report: api.ImportReport) -> dict[str, object]:
    return {
        **attributes(report, "step", "url", "attempt", "origin"),
        "tensor_count": report.tensors,
        "tensor_bytes": report.bytes,
        **attributes(report, "copied", "allowed_roots"),
    }
