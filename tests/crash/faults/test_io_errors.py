"""I/O errors at every operation of a save: a typed error, old checkpoints whole, nothing left, the next save works."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.errors import CheckpointError, InvalidError, UnavailableError
from holdfast.settings import Settings
from tests.doubles.faults import FaultPoint, Faults, fail_with
from tests.support.crashed_run import (
    COMPRESSED,
    LAZY,
    NEW,
    NEXT,
    OLD,
    SETTINGS,
    State,
    attempted,
    content_under,
    fingerprint,
    in_child,
    local_store,
    paths_under,
    require_clean,
    run_at,
    step_path,
)
from tests.support.mounted_file_systems import command, mounted, new_image, workplace

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

WRITING = {"fallocate", "pwrite", "ftruncate", "fsync", "mkdir", "link"}
NAMING = {"open", "mkdir", "link", "unlink", "rename", "rmdir"}
FAULTS: list[tuple[int, set[str] | None]] = [
    (errno.ENOSPC, {"fallocate"}),
    (errno.ENOSPC, {"pwrite"}),
    (errno.ENOSPC, WRITING),
    (errno.EDQUOT, WRITING),
    (errno.EIO, {"pwrite"}),
    (errno.EIO, {"fsync"}),
    (errno.EIO, {"preadv"}),
    (errno.EIO, None),
    (errno.EMFILE, {"open"}),
    (errno.EACCES, NAMING),
    (errno.EROFS, NAMING | WRITING),
]
"""What fails, and the operations it counts at; None: all of them."""

EVERY_FAULT = pytest.mark.parametrize(
    ("code", "names"),
    FAULTS,
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else "-".join(sorted(value or {"anything"})),
)
SWEEP_STRIDE = int(os.environ.get("SWEEP_STRIDE", "3"))
"""Distance of the operations at which a save fails, of the many that open or name files; `make campaign` tries all."""

STRIDE = int(os.environ.get("COMPRESSED_STRIDE", "11"))
"""Distance of the operations at which a save that compresses fails; `make campaign` tries every one."""

REMOVAL = {"unlink", "rmdir", "open", "stat", "fstat", "listdir"}
"""What removing takes."""


def small_state(step: int) -> State:
    """Return few tensors, over several windows, so that a save has few operations and yet one of every kind."""
    generator = torch.Generator().manual_seed(step)
    return {
        "weights": torch.randn(77, 91, generator=generator),
        "bias": torch.randn(5, generator=generator).to(torch.bfloat16),
        "seen": {"step": step, "rate": 0.1},
    }


@dataclass
class Recorded:
    """An error that remembers where it struck."""

    code: int
    struck: list[FaultPoint] = field(default_factory=list)

    def __call__(self, operation: FaultPoint) -> None:
        self.struck.append(operation)
        fail_with(self.code)(operation)


@pytest.fixture
def template(in_memory: Path) -> Path:
    """A root with one committed step."""
    root = in_memory / "template"
    run = run_at(local_store(root), settings=replace(SETTINGS, lease_seconds=1.0))
    run.save(OLD, small_state(OLD)).wait()
    run.close()
    return root


def require_loads(run: CheckpointManager, step: int) -> None:
    loaded = small_state(step + 1)
    assert run.load(loaded, step) == step
    assert fingerprint(loaded) == fingerprint(small_state(step))


def files_under(root: Path) -> set[str]:
    return {path for path in paths_under(root) if (root / path).is_file()}


@EVERY_FAULT
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
def test_every_operation_of_a_save_fails(
    template: Path, in_memory: Path, code: int, names: set[str] | None, lasting: bool
) -> None:
    is_long = names is None or "open" in names
    # Once and lasting, and codes that count much the same, begin at other operations: together they meet more of them.
    first = 1 + (lasting + (code == errno.EROFS)) % SWEEP_STRIDE if is_long else 1
    stride = SWEEP_STRIDE if is_long else 1
    require_errors_survived(template, in_memory, code, names, lasting, SETTINGS, stride, first)


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
def test_every_operation_of_a_lazy_save_fails(template: Path, in_memory: Path, lasting: bool) -> None:
    first = 1 + lasting % SWEEP_STRIDE
    require_errors_survived(template, in_memory, errno.EIO, None, lasting, LAZY, SWEEP_STRIDE, first)


@pytest.mark.parametrize(
    ("code", "names", "lasting", "stride"),
    [
        (errno.EIO, None, False, STRIDE),
        (errno.ENOSPC, WRITING, False, -(-STRIDE // 3)),
        (errno.ENOSPC, WRITING, True, -(-STRIDE // 3)),
    ],
    ids=["any", "full", "full-lasting"],
)
def test_every_operation_of_a_save_that_compresses_fails(
    template: Path, in_memory: Path, code: int, names: set[str] | None, lasting: bool, stride: int
) -> None:
    require_errors_survived(template, in_memory, code, names, lasting, COMPRESSED, stride)


def require_errors_survived(
    template: Path,
    in_memory: Path,
    code: int,
    names: set[str] | None,
    lasting: bool,
    settings: Settings,
    stride: int = 1,
    first: int = 1,
) -> None:
    failures = unknown = 0
    # What opening the root meets is raised by the manager's making; struck are the operations of a save.
    counting = Faults(names=names)
    run_at(local_store(template, counting))
    opening = counting.counted
    for at in range(first, 2000, stride):
        root = in_memory / str(at)
        shutil.copytree(template, root)
        action = Recorded(code)
        faults = Faults(action, at=opening + at, names=names, lasting=lasting)
        # Who cannot read signs of life looks for them fifty times a lease.
        run = run_at(local_store(root, faults), settings=replace(settings, lease_seconds=1.0))
        try:
            failure = one_failed_save(root, run, faults, action, lasting=lasting, names=names)
        except BaseException as error:
            error.add_note(f"fault at {at}: {action.struck}; left: {sorted(paths_under(root))}")
            raise
        shutil.rmtree(root)
        if not action.struck:
            break
        failures += failure is not None
        unknown += failure is not None and "outcome unknown" in str(failure)
    print(f"{at - 1} operations struck, {failures} saves failed, {unknown} of them with an unknown outcome")
    assert failures, "a fault that nothing notices tests nothing"
    assert unknown < failures, "only what happens in the very act of publishing is unknown"


def one_failed_save(
    root: Path, run: CheckpointManager, faults: Faults, action: Recorded, *, lasting: bool, names: set[str] | None
) -> BaseException | None:
    before_files, before_paths, before = left_in(files_under(root)), left_in(paths_under(root)), content_under(root)
    handle, error = attempted(run, NEW, small_state(NEW))
    faults.heal()
    committed = NEW in run.steps()
    if committed:
        before.pop("latest", None)  # It follows a commit.
    assert before.items() <= content_under(root).items(), "what was committed before was touched"
    if error is None:
        assert committed
    else:
        assert isinstance(error, CheckpointError), error
        assert handle is not None or isinstance(error, InvalidError), "everything else lives in the handle"
        assert error.__cause__ is not None or str(error)
        if "outcome unknown" in str(error):
            assert list(holdfast.open_checkpoint(step_path(root, NEW)).verify()) == [] if committed else True
        else:
            assert not committed, f"said to have failed, and is there: {error}"
            if not lasting:
                assert left_in(paths_under(root)) == before_paths, "nothing stands in the way of removing"
            elif names is not None and not names & REMOVAL:
                assert left_in(files_under(root)) == before_files
    step = NEXT if committed else NEW
    handle, again = attempted(run, step, small_state(step))
    assert again is None, f"the next save after {error!r}: {again!r}"
    run.close()
    require_loads(run_at(local_store(root)), step)
    require_clean(root, step)
    require_never_named(root, action)
    return error


def left_in(paths: set[str]) -> set[str]:
    """Return what a failed save may not add to: everything but the epoch that it took."""
    return {path for path in paths if path.split("/")[0] != "epochs"}


def require_never_named(root: Path, action: Recorded) -> None:
    """A file whose fsync failed is never trusted again: no manifest is of its attempt."""
    steps = run_at(local_store(root)).steps()
    attempts = {holdfast.open_checkpoint(step_path(root, step)).manifest.attempt for step in steps}
    for operation in action.struck:
        path = Path(operation.subject)
        if operation.name == "fsync" and (path.suffix or path.name.startswith(".tmp-")):
            assert not attempts & set(path.parts), f"{path} is part of a checkpoint"


def test_failed_fsync_is_met_by_data_and_by_folders(template: Path, in_memory: Path) -> None:
    """What `require_never_named` relies on: fsyncs are seen by path, files and folders alike."""
    root = in_memory / "root"
    shutil.copytree(template, root)
    faults = Faults(names={"fsync"})
    run = run_at(local_store(root, faults))
    run.save(NEW, small_state(NEW)).wait()
    run.close()
    paths = [Path(operation.subject) for operation in faults.seen if operation.name == "fsync"]
    assert any(path.suffix == ".safetensors" for path in paths)
    assert any(path.name.startswith(".tmp-") for path in paths)
    assert any(path.is_dir() for path in paths)


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.EACCES], ids=errno.errorcode.get)
def test_every_operation_of_a_load_fails(template: Path, code: int) -> None:
    for at in range(1, 2000):
        faults = Faults(fail_with(code), at=at, names={"preadv", "open"})
        loaded = small_state(OLD + 1)
        try:
            run = run_at(local_store(template, faults))
            assert run.load(loaded, OLD) == OLD
        except CheckpointError as error:
            assert faults.met, error
            assert not isinstance(error, holdfast.CorruptError), "an error of the machine says nothing of the bytes"
        else:
            assert fingerprint(loaded) == fingerprint(small_state(OLD))
        faults.heal()
        require_loads(run_at(local_store(template, faults)), OLD)
        if not faults.met:
            assert at > 5
            return


def full_file_system(root: Path) -> None:
    """Save until the room runs out; then make room and save."""
    run = run_at(local_store(root))
    large = {"weights": torch.ones(3 << 20, dtype=torch.uint8)}
    saved = 0
    while True:
        before = content_under(root)
        large["weights"] += 1  # What has not changed would take no room.
        _, error = attempted(run, saved, large)
        if error is not None:
            break
        saved += 1
        assert saved < 20, "it never filled up"
    assert saved >= 2
    assert isinstance(error, UnavailableError)
    assert "ENOSPC" in str(error)
    assert "free space" in str(error)
    assert content_under(root) == before, "only the attempt that failed was removed, and all of it"
    shutil.rmtree(step_path(root, 0))
    run.save(saved, large).wait()
    assert run.steps() == list(range(1, saved + 1))
    for step in run.steps():
        assert list(holdfast.open_checkpoint(step_path(root, step)).verify()) == []
    run.close()


def test_a_full_tmpfs() -> None:
    with workplace() as location, mounted("tmpfs", location / "m", kind="tmpfs", options="size=16M") as mount:
        full_file_system(mount / "root")


def test_a_full_ext4() -> None:
    with workplace() as location:
        new_image(location / "image", 24)
        with mounted(location / "image", location / "m", options="loop") as mount:
            full_file_system(mount / "root")


def test_a_file_system_mounted_read_only() -> None:
    with workplace() as location:
        new_image(location / "image", 24)
        with mounted(location / "image", location / "m", options="loop") as mount:
            run = run_at(local_store(mount / "root"))
            run.save(OLD, small_state(OLD)).wait()
            before = content_under(mount)
            command("mount", "-o", "remount,ro", mount)
            _, error = attempted(run, NEW, small_state(NEW))
            assert isinstance(error, InvalidError)
            assert "EROFS" in str(error)
            require_loads(run_at(local_store(mount / "root")), OLD)
            assert content_under(mount) == before
            command("mount", "-o", "remount,rw", mount)
            run.save(NEW, small_state(NEW)).wait()
            require_loads(run, NEW)
            run.close()


def exhausted() -> list[int]:
    """Open files until there are no more descriptors."""
    held = []
    while True:
        try:
            held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            assert error.errno == errno.EMFILE
            return held


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_out_of_file_descriptors(template: Path, in_memory: Path) -> None:
    root = in_memory / "root"
    shutil.copytree(template, root)

    def work() -> None:
        run = run_at(local_store(root))
        before = content_under(root)
        before.pop("latest", None)  # It follows a commit.
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        held = exhausted()
        failed = 0
        while True:
            _, error = attempted(run, NEW, small_state(NEW))
            if error is None:
                break
            assert isinstance(error, UnavailableError), error
            assert "EMFILE" in str(error), error
            failed += 1
            os.close(held.pop())
        assert failed > 1
        for fd in held:
            os.close(fd)
        # Removing takes descriptors too: what a failure left, the commit at the step removed.
        assert before.items() <= content_under(root).items()

    assert in_child(work).acknowledged
    require_loads(run_at(local_store(root)), NEW)
    require_clean(root, NEW)
