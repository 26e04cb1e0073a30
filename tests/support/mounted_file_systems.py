"""Real file systems of our own: small ones that fill up, read-only ones, ones whose power is cut."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.doubles.faults import FaultPoint, Faults

_SHUTDOWN = 0x8004587D
"""FS_IOC_SHUTDOWN of ext4 and XFS."""

FILE_SYSTEMS = tuple(os.environ.get("POWER_CUTS_ON", "ext4").split(","))
"""Those whose power is cut, of ext4 and XFS: the campaign asks for both."""

_MEBIBYTES_MIN = {"xfs": 300}
"""What mkfs asks for."""

_NOLOGFLUSH = 2
"""Nothing goes to the disk any more, the journal's last transactions included: as when the power goes."""

_ADMINISTRATION = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Folders of mkfs and mount, which the PATH of an ordinary login lacks even for root."""


def _search_path() -> str:
    """Return the folders of commands: those of PATH, then those of administration."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), *_ADMINISTRATION))


def command(*words: str | Path) -> None:
    environment = {**os.environ, "PATH": _search_path()}
    texts = [str(word) for word in words]
    done = subprocess.run(texts, capture_output=True, text=True, timeout=60, check=False, env=environment)
    if done.returncode:
        raise OSError(f"{' '.join(texts)}: {done.stderr.strip()}")


@contextmanager
def workplace() -> Iterator[Path]:
    """Lend a folder in memory if there is one, for images that live for a moment."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir=memory if os.access(memory, os.W_OK) else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def new_image(path: Path, mebibytes: int, kind: str = "ext4") -> None:
    """Make an image of a file system; skip the test where that is not possible."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system image")
    if shutil.which(f"mkfs.{kind}", path=_search_path()) is None:
        pytest.skip(f"needs mkfs.{kind}")
    with path.open("wb") as image:
        image.truncate(max(mebibytes, _MEBIBYTES_MIN.get(kind, 0)) << 20)
    command(f"mkfs.{kind}", "-q", *(("-F", "-m", "0") if kind == "ext4" else ("-f",)), path)


def copy_image(image: Path, to: Path) -> None:
    """Copy an image without its holes: most of one is never written."""
    command("cp", "--sparse=always", image, to)


@contextmanager
def mounted(what: Path | str, at: Path, *, options: str = "", kind: str = "ext4") -> Iterator[Path]:
    """Mount a file system for the length of a block; skip the test where the machine does not allow it."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system")
    at.mkdir(exist_ok=True)
    try:
        command("mount", "-t", kind, "-o", options or "defaults", what, at)
    except OSError as refusal:
        pytest.skip(f"this machine cannot mount {kind} here: {refusal}")
    try:
        yield at
    finally:
        command("umount", at)


def cut_power(mount: Path) -> None:
    """Freeze a mounted file system as if the power had gone; skip the test where it has no such call."""
    fd = os.open(mount, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _NOLOGFLUSH))
    except OSError as refusal:
        pytest.skip(f"this file system cannot be shut down: {refusal}")
    finally:
        os.close(fd)


def acted_until_power_cut(
    mount: Path, at: int, act: Callable[[Faults], None], names: Collection[str] | None = None
) -> bool:
    """Act in another process up to its n-th operation, of these names only if any are given, then cut the power.

    Returns:
        Whether it said that it was done.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            act(Faults(_stop_here, at=at, names=names))
            os.write(writing, b"!")
        finally:
            os._exit(0)
    os.close(writing)
    _, status = os.waitpid(child, os.WUNTRACED)
    try:
        cut_power(mount)
    finally:
        if os.WIFSTOPPED(status):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        return pipe.read() == b"!"


def _stop_here(operation: FaultPoint) -> None:
    """Hold the whole process: everything it did so far is done, nothing more comes."""
    os.kill(os.getpid(), signal.SIGSTOP)
