"""The file of a layout: TOML, read into rules whose templates and expressions are parsed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import msgspec

from holdfast.base.layouts.expression import Expression, expression_of
from holdfast.base.layouts.rule_text import FileText, RuleText, SectionPart, SizePlace
from holdfast.base.layouts.template import Template, template_of
from holdfast.base.types.inspected import inspected
from holdfast.errors import InvalidError

VERSION = 1
"""The version of the language."""

BYTES_MAX = 1 << 20
"""Largest rule file."""

_DOTS_MAX = 64
RULES_MAX = 4096
"""Most rules of one layout."""


@dataclass(frozen=True, slots=True)
class RuleTarget:
    """A tensor that a rule makes: the whole result, or one part of sections."""

    to: Template
    """The name."""

    length: Expression | None
    """Elements of the part in a block; None without sections."""

    interleave: tuple[int, Expression, Expression] | None
    """Dimension, block and `by`."""

    permute: tuple[int, ...] | None
    """RuleTarget dimension d is source dimension `permute[d]`; empty for a transposition."""


@dataclass(frozen=True)
class LayoutRule:
    """One rule."""

    name: str
    """The name, for messages."""

    where: str
    """Layout and rule, for messages."""

    source: Template
    """Names of the sources."""

    targets: tuple[RuleTarget | None, ...]
    """The targets, in order; None for a part that is skipped."""

    lengths: tuple[Expression, ...]
    """Length of every part of a block; empty without sections."""

    unstack: tuple[tuple[int, str, Expression | None], ...]
    """Dimension, field and block of each."""

    pad: tuple[int, Expression] | None
    """Dimension, and elements that are content."""

    sections: tuple[int, Expression] | None
    """Dimension, and the number of blocks."""

    join: tuple[int, str, Expression | None] | None
    """Dimension, field, and number of tensors if the field does not list them."""

    stack: tuple[tuple[int, str], ...]
    """Dimension and field of each."""

    skip: str
    """Why the tensor is left out; empty for any other rule."""

    optional: bool
    """Whether the rule may take nothing."""

    @cached_property
    def gathered(self) -> tuple[str, ...]:
        """Fields of the source that the targets lack: tensors that differ in these alone are put together."""
        return (*((self.join[1],) if self.join else ()), *(field for _, field in self.stack))

    @cached_property
    def spread(self) -> tuple[str, ...]:
        """Fields of the targets that the source lacks: the source is taken apart."""
        return tuple(field for _, field, _ in self.unstack)

    @cached_property
    def steps(self) -> tuple[object, ...]:
        """The steps, without names: tensors that two rules with equal steps take stay equal."""
        made = tuple(
            (target.length, target.interleave, target.permute) for target in self.targets if target is not None
        )
        return self.lengths, self.unstack, self.pad, self.sections, self.join, self.stack, made

    @cached_property
    def only_renames(self) -> bool:
        """Whether the rule changes names alone."""
        (target, *others) = self.targets or (None,)
        has_steps = self.unstack or self.pad or self.sections or self.join or self.stack
        changes = target is None or others or target.interleave is not None or target.permute is not None
        return not has_steps and not changes


@dataclass(frozen=True, slots=True)
class Followed:
    """Names of tensors that go the way of a parameter."""

    source: Template
    """Names in the source; `{}` is the parameter's."""

    target: Template
    """Names in the target."""

    only: str
    """Glob of the parameters that this line is for, on either side; empty for all."""

    @property
    def keys(self) -> tuple[str, str]:
        """The key before the parameter's name on either side; empty if there is none."""
        source, target = (each.literals[0] for each in (self.source, self.target))
        return source.partition(".")[0], target.partition(".")[0]

    def read(self, name: str, *, turned: bool) -> tuple[str, dict[str, int | str]] | None:
        """Return the parameter and the fields of a name; None if the name does not match."""
        fields = (self.target if turned else self.source).read(name)
        if fields is None:
            return None
        parameter = str(fields.pop(""))
        return (parameter, fields) if not self.only or fnmatchcase(parameter, self.only) else None

    def write(self, parameter: str, fields: Mapping[str, int | str], *, turned: bool) -> str:
        """Return the name that follows from that of a parameter on the other side."""
        return (self.source if turned else self.target).write({**fields, "": parameter})


@dataclass(frozen=True, slots=True)
class RuleFile:
    """A layout."""

    name: str
    """The name, for messages."""

    about: str
    """The purpose."""

    text: str
    """The file."""

    rules: tuple[LayoutRule, ...]
    """The rules, in order."""

    follow: tuple[Followed, ...]
    """Names that go the way of a parameter; the first line that matches counts."""

    sizes: Mapping[str, tuple[SizePlace | Expression, ...]]
    """The places of each size, in order."""

    ties: Mapping[str, str]
    """Tied names, each with the name of the tensor; for names that no rule makes."""


def rule_file_of(text: str, name: str) -> RuleFile:
    """Return a layout.

    Args:
        text: TOML.
        name: The name of the layout, for messages.
    Raises:
        InvalidError: Names the rule, the expected and the found.
    """
    where = f"layout {name}"
    if len(text) > BYTES_MAX:
        raise InvalidError(f"{where}: {len(text)} characters; expected at most {BYTES_MAX}")
    if any(word.count(".") > _DOTS_MAX for word in re.sub(r"\s*\.\s*", ".", text).split()):
        # The memory that tomllib takes for a dotted key is quadratic.
        raise InvalidError(f"{where}: a word of over {_DOTS_MAX} dots; expected names as of tensors. Correct the file")
    try:
        text.encode()
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidError(f"{where}: no TOML: {error}. Correct the file") from error
    version = document.get("layout")
    if version != VERSION:
        raise InvalidError(
            f"{where}: layout = {version!r:.40}; expected {VERSION}, the version of the language that this Holdfast "
            "reads. Write it as the first line, or install a newer Holdfast"
        )
    try:
        file = msgspec.convert(document, inspected(FileText, msgspec.json.Decoder))
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidError(f"{where}: {_place_of(document, str(error))}. Correct the file") from error
    if len(file.rule) > RULES_MAX:
        raise InvalidError(f"{where}: {len(file.rule)} rules; expected at most {RULES_MAX}")
    if not file.follow:
        raise InvalidError(f"{where}: follow has no line; expected the parameter itself as the last. Leave follow out")
    follow = tuple(_followed(line, where) for line in file.follow)
    sizes = {
        size: tuple(_place(each, f"{where}, size {size}") for each in places) for size, places in file.sizes.items()
    }
    rules = tuple(_rule(rule, where) for rule in file.rule)
    _require_distinct(rules)
    return RuleFile(name, file.about, text, rules, follow, sizes, file.ties)


def _followed(line: Sequence[str], where: str) -> Followed:
    if len(line) not in (2, 3):
        raise InvalidError(
            f"{where}: follow: {list(line)}; expected names in the source and in the target, and a glob or none"
        )
    source = template_of(line[0], where, parameter=True)
    target = template_of(line[1], where, source, parameter=True)
    if {*source.fields} != {*target.fields} or "" not in source.fields:
        raise InvalidError(
            f"{where}: follow = [{source.text!r}, {target.text!r}]; expected {{}} and the same fields in both"
        )
    return Followed(source, target, line[2] if len(line) > 2 else "")


def _place_of(document: Mapping[str, object], message: str) -> str:
    """Return a message of msgspec with the name of the rule."""
    rules = document.get("rule")
    at = message.find("$.rule[")
    if at < 0 or not isinstance(rules, list):
        return message
    number = message[at + len("$.rule[") :].partition("]")[0]
    rule = rules[int(number)] if number.isdecimal() and int(number) < len(rules) else None
    called = (rule.get("name") or rule.get("from")) if isinstance(rule, dict) else None
    return f"rule {called}: {message}" if called else message


def _place(written: SizePlace | str, where: str) -> SizePlace | Expression:
    if isinstance(written, str):
        return expression_of(written, where)
    if sum(map(bool, (written.value, written.json, written.shape, written.given))) != 1 or bool(written.json) != bool(
        written.key
    ):
        raise InvalidError(f"{where}: {written}; expected one of value, json with key, shape with dim, given")
    if "/" in written.json or written.json in (".", ".."):
        raise InvalidError(f"{where}: json = {written.json!r}; expected the name of a file that lies with a checkpoint")
    return written


def _rule(text: RuleText, layout: str) -> LayoutRule:
    where = f"{layout}, rule {text.name or text.source}"
    cut = text.sections
    if bool(text.skip) + bool(text.to) + (cut is not None) != 1:
        raise InvalidError(f"{where}: expected one of to, sections and skip")
    unstack = text.unstack if isinstance(text.unstack, tuple) else (text.unstack,)
    stack = text.stack if isinstance(text.stack, tuple) else (text.stack,)

    source = template_of(text.source, where)

    def number(written: int | str) -> Expression:
        return expression_of(written, where)

    def target(one: SectionPart | RuleText, length: Expression | None) -> RuleTarget:
        mixed = one.interleave
        return RuleTarget(
            template_of(one.to, where, source),
            length,
            None if mixed is None else (mixed.dim, number(mixed.block), number(mixed.by)),
            () if one.transpose else one.permute,
        )

    with_steps: list[RuleText | SectionPart] = [text, *(cut.parts if cut is not None else ())]
    for one in with_steps:
        if one.transpose and one.permute is not None:
            raise InvalidError(f"{where}: transpose and permute; expected one of them")
        if isinstance(one, SectionPart) and bool(one.to) is bool(one.skip):
            raise InvalidError(
                f"{where}: a part has {'to and skip' if one.to else 'no to'}; expected one of to and skip"
            )
    if cut is not None and (text.interleave is not None or text.permute is not None or text.transpose):
        raise InvalidError(
            f"{where}: interleave, permute and transpose belong to the parts of sections. Move them there"
        )
    lengths = tuple(number(part.length) for part in cut.parts) if cut is not None else ()
    if cut is not None:
        made = tuple(
            None if part.skip else target(part, length) for part, length in zip(cut.parts, lengths, strict=True)
        )
    else:
        made = (target(text, None),) if text.to else ()
    rule = LayoutRule(
        name=text.name or text.source,
        where=where,
        source=source,
        targets=made,
        lengths=lengths,
        unstack=tuple((one.dim, one.field, None if one.block is None else number(one.block)) for one in unstack),
        pad=None if text.pad is None else (text.pad.dim, number(text.pad.content)),
        sections=None if cut is None else (cut.dim, number(cut.repeat)),
        join=None
        if text.join is None
        else (text.join.dim, text.join.by, None if text.join.count is None else number(text.join.count)),
        stack=tuple((one.dim, one.by) for one in stack),
        skip=text.skip,
        optional=text.optional,
    )
    _require_fields(rule)
    return rule


def _require_fields(rule: LayoutRule) -> None:
    """Require that a rule writes the fields that it reads, so that it turns around."""
    read = {*rule.source.fields}
    for field in rule.gathered:
        if field not in read or (field not in rule.source.widths and field not in rule.source.choices):
            raise InvalidError(
                f"{rule.where}: by = {field!r}; expected a field of from that is a number or lists its values"
            )
    if rule.join is not None and rule.join[1] in rule.source.widths and rule.join[2] is None:
        raise InvalidError(
            f"{rule.where}: join by {rule.join[1]}, a number; expected count, the tensors that are joined"
        )
    shared = read - {*rule.gathered}
    for target in rule.targets:
        if target is None:
            continue
        wrong = {*target.to.fields} ^ (shared | {*rule.spread}) | (read & {*rule.spread})
        if wrong:
            raise InvalidError(
                f"{rule.where}: to = {target.to.text!r}: fields {', '.join(sorted(wrong))}; expected those of from, "
                "those of unstack, and none that join or stack puts together"
            )
        for field in shared:
            kinds = rule.source.kinds[field], target.to.kinds[field]
            if kinds[0] != kinds[1] and not {*kinds} <= {*rule.source.numbers, *target.to.numbers}:
                raise InvalidError(
                    f"{rule.where}: field {field} is {kinds[0]!r} in from and {kinds[1]!r} in to; expected one kind"
                )
        for field in rule.spread:
            if field not in target.to.widths and field not in target.to.choices:
                raise InvalidError(
                    f"{rule.where}: unstack as {field!r}; expected {{{field}:int}} in {target.to.text!r}"
                )


def _require_distinct(rules: tuple[LayoutRule, ...]) -> None:
    names: set[str] = set()
    for rule in rules:
        if rule.where in names:
            raise InvalidError(f"{rule.where}: comes twice; expected another name, or one rule for these tensors")
        names.add(rule.where)
    first: dict[str, str] = {}
    for rule, text in _written(rules):
        if first.setdefault(text, rule.where) != rule.where:
            raise InvalidError(
                f"{rule.where}: {text} is also written by {first[text]}; expected one rule for each name"
            )


def _written(rules: tuple[LayoutRule, ...]) -> Iterator[tuple[LayoutRule, str]]:
    """Yield rule and shape of each name that a rule writes: two that agree write the same names."""
    for rule in rules:
        for target in rule.targets:
            if target is not None:
                kinds = [
                    "{int}" if f in target.to.widths else f"{{{'|'.join(target.to.choices.get(f, ()))}}}"
                    for f in target.to.fields
                ]
                yield rule, "".join(a + b for a, b in zip(target.to.literals, (*kinds, ""), strict=True))
