"""Translates what dozens of file systems raise into the five errors.

The original exception is never chained, and of its text only what may be shown is: it may repeat URLs, headers and
options.
"""

from __future__ import annotations

import errno
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.backends.stores.oserrors import KINDS
from holdfast.backends.stores.remote.redaction import names_a_secret, without_secrets
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import CheckpointError, ConflictError, InvalidError, MissingError

_Kind = tuple[type[CheckpointError], str]

_CREDENTIALS = (
    "give this user access there, or set other credentials in the files and variables of fsspec (docs/stores.md)"
)
_READ_ONLY = "this file system can only be read that way; choose another place to write to"
_CANNOT = "this file system cannot do that; choose another place, or mend its options"
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
_LASTING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EFBIG})
_LACKING = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK})
_NOT_CONNECTED = frozenset({"ConnectionRefusedError", "gaierror", "NoValidConnectionsError", "ClientConnectorError"})
_SECRET_CHARACTERS_MIN = 4
_BY_STATUS: dict[int, _Kind] = {
    401: (InvalidError, _CREDENTIALS),
    403: (InvalidError, _CREDENTIALS),
    404: (MissingError, "it does not exist"),
    405: (InvalidError, _READ_ONLY),
    409: (ConflictError, "another writer stored it; it was not touched"),
    410: (MissingError, "it does not exist"),
    412: (ConflictError, "another writer stored it; it was not touched"),
    501: (InvalidError, _READ_ONLY),
}
_BY_NAME: dict[str, _Kind] = {
    "AuthenticationException": (InvalidError, "the server does not take these credentials; " + _CREDENTIALS),
    "BadHostKeyException": (InvalidError, "the server shows another host key than the known one; look who answers"),
    "error_perm": (InvalidError, _CREDENTIALS),
}


def is_absent(error: BaseException) -> bool:
    """Return whether an exception says that there is no such file or folder."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return True
    return (isinstance(error, OSError) and error.errno in _ABSENT) or _status_of(error) in (404, 410)


def refusal(doing: str, where: str, error: BaseException, *, writes: bool = False) -> CheckpointError:
    """Return the error of Holdfast for one of a file system.

    Args:
        doing: The operation as a verb.
        where: Store and key.
        error: What the file system raised.
        writes: Whether the operation stores an object: it makes folders that are absent.
    """
    kind, act = _kind_of(error)
    if writes and kind is MissingError:
        is_refused = _status_of(error) is not None
        kind, act = (InvalidError, _READ_ONLY) if is_refused else (TemporaryError, "its folder is absent")
    said = without_secrets(str(error).split("\n", 1)[0], configured_secrets())
    text = f"could not {doing} {where}: {type(error).__name__}{f' ({said})' if said else ''}; {act}"
    if kind is not TemporaryError:
        return kind(text)
    names = {each.__name__ for each in type(error).__mro__}
    is_throttled = _status_of(error) in (429, 503) or any("Timeout" in name for name in names)
    return TemporaryError(text, is_throttled=is_throttled, may_take_effect=not names & _NOT_CONNECTED)


def _kind_of(error: BaseException) -> _Kind:
    if is_absent(error):
        return MissingError, "it does not exist"
    if isinstance(error, IsADirectoryError):
        return MissingError, "no such object, but a folder of that name"
    if isinstance(error, FileExistsError):
        return ConflictError, "another writer stored it; it was not touched"
    if isinstance(error, PermissionError):
        return InvalidError, _CREDENTIALS
    if isinstance(error, NotImplementedError):
        return InvalidError, _READ_ONLY
    if isinstance(error, TypeError) or (isinstance(error, ValueError) and "closed" not in str(error)):
        return InvalidError, _CANNOT  # A file that a connection took with it is "closed".
    if isinstance(error, OSError) and error.errno in _LACKING:
        return InvalidError, _CANNOT
    if isinstance(error, OSError) and error.errno in _LASTING:
        return KINDS[error.errno]
    status = _status_of(error)
    if status is not None and 400 <= status < 500 and status not in (408, 425, 429):
        return _BY_STATUS.get(status, (InvalidError, "look at URL and credentials"))
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    for each in type(error).__mro__:
        if each.__name__ in _BY_NAME:
            return _BY_NAME[each.__name__]
    return TemporaryError, "look at server and network"


def _status_of(error: BaseException) -> int | None:
    """Return the status of an HTTP reply that an exception is about."""
    for found in (getattr(error, "status", None), getattr(getattr(error, "response", None), "status_code", None)):
        if isinstance(found, int) and not isinstance(found, bool):
            return found
    return None


def not_opened(protocol: str, url: str, error: BaseException) -> CheckpointError:
    """Return the error for a file system that cannot be made: a package is missing, or options are wrong.

    Args:
        protocol: Name of the file system.
        url: The store.
        error: What was raised.
    """
    if isinstance(error, ImportError):
        cause = error.__cause__
        package = error.name or (cause.name if isinstance(cause, ImportError) else None)
        # The name that is imported is that of the package for the file systems known.
        command = f"'holdfast[fsspec]' {package}" if package else f"'fsspec[{protocol}]'"
        return InvalidError(
            f"{protocol}:// needs {f'the package {package}' if package else 'a package'}, which is not installed: "
            f"pip install {command}"
        )
    if isinstance(error, TypeError | ValueError):
        said = without_secrets(str(error), configured_secrets())
        return InvalidError(
            f"{url}: fsspec cannot open this file system: {said}; mend the URL, or the options of {protocol} in the "
            "files and variables of fsspec (docs/stores.md)"
        )
    return refusal("open", url, error)


def configured_secrets() -> list[str]:
    """Return the credentials in the files and variables of fsspec."""
    config: Any = importlib.import_module("fsspec.config")
    return [text for text in _secrets_in(config.conf) if len(text) >= _SECRET_CHARACTERS_MIN]


def _secrets_in(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets_in(value)
        elif names_a_secret(str(name)):
            # A user and a password, for example, are often given as a list.
            values = value if isinstance(value, list | tuple) else [value]
            yield from (each for each in values if isinstance(each, str))
