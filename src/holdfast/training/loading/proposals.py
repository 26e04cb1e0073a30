"""What an error proposes for names that do not match: a `rename` that explains them, and similar names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches

from holdfast.base.ports.framework import Catalog
from holdfast.base.types.values import Group, Value, is_subclass_record
from holdfast.errors import NAMES_SHOWN, InvalidError, first_three
from holdfast.training.loading.rename_rules import Renames

_PAIRS_MAX = 50
"""Most stored names that are compared with one missing name. A checkpoint may have 100,000 of the same ending."""

_RULES_MAX = 12
"""Most rules that are tried on all names."""


class NameAdvice:
    """What can be said of names that the state has and the checkpoint lacks. Time grows with the names, not its square.

    All of it follows from what every rank knows, so that every rank says the same.
    """

    def __init__(
        self, missing: Sequence[str], unexpected: Collection[str], keys: Collection[str], catalog: Catalog
    ) -> None:
        """Compare names.

        Args:
            missing: Names that the checkpoint lacks, sorted.
            unexpected: Names that the state lacks.
            keys: Top-level keys of the state.
            catalog: The checkpoint.
        """
        self._optimizers = tuple(f"{path}." for path in _optimizers(catalog.tree, ""))
        # State of optimizers goes by the names of parameters, so those decide.
        self._missing = self._without_optimizers(missing)
        self._stored = sorted(
            self._without_optimizers({*catalog.tensors, *catalog.aliases, *_subclasses(catalog.tree, "")})
        )
        self._unexpected, self._keys = {*unexpected}, {*keys}
        self._tops = [*catalog.tree.items] or sorted({name.partition(".")[0] for name in self._stored})
        self._by_ending: dict[str, list[str]] = {}
        for name in self._stored if self._missing else ():
            self._by_ending.setdefault(name.rpartition(".")[2], []).append(name)

    def rename(self) -> str | None:
        """Return the rule that finds most of the missing names, and how many; None if no rule finds over half."""
        best, found_most = None, len(self._missing) // 2
        wanted = {*self._missing}
        for rule in self._rules():
            try:
                renamed = Renames.of(rule).applied(self._stored, "")
            except InvalidError:
                continue
            changed = {old: new for old, new in renamed.items() if old != new}
            if len({*renamed.values()}) < len(renamed) or any(self._is_matched(old) for old in changed):
                continue
            found = len(wanted.intersection(changed.values()))
            if found > found_most:
                number = "all" if found == len(wanted) else f"{found:,} of {len(wanted):,}"
                best, found_most = f"rename={rule!r}, which finds {number}", found
        return best

    def similar(self) -> list[str]:
        """Return what the checkpoint has under a similar name, for the first missing names."""
        found = []
        for name in self._missing[:NAMES_SHOWN]:
            ending = name.rpartition(".")[2]
            candidates = [each for each in self._by_ending.get(ending, ()) if not self._is_matched(each)][:_PAIRS_MAX]
            near = get_close_matches(name, candidates, 1, 0.5)
            found += [f"{near[0]} for {name}"] if near else []
        return found

    def tops(self) -> str | None:
        """Return the top-level keys of the checkpoint, if a missing name has another; else None."""
        if all(name.partition(".")[0] in self._tops for name in self._missing):
            return None
        return first_three(self._tops) or "nothing"

    def _is_matched(self, name: str) -> bool:
        """Return whether the state has a stored name: it is under a key of the state, and not unexpected."""
        at_key = name in self._keys or name.partition(".")[0] in self._keys
        return at_key and name not in self._unexpected

    def _without_optimizers(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if not f"{name}.".startswith(self._optimizers)]

    def _rules(self) -> list[dict[str, str]]:
        """Return the rules that turn a stored name into a missing one, those of long common endings first."""
        rules: dict[tuple[str, str], int] = {}
        for name in dict.fromkeys((*self._missing[:1], *self._missing[-1:])):
            wanted = name.split(".")
            for stored in _spread(self._by_ending.get(wanted[-1], ())):
                segments = stored.split(".")
                same = _common(segments[::-1], wanted[::-1])
                for rule in _rules_between(segments[: len(segments) - same], wanted[: len(wanted) - same]):
                    rules[rule] = max(same, rules.get(rule, 0))
        ordered = sorted(rules, key=lambda rule: (-rules[rule], len(rule[0]) + len(rule[1])))
        return [{old: new} for old, new in ordered[:_RULES_MAX]]


def _rules_between(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the rules that turn one name into another, given what both have before their common end."""
    above = _common(old, new)
    # A rule counts from below the top-level key; if that differs, from the start.
    first = min(above, 1)
    numbered = ["*" if each.isdigit() else each for each in old[first:above]]
    for shared in ([], numbered) if above <= 1 else (old[first:above], numbered):
        before, after = ".".join((*shared, *old[above:])), ".".join((*shared, *new[above:]))
        if before != after:
            yield (f"{before}." if before and not after else before), (f"{after}." if after and not before else after)


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return how many segments two names have in common at the start."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, two) in enumerate(pairs) if one != two), min(len(first), len(second)))


def _subclasses(group: Group, path: str) -> Iterator[str]:
    """Yield the name of each tensor subclass in a dict or module, which the index lists by its inner tensors alone."""
    for key, value in group.items.items():
        inner = f"{path}.{key}" if path else key
        if is_subclass_record(value):
            yield inner
        elif isinstance(value, Group) and value.kind in ("dict", "module"):
            yield from _subclasses(value, inner)


def _spread(names: Sequence[str]) -> Sequence[str]:
    """Return some names, evenly spaced over all."""
    return names[:: -(-len(names) // _PAIRS_MAX) or 1]


def _optimizers(value: Value, path: str) -> Iterator[str]:
    """Yield the path of each optimizer of a tree."""
    items = value.items if isinstance(value, Group) else None
    if not isinstance(items, Mapping):
        return
    if "param_groups" in items and "state" in items and path:
        yield path
        return
    for key, item in items.items():
        yield from _optimizers(item, f"{path}.{key}" if path else key)
