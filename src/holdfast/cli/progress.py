"""A progress bar on stderr, if stderr is a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress

from holdfast.cli.screen import stderr
from holdfast.observers import Event, Progress


@contextmanager
def shown_progress(doing: str) -> Iterator[Bar | None]:
    """Show a progress bar while the block runs, then remove it; yield None if stderr is not a terminal."""
    screen = stderr()
    if not screen.interactive:
        yield None
        return
    shown = progress.Progress(
        progress.TextColumn(doing),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=screen.console,
        transient=True,
    )
    bar = Bar(shown)
    try:
        with shown:
            yield bar
    finally:
        # Ctrl-C while the bar starts leaves the cursor hidden, and no bar to stop.
        screen.console.show_cursor(True)


class Bar:
    """An observer that advances a progress bar."""

    def __init__(self, shown: progress.Progress) -> None:
        self._shown, self._task = shown, shown.add_task("", total=None)

    def on_event(self, event: Event) -> None:
        """Advance to the bytes of a `Progress` event."""
        if isinstance(event, Progress):
            self._shown.update(self._task, completed=event.done_bytes, total=event.total_bytes)
