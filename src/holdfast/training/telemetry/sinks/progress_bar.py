"""An observer that shows saves, loads and drains as progress bars on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from holdfast.base.types import events
from holdfast.base.types.events import Began, Ended, Entered, Event, Failed, LogEvent, Operation, TierEvent


class TerminalProgress:
    """Shows the saves, loads and drains of rank 0, each on a line that disappears when it ends.

    Shows nothing if the console is not a terminal.
    """

    def __init__(self, console: Console) -> None:
        """Show nothing yet.

        Args:
            console: The terminal. Output to stdout and stderr meanwhile appears above the lines.
        """
        self._console = console
        self._bars: Progress | None = None
        self._tasks: dict[Operation, TaskID] = {}

    def on_event(self, event: Event) -> None:
        """Update the line of the operation."""
        if not self._console.is_terminal or isinstance(event, TierEvent | LogEvent):
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
            # Between saves nothing of the display may remain: stop() also shows the cursor again.
            self._bars.stop()
            self._bars = None


def on_stderr() -> TerminalProgress:
    """Return an observer that shows progress on the stderr of this process."""
    return TerminalProgress(Console(stderr=True))
