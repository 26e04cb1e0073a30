"""Values that are not tensors, as an indented tree of lines. Long values are cut and their length is printed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

import numpy as np

from holdfast.base.types.values import FrameworkValue, Group, PerRankRef, Skipped, TensorRef
from holdfast.errors import printable

TEXT_MAX = 100
"""Characters of one value that are shown."""

ITEMS_MAX = 8
"""Items of a long sequence or array that are shown."""

_CUT = "…"

_SUBCLASS = "torch.subclass"
"""Kind of a value that stands for a tensor subclass (docs/values.md)."""


def value_lines(values: Mapping[str, object], *, whole_names: bool) -> list[str]:
    """Return the lines of a tree, without control characters.

    Equal children of one dict are printed once, under all their names, if none of them is cut: the hyperparameters of
    a thousand parameters take a few lines.

    Example:
        print(holdfast.api.value_lines(holdfast.open_checkpoint("checkpoint").objects, whole_names=False))
    Args:
        values: The root.
        whole_names: Print every name of equal children, rather than the first two and a count.
    """
    return _block(((_name(key), value) for key, value in values.items()), whole_names)


def value_text(value: object) -> str:
    """Return a value in one line, without control characters; a long value is cut.

    Example:
        print(holdfast.api.value_text([1, 2, 3]))
    """
    shown = _shown(value, whole_names=False)
    return shown if isinstance(shown, str) else _clipped("; ".join(line.strip() for line in shown))


def _block(items: Iterable[tuple[str, object]], whole_names: bool) -> list[str]:
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, value in items:
        shown = _shown(value, whole_names)
        if isinstance(shown, str):
            key: tuple[str, ...] = (f"{name}: {shown}",)
        elif any(_CUT in line for line in shown):
            # Values may differ beyond the cut, so cut values never count as equal.
            key = (f"{name}:", *(f"  {line}" for line in shown))
        else:
            key = ("", *(f"  {line}" for line in shown))
        alike.setdefault(key, []).append(name)
    lines: list[str] = []
    for (head, *below), names in alike.items():
        lines += [head or f"{_joined(names, whole_names)}:", *below]
    return lines


def _joined(names: list[str], whole: bool) -> str:
    if whole or len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2:,} more alike"


def _name(key: object) -> str:
    return printable(key) if isinstance(key, str) else _leaf(key)


def _shown(value: object, whole_names: bool) -> str | list[str]:
    """Return a value in one line, or as a block of lines."""
    if isinstance(value, Group):
        value = value.items
    if isinstance(value, Mapping):
        return _block(((_name(key), each) for key, each in value.items()), whole_names) or "{}"
    if isinstance(value, list | tuple | set | frozenset):
        if any(isinstance(each, Mapping | list | tuple | set | frozenset | Group) for each in value):
            return _block(((f"[{at}]", each) for at, each in enumerate(value)), whole_names)
        return _sequence(value)
    return _leaf(value)


def _sequence(value: list[object] | tuple[object, ...] | set[object] | frozenset[object]) -> str:
    opening, closing = ("[", "]") if isinstance(value, list) else ("(", ")") if isinstance(value, tuple) else ("{", "}")
    shown = [_leaf(each) for each in islice(value, 4 * ITEMS_MAX)]
    if len(shown) == len(value) and sum(map(len, shown)) <= TEXT_MAX:
        return f"{opening}{', '.join(shown)}{closing}"
    first = ", ".join(shown[:ITEMS_MAX])
    return f"{opening}{first}, {_CUT}{closing} ({len(value):,} items)"


def _leaf(value: object) -> str:
    if isinstance(value, str):
        text = repr(value[:TEXT_MAX])
        return text if len(value) <= TEXT_MAX else f"{text}{_CUT} ({len(value):,} characters)"
    if isinstance(value, bytes | bytearray):
        return f"{len(value):,} bytes: {value[:16].hex()}{_CUT * (len(value) > 16)}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        # Python refuses to convert huge integers to decimal.
        return f"{hex(value)[:40]}{_CUT} ({value.bit_length():,} bits)"
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, np.generic):
        return _clipped(f"{value.dtype} {value}")
    if isinstance(value, TensorRef):
        return f"tensor {printable(value.fqn)}"
    if isinstance(value, PerRankRef):
        return "one value of each rank"
    if isinstance(value, Skipped):
        return "left out of the checkpoint"
    if isinstance(value, FrameworkValue):
        return _framework_value(value)
    return _clipped(repr(value) if value is None or isinstance(value, bool | int | float | complex) else str(value))


def _array(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> str:
    first = ", ".join(str(each) for each in array.flat[:ITEMS_MAX].tolist())
    shape = ", ".join(map(str, array.shape))
    return _clipped(f"{array.dtype} array [{shape}]: {first}") + f", {_CUT}" * (array.size > ITEMS_MAX)


def _framework_value(value: FrameworkValue) -> str:
    if value.kind == _SUBCLASS and isinstance(value.value, Mapping):
        return _clipped(f"tensor subclass {_framework_part(value.value.get('class'))}")
    parts = value.value.values() if isinstance(value.value, Mapping) else [value.value]
    return _clipped(f"{value.kind}: {' '.join(map(_framework_part, parts))}")


def _framework_part(content: object) -> str:
    if isinstance(content, bytes | int):
        return _leaf(content)
    try:
        return str(content)
    except ValueError:
        return _CUT  # It holds a huge integer, which Python refuses to convert to decimal.


def _clipped(text: str) -> str:
    cut = text if len(text) <= TEXT_MAX else text[:TEXT_MAX] + _CUT
    return printable(cut)
