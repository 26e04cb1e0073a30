"""Memory that is too small: mounts in memory that fill up, and control groups with a limit.

Where the machine allows neither, a test injects the error instead. Each helper prints which of the two runs.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from holdfast.backends.stores.shelf import ShelfStore
from tests.doubles.faults import FaultPoint, fail_with
from tests.support.mounted_file_systems import command, workplace

MIB = 1 << 20
GROUPS = Path("/sys/fs/cgroup/memory")
"""The usual mount of the memory controller, version 1."""

_FILLER = "filler-of-the-test"


@dataclass
class SmallMount:
    """A mount in memory, or a folder in `/dev/shm` that is said to be one."""

    folder: Path
    """Where to work."""

    is_mounted: bool
    """Whether the mount is real."""

    is_full: bool = False
    """Whether the space was used up; a save that fails then removes its files."""

    def fill(self, operation: FaultPoint) -> None:
        """Use up the space before an operation; without a mount, fail that operation."""
        if self.is_mounted:
            fd = os.open(self.folder / _FILLER, os.O_WRONLY | os.O_CREAT)
            try:
                while free := free_bytes_of(self.folder):
                    with suppress(OSError):  # Another thread has written meanwhile.
                        os.posix_fallocate(fd, os.fstat(fd).st_size, free)
            finally:
                os.close(fd)
        self.is_full = True
        if not self.is_mounted:
            fail_with(errno.ENOSPC)(operation)

    def empty(self) -> None:
        """Give the space back."""
        self.is_full = False
        (self.folder / _FILLER).unlink(missing_ok=True)


def free_bytes_of(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


@contextmanager
def small_mount(mebibytes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallMount]:
    """Mount so much memory; where that is not possible, say of a folder in `/dev/shm` that it has so much."""
    with workplace() as place:
        mount = place / "m"
        mount.mkdir()
        try:
            command("mount", "-t", "tmpfs", "-o", f"size={mebibytes}M", "none", mount)
        except OSError as refusal:
            print(f"bad places: errors are injected, since nothing can be mounted: {refusal}")
        else:
            print(f"bad places: a real mount of {mebibytes} MiB")
            try:
                yield SmallMount(mount, is_mounted=True)
            finally:
                command("umount", "--lazy", mount)  # Mappings of files live as long as their store.
            return
        said = SmallMount(mount, is_mounted=False)

        def free_bytes(store: ShelfStore) -> int:
            held = sum(path.stat().st_size for path in Path(store.url).rglob("*") if path.is_file())
            stays = max(mebibytes * MIB // 10, 64 * MIB)
            return 0 if said.is_full else max(mebibytes * MIB - held - stays + store.spare_bytes(), 0)

        monkeypatch.setattr(ShelfStore, "free_bytes", free_bytes)
        yield said


@contextmanager
def memory_group() -> Iterator[Path | None]:
    """Make a control group for a process whose memory will be limited; yield None where that is not possible."""
    group = GROUPS / f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        group.mkdir()
    except OSError as refusal:
        print(f"bad places: the limit is injected, since there is no control group of version 1: {refusal}")
        yield None
        return
    print(f"bad places: a real control group {group}")
    try:
        yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    for _ in range(100):
        with suppress(OSError):  # A process that has ended is there for a moment.
            group.rmdir()
            return
        time.sleep(0.05)
    raise AssertionError(f"{group} has processes left")


def leave_free(group: Path, count: int) -> None:
    """Limit a group so that its processes have so many bytes left."""
    used = int((group / "memory.usage_in_bytes").read_text())
    (group / "memory.limit_in_bytes").write_text(str(used + count))


def killed_by_kernel(group: Path) -> int:
    """Return how many processes of a group the kernel has killed for memory."""
    lines = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
    return int(lines["oom_kill"])


@contextmanager
def swap(mebibytes: int) -> Iterator[None]:
    """Swap to a file for the length of a block, where the machine allows that."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "swap"
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, mebibytes * MIB)
        path.chmod(0o600)
        try:
            command("mkswap", path)
            command("swapon", path)
        except OSError as refusal:
            print(f"bad places: no swap: {refusal}")
            yield
            return
        print(f"bad places: real swap of {mebibytes} MiB")
        try:
            yield
        finally:
            command("swapoff", path)


def swapped_bytes(group: Path) -> int:
    """Return the bytes of a group that are in swap."""
    memory, both = (int((group / f"memory.{name}usage_in_bytes").read_text()) for name in ("", "memsw."))
    return max(both - memory, 0)


def run_in(group: Path | None, act: Callable[[], None]) -> int:
    """Act in another process, of a group if any; return its status. What it prints before its end is printed here."""
    with tempfile.TemporaryFile("w+") as said:
        pid = os.fork()
        if not pid:
            status = 1
            try:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                if group is not None:
                    (group / "cgroup.procs").write_text(str(os.getpid()))
                torch.set_num_threads(1)  # Threads of the parent's pool are not in this process.
                act()
                status = 0
            except BaseException:
                import traceback

                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(status)
        status = os.waitpid(pid, 0)[1]
        said.seek(0)
        print(said.read())
    return status
