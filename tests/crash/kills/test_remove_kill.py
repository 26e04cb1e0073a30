"""SIGKILL and errors at every operation of `holdfast rm`: what stays is whole, and the same command again ends it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from holdfast import api
from holdfast._face import wiring
from holdfast.base.clock import SystemClock
from holdfast.errors import MissingError
from holdfast.stored.repository.tags import read_tags
from holdfast.training.runs.tags import tag_step
from tests.crash.kills.judging import Judged
from tests.crash.kills.sweeping import fates_of_kills
from tests.doubles.faults import Faults, FaultyStore, fail_with, kill_process
from tests.support.crashed_run import (
    SETTINGS,
    copy_with_links,
    in_child,
    local_store,
    paths_under,
    require_whole,
    run_at,
    step_path,
    training_state,
)
from tests.unit.cli.running import holdfast as command

pytestmark = [
    pytest.mark.long,
    # The fork happens while threads of earlier tests may stand idle; the child uses none of their locks.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(600),
]

STEPS, NAMED, KEPT = (10, 20, 30, 40), (10, 30), {20, 40}
"""The packs of the first, which is named for removal, are those of all others too."""

STRIDE = int(os.environ.get("COLLECT_STRIDE", "13"))
"""Every so many-th call that changes a file is met; `make campaign` meets all."""

CHANGES = {"put", "put_if_absent", "delete", "move", "link", "rename", "unlink", "rmdir", "mkdir", "pwrite", "fsync"}
"""Calls that change something. Between two of them a kill finds the same."""

Act = Callable[[Path, Faults], int]


def over_syscalls(root: Path, faults: Faults) -> int:
    """Run the command; return its exit status. Every call to the operating system counts."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(wiring, "store_at", lambda path, settings: local_store(root, faults))
        return command("rm", root, *NAMED, "--tagged", "--grace", 0).status


def over_store(root: Path, faults: Faults) -> int:
    """Call the function that the command calls; every operation of the store counts."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(wiring, "store_at", lambda path, settings: FaultyStore(local_store(root), faults))
        return len(api.remove_steps(root, NAMED, tagged=True, grace_seconds=0).left)


def to_its_end(act: Act, root: Path, faults: Faults) -> None:
    assert act(root, faults) == 0


def require_ends(root: Path) -> tuple[int, ...]:
    """Require that what is left is whole, and that the same request, or a collection, ends the removal.

    Returns:
        The named steps that were left.
    """
    left = require_sound(root)
    beside = root.with_name("collected")
    copy_with_links(root, beside)
    require_collected(beside, left)
    shutil.rmtree(beside)
    try:
        again = api.remove_steps(root, NAMED, tagged=True, grace_seconds=0)
        assert again.left == {} and {*again.steps, *again.gone} == {*map(str, NAMED)}
    except MissingError:
        # The removal died after its last change: nothing is left to do, nor that tells of it.
        assert left == KEPT
    assert require_sound(root) == KEPT
    require_nothing_left(root, KEPT)
    assert list(read_tags(local_store(root)).whole) == ["best"]
    return tuple(sorted(left - KEPT))


def require_sound(root: Path) -> set[int]:
    """Require that every step is whole or gone, none that was not named, and no tag of a step that stays."""
    left = set(run_at(local_store(root)).steps())
    assert left >= KEPT, "a step that nobody named was lost"
    require_whole(root, left)
    tags = read_tags(local_store(root))
    assert not tags.damaged and tags.whole["best"].step == 40
    assert 10 not in left or tags.whole["old"].step == 10
    return left


def require_collected(root: Path, left: set[int]) -> None:
    """Require that a collection leaves nothing but the steps that stay."""
    api.collect(root, grace_seconds=0)
    # The next writer puts a manifest back whose removal had just begun.
    returned = set(run_at(local_store(root)).steps()) - left
    assert returned <= {*NAMED}
    require_whole(root, left | returned)
    require_nothing_left(root, left | returned)


def require_nothing_left(root: Path, left: set[int]) -> None:
    """Require that nothing is stored but some steps, and packs of the first that these refer to without links."""
    holding = left if list(root.glob("step-*/*/*.link")) else {*left, 10}
    assert {path.name for path in root.glob("step-*")} == {step_path(root, step).name for step in holding}
    if 10 in holding - left:
        files = [path for path in step_path(root, 10).rglob("*") if path.is_file()]
        assert files and {path.suffix for path in files} == {".safetensors"}
    folders = ("collecting/", "readers/", "superseded/", "timelines/")
    # What a dead process left half written goes with the next object that is removed there.
    assert not [path for path in paths_under(root) if path.startswith(folders) and "/.tmp-" not in path]


@pytest.fixture
def template(request: pytest.FixtureRequest, in_memory: Path) -> Path:
    """A run whose steps have links to packs of the first, or refer to them only."""
    root = in_memory / "template"
    run = run_at(local_store(root), settings=replace(SETTINGS, link_unchanged=request.param == "linked"))
    for step in STEPS:
        run.save(step, training_state(step)).wait()
    run.close()
    assert bool(list(root.glob("step-*/*/*.link"))) == (request.param == "linked")
    for step, tag in ((10, "old"), (40, "best")):
        tag_step(local_store(root), SystemClock(), step, tag)
    return root


def changes_in(act: Act, template: Path, root: Path, stride: int) -> list[int]:
    """Return some of the operations that change something, and one that is never reached."""
    copy_with_links(template, root)
    recorded = Faults()
    to_its_end(act, root, recorded)
    shutil.rmtree(root)
    changes = [at for at, call in enumerate(recorded.seen, 1) if call.name in CHANGES]
    return [*changes[::stride], recorded.counted + 1000]


@pytest.mark.parametrize(
    ("template", "way"), [("linked", over_syscalls), ("referring", over_store)], indirect=["template"]
)
def test_killed_anywhere(in_memory: Path, template: Path, way: Act) -> None:
    root = in_memory / "root"
    points = changes_in(way, template, root, max(STRIDE // 3, 1) if way is over_store else STRIDE)
    act = partial(to_its_end, way)
    left, judged = fates_of_kills(template, root, act, lambda root, _: require_ends(root), points)
    assert left[0] == NAMED and left[-1] == () and set(left) <= {NAMED, NAMED[1:], ()}
    assert left == sorted(left, key=len, reverse=True), "what went stays gone"
    print(f"{way.__name__}: {judged.deaths} deaths left {judged.contents} contents: 0 steps lost, all ended")


@pytest.mark.parametrize("template", ["linked"], indirect=True)
def test_killed_again_while_the_same_command_ends_it(in_memory: Path, template: Path) -> None:
    """The first step is gone. The command still knows it, however often it is killed."""
    root, recorded = in_memory / "root", Faults()
    copy_with_links(template, root)
    to_its_end(over_store, root, recorded)
    shutil.rmtree(root)
    moves = [
        at for at, call in enumerate(recorded.seen, 1) if call.name == "move" and call.subject.endswith("manifest.json")
    ]
    assert len(moves) == len(NAMED)
    ending = in_child(partial(to_its_end, over_store, template, Faults(kill_process(), at=moves[1])))
    assert ending.killed and run_at(local_store(template)).steps() == [20, 30, 40]
    points = changes_in(over_store, template, root, max(STRIDE // 2, 1))
    left, _ = fates_of_kills(
        template, root, partial(to_its_end, over_store), lambda root, _: require_ends(root), points
    )
    assert set(left) == {(30,), ()}


@pytest.mark.parametrize("template", ["referring"], indirect=True)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES])
def test_an_error_of_the_system_loses_nothing(in_memory: Path, template: Path, code: int) -> None:
    root, judged = in_memory / "root", Judged[tuple[int, ...]]()
    points = changes_in(over_syscalls, template, root, max(STRIDE // 3, 1))
    # Each error is met at other calls than the two others.
    for at in points[code % 3 :: 9 if STRIDE > 1 else 1]:
        copy_with_links(template, root)
        faults = Faults(fail_with(code), at=at)
        status = over_syscalls(root, faults)
        assert status in (0, 2)
        left = judged.fate(root, status, partial(require_ends, root))
        assert status or not left, "it said that it was done"
        shutil.rmtree(root)
