"""`holdfast verify`: reads every byte back and reports damage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.arguments import AllowRoot, AsJson, Step, damaged_step, opened
from holdfast.cli.exit_status import DAMAGED, ended_well
from holdfast.cli.layout_options import Layouts, with_layouts
from holdfast.cli.progress import shown_progress
from holdfast.cli.screen import Screen, attributes, print_result
from holdfast.errors import CorruptError, counted, printable, shown_bytes

_MANIFEST = "manifest.json"
"""The file that is damaged if a checkpoint cannot be opened (docs/format.md)."""

DAMAGES_MAX = 50
"""Damages listed one by one on a terminal."""


@with_layouts
def verify(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A checkpoint (a step-* folder, or a path saved to), or a run.")
    ],
    deep: Annotated[
        bool, typer.Option("--deep", help="Another system's checkpoint: compare all bytes of casts, not samples.")
    ] = False,
    step: Step = None,
    layouts: Layouts = None,
    allow_root: AllowRoot = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of one checkpoint and check it. The exit status is 0 if it is intact, 1 if it is damaged.

    Of the root of a run without --step, the redo log after the two newest bases is checked too.

    With --layout, the bytes of the stored tensors are checked all the same; a layout that does not fit is an error.
    """
    with ended_well():
        try:
            checkpoint = opened(path, allow_root, step, layouts)
        except CorruptError as error:
            number = damaged_step(path, step)
            has_file = number is not None or os.path.exists(os.path.join(path.removeprefix("file://"), _MANIFEST))
            damage = api.Damage(_MANIFEST if has_file else "", None, None, None, str(error))
            outcome = _Outcome([damage], step=number)
        else:
            if layouts:
                with suppress(CorruptError):  # The verification reports a damaged index.
                    _ = checkpoint.viewed
            with shown_progress("verifying") as bar:
                work = checkpoint.verification(bar, deep=deep)
                damages, notes = list(work.damages()), [*checkpoint.remarks, *work.notes]
                outcome = _Outcome(damages, work.total_bytes, notes, work.sampled, checkpoint.step)
        if step is None and api.is_run(path):
            outcome.take_logs(path)
        print_result(outcome, _show, partial(_document, path), as_json=as_json)
    if outcome.damages:
        raise typer.Exit(DAMAGED)


@dataclass(slots=True)
class _Outcome:
    damages: list[api.Damage]
    checked_bytes: int = 0
    """Bytes that the manifest lists; for another system's checkpoint, bytes compared with a copy or a checksum."""
    notes: Sequence[str] = ()
    """What another system's checkpoint was compared with, and how closely."""
    sampled: bool = False
    step: int | None = None
    """Its step, if it has one."""
    log: api.LogVerification | None = None
    """The redo log that was checked; None without one."""

    def take_logs(self, root: str) -> None:
        """Check the redo logs of a run too."""
        logs = api.list_steps(root).logs
        if logs:
            with shown_progress("verifying the redo log") as bar:
                self.log = api.log_verification(logs, observer=bar)
                self.damages += self.log.damages()


def _show(screen: Screen, outcome: _Outcome) -> None:
    damages = outcome.damages
    for note in outcome.notes:
        screen.line(printable(note), style="dim")
    log = outcome.log
    for key in () if log is None else log.torn:
        screen.line(f"{printable(key)}: ends early, since the run was killed; no load needs it", style="dim")
    if not damages:
        checked = shown_bytes(outcome.checked_bytes)
        compared = f"compared with checksums or other copies{' in samples' * outcome.sampled}"
        done = compared if outcome.notes else "read and checked"
        screen.line(f"whole: {checked} {done}", style="green")
        if log is not None:
            size, segments = shown_bytes(log.total_bytes), counted(log.segments, "segment")
            screen.line(f"redo log: {size} in {segments} read and checked", style="green")
        return
    limit = DAMAGES_MAX if screen.interactive else None
    for damage in damages[:limit]:
        screen.line(_line(damage), style="red")
    screen.note_left_out(len(damages), limit, ": --json lists all")
    screen.line(f"damaged: {counted(len(damages), 'place')}; load another step or read another copy")


def _line(damage: api.Damage) -> str:
    where = printable(damage.file) or "listing"
    if damage.start is not None and damage.stop is not None:
        where += f" bytes {damage.start}-{damage.stop}"
    if damage.fqn is not None:
        where += f" ({printable(damage.fqn)})"
    return f"{where}: {printable(damage.message)}"


def _document(path: str, outcome: _Outcome) -> dict[str, object]:
    return {
        "path": path,
        "step": outcome.step,
        "whole": not outcome.damages,
        "bytes": outcome.checked_bytes,
        "sampled": outcome.sampled,
        "notes": outcome.notes,
        "log": None
        if outcome.log is None
        else {"segments": outcome.log.segments, "bytes": outcome.log.total_bytes, "torn": outcome.log.torn},
        "damages": [
            {**attributes(damage, "file", "start", "stop"), "tensor": damage.fqn, "message": damage.message}
            for damage in outcome.damages
        ],
    }
