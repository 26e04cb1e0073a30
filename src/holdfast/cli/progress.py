"""A progress bar on stderr, if stderr is a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rich import progress

from holdfast.cli.screen import Screen, stderr
from holdfast.types.events import Event, Progress


@contextmanager
def shown_progress(doing: str) -> Iterator[Bar | None]:
    """Show a progress bar while the block runs; yield None if stderr is not a terminal."""
    screen = stderr()
    with ExitStack() as stack:
        bar = Bar(screen, doing) if screen.interactive else None
        if bar is not None:
            # Ctrl-C while the bar starts leaves the cursor hidden, and no bar to stop.
            stack.callback(screen.console.show_cursor, True)
            stack.enter_context(bar)
        yield bar


class Bar:
    """A progress bar that disappears at the end of the work."""

    def __init__(self, screen: Screen, doing: str) -> None:
        self._bar = progress.Progress(
            progress.TextColumn(doing),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=screen.console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> None:
        """Show it."""
        self._bar.start()

    def __exit__(self, *_: object) -> None:
        """Remove it."""
        self._bar.stop()

    def on_event(self, event: Event) -> None:
        """Advance to the bytes of a `Progress` event."""
        if isinstance(event, Progress):
            self._bar.update(self._task, completed=event.done_bytes, total=event.total_bytes)
