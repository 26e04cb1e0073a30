"""`holdfast export`: a checkpoint as files that another system reads."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.ending import complain, ended_well
from holdfast.cli.opening import AllowRoot
from holdfast.cli.progress import shown_progress
from holdfast.cli.screen import Screen, shown_bytes, stdout
from holdfast.cli.sizes import bytes_of
from holdfast.errors import printable
from holdfast.settings import Settings


def export(
    src: Annotated[str, typer.Argument(metavar="SRC", help="One checkpoint, of Holdfast's or of a format it reads.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="What is to be made; nothing may be there.")],
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="What to write: safetensors, torch, dcp, or holdfast.")
    ],
    shard_size: Annotated[
        str, typer.Option(help="Tensors in one file, at most, where the format has several.")
    ] = "5GB",
    dtype: Annotated[
        str | None, typer.Option(help="Cast the model's floating tensors: float32, float16 or bfloat16.")
    ] = None,
    with_optimizer: Annotated[
        bool, typer.Option("--with-optimizer", help="Write everything, not only the model.")
    ] = False,
    memory: Annotated[str, typer.Option(help="Memory for bytes on their way, of all workers together.")] = "1GiB",
    workers: Annotated[int, typer.Option(help="Processes that do it beside each other.")] = 1,
    allow_root: AllowRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; see docs/cli.md.")] = False,
) -> None:
    """Write a checkpoint as another system's files, all at once. Stopped, the same command goes on where it was.

    To holdfast, it begins anew.
    """
    with ended_well():
        try:
            with shown_progress("exporting") as bar:
                report = api.export(
                    src,
                    dst,
                    to=to,
                    shard_bytes=bytes_of(shard_size, "--shard-size"),
                    dtype=dtype,
                    model_only=not with_optimizer,
                    memory_bytes=bytes_of(memory, "--memory"),
                    workers=workers,
                    observer=bar,
                    settings=Settings(allowed_roots=tuple(allow_root or ())),
                )
        except KeyboardInterrupt:
            goes_on = "it begins anew" if to == "holdfast" else "it goes on where it was"
            complain(f"interrupted; no checkpoint is at {dst} yet. Run the same command again: {goes_on}")
            raise
        if as_json:
            stdout().json(_document(report))
        else:
            _show(stdout(), report)


def _show(screen: Screen, report: api.ExportReport) -> None:
    files = f"{len(report.files):,} file{'s' * (len(report.files) != 1)}"
    rate = (report.bytes - report.resumed_bytes) / max(report.seconds, 1e-3)
    screen.line(f"exported {shown_bytes(report.bytes)} in {files} to {printable(report.url.removeprefix('file://'))}")
    screen.field("format", report.format)
    screen.field("time", f"{report.seconds:.1f} s, {shown_bytes(int(rate))}/s")
    if report.resumed_bytes:
        screen.field("resumed", f"{shown_bytes(report.resumed_bytes)} were there from an earlier try")


def _document(report: api.ExportReport) -> dict[str, object]:
    return {
        "url": report.url,
        "format": report.format,
        "bytes": report.bytes,
        "resumed_bytes": report.resumed_bytes,
        "read_bytes": report.read_bytes,
        "begun_anew": report.begun_anew,
        "seconds": report.seconds,
        "files": [{"name": name, "bytes": count} for name, count in report.files.items()],
    }
