"""Values out of a pickle or a JSON document, converted to the types that a reader expects."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from holdfast.base.types.inspected import inspected
from holdfast.errors import CorruptError

COUNT_MAX = 1 << 62
"""Above every count of elements or bytes in a file."""

DIMENSIONS_MAX = 64
"""The most dimensions of a torch tensor."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=COUNT_MAX)]
"""A number of elements or bytes; neither a bool nor a float."""

Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=DIMENSIONS_MAX)]
"""Elements along each dimension, or the coordinates of an element."""

_T = TypeVar("_T")


def typed(value: object, kind: type[_T], where: str) -> _T:
    """Return a value as the type that a reader expects; fields that the type lacks are ignored.

    Args:
        value: Plain values, as a pickle or a JSON document holds them. `object` in `kind` passes anything through.
        kind: A `msgspec.Struct` for a dict of fields, or a container of such types.
        where: File and field, for messages.
    Raises:
        CorruptError: The value is of another type; the message names the field, and both types.
    """
    # msgspec is strict: it takes neither a bool nor a float for an int, and its messages hold no values of the file.
    try:
        return msgspec.convert(value, inspected(kind, msgspec.msgpack.Decoder))
    except msgspec.ValidationError as error:
        raise CorruptError(f"{where}: {error}. Read another copy") from error
