"""Read-only access to the files of another system, under their own names: in a folder, or by URL."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from holdfast.backends.stores.file_reading import FileReading
from holdfast.backends.stores.oserrors import translated
from holdfast.backends.stores.syscalls import Closing, Syscalls
from holdfast.base.ports.keys import is_listed, path_beneath
from holdfast.base.ports.packs import Stored
from holdfast.base.ports.readable import StoreEntry
from holdfast.errors import ConflictError, InvalidError, MissingError, first_three

FILES_MAX = 1 << 20
"""Files that a folder may have; a folder with more is not a checkpoint."""

_READ = os.O_RDONLY | os.O_NONBLOCK
_SCHEME = "file://"
_BLOBS = "blobs"
"""Folder of a Hugging Face cache to which the links in `snapshots/<revision>/` lead."""


class ForeignFiles(FileReading):
    """Keys to files beneath a folder; implements `WatchedFiles`.

    A key is a path relative to the folder, of any characters, without empty parts, `.` or `..`. A link may lead to a
    file in the folder or, in a Hugging Face cache, to a blob of the same repository. Any other link is refused.
    """

    def __init__(self, root: str | os.PathLike[str], *, syscalls: Syscalls | None = None) -> None:
        """Set the folder; does no I/O.

        Args:
            root: The folder; it may be a link.
            syscalls: The operating system; tests pass another.
        """
        self._root = os.path.abspath(os.fspath(root))
        self.url = self._root
        self._syscalls = syscalls or Syscalls()
        self._stamps: dict[str, str] = {}
        """By key, the stamp of a file when it was first opened here."""
        self._listed: dict[str, tuple[StoreEntry, ...]] = {}

    def size(self, key: str) -> int:
        """Return the bytes of a file."""
        with translated("look at", self._where(key)), self._open_object(key) as (_, size):
            return size

    def stamps(self, keys: Collection[str]) -> dict[str, str]:
        """Return by key the size, times and inode of each file when it was first opened here.

        A file that is rewritten gets another stamp. Files opened in the same folders are included: they describe the
        content of the others. Files elsewhere are not, such as the `latest` file of a run that is still training.
        """
        for key in keys:
            if key not in self._stamps:
                self.size(key)
        folders = {os.path.dirname(key) for key in keys}
        return {key: stamp for key, stamp in sorted(self._stamps.items()) if os.path.dirname(key) in folders}

    def require_unchanged(self, keys: Collection[str]) -> None:
        """Require that the files of `stamps` are the same as when they were first opened here.

        Raises:
            ConflictError: A file was rewritten; the message names it.
            MissingError: A file was removed.
        """
        for key, stamp in self.stamps(keys).items():
            where = self._where(key)
            with translated("look at", where), self._open_object(key) as (fd, _):
                if _stamp_of(self._syscalls.fstat(fd)) != stamp:
                    raise ConflictError(
                        f"{where}: was written again while it was read, so the data may be a mix of both versions. Run "
                        "the command again once no process writes to the file"
                    )

    def for_operation(self, name: str, rank: int, world_size: int) -> ForeignFiles:
        """Return the files: no call is tried again."""
        return self

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders directly under a prefix, sorted."""
        with translated("list", self._where(prefix)), self._scanned(prefix) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        """Yield every file under a prefix, but not files in linked folders, nor links without a target.

        The listing is cached, since every format asks for it.

        Raises:
            InvalidError: There are more than `FILES_MAX` files.
        """
        if prefix not in self._listed:
            self._listed[prefix] = tuple(sorted(self._walk(prefix), key=lambda entry: entry.key))
        return (entry for entry in self._listed[prefix] if is_listed(entry.key, after, up_to))

    def _walk(self, prefix: str) -> Iterator[StoreEntry]:
        waiting, count = [prefix], 0
        while waiting:
            folder = waiting.pop()
            files = []
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
                        continue  # Deleted after it was listed, or a link without a target.
                    if stat.S_ISREG(status.st_mode):
                        files.append(StoreEntry(key, status.st_size))
            yield from files

    @contextmanager
    def _scanned(self, prefix: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        try:
            entries = os.scandir(path_beneath(self._root, prefix.removesuffix("/"), self.url))
        except (FileNotFoundError, NotADirectoryError):
            yield iter(())  # No file has this prefix.
            return
        with entries:
            yield entries

    @contextmanager
    def _open_object(self, key: str) -> Iterator[tuple[int, int]]:
        """Open a regular file for reading: its descriptor and its real size in bytes."""
        where = self._where(key)
        path = path_beneath(self._root, key, self.url)
        with Closing(self._syscalls, self._syscalls.open(path, _READ, 0)) as fd:
            status = self._syscalls.fstat(fd)
            if stat.S_ISDIR(status.st_mode):
                raise MissingError(f"{where}: no such file, but a folder of that name")
            if not stat.S_ISREG(status.st_mode):
                raise InvalidError(f"{where}: it is not a regular file; expected one")
            self._require_within(key, fd, where)
            if key not in self._stamps:
                self._stamps.setdefault(key, _stamp_of(status))
            yield fd, status.st_size

    def _require_within(self, key: str, fd: int, where: str) -> None:
        """Refuse a file outside the folder that a link led to; checks the open file, which nobody can exchange."""
        home = os.path.realpath(self._root)
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.startswith(home.rstrip("/") + "/"):
            return
        repository, cached, _ = f"{home}/".rpartition("/snapshots/")
        if cached and os.path.dirname(path) == os.path.join(repository, _BLOBS):
            return
        raise InvalidError(
            f"{where}: is reached through a link that leads out of the folder, to {path}; expected a file inside it. "
            "Copy the folder with the targets of its links (cp -rL); for a referenced file, allow a folder above both"
        )


def _stamp_of(status: os.stat_result) -> str:
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


class References:
    """Maps the URL of a referenced file to its place, as a `Packs`.

    The file must be under an allowed folder, and no link may lead out of that folder.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        """Set the allowed folders, by path or `file://` URL; does no I/O."""
        paths = [root.removeprefix(_SCHEME) for root in roots]
        self._roots = [(os.path.abspath(path).rstrip("/") + "/", ForeignFiles(path)) for path in paths]

    def __call__(self, url: str) -> Stored:
        """Return the place of a referenced file.

        Raises:
            InvalidError: The file is under no allowed folder.
        """
        path = url.removeprefix(_SCHEME)
        for prefix, files in self._roots:
            if path != url and path.startswith(prefix):
                return Stored(files, path[len(prefix) :])
        allowed = first_three(prefix for prefix, _ in self._roots) or "none"
        raise InvalidError(
            f"{url}: the checkpoint references this file, but it is under no allowed folder (allowed: {allowed}). If "
            f"you trust the checkpoint, allow {os.path.dirname(path)!r} or a folder above it: "
            "Settings(allowed_roots=(…,)), on the command line --allow-root"
        )
