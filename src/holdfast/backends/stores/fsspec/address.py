"""The URL of a folder in a file system of fsspec."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any

from holdfast.errors import InvalidError, printable

_PROTOCOL = re.compile(r"[a-z][a-z0-9+.-]{0,40}")
_HOST = re.compile(r"(?:(?P<user>[\w.+-]+)@)?[\w.-]*(?::\d{1,5})?")
_PART = re.compile(r"(?!\.{1,2}$)[\w.,=+@~ -]+")
_LOCAL = "local"
_WITH_USERS = frozenset({"ftp", "hdfs", "sftp", "smb", "ssh", "webhdfs"})
"""Protocols whose URLs name an account of the server: that is no secret. Elsewhere a user may be a token."""

_OTHER_NAMES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}
"""Names of object stores elsewhere, and their scheme here."""


@dataclass(frozen=True, slots=True)
class FileSystemAddress:
    """A folder in a file system of fsspec."""

    protocol: str
    """Name of the file system, as fsspec knows it."""

    url: str
    """The folder as a URL, without a slash at the end."""


def file_system_address(url: str) -> FileSystemAddress:
    """Return the address that a URL names.

    Raises:
        InvalidError: It has a password, a query, or characters that two tools would read differently; fsspec is not
            installed, or knows no such protocol. No message repeats what may be a password.
    """
    protocol, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    shown = f"{printable(protocol)[:40]}://"
    _require_known(protocol, shown)
    if "@" in host:
        user = host.rpartition("@")[0]
        if ":" in user or protocol not in _WITH_USERS:
            kind = "a password" if ":" in user else "a user"
            raise InvalidError(
                f"{shown}…@{_shown(host.rpartition('@')[2])}: the URL has {kind}; expected none. Credentials come from "
                "the files and variables of fsspec only (docs/stores.md). If it was a secret, change it: it is in your "
                "history now"
            )
    if not _HOST.fullmatch(host):
        raise InvalidError(f"{shown}{_shown(host)}: expected {shown}HOST:PORT/FOLDER")
    if protocol == _LOCAL and (host or not path):
        raise InvalidError(f"{shown}{_shown(rest)}: expected {shown}/FOLDER, the folder from the root on")
    parts = path.rstrip("/").split("/") if path.rstrip("/") else []
    for part in parts:
        if not _PART.fullmatch(part):
            raise InvalidError(
                f"{shown}{host}/…/{_shown(part)}: expected folders of letters, digits, spaces and .,_=+@~-, neither "
                "empty nor '.' nor '..'"
            )
    return FileSystemAddress(protocol, f"{protocol}://{host}{'/' if slash and parts else ''}{'/'.join(parts)}")


def _require_known(protocol: str, shown: str) -> None:
    if protocol in _OTHER_NAMES:
        raise InvalidError(f"{shown}: expected {_OTHER_NAMES[protocol]}://, which is the same store here")
    if not _PROTOCOL.fullmatch(protocol):
        raise InvalidError(f"path: scheme {shown} is not supported; expected a folder, or a URL (docs/stores.md)")
    try:
        registry: Any = importlib.import_module("fsspec.registry")
    except ImportError as error:
        raise InvalidError(
            f"path: scheme {shown} is not supported without fsspec: pip install 'holdfast[fsspec]'; expected a folder, "
            "file://, memory://, s3://, gs://, az://"
        ) from error
    if protocol not in registry.known_implementations and protocol not in registry.registry:
        raise InvalidError(
            f"path: scheme {shown} is not supported, and fsspec does not know it; expected a folder, file://, "
            "memory://, s3://, gs://, az://, or a protocol of fsspec such as sftp://, hdfs://, webhdfs://"
        )


def _shown(text: str) -> str:
    """Return a part of a URL for a message: no query, which may be signed."""
    return repr(printable(re.split("[?#]", text)[0])[:100])
