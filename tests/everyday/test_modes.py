"""Someone shares a run with colleagues, or keeps it private, and uses every command on it afterwards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import api
from holdfast.errors import CheckpointError, InvalidError
from holdfast.policies import LatestN
from holdfast.settings import Settings
from tests.everyday.frozen_run import step_path
from tests.support.file_modes import GROUP, OTHER_USER, as_root, as_user, modes_in, open_folder, require_modes, umask
from tests.unit.cli.running import holdfast as command

Act = Callable[[Path], object]

FROZEN = torch.arange(1 << 16, dtype=torch.float32)
STEPS = (1, 2, 3, 4)


def state_at(step: int) -> dict[str, object]:
    return {"w": torch.full((64,), float(step)), "frozen": FROZEN.clone(), "step": step}


def save_steps(root: Path, *steps: int, settings: Settings = Settings()) -> None:  # noqa: B008 - frozen
    with holdfast.CheckpointManager(root, settings=settings, process_group=False) as manager:
        manager.load(state_at(0))
        for step in steps:
            manager.save(step, state_at(step)).wait()


def require_loads(root: Path, step: int) -> None:
    state = state_at(0)
    holdfast.load(root, state, step=step, process_group=False)
    assert torch.equal(state["w"], torch.full((64,), float(step))) and state["step"] == step


def repair_a_manifest(root: Path) -> None:
    manifest = step_path(root, 3) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-40])
    assert api.repair(root).steps


def import_foreign(root: Path) -> None:
    api.export(root, root.with_name("foreign.pt"), to="torch", step=4)
    api.import_checkpoint(root.with_name("foreign.pt"), root, step=50, copy=True)


def go_on_after_rewind(root: Path) -> None:
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        assert manager.load(state_at(0), step=3) == 3
        manager.save(4, state_at(4)).wait()


COMMANDS: dict[str, Act] = {
    "gc": lambda root: command("gc", root, "--keep-last", 3, "--grace", 0),
    "tag": lambda root: api.tag(root, 3, "good"),
    "load": lambda root: require_loads(root, 4),
    "verify": lambda root: command("verify", root),
    "repair": repair_a_manifest,
    "next job": lambda root: save_steps(root, 60, 61),
    "rewind": go_on_after_rewind,
    "collect": lambda root: api.collect(root, keep=LatestN(4), grace_seconds=0),
    "untag": lambda root: api.untag(root, "good"),
    "rm": lambda root: api.remove_steps(root, [3], grace_seconds=0),
    "import": import_foreign,
}
COPIES: dict[str, Callable[[Path, Path], object]] = {
    "cp": lambda root, copy: api.copy_run(root, copy),
    "cp of a step": lambda root, copy: api.copy_checkpoint(root, copy, step=4),
    "cp of a folder": lambda root, copy: api.copy_checkpoint(step_path(root, 4), copy),
    "export": lambda root, copy: api.export(root, copy, to="safetensors", step=4, shard_bytes=8192),
    "export to holdfast": lambda root, copy: api.export(step_path(root, 4), copy, to="holdfast"),
    "import of a copy": lambda root, copy: api.import_checkpoint(root, copy, from_step=4, copy=True),
}


@pytest.mark.parametrize(
    ("mode", "first", "later", "file_mode", "folder_mode"),
    (
        (None, 0o022, 0o077, 0o644, 0o755),
        (0o600, 0o022, 0o000, 0o600, 0o700),
    ),
)
def test_every_command_writes_with_the_mode_of_the_run(
    mode: int | None, first: int, later: int, file_mode: int, folder_mode: int
) -> None:
    with open_folder() as top:
        root = top / "run"
        with umask(first):
            save_steps(root, *STEPS, settings=Settings(file_mode=mode))
        require_modes(root, file_mode, folder_mode)
        for name, use in COMMANDS.items():
            with umask(later):
                before = set(modes_in(root))
                use(root)
            require_modes(root, file_mode, folder_mode)
            assert name in ("verify", "load") or set(modes_in(root)) != before, f"{name} has tried nothing"
            if not file_mode & 0o004 and os.geteuid() == 0:
                with as_user(OTHER_USER, GROUP), pytest.raises(InvalidError, match="EACCES"):
                    api.list_steps(root)


@pytest.mark.parametrize(
    ("mode", "mask", "file_mode", "folder_mode"),
    ((None, 0o022, 0o644, 0o755), (0o600, 0o000, 0o600, 0o700)),
)
def test_a_copy_is_no_more_open_than_the_run_and_than_the_umask(
    tmp_path: Path, mode: int | None, mask: int, file_mode: int, folder_mode: int
) -> None:
    with umask(0o022):
        save_steps(tmp_path / "run", *STEPS, settings=Settings(file_mode=mode))
    for name, copy in COPIES.items():
        with umask(mask):
            copy(tmp_path / "run", tmp_path / name)
        require_modes(tmp_path / name, file_mode, folder_mode)


def test_a_chosen_mode_counts_for_a_copy(tmp_path: Path) -> None:
    with umask(0o022):
        save_steps(tmp_path / "run", 1)
        api.copy_run(tmp_path / "run", tmp_path / "private", settings=Settings(file_mode=0o600))
        api.export(tmp_path / "run", tmp_path / "out", to="torch", step=1, settings=Settings(file_mode=0o600))
    require_modes(tmp_path / "private", 0o600, 0o700)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o600


def test_a_checkpoint_that_is_overwritten_keeps_its_mode(tmp_path: Path) -> None:
    with umask(0o022):
        private = Settings(file_mode=0o600)
        holdfast.save(tmp_path / "best", state_at(1), process_group=False, settings=private)
        holdfast.save(tmp_path / "shared", state_at(1), process_group=False)
    with umask(0o000):
        holdfast.save(tmp_path / "best", state_at(2), overwrite=True, process_group=False)
    with umask(0o077):
        holdfast.save(tmp_path / "shared", state_at(2), overwrite=True, process_group=False)
    require_modes(tmp_path / "best", 0o600, 0o700)
    require_modes(tmp_path / "shared", 0o644, 0o755)


def used_by_owner(root: Path) -> list[Path]:
    """Collect, tag and copy a run as its owner does, under an umask of its own; return the runs."""
    with umask(0o077):
        api.collect(root, keep=LatestN(2), grace_seconds=0)
        api.tag(root, 4, "good")
    with umask(0o022):
        api.copy_run(root, root.with_name("copy"))
    return [root, root.with_name("copy")]


@as_root
def test_a_colleague_reads_what_the_owner_collected_tagged_and_copied() -> None:
    with open_folder() as top:
        with umask(0o022):
            save_steps(top / "run", *STEPS)
        runs = used_by_owner(top / "run")
        with as_user(OTHER_USER, GROUP):
            for root in runs:
                steps = [(step.step, step.tags) for step in api.list_steps(root).steps]
                assert steps[-2:] == [(3, ()), (4, ("good",))]
                for verb in ("ls", "verify", "inspect"):
                    ended = command(verb, root)
                    assert ended.status == 0, (verb, root, ended.err)
                require_loads(root, 4)
                assert holdfast.read(root, step="good", framework="numpy")["step"] == 4
        for root in runs:
            require_modes(root, 0o644, 0o755)


@as_root
@pytest.mark.parametrize("mask", (0o027, 0o002))
def test_a_group_shares_a_run_in_a_folder_of_its_own(mask: int) -> None:
    """The folder gives its group to everything in it; colleagues may write if the umask lets them."""
    with open_folder() as top:
        shutil.chown(top, group=GROUP)
        top.chmod(0o2775)
        with umask(mask):
            save_steps(top / "run", *STEPS)
        runs = used_by_owner(top / "run")
        with as_user(OTHER_USER, GROUP), umask(0o077):
            for root in runs:
                require_loads(root, 4)
            if mask == 0o002:
                api.tag(top / "run", 3, "mine")
            else:
                with pytest.raises(CheckpointError, match="Let this process write to that folder"):
                    api.tag(top / "run", 3, "mine")
        require_modes(top / "run", 0o666 & ~mask, 0o2777 & ~mask)
        with as_user(OTHER_USER + 1, GROUP + 1):
            for root in runs:
                status = command("verify", root).status
                assert (status == 0) == (mask != 0o027)
