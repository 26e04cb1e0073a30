"""The URL of an object store: scheme, bucket and prefix."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.errors import InvalidError, printable

SCHEMES = {"s3": "s3", "gs": "gcs", "az": "azure"}
"""By scheme, the extra of this package that brings what it needs."""

KEY_BYTES_MAX = 1024
"""Longest name of an object, in every store of these three vendors."""

_BUCKET = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,253}[A-Za-z0-9])?")
_PREFIX_PART = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._=+@-]+")


@dataclass(frozen=True, slots=True)
class Address:
    """A folder in an object store."""

    scheme: str
    """`s3`, `gs` or `az`."""

    bucket: str
    """The bucket, or Azure's container."""

    prefix: str
    """What every key begins with: empty, or ending in a slash."""

    @property
    def url(self) -> str:
        """The folder as a URL, without a slash at the end."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")


def address_of(url: str) -> Address:
    """Return the address that a URL names.

    Raises:
        InvalidError: It has credentials, a query, or characters that two tools would read differently. No message
            repeats what may be a password.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    if "@" in bucket:
        raise InvalidError(
            f"{scheme}://…@{_shown(bucket.rpartition('@')[2])}: the URL has a user or a password; expected none. "
            "Credentials come from the vendor's variables and files only (docs/stores.md). Change that password: it is "
            "in your history now"
        )
    if not _BUCKET.fullmatch(bucket):
        raise InvalidError(
            f"{scheme}://{_shown(bucket)}: expected {scheme}://BUCKET/FOLDER, with a bucket of letters, digits, '.', "
            "'_' and '-'"
        )
    parts = path.rstrip("/").split("/") if path.rstrip("/") else []
    for part in parts:
        if not _PREFIX_PART.fullmatch(part):
            raise InvalidError(
                f"{scheme}://{bucket}/…/{_shown(part)}: expected folders of letters, digits and ._=+@-, neither empty "
                "nor '.' nor '..'"
            )
    prefix = "".join(f"{part}/" for part in parts)
    if len(prefix) > KEY_BYTES_MAX // 2:
        raise InvalidError(
            f"{scheme}://{bucket}/{prefix[:60]}…: a folder of {len(prefix)} characters; expected at most "
            f"{KEY_BYTES_MAX // 2}, since a key has at most {KEY_BYTES_MAX} in all"
        )
    return Address(scheme, bucket, prefix)


def _shown(text: str) -> str:
    """Return a part of a URL for a message: no query, which may be signed."""
    return repr(printable(re.split("[?#]", text)[0])[:100])
