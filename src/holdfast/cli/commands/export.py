"""`holdfast export`: writes a checkpoint as files of another system."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.arguments import AllowRoot, AsJson, SingleWriter, Step, chosen_step, settings_with
from holdfast.cli.exit_status import complain, ended_well
from holdfast.cli.layout_options import Layouts, with_layouts
from holdfast.cli.progress import shown_progress
from holdfast.cli.screen import Screen, attributes, print_result
from holdfast.errors import InvalidError, counted, printable, shown_bytes

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTP", 1)
    for suffix, base in (("", 1024), ("B", 1000), ("IB", 1024))
}


@with_layouts
def export(
    src: Annotated[
        str, typer.Argument(metavar="SRC", help="A checkpoint of any format that Holdfast reads, or a run.")
    ],
    dst: Annotated[str, typer.Argument(metavar="DST", help="The file, folder or URL to create; it must not exist.")],
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="Format to write: safetensors, torch, dcp or holdfast.")
    ],
    step: Step = None,
    shard_size: Annotated[
        str | None,
        typer.Option(help="Most bytes of tensors in one of several files. Default: 5GB; at a URL 1/8 of --memory."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Cast the model's floating tensors: float32, float16 or bfloat16.")
    ] = None,
    with_optimizer: Annotated[
        bool, typer.Option("--with-optimizer", help="Write everything, not only the model.")
    ] = False,
    memory: Annotated[str, typer.Option(help="Memory for data in flight, of all workers together.")] = "1GiB",
    workers: Annotated[int, typer.Option(help="Number of parallel processes.")] = 1,
    compression: Annotated[
        str | None, typer.Option(metavar="on|off", help="With --to holdfast: store tensors compressed. Default: off.")
    ] = None,
    layouts: Layouts = None,
    allow_root: AllowRoot = None,
    single_writer: SingleWriter = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as files of another system; they appear all at once, at a URL one by one.

    After an interruption, the same command resumes (to holdfast: it starts again).
    """
    with ended_well():
        if compression is not None and to != "holdfast":
            raise InvalidError(f"--compression with --to {to[:80]}; expected --to holdfast: other systems lack codecs")
        step = chosen_step(src, step, allow_root)
        try:
            with shown_progress("exporting") as bar:
                report = api.export(
                    src,
                    dst,
                    to=to,
                    step=step,
                    shard_bytes=None if shard_size is None else bytes_of(shard_size, "--shard-size"),
                    dtype=dtype,
                    model_only=not with_optimizer,
                    memory_bytes=bytes_of(memory, "--memory"),
                    workers=workers,
                    layout=layouts,
                    observer=bar,
                    settings=settings_with(allow_root, single_writer=single_writer, compression=compression),
                )
        except KeyboardInterrupt:
            outcome = "it starts again" if to == "holdfast" else "it resumes"
            complain(f"interrupted; no whole checkpoint is at {dst} yet. Run the same command again: {outcome}")
            raise
        print_result(report, _show, _document, as_json=as_json)


def bytes_of(text: str, option: str) -> int:
    """Return the bytes that a text states: KB, MB and GB are powers of 1000; KiB, MiB, GiB, K, M and G of 1024.

    Raises:
        InvalidError: The text is not a size.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    unit = _UNITS.get(match[2].upper()) if match else None
    count = int(float(match[1]) * unit) if match and unit else 0
    if not 0 < count < 1 << 60:
        raise InvalidError(f"{option} {text[:80]!r}: expected a size such as 5GB or 512MiB")
    return count


def _show(screen: Screen, report: api.ExportReport) -> None:
    files = counted(len(report.files), "file")
    rate = (report.bytes - report.resumed_bytes) / max(report.seconds, 1e-3)
    screen.line(f"exported {shown_bytes(report.bytes)} in {files} to {printable(report.url)}")
    screen.field("format", report.format)
    screen.field("time", f"{report.seconds:.1f} s, {shown_bytes(int(rate))}/s")
    if report.resumed_bytes:
        screen.field("resumed", f"{shown_bytes(report.resumed_bytes)} were written by an earlier attempt")


def _document(report: api.ExportReport) -> dict[str, object]:
    return {
        **attributes(report, "url", "format", "bytes", "resumed_bytes", "read_bytes", "begun_anew", "seconds"),
        "files": [{"name": name, "bytes": count} for name, count in report.files.items()],
    }
