"""A near tier in memory where memory is short: a typed error or the root instead, and no process is killed.

Mounts and control groups are real where this user may make them; elsewhere the errors are injected. Either is printed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

import holdfast
from holdfast._face import near_place
from holdfast.backends.stores.shelf import ShelfStore
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.core.engine.memory_limits import MemoryDomain, memory_domains
from holdfast.errors import CheckpointError, UnavailableError
from holdfast.settings import MIB, Settings
from tests.doubles.faults import Faults, FaultySyscalls
from tests.support.forked_processes import await_within
from tests.support.small_memory import (
    SmallMount,
    killed_by_kernel,
    leave_free,
    memory_group,
    run_in,
    small_mount,
    swap,
    swapped_bytes,
)

await_ = partial(await_within, 20.0)
WRITES = {"pwrite", "ftruncate", "link", "mkdir", "create", "rename", "rename_noreplace"}
COUNT = 300_000
"""Elements of each of two tensors: a pack is large enough to become a spare."""

pytestmark = pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to write to")


def state_of(step: int, count: int = COUNT) -> dict[str, object]:
    return {"weights": torch.full((count,), float(step)), "moments": torch.full((count,), -float(step)), "step": step}


def require_loads(run: holdfast.CheckpointManager, step: int, count: int = COUNT) -> None:
    """Require that the newest step is this one, with its values."""
    found = state_of(0, count)
    assert run.load(found) == step
    assert all(torch.equal(found[name], value) for name, value in state_of(step, count).items() if name != "step")  # type: ignore[arg-type]


def manager(root: Path, near: Path, *, grace_seconds: float = 0.0, **tier: object) -> holdfast.CheckpointManager:
    chosen: dict[str, object] = {"every": 1, "keep_last": 1, "bytes_max": 1 << 40, **tier}
    return holdfast.CheckpointManager(
        root,
        every=1000,
        process_group=False,
        preemption=False,
        settings=Settings(collect_grace_seconds=grace_seconds),
        near=holdfast.Tier(near, **chosen),  # type: ignore[arg-type]
    )


def saved_near(run: holdfast.CheckpointManager, step: int, count: int = COUNT) -> None:
    run.save(step, state_of(step, count), near_only=True).wait()


def saved_due(run: holdfast.CheckpointManager, step: int, count: int = COUNT) -> str:
    report = run.save(step, state_of(step, count)).wait("committed")
    assert report is not None
    return report.tier


@pytest.fixture
def near() -> Iterator[Path]:
    folder = Path(mkdtemp(dir="/dev/shm"))
    yield folder / "near"
    shutil.rmtree(folder)


# -------------------------------------------------------------------------------------------- a mount that fills


EACH_WRITE = pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.long)])


class FillingMount:
    """A mount that fills at the n-th write of a save."""

    def __init__(self, mount: SmallMount, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mount, self.calls = mount, FaultySyscalls(Syscalls(), Faults())

        def store_at(path: str, settings: Settings) -> ShelfStore:
            return ShelfStore(path, settings=settings, syscalls=self.calls)  # type: ignore[arg-type]

        monkeypatch.setattr(near_place, "near_folder_at", store_at)

    def fill_at(self, number: int) -> Faults:
        faults = Faults(self.mount.fill, at=number, names=WRITES, lasting=not self.mount.is_mounted)
        self.calls._faults = faults
        return faults

    def near(self, run: holdfast.CheckpointManager) -> Path:
        return Path(run._near._place.store.url)  # type: ignore[union-attr]

    def empty(self) -> None:
        self.calls._faults = Faults()
        self.mount.empty()


def save_while_full(run: holdfast.CheckpointManager, filling: FillingMount, step: int, number: int) -> tuple[bool, int]:
    """Save some steps around a mount that fills at a write; return whether that write came, and the next step."""
    newest, faults = step - 1, filling.fill_at(number)
    try:
        saved_near(run, step)
        newest = step
    except CheckpointError as error:
        # A write of the background may be the n-th: the mount is full before the save asks for room.
        if "free, and a step needs" in str(error):
            await_(lambda: filling.mount.is_full)
        else:
            assert "ENOSPC" in str(error) or "No space" in str(error), error
    if filling.mount.is_mounted:
        faults.heal()  # No write of a later save, or of the background, meets the fault.
    if faults.met:
        await_(lambda: filling.mount.is_full)
        try:
            assert saved_due(run, step + 1) == "root", "the step has no room near"
            newest = step + 1
        except UnavailableError as error:
            # The writer lease of a new run needs some bytes near.
            assert "ENOSPC" in str(error) and not list(filling.near(run).glob("epochs/*.beat"))
    if newest:
        require_loads(run, newest)
    filling.empty()
    saved_near(run, step + 2)
    require_loads(run, step + 2)
    return bool(faults.met), step + 3


@EACH_WRITE
def test_a_mount_that_fills_at_each_write_of_a_first_save(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_mount(80, monkeypatch) as mount:
        filling, number, is_met = FillingMount(mount, monkeypatch), 1 - stride, True
        while is_met:
            number += stride
            near = mount.folder / f"near-{number}"
            with manager(mount.folder.parent / f"root-{number}", near) as run:
                run.load(state_of(0))
                is_met, _ = save_while_full(run, filling, 1, number)
                run.close(wait=False)
            shutil.rmtree(near)
        assert number > 10, "a save has more writes"


@EACH_WRITE
def test_a_mount_that_fills_at_each_write_of_a_save_into_spares(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_mount(80, monkeypatch) as mount:
        filling, number, is_met, step = FillingMount(mount, monkeypatch), 1 - stride, True, 1
        with manager(mount.folder.parent / "root", mount.folder / "near") as run:
            store = run._near._place.store  # type: ignore[union-attr]
            assert isinstance(store, ShelfStore)
            run.load(state_of(0))
            while is_met:
                number += stride
                for _ in range(2):  # The collection of the second one leaves a spare.
                    saved_near(run, step)
                    step += 1
                near_parts = run._near.parts  # type: ignore[union-attr]
                near_parts.collect_soon()
                await_(lambda: store.spare_bytes() > 0)
                is_met, step = save_while_full(run, filling, step, number)
            assert number > 10, "a save has more writes"
            run.close(wait=False)


# ----------------------------------------------------------------------------------------- a mount that is too small


def test_a_mount_that_holds_no_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 2_600_000  # 20 MiB in all.
    for mebibytes, taken in ((64, 0), (100, 1)):
        with (
            small_mount(mebibytes, monkeypatch) as mount,
            manager(mount.folder.parent / "root", mount.folder / "near") as run,
        ):
            run.load(state_of(0, count))
            for step in range(1, taken + 1):
                saved_near(run, step, count)
            with pytest.raises(UnavailableError) as refused:
                saved_near(run, taken + 1, count)
            assert re.search(r"has [\d.]+ (Mi)?B free, and a step needs 19\.8 MiB", str(refused.value))
            assert "--shm-size" in str(refused.value) and "sizeLimit" in str(refused.value)
            if taken:
                require_loads(run, taken, count)
            assert saved_due(run, taken + 2, count) == "root"
            require_loads(run, taken + 2, count)
            run.close(wait=False)


def test_a_budget_below_a_step(tmp_path: Path, near: Path) -> None:
    with manager(tmp_path / "root", near, bytes_max=2 * MIB) as run:
        run.load(state_of(0))
        with pytest.raises(
            UnavailableError, match=r"Tier\(bytes_max=2\.0 MiB\), and a step needs 2\.3 MiB.*raise byte"
        ):
            saved_near(run, 1)
        assert saved_due(run, 2) == "root"
        require_loads(run, 2)
        run.close(wait=False)


def test_the_first_save_after_a_restart_needs_what_the_last_step_took(tmp_path: Path, near: Path) -> None:
    frozen = {"frozen": torch.rand(4 * MIB // 4)}
    with manager(tmp_path / "root", near) as run:
        run.load(frozen | state_of(0))
        for step in (1, 2):
            run.save(step, frozen | state_of(step), near_only=True).wait()
        run.close(wait=False)
    with manager(tmp_path / "root", near, bytes_max=12 * MIB) as run:
        assert run.load(frozen | state_of(0)) == 2
        # The state has 6.3 MiB, 4 of them frozen: the folder already has those of steps 1 and 2.
        run.save(3, frozen | state_of(3), near_only=True).wait()
        run.close(wait=False)


# ------------------------------------------------------------------------------------------------ a control group


@pytest.mark.parametrize(("free_mib", "taken"), [(100, 0), (240, 1)], ids=["no step", "one step"])
def test_a_control_group_below_two_steps(
    tmp_path: Path, near: Path, free_mib: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(group: Path | None) -> None:
        # In this process, so that the group is charged: 64 MiB, all touched. No other copy is made.
        state = {"weights": torch.ones(16 * MIB)}
        with manager(tmp_path / "root", near) as run:
            run.load(state)
            if group is not None:
                leave_free(group, free_mib * MIB)
            for step in range(1, taken + 1):
                state["weights"].fill_(step)
                run.save(step, state, near_only=True).wait()
            if group is None:
                domain = MemoryDomain(b"", (free_mib - 2 * 64 * taken) * MIB)
                monkeypatch.setattr("holdfast.training.runs.tiers.room.memory_domains", lambda: [domain])
            with pytest.raises(UnavailableError) as refused:
                run.save(taken + 1, state, near_only=True).wait()
            assert re.search(r"control group has [\d.]+ MiB free; a step needs \d+\.\d MiB", str(refused.value))
            assert "docker run --memory" in str(refused.value)
            state["weights"].fill_(7.0)
            report = run.save(7, state).wait("committed")
            assert report is not None and report.tier == "root"
            state["weights"].zero_()
            assert run.load(state) == 7 and state["weights"].min() == state["weights"].max() == 7.0
            run.close(wait=False)

    with memory_group() as group:
        assert run_in(group, lambda: act(group)) == 0
        assert group is None or killed_by_kernel(group) == 0


# ------------------------------------------------------------------------------------- steps that wait for the drain


def test_a_budget_that_is_spent_by_steps_that_wait_for_the_drain(
    tmp_path: Path, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.stored.copying.step_drain import StepDrain

    answers, lacking = threading.Event(), StepDrain.lacking

    def slow(drain: StepDrain) -> object:
        assert answers.wait(60.0)
        return lacking(drain)

    monkeypatch.setattr(StepDrain, "lacking", slow)
    step_bytes = 2 * COUNT * 4
    with manager(tmp_path / "root", near, bytes_max=int(3.5 * step_bytes)) as run:
        run.load(state_of(0))
        handles = [run.save(step, state_of(step)) for step in (1, 2, 3)]
        for handle in handles:
            handle.wait("near")
        with pytest.raises(UnavailableError, match=r"has 6\.\d MiB of Tier\(bytes_max=8\.\d MiB\).*steps \[1, 2, 3\]"):
            saved_near(run, 4)
        assert saved_due(run, 5) == "root", "the root takes a step although its drain waits"
        answers.set()
        for handle in handles:
            report = handle.wait("committed", timeout=30)
            assert report is not None
        run._near.parts.collect_soon()  # type: ignore[union-attr]
        await_(lambda: not run._near.room.why_not(step_bytes))  # type: ignore[union-attr]
        saved_near(run, 6)
        require_loads(run, 6)
        run.close(wait=False)


# ---------------------------------------------------------------------------------------- swap, and DataLoader workers


def test_swap_counts_as_no_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(f"MemAvailable: {1 << 20} kB\nSwapTotal: {1 << 24} kB\nSwapFree: {1 << 24} kB\n")
    assert memory_domains(tmp_path, tmp_path)[0].free_bytes == 1 << 30


@pytest.mark.long
def test_a_near_tier_does_not_push_training_into_swap(
    tmp_path: Path, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"weights": torch.ones(16 * MIB)}

    def act(group: Path | None) -> None:
        copy = {"weights": state["weights"].clone()}
        with manager(tmp_path / "root", near) as run:
            run.load(copy)
            if group is None:
                domain = MemoryDomain(b"", 100 * MIB)
                monkeypatch.setattr("holdfast.training.runs.tiers.room.memory_domains", lambda: [domain])
            else:
                leave_free(group, 100 * MIB)
            for step in range(1, 4):
                with pytest.raises(UnavailableError, match="swap does not count"):
                    run.save(step, copy, near_only=True).wait()
            report = run.save(4, copy).wait("committed")
            assert report is not None and report.tier == "root"
            if group is not None:
                assert swapped_bytes(group) < 4 * MIB
            run.close(wait=False)

    with swap(256), memory_group() as group:
        assert run_in(group, lambda: act(group)) == 0
        assert group is None or killed_by_kernel(group) == 0


@pytest.mark.long
def test_workers_of_a_data_loader_live_beside_a_near_tier_in_a_small_mount(tmp_path: Path) -> None:
    module = "tests.unit.training.saving.loader_beside_shelf"
    command = [sys.executable, "-m", module, str(tmp_path / "root")]
    small = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=160M none /dev/shm && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*small, "true"], capture_output=True, check=False).returncode:
        print("bad places: no mount of its own over /dev/shm; a tenth of the mount that is there stays free")
        found = os.statvfs("/dev/shm")
        free = ShelfStore("/dev/shm", settings=Settings()).free_bytes()
        assert free is not None and free <= found.f_bavail * found.f_frsize - found.f_blocks * found.f_frsize // 10
        return
    print("bad places: a real mount of 160 MiB over /dev/shm")
    ended = subprocess.run([*small, *command], capture_output=True, text=True, check=False, timeout=120)
    assert not ended.returncode, ended.stderr[-3000:]
    print(ended.stdout)


# ------------------------------------------------------------------------------------ after a kill


def left_by_a_kill(tmp_path: Path, near: Path, *steps: int) -> int:
    """Save some steps that no collection takes, as a job that is killed within its grace; return the bytes of one."""
    run = manager(tmp_path / "root", near, grace_seconds=600.0)
    run.load(state_of(0))
    for step in steps:
        saved_near(run, step)
    run.close(wait=False)
    return sum(path.stat().st_size for path in (near / f"step-{steps[0]:012d}").rglob("*") if path.is_file())


def test_a_tier_that_a_kill_left_full_takes_the_steps_of_the_next_job(tmp_path: Path, near: Path) -> None:
    step_bytes = left_by_a_kill(tmp_path, near, 1, 2)
    with manager(tmp_path / "root", near, bytes_max=step_bytes * 5 // 2) as run:
        require_loads(run, 2)
        for step in range(3, 7):
            saved_near(run, step)
            await_(lambda: len(list(near.glob("step-*"))) == 1)  # Two and the next one are over the budget.
        require_loads(run, 6)


def test_memory_that_a_kill_left_full_is_free_after_a_step_has_gone_to_the_root(
    tmp_path: Path, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by_a_kill(tmp_path, near, 1, 2)
    with manager(tmp_path / "root", near) as run:
        require_loads(run, 2)
        with monkeypatch.context() as short:
            short.setattr("holdfast.training.runs.tiers.room.memory_domains", lambda: [MemoryDomain(b"", 1)])
            with pytest.raises(UnavailableError, match="a step needs"):
                saved_near(run, 3)
            assert saved_due(run, 4) == "root"
            await_(lambda: not (near / f"step-{1:012d}" / "manifest.json").exists())
        saved_near(run, 5)
    assert not list(near.glob("step-*")) and not list(near.glob(".spare-*")), "close has emptied the folder"


def test_a_job_whose_steps_all_went_to_the_root_empties_the_near_tier(
    tmp_path: Path, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by_a_kill(tmp_path, near, 1, 2)
    monkeypatch.setattr("holdfast.training.runs.tiers.room.memory_domains", lambda: [MemoryDomain(b"", 1)])
    with manager(tmp_path / "root", near) as run:
        require_loads(run, 2)
        assert saved_due(run, 3) == "root"
    assert not list(near.glob("step-*")) and not list(near.glob(".spare-*"))


def test_files_of_a_killed_save_are_not_the_size_of_a_step(
    tmp_path: Path, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by_a_kill(tmp_path, near, 1)
    begun = near / f"step-{2:012d}" / ("0" * 16)
    begun.mkdir(parents=True)
    (begun / "r00000.safetensors.part").write_bytes(b"x")
    monkeypatch.setattr(
        "holdfast.training.runs.tiers.room.memory_domains", lambda: [MemoryDomain(b"", 64 * MIB + 3 * COUNT)]
    )
    run = manager(tmp_path / "root", near)
    require_loads(run, 1)
    with pytest.raises(UnavailableError, match="a step needs"):
        saved_near(run, 3)
    run.close(wait=False)
