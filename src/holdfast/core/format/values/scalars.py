"""Scalars that JSON cannot express: for each type a tag, and functions from value to content and back.

These functions do not know the path of their value. They raise ValueError, and `format.values.values` adds the path.
"""

from __future__ import annotations

import binascii
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from functools import partial
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

from holdfast.core.format.values.json_text import INT_MAX, INT_MIN, is_json_scalar

_NAN = bytes.fromhex("7ff8000000000000")
_INT = re.compile("-?0x[1-9a-f][0-9a-f]*")


@dataclass(frozen=True, slots=True)
class ScalarCodec:
    """The encoding of one type."""

    tag: str
    """The only key of the JSON object, with the dollar sign."""

    encode: Callable[[Any], object]
    """Returns the content for a value of exactly this type; raises ValueError if it cannot be encoded."""

    decode: Callable[[object], object]
    """Returns the value of a content; raises ValueError, TypeError or OverflowError if the content is wrong."""


def base64_document(data: bytes | bytearray | memoryview) -> str:
    """Return bytes as base64 text."""
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def base64_value(content: object, length_bytes: int | None = None) -> bytes:
    """Return the bytes of a base64 text. The length is checked before any memory is allocated.

    Raises:
        ValueError: Not base64, or not of `length_bytes`.
    """
    if type(content) is not str:
        raise ValueError("expected base64 text")
    if length_bytes is not None and len(content) != (length_bytes + 2) // 3 * 4:
        raise ValueError(f"expected the base64 text of {length_bytes} bytes, found {len(content)} characters")
    data = binascii.a2b_base64(content, strict_mode=True)
    if length_bytes is not None and len(data) != length_bytes:
        raise ValueError(f"expected {length_bytes} bytes, found {len(data)}")
    return data


def text_document(text: str) -> object:
    """Return the document of a str: itself, or tagged if it holds surrogates."""
    return text if is_json_scalar(text) else {"$str": base64_document(text.encode("utf-8", "surrogatepass"))}


def text_value(document: object) -> str:
    """Return the str that a document encodes.

    Raises:
        ValueError: The document encodes something else.
    """
    if type(document) is dict and document.keys() == {"$str"}:
        return _decode_str(document["$str"])
    if type(document) is not str or not is_json_scalar(document):
        raise ValueError("expected text without surrogates")
    return document


def _decode_str(content: object) -> str:
    text = base64_value(content).decode("utf-8", "surrogatepass")
    if is_json_scalar(text):
        raise ValueError("tagged text holds no surrogate")
    return text


def _decode_int(content: object) -> int:
    if type(content) is not str or not _INT.fullmatch(content):
        raise ValueError("expected a hexadecimal integer such as -0x1f")
    number = int(content, 16)
    if INT_MIN <= number <= INT_MAX:
        raise ValueError("a tagged integer must be beyond 64 bits")
    return number


def _encode_float(number: float) -> str:
    bits = struct.pack(">d", number)
    if math.isnan(number):
        return "nan" if bits == _NAN else f"nan:{bits.hex()}"
    return "inf" if number > 0 else "-inf"


def _decode_float(content: object) -> float:
    if content in ("inf", "-inf"):
        return float(str(content))
    if content == "nan":
        return float("nan")
    if type(content) is not str or not re.fullmatch("nan:[0-9a-f]{16}", content):
        raise ValueError("expected nan, nan:<16 hexadecimal digits>, inf or -inf")
    (number,) = struct.unpack(">d", bytes.fromhex(content[4:]))
    if not math.isnan(number):
        raise ValueError("the bits are not those of a NaN")
    return float(number)


def _encode_complex(number: complex) -> list[object]:
    return [part if math.isfinite(part) else {"$float": _encode_float(part)} for part in (number.real, number.imag)]


def _decode_complex(content: object) -> complex:
    parts = _list_of(content, 2)
    return complex(*(_float_part(part) for part in parts))


def _float_part(document: object) -> float:
    if type(document) is dict and document.keys() == {"$float"}:
        return _decode_float(document["$float"])
    if type(document) is not float or not math.isfinite(document):
        raise ValueError("expected two floats")
    return document


def _list_of(content: object, count: int) -> list[object]:
    if type(content) is not list or len(content) != count:
        raise ValueError(f"expected a list of {count}")
    return content


def _encode_moment(moment: datetime | time) -> object:
    zone = moment.tzinfo
    if zone is not None and (
        type(zone) is not timezone or zone.tzname(None) != timezone(zone.utcoffset(None)).tzname(None)
    ):
        raise ValueError(
            f"the time zone is {zone!r:.80}; expected a fixed offset without a name. Use astimezone(timezone.utc)"
        )
    text = moment.isoformat()
    if type(moment).fromisoformat(text).isoformat() != text:
        # Python parses an offset of less than a second as no offset.
        raise ValueError(f"Python does not parse {text} back to the same time. Use an offset of whole seconds")
    return [text, 1] if moment.fold else text


_Moment = TypeVar("_Moment", date, datetime, time)
_Folding = TypeVar("_Folding", datetime, time)


def _folded(parse: Callable[[str], _Folding], content: object) -> _Folding:
    if type(content) is not list:
        return _moment(parse, content)
    text, fold = _list_of(content, 2)
    if type(fold) is not int or fold != 1:
        raise ValueError("expected [ISO 8601 text, 1]")
    return _moment(parse, text).replace(fold=1)


def _moment(parse: Callable[[str], _Moment], content: object) -> _Moment:
    if type(content) is not str:
        raise ValueError("expected ISO 8601 text")
    moment = parse(content)
    if moment.isoformat() != content:
        raise ValueError(f"expected ISO 8601 text in its extended form, found {content[:40]!r}")
    return moment


def _encode_timedelta(span: timedelta) -> list[int]:
    return [span.days, span.seconds, span.microseconds]


def _decode_timedelta(content: object) -> timedelta:
    days, seconds, microseconds = (part if type(part) is int else -1 << 63 for part in _list_of(content, 3))
    span = timedelta(days=days, seconds=seconds, microseconds=microseconds)
    if _encode_timedelta(span) != content:
        raise ValueError("expected [days, seconds, microseconds], normalised")
    return span


def _path_codec(tag: str, kind: type[PurePath]) -> ScalarCodec:
    def encode(path: PurePath) -> object:
        text = str(path)
        if kind(text) != path:
            raise ValueError(f"its text {text[:80]!r} names another path; convert it to str")
        return text_document(text)

    def decode(content: object) -> PurePath:
        return kind(text_value(content))

    return ScalarCodec(tag, encode, decode)


SCALAR_CODECS: dict[type, ScalarCodec] = {
    str: ScalarCodec("$str", lambda text: base64_document(text.encode("utf-8", "surrogatepass")), _decode_str),
    int: ScalarCodec("$int", hex, _decode_int),
    float: ScalarCodec("$float", _encode_float, _decode_float),
    complex: ScalarCodec("$complex", _encode_complex, _decode_complex),
    bytes: ScalarCodec("$bytes", base64_document, base64_value),
    bytearray: ScalarCodec("$bytearray", base64_document, lambda content: bytearray(base64_value(content))),
    datetime: ScalarCodec("$datetime", _encode_moment, partial(_folded, datetime.fromisoformat)),
    date: ScalarCodec("$date", date.isoformat, partial(_moment, date.fromisoformat)),
    time: ScalarCodec("$time", _encode_moment, partial(_folded, time.fromisoformat)),
    timedelta: ScalarCodec("$timedelta", _encode_timedelta, _decode_timedelta),
    type(Path()): _path_codec("$path", type(Path())),
    PurePosixPath: _path_codec("$pure_posix_path", PurePosixPath),
    PureWindowsPath: _path_codec("$pure_windows_path", PureWindowsPath),
}
"""By exact type. A str, int or float is looked up here only if JSON cannot hold it."""
