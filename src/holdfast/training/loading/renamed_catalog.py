"""A checkpoint as if its names had been those of the state: what `rename` makes of a catalog."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TypeGuard

from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.framework import Catalog, Wanted
from holdfast.base.types.values import FrameworkValue, Group, Skipped, TensorRef, Value, is_subclass_record
from holdfast.core.format.state_order import names_above
from holdfast.errors import InvalidError
from holdfast.training.loading.rename_rules import Renames

_NOWHERE = "\0"
"""Stands for the module of an optimizer's parameters, if the checkpoint does not have it."""

_STATE = ".state."
"""What follows the path of an optimizer in the name of a tensor of its state."""


@dataclass(frozen=True, slots=True)
class RenamedCatalog:
    """A catalog in the names of the state, and the way back to the names of the checkpoint."""

    catalog: Catalog
    """The content of the checkpoint, in the names of the state."""

    stored: Mapping[str, str]
    """Name in the checkpoint of each tensor, by its name in the catalog; empty if no name is changed."""

    def as_stored(self, wanted: Iterable[Wanted]) -> list[Wanted]:
        """Return wanted tensors with the names under which the checkpoint stores them."""
        return _as_stored(wanted, self.stored)


def _as_stored(wanted: Iterable[Wanted], stored: Mapping[str, str]) -> list[Wanted]:
    return [replace(each, stored_fqn=stored.get(each.stored_fqn, each.stored_fqn)) for each in wanted]


def renamed_catalog(catalog: Catalog, renames: Renames, where: str) -> RenamedCatalog:
    """Return a catalog under other names.

    Names of tensors, modules and plain values change, and with them the names of parameters in optimizers. What is
    inside one value, as in a list or in the state of an object, keeps its names.

    Args:
        catalog: The checkpoint.
        renames: The rules.
        where: The checkpoint, for messages.
    Raises:
        InvalidError: A rule matches no name, or two names become one.
    """
    if not renames.rules:
        return RenamedCatalog(catalog, {})
    names = _Names(catalog, renames, where)
    tensors = {fqn: names.of_tensor(fqn) for fqn in catalog.tensors}
    aliases = {names.of_tensor(alias): tensors.get(fqn, fqn) for alias, fqn in catalog.aliases.items()}
    _require_distinct([*tensors.items(), *((alias, names.of_tensor(alias)) for alias in catalog.aliases)], where)
    stored = {new: old for old, new in tensors.items()}

    def same_content(first: str, second: str) -> bool:
        return catalog.same_content(stored.get(first, first), stored.get(second, second))

    changed = replace(
        catalog,
        tensors={new: _named(catalog.tensors[old], new) for new, old in stored.items()},
        aliases=aliases,
        tree=names.tree(),
        optimizers={names.of[path]: record for path, record in catalog.optimizers.items() if path in names.of},
        masters={tensors.get(fqn, fqn): tensors.get(master, master) for fqn, master in catalog.masters.items()},
        same_content=same_content,
        fill=lambda wanted: catalog.fill(_as_stored(wanted, stored)),
        require_stored=lambda fqn: catalog.require_stored(stored.get(fqn, fqn)),
    )
    return RenamedCatalog(changed, stored)


class _Names:
    """The new names of one checkpoint."""

    def __init__(self, catalog: Catalog, renames: Renames, where: str) -> None:
        self._tree, self._where = catalog.tree, where
        self._listed = {*catalog.tensors, *catalog.aliases}
        groups = [*_groups(catalog.tree, "")]
        owners = sorted({*groups, *(fqn.partition(".")[0] for fqn in self._listed)})
        self._leaves = dict(_leaves(catalog.tree, ""))
        """Values of the tree by path: what is no dict and no module."""
        members = {path: each for path, value in self._leaves.items() if (each := _parameters_in(value)) is not None}
        self._inside = {fqn: path for path, value in self._leaves.items() for fqn in _references(value)}
        """Path of the value that refers to a tensor, by the tensor's name."""
        outside = {fqn for fqn in self._listed if self._inside.get(fqn, fqn) == fqn}
        # An optimizer may step a tensor subclass, of which the index lists the inner tensors alone.
        outside |= {path for path, value in self._leaves.items() if is_subclass_record(value)}
        self._optimizers = {path: _Parameters(names, owners, outside) for path, names in members.items()}
        self._parameter_of = {fqn: found for fqn in self._listed if (found := self._parameter(fqn)) is not None}
        parameters = {name for each in self._optimizers.values() for name in each.full_names.values()}
        free = {fqn for fqn in self._listed if fqn not in self._inside and fqn not in self._parameter_of}
        self.of: Mapping[str, str] = renames.applied(free | {*self._leaves} | parameters, where, {*groups, *owners})
        """New name by name: of tensors, values, dicts, modules, and parameters of optimizers."""
        named = {*free, *self._leaves}
        _require_distinct([(name, self.of[name]) for name in named], where)
        for parameters_of_one in self._optimizers.values():
            parameters_of_one.follow(self.of)
        had, has = names_above(named), names_above(self.of[name] for name in named)
        for name in self._leaves:
            if self.of[name] in has and name not in had:
                raise InvalidError(
                    f"{where}: rename makes {self.of[name]} of {name}, and other names are below {self.of[name]}; "
                    "expected a value or a dict. Correct the rules, or leave one of the two out of them"
                )
        self._emptied = {path for path in groups if path in had and self.of[path] not in has}
        """Dicts and modules below which nothing is left."""

    def of_tensor(self, fqn: str) -> str:
        """Return the new name of a tensor."""
        if fqn in self._parameter_of:
            return self._of_state(*self._parameter_of[fqn])
        value = self._inside.get(fqn)
        return self.of[fqn] if value is None else self._moved(fqn, value)

    def _of_state(self, path: str, name: str, key: str) -> str:
        return f"{self.of[path]}.state.{self._optimizers[path].renamed(name, self.of)}.{key}"

    def _parameter(self, fqn: str) -> tuple[str, str, str] | None:
        """Return optimizer, parameter and the name below it, of a name in the state of an optimizer; else None."""
        at = -1
        while self._optimizers and (at := fqn.find(_STATE, at + 1)) >= 0:
            if fqn[:at] in self._optimizers:
                found = self._optimizers[fqn[:at]].split(fqn[at + len(_STATE) :])
                return None if found is None else (fqn[:at], *found)
        return None

    def tree(self) -> Group:
        """Return the tree under the new names."""
        root = Group("dict")
        self._fill(root, self._tree, "", root, "")
        return root

    def _fill(self, root: Group, saved: Group, path: str, new: Group, new_path: str) -> None:
        for key, value in saved.items.items():
            old = f"{path}.{key}" if path else key
            name = self.of.get(old, old)
            # A name that leaves its dict is put where its first segments lead.
            is_inside = not new_path or name.startswith(f"{new_path}.")
            parent, rest = (new, name.removeprefix(f"{new_path}.") if new_path else name) if is_inside else (root, name)
            # Keys of a dict may have dots. Where they had none, a name of several segments is in dicts of dicts.
            parent, rest = _at(parent, rest, makes_dicts="." not in key)
            if old in self._optimizers and isinstance(value, Group):
                parent.items[rest] = self._optimizer(old, value)
            elif _is_branch(value):
                present = root if not name else parent.items.get(rest)
                branch = present if isinstance(present, Group) else Group(value.kind)
                if branch is not root and old not in self._emptied:
                    parent.items[rest] = branch
                self._fill(root, value, old, branch, name)
            else:
                parent.items[rest] = self._value(value, old)

    def _optimizer(self, path: str, saved: Group) -> Group:
        parameters = self._optimizers[path]
        items = dict(saved.items)
        groups = items.get("param_groups")
        if isinstance(groups, list):
            items["param_groups"] = [self._group(path, group, parameters) for group in groups]
        for table in ("param_groups", "state"):
            entries = items.get(table)
            entries = entries.items if isinstance(entries, Group) else entries
            if isinstance(entries, dict):
                renamed = [(name, parameters.renamed(name, self.of)) for name in entries]
                _require_distinct(
                    [(f"{path}.{table}.{old}", f"{path}.{table}.{new}") for old, new in renamed], self._where
                )
                items[table] = {new: self._value(entries[old], path) for old, new in renamed}
        return Group(saved.kind, items)

    def _group(self, path: str, group: Value, parameters: _Parameters) -> Value:
        """Return a group that lists its parameters by name, under their new names."""
        assert isinstance(group, dict), "a group of an optimizer with names is a dict"
        values = {key: self._value(value, path) for key, value in group.items()}
        return {**values, "params": [parameters.renamed(name, self.of) for name in group["params"]]}

    def _value(self, value: Value, path: str) -> Value:
        """Return a value whose references have the new names."""
        if isinstance(value, TensorRef):
            return TensorRef(self.of_tensor(value.fqn) if value.fqn in self._listed else self._moved(value.fqn, path))
        if isinstance(value, Skipped):
            return Skipped(self._moved(value.path, path))
        if is_subclass_record(value):
            return FrameworkValue(value.kind, self._value(value.value, path))
        if isinstance(value, Group):
            return Group(value.kind, {key: self._value(entry, path) for key, entry in value.items.items()})
        if type(value) is list or type(value) is tuple:
            return type(value)(self._value(item, path) for item in value)
        if isinstance(value, dict) and any(True for _ in _references(value)):
            # A copy, because the dict of a module's state keeps the versions of its modules.
            renamed = copy(value)
            renamed.update({key: self._value(entry, path) for key, entry in value.items()})
            return renamed
        return value

    def _moved(self, name: str, path: str) -> str:
        """Return the name of something inside a value, which goes with the value."""
        if (parameter := self._parameter(name)) is not None:
            return self._of_state(*parameter)
        below = name.removeprefix(path)
        return f"{self.of[path]}{below}" if name.startswith(path) and path in self.of else name


class _Parameters:
    """The parameters of one saved optimizer: their names in it, and their names in the state."""

    def __init__(self, names: Sequence[str | int], owners: Sequence[str], listed: set[str]) -> None:
        self._names = dict.fromkeys(map(str, names))
        self._owners = _owners_of(self._names, owners, listed)
        self._owner = self._owners[0]
        # Some systems write numbers as text.
        is_text_of_numbers = self._owner == _NOWHERE and all(name.isdecimal() for name in self._names)
        self._is_numbered = is_text_of_numbers or any(isinstance(name, int) for name in names)
        """Whether its parameters have numbers. No rule means these."""

    @property
    def full_names(self) -> Mapping[str, str]:
        """Name in the state of each parameter, by its name in the optimizer."""
        if self._is_numbered:
            return {}
        return {name: f"{self._owner}.{name}" if self._owner else name for name in self._names}

    def follow(self, names: Mapping[str, str]) -> None:
        """Belong to the module below which rules change a name, if several have all parameters.

        A checkpoint does not say whether an optimizer is that of a model or of its average, and rules may name one of
        them alone.
        """
        for owner in self._owners if len(self._owners) > 1 else ():
            self._owner = owner
            if any(self.renamed(name, names) != name for name in self._names):
                return
        self._owner = self._owners[0]

    def split(self, rest: str) -> tuple[str, str] | None:
        """Return the parameter at the start of a name, and what follows it; None if there is none."""
        at = len(rest)
        while (at := rest.rfind(".", 0, at)) >= 0:
            if rest[:at] in self._names:
                return rest[:at], rest[at + 1 :]
        return None

    def renamed(self, name: str, names: Mapping[str, str]) -> str:
        """Return the new name of a parameter in this optimizer."""
        if self._is_numbered or name not in self._names:
            return name
        if not self._owner:
            return names[name]
        full = names[f"{self._owner}.{name}"]
        owner = names.get(self._owner, self._owner)
        return full.removeprefix(f"{owner}.")


def _parameters_in(value: Value) -> list[str | int] | None:
    """Return the names or numbers of parameters in a saved optimizer; None for any other value.

    It is one saved by Holdfast, or a state dict that lists parameters by number, or by name as
    `get_optimizer_state_dict` makes it.
    """
    if not isinstance(value, Group) or value.kind not in ("optimizer", "dict"):
        return None
    groups, state = value.items.get("param_groups"), value.items.get("state")
    if value.kind == "optimizer":
        return list(dict.fromkeys(name for table in (groups, state) if isinstance(table, dict) for name in table))
    if not isinstance(groups, list) or not isinstance(state, dict | Group):
        return None
    members = [group.get("params") if isinstance(group, dict) else None for group in groups]
    names = [name for listed in members if isinstance(listed, list) for name in listed]
    is_one = bool(names) and all(isinstance(listed, list) for listed in members) and {*map(type, names)} <= {int, str}
    return names if is_one else None


def _owners_of(names: Collection[str], owners: Sequence[str], listed: set[str]) -> Sequence[str]:
    """Return the paths of modules and dicts to which the names of an optimizer's parameters may be relative.

    Empty if the names are whole. A checkpoint may have the optimizer alone: then the names count from below a key.
    """
    if not names or all(name in listed for name in names):
        return [""]
    return [owner for owner in owners if all(f"{owner}.{name}" in listed for name in names)] or [_NOWHERE]


def _named(spec: TensorSpec, name: str) -> TensorSpec:
    return spec if spec.fqn == name else TensorSpec(name, spec.dtype, spec.global_shape)


def _at(parent: Group, rest: str, *, makes_dicts: bool) -> tuple[Group, str]:
    """Return the group in which a name is, and the rest of the name, which is its key there."""
    for at, letter in enumerate(rest):
        value = parent.items.get(rest[:at]) if letter == "." else None
        if isinstance(value, Group) and value.kind in ("dict", "module"):
            return _at(value, rest[at + 1 :], makes_dicts=makes_dicts)
    first, dot, below = rest.partition(".")
    if dot and makes_dicts and parent.kind == "dict":
        branch = parent.items[first] = Group("dict")
        return _at(branch, below, makes_dicts=True)
    return parent, rest


def _is_branch(value: Value) -> TypeGuard[Group]:
    """Return whether a value is a dict or module of the tree, whose entries have names of their own."""
    return isinstance(value, Group) and value.kind in ("dict", "module") and _parameters_in(value) is None


def _leaves(group: Group, path: str) -> Iterator[tuple[str, Value]]:
    """Yield path and value of each entry of a tree that is neither a dict nor a module."""
    for key, value in group.items.items():
        inner = f"{path}.{key}" if path else key
        if _is_branch(value):
            yield from _leaves(value, inner)
        else:
            yield inner, value


def _groups(group: Group, path: str) -> Iterator[str]:
    """Yield the path of each dict and module of a tree."""
    for key, value in group.items.items():
        if _is_branch(value):
            inner = f"{path}.{key}" if path else key
            yield inner
            yield from _groups(value, inner)


def _references(value: Value) -> Iterator[str]:
    """Yield the names of the tensors and of what was left out that a value refers to."""
    if isinstance(value, TensorRef):
        yield value.fqn
    elif isinstance(value, Skipped):
        yield value.path
    items = value.items if isinstance(value, Group) else value.value if is_subclass_record(value) else value
    for item in items.values() if isinstance(items, dict) else items if isinstance(items, list | tuple) else ():
        yield from _references(item)


def _require_distinct(renamed: Iterable[tuple[str, str]], where: str) -> None:
    """Refuse rules by which two names become one.

    Raises:
        InvalidError: Names both.
    """
    first: dict[str, str] = {}
    for old, new in renamed:
        if first.setdefault(new, old) != old:
            one, two = sorted((first[new], old))
            raise InvalidError(
                f"{where}: rename makes {new} of both {one} and {two}; expected one name for each. Correct the rules, "
                "or leave one of the two out of them"
            )
