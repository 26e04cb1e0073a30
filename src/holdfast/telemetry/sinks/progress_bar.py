"""Saves and loads as bars on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from holdfast.types import events
from holdfast.types.events import Began, Ended, Entered, Event, Failed, Operation


class TerminalProgress:
    """Shows what rank 0 has under way, each save and load on a line that goes when it ends.

    Nothing is shown where nobody looks: the console is no terminal.
    """

    def __init__(self, console: Console) -> None:
        """Show nothing yet.

        Args:
            console: Where to; what is printed meanwhile to stdout and stderr appears above the lines.
        """
        self._console = console
        self._bars: Progress | None = None
        self._tasks: dict[Operation, TaskID] = {}

    def on_event(self, event: Event) -> None:
        """Show it."""
        if not self._console.is_terminal:
            return
        operation = event.report.operation if isinstance(event, Ended) else event.operation
        if operation is None or operation.rank != 0:
            return
        if isinstance(event, Began):
            self._show(operation)
        elif isinstance(event, Ended | Failed):
            self._end(operation)
        elif self._bars is not None and operation in self._tasks:
            task = self._tasks[operation]
            if isinstance(event, Entered):
                self._bars.update(task, phase=event.phase)
            elif isinstance(event, events.Progress):
                self._bars.update(task, completed=event.done_bytes, total=event.total_bytes)

    def _show(self, operation: Operation) -> None:
        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.description}"),
                TextColumn("{task.fields[phase]}", style="dim"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                console=self._console,
                transient=True,
            )
            self._bars.start()
        self._tasks[operation] = self._bars.add_task(escape(operation.name), total=None, phase="")

    def _end(self, operation: Operation) -> None:
        task = self._tasks.pop(operation, None)
        if self._bars is None or task is None:
            return
        self._bars.remove_task(task)
        if not self._tasks:
            # Between saves the terminal is as if nobody had been there, its cursor too.
            self._bars.stop()
            self._bars = None


def on_stderr() -> TerminalProgress:
    """Return what shows on this process's stderr."""
    return TerminalProgress(Console(stderr=True))
