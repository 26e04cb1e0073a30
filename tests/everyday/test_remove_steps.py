"""Someone frees space with `rm -rf` of a step, of a run with frozen weights."""

from __future__ import annotations

import errno
import shutil
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast import api
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.core.format.names import is_link_name
from holdfast.errors import CorruptError
from holdfast.settings import Settings
from tests.everyday.frozen_run import (
    FROZEN_BYTES,
    STEPS,
    Refusing,
    made_at,
    ran,
    require_resumes,
    require_step,
    state_at,
    step_path,
    used_bytes,
)

REFUSALS = [errno.EMLINK, errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EACCES]


@pytest.mark.parametrize("removed", [(1,), (2,), (3,), (1, 2)])
def test_every_other_step_stays_whole(run: Path, removed: tuple[int, ...]) -> None:
    for step in removed:
        ran("rm", "-rf", step_path(run, step))
    rest = [step for step in STEPS if step not in removed]
    for step in rest:
        require_step(step_path(run, step), step)
    require_resumes(run, rest[-1])


def test_the_commands_say_the_same(run: Path) -> None:
    ran("rm", "-rf", step_path(run, 1))
    holdfast_command = (sys.executable, "-m", "holdfast.cli")
    assert ran(*holdfast_command, "verify", step_path(run, 3)).startswith("whole: ")
    assert "ALONE" in ran(*holdfast_command, "ls", run)


def test_links_take_no_space(run: Path, tmp_path: Path) -> None:
    made_at(tmp_path / "unlinked", settings=Settings(link_unchanged=False))
    linked, unlinked = used_bytes(run), used_bytes(tmp_path / "unlinked")
    # A name in a folder, and what file systems round up.
    assert abs(linked - unlinked) < 100_000 < FROZEN_BYTES
    assert linked < 2 * FROZEN_BYTES


def test_a_removed_step_frees_what_no_other_step_needs(run: Path) -> None:
    before = used_bytes(run)
    for step in (1, 2):
        ran("rm", "-rf", step_path(run, step))
    assert FROZEN_BYTES < used_bytes(run) < before
    ran("rm", "-rf", step_path(run, 3))
    assert used_bytes(run) < FROZEN_BYTES


@pytest.mark.parametrize("links", [True, False])
def test_a_running_job_goes_on_after_the_packs_were_removed(tmp_path: Path, links: bool) -> None:
    """With links to the pack of the step before, else it writes anew."""
    settings = holdfast.Settings(link_unchanged=links)
    with holdfast.CheckpointManager(tmp_path, process_group=False, settings=settings) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step)).wait()
        ran("rm", "-rf", step_path(tmp_path, 1))
        report = manager.save(3, state_at(3)).wait()
        assert report is not None and (report.unchanged_bytes >= FROZEN_BYTES) == links
        again = manager.save(4, state_at(4)).wait()
        assert again is not None and again.unchanged_bytes >= FROZEN_BYTES
    for step in (2, 3, 4) if links else (3, 4):
        require_step(step_path(tmp_path, step), step)


def test_a_step_removed_while_a_save_is_under_way(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path, process_group=False) as manager:
        manager.save(1, state_at(1)).wait()
        handle = manager.save(2, state_at(2))
        ran("rm", "-rf", step_path(tmp_path, 1))
        handle.wait()
    require_step(step_path(tmp_path, 2), 2)


@pytest.mark.parametrize("code", REFUSALS, ids=errno.errorcode.get)
def test_where_links_are_refused_a_step_says_what_it_lacks(tmp_path: Path, code: int) -> None:
    made_at(tmp_path / "run", Refusing(code))
    for step in STEPS:
        require_step(step_path(tmp_path / "run", step), step)
    assert not [path for path in tmp_path.rglob("*") if is_link_name(path.name)]
    assert [record.stands_alone for record in api.list_steps(tmp_path / "run").steps] == [True, False, False]
    ran("rm", "-rf", step_path(tmp_path / "run", 1))
    with pytest.raises(CorruptError, match="belongs to step 1, and step 3 refers to it"):
        holdfast.load(step_path(tmp_path / "run", 3), state_at(0), process_group=False)


def test_a_pack_that_vanishes_as_it_is_linked_is_written_anew(tmp_path: Path) -> None:
    class Vanishing(Syscalls):
        def link(self, name: str, new_name: str, *, dir_fd: int, new_dir_fd: int | None = None) -> None:
            if new_dir_fd is not None:
                shutil.rmtree(step_path(tmp_path, 1), ignore_errors=True)
            super().link(name, new_name, dir_fd=dir_fd, new_dir_fd=new_dir_fd)

    made_at(tmp_path, Vanishing())
    assert [record.step for record in api.list_steps(tmp_path).steps] == [2, 3]
    for step in (2, 3):
        require_step(step_path(tmp_path, step), step)
