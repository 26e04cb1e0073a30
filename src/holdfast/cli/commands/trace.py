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
from holdfast.errors import InvalidError, UnavailableError, printable


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
        if made.left_out_from is not None:
            where = made.left_out_from.rstrip("/") or "this checkpoint"
            complain(f"more reports than a trace holds: of {where} and older ones, some or all are left out")
        text = json.dumps(made.document, allow_nan=False)
        if output == "-":
            stdout().console.file.write(text + "\n")
            return
        _write(Path(output), text)
        counts = f"{made.saves} save{'s' * (made.saves != 1)} and {made.loads} load{'s' * (made.loads != 1)}"
        stdout().line(f"{printable(output)}: {counts}, {made.ranks} rank{'s' * (made.ranks != 1)}", style="green")
        stdout().line("open it at https://ui.perfetto.dev or chrome://tracing", style="dim")


def _write(path: Path, text: str) -> None:
    """Write a file whole, or leave what was there; write into what is no regular file, such as a pipe."""
    try:
        # Behind a link lies what is to be replaced.
        target = path.resolve()
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_text(text + "\n")
            return
        if not target.name or target.is_dir():
            raise InvalidError(f"{str(path)!r}: is a folder; expected the name of a file. Pass -o")
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            part.write_text(text + "\n")
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        raise UnavailableError(f"{path}: {error}; expected a file that can be written. Pass -o") from error
