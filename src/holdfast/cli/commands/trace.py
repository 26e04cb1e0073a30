"""`holdfast trace`: a timeline of all ranks, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.exit_status import complain, ended_well
from holdfast.cli.output import write_output
from holdfast.cli.screen import stdout
from holdfast.errors import counted, printable


def trace(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint, or the folder of a run: all its steps.")],
    step: Annotated[
        str | None,
        typer.Option("--step", metavar="STEP", help="Of a run: one step, as number, tag or latest. Default: all."),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="File to write; - prints the trace.")
    ] = "trace.json",
) -> None:
    """Write a trace of the saves, loads and drains of a checkpoint or run, from the reports of its ranks.

    Open it at https://ui.perfetto.dev or chrome://tracing: one process per rank, one track per phase.
    """
    with ended_well():
        result = api.trace(path, step=step)
        for key, error in result.unreadable:
            complain(f"{key} is left out: {error}")
        if result.left_out_from is not None:
            where = result.left_out_from.rstrip("/") or "this checkpoint"
            complain(f"more reports than a trace holds: of {where} and older ones, some or all are left out")
        write_output(output, json.dumps(result.document, allow_nan=False) + "\n", "-o")
        if output == "-":
            return
        counts = f"{counted(result.saves, 'save')} and {counted(result.loads, 'load')}"
        counts += f", {counted(result.drains, 'drain')}" if result.drains else ""
        stdout().line(f"{printable(output)}: {counts}, {counted(result.ranks, 'rank')}", style="green")
        stdout().line("open it at https://ui.perfetto.dev or chrome://tracing", style="dim")
