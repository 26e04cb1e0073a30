"""`holdfast trace`: a timeline of all ranks, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.exit_status import complain, ended_well
from holdfast.cli.screen import stdout
from holdfast.errors import InvalidError, UnavailableError, counted, printable


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
        text = json.dumps(result.document, allow_nan=False)
        if output == "-":
            stdout().console.file.write(text + "\n")
            return
        _write(Path(output), text)
        counts = f"{counted(result.saves, 'save')} and {counted(result.loads, 'load')}"
        counts += f", {counted(result.drains, 'drain')}" if result.drains else ""
        stdout().line(f"{printable(output)}: {counts}, {counted(result.ranks, 'rank')}", style="green")
        stdout().line("open it at https://ui.perfetto.dev or chrome://tracing", style="dim")


def _write(path: Path, text: str) -> None:
    """Replace a file atomically; write directly into anything but a regular file, such as a pipe."""
    try:
        # Replace the file that a link points to, not the link.
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
