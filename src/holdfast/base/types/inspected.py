"""Has msgspec inspect a type once, on one thread, before any thread converts a value to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from holdfast.base.interrupts import GUARD

_T = TypeVar("_T")

_inspected: set[object] = set()


def inspected(kind: type[_T], decoder_of: Callable[[type[_T]], object]) -> type[_T]:
    """Return a type that msgspec has inspected, with all types that it refers to.

    Call it wherever `msgspec.convert` or a decode function gets a class. msgspec inspects a class at its first use, and
    stores the result on the class before it is complete. A second thread that uses the class meanwhile reads null
    pointers, and the process dies by a segmentation fault (seen with msgspec 0.22).

    Args:
        kind: The type.
        decoder_of: A decoder class of msgspec: making a decoder of a type inspects it.
    """
    if kind not in _inspected:
        with GUARD:
            decoder_of(kind)
            _inspected.add(kind)
    return kind
