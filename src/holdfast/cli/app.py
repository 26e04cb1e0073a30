"""The commands put together."""

from __future__ import annotations

from typing import Annotated

import typer

import holdfast
from holdfast.cli.commands.diff import diff
from holdfast.cli.commands.export import export
from holdfast.cli.commands.gc import gc
from holdfast.cli.commands.importing import import_
from holdfast.cli.commands.inspect import inspect
from holdfast.cli.commands.ls import ls
from holdfast.cli.commands.repair import repair
from holdfast.cli.commands.tag import tag
from holdfast.cli.commands.trace import trace
from holdfast.cli.commands.verify import verify

app = typer.Typer(
    name="holdfast",
    help="Look at checkpoints of training runs, check, compare, repair and name them, take in and write those of "
    "others. Needs no PyTorch.",
    epilog="Exit status: 0 as expected, 1 damaged or (diff) different, 2 could not be done, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    # Tracebacks of our own bugs are plain: rich prints local variables, and with them whatever a state holds.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="ls")(ls)
app.command(name="inspect")(inspect)
app.command(name="verify")(verify)
app.command(name="export")(export)
app.command(name="diff")(diff)
app.command(name="import")(import_)
app.command(name="tag")(tag)
app.command(name="gc")(gc)
app.command(name="trace")(trace)
app.command(name="repair")(repair)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {holdfast.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


def run() -> None:
    """Run the command that the arguments name, and end the process with its status."""
    app(prog_name="holdfast")
