"""Finds out, from outside, whether a save is under way, and what a killed one left behind."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from demo.ranks import PHASE_SECONDS_MAX, Ranks, RunFailed

PAGE_BYTES = 4096
LOOK_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Leftover:
    """What a save that never committed left on disk."""

    step: int
    """Its step."""

    written_bytes: int
    """Bytes of its packs on pages that hold anything but zeros."""

    packs_bytes: int
    """Room its packs take."""


def committed_steps(root: Path) -> list[int]:
    """Return the steps whose manifest is there, ascending."""
    return sorted(int(path.parent.name.removeprefix("step-")) for path in root.glob("step-*/manifest.json"))


def kill_in_the_middle_of_a_save(ranks: Ranks, root: Path, *, first_step: int, delay_seconds: float) -> Leftover | None:
    """Kill all ranks soon after a save of `first_step` or later has begun to write its packs.

    Returns:
        What the save left, or None if it had committed before the kill came.

    Raises:
        RunFailed: The run ended before such a save was seen.
    """
    deadline = time.monotonic() + PHASE_SECONDS_MAX
    while (folder := _save_under_way(root, first_step)) is None:
        if not ranks.running() or time.monotonic() > deadline:
            raise RunFailed("the run ended before a save could be caught under way")
        time.sleep(LOOK_SECONDS)
    time.sleep(delay_seconds)
    ranks.kill()
    if (folder / "manifest.json").exists():
        return None
    packs = [path.read_bytes() for path in folder.rglob("*.safetensors")]
    return Leftover(
        step=int(folder.name.removeprefix("step-")),
        written_bytes=sum(_written_bytes(pack) for pack in packs),
        packs_bytes=sum(map(len, packs)),
    )


def _save_under_way(root: Path, first_step: int) -> Path | None:
    try:
        with os.scandir(root) as entries:
            folders = [Path(entry.path) for entry in entries if entry.name.startswith("step-")]
    except FileNotFoundError:
        return None
    for folder in folders:
        if int(folder.name.removeprefix("step-")) < first_step or (folder / "manifest.json").exists():
            continue
        if any(folder.glob("*/*.safetensors")):
            return folder
    return None


def _written_bytes(pack: bytes) -> int:
    zeros = bytes(PAGE_BYTES)
    pages = (pack[start : start + PAGE_BYTES] for start in range(0, len(pack), PAGE_BYTES))
    return sum(len(page) for page in pages if page != zeros[: len(page)])
