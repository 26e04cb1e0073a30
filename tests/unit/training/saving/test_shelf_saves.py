"""Saves into a near tier in memory: copied once, into the pages of collected steps."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal

import pytest
import torch

import holdfast
from holdfast.backends.stores.shelf import ShelfStore, ShelfUpload
from holdfast.backends.stores.spares import PREFIX
from holdfast.errors import CheckpointError, ConflictError, InvalidError, UnavailableError
from holdfast.settings import MIB, Settings

COUNT = 1 << 20
pytestmark = pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to write to")


@pytest.fixture
def near() -> Iterator[Path]:
    folder = Path(mkdtemp(dir="/dev/shm"))
    yield folder / "near"
    shutil.rmtree(folder)


def manager(root: Path, near: Path, **settings: object) -> holdfast.CheckpointManager:
    chosen = Settings(collect_grace_seconds=0.0, **settings)  # type: ignore[arg-type]
    return holdfast.CheckpointManager(
        root,
        every=1000,
        process_group=False,
        preemption=False,
        settings=chosen,
        near=holdfast.Tier(near, every=1, keep_last=1),
    )


def model_and_optimizer(value: float) -> dict[str, object]:
    model = torch.nn.Linear(1024, 1024)
    with torch.no_grad():
        model.weight.fill_(value)
        model.bias.fill_(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return {"model": model, "optimizer": optimizer, "other": torch.full((COUNT,), value)}


def values_of(state: dict[str, object]) -> set[float]:
    model, other = state["model"], state["other"]
    assert isinstance(model, torch.nn.Linear) and isinstance(other, torch.Tensor)
    return {*model.weight.unique().tolist(), *model.bias.unique().tolist(), *other.unique().tolist()}


def packs_in(near: Path) -> set[int]:
    # Not `rglob`, which fails where a collection removes a folder.
    found = (os.path.join(folder, name) for folder, _, names in os.walk(near) for name in names)
    return {os.stat(path).st_ino for path in found if path.endswith(".safetensors") and os.path.exists(path)}


def await_collection(run: holdfast.CheckpointManager, near: Path, step: int) -> None:
    for _ in range(400):
        if [path.parent.name for path in near.glob("step-*/manifest.json")] == [f"step-{step:012d}"]:
            return
        run._job.clock.sleep(0.02)
    raise AssertionError("the steps before were not collected")


def await_descriptors(count: int) -> None:
    """Wait until this process has at most so many descriptors: a heartbeat or a collection may have one at any time."""
    for _ in range(200):
        if len(os.listdir("/proc/self/fd")) <= count:
            return
        time.sleep(0.02)
    held = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            held.append(os.readlink(f"/proc/self/fd/{number}"))
    raise AssertionError(f"{len(held)} descriptors, expected {count}: {sorted(held)}")


@pytest.mark.parametrize("staging", ["copy", "lazy", "awaited", "coded"])
def test_steps_are_whole_and_take_the_memory_of_collected_ones(tmp_path: Path, near: Path, staging: str) -> None:
    options: dict[str, object] = {"staging": "lazy" if staging == "lazy" else "copy"}
    if staging == "awaited":
        options["arena_bytes_max"] = 0
    if staging == "coded":
        options["compression"] = "on"
    inodes: set[int] = set()
    with manager(tmp_path / "root", near, **options) as run:
        run.load(model_and_optimizer(0.0))
        for step in range(1, 7):
            run.maybe_save(step, model_and_optimizer(float(step)))
            run.wait()
            inodes |= packs_in(near)
            found = model_and_optimizer(0.0)
            assert run.load(found, step=step) == step
            assert values_of(found) == {float(step)}
            await_collection(run, near, step)
        if staging != "coded":
            assert len(inodes) <= 3 * len(packs_in(near)), "two or three files take turns"
        run.close(wait=False)


@pytest.mark.parametrize("staging", ["copy", "lazy"])
def test_a_failed_save_leaves_the_step_before_and_no_upload_open(
    tmp_path: Path, near: Path, staging: Literal["copy", "lazy"], monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager(tmp_path / "root", near, staging=staging) as run:
        run.load(model_and_optimizer(0.0))
        for step in range(1, 5):
            run.maybe_save(step, model_and_optimizer(float(step)))
            run.wait()
            await_collection(run, near, step)
        before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as broken:

            def fail(upload: ShelfUpload, *_: object) -> None:
                raise UnavailableError("the part is lost")

            broken.setattr(ShelfUpload, "write", fail)
            handle = run.maybe_save(5, model_and_optimizer(5.0))
            assert handle is not None
            with pytest.raises(UnavailableError, match="the part is lost"):
                handle.wait("near")
        await_descriptors(before)
        found = model_and_optimizer(0.0)
        assert run.load(found) == 4 and values_of(found) == {4.0}
        run.maybe_save(6, model_and_optimizer(6.0))
        run.wait()
        assert run.load(found) == 6 and values_of(found) == {6.0}
        run.close(wait=False)


def test_a_full_shelf_fails_typed_and_a_due_step_goes_to_the_root(
    tmp_path: Path, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager(tmp_path / "root", near) as run:
        run.load(model_and_optimizer(0.0))
        run.maybe_save(1, model_and_optimizer(1.0))
        run.wait()
        monkeypatch.setattr(ShelfStore, "free_bytes", lambda store: 4096)
        with pytest.raises(CheckpointError, match="is for the near tier alone"):
            run.save(2, model_and_optimizer(2.0), near_only=True).wait()
        report = run.save(3, model_and_optimizer(3.0)).wait("committed")
        assert report is not None and report.tier == "root"
        run.close(wait=False)


def test_no_space_in_the_middle_of_a_save_is_an_error_with_the_step_before_whole(
    tmp_path: Path, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager(tmp_path / "root", near) as run:
        run.load(model_and_optimizer(0.0))
        run.maybe_save(1, model_and_optimizer(1.0))
        run.wait()

        def full(fd: int, data: memoryview, offset: int) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        store = run._near._place.store  # type: ignore[union-attr]
        assert isinstance(store, ShelfStore)
        with monkeypatch.context() as broken:
            broken.setattr(store._syscalls, "pwrite", full)
            handle = run.maybe_save(2, model_and_optimizer(2.0))
            assert handle is not None
            with pytest.raises(UnavailableError, match="No space left"):
                handle.wait("near")
        found = model_and_optimizer(0.0)
        assert run.load(found) == 1 and values_of(found) == {1.0}
        run.close(wait=False)


def test_the_end_of_a_job_leaves_no_memory_behind(tmp_path: Path, near: Path) -> None:
    with manager(tmp_path / "root", near) as run:
        run.load(model_and_optimizer(0.0))
        for step in range(1, 4):
            run.maybe_save(step, model_and_optimizer(float(step)))
            run.wait()
    assert not [path for path in near.rglob("*") if path.is_file() and path.stat().st_size > 4096]
    assert not list(near.glob(f"{PREFIX}*"))
    found = model_and_optimizer(0.0)
    holdfast.load(tmp_path / "root", found, step="latest")
    assert values_of(found) == {3.0}


def test_a_near_tier_in_memory_takes_a_quarter_of_what_is_free_and_says_so(
    tmp_path: Path, near: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), manager(tmp_path / "root", near) as run:
        place = run._near._place  # type: ignore[union-attr]
        assert isinstance(place.store, ShelfStore) and place.bytes_max is not None
        free = place.store.free_bytes()
        assert free is not None and place.bytes_max <= free // 4 + MIB
        assert "takes up to" in caplog.text and "needs 2 times the bytes of a step" in caplog.text
    caplog.clear()
    monkeypatch.setattr(ShelfStore, "free_bytes", lambda store: 16 * MIB)
    with caplog.at_level(logging.WARNING), manager(tmp_path / "root", near) as run:
        assert "takes up to 4.0 MiB" in caplog.text and "--shm-size" in caplog.text
        run.load(model_and_optimizer(0.0))
        handle = run.maybe_save(1, model_and_optimizer(1.0))
        assert handle is not None
        with pytest.raises(
            UnavailableError, match=r"of Tier\(bytes_max=4\.0 MiB\), and a step needs 8\.0 MiB.*raise bytes_max"
        ):
            handle.wait("near")
        run.close(wait=False)


@pytest.mark.parametrize("compression", ["off", "on"])
def test_a_state_above_the_arena_is_saved_without_spares(tmp_path: Path, near: Path, compression: str) -> None:
    with manager(tmp_path / "root", near, arena_bytes_max=2 * MIB, compression=compression) as run:
        run.load(model_and_optimizer(0.0))
        for step in range(1, 4):
            start = time.monotonic()
            run.maybe_save(step, model_and_optimizer(float(step)))
            run.wait()
            assert time.monotonic() - start < 10.0, "the copy waited for buffers that no thread gives back"
        run.close(wait=False)


@pytest.mark.parametrize("staging", ["copy", "lazy"])
def test_a_cancelled_save_leaves_no_descriptor_and_no_memory(tmp_path: Path, near: Path, staging: str) -> None:
    with manager(tmp_path / "root", near, staging=staging) as run:
        run.load(model_and_optimizer(0.0))
        for step in range(1, 4):
            run.maybe_save(step, model_and_optimizer(float(step)))
            run.wait()
            await_collection(run, near, step)
        before = len(os.listdir("/proc/self/fd"))
        gate = threading.Event()
        run._job.commits.submit(lambda: gate.wait(20.0))
        for step in range(4, 7):
            handle = run.maybe_save(step, model_and_optimizer(float(step)))
            assert handle is not None
            assert handle.cancel("no longer needed")
        gate.set()
        with pytest.raises(ConflictError, match="cancelled"):
            run.wait()
        await_descriptors(before)
        run.close(wait=False)


def test_a_folder_that_other_users_may_look_into_is_refused(tmp_path: Path, near: Path) -> None:
    near.mkdir(mode=0o755)
    with pytest.raises(InvalidError, match="expected mode 0700"):
        manager(tmp_path / "root", near)
    near.chmod(0o700)
    with manager(tmp_path / "root", near):
        pass


def test_a_link_in_memory_is_refused(tmp_path: Path, near: Path) -> None:
    near.mkdir(mode=0o700)
    for target in (near, tmp_path / "elsewhere"):
        link = near.with_name("link")
        link.symlink_to(target)
        with pytest.raises(InvalidError, match=rf"link: is a link to {target}; expected a folder.*rm "):
            manager(tmp_path / "root", link)
        link.unlink()
