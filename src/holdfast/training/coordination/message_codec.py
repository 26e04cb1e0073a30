"""Encodes and decodes the typed values that the ranks of one job send each other."""

from __future__ import annotations

import json
from typing import TypeVar

import msgspec

from holdfast.base.types.inspected import inspected
from holdfast.training.coordination.job import error_from, error_text

T = TypeVar("T")


def encode_message(value: object) -> bytes:
    """Return a dataclass as ASCII JSON, with errors as `error_text` writes them.

    ASCII, because the compare-and-set of c10d's stores passes text only. The JSON of the standard library, because
    names in another system's checkpoint may contain lone surrogates, which msgspec's encoders refuse.

    Raises:
        TypeError: The value holds something that no other rank can decode.
    """
    return json.dumps(msgspec.to_builtins(value, str_keys=True, enc_hook=_builtin)).encode("ascii")


def decode_message(data: bytes, kind: type[T]) -> T:
    """Return the value of type `kind` that `encode_message` wrote."""
    message = json.loads(data)
    return msgspec.convert(
        message, inspected(kind, msgspec.msgpack.Decoder), str_keys=True, dec_hook=lambda _, text: error_from(text)
    )


def _builtin(value: object) -> object:
    """Convert a value that msgspec refuses to a value that it accepts."""
    if isinstance(value, BaseException):
        return error_text(value)
    # msgspec refuses subclasses of these. A caller may pass one: numpy.str_ as a name, an int subclass as a step.
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} cannot be sent to another rank; expected a plain value or an error")
