"""A progress bar with rate and time left, for a terminal only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from holdfast.cli.screen import stderr


class _Bar:
    """A progress bar that goes away when the work is done."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None)

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        self._bar.update(self._task, completed=done_bytes, total=total_bytes)


@contextmanager
def progress_bar(doing: str) -> Iterator[_Bar | None]:
    """Show a bar on stderr for the length of a block; yields None where nobody looks at it."""
    screen = stderr()
    if not screen.interactive:
        yield None
        return
    with ExitStack() as stack:
        bar = Progress(
            TextColumn(doing),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=screen.console,
            transient=True,
        )
        # An interrupt in the middle of starting leaves nothing that could be stopped but a hidden cursor.
        stack.callback(screen.console.show_cursor, True)
        stack.enter_context(bar)
        yield _Bar(bar)
