"""One small but real training state, saved through stores and boards that can be made to fail."""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

import holdfast
from holdfast._face import wiring
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.api import list_steps
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.backends.torch.comm import SoloComm
from holdfast.backends.torch.framework import TorchFramework
from holdfast.backends.torch.local_shards import Ranks
from holdfast.base.clock import Clock, SystemClock
from holdfast.base.ports.store import Store
from holdfast.core.format.names import link_name
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.training.coordination.job import Job
from holdfast.training.runs.tiers.near import NearPlace
from holdfast.training.saving.handle import SaveHandle
from tests.doubles.faults import Faults, FaultyKeyValueStore, FaultySyscalls
from tests.property.life import Switch
from tests.support.resumed_run import goes_on
from tests.support.tuning import tuned

SETTINGS = tuned(
    Settings(chunk_bytes=PAGE_BYTES, commit_timeout_seconds=5.0),
    window_bytes=2 * PAGE_BYTES,
    windows_in_flight=3,
    # Headers this small make several packs of one small state.
    pack_header_bytes_max=3 * PAGE_BYTES,
    unchanged_bytes_min=PAGE_BYTES,
)
LAZY = replace(SETTINGS, staging="lazy", arena_bytes_max=2 * SETTINGS._tuning.window_bytes, verify_lazy_copy=True)
"""Copies wait for writes, and writes for copies."""
COMPRESSED = tuned(replace(LAZY, compression="on"), coded_bytes_min=256)
"""The same with coded packs, from windows that are copied out, since the arena has two."""

OLD, NEW, NEXT = 10, 20, 30
"""Steps: committed before the fault, saved under the fault, saved after it."""

MANIFEST = "manifest.json"
State = dict[str, object]


@functools.cache
def expected_fingerprint(step: int) -> str:
    """Return the fingerprint of what a step was saved with."""
    return fingerprint(training_state(step))


def training_state(step: int) -> State:
    """Return a module, an optimizer that has stepped, and values; all but one tensor another at every step."""
    # `torch.manual_seed` also seeds accelerators, and formats the whole stack of the caller for each kind.
    torch.default_generator.manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(37, 41), torch.nn.BatchNorm1d(41), torch.nn.Linear(41, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "tokens": torch.randint(0, 1 << 40, (3, 997)),
        "halves": torch.randn(61, 7).to(torch.bfloat16),
        "scalar": torch.tensor(step),
        "frozen": torch.arange(1500),
        "seen": {"step": step, "loss": [0.1 * step, float("inf")], "name": f"at {step}"},
    }


def fingerprint(state: Mapping[str, object]) -> str:
    """Return a digest of every bit of a state like `training_state`'s."""
    digest = hashlib.sha256()

    def add(path: str, value: object) -> None:
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            value = value.state_dict()
        if isinstance(value, torch.Tensor):
            flat = value.detach().contiguous().reshape(-1)
            digest.update(f"{path}|{value.dtype}|{tuple(value.shape)}|".encode())
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                add(f"{path}.{key}", value[key])
        else:
            digest.update(f"{path}|{value!r}|".encode())

    add("", state)
    return digest.hexdigest()


class FaultyComm(SoloComm):
    """One process alone, whose board has a fault."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.key_value_store = FaultyKeyValueStore(self.key_value_store, faults)  # type: ignore[assignment]


def local_store(root: Path, faults: Faults | None = None) -> LocalStore:
    syscalls = None if faults is None else cast(Syscalls, FaultySyscalls(Syscalls(), faults))
    return LocalStore(root, settings=SETTINGS, syscalls=syscalls)


def run_at(
    store: Store,
    board_faults: Faults | None = None,
    settings: Settings = SETTINGS,
    clock: Clock | None = None,
    near: NearPlace | None = None,
) -> CheckpointManager:
    """Return a run as the manager builds it, except that it may save before it loads."""
    comm = SoloComm() if board_faults is None else FaultyComm(board_faults)
    ranks = Ranks(comm.rank, comm.world_size, comm.rank_of_global)
    job = Job(comm, clock or SystemClock(), settings, TorchFramework(ranks), codecs=wiring.codecs())
    return goes_on(CheckpointManager.over(store, job, near=near))


def committed_at(root: Path, *steps: int, clock: Clock | None = None) -> None:
    """Save steps without any fault."""
    run = run_at(local_store(root), clock=clock)
    for step in steps:
        run.save(step, training_state(step)).wait()
    run.close()


def go_back(store: Store, switch: Switch, faults: Faults) -> None:
    """Load the old step, and save at the number of the newer one; the faults begin with the save."""
    run = run_at(store)
    run.load(training_state(NEXT), OLD)
    switch.now = faults
    run.save(NEW, training_state(NEXT)).wait()


def require_no_timeline_lost(root: Path, *, acknowledged: bool) -> str:
    """Require both steps after `go_back` was stopped, that training goes on, and that nothing acknowledged is lost.

    Returns:
        Which checkpoint of the newer step a restart loads: `old`, or `new`, which is on the new timeline.
    """
    loaded = training_state(OLD)
    run = run_at(local_store(root))
    assert run.load(loaded) == NEW
    fate = {expected_fingerprint(NEW): "old", expected_fingerprint(NEXT): "new"}[fingerprint(loaded)]
    assert fate == "new" or not acknowledged, "an acknowledged checkpoint was lost"
    assert run.steps() == [OLD, NEW]
    names = [record.name for record in list_steps(root).steps if record.superseded]
    assert len(names) == (fate == "new"), names
    for name in names:
        assert run.load(loaded, name) == NEW and fingerprint(loaded) == expected_fingerprint(NEW)
    run.close()
    # Whoever comes next goes on.
    committed_at(root, NEXT)
    return fate


def attempted(
    run: CheckpointManager, step: int, state: Mapping[str, object]
) -> tuple[SaveHandle | None, BaseException | None]:
    """Save a step and wait; return the handle, if any, and what was raised, if anything."""
    handle = None
    try:
        handle = run.save(step, state)
        handle.wait()
    except BaseException as error:
        return handle, error
    return handle, None


@dataclass(frozen=True)
class Ending:
    """How a child process ended."""

    acknowledged: bool
    """It said that its save was committed."""

    killed: bool
    """By SIGKILL, rather than by itself."""


def in_child(act: Callable[[], None]) -> Ending:
    """Do something in a forked process that acknowledges when it is done."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 17
        try:
            # The collector would visit what the child inherited, and so copy its pages.
            gc.freeze()
            # A forked process has none of the threads that share out torch's work.
            torch.set_num_threads(1)
            act()
            os.write(writing, b"!")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        acknowledged = pipe.read() == b"!"
    status = os.waitpid(child, 0)[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or os.waitstatus_to_exitcode(status) == 0, f"the child failed by itself: {status}"
    return Ending(acknowledged, killed)


def require_whole(root: Path, steps: set[int]) -> None:
    """Require that exactly these steps are visible, each whole and bit-exact, the newest chosen by itself."""
    run = run_at(local_store(root))
    try:
        assert set(run.steps()) == steps
        for step in steps:
            damages = list(holdfast.open_checkpoint(step_path(root, step)).verify())
            assert damages == []
            loaded = training_state(step + 1)
            chosen = None if step == max(steps) else step
            assert run.load(loaded, chosen) == step
            assert fingerprint(loaded) == expected_fingerprint(step)
    finally:
        run.close()


def copy_with_links(source: Path, target: Path) -> None:
    """Copy a folder; names of one file in it are names of one file in the copy."""
    copies: dict[int, str] = {}

    def copy(path: str, new_path: str) -> str:
        first = copies.setdefault(os.stat(path).st_ino, new_path)
        return shutil.copy2(path, new_path) if first == new_path else str(os.link(first, new_path) or new_path)

    shutil.copytree(source, target, copy_function=copy)


def step_path(root: Path, step: int) -> Path:
    return root / f"step-{step:012d}"


def require_clean(root: Path, step: int, *, found_committed: bool = False) -> None:
    """Require that a step's folder holds its checkpoint and nothing else, hidden files and empty folders included.

    Args:
        root, step: Where.
        found_committed: A writer died after its commit and nobody committed there since, so that the second name of
            its manifest, hidden and without bytes of its own, may have stayed.
    """
    manifest = holdfast.open_checkpoint(step_path(root, step)).manifest
    own = [pack for pack in manifest.packs if not pack.name.startswith("step-")]
    names = [file.name for file in (*own, *manifest.parts, *manifest.indexes)]
    files = {MANIFEST, *(f"{manifest.attempt}/{name}" for name in names)}
    links = {f"{manifest.attempt}/{link_name(pack.name)}" for pack in manifest.packs if pack.name.startswith("step-")}
    for name in links:
        assert (step_path(root, step) / name).stat().st_nlink > 1, "a link, and no file of its own"
    files |= links
    folders = {str(parent) for name in files for parent in Path(name).parents} - {"."}
    surplus = paths_under(step_path(root, step)) - files - folders
    if found_committed:
        surplus = {
            path for path in surplus if not (step_path(root, step) / path).samefile(step_path(root, step) / MANIFEST)
        }
    assert {path for path in surplus if not is_of_reports(path, torn=found_committed)} == set()


def is_of_reports(path: str, *, torn: bool = False) -> bool:
    """Return whether a path in a step's folder is what ranks report of their saves and loads, which no reader needs.

    Args:
        path: The path.
        torn: A writer died, perhaps in the midst of a report, so that its hidden file may have stayed.
    """
    names = r"(reports(/(save|load)-[0-9a-f]{16}-r\d{5}\.json)?)"
    return re.fullmatch(names + r"|reports/\.tmp-[0-9a-f]+" if torn else names, path) is not None


def paths_under(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def content_under(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file under a folder, but for a writer's signs of life, which come by the clock."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path.suffix != ".beat"
    }
