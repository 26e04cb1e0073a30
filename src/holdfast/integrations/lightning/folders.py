"""Where a checkpoint lies: at its path, or under a hidden name beside it while it is saved or removed.

Lightning finds checkpoints by listing a folder: `ckpt_path="last"`, the number of the next `hpc_ckpt_N.ckpt`. What a
kill leaves of a save must not be among them. So on a disk a checkpoint is saved under a hidden name, and gets its own
when it is whole. Before it is removed, it gets a hidden name again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass

from lightning.fabric.utilities.cloud_io import get_filesystem

import holdfast
from holdfast.errors import CorruptError, InvalidError, MissingError, UnavailableError
from holdfast.integrations.lightning.contents import HOST

_SAVING, _REPLACED, _REMOVED = ".holdfast-saving-", ".holdfast-replaced-", ".holdfast-removed-"
"""How hidden names begin. A digest of the checkpoint's name follows: Lightning would find the name itself."""

_MANIFEST = "manifest.json"
"""The file without which a folder is no checkpoint (docs/format.md)."""


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """Where one save writes, and where its checkpoint is found once it is whole."""

    path: str
    """Where Lightning finds it."""

    written_at: str
    """Where it is saved: the path itself, if a checkpoint there is replaced, and at a URL."""

    is_linked: bool = False
    """Whether links to checkpoints are beside it: those of `ModelCheckpoint(save_last="link")`. Lightning moves one as
    soon as the save returns, so the checkpoint must be whole by then."""

    @property
    def is_replaced(self) -> bool:
        """Whether the save replaces what is at the path by itself."""
        return self.path == self.written_at

    def publish(self) -> None:
        """Move the whole checkpoint to its path, in place of a file or a link there; durable on return.

        Raises:
            UnavailableError: It could not be moved, or another job has saved there meanwhile. It stays where it is.
        """
        if self.is_replaced:
            return
        try:
            if os.path.islink(self.path) or os.path.isfile(self.path):
                old = _take_place(self.written_at, self.path)
                _make_durable(os.path.dirname(self.path))
                with suppress(OSError):  # `tidy` tries again.
                    _remove_hidden(old)
            else:
                os.rename(self.written_at, self.path)
                _make_durable(os.path.dirname(self.path))
        except OSError as error:
            raise UnavailableError(
                f"{self.path}: the checkpoint is whole at {self.written_at}, but could not get its name: {error}. Move "
                "it by hand, or save again"
            ) from error


def destination(path: str | os.PathLike[str], *, in_background: bool = False) -> CheckpointPath:
    """Return where a save to a path writes; remove what a killed save to it has left. On one rank.

    Its folder exists afterwards: Lightning puts a link there as soon as a save in the background returns.

    Args:
        path: The path.
        in_background: Whether the save is asked for in the background, so that links count.
    Raises:
        InvalidError: A folder of something else is there.
        UnavailableError: The folder of the path cannot be made.
        ConflictError: A checkpoint that another integration saved is there, or one of a job without any.
    """
    text = local_path(path)
    restore(text)
    if "://" in text or (os.path.isdir(text) and not os.path.islink(text)):
        _require_replaceable(text)
        return CheckpointPath(text, text, is_linked=in_background and "://" not in text and _has_links_beside(text))
    hidden = _hidden(text, _SAVING)
    try:
        os.makedirs(os.path.dirname(text), exist_ok=True)
        _remove_hidden(hidden)
    except OSError as error:
        raise UnavailableError(
            f"{text}: no checkpoint can be written beside it: {error}. Make room there, or save elsewhere"
        ) from error
    return CheckpointPath(text, hidden, is_linked=in_background and _has_links_beside(text))


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint, of Lightning itself too; do nothing if there is none.

    On a disk it is gone at once. At a URL its manifest goes first, so what a kill leaves is no checkpoint.

    Raises:
        UnavailableError: Storage failed.
    """
    text = local_path(path)
    if "://" in text:
        files = get_filesystem(text)
        if files.exists(f"{text}/{_MANIFEST}"):
            files.rm_file(f"{text}/{_MANIFEST}")
        if files.exists(text):
            files.rm(text, recursive=True)
        return
    if not os.path.lexists(text):
        return
    hidden = _hidden(text, _REMOVED)
    try:
        _remove_hidden(hidden)
        os.rename(text, hidden)
        _make_durable(os.path.dirname(text))
        _remove_hidden(hidden)
    except OSError as error:
        raise UnavailableError(f"{text}: could not be removed: {error}") from error


def restore(path: str) -> None:
    """Give a file or a link its name again, if a kill came while a checkpoint took its place; as `_take_place` says."""
    if "://" not in path and not os.path.lexists(path):
        with suppress(OSError):
            os.rename(_hidden(path, _REPLACED), path)


def tidy(folder: str) -> None:
    """Remove what killed removals, and killed replacements of files and links, have left in a folder of checkpoints."""
    with suppress(OSError):
        names = os.listdir(folder)
        taken = {_hidden(name, prefix) for name in names for prefix in (_REPLACED, _SAVING)}
        for name in names:
            path = os.path.join(folder, name)
            # A folder that is saved, perhaps by another job, stays. So does a file whose place nothing has taken.
            is_replaced = name in taken and (os.path.islink(path) or os.path.isfile(path))
            if name.startswith(_REMOVED) or is_replaced:
                with suppress(OSError):
                    _remove_hidden(path)


def is_of_lightning(path: str) -> bool:
    """Return whether Lightning itself wrote what is at a path: one file, or a folder of DCP."""
    return "://" not in path and (os.path.isfile(path) or os.path.isfile(os.path.join(path, ".metadata")))


def local_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a local path, or the URL of a store."""
    text = os.fspath(path)
    if not text:
        raise InvalidError(f"path={text!r}; expected a path or URL")
    text = text.removeprefix("file://")
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def _has_links_beside(path: str) -> bool:
    """Return whether links to checkpoints are in the folder of a path, or one above: names may have folders in them."""
    folder = os.path.dirname(path)
    for place in (folder, os.path.dirname(folder)):
        with suppress(OSError), os.scandir(place) as entries:
            if any(entry.is_symlink() and entry.name.endswith(".ckpt") for entry in entries):
                return True
    return False


def _require_replaceable(path: str) -> None:
    """Refuse a folder that the save itself would not refuse: it knows neither Lightning nor other integrations."""
    if is_of_lightning(path):
        raise InvalidError(
            f"{path}: is a folder that Lightning wrote by DCP; expected a checkpoint of Holdfast, or nothing. "
            "Nothing was touched; give the folder another name, and resume from there"
        )
    try:
        HOST.require_own_root(holdfast.open_checkpoint(path))
    except (CorruptError, MissingError):
        pass  # Damaged, or cut off: it may be replaced.
    except InvalidError as error:
        raise InvalidError(f"{error}. It was not replaced, and nothing was touched; save to another folder") from error


def _take_place(new: str, path: str) -> str:
    """Move a folder to the path of a file or link; return where that is now.

    The two change places at once, where the system can do that. Elsewhere, as on some network file systems, nobody can
    move a folder over a file: in between, the path has nothing, and `restore` mends that after a kill.
    """
    if _exchange(new, path):
        return new
    old = _hidden(path, _REPLACED)
    os.rename(path, old)
    try:
        os.rename(new, path)
    except OSError:
        os.rename(old, path)
        raise
    return old


_RENAMEAT2 = getattr(ctypes.CDLL(None), "renameat2", None)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Of Linux."""


def _exchange(one: str, other: str) -> bool:
    """Let two paths change places; return whether the system could."""
    if _RENAMEAT2 is None:
        return False
    result: int = _RENAMEAT2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return result == 0


def _hidden(path: str, prefix: str) -> str:
    parent, name = os.path.split(path)
    return os.path.join(parent, prefix + hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16])


def _remove_hidden(path: str) -> None:
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.isdir(path):
        shutil.rmtree(path, onerror=_go_on_if_gone)


def _go_on_if_gone(call: object, path: str, error: tuple[type[BaseException], BaseException, object]) -> None:
    """Raise an error of a removal, unless another rank or job removes the same files: each one tidies at its end."""
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def _make_durable(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
