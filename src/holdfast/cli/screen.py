"""Lines, tables and JSON on a stream: a terminal of any width, or a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import TextIO, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text


class _Console(Console):
    """A console that leaves a closed pipe to the command; rich would exit with status 1."""

    def on_broken_pipe(self) -> None:
        """Raise the error that rich caught."""
        raise BrokenPipeError


class Screen:
    """An output stream for people or programs."""

    def __init__(self, stream: TextIO) -> None:
        self.console = _Console(file=stream, highlight=False, markup=False, emoji=False)
        """The console of rich that writes to the stream."""
        self.interactive = stream.isatty()
        """Whether it is a terminal. Long lists are cut short on a terminal, with a note; never in a pipe."""

    def line(self, text: str = "", *, style: str = "") -> None:
        """Print one line, however long."""
        self._print(Text(text, style=style))

    def field(self, name: str, text: str) -> None:
        """Print a named fact."""
        self._print(Text.assemble((f"  {name:<10} ", "dim"), text))

    def heading(self, text: str) -> None:
        """Print a blank line and a heading."""
        self.line()
        self.line(text, style="bold")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> None:
        """Print rows under headings. If they are wider than the terminal, each row's first cell gets its own line.

        Args:
            columns: Headings. `>` before a heading aligns its column to the right.
            rows: Cells, one per column, without control characters.
            styles: One per row, or none.
        """
        cells = [[column.removeprefix(">") for column in columns], *rows]
        widths = [max(cell_len(row[at]) for row in cells) for at in range(len(columns))]
        stacked = self.interactive and sum(widths) + 2 * len(widths) > self.console.width
        for number, row in enumerate(cells):
            style = "dim" if not number else styles[number - 1] if styles else ""
            if stacked:
                self.line(row[0], style=style)
                self.line("    " + _aligned(row[1:], widths[1:], columns[1:]), style=style or "dim")
            else:
                self.line(_aligned(row, widths, columns), style=style)

    def first_lines(self, lines: Sequence[str], limit: int | None, hint: str) -> None:
        """Print at most `limit` lines, and a note with the number of the others and a hint how to see them."""
        for line in lines[:limit]:
            self.line(line)
        self.note_left_out(len(lines), limit, hint)

    def note_left_out(self, count: int, limit: int | None, hint: str) -> None:
        """Print how many of `count` entries are left out beyond `limit`, if any."""
        if limit is not None and count > limit:
            self.line(f"… and {count - limit:,} more{hint}", style="dim")

    def json(self, document: object) -> None:
        """Print a document as ASCII JSON, in which no terminal finds a control sequence."""
        self.console.file.write(json.dumps(document, indent=1, allow_nan=False) + "\n")

    def _print(self, text: Text) -> None:
        # Long lists go through pipes, and rich takes twenty times as long for a line without colors.
        if self.console.color_system is None:
            self.console.file.write(f"{text.plain}\n")
            return
        # Never wrap or cut a line: a name must stay one word for copying and searching.
        with self.console.capture() as captured:
            self.console.print(text, soft_wrap=True)
        self.console.file.write(captured.get())


def stdout() -> Screen:
    """Return the screen for results."""
    return Screen(sys.stdout)


def stderr() -> Screen:
    """Return the screen for errors, progress and notes."""
    return Screen(sys.stderr)


Result = TypeVar("Result")


def print_result(
    result: Result, show: Callable[[Screen, Result], None], document: Callable[[Result], object], *, as_json: bool
) -> None:
    """Print the result of a command on stdout, as JSON or for people."""
    if as_json:
        stdout().json(document(result))
    else:
        show(stdout(), result)


def attributes(record: object, *names: str) -> dict[str, object]:
    """Return attributes of a record by name, for a JSON object that has the same names."""
    return {name: getattr(record, name) for name in names}


def _aligned(cells: Sequence[str], widths: Sequence[int], columns: Sequence[str]) -> str:
    padded = []
    for cell, width, column in zip(cells, widths, columns, strict=True):
        padding = " " * (width - cell_len(cell))
        padded.append(padding + cell if column.startswith(">") else cell + padding)
    return "  ".join(padded).rstrip()
