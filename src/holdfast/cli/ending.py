"""How a command ends: its exit status, and one line for what went wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from holdfast.cli.screen import stderr
from holdfast.errors import CheckpointError, CorruptError, printable

DAMAGED = 1
DIFFERENT = 1
NOT_DONE = 2
INTERRUPTED = 130
PIPE_CLOSED = 141
"""What a shell reports of a program that SIGPIPE ended."""


@contextmanager
def ended_well(corrupt: int = DAMAGED) -> Iterator[None]:
    """Run the body of a command; an error of Holdfast becomes one line and a status, never a traceback.

    Args:
        corrupt: The status where a checkpoint is damaged.
    """
    try:
        for stream in (sys.stdout, sys.stderr):
            # A character that the terminal cannot show must not end the command.
            getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
        yield
        sys.stdout.flush()
    except CheckpointError as error:
        complain(str(error))
        raise typer.Exit(corrupt if isinstance(error, CorruptError) else NOT_DONE) from error
    except BrokenPipeError:
        # What is still buffered goes nowhere, so that the interpreter does not complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(PIPE_CLOSED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def complain(message: str) -> None:
    """Say on stderr, in one line, what went wrong."""
    stderr().line(f"holdfast: {printable(message)}", style="red")
