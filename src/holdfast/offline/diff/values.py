"""Compares the values of two checkpoints that are not tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping

from holdfast.base.types.diff import ValueDiff
from holdfast.core.format.values import values


def value_diffs(a: object, b: object, path: str = "") -> Iterator[ValueDiff]:
    """Yield every value that differs, by path, comparing containers of one kind item by item.

    Mappings are compared by key, regardless of order and class; lists and tuples of equal length by position. Every
    other value, and every key, is compared in its stored form: `1`, `1.0` and `True` differ, and a NaN equals itself.
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        items_a, items_b = _by_stored_key(a, path), _by_stored_key(b, path)
        for stored, (key, value_a) in items_a.items():
            if stored in items_b:
                yield from value_diffs(value_a, items_b[stored][1], _below(path, key))
            else:
                yield ValueDiff(_below(path, key), True, False, value_a, None)
        for stored, (key, value_b) in items_b.items():
            if stored not in items_a:
                yield ValueDiff(_below(path, key), False, True, None, value_b)
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and (type(a), len(a)) == (type(b), len(b)):
        for number, (value_a, value_b) in enumerate(zip(a, b, strict=True)):
            yield from value_diffs(value_a, value_b, f"{path}[{number}]")
    elif not _same(a, b, path):
        yield ValueDiff(path, True, True, a, b)


def value_document(value: object) -> object:
    """Return a value as a JSON document with the tags of docs/values.md.

    Example:
        for value in holdfast.diff("checkpoint", "run-7/step-000000000300").values:
            print(value.path, json.dumps(holdfast.api.value_document(value.b)))
    """
    return values.encode(value, "")


def _by_stored_key(mapping: Mapping[object, object], path: str) -> dict[Hashable, tuple[object, object]]:
    """Return keys and values by the stored form of the key, and a number: several NaN keys have one stored form."""
    counts: Counter[Hashable] = Counter()
    items: dict[Hashable, tuple[object, object]] = {}
    for key, value in mapping.items():
        stored = key if isinstance(key, str) else (values.dumps(values.encode(key, path)),)
        items[stored, counts[stored]] = key, value
        counts[stored] += 1
    return items


def _same(a: object, b: object, path: str) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, str | int | None):
        return a == b
    return values.dumps(values.encode(a, path)) == values.dumps(values.encode(b, path))


def _below(path: str, key: object) -> str:
    if not isinstance(key, str):
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else key
