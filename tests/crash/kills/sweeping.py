"""Kills a process, or fails an operation, at one point after another, each time on a fresh copy of a template."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path

from holdfast.errors import CheckpointError, UnavailableError
from tests.crash.kills.judging import Fate, Judged
from tests.doubles.faults import Faults, kill_process, raise_error
from tests.support.crashed_run import Ending, copy_with_links, in_child, paths_under

CHANGES = {
    "create", "mkdir", "fallocate", "pwrite", "ftruncate", "fsync", "link", "rename", "rename_noreplace", "unlink",
    "rmdir",
}  # fmt: skip
"""System calls that change something. Between two of them a kill finds the same, however much is read there."""


def swept_by(variable: str) -> tuple[Collection[str] | None, int]:
    """Return the system calls that count, None for all, and the distance of those at which a process is stopped.

    Each that changes something. With the variable in the environment, as in `make campaign`: all calls at its distance.
    """
    stride = os.environ.get(variable)
    return (None, int(stride)) if stride else (CHANGES, 1)


def fates_of_kills(
    template: Path,
    root: Path,
    act: Callable[[Path, Faults], None],
    judge: Callable[[Path, Ending], Fate],
    points: Iterable[int],
) -> tuple[list[Fate], Judged[Fate]]:
    """Kill what acts on a copy of a template at each of some operations; return what the judge said, in order.

    Args:
        template: What every process begins with.
        root: Where each copy lies.
        act: What is killed.
        judge: Looks at what a process left, and at how it ended.
        points: Operations, ascending. The first that the action does not reach ends the sweep.
    """
    judged, fates = Judged[Fate](), list[Fate]()
    for at in points:
        copy_with_links(template, root)
        ending = in_child(partial(act, root, Faults(kill_process(), at=at)))
        try:
            fates.append(judged.fate(root, ending, partial(judge, root, ending)))
        except BaseException as error:
            error.add_note(f"killed at operation {at}; files: {sorted(paths_under(root))}")
            raise
        shutil.rmtree(root)
        if ending.acknowledged:
            return fates, judged
    raise AssertionError("the last process was killed too: more points are needed")


def judge_after_errors(
    template: Path,
    root: Path,
    act: Callable[[Path, Faults], None],
    judge: Callable[[Path], object],
    points: Iterable[int],
) -> int:
    """Fail each of some operations of what acts on a copy of a template; return the last operation that was tried."""
    judged, last = Judged[object](), 0
    for last in points:
        copy_with_links(template, root)
        faults = Faults(raise_error(UnavailableError), at=last)
        try:
            act(root, faults)
        except CheckpointError as error:
            assert "a fault was injected at" in str(error) or faults.met
        judged.fate(root, "ended", partial(judge, root))
        shutil.rmtree(root)
        if not faults.met:
            break
    return last
