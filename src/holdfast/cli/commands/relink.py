"""`holdfast relink`: stores packs that steps share once again."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.ending import DAMAGED, ended_well
from holdfast.cli.opening import AsJson, Root
from holdfast.cli.progress import shown_progress
from holdfast.cli.screen import Screen, attributes, counted, print_result
from holdfast.errors import printable
from holdfast.telemetry.log_lines import shown_bytes


def relink(
    root: Root,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; print what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Link packs that steps of a run share again, after a copy that kept no hard links. Digests prove each copy first.

    The exit status is 1 if a file is not what was saved; `holdfast repair` replaces it. The command is refused while a
    job writes to the run. After an interruption, run it again.
    """
    with ended_well():
        with shown_progress("comparing") as bar:
            report = api.relink(root, dry_run=dry_run, observer=bar)
        print_result(report, partial(_show, dry_run), partial(_document, dry_run), as_json=as_json)
    if report.differing:
        raise typer.Exit(DAMAGED)


def _show(dry_run: bool, screen: Screen, report: api.RelinkReport) -> None:
    would = "would be " * dry_run
    links = f"{counted(report.linked, 'link')} {would}made, {shown_bytes(report.freed_bytes)} {would}freed"
    screen.line(links if report.linked else "every link is there", style="green")
    if report.refused:
        screen.line(f"the file system refused {counted(report.refused, 'link')}", style="yellow")
    for key in report.differing:
        screen.line(f"{printable(key)}: is not what was saved, and was left alone", style="red")


def _document(dry_run: bool, report: api.RelinkReport) -> dict[str, object]:
    names = ("linked", "freed_bytes", "refused", "differing")
    return {"root": report.url, "dry_run": dry_run, **attributes(report, *names)}
