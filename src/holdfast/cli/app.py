"""The typer application: every command by name."""

from __future__ import annotations

from typing import Annotated

import typer

import holdfast
from holdfast.cli.commands.activations import activations
from holdfast.cli.commands.agent import agent
from holdfast.cli.commands.alerts import alerts
from holdfast.cli.commands.cp import cp
from holdfast.cli.commands.diff import diff
from holdfast.cli.commands.drain import drain
from holdfast.cli.commands.export import export
from holdfast.cli.commands.gc import gc
from holdfast.cli.commands.importing import import_
from holdfast.cli.commands.inspect import inspect
from holdfast.cli.commands.layouts import layouts
from holdfast.cli.commands.ls import ls
from holdfast.cli.commands.relink import relink
from holdfast.cli.commands.repair import repair
from holdfast.cli.commands.rm import rm
from holdfast.cli.commands.serve import serve
from holdfast.cli.commands.tag import tag
from holdfast.cli.commands.trace import trace
from holdfast.cli.commands.verify import verify

app = typer.Typer(
    name="holdfast",
    help="List, inspect, verify, compare, repair, copy and tag checkpoints of training runs; import and export other "
    "formats. Needs no PyTorch.",
    epilog="Exit status: 0 as expected, 1 damaged or (diff) different, 2 not possible, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    # Plain tracebacks: rich would print local variables, and with them values of the user's state.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    ls,
    inspect,
    verify,
    export,
    diff,
    import_,
    layouts,
    tag,
    gc,
    rm,
    trace,
    repair,
    cp,
    drain,
    agent,
    activations,
    serve,
    alerts,
):
    app.command(name=command.__name__.rstrip("_"))(command)
# With the options of earlier versions, too.
app.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(relink)


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
    """Run the command that the arguments name, and end the process with the status of the command."""
    app(prog_name="holdfast")
