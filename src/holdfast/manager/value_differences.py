"""Values of two checkpoints that are not tensors, against each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holdfast.repository import values
from holdfast.spec.diff import ValueDiff


def value_diffs(a: object, b: object, path: str = "") -> Iterator[ValueDiff]:
    """Yield every value that differs, by path; containers of one kind are entered.

    Mappings are compared by key, whatever their order and class; lists and tuples of one length item by item; anything
    else as it would be stored, so that `1`, `1.0` and `True` differ, and a NaN equals itself.
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(each for each in b if each not in a)]:
            where = _below(path, key)
            if key in a and key in b:
                yield from value_diffs(a[key], b[key], where)
            else:
                yield ValueDiff(where, key in a, key in b, a.get(key), b.get(key))
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and (type(a), len(a)) == (type(b), len(b)):
        for number, (own, other) in enumerate(zip(a, b, strict=True)):
            yield from value_diffs(own, other, f"{path}[{number}]")
    elif not _same(a, b, path):
        yield ValueDiff(path, True, True, a, b)


def value_document(value: object) -> object:
    """Return a value as a JSON document, tagged as docs/values.md says."""
    return values.encode(value, "")


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
