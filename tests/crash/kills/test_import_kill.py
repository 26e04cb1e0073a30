"""SIGKILL at every single operation of an import: the step is there and whole, or it is not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast._face import wiring
from holdfast.backends.alone import AloneComm
from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.errors import ConflictError
from holdfast.offline.imports.import_step import import_step
from holdfast.training.coordination.job import Job
from tests.crash.kills.judging import Judged
from tests.crash.kills.sweeping import swept_by
from tests.doubles.faults import Faults, FaultyStore, kill_process
from tests.support.crashed_run import (
    NEW,
    OLD,
    SETTINGS,
    Ending,
    committed_at,
    in_child,
    local_store,
    paths_under,
    require_clean,
    run_at,
    step_path,
)

pytestmark = [
    pytest.mark.long,
    # The fork happens while threads of earlier tests may stand idle; the child uses none of their locks.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(tensors(), folder / "model.safetensors")
    return folder


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"long": torch.randn(5000), "wide": torch.randn(7, 11).to(torch.bfloat16), "tiny": torch.tensor(3)}


def import_into(store: Store, source: Path, *, copied: bool) -> None:
    job = Job(AloneComm(), SystemClock(), SETTINGS)
    import_step(wiring.checkpoint_at(source, SETTINGS), store, job, NEW, copied=copied)
    job.close()


def import_over_syscalls(source: Path, copied: bool, root: Path, faults: Faults) -> None:
    import_into(local_store(root, faults), source, copied=copied)


def import_over_store(source: Path, copied: bool, root: Path, faults: Faults) -> None:
    import_into(FaultyStore(local_store(root), faults), source, copied=copied)


def require_imported(root: Path, source: Path) -> None:
    settings = holdfast.Settings(allowed_roots=(str(source),))
    checkpoint = holdfast.open_checkpoint(step_path(root, NEW), settings=settings)
    assert list(checkpoint.verify()) == []
    for name, tensor in tensors().items():
        found = checkpoint.read(f"model.{name}", framework="torch")
        assert isinstance(found, torch.Tensor) and torch.equal(found, tensor)


@pytest.mark.parametrize(
    ("way", "copied", "before"),
    # A copy is a save, of which test_kill_sweep kills the calls to the operating system.
    [(import_over_syscalls, False, {OLD}), (import_over_store, False, set()), (import_over_store, True, {OLD})],
    ids=("by reference, system calls", "by reference, first of its run", "copied"),
)
def test_killed_anywhere(
    in_memory: Path, source: Path, way: Callable[..., None], copied: bool, before: set[int]
) -> None:
    template = in_memory / "template"
    if before:
        committed_at(template, *before)
    judged = Judged[str]()
    fates = []
    names, stride = swept_by("SWEEP_STRIDE") if way is import_over_syscalls else (None, 1)
    for at in range(1, 1000, stride):
        root = in_memory / "root"
        if before:
            shutil.copytree(template, root)
        ending = in_child(partial(way, source, copied, root, Faults(kill_process(), at=at, names=names)))
        try:
            fates.append(judged.fate(root, ending, partial(old_or_new, root, source, ending, before, copied=copied)))
        except BaseException as error:
            error.add_note(f"killed at operation {at}; files: {sorted(paths_under(root))}")
            raise
        shutil.rmtree(root, ignore_errors=not root.exists())
        if ending.acknowledged:
            break
    print(f"{judged.deaths} deaths left {judged.contents} contents")
    assert {"old", "new"} == set(fates), "the import was killed before its commit and after it"
    assert fates == sorted(fates, reverse=True), "once committed it stays committed"


def old_or_new(root: Path, source: Path, ending: Ending, before: set[int], *, copied: bool) -> str:
    """Require that the import is there and whole, or is not there and can be made; return which."""
    survived = set(run_at(local_store(root)).steps())
    assert survived in (before, before | {NEW})
    assert NEW in survived or not ending.acknowledged, "an acknowledged import was lost"
    if NEW in survived:
        require_imported(root, source)
        with pytest.raises(ConflictError):
            import_into(local_store(root), source, copied=copied)
    else:
        import_into(local_store(root), source, copied=copied)
    require_imported(root, source)
    require_step_clean(root, found_committed=NEW in survived)
    return "new" if NEW in survived else "old"


def require_step_clean(root: Path, *, found_committed: bool) -> None:
    """Require that the step holds what its manifest names, and after a second import no trace of the first."""
    if found_committed:
        return  # What the killed one left beside its commit, the next commit at this place would remove.
    manifest = holdfast.open_checkpoint(step_path(root, NEW)).manifest
    if not manifest.parts:
        found = {path for path in paths_under(step_path(root, NEW)) if (step_path(root, NEW) / path).is_file()}
        assert found == {"manifest.json", f"{manifest.attempt}/index-00000.msgpack"}
    else:
        require_clean(root, NEW)
