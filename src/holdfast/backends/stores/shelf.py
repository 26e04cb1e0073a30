"""A store in a folder in memory (tmpfs) that uses the memory of deleted files again: a save takes one copy.

An upload that has a spare (`spares.py`) hands out the memory of the file. Any other writes by calls: fresh pages are
slower through a mapping, and a write into a mapping of a full file system kills the process with SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.backends.stores.folders import Folders
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.local_upload import LocalUpload
from holdfast.backends.stores.oserrors import translated
from holdfast.backends.stores.spares import Spare, Spares
from holdfast.backends.stores.syscalls import Syscalls, close_quietly
from holdfast.base.ports.keys import split_key
from holdfast.base.ports.parts import PartLedger, address_of
from holdfast.base.ports.readable import Release
from holdfast.errors import UnavailableError
from holdfast.settings import MIB

_IN_MEMORY = "tmpfs"

_BLOCK_BYTES = 512
"""The unit of `st_blocks`."""

_SPARE_BYTES_MIN = 1 * MIB
"""Smaller files are removed: none of them is worth the calls."""

_FREE_SHARE, _FREE_BYTES_MIN = 10, 64 * MIB
"""What stays free: a tenth of the file system, or this many bytes. DataLoader workers pass batches through the same
file system, and die of SIGBUS when it is full."""


class ShelfUpload(LocalUpload):
    """An upload into a file in memory. States as of `LocalUpload`."""

    def __init__(
        self,
        syscalls: Syscalls,
        folders: Folders,
        folder: int,
        parts: tuple[str, ...],
        ledger: PartLedger,
        *,
        spares: Spares,
        may_be_less: bool = False,
    ) -> None:
        """Take a spare, or create a file; arguments as of `LocalUpload`."""
        self._spares = spares
        self._memory: memoryview | None = None
        fd = None
        if ledger.bytes_max >= _SPARE_BYTES_MIN:
            with folders.opened(()) as root:
                spare = spares.take(root, ledger.bytes_max)
                if spare is not None:
                    fd = _named(syscalls, root, spare, folder, parts[-1], ledger.bytes_max)
                elif _free_bytes(root) < ledger.bytes_max:
                    spares.trim(0)  # None fits, and the upload needs their memory.
            # Not through a mapping into a hole: if the file system is full, that kills the process.
            if fd is not None and syscalls.fstat(fd).st_blocks * _BLOCK_BYTES >= ledger.bytes_max:
                self._memory = spare.memory if spare is not None else None
        # Reserving would take as long as writing: the kernel clears each page.
        super().__init__(syscalls, folders, folder, parts, ledger, may_be_less=may_be_less, fd=fd, is_reserved=True)

    def room(self, offset: int, length_bytes: int) -> memoryview | None:
        """Return the memory of one part of a spare; None for a new file."""
        self._ledger.check(offset, length_bytes)
        memory = self._memory  # An abort may come meanwhile.
        return None if memory is None else memory[offset : offset + length_bytes]

    def write(self, offset: int, data: memoryview, release: Release | None = None) -> None:
        """Take note of a part that is in its room; write any other."""
        memory = self._memory
        if memory is not None and data.nbytes and address_of(data) == address_of(memory[offset : offset + 1]):
            self._ledger.check(offset, data.nbytes)
            self._ledger.note_written(offset, data.nbytes)
        else:
            super().write(offset, data, release)

    def complete(self, total_bytes: int | None = None) -> None:
        """Give the file its size, and keep the mapping of a spare for a later save."""
        with self._using(), translated("keep", self._where, writing=True):
            self._require_named()
            if self._memory is not None:
                self._spares.keep(self._fd, self._memory)
        super().complete(total_bytes)
        self._memory = None

    def abort(self) -> None:
        """Remove the file unless it was completed; its memory lives until the last copy into a room is over."""
        self._memory = None
        super().abort()

    def _require_named(self) -> None:
        """Require the file under its name: one that another process removed may have the name of a spare now."""
        with suppress(FileNotFoundError), self._folders.opened(self._parts[:-1]) as folder:
            status = self._syscalls.stat(self._parts[-1], dir_fd=folder)
            if os.path.samestat(status, self._syscalls.fstat(self._fd)):
                return
        raise UnavailableError(f"{self._where}: another process removed it while it was written")


def _named(syscalls: Syscalls, root: int, spare: Spare, folder: int, name: str, total_bytes: int) -> int:
    """Give a spare the name and the size of an upload; return its descriptor."""
    is_named = False
    try:
        # A link refuses a name that is taken. The descriptor of the spare keeps other uploads from it.
        syscalls.link(spare.name, name, dir_fd=root, new_dir_fd=folder)
        is_named = True
        with suppress(FileNotFoundError):  # Another rank has trimmed the hidden name.
            syscalls.unlink(spare.name, dir_fd=root)
        syscalls.ftruncate(spare.fd, total_bytes)
    except BaseException:
        if is_named:
            with suppress(OSError):
                syscalls.unlink(name, dir_fd=folder)
        close_quietly(syscalls, spare.fd)
        raise
    return spare.fd


def _free_bytes(folder: int) -> int:
    found = os.fstatvfs(folder)
    return found.f_bavail * found.f_frsize


class ShelfStore(LocalStore):
    """Keys to files beneath a folder on tmpfs.

    A file has one name: a file with two can never be used again.
    """

    traits = replace(LocalStore.traits, lends_memory=True)
    _is_in_memory = True

    def __init__(self, root: str | os.PathLike[str], **options: Any) -> None:
        """Set the root; arguments as of `LocalStore`."""
        super().__init__(root, **options)
        self._spares = Spares(self._folders, self._syscalls, self._clock)
        self._begin_upload = partial(ShelfUpload, spares=self._spares)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; large ones become spares, of at most as many bytes as the objects that stay."""
        keys = list(keys)
        for key in keys:
            parts = split_key(key)
            with (
                translated("delete", self._where(key)),
                suppress(FileNotFoundError),
                self._folders.opened(parts[:-1]) as folder,
            ):
                if self._syscalls.stat(parts[-1], dir_fd=folder).st_size >= _SPARE_BYTES_MIN:
                    self._spares.retire(folder, parts[-1])
        super().delete(keys)
        with translated("clean up", self.url):
            if self._spares.bytes():
                self._spares.trim(sum(entry.bytes for entry in self.list()))

    def link(self, key: str, new_key: str) -> bool:
        """Return False."""
        split_key(new_key)
        self.size(key)
        return False

    def spare_bytes(self) -> int:
        """Return the bytes of collected files, whose memory the next uploads take again."""
        return self._spares.bytes()

    def drop_spares(self) -> None:
        """Remove collected files, so that their memory is free at once."""
        self._spares.trim(0)

    def free_bytes(self) -> int | None:
        """Return the free bytes of the file system and of spares, less those that stay free for others."""
        try:
            found = os.statvfs(self.url)
        except OSError:
            return None
        stays = max(found.f_blocks * found.f_frsize // _FREE_SHARE, _FREE_BYTES_MIN)
        return max(found.f_bavail * found.f_frsize + self._spares.bytes() - stays, 0)


def is_in_memory(path: str) -> bool:
    """Return whether a folder, which need not exist yet, is on a file system in memory."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    around = [(place, kind) for place, kind in mounts if os.path.commonpath([path, place]) == place]
    # Of two mounts at one place the later one is seen.
    return bool(around) and max(enumerate(around), key=lambda each: (len(each[1][0]), each[0]))[1][1] == _IN_MEMORY
