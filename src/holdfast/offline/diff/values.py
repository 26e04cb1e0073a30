"""Values of two checkpoints that are not tensors, against each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping

from holdfast.format.values import values
from holdfast.types.diff import ValueDiff


def value_diffs(a: object, b: object, path: str = "") -> Iterator[ValueDiff]:
    """Yield every value that differs, by path; containers of one kind are entered.

    Mappings are compared by key, whatever their order and class; lists and tuples of one length item by item; anything
    else, and every key, as it would be stored, so that `1`, `1.0` and `True` differ, and a NaN equals itself.
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        of_a, of_b = _by_stored_key(a, path), _by_stored_key(b, path)
        for stored, (key, own) in of_a.items():
            if stored in of_b:
                yield from value_diffs(own, of_b[stored][1], _below(path, key))
            else:
                yield ValueDiff(_below(path, key), True, False, own, None)
        for stored, (key, other) in of_b.items():
            if stored not in of_a:
                yield ValueDiff(_below(path, key), False, True, None, other)
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and (type(a), len(a)) == (type(b), len(b)):
        for number, (own, other) in enumerate(zip(a, b, strict=True)):
            yield from value_diffs(own, other, f"{path}[{number}]")
    elif not _same(a, b, path):
        yield ValueDiff(path, True, True, a, b)


def value_document(value: object) -> object:
    """Return a value as a JSON document, tagged as docs/values.md says."""
    return values.encode(value, "")


def _by_stored_key(mapping: Mapping[object, object], path: str) -> dict[Hashable, tuple[object, object]]:
    """Return keys and values by how the key is stored; keys stored alike, which only NaNs are, are numbered."""
    met: Counter[Hashable] = Counter()
    found: dict[Hashable, tuple[object, object]] = {}
    for key, value in mapping.items():
        stored = key if isinstance(key, str) else (values.dumps(values.encode(key, path)),)
        found[stored, met[stored]] = key, value
        met[stored] += 1
    return found


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
