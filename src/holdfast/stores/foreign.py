"""Files of another system in a folder, under whatever names it gave them; only to be read."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from holdfast.errors import ConflictError, InvalidError, MissingError
from holdfast.ports.store import Entry
from holdfast.stores.file_reading import FileReading
from holdfast.stores.oserrors import translated
from holdfast.stores.syscalls import Syscalls, close_quietly

FILES_MAX = 1 << 20
"""Files of a folder that are listed; a checkpoint of more is taken for a mistake."""

_READ = os.O_RDONLY | os.O_NONBLOCK
_BLOBS = "blobs"
"""Where a Hugging Face cache keeps what the links in `snapshots/<revision>/` lead to."""


class ForeignFiles(FileReading):
    """Keys to files beneath a folder, as `Readable` says.

    A key is a path relative to the folder, of any characters, without empty parts, `.` or `..`. A link is followed
    where what it leads to lies in the folder too, or, in a Hugging Face cache, among the blobs of the same repository;
    any other is refused by name.
    """

    def __init__(self, root: str | os.PathLike[str], *, syscalls: Syscalls | None = None) -> None:
        """Remember where; touches nothing.

        Args:
            root: The folder; it may itself be a link.
            syscalls: The operating system; tests pass another.
        """
        self._root = os.path.abspath(os.fspath(root))
        self._syscalls = syscalls or Syscalls()
        self._stamps: dict[str, str] = {}
        """By key, what a file looked like when it was first opened here."""
        self._listed: dict[str, tuple[Entry, ...]] = {}

    @property
    def url(self) -> str:
        """Return `file://` and the absolute path of the folder."""
        return f"file://{self._root}"

    def size(self, key: str) -> int:
        """Return the bytes of a file."""
        with translated("look at", self._where(key)), self._open_object(key) as (_, size):
            return size

    def stamps(self, keys: Collection[str]) -> dict[str, str]:
        """Return size, times of change and number of files as they were when each was first opened here, by key.

        Others for files that were written again. What was opened beside them, in the same folders, is told too: it
        tells what they hold. What lies elsewhere is not, such as the `latest` of a run that goes on.
        """
        for key in keys:
            if key not in self._stamps:
                self.size(key)
        folders = {os.path.dirname(key) for key in keys}
        return {key: stamp for key, stamp in sorted(self._stamps.items()) if os.path.dirname(key) in folders}

    def require_unchanged(self, keys: Collection[str]) -> None:
        """Refuse files that were written again since they were first opened here; which, as `stamps` says.

        Raises:
            ConflictError: One was; the message names it.
            MissingError: One is no longer there.
        """
        for key, stamp in self.stamps(keys).items():
            where = self._where(key)
            with translated("look at", where), self._open_object(key) as (fd, _):
                if _stamp_of(self._syscalls.fstat(fd)) != stamp:
                    raise ConflictError(
                        f"{where}: was written again while it was read; expected it to stay as it was, for what was "
                        "read may be partly of the one and partly of the other. Run it again once nothing writes there"
                    )

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders directly under a prefix, sorted."""
        with translated("list", self._where(prefix)), self._scanned(prefix) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yield every file under a prefix; folders that are links are not entered, links that lead nowhere left out.

        A folder is walked once, however many formats ask whether it is theirs.

        Raises:
            InvalidError: There are more than a checkpoint can have.
        """
        if prefix not in self._listed:
            self._listed[prefix] = tuple(self._walk(prefix))
        return iter(self._listed[prefix])

    def _walk(self, prefix: str) -> Iterator[Entry]:
        waiting, count = [prefix], 0
        while waiting:
            folder = waiting.pop()
            found = []
            with translated("list", self._where(folder)), self._scanned(folder) as entries:
                for entry in entries:
                    count += 1
                    if count > FILES_MAX:
                        raise InvalidError(f"{self._where(prefix)}: over {FILES_MAX} files; expected one checkpoint")
                    key = folder + entry.name
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(key + "/")
                        continue
                    try:
                        status = entry.stat()
                    except OSError:
                        continue  # Deleted while we looked, or a link that leads nowhere.
                    if stat.S_ISREG(status.st_mode):
                        found.append(Entry(key, status.st_size))
            yield from found

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _path(self, key: str) -> str:
        parts = key.split("/") if key else []
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise InvalidError(f"{self.url}: file {key[:300]!r}; expected a path that stays in the folder")
        return os.path.join(self._root, *parts)

    @contextmanager
    def _scanned(self, prefix: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        try:
            entries = os.scandir(self._path(prefix.removesuffix("/")))
        except (FileNotFoundError, NotADirectoryError):
            yield iter(())  # A prefix under which nothing lies.
            return
        with entries:
            yield entries

    @contextmanager
    def _open_object(self, key: str) -> Iterator[tuple[int, int]]:
        """Open a regular file for reading: its descriptor and its real size in bytes."""
        where = self._where(key)
        fd = self._syscalls.open(self._path(key), _READ, 0)
        try:
            found = self._syscalls.fstat(fd)
            if stat.S_ISDIR(found.st_mode):
                raise MissingError(f"{where}: no such file, but a folder of that name")
            if not stat.S_ISREG(found.st_mode):
                raise InvalidError(f"{where}: it is not a regular file; expected one")
            self._require_within(key, fd, where)
            if key not in self._stamps:
                self._stamps.setdefault(key, _stamp_of(found))
            yield fd, found.st_size
        finally:
            close_quietly(self._syscalls, fd)

    def _require_within(self, key: str, fd: int, where: str) -> None:
        """Refuse what a link outside the folder led to; asked of the open file, which nobody can exchange any more."""
        home = os.path.realpath(self._root)
        lies = os.readlink(f"/proc/self/fd/{fd}")
        if lies.startswith(home.rstrip("/") + "/"):
            return
        repository, cached, _ = f"{home}/".rpartition("/snapshots/")
        if cached and os.path.dirname(lies) == os.path.join(repository, _BLOBS):
            return
        raise InvalidError(
            f"{where}: is reached through a link that leads out of the folder, to {lies}; expected files of the "
            "checkpoint's own folder. Copy it with what its links lead to (cp -rL); of a file that a checkpoint "
            "references, allow a folder above both"
        )


def _stamp_of(found: os.stat_result) -> str:
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"
