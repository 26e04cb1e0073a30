"""SIGKILL at every operation that copies a run, or restores a pack from a copy of it."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

from holdfast.base.clock import SystemClock
from holdfast.offline.copying.copy_run import RunCopy
from holdfast.offline.repair.repair import Repair
from holdfast.stored.checkpoint.location import none_allowed
from tests.doubles.faults import Faults, FaultyStore, kill_process
from tests.support.crashed_run import NEW, OLD, SETTINGS, committed_at, in_child, local_store, require_whole, step_path

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def template(in_memory: Path) -> Path:
    """A root with two steps, of which the newer refers to a pack of the older."""
    root = in_memory / "template"
    committed_at(root, OLD, NEW)
    assert links_are_whole(root)
    return root


def links_are_whole(root: Path) -> bool:
    """Return whether every link is one file with the pack that it is of."""
    links = list(step_path(root, NEW).glob("*/*.link"))
    (pack,) = {link.name.split(".")[1] for link in links}
    named = {link: next((step_path(root, OLD) / pack).glob(link.name.split(".")[2] + ".*")) for link in links}
    return bool(links) and all(link.samefile(path) for link, path in named.items())


def copy(source: Path, root: Path, faults: Faults | None) -> None:
    store = local_store(root)
    RunCopy(local_store(source), store if faults is None else FaultyStore(store, faults), SystemClock()).run()


def repair(root: Path, faults: Faults | None) -> None:
    store = local_store(root) if faults is None else FaultyStore(local_store(root), faults)
    Repair(store, none_allowed, SystemClock(), SETTINGS).run(OLD)


CHANGES = {"put", "put_if_absent", "upload", "upload.complete", "link", "move", "delete", "sync"}
"""Calls that change something. Between two of them a kill finds the same."""


def test_a_copy_that_dies_anywhere_is_finished_by_the_next(template: Path, in_memory: Path) -> None:
    kills = 0
    for at in range(1, 2000, 3):
        root = in_memory / str(at)
        ending = in_child(partial(copy, template, root, Faults(kill_process(), at=at, names=CHANGES)))
        kills += ending.killed
        if ending.killed:
            copy(template, root, None)
        require_whole(root, {OLD, NEW})
        assert links_are_whole(root)
        assert not (root / "copying").exists() and (root / "holdfast.json").exists()
        shutil.rmtree(root)
        if not ending.killed:
            break
    assert kills >= 5


def damaged(root: Path) -> None:
    """Flip a bit of the frozen tensor where it was written; the copy in the newer step is as it was."""
    links = list(step_path(root, NEW).glob("*/*.link"))
    for link in links:
        _, attempt, name, _ = link.name.split(".")
        pack = step_path(root, OLD) / attempt / f"{name}.safetensors"
        data = bytearray(pack.read_bytes())
        data[-1] ^= 1
        pack.write_bytes(data)


def test_restoring_that_dies_anywhere_loses_nothing_and_is_finished_by_the_next(
    template: Path, in_memory: Path
) -> None:
    unlinked = in_memory / "unlinked"
    shutil.copytree(template, unlinked)
    damaged(unlinked)
    assert not links_are_whole(unlinked)
    kills = 0
    for at in range(1, 2000):
        root = in_memory / str(at)
        shutil.copytree(unlinked, root)
        ending = in_child(partial(repair, root, Faults(kill_process(), at=at, names=CHANGES)))
        kills += ending.killed
        if ending.killed:
            repair(root, None)
            require_whole(root, {OLD, NEW})
        assert links_are_whole(root)
        assert not (root / "relinking").exists()
        shutil.rmtree(root)
        if not ending.killed:
            break
    assert kills >= 5
