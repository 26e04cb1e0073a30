"""The rules of `rename`: how names of a checkpoint become names of the state."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from holdfast.errors import InvalidError, first_three

_EXAMPLE = "expected a dict such as {'module.': '', 'backbone': 'encoder', '*.attn.*': '*.attention.*'}"


@dataclass(frozen=True, slots=True)
class RenameRule:
    """One rule. It changes the first segments of a name, and keeps the rest."""

    written: str
    """The rule as the caller wrote it, for messages."""

    old: str
    """First segments to replace, without the last dot. A `*` stands for any characters; empty text adds `new`."""

    new: str
    """What replaces them; each `*` stands for what that of `old` matched. Empty text removes them."""

    below: bool
    """Whether only names below `old` match, not the name `old` itself."""

    pattern: re.Pattern[str] | None
    """Matches the first segments; None for a rule without `*`."""

    def renamed(self, name: str) -> str | None:
        """Return what a name becomes; None if the rule does not match it."""
        if self.pattern is None:
            if not self.old:
                return _joined(self.new, name)
            if name.startswith(self.old) and name[len(self.old) : len(self.old) + 1] == ".":
                return _joined(self.new, name[len(self.old) + 1 :])
            return self.new if name == self.old and not self.below else None
        match = self.pattern.match(name)
        if match is None or (self.below and match.end() == len(name)):
            return None
        first, *others = self.new.split("*")
        kept = "".join(part + other for part, other in zip(match.groups(), others, strict=True))
        return first + kept + name[match.end() :]

    def renamed_group(self, path: str, *, below: bool) -> str:
        """Return what the path of a dict or module becomes; empty if its entries go to the top."""
        rule = replace(self, below=False)
        new = rule.renamed_below(path) if below else rule.renamed(path)
        if new == "" and below:
            return path.partition(".")[0]
        return path if new is None else new

    def renamed_below(self, name: str) -> str | None:
        """Return what a name becomes if the rule counts from below the top-level key; None if it does not match."""
        top, dot, rest = name.partition(".")
        renamed = self.renamed(rest) if dot else None
        return None if renamed is None else f"{top}.{renamed}" if renamed else ""


@dataclass(frozen=True, slots=True)
class Renames:
    """The rules of one load, in order."""

    rules: tuple[RenameRule, ...] = ()
    """The rules. Each renames what the rules before it made."""

    @staticmethod
    def of(rename: object) -> Renames:
        """Return the rules in an argument.

        Raises:
            InvalidError: It is no dict of texts, or old and new name of a rule have different numbers of `*`.
        """
        if rename is None:
            return Renames()
        if not isinstance(rename, Mapping):
            raise InvalidError(f"rename: {type(rename).__name__}; {_EXAMPLE}")
        return Renames(tuple(_rule_of(old, new) for old, new in rename.items()))

    def __str__(self) -> str:
        return f"{{{', '.join(rule.written for rule in self.rules)}}}"

    def applied(self, names: Collection[str], where: str, groups: Collection[str] = ()) -> dict[str, str]:
        """Return what each name of a checkpoint becomes, and the path of each dict and module.

        A rule counts from below the top-level key, as a module names its parameters. If it matches no name there, it
        counts from the start of whole names.

        Args:
            names: The names.
            where: The checkpoint, for messages.
            groups: Paths of dicts and modules. They go where their entries go.
        Raises:
            InvalidError: A rule matches no name, or leaves nothing of one.
        """
        current, paths = {name: name for name in names}, {path: path for path in groups}
        for rule in self.rules:
            found = {name: new for name, at in current.items() if (new := rule.renamed_below(at)) is not None}
            below = bool(found)
            found = found or {name: new for name, at in current.items() if (new := rule.renamed(at)) is not None}
            if not found:
                has = first_three(sorted(filter(str.isprintable, current.values())))
                raise InvalidError(
                    f"{where}: rename={{{rule.written}}} matches no name. Expected the first segments of a name in the "
                    f"checkpoint, which has {has}. Correct it, or leave it out"
                )
            for name, new in found.items():
                if not new:
                    raise InvalidError(
                        f"{where}: rename={{{rule.written}}} leaves nothing of {name}; expected a name. Correct it"
                    )
            current |= found
            paths = {path: rule.renamed_group(at, below=below) if at else at for path, at in paths.items()}
        return paths | current


def _rule_of(old: object, new: object) -> RenameRule:
    if not isinstance(old, str) or not isinstance(new, str):
        raise InvalidError(f"rename: {old!r}: {new!r}; {_EXAMPLE}")
    written = f"{old!r}: {new!r}"
    if old.count("*") != new.count("*"):
        raise InvalidError(
            f"rename={{{written}}}: {old.count('*')} and {new.count('*')} stars; expected as many in both, since each "
            "* of the new name stands for what that of the old one matched"
        )
    if any(mark in old for mark in "?["):
        raise InvalidError(f"rename={{{written}}}: expected * as the only wildcard. Write one rule for each name")
    first, second = old.removesuffix("."), new.removesuffix(".")
    if not first and not second:
        raise InvalidError(f"rename={{{written}}}: changes nothing; {_EXAMPLE}")
    pattern = None
    if "*" in first:
        # A star takes as little as it can; a match ends where a segment does.
        pattern = re.compile("(.*?)".join(map(re.escape, first.split("*"))) + r"(?=\.|$)", re.DOTALL)
    return RenameRule(written, first, second, old != first, pattern)


def _joined(first: str, rest: str) -> str:
    return f"{first}.{rest}" if first and rest else first or rest
