"""Bars on a terminal: there while something is under way on rank 0, gone when it ends, and never elsewhere."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from holdfast.observers import (
    Began,
    Ended,
    Entered,
    Event,
    Failed,
    LogInterrupted,
    LogRedone,
    LogSealed,
    Operation,
    Progress,
    RankReport,
)
from holdfast.training.telemetry.sinks.progress_bar import TerminalProgress

SOURCE = Path(__file__).resolve().parents[5] / "src"
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"

RUN = f"""
import sys; sys.path.insert(0, {str(SOURCE)!r})
import torch, holdfast
from holdfast.observers import progress
with holdfast.CheckpointManager(sys.argv[1], process_group=False, observers=[progress()]) as manager:
    for step in (1, 2):
        manager.save(step, {{"w": torch.ones(1 << 22)}}).wait()
"""


def told(events: list[Event], *, terminal: bool = True) -> str:
    out = io.StringIO()
    observer = TerminalProgress(Console(file=out, force_terminal=terminal, width=120))
    for each in events:
        observer.on_event(each)
    return out.getvalue()


def a_save(rank: int = 0, step: int = 7) -> list[Event]:
    operation = Operation("save", step, "memory://x", rank, 2)
    report = RankReport(operation, "0" * 16, "h", 1, 0.0, 1.0, (), 10)
    return [Began(operation, 0.0), Entered(operation, "write"), Progress(5 << 20, 10 << 20, operation), Ended(report)]


def test_what_is_under_way_is_shown_and_goes() -> None:
    shown = told(a_save()[:3])
    assert "save of step 7" in shown and HIDE in shown and SHOW not in shown
    assert told(a_save()).count(SHOW) == 1, "the cursor is back"
    failed = Failed(Operation("save", 7, "memory://x", 0, 2), "UnavailableError", "full", 0.0, 1.0, ())
    assert told([*a_save()[:3], failed]).count(SHOW) == 1


def test_two_at_once_are_two_lines_and_end_with_the_last() -> None:
    first, second = a_save(step=1), a_save(step=2)
    events = [first[0], second[0], *first[1:], *second[1:]]
    shown = told(events)
    assert shown.count(HIDE) == shown.count(SHOW) == 1
    assert "save of step 1" in shown and "save of step 2" in shown


def test_nothing_of_other_ranks_nor_where_nobody_looks() -> None:
    assert told(a_save(rank=1)) == ""
    assert told(a_save(), terminal=False) == ""
    assert told([*a_save()[1:], Progress(1, 2)]) == "", "of what nobody saw begin"


def test_a_real_run_on_a_terminal_and_in_a_pipe(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN]
    piped = subprocess.run([*command, str(tmp_path / "a")], capture_output=True, text=True, timeout=120, check=False)
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, "", "")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen([*command, str(tmp_path / "b")], stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 1 << 16):
            shown += data
    except OSError:
        pass  # The last one to hold the terminal has gone.
    finally:
        os.close(ours)
    assert process.wait(60) == 0
    text = shown.decode(errors="replace")
    assert "save of step 1" in text and "save of step 2" in text
    assert text.count(HIDE) == text.count(SHOW) >= 1


def test_a_redo_log_draws_no_bar() -> None:
    assert told([LogSealed(11, "x", 0, 1, 100, 0.0, 11), LogInterrupted(12, "x", 0, "because", 0.0)]) == ""
    assert told([LogRedone(17, "x", 0, 10, 7, 0.5, 0.0)]) == ""
