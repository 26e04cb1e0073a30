"""What is asked of one file system of fsspec, in terms that all of them understand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.backends.stores.fsspec.refusals import is_absent
from holdfast.errors import InvalidError
from holdfast.settings import KIB, MIB

FileSystem = Any
"""A file system of fsspec. The library is not needed to import this module."""

TRIES = 16
"""How often a file is written whose folder, or which itself, another process removes meanwhile."""

_BLOCK_BYTES = 4 * MIB
_PART_BYTES = 256 * KIB
_MARKS = ("ino", "created", "mtime", "modified", "last_modified", "LastModified", "ETag", "etag", "generation", "md5")
"""What file systems say of a file that changes with its content, and not with a look at it."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What a file system says of one file or folder."""

    name: str
    """Its name in its folder."""

    is_file: bool
    """Whether it is a file; not a link, or anything else that is neither file nor folder."""

    is_folder: bool
    """Whether it is a folder."""

    bytes: int | None
    """Size of a file; None: the file system does not say."""

    marks: str
    """A text that changes with the content."""


def look(system: FileSystem, path: str) -> FileInfo | None:
    """Return what is at a path; None if nothing is.

    The `exists` of fsspec would say so of a server that does not answer, too.
    """
    system.invalidate_cache()
    try:
        info = system.info(path)
    except Exception as error:
        if is_absent(error):
            return None
        raise
    return _found(info)


def children(system: FileSystem, path: str) -> Iterator[FileInfo]:
    """Yield what is in a folder, in any order; nothing if there is no such folder."""
    system.invalidate_cache()
    try:
        entries = system.ls(path, detail=True)
    except Exception as error:
        if is_absent(error):
            return
        found = look(system, path)
        if found is None or not found.is_folder:
            return
        raise
    own = path.strip("/")
    for info in entries:
        child = _found(info)
        # Listed as if it were a folder, a file contains itself.
        if str(info["name"]).strip("/")[: -len(child.name) - 1].endswith(own):
            yield child


def _found(info: Any) -> FileInfo:
    size, kind = info.get("size"), info.get("type")
    marks = " ".join(f"{name}={info[name]}" for name in _MARKS if info.get(name) is not None)
    return FileInfo(
        str(info["name"]).rstrip("/").rpartition("/")[2],
        kind == "file",
        kind == "directory",
        int(size) if isinstance(size, int) else None,
        f"{size} {marks}",
    )


def read_whole(system: FileSystem, path: str) -> bytes:
    """Return the content of a file."""
    data: bytes = system.cat_file(path)
    return data


def read_ranges(system: FileSystem, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return byte ranges of a file; less of those beyond its end."""
    if system.async_impl:
        starts, stops = zip(*ranges, strict=True)
        held: list[bytes] = system.cat_ranges([path] * len(ranges), list(starts), list(stops), on_error="raise")
    elif not _has_its_own(system, "cat_file"):
        with system.open(path, "rb") as file:
            held = list(_read_from(file, ranges))
    else:
        held = [system.cat_file(path, start, stop) for start, stop in ranges]
    if any(len(data) > stop - start for data, (start, stop) in zip(held, ranges, strict=True)):
        raise InvalidError(f"{path}: the server sends more than the byte range that it is asked for; expected ranges")
    return held


def _read_from(file: Any, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    together = getattr(file, "readv", None)
    if callable(together):
        # The files of paramiko ask for 32 KiB at a time, and wait for each answer unless they know what follows. They
        # put a long part together by copying it again and again, so none is long.
        asked = [_parts_of(start, stop) for start, stop in ranges]
        came = iter(together([part for parts in asked for part in parts]))
        yield from (b"".join(next(came) for _ in parts) for parts in asked)
        return
    for start, stop in ranges:
        file.seek(start)
        parts = []
        while start < stop and (part := file.read(stop - start)):
            parts.append(part)
            start += len(part)
        yield parts[0] if len(parts) == 1 else b"".join(parts)


def _parts_of(start: int, stop: int) -> list[tuple[int, int]]:
    """Return the parts of a range, each as start and length."""
    return [(at, min(_PART_BYTES, stop - at)) for at in range(start, stop, _PART_BYTES)]


def write_file(system: FileSystem, path: str, data: memoryview) -> None:
    """Write a file, in place of one that is there; make its folder if that is missing."""

    def write() -> None:
        with system.open(path, "wb") as file:
            _write_to(file, data)

    _in_folder(system, path, write)


def store_whole(system: FileSystem, path: str, data: memoryview, *, mode: str = "overwrite") -> None:
    """Store a file by the file system's own way to store one at once; make its folder if it needs one."""
    # Only who can be asked for more than to overwrite knows the option.
    options = {} if mode == "overwrite" else {"mode": mode}
    _in_folder(system, path, lambda: system.pipe_file(path, bytes(data), **options))


def _in_folder(system: FileSystem, path: str, act: Callable[[], object]) -> None:
    """Do something to a file; make its folder if that is missing, which another process may remove meanwhile."""
    for turn in range(TRIES):
        try:
            act()
            return
        except (NotImplementedError, PermissionError, FileExistsError):
            raise
        except Exception as error:
            folder = path.rpartition("/")[0]
            found = look(system, folder)
            has_folder = found is not None and found.is_folder
            if turn == TRIES - 1 or (has_folder and not is_absent(error)):
                raise
        if not has_folder:
            make_folder(system, folder)


def _write_to(file: Any, data: memoryview) -> None:
    first_bytes = 0
    pipeline = getattr(file, "set_pipelined", None)
    if callable(pipeline):
        # The files of paramiko wait for an answer to each 32 KiB. All but the last byte are sent without waiting, and
        # the last one waits for all answers: `close` would drop what they say.
        first_bytes = max(len(data) - 1, 0)
        pipeline(True)
        _write_blocks(file, data[:first_bytes])
        pipeline(False)
    _write_blocks(file, data[first_bytes:])


def _write_blocks(file: Any, data: memoryview) -> None:
    for start in range(0, len(data), _BLOCK_BYTES):
        file.write(bytes(data[start : start + _BLOCK_BYTES]))


def make_folder(system: FileSystem, path: str) -> None:
    """Make a folder, and those above it; other processes may make them, or remove empty ones, meanwhile."""
    for turn in range(TRIES):
        try:
            system.makedirs(path, exist_ok=True)
            return
        except (NotImplementedError, PermissionError):
            raise
        except Exception:
            found = look(system, path)
            if found is not None and found.is_folder:
                return
            if turn == TRIES - 1:
                raise


def remove_file(system: FileSystem, path: str) -> None:
    """Remove a file, unless it is absent or a folder."""
    try:
        system.rm_file(path)
    except Exception as error:
        if is_absent(error):
            return
        found = look(system, path)
        if found is not None and not found.is_folder:
            raise


def stores_whole(system: FileSystem) -> bool:
    """Return whether a file system has a way of its own to store a file at once, as object stores have."""
    name = "_pipe_file" if system.async_impl else "pipe_file"
    return _has_its_own(system, name)


def renames(system: FileSystem) -> bool:
    """Return whether a file system can rename: in fsspec those that cannot copy and then delete."""
    return _has_its_own(system, "mv")


def rename_of_client(system: FileSystem) -> Callable[[str, str], object] | None:
    """Return the rename that a file system has for files that must not exist yet; None if it has none.

    The file system for SFTP uses the rename that replaces. Its client has the one of the protocol, too, which a server
    refuses if the new name exists.
    """
    rename = getattr(getattr(system, "ftp", None), "rename", None)
    if callable(rename):
        found: Callable[[str, str], object] = rename
        return found
    if renames(system):
        moved: Callable[[str, str], object] = system.mv
        return moved
    return None


def _has_its_own(system: FileSystem, name: str) -> bool:
    """Return whether a class has its own method, and not the one of fsspec."""
    for kind in type(system).__mro__:
        if name in vars(kind):
            return kind.__module__ not in ("fsspec.spec", "fsspec.asyn")
    return False
