"""The sizes of a layout: integers, each found in a checkpoint or given by the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.layouts.expression import NUMBER_MAX, Expression
from holdfast.base.layouts.rule_file import RuleFile
from holdfast.base.layouts.rule_text import SizePlace
from holdfast.errors import InvalidError

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Facts:
    """The parts of a checkpoint that have sizes."""

    values: Mapping[str, object]
    """Plain values of the checkpoint, nested."""

    tensors: Mapping[str, TensorSpec]
    """The tensors by name."""

    json: Callable[[str], Mapping[str, object] | None]
    """Returns a JSON file that lies with the checkpoint; None if there is none."""


class LayoutSizes:
    """Finds sizes by name, each once."""

    def __init__(self, file: RuleFile, given: Mapping[str, int], facts: Facts) -> None:
        self.found: dict[str, tuple[int, str]] = {}
        """Number and place of each size that was asked for."""
        self._file, self._given, self._facts = file, given, facts
        self._asked: list[str] = []
        if unknown := sorted(given.keys() - file.sizes.keys()):
            raise InvalidError(
                f"layout {file.name}: has no size {unknown[0]!r}; expected {', '.join(file.sizes) or 'none'}. "
                "Correct sizes= or --size"
            )

    def __call__(self, name: str) -> int:
        """Return a size.

        Raises:
            InvalidError: No place has the size, two places differ, or the number is not positive.
        """
        if name not in self.found:
            where = f"layout {self._file.name}, size {name}"
            if name not in self._file.sizes:
                raise InvalidError(
                    f"layout {self._file.name}: no size {name!r}; expected one of [sizes]. Correct the file"
                )
            if name in self._asked:
                raise InvalidError(f"{where}: needs itself: {' → '.join((*self._asked, name))}. Correct the file")
            self._asked.append(name)
            self.found[name] = self._find(name, where)
            self._asked.pop()
        return self.found[name][0]

    def _find(self, name: str, where: str) -> tuple[int, str]:
        places = self._file.sizes[name]
        found = [(self._given[name], f"--size {name}")] if name in self._given else []
        for place in places:
            if isinstance(place, SizePlace) and (value := self._at(place, where)) is not _ABSENT:
                found.append((_integer(value, f"{where}, from {_shown(place)}"), _shown(place)))
        for place in places if not found else ():
            if isinstance(place, Expression) and not found:
                found.append((place.value(self, where), place.text))
        if not found:
            tried = "; ".join(place.text if isinstance(place, Expression) else _shown(place) for place in places)
            raise InvalidError(
                f"{where}: found in none of its places: {tried}. Pass sizes={{{name!r}: N}} or --size {name}=N"
            )
        number, first = found[0]
        for other, second in found[1:]:
            if other != number:
                raise InvalidError(
                    f"{where}: {number} from {first}, and {other} from {second}; expected one number. Correct --size, "
                    "or the layout's places"
                )
        if number < 1:
            raise InvalidError(f"{where}: {number}, from {first}; expected at least 1. Pass --size {name}=N")
        return number, first

    def _at(self, place: SizePlace, where: str) -> object:
        if place.condition and not self._value(place.condition):
            return _ABSENT
        if place.value:
            value = self._value(place.value)
            return _ABSENT if value is None else value
        if place.json:
            document = self._facts.json(place.json)
            value = _entry(document, place.key) if document is not None else None
            return _ABSENT if value is None else value
        if place.shape and (spec := self._facts.tensors.get(place.shape)) is not None:
            shape = spec.global_shape
            if not 0 <= place.dim < len(shape):
                raise InvalidError(
                    f"{where}: {place.shape} has {len(shape)} dimensions; expected dimension {place.dim}"
                )
            return shape[place.dim]
        return _ABSENT

    def _value(self, path: str) -> object:
        return _entry(self._facts.values, path)


def _entry(values: object, path: str) -> object:
    """Return the value at a path of nested dicts; None if there is none."""
    if not isinstance(values, Mapping):
        return None
    if path in values:
        return values[path]
    first, dot, rest = path.partition(".")
    return _entry(values.get(first), rest) if dot else None


def _integer(value: object, where: str) -> int:
    if type(value) is not int or abs(value) > NUMBER_MAX:
        raise InvalidError(f"{where}: {value!r:.60}; expected an integer up to 2**62")
    return value


def _shown(place: SizePlace) -> str:
    """Return a place for messages."""
    if place.shape:
        return f"dimension {place.dim} of {place.shape}"
    return place.value or (f"{place.key} of {place.json}" if place.json else place.given)
