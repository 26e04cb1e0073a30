"""Plain values in a dict of the state: each entry with a name takes part or not by itself, at every depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeGuard

import torch

from holdfast.frameworks.torch.containers import dict_like, is_plain_dict, take_apart
from holdfast.frameworks.torch.state.selection import selected
from holdfast.ports.framework import Selection
from holdfast.types.values import Skipped, Value

ABSENT = object()
"""Stands where a state or a checkpoint has nothing."""


def anything_selected(selection: Selection, path: str, value: object) -> bool:
    """Return whether a plain value takes part, or anything in it that has a name of its own."""
    return any(selected(selection, name) for name, _ in named_leaves(value, path))


def named_leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield everything in a plain value that has a name of its own, by name; the value itself if it holds no names."""
    if _holds_names(value) and value:
        for key, each in value.items():
            yield from named_leaves(each, f"{path}.{key}")
    else:
        yield path, value


def without(value: object, path: str, takes_part: Callable[[str], bool]) -> object:
    """Return a plain value in which each name that does not take part is marked as left out."""
    if not _holds_names(value) or not value:
        return value if takes_part(path) else Skipped(path)
    entries = {key: without(each, f"{path}.{key}", takes_part) for key, each in value.items()}
    if all(isinstance(each, Skipped) for each in entries.values()):
        return Skipped(path)
    return dict_like(value, entries.items())


class EntryMerge:
    """What a plain value of a state becomes: entries that take part as saved, all others as they are."""

    def __init__(
        self,
        selection: Selection,
        takes_part: Callable[[str], bool],
        missing: list[str],
        built: Callable[[Value, Mapping[str, object]], object],
    ) -> None:
        """Prepare.

        Args:
            selection: Which names take part.
            takes_part: Whether one does; counts it as skipped if not.
            missing: Where names go that the state has and the checkpoint was to have.
            built: Makes the object of a stored value, given the state's own tensors by name.
        """
        self._selection, self._takes_part, self._missing, self._built = selection, takes_part, missing, built

    def merged(self, saved: Value, own: object, path: str) -> object:
        """Return what stands at `path` afterwards; `ABSENT` if nothing does.

        Args:
            saved: What the checkpoint has.
            own: What the state has, or `ABSENT`.
            path: Its name.
        """
        if isinstance(saved, Skipped):
            if own is not ABSENT and self._any_takes_part(own, path):
                self._missing.append(path)
            return own
        if not _holds_names(saved):
            return self._leaf(saved, own, path)
        if saved and not anything_selected(self._selection, path, saved):
            # Nothing of it is taken: the state's own stays whatever it is, and not only its entries.
            self._any_takes_part(saved, path)
            kept = self._kept(own, path) if is_plain_dict(own) else own
            return dict_like(saved, ()) if kept is ABSENT and own is not ABSENT else kept
        mine = own if is_plain_dict(own) else {}
        entries: dict[object, object] = {
            key: self.merged(each, mine.get(key, ABSENT), f"{path}.{key}") for key, each in saved.items()
        }
        for key, each in mine.items():
            if key not in saved and isinstance(key, str):
                entries[key] = self._kept(each, f"{path}.{key}")
        return dict_like(saved, ((key, each) for key, each in entries.items() if each is not ABSENT))

    def _leaf(self, saved: Value, own: object, path: str) -> object:
        if not self._takes_part(path):
            return own
        tensors: dict[str, object] = {}
        if own is not ABSENT:
            take_apart(own, path, lambda name, tensor: _noted(tensors, name, tensor))
        return self._built(saved, tensors)

    def _any_takes_part(self, value: object, path: str) -> bool:
        taking_part = [self._takes_part(name) for name, _ in named_leaves(value, path)]
        return any(taking_part)

    def _kept(self, own: object, path: str) -> object:
        """Return what stays of something that the checkpoint lacks."""
        if own is ABSENT:
            return ABSENT
        leaves = [name for name, _ in named_leaves(own, path)]
        chosen = [name for name in leaves if selected(self._selection, name)]
        for name in leaves:
            self._takes_part(name)
        if self._selection.only is not None:
            # Somebody asked for these by name.
            self._missing += chosen
            return own
        if len(chosen) == len(leaves):
            return ABSENT
        return _unchosen(own, path, set(chosen)) if chosen else own


def _unchosen(own: object, path: str, chosen: set[str]) -> object:
    if not _holds_names(own) or not own:
        return ABSENT if path in chosen else own
    entries = ((key, _unchosen(each, f"{path}.{key}", chosen)) for key, each in own.items())
    kept = [(key, each) for key, each in entries if each is not ABSENT]
    return dict_like(own, kept) if kept else ABSENT


def _noted(tensors: dict[str, object], name: str, tensor: torch.Tensor) -> Value:
    tensors.setdefault(name, tensor)
    return None


def _holds_names(value: object) -> TypeGuard[dict[str, object]]:
    return is_plain_dict(value) and all(isinstance(key, str) for key in value)
