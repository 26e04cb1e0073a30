"""Templates of names: `decoder.layers.{layer:int}.{kind:weight|bias}`. A template reads and writes names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.errors import InvalidError

Fields = Mapping[str, int | str]
"""Values of the fields of a name."""

_FIELD = re.compile(r"\{([^{}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN, _ANY, _NUMBER = "[^.]+?", ".+?", r"0|[1-9][0-9]{0,17}"
_FIELDS_MAX = 16
_CHARACTERS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Template:
    """A name with fields. A template matches whole names."""

    text: str
    """The template as written."""

    literals: tuple[str, ...]
    """Text before, between and after the fields."""

    fields: tuple[str, ...]
    """Names of the fields, in order."""

    widths: Mapping[str, int]
    """Least digits of each field that is a number."""

    choices: Mapping[str, tuple[str, ...]]
    """The values of each field that lists values."""

    kinds: Mapping[str, str]
    """Kind of each field, as written."""

    is_free: bool
    """Whether the template has one field, which takes anything."""

    pattern: re.Pattern[str] = field(repr=False)
    """Matches a name."""

    @property
    def numbers(self) -> set[str]:
        """Kinds of the fields that are numbers."""
        return {self.kinds[name] for name in self.widths}

    def read(self, name: str) -> dict[str, int | str] | None:
        """Return the values of the fields; None if the name does not match."""
        if self.is_free:  # Most templates of names alone: a pattern takes twice as long.
            first, last = self.literals
            stop = len(name) - len(last)
            is_long = stop > len(first) and name.startswith(first) and name.endswith(last)
            return {self.fields[0]: name[len(first) : stop]} if is_long else None
        match = self.pattern.fullmatch(name)
        if match is None:
            return None
        found: dict[str, int | str] = dict(zip(self.fields, match.groups(), strict=True))
        for number in self.widths:
            found[number] = int(found[number])
        return found

    def write(self, values: Fields) -> str:
        """Return the name with these values of the fields."""
        if self.is_free:
            return f"{self.literals[0]}{values[self.fields[0]]}{self.literals[1]}"
        parts = [self.literals[0]]
        for name, literal in zip(self.fields, self.literals[1:], strict=True):
            width = self.widths.get(name)
            parts += [str(values[name]) if width is None else f"{values[name]:0{width}}", literal]
        return "".join(parts)


def template_of(text: str, where: str, other: Template | None = None, *, parameter: bool = False) -> Template:
    """Return a template.

    A field takes the shortest text before the literal text that follows, and a match goes back to no such field. So the
    time is linear in the name, or quadratic with a field that takes anything.

    Args:
        text: The template. `{x}`: characters but a dot; `{x:int}`: a number; `{x:03}`: a number of at least 3 digits;
            `{x:a|b}`: one of these; `{x:*}`: anything, once.
        where: Layout and rule, for messages.
        other: The template on the other side: a field without a kind has that of the field there.
        parameter: Whether `{}` stands for the name of a parameter.
    Raises:
        InvalidError: The text is no template.
    """
    place = f"{where}: template {text!r:.120}"
    if len(text) > _CHARACTERS_MAX:
        raise InvalidError(f"{place}: {len(text)} characters; expected at most {_CHARACTERS_MAX}")
    split = _FIELD.split(text)
    literals, written = split[::2], split[1::2]
    if any(brace in literal for literal in literals for brace in "{}"):
        raise InvalidError(f"{place}: a brace without its partner; expected fields as {{layer:int}}")
    if len(written) > _FIELDS_MAX or any(not literal for literal in literals[1:-1]):
        raise InvalidError(f"{place}: expected at most {_FIELDS_MAX} fields, with text between them")
    kinds: dict[str, str] = {}
    pattern = re.escape(literals[0])
    for number, one in enumerate(written):
        name, colon, kind = one.partition(":")
        if parameter and not one:
            name, kind = "", "*"
        elif not _NAME.fullmatch(name) or (colon and not kind):
            raise InvalidError(f"{place}: field {{{one}}}; expected {{x}}, {{x:int}}, {{x:03}}, {{x:a|b}} or {{x:*}}")
        if name in kinds:
            raise InvalidError(f"{place}: field {name} comes twice; expected each field once")
        kinds[name] = other.kinds.get(name, kind) if other is not None and not colon else kind
        inner = _inner(kinds[name])
        if inner is None:
            raise InvalidError(f"{place}: {kind!r} of field {name}; expected int, 03, a|b or *")
        end = re.escape(literals[number + 1]) + (r"\Z" if number + 1 == len(written) else "")
        # The field that takes anything may go on; there is one, so a match takes at most quadratic time.
        pattern += f"({inner}){end}" if kinds[name] == "*" else f"(?>({inner}){end})"
    if [*kinds.values()].count("*") > 1:
        raise InvalidError(f"{place}: more than one field takes anything; expected at most one")
    return Template(
        text=text,
        literals=tuple(literals),
        fields=tuple(kinds),
        widths={name: 1 if kind == "int" else int(kind) for name, kind in kinds.items() if _is_number(kind)},
        choices={name: tuple(kind.split("|")) for name, kind in kinds.items() if "|" in kind},
        kinds=kinds,
        is_free=[*kinds.values()] == ["*"],
        pattern=re.compile(pattern, re.DOTALL),
    )


def _is_number(kind: str) -> bool:
    return kind == "int" or re.fullmatch("0[1-9]", kind) is not None


def _inner(kind: str) -> str | None:
    """Return the pattern of a kind of field; None if there is no such kind."""
    if "|" in kind:
        return "|".join(map(re.escape, sorted(kind.split("|"), key=len, reverse=True)))
    if _is_number(kind):
        return _NUMBER if kind == "int" else f"[1-9][0-9]{{{int(kind)},17}}|[0-9]{{{int(kind)}}}"
    return {"": _PLAIN, "*": _ANY}.get(kind)
