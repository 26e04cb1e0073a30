"""Strict JSON text: `loads` returns exactly what `dumps` wrote, and refuses everything else."""

from __future__ import annotations

import json
import math
import re

import msgspec
import numpy as np

from holdfast.errors import CorruptError, InvalidError

INT_MIN = -(1 << 63)
INT_MAX = (1 << 63) - 1
"""Larger integers are never written as JSON numbers: most readers would round or refuse them."""

TEXT_DEPTH_MAX = 256
"""Nested arrays and objects in one text. Far below the limit of an interpreter's stack."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_INT_DIGITS_MAX = len(str(INT_MIN))


def is_json_scalar(value: object) -> bool:
    """Return whether JSON text holds a value without loss, so that the value is its own document.

    True for None, a bool, an int of 64 bits, a finite float, and a str without surrogates (JSON escapes would join
    two lone surrogates into one character).
    """
    if type(value) is str:
        return value.isascii() or _SURROGATE.search(value) is None
    if type(value) is int:
        return INT_MIN <= value <= INT_MAX
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) is bool


def dumps(document: object, *, indent: int | None = None) -> bytes:
    """Return a document as UTF-8 JSON text.

    Args:
        document: dicts with str keys, lists, and plain scalars.
        indent: Spaces per level, for people; None writes the compact form.
    Raises:
        InvalidError: The document holds a value that `loads` would not return unchanged.
    """
    _check_document(document)
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
    # `json` indents in Python, msgspec in C. The bytes are the same.
    return text if indent is None else msgspec.json.format(text, indent=indent)


def loads(data: bytes) -> object:
    """Return the document of a UTF-8 JSON text.

    Raises:
        CorruptError: The text is not JSON, repeats a key, nests deeper than `TEXT_DEPTH_MAX`, or holds a number
            that is not finite or an integer beyond 64 bits.
    """
    try:
        text = data.decode("utf-8")
        if _text_depth(data) > TEXT_DEPTH_MAX:
            raise ValueError(f"nested deeper than {TEXT_DEPTH_MAX}")
        document: object = json.loads(
            text, object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant
        )
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"JSON text of {len(data)} bytes: {error}; read another copy") from error
    return document


def _check_document(document: object) -> None:
    """Refuse values that json.dumps would silently change: tuples, keys that are not str, subclasses, huge integers."""
    pending = [(document, 1)]
    while pending:
        value, depth = pending.pop()
        if is_json_scalar(value):
            continue
        if depth > TEXT_DEPTH_MAX:
            raise InvalidError(f"document: nested deeper than {TEXT_DEPTH_MAX}, or it contains itself")
        if type(value) is list:
            pending.extend((item, depth + 1) for item in value)
        elif type(value) is dict:
            for key, item in value.items():
                if type(key) is not str or not is_json_scalar(key):
                    raise InvalidError(f"document: key {key!r:.100} is not a str without surrogates; encode it first")
                pending.append((item, depth + 1))
        else:
            raise InvalidError(f"document: {value!r:.100} of type {type(value)} is not plain JSON; encode it first")


def _text_depth(data: bytes) -> int:
    """Return an upper bound of the nesting of a JSON text, without parsing it."""
    opening = data.count(b"[") + data.count(b"{")
    if opening <= TEXT_DEPTH_MAX:
        return opening
    outside = b"".join(data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    brackets = np.frombuffer(outside.translate(None, _NOT_BRACKETS), np.uint8)
    steps = np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1)
    return int(np.cumsum(steps).max(initial=0))


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError(f"a key is repeated among {[key[:80] for key, _ in pairs[:10]]}")
    return content


def _integer(digits: str) -> int:
    # Check the length first: int() of thousands of digits takes quadratic time, or raises.
    if len(digits) > _INT_DIGITS_MAX or not INT_MIN <= int(digits) <= INT_MAX:
        raise ValueError(f"integer {digits[:40]} is beyond 64 bits")
    return int(digits)


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"number {digits[:40]} is beyond a double")
    return number


def _constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
