"""Applies `only` and `skip` of a save or load to names, and to named entries of plain values at every depth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeGuard

from holdfast.backends.torch.containers import dict_like, is_plain_dict, put_together, tensors_in
from holdfast.base.name_patterns import unmatched, with_names_above
from holdfast.base.ports.framework import Selection, UnmatchedPattern
from holdfast.base.types.values import Group, Skipped, Value

ABSENT = object()
"""Marks an entry that a state or a checkpoint lacks."""


class Selector:
    """Applies a selection to the names of one state, and finds the patterns that match no name."""

    def __init__(self, selection: Selection) -> None:
        """Know no name yet."""
        self._selection = selection
        self._known: list[str] = []
        """Names of the state. The names above a known name are known too."""
        self.takes_all = selection.only is None and not selection.skip
        """Whether every name is selected."""

    @property
    def is_explicit(self) -> bool:
        """Whether `only` names what is selected."""
        return self._selection.only is not None

    def know(self, path: str) -> None:
        """Record a path of the state, with or without names below it."""
        self._known.append(f"{path}.")

    def selects(self, name: str) -> bool:
        """Return whether a name is selected. A pattern applies to the names it matches and to all names below them."""
        if self.takes_all:
            return True
        self._known.append(name)
        names = with_names_above(name)

        def matches(patterns: Sequence[str]) -> bool:
            return any(fnmatchcase(prefix, pattern) for pattern in patterns for prefix in names)

        only, skip = self._selection.only, self._selection.skip
        return (only is None or matches(only)) and not matches(skip)

    def selects_whole(self, path: str) -> bool:
        """Return whether a value that is saved and loaded as a whole is selected, by its name or a pattern below it."""
        return self.selects(f"{path}.")

    def selects_any(self, path: str, value: object) -> bool:
        """Return whether the selection takes a plain value or any named entry in it."""
        # A list first, since any() stops early: every name must be recorded.
        taking_part = [self.selects(name) for name, _ in named_leaves(value, path)]
        return any(taking_part)

    def unmatched(
        self, names_elsewhere: Iterable[str] = (), tensors: Iterable[str] = ()
    ) -> tuple[UnmatchedPattern, ...]:
        """Return the patterns that match no known name.

        Args:
            names_elsewhere: Names that the state need not have. `skip` may match them, `only` may not.
            tensors: Names of the tensors that both have. `partial` matches only these.
        """
        only, skip = self._selection.only or (), self._selection.skip
        left = unmatched(only, self._known)
        # A parameter may have a gradient at the next save.
        grads = {pattern: pattern.removesuffix(".grad") for pattern in skip}
        left_of_skip = unmatched(unmatched({*grads.values()}, self._known), names_elsewhere)
        partial = self._selection.partial
        left_of_partial = unmatched(partial, tensors)
        return (
            *(UnmatchedPattern("only", pattern) for pattern in only if pattern in left),
            *(UnmatchedPattern("partial", pattern) for pattern in partial if pattern in left_of_partial),
            *(UnmatchedPattern("skip", pattern) for pattern in skip if grads[pattern] in left_of_skip),
        )


def named_leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield name and value of every named leaf in a plain value; the value itself if it has no named entries."""
    if _holds_names(value) and value:
        for key, entry in value.items():
            yield from named_leaves(entry, f"{path}.{key}")
    else:
        yield path, value


def saved_names(value: Value, path: str) -> Iterator[str]:
    """Yield the names in a saved value, as far as patterns distinguish them."""
    yield f"{path}."
    entries = value.items if isinstance(value, Group) and value.kind != "stateful" else value
    if isinstance(entries, dict):
        for key, entry in entries.items():
            yield from saved_names(entry, f"{path}.{key}")


def without(value: object, path: str, takes_part: Callable[[str], bool]) -> object:
    """Return a plain value with a `Skipped` for each name that is not selected."""
    if not _holds_names(value) or not value:
        return value if takes_part(path) else Skipped(path)
    entries = {key: without(entry, f"{path}.{key}", takes_part) for key, entry in value.items()}
    if all(isinstance(entry, Skipped) for entry in entries.values()):
        return Skipped(path)
    return dict_like(value, entries.items())


@dataclass(frozen=True, slots=True)
class EntryMerge:
    """Merges saved and present entries of a plain value: selected ones as saved, all others as they are."""

    selector: Selector
    """Knows the selected names."""

    takes_part: Callable[[str], bool]
    """Returns whether a name is selected; records it as skipped if not."""

    missing: list[str]
    """Receives names that the state has and the checkpoint lacks."""

    leaf_builder: Callable[[Mapping[str, object]], Callable[[Value], object]]
    """Returns `on_leaf` of `put_together`, given the state's present tensors by name."""

    def merged(self, saved: Value, present: object, path: str) -> object:
        """Return the value at `path` after the load; `ABSENT` if there is none.

        Args:
            saved: The checkpoint's value.
            present: The state's value, or `ABSENT`.
            path: Name of the value.
        """
        if isinstance(saved, Skipped):
            if present is not ABSENT and self._any_takes_part(present, path):
                self.missing.append(path)
            return present
        if not _holds_names(saved):
            return self._leaf(saved, present, path)
        if saved and not self.selector.selects_any(path, saved):
            # Nothing is loaded here: the present value stays as it is, of whatever type.
            self._any_takes_part(saved, path)
            kept = self._kept(present, path) if is_plain_dict(present) else present
            return dict_like(saved, ()) if kept is ABSENT and present is not ABSENT else kept
        before = present if is_plain_dict(present) else {}
        entries: dict[object, object] = {
            key: self.merged(entry, before.get(key, ABSENT), f"{path}.{key}") for key, entry in saved.items()
        }
        for key, entry in before.items():
            if key not in saved and isinstance(key, str):
                entries[key] = self._kept(entry, f"{path}.{key}")
        return dict_like(saved, ((key, entry) for key, entry in entries.items() if entry is not ABSENT))

    def _leaf(self, saved: Value, present: object, path: str) -> object:
        if not self.takes_part(path):
            return present
        return put_together(saved, self.leaf_builder(tensors_in(present, path)))

    def _any_takes_part(self, value: object, path: str) -> bool:
        # A list first, since any() stops early: every leaf must be recorded.
        taking_part = [self.takes_part(name) for name, _ in named_leaves(value, path)]
        return any(taking_part)

    def _kept(self, present: object, path: str) -> object:
        """Return what remains of a value that the checkpoint lacks."""
        if present is ABSENT:
            return ABSENT
        leaves = [name for name, _ in named_leaves(present, path)]
        chosen = [name for name in leaves if self.takes_part(name)]
        if self.selector.is_explicit:
            # `only` names them explicitly, so their absence is an error, not a deletion.
            self.missing.extend(chosen)
            return present
        if len(chosen) == len(leaves):
            return ABSENT
        return _unchosen(present, path, set(chosen)) if chosen else present


def _unchosen(present: object, path: str, chosen: set[str]) -> object:
    if not _holds_names(present) or not present:
        return ABSENT if path in chosen else present
    entries = ((key, _unchosen(entry, f"{path}.{key}", chosen)) for key, entry in present.items())
    kept = [(key, entry) for key, entry in entries if entry is not ABSENT]
    return dict_like(present, kept) if kept else ABSENT


def _holds_names(value: object) -> TypeGuard[dict[str, object]]:
    return is_plain_dict(value) and all(isinstance(key, str) for key in value)
