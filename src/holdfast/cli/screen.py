"""Lines and tables, for a terminal of any width and for a pipe; what comes from a checkpoint is made harmless."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def shown_bytes(count: int) -> str:
    """Return a size for people: `812 B`, `1.3 MiB`."""
    if count < 1024:
        return f"{count} B"
    scaled = float(count)
    for unit in _UNITS:
        scaled /= 1024
        # 1023.95 would be shown as 1024.0 of a unit.
        if scaled < 1023.95 or unit == _UNITS[-1]:
            # Only the last unit may reach thousands that are worth a separator.
            return f"{scaled:,.1f} {unit}" if unit == _UNITS[-1] else f"{scaled:.1f} {unit}"
    raise AssertionError


def shown_ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks for people: `0-3, 7`."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] + 1 == rank:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    title: str
    """Its heading."""

    align: Literal["left", "right"] = "left"
    """Side its cells lean to."""


class _Console(Console):
    """A console that leaves a reader gone away to the command: rich would end the process with status 1."""

    def on_broken_pipe(self) -> None:
        """Raise what was caught."""
        raise BrokenPipeError


class Screen:
    """A stream that people or programs read."""

    def __init__(self, stream: TextIO) -> None:
        self.console = _Console(file=stream, highlight=False, markup=False, emoji=False)
        """What draws on it."""
        self.interactive = stream.isatty()
        """Whether somebody looks at it: long lists are cut short then, with a note; never in a pipe."""

    def line(self, text: str = "", *, style: str = "") -> None:
        """Print one line, however long."""
        self._print(Text(text, style=style))

    def field(self, name: str, text: str) -> None:
        """Print a named fact."""
        self._print(Text.assemble((f"  {name:<10} ", "dim"), text))

    def heading(self, text: str) -> None:
        """Print a heading, a blank line before it."""
        self.line()
        self.line(text, style="bold")

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> None:
        """Print rows under headings; where they are wider than the terminal, each row's first cell on its own line.

        Args:
            columns: Headings.
            rows: Cells, one per column, harmless already.
            styles: One per row, or none.
        """
        cells = [[column.title for column in columns], *rows]
        widths = [max(cell_len(row[at]) for row in cells) for at in range(len(columns))]
        stacked = self.interactive and sum(widths) + 2 * len(widths) > self.console.width
        if stacked:
            rest = columns[1:]
            widths = widths[1:]
        for number, row in enumerate(cells):
            style = "dim" if not number else styles[number - 1] if styles else ""
            if stacked:
                self.line(row[0], style=style)
                self.line("    " + _aligned(row[1:], widths, rest), style=style or "dim")
            else:
                self.line(_aligned(row, widths, columns), style=style)

    def json(self, document: object) -> None:
        """Print a document as JSON in ASCII, which no terminal takes for a command."""
        self.console.file.write(json.dumps(document, indent=1, allow_nan=False) + "\n")

    def _print(self, text: Text) -> None:
        # Lines are never wrapped or cut here: a name must stay one word to whoever copies or searches it.
        with self.console.capture() as captured:
            self.console.print(text, soft_wrap=True)
        self.console.file.write(captured.get())


def stdout() -> Screen:
    """Return the screen for results."""
    return Screen(sys.stdout)


def stderr() -> Screen:
    """Return the screen for complaints."""
    return Screen(sys.stderr)


def _aligned(cells: Sequence[str], widths: Sequence[int], columns: Sequence[Column]) -> str:
    padded = []
    for cell, width, column in zip(cells, widths, columns, strict=True):
        padding = " " * (width - cell_len(cell))
        padded.append(cell + padding if column.align == "left" else padding + cell)
    return "  ".join(padded).rstrip()
