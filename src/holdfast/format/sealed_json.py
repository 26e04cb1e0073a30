"""JSON documents that end in their own digest, and their fields, each checked for its type."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from holdfast.errors import CorruptError, InvalidError
from holdfast.format.digest import hex_digest_of
from holdfast.format.values import values
from holdfast.types.manifest import FORMAT_MAJOR

_CLOSING = re.compile(rb'(.*),\n "digest": "([0-9a-f]{32})"\n}\n', re.DOTALL)


_ENDING = re.compile(rb',\n "digest": "([0-9a-f]{32})"\n}\n\Z')


_T = TypeVar("_T")


def sealed(document: Mapping[str, object]) -> bytes:
    """Return a JSON object as text whose last field, `digest`, is the xxh3-128 of everything before it."""
    text = values.dumps(dict(document), indent=1)
    assert text.endswith(b"\n}"), "an object of at least one field, indented by one"
    body = text[:-2]
    return body + b',\n "digest": "' + hex_digest_of(body).encode() + b'"\n}\n'


def unsealed(data: bytes, where: str) -> tuple[dict[str, object], str]:
    """Return the JSON object of a sealed text, and its digest.

    Raises:
        CorruptError: The text is not whole, or not what its digest says.
    """
    match = _CLOSING.fullmatch(data)
    if match is None:
        raise CorruptError(f"{where}: does not end in its own digest; it is truncated, damaged or not ours")
    body, stated = match[1], match[2].decode()
    found = hex_digest_of(body)
    if found != stated:
        raise CorruptError(f"{where}: bytes 0–{len(body)} hash to {found}; expected {stated}. Read another copy")
    document = values.loads(body + b"\n}")
    if not isinstance(document, dict) or "digest" in document:
        raise CorruptError(f"{where}: not a JSON object with one digest")
    return document, stated


def stated_digest(data: bytes) -> str | None:
    """Return the digest that a sealed text ends in, whether it is true or not; None if it ends in none."""
    match = _ENDING.search(data)
    return match[1].decode() if match else None


def check_format(document: Mapping[str, object], kind: str, where: str) -> None:
    """Refuse a document of another kind or a newer major version.

    Raises:
        CorruptError: It carries no format.
        InvalidError: It is of another major version or kind.
    """
    header = document.get("holdfast")
    version = header.get("format") if isinstance(header, dict) else None
    if not isinstance(header, dict) or not isinstance(version, list) or list(map(type, version)) != [int, int]:
        raise CorruptError(f"{where}: carries no Holdfast format version")
    if version[0] != FORMAT_MAJOR:
        raise InvalidError(
            f"{where}: format {'.'.join(map(str, version))}; this Holdfast reads format {FORMAT_MAJOR}. "
            f"Read it with a Holdfast of major format {version[0]}"
        )
    if header.get("kind") != kind:
        raise InvalidError(f"{where}: is a {str(header.get('kind'))[:80]!r}; expected a {kind!r}")


class Fields:
    """Fields of a document, each taken only if it is what it must be."""

    def __init__(self, document: Mapping[str, object], where: str) -> None:
        self._document, self._where = document, where

    def of(self, name: str, kind: type[_T], allowed: Callable[[_T], bool] = lambda _: True) -> _T:
        """Return a field of one type."""
        value = self._document.get(name)
        if not isinstance(value, kind) or not allowed(value):
            raise CorruptError(f"{self._where}: {name} is {str(value)[:80]!r}; expected a valid {kind.__name__}")
        return value

    def texts(self, name: str) -> dict[str, str]:
        """Return a field that maps texts to texts."""

        def plain_texts(found: dict[object, object]) -> bool:
            return all(isinstance(each, str) and values.is_json_scalar(each) for pair in found.items() for each in pair)

        return self.of(name, dict, plain_texts)

    def whole(self, name: str, largest: int) -> int:
        """Return a whole number from 0 on."""
        return self.of(name, int, lambda number: not isinstance(number, bool) and 0 <= number <= largest)
