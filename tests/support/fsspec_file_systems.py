"""File systems of fsspec for tests, registered under protocols of their own."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

IN_MEMORY = "heap"
"""fsspec's own `memory` under another name: `memory://` is a store of Holdfast."""

QUIET = "quiet"
"""Renames, but not over a file, and does not say so; its folders are removed with all that is in them."""

CARELESS = "careless"
"""Takes the second create of a name as it takes the first."""

KILLING = "killing"
"""Ends its process by SIGKILL before or after a change of step 2: of the n-th process, at its n-th change."""

READABLE = "readable"
"""Can only be read."""


class HeapFileSystem(MemoryFileSystem):
    protocol = IN_MEMORY

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix(f"{IN_MEMORY}://"))


class QuietFileSystem(LocalFileSystem):
    """Like WebHDFS in its renames, and like HDFS in the removal of folders."""

    protocol = QUIET
    link = None

    def mv(self, path1: str, path2: str, **_: Any) -> None:  # type: ignore[override]
        source, target = Path(self._strip_protocol(path1)), Path(self._strip_protocol(path2))
        try:
            os.link(source, target)
        except FileExistsError:
            return
        source.unlink()

    def rmdir(self, path: str) -> None:
        self.rm(path, recursive=True)


class CarelessFileSystem(LocalFileSystem):
    """A local file system that takes every create, as some servers do."""

    protocol = CARELESS
    link = None


_counting = threading.Lock()


class KillingFileSystem(LocalFileSystem):
    """A local file system under whose hands a process dies."""

    protocol = KILLING
    changes = 0

    def _change(self, path: str, act: Callable[[], Any]) -> Any:
        found = re.fullmatch(r"(.*)/(\d+)/step-000000000002/.*", path)
        if found is None or int(found[2]) != os.getpid():
            return act()
        process = len(os.listdir(found[1]))
        with _counting:
            type(self).changes += 1
            is_turn = self.changes == (process + 1) // 2
        if is_turn and process % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        result = act()
        if is_turn:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **more: Any) -> Any:
        if mode == "rb":
            return super()._open(path, mode, block_size, **more)
        return self._change(path, lambda: super(KillingFileSystem, self)._open(path, mode, block_size, **more))

    def link(self, src: str, dst: str, **more: Any) -> None:
        self._change(dst, lambda: super(KillingFileSystem, self).link(src, dst, **more))

    def mv(self, path1: str, path2: str, *more: Any, **others: Any) -> None:
        self._change(path2, lambda: super(KillingFileSystem, self).mv(path1, path2, *more, **others))

    def rm_file(self, path: str) -> None:
        self._change(path, lambda: super(KillingFileSystem, self).rm_file(path))


class ReadableFileSystem(LocalFileSystem):
    """A local file system without any way to change it."""

    protocol = READABLE
    link = None

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **more: Any) -> Any:
        if mode != "rb":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return super()._open(path, mode, block_size, **more)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise NotImplementedError

    def rm_file(self, path: str) -> None:
        raise NotImplementedError


for _each in (HeapFileSystem, QuietFileSystem, CarelessFileSystem, KillingFileSystem, ReadableFileSystem):
    fsspec.register_implementation(_each.protocol, _each, clobber=True)
