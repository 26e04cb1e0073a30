"""`holdfast trace`: what each rank did when, to be drawn by Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.ending import complain, ended_well
from holdfast.cli.screen import stdout
from holdfast.errors import UnavailableError
from holdfast.spec.printable import printable


def trace(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint, or the folder of a run: all its steps.")],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where the trace goes; - prints it.")
    ] = "trace.json",
) -> None:
    """Make a trace of the saves and loads of a checkpoint or run, from the reports that its ranks left.

    Open it at https://ui.perfetto.dev or chrome://tracing: one process per rank, one track per phase.
    """
    with ended_well():
        made = api.trace(path)
        for key, error in made.unreadable:
            complain(f"{key} is left out: {error}")
        text = json.dumps(made.document, allow_nan=False)
        if output == "-":
            stdout().console.file.write(text + "\n")
            return
        _write(Path(output), text)
        counts = f"{made.saves} save{'s' * (made.saves != 1)} and {made.loads} load{'s' * (made.loads != 1)}"
        stdout().line(f"{printable(output)}: {counts}, {made.ranks} rank{'s' * (made.ranks != 1)}", style="green")
        stdout().line("open it at https://ui.perfetto.dev or chrome://tracing", style="dim")


def _write(path: Path, text: str) -> None:
    """Write a file whole, or leave what was there."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            part.write_text(text + "\n")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UnavailableError(f"{path}: {error.strerror}; expected a file that can be written. Pass -o") from error
