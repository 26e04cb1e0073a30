"""`holdfast import`: another system's checkpoint becomes a step of a run."""

from __future__ import annotations

from shlex import quote
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.ending import ended_well
from holdfast.cli.opening import AllowRoot
from holdfast.cli.progress import shown_progress
from holdfast.cli.screen import Screen, shown_bytes, stdout
from holdfast.errors import printable
from holdfast.settings import Settings


def import_(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint of any format that Holdfast reads.")],
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The folder of a run; it becomes one if it is none.")],
    copied: Annotated[
        bool, typer.Option("--copy", help="Copy its bytes into packs of the run, so that SRC may go.")
    ] = False,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="The step it becomes; else the one it tells.")
    ] = None,
    allow_root: AllowRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; see docs/cli.md.")] = False,
) -> None:
    """Make a checkpoint a step of a run. Without --copy its bytes stay where they are, and SRC must stay unchanged.

    Every byte is read once, for its digest.
    """
    with ended_well():
        settings = Settings(allowed_roots=tuple(allow_root or ()))
        with shown_progress("importing") as bar:
            report = api.import_checkpoint(src, root, step=step, copy=copied, settings=settings, observer=bar)
        if as_json:
            stdout().json(_document(report))
        else:
            _show(stdout(), report)


def _show(screen: Screen, report: api.ImportReport) -> None:
    how = "copied" if report.copied else "by reference"
    screen.line(
        f"step {report.step}: {report.tensors:,} tensors of {shown_bytes(report.bytes)}, {how}, from "
        f"{printable(report.origin or 'Holdfast')}",
        style="green",
    )
    screen.field("path", printable(report.url.removeprefix("file://")))
    if not report.copied:
        roots = [printable(root) for root in report.allowed_roots]
        screen.line("Its bytes stay where they are and must not change. Whoever reads them allows that folder:")
        screen.field("commands", " ".join(f"--allow-root {quote(root)}" for root in roots))
        screen.field("Python", f"Settings(allowed_roots=({''.join(f'{root!r}, ' for root in roots).rstrip()}))")


def _document(report: api.ImportReport) -> dict[str, object]:
    return {
        "step": report.step,
        "url": report.url,
        "attempt": report.attempt,
        "origin": report.origin,
        "tensor_count": report.tensors,
        "tensor_bytes": report.bytes,
        "copied": report.copied,
        "allowed_roots": list(report.allowed_roots),
    }
