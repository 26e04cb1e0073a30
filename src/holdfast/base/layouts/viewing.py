"""Makes the view of a layout: every stored tensor finds its rule, and the rule's targets get names and terms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.layouts.lower import Lowered, Shape
from holdfast.base.layouts.rule_file import LayoutRule, RuleFile
from holdfast.base.layouts.sizes import LayoutSizes
from holdfast.base.layouts.template import Fields, Template
from holdfast.base.types.view import View, ViewedTensor
from holdfast.errors import InvalidError, first_three

_Slot = tuple[int, tuple[int, ...]]
"""Part, and numbers of the fields that only this side has."""

_Fields = tuple[tuple[str, int | str], ...]


_Key = tuple[int, _Fields, str, _Fields]
"""Line of `follow` and its fields; rule, and the fields that both sides of it have."""


@dataclass(slots=True)
class _Group:
    """Stored tensors that one rule takes together, because the rest of the names agrees."""

    rule: LayoutRule
    line: int
    """Number of the line of `follow`."""
    followed: dict[str, int | str]
    """Fields of that line."""
    shared: dict[str, int | str]
    """Fields that both sides of the rule have."""
    names: dict[_Slot, str] = field(default_factory=dict)
    """Stored names."""
    parameters: list[str] = field(default_factory=list)
    """The names that follow from `follow`."""


class Viewing:
    """Makes the view of one layout over the tensors of one checkpoint."""

    def __init__(self, file: RuleFile, sizes: LayoutSizes, *, turned: bool) -> None:
        """Prepare the rules of a layout.

        Args:
            file: The layout.
            sizes: The sizes.
            turned: Whether the rules are read from right to left.
        """
        self._file, self._sizes, self._turned = file, sizes, turned
        self._where = f"layout {file.name}{', turned around' if turned else ''}"
        self._reads: list[tuple[LayoutRule, int, Template]] = []
        for rule in file.rules:
            if not turned:
                self._reads.append((rule, 0, rule.source))
            elif rule.skip or None in rule.targets:
                if not rule.skip:
                    raise InvalidError(
                        f"{rule.where}: skips a part, so it has no way back. Write a layout for the other direction"
                    )
            else:
                self._reads += [(rule, part, made.to) for part, made in enumerate(rule.targets) if made is not None]
        self._lowered: dict[object, Lowered] = {}

    def view(self, tensors: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> View:
        """Return the view.

        Args:
            tensors: The stored tensors.
            aliases: Tied names, to stored ones.
        Raises:
            InvalidError: A rule, a size or a name does not fit; the message has the numbers and the next act.
        """
        self._viewed: dict[str, ViewedTensor] = {}
        self._made_by: dict[str, tuple[str, ...]] = {}
        self._parameters: dict[str, tuple[str, ...]] = {}
        equal: list[tuple[str, str]] = []
        groups, skipped = self._grouped(tensors)
        lowered: dict[object, tuple[Lowered, _Group]] = {}
        parameter_line = len(self._file.follow) - 1
        for key, group in sorted(groups.items(), key=lambda item: -item[0][0]):
            of_parameter = lowered.get((parameter_line, *key[2:]))
            specs = [tensors[name] for name in group.names.values()]
            if (
                of_parameter is not None
                and group.line != parameter_line
                and self._counts(specs, of_parameter[1], tensors)
            ):
                self._make(group, of_parameter[0], specs[0], is_count=True)
                equal += [(specs[0].fqn, other.fqn) for other in specs[1:]]
            else:
                one = self._lower(group, specs)
                lowered[key[0], *key[2:]] = one, group
                self._make(group, one, specs[0])
        tied = self._tied(aliases)
        keys = self._file.follow[-1].keys
        return View(
            tensors=self._viewed,
            aliases=tied,
            made=self._made_by,
            parameters=self._parameters,
            skipped=skipped,
            keys=keys[::-1] if self._turned else keys,
            equal=equal,
            sizes={name: self._sizes.found[name] for name in self._file.sizes if name in self._sizes.found},
        )

    def _add(self, tensor: ViewedTensor) -> None:
        if (other := self._viewed.setdefault(tensor.spec.fqn, tensor)) is not tensor:
            raise InvalidError(
                f"{self._where}: rules {other.rule} and {tensor.rule} both make {tensor.spec.fqn}, of "
                f"{other.sources[0]} and {tensor.sources[0]}; expected one source for a name. Correct them"
            )

    # Which rule takes a tensor.

    def _grouped(self, tensors: Mapping[str, TensorSpec]) -> tuple[dict[_Key, _Group], dict[str, str]]:
        groups: dict[_Key, _Group] = {}
        skipped: dict[str, str] = {}
        unmatched: list[str] = []
        used: set[str] = set()
        for name in tensors:
            found = self._find(name)
            if found is None:
                unmatched.append(name)
                continue
            line, parameter, followed, (rule, part, template, fields) = found
            used.add(rule.where)
            if rule.skip:
                skipped[name] = rule.skip
                continue
            if rule.only_renames:
                self._rename(tensors[name], rule, fields, line, parameter, followed)
                continue
            own = rule.spread if self._turned else rule.gathered
            numbers = tuple([_number(template, each, fields[each]) for each in own])
            shared = {each: value for each, value in fields.items() if each not in own} if own else fields
            key = (line, tuple(followed.items()), rule.where, tuple(sorted(shared.items())))
            group = groups.get(key)
            if group is None:
                group = groups[key] = _Group(rule, line, followed, shared)
            group.names[part, numbers] = name
            group.parameters.append(parameter)
        if unmatched:
            raise InvalidError(f"{self._where}: {self._unmatched(unmatched)}")
        for rule in self._file.rules:
            if rule.where not in used and not rule.optional and not (self._turned and rule.skip):
                read = (
                    rule.source.text
                    if not self._turned
                    else first_three([each.to.text for each in rule.targets if each])
                )
                raise InvalidError(
                    f"{rule.where}: takes no tensor: the checkpoint has no name as {read}. Correct the rule, or say "
                    "optional = true"
                )
        return groups, skipped

    def _unmatched(self, names: Sequence[str]) -> str:
        """Return why no rule takes tensors, and the next act."""
        lines = (line.read(names[0], turned=self._turned) for line in self._file.follow)
        handed = next((each[0] for each in lines if each is not None), None)
        if handed is None:
            return (
                f"no line of follow matches {first_three(names)}; expected a line for each kind of name. Add one, as "
                '["optimizer.{}", "optimizer.{}"], and a rule, with skip if the names are not wanted; or try the '
                "layout the other way around"
            )
        called = "" if handed == names[0] else f" (follow hands {handed} to the rules)"
        return (
            f"no rule takes {first_three(names)}{called}; expected a rule for each tensor. Add one, or one with skip; "
            "or try the layout the other way around"
        )

    def _find(
        self, name: str
    ) -> tuple[int, str, dict[str, int | str], tuple[LayoutRule, int, Template, dict[str, int | str]]] | None:
        for number, line in enumerate(self._file.follow):
            followed = line.read(name, turned=self._turned)
            if followed is None:
                continue
            for rule, part, template in self._reads:
                fields = template.read(followed[0])
                if fields is not None:
                    return number, *followed, (rule, part, template, fields)
            return None
        return None

    # The targets of a group.

    def _counts(self, specs: Sequence[TensorSpec], parameter: _Group, tensors: Mapping[str, TensorSpec]) -> bool:
        """Return whether tensors are counts of steps: one element each, of parameters that have more."""
        shape = tensors[next(iter(parameter.names.values()))].global_shape
        counts = [math.prod(spec.global_shape) == 1 and spec.global_shape != shape for spec in specs]
        if all(counts) and len(specs) != len(parameter.names):
            raise InvalidError(
                f"{parameter.rule.where}: {first_three([spec.fqn for spec in specs])}: counts of {len(specs)} of "
                f"{len(parameter.names)} parameters that become one; expected a count for each"
            )
        return all(counts)

    def _rename(
        self,
        spec: TensorSpec,
        rule: LayoutRule,
        fields: dict[str, int | str],
        line: int,
        parameter: str,
        followed: dict[str, int | str],
    ) -> None:
        """Give a tensor another name."""
        made = self._renamed(rule, fields)
        name = self._file.follow[line].write(made, followed, turned=self._turned)
        self._add(ViewedTensor(TensorSpec(name, spec.dtype, spec.global_shape), (spec.fqn,), None, rule.name))
        self._made_by[spec.fqn] = (name,)
        if line == len(self._file.follow) - 1:
            self._parameters[parameter] = (made,)

    def _renamed(self, rule: LayoutRule, fields: Fields) -> str:
        if self._turned:
            return rule.source.write(fields)
        (target,) = rule.targets
        assert target is not None, "a rule of names alone skips nothing"
        return target.to.write(fields)

    def _lower(self, group: _Group, specs: Sequence[TensorSpec]) -> Lowered:
        rule = group.rule
        self._require_alike(group, specs)
        counts = self._numbers_of(group)
        shapes: list[Shape] = []
        names: list[str] = []
        for part in range(len(rule.targets)) if self._turned else (0,):
            name = next((name for (at, _), name in group.names.items() if at == part), None)
            if name is None:
                made = rule.targets[part]
                assert made is not None
                raise InvalidError(
                    f"{rule.where}: the checkpoint has {specs[0].fqn}, and no tensor as {made.to.text} with it; "
                    "expected all parts"
                )
            names.append(name)
            shapes.append(next(spec.global_shape for spec in specs if spec.fqn == name))
        key = (rule.where, tuple(shapes), counts)
        lowered = self._lowered.get(key)
        if lowered is None:
            lowered = Lowered(rule, self._sizes)
            if self._turned:
                lowered.backward(shapes, counts, names)
            else:
                lowered.forward(shapes[0], counts, names[0])
            self._require_values(rule, lowered)
            self._lowered[key] = lowered
        return lowered

    def _require_values(self, rule: LayoutRule, lowered: Lowered) -> None:
        """Require as many tensors along a field as the field lists values."""
        made = next((target.to for target in rule.targets if target is not None), rule.source)
        fields = [(made, name, dim) for dim, name, _ in rule.unstack] + [
            (rule.source, name, dim) for dim, name in rule.stack
        ]
        counts = [*lowered.spread, *lowered.gathered[len(lowered.gathered) - len(rule.stack) :]]
        for (template, name, dim), count in zip(fields, counts, strict=True):
            if name in template.choices and count != len(template.choices[name]):
                raise InvalidError(
                    f"{rule.where}: {count} tensors along dimension {dim}; expected {len(template.choices[name])}, the "
                    f"values of {name}"
                )

    def _require_alike(self, group: _Group, specs: Sequence[TensorSpec]) -> None:
        by_part: dict[int, TensorSpec] = {}
        for (part, _), spec in zip(group.names, specs, strict=True):
            first = by_part.setdefault(part, spec)
            if first.global_shape != spec.global_shape or specs[0].dtype != spec.dtype:
                raise InvalidError(
                    f"{group.rule.where}: {first.fqn} is {first.dtype} {list(first.global_shape)}, {spec.fqn} is "
                    f"{spec.dtype} {list(spec.global_shape)}; expected one shape and dtype, to put them together"
                )

    def _numbers_of(self, group: _Group) -> tuple[int, ...]:
        """Return the values of each field that only the side that is read has: 0 … n − 1, once each."""
        rule, fields = group.rule, group.rule.spread if self._turned else group.rule.gathered
        counts = tuple(1 + max(numbers[at] for _, numbers in group.names) for at in range(len(fields)))
        for part in {part for part, _ in group.names}:
            for numbers in itertools.product(*map(range, counts)):
                if (part, numbers) not in group.names:
                    lacks = ", ".join(f"{name} {number}" for name, number in zip(fields, numbers, strict=True))
                    raise InvalidError(
                        f"{rule.where}: no tensor with {lacks} for {next(iter(group.names.values()))}; expected each "
                        f"from 0 to {', '.join(str(count - 1) for count in counts)}, once"
                    )
        return counts

    def _make(self, group: _Group, lowered: Lowered, spec: TensorSpec, *, is_count: bool = False) -> None:
        """Make the targets of a group; a count of steps goes to every target of the parameter."""
        rule, line = group.rule, self._file.follow[group.line]
        slots = lowered.targets if self._turned else [(0, values) for values in lowered.sources]
        terms_of = lowered.terms_of_source if self._turned else lowered.terms_of_target
        open_dim = rule.pad[0] if self._turned and rule.pad is not None else None
        sources = () if is_count else tuple([group.names[each] for each in slots])
        parameters, names = [], []
        for slot, (parameter, shape) in enumerate(self._targets(group, lowered)):
            name = line.write(parameter, group.followed, turned=self._turned)
            parameters.append(parameter)
            names.append(name)
            if is_count:
                copied = TensorSpec(name, spec.dtype, spec.global_shape)
                self._add(ViewedTensor(copied, (spec.fqn,), None, rule.name))
            else:
                made = TensorSpec(name, spec.dtype, shape)
                self._add(ViewedTensor(made, sources, partial(terms_of, slot), rule.name, open_dim))
        self._made_by |= dict.fromkeys(group.names.values(), tuple(names))
        if group.line == len(self._file.follow) - 1:
            self._parameters |= dict.fromkeys(group.parameters, tuple(parameters))

    def _targets(self, group: _Group, lowered: Lowered) -> Iterator[tuple[str, Shape]]:
        """Yield name and shape of each target, as of a parameter, in the order of the slots."""
        rule, shared = group.rule, group.shared
        if self._turned:
            for values in lowered.sources:
                yield rule.source.write(shared | _named(rule.source, rule.gathered, values)), lowered.source_shape
            return
        for part, values in lowered.targets:
            made = rule.targets[part]
            assert made is not None, "a part that is skipped is no target"
            yield made.to.write(shared | _named(made.to, rule.spread, values)), lowered.target_shapes[part]

    def _tied(self, aliases: Mapping[str, str]) -> dict[str, str]:
        """Return the tied names of the view: those of the checkpoint, and those of the layout that no rule makes."""
        tied: dict[str, str] = {}
        for alias, stored in aliases.items():
            made, found = self._made_by.get(stored, ()), self._find(alias)
            if len(made) != 1 or found is None:
                continue
            line, _, followed, (rule, _, _, fields) = found
            kept = self._find(stored)
            if rule.skip or rule.spread or rule.gathered or kept is None or rule.steps != kept[3][0].steps:
                continue
            name = self._file.follow[line].write(self._renamed(rule, fields), followed, turned=self._turned)
            if name not in self._viewed:
                tied[name] = made[0]
        of_parameters = self._file.follow[-1]
        for pair in () if self._turned else self._file.ties.items():
            alias, name = (of_parameters.write(each, {}, turned=False) for each in pair)
            if name in self._viewed and alias not in self._viewed:
                tied[alias] = name
        return tied


def _number(template: Template, name: str, value: int | str) -> int:
    """Return the number of a value of a field."""
    return value if isinstance(value, int) else template.choices[name].index(value)


def _named(template: Template, names: Sequence[str], numbers: Sequence[int]) -> dict[str, int | str]:
    """Return the values of fields by number."""
    return {
        name: template.choices[name][number] if name in template.choices else number
        for name, number in zip(names, numbers, strict=True)
    }
