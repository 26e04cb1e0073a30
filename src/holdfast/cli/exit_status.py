"""Exit statuses of the commands, and the one line that reports an error."""

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
"""The status that a shell reports for a process killed by SIGPIPE."""


@contextmanager
def ended_well(corrupt: int = DAMAGED) -> Iterator[None]:
    """Run the body of a command. An error of Holdfast becomes one line on stderr and a status, never a traceback.

    Args:
        corrupt: The status for a damaged checkpoint.
    """
    try:
        for stream in (sys.stdout, sys.stderr):
            # A character that the terminal cannot encode must not abort the command.
            getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
        yield
        sys.stdout.flush()
    except CheckpointError as error:
        complain(str(error))
        raise typer.Exit(corrupt if isinstance(error, CorruptError) else NOT_DONE) from error
    except BrokenPipeError:
        # Discard what is still buffered: the interpreter would report a failed flush when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(PIPE_CLOSED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def complain(message: str) -> None:
    """Print an error on stderr, in one line."""
    stderr().line(f"holdfast: {printable(message)}", style="red")
