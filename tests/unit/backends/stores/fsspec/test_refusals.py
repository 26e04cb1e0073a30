"""What dozens of file systems raise becomes one of the five errors, and shows no credential."""

from __future__ import annotations

import errno
import ftplib
import io
import os
import socket

import fsspec.config
import pytest

from holdfast.backends.stores.fsspec.refusals import refusal
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import CheckpointError, ConflictError, InvalidError, MissingError, UnavailableError


class Reply:
    def __init__(self, status: int) -> None:
        self.status_code = status


class HTTPError(OSError):
    """As requests and huggingface_hub raise it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} for url")
        self.response = Reply(status)


class ClientResponseError(Exception):
    """As aiohttp raises it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status}, message")
        self.status = status


class SSHException(Exception):
    """As paramiko raises it."""


class AuthenticationException(SSHException):
    """As paramiko raises it."""


def of(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@pytest.mark.parametrize(
    ("error", "kind"),
    (
        (FileNotFoundError("/a"), MissingError),
        (NotADirectoryError("/a"), MissingError),
        (IsADirectoryError("/a"), MissingError),
        (of(errno.ENOENT), MissingError),
        (ClientResponseError(404), MissingError),
        (FileExistsError(), ConflictError),
        (HTTPError(412), ConflictError),
        (PermissionError("AccessControlException"), InvalidError),
        (of(errno.EACCES), InvalidError),
        (of(errno.EROFS), InvalidError),
        (of(errno.ENAMETOOLONG), InvalidError),
        (NotImplementedError("File mode not supported"), InvalidError),
        (io.UnsupportedOperation("not writable"), InvalidError),
        (of(errno.EOPNOTSUPP), InvalidError),
        (TypeError("pipe_file() got an unexpected keyword argument 'mode'"), InvalidError),
        (ValueError("unsupported mode"), InvalidError),
        (HTTPError(401), InvalidError),
        (HTTPError(403), InvalidError),
        (ClientResponseError(405), InvalidError),
        (ClientResponseError(400), InvalidError),
        (ClientResponseError(501), InvalidError),
        (AuthenticationException("Authentication failed."), InvalidError),
        (ftplib.error_perm("530 Login incorrect"), InvalidError),
        (of(errno.ENOSPC), UnavailableError),
        (of(errno.EDQUOT), UnavailableError),
    ),
    ids=str,
)
def test_what_lasts_is_not_tried_again(error: Exception, kind: type[CheckpointError]) -> None:
    assert type(refusal("store", "sftp://host/key", error)) is kind


@pytest.mark.parametrize(
    ("error", "is_throttled", "may_take_effect"),
    (
        (ConnectionResetError(errno.ECONNRESET, "reset"), False, True),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), False, False),
        (socket.gaierror(-2, "Name or service not known"), False, False),
        (TimeoutError(), True, True),
        (HTTPError(503), True, True),
        (HTTPError(429), True, True),
        (ClientResponseError(500), False, True),
        (of(errno.EIO), False, True),
        (OSError("Failure"), False, True),
        (EOFError(), False, True),
        (ValueError("I/O operation on closed file"), False, True),
        (SSHException("Server connection dropped"), False, True),
        (RuntimeError("Cannot create file. Name node is in safe mode."), False, True),
    ),
    ids=repr,
)
def test_what_may_pass_is_tried_again(error: Exception, is_throttled: bool, may_take_effect: bool) -> None:
    found = refusal("store", "sftp://host/key", error)
    assert isinstance(found, TemporaryError)
    assert (found.is_throttled, found.may_take_effect) == (is_throttled, may_take_effect)
    assert "could not store sftp://host/key" in str(found)


def test_a_writer_makes_its_folders() -> None:
    assert type(refusal("store", "sftp://host/key", of(errno.ENOENT), writes=True)) is TemporaryError
    assert type(refusal("store", "http://host/key", ClientResponseError(404), writes=True)) is InvalidError


def test_no_credential_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "sftp", {"password": "open sesame", "nested": {"api_key": "k-12345"}})
    monkeypatch.setenv("SOME_TOKEN", "tok-12345678")
    monkeypatch.setitem(
        fsspec.config.conf,
        "webdav",
        {
            "auth": ["someone", "w-12345"],
            "client": {"headers": {"Authorization": "Bearer b-12345"}},
            "passwd": "p-12345",
        },
    )
    held = "open sesame, k-12345, w-12345, Bearer b-12345, p-12345 and tok-12345678"
    text = f"401 for https://me:pass@host/x?delegation=abc#1 with {held}\nmore"
    said = str(refusal("read", "sftp://host/key", OSError(text)))
    for secret in ("pass@", "abc", "sesame", "k-12345", "w-12345", "b-12345", "p-12345", "tok-1", "more"):
        assert secret not in said
