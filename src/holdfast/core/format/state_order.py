"""The order of the names in a state, as numbers in a sorted list of names that writer and reader form alike."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from holdfast.base.types.values import Group
from holdfast.core.format.values.scalars import base64_document, base64_value
from holdfast.errors import CorruptError


def numbers_of(order: Iterable[str], tensors: Sequence[str], others: Iterable[str]) -> bytes:
    """Return the numbers of names in the order of their state, 4 bytes each.

    A name that the checkpoint lacks is left out.

    Args:
        order: The names, each once.
        tensors: FQNs, ascending.
        others: Tied names, and the paths of values (`paths_of`).
    """
    # A state may have 100,000 tensors and few other names: only the others are sorted in between.
    count = len(tensors)
    place_of = dict(zip(tensors, range(count), strict=True))
    between = sorted({name for name in others if name not in place_of})
    before = np.array([bisect_left(tensors, name) for name in between], dtype=np.int64)
    place_of |= zip(between, range(count, count + len(between)), strict=True)
    shifts = np.searchsorted(before, np.arange(count), side="right")
    number_at = np.concatenate([np.arange(count) + shifts, before + np.arange(len(between))])
    numbers = number_at[[place for place in map(place_of.get, order) if place is not None]]
    return numbers.astype("<u4").tobytes()


def unless_ascending(numbers: bytes) -> bytes:
    """Return the numbers that a manifest states: none if they ascend, as without a stated order."""
    values = np.frombuffer(numbers, dtype="<u4")
    return numbers if (values[1:] < values[:-1]).any() else b""


def text_of(numbers: bytes) -> str:
    """Return numbers as the text in a manifest. As a list of JSON, 30,000 numbers take 25 ms at each look at it."""
    return base64_document(numbers)


def numbers_in(text: str, where: str) -> bytes:
    """Return the numbers in a text; inverse of `text_of`.

    Raises:
        CorruptError: It is no such text.
    """
    try:
        numbers = base64_value(text)
    except ValueError as error:
        raise CorruptError(f"{where}: order is no base64 text ({error}). Read another copy") from error
    _require_whole(numbers, where)
    return numbers


def names_of(numbers: bytes, tensors: Iterable[str], others: Iterable[str], where: str) -> tuple[str, ...]:
    """Return the names of some numbers; inverse of `numbers_of`.

    Raises:
        CorruptError: A number has no name, or is cut off.
    """
    _require_whole(numbers, where)
    chosen = np.frombuffer(numbers, dtype="<u4")
    names = sorted({*tensors, *others}) if chosen.size else []
    if chosen.size and chosen.max() >= len(names):
        raise CorruptError(
            f"{where}: order has the number {chosen.max()}; expected below {len(names)}. Read another copy"
        )
    return tuple(map(names.__getitem__, chosen.tolist()))


def paths_of(group: Group, path: str = "") -> Iterator[str]:
    """Yield the path of each item of a group, and of the groups of kind `dict` and `module` below it."""
    for key, item in group.items.items():
        inner = f"{path}.{key}" if path else key
        yield inner
        if isinstance(item, Group) and item.kind in ("dict", "module"):
            yield from paths_of(item, inner)


def _require_whole(numbers: bytes, where: str) -> None:
    if len(numbers) % 4:
        raise CorruptError(
            f"{where}: order has {len(numbers)} bytes; expected numbers of 4 bytes each. Read another copy"
        )


def names_above(names: Iterable[str]) -> set[str]:
    """Return all names above some names."""
    return {name[:at] for name in names for at, letter in enumerate(name) if letter == "."}
