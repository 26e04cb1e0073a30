"""A short run with frozen weights, as everyday commands meet it: made once, and copied with its hard links."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

import holdfast
from holdfast import api
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.core.format.names import step_folder
from holdfast.policies import LatestN
from holdfast.settings import Settings
from tests.support.crashed_run import run_at

STEPS = (1, 2, 3)
FROZEN_BYTES = 1 << 20


class Refusing(Syscalls):
    """An operating system that makes no link between folders."""

    def __init__(self, code: int) -> None:
        self.code = code

    def link(self, name: str, new_name: str, *, dir_fd: int, new_dir_fd: int | None = None) -> None:
        if new_dir_fd is not None:
            raise OSError(self.code, "refused here")
        super().link(name, new_name, dir_fd=dir_fd)


def state_at(step: int) -> dict[str, object]:
    """Return a state of which the backbone never changes, the buffer changed at step 2, and the head always does."""
    chance = torch.Generator().manual_seed(7)
    backbone = torch.randn(FROZEN_BYTES // 4, generator=chance)
    return {
        "backbone": backbone,
        "buffer": torch.full((40_000,), 1.0 if step < 2 else 2.0),
        "head": torch.full((20_000,), float(step)),
        "values": {"step": step},
    }


def made_at(root: Path, syscalls: Syscalls | None = None, settings: Settings | None = None) -> None:
    """Save the run."""
    settings = settings or Settings()
    store = LocalStore(root, settings=settings, syscalls=syscalls)
    with run_at(store, settings=settings) as manager:
        for step in STEPS:
            manager.save(step, state_at(step)).wait()


def step_path(root: Path, step: int) -> Path:
    return root / step_folder(step).rstrip("/")


def step_at(root: Path | str, step: int) -> str:
    """Return the path or URL of a step."""
    return f"{root}/{step_folder(step).rstrip('/')}"


def ran(*command: object) -> str:
    """Run a command as a shell does; return what it prints."""
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, (command, ended.stderr)
    return ended.stdout


def used_bytes(folder: Path) -> int:
    """Return what `du` says that a folder takes."""
    return int(ran("du", "-s", "--block-size=1", folder).split()[0])


def require_step(path: Path | str, step: int) -> None:
    """Require that a path loads as a step of the run, bit for bit, and that every byte of it verifies."""
    loaded: dict[str, object] = {
        key: torch.full_like(value, 9) if isinstance(value, torch.Tensor) else {"step": 0}
        for key, value in state_at(step).items()
    }
    holdfast.load(path, loaded, process_group=False)
    for key, value in state_at(step).items():
        found = loaded[key]
        if isinstance(value, torch.Tensor):
            assert isinstance(found, torch.Tensor) and torch.equal(found, value), key
        else:
            assert found == value
    assert list(holdfast.open_checkpoint(path).verify()) == []


def require_resumes(root: Path | str, step: int) -> None:
    """Require that training resumes from a step, and that its next save and a collection lose nothing."""
    state = state_at(0)
    soon = Settings(collect_grace_seconds=0.1)
    with holdfast.CheckpointManager(root, process_group=False, keep_last=2, settings=soon) as manager:
        assert manager.load(state) == step
        assert torch.equal(state["backbone"], state_at(0)["backbone"])  # type: ignore[arg-type]
        manager.save(step + 1, state_at(step + 1)).wait()
    api.collect(root, keep=LatestN(1), grace_seconds=0.0)
    assert [record.step for record in api.list_steps(root).steps if record.committed] == [step + 1]
    require_step(step_at(root, step + 1), step + 1)
