"""`holdfast ls`: the steps of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.arguments import AsJson, Root
from holdfast.cli.exit_status import ended_well
from holdfast.cli.screen import Screen, print_result

STYLES = {"bad": "red", "warning": "yellow", "old": "dim", "": ""}


def ls(
    root: Root,
    near: Annotated[
        str | None,
        typer.Option(
            "--near", metavar="PATH", help="The near tier. Default: the one of the root, if this host has it."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the steps of a run, oldest first, with damaged and unfinished ones."""
    with ended_well():
        print_result(api.list_steps(root, near=near), _show, api.run_document, as_json=as_json)


def _show(screen: Screen, run: api.RunRecord) -> None:
    table = api.step_table(run)
    if table.rows:
        screen.table(table.columns, table.rows, [STYLES[tone] for tone in table.tones])
    else:
        screen.line("no committed step yet")
    for tone, text in table.notes:
        screen.line(text, style=STYLES[tone])
