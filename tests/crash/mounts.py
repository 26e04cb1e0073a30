"""Real file systems of our own: small ones that fill up, read-only ones, ones whose power is cut."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SHUTDOWN = 0x8004587D
"""FS_IOC_SHUTDOWN of ext4 and XFS."""

_NOLOGFLUSH = 2
"""Nothing goes to the disk any more, the journal's last transactions included: as when the power goes."""


def command(*words: str | Path) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")


@contextmanager
def workplace() -> Iterator[Path]:
    """Lend a folder in memory if there is one, for images that live for a moment."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir=memory if os.access(memory, os.W_OK) else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def new_image(path: Path, mebibytes: int) -> None:
    """Make an ext4 image; skip the test where that is not possible."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system image")
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs mkfs.ext4")
    with path.open("wb") as image:
        image.truncate(mebibytes << 20)
    command("mkfs.ext4", "-q", "-F", "-m", "0", path)


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
