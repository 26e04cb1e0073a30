"""Rule files that say the same as Transformers' own mapping between the names of files and of models.

The rules are read off the names: numbers become fields, and all names of one form become one rule. The file is then
applied to every name and shape of the model, in both directions, and compared with the mapping.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import holdfast
from holdfast.errors import InvalidError, first_three
from holdfast.integrations.transformers.framework import HOST

_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])")
_HEADS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "PRETRAINING")
"""Kinds of models of a type, the first to be preferred."""

_PART = "part"
"""Field of tensors that a rule joins."""

_SIZED = ("Chunk", "Split", "PermuteForRope")
"""Operations of which rules need sizes."""

_Shape = tuple[int, ...]
_Table = dict[str, object]


class _NoRule(Exception):
    """The mapping has a part that no rule says."""


@dataclass(frozen=True, slots=True)
class _Move:
    """Tensors of files that become tensors of the model."""

    sources: list[list[str]]
    """Names in files for each pattern of the mapping, in the order of the stack."""

    targets: list[str]
    """Names in the model."""

    operations: Sequence[Any]
    """The operations of Transformers."""


@dataclass(frozen=True, slots=True)
class _Model:
    """A model of the default config, on the meta device."""

    config: Any
    files: Mapping[str, _Shape]
    tensors: Mapping[str, _Shape]
    moves: Sequence[_Move]
    tied: frozenset[str]


def layout_of(model_type: str) -> str:
    """Return the rules that lead from the files of a model type to the model in memory, as the text of a layout.

    The names are those of the default config. Files are named as `save_pretrained` writes them.

    Args:
        model_type: A model type of Transformers, as `model_type` in `config.json`.
    Raises:
        InvalidError: Transformers is not installed; there is no such model type; or the mapping has an operation or a
            pattern that no rule says.
    """
    HOST.require()
    try:
        model = _model_of(model_type)
        writer = _RuleWriter(model)
        text = writer.text(model_type)
        _require_same(text, writer.given, model)
    except _NoRule as error:
        raise InvalidError(
            f"model type {model_type[:80]!r}: {error}. Write a rule file, docs/layout-language.md, or load the files "
            "with from_pretrained"
        ) from error
    return text


def _model_of(model_type: str) -> _Model:
    import torch
    from transformers import AutoConfig, conversion_mapping, core_model_loading

    try:
        config = AutoConfig.for_model(model_type)
    except ValueError as error:
        raise _NoRule("Transformers has no such model type; expected one as in config.json") from error
    kind = _class_of(config)
    try:
        with torch.device("meta"):
            model = kind(config)
        tensors = model.state_dict()
        transforms = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
        files = core_model_loading.revert_weight_conversion(model, dict(tensors))
    except Exception as error:
        message = " ".join(str(error).split()).partition(". ")[0][:120]
        raise _NoRule(f"the default config makes no {kind.__name__}: {type(error).__name__}: {message}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    # As `revert_weight_conversion`: the prefix is not known to be in files.
    used = [each for each in transforms if not isinstance(each, core_model_loading.PrefixChange)]
    return _Model(
        config,
        {name: tuple(tensor.shape) for name, tensor in files.items()},
        shapes,
        _moves(files, used, shapes, model.base_model_prefix),
        frozenset(getattr(model, "all_tied_weights_keys", None) or ()),
    )


def _class_of(config: Any) -> Any:
    import importlib

    import transformers
    from transformers.models.auto import modeling_auto

    for table in (*(f"MODEL_FOR_{head}_MAPPING_NAMES" for head in _HEADS), "MODEL_MAPPING_NAMES"):
        name = getattr(modeling_auto, table).get(config.model_type)
        if name is not None:
            return getattr(transformers, name if isinstance(name, str) else name[0])
    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    for each in vars(module).values():
        if isinstance(each, type) and getattr(each, "config_class", None) is type(config):
            return each
    raise _NoRule("Transformers has no model of this config")


def _moves(files: Iterable[str], transforms: Sequence[Any], shapes: Mapping[str, _Shape], prefix: str) -> list[_Move]:
    """Return the moves of tensors, by the mapping itself."""
    from transformers import core_model_loading as loading

    renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    moves, taken = [], defaultdict[tuple[str, int], dict[str, list[str]]](lambda: defaultdict(list))
    for name in sorted(files, key=loading.dot_natural_key):
        made, pattern = loading.rename_source_key(name, renamings, converters, prefix, shapes)
        if made not in shapes and name in shapes:
            made, pattern = name, None
        if pattern is None:
            moves.append(_Move([[name]], [made], ()))
        else:
            taken[made, converters.index(by_pattern[pattern])][pattern].append(name)
    for (made, number), sources in taken.items():
        converter = converters[number]
        first, *_ = converter.target_patterns
        targets = [made.replace(first, each, 1) for each in converter.target_patterns]
        patterns = [each for each in converter.source_patterns if each in sources]
        moves.append(_Move([sources[each] for each in patterns], targets, converter.operations))
    return moves


class _RuleWriter:
    """Writes the rules of a model's moves."""

    def __init__(self, model: _Model) -> None:
        self.given: dict[str, int] = {}
        """Sizes that stand in no tensor, with the numbers of the default config."""
        self._model = model
        self._sizes: dict[str, list[object]] = {}

    def text(self, model_type: str) -> str:
        """Return the rule file."""
        from transformers import __version__

        forms: dict[object, list[_Move]] = defaultdict(list)
        for move in self._model.moves:
            if move.operations or move.sources[0] != move.targets:
                forms[self._form(move)].append(move)
        rules = [self._rule(moves) for moves in forms.values()]
        rules.append({"name": "the rest", "from": "{rest:*}", "to": "{rest}", "optional": True})
        about = f"Files of {model_type} <-> the model in memory; compiled from Transformers {__version__}"
        lines = ["layout = 1", f"about = {_toml(about)}", "follow = ["]
        lines += [f"  {_toml(['optimizer.state.{}.{key}', 'optimizer.state.{}.{key}'])},"]
        lines += [f"  {_toml(['model.{}', 'model.{}'])},", "]"]
        lines += ["", "[sizes]"] if self._sizes else []
        lines += [f"{name} = {_toml(places)}" for name, places in self._sizes.items()]
        for rule in rules:
            lines += ["", "[[rule]]", *(f"{key} = {_toml(value)}" for key, value in rule.items())]
        return "\n".join(lines) + "\n"

    def _form(self, move: _Move) -> object:
        """Return the form of a move; all moves of one form become one rule."""
        names = [*(names[0] for names in move.sources), *move.targets]
        has_sizes = any(type(each).__name__ in _SIZED for each in move.operations)
        shapes = [self._model.tensors.get(name) for name in move.targets] if has_sizes else []
        return repr(([_NUMBER.sub("#", name) for name in names], move.operations, shapes))

    def _rule(self, moves: Sequence[_Move]) -> _Table:
        fields = _Fields(moves)
        first = moves[0]
        sources = [_written(names[0], fields.of_source, "{%s:int}") for names in first.sources]
        targets = [_written(name, of, "{%s}") for name, of in zip(first.targets, fields.of_targets, strict=True)]
        rule: _Table = {"from": sources[0] if len(sources) == 1 else _joined(sources)}
        rule |= self._steps(first, fields.stacked, targets)
        if any(name in self._model.tied for move in moves for name in move.targets):
            rule["optional"] = True
        return rule

    def _steps(self, move: _Move, stacked: str, targets: Sequence[str]) -> _Table:
        """Return the steps that do the operations of a move."""
        kinds, operations = [type(each).__name__ for each in move.operations], move.operations
        to: _Table = {"to": targets[0]}
        are_parts = len(targets) > 1 and len(move.sources) == 1
        match kinds:
            case []:
                return to
            case ["MergeModulelist"] if stacked and len(move.sources) == 1:
                return {"stack": {"dim": operations[0].dim, "by": stacked}, **to}
            case ["MergeModulelist", "Concatenate"] if stacked and operations[0].dim != operations[1].dim:
                stack, dim = operations[0].dim, operations[1].dim
                return {"join": {"dim": dim - (dim > stack), "by": _PART}, "stack": {"dim": stack, "by": stacked}, **to}
            case ["Concatenate"] if len(move.sources) > 1 and not stacked:
                return {"join": {"dim": operations[0].dim, "by": _PART}, **to}
            case ["Transpose"] if not operations[0].check_dims:
                order = [*range(len(self._model.files[move.sources[0][0]]))]
                a, b = operations[0].dim0, operations[0].dim1
                order[a], order[b] = order[b], order[a]
                return {"permute": order, **to}
            case ["Chunk" | "Split"] | ["Chunk", "PermuteForRope"] if are_parts:
                return {"sections": self._sections(move, targets)}
            case ["PermuteForRope"]:
                places = [{"shape": f"model.{name}"} for name in (move.sources[0][0], move.targets[0])]
                return {**self._permuted(operations[0], move.targets[0], self._size("rows", *places)), **to}
        shown = " and ".join(kinds)
        raise _NoRule(f"no rule does {shown} of {', '.join(names[0] for names in move.sources)}")

    def _sections(self, move: _Move, targets: Sequence[str]) -> _Table:
        dim = move.operations[0].dim
        lengths = [self._model.tensors[name][dim] for name in move.targets]
        whole = self._size("whole", {"shape": f"model.{move.sources[0][0]}", "dim": dim})
        parts: list[_Table] = []
        for name, to, length in zip(move.targets, targets, lengths, strict=True):
            is_even = len({*lengths}) == 1
            rest = f"{whole} // {len(lengths)}" if is_even else {"given": f"length of {name}"}
            size = self._size("part", {"shape": f"model.{name}", "dim": dim}, rest)
            self.given |= {} if is_even else {size: length}
            permuted = self._permuted(move.operations[1], name, size) if len(move.operations) > 1 else {}
            parts.append({"length": size, **permuted, "to": to})
        return {"dim": dim, "parts": parts}

    def _permuted(self, operation: Any, name: str, rows: str) -> _Table:
        """Return the step that puts rotary pairs into halves."""
        only, key = operation.permute_layer_names, operation.subconfig_key
        if only is not None and not any(each in name for each in only):
            return {}
        config = getattr(self._model.config, key or "", self._model.config)
        prefix = f"{key}." if key is not None and config is not self._model.config else ""
        place = {"json": "config.json", "key": f"{prefix}num_attention_heads"}
        number = self._size("heads", place, {"given": "heads of queries"})
        self.given[number] = getattr(config, "num_attention_heads", 1)
        return {"interleave": {"dim": 0, "block": f"{rows} // {number}", "by": 2}}

    def _size(self, kind: str, *places: object) -> str:
        known = next((name for name, found in self._sizes.items() if found == [*places]), None)
        name = known or f"{kind}_{len(self._sizes)}"
        self._sizes[name] = [*places]
        return name


class _Fields:
    """The numbers in the names of one rule: each is a field on both sides, or the same in all names."""

    def __init__(self, moves: Sequence[_Move]) -> None:
        first = moves[0].sources[0][0]
        self.stacked = ""
        """Name of the field that a stack puts together; empty if there is none."""
        self.of_source: dict[int, str] = {}
        """Fields by the number's place in a source."""
        self.of_targets: list[dict[int, str]] = []
        """Likewise in each target."""
        rows = [_numbers(move.sources[0][0]) for move in moves]
        varying = [at for at in range(len(rows[0])) if len({_numbers(name)[at] for name in moves[0].sources[0]}) > 1]
        if len(varying) > 1 or any(_numbers(names[0]) != rows[0] for names in moves[0].sources):
            raise _NoRule(f"the names {first_three([*moves[0].sources[0]])} have several numbers of their own")
        for at in range(len(moves[0].targets)):
            named: dict[int, str] = {}
            free = [source for source in range(len(rows[0])) if source not in varying]
            columns = [_numbers(move.targets[at]) for move in moves]
            for place in range(len(columns[0])):
                values = [column[place] for column in columns]
                source = next((each for each in free if [row[each] for row in rows] == values), None)
                if source is not None:
                    free.remove(source)
                    named[place] = self.of_source.setdefault(source, _field(first, source, self.of_source))
                elif len({*values}) > 1:
                    raise _NoRule(f"{moves[0].targets[at]} has a number that {first} lacks")
            self.of_targets.append(named)
        for at in varying:
            self.stacked = self.of_source[at] = _field(first, at, self.of_source)
        if any(len({row[at] for row in rows}) > 1 for at in range(len(rows[0])) if at not in self.of_source):
            raise _NoRule(f"{first} has a number that {moves[0].targets[0]} lacks")


def _written(name: str, fields: Mapping[int, str], form: str) -> str:
    """Return a name with fields for numbers."""
    places = itertools.count()
    return _NUMBER.sub(lambda found: form % fields[at] if (at := next(places)) in fields else found[0], name)


def _numbers(name: str) -> list[str]:
    return _NUMBER.findall(name)


def _field(name: str, at: int, taken: Mapping[int, str]) -> str:
    """Return the name of a field: the word before the number, without the plural."""
    *_, found = itertools.islice(_NUMBER.finditer(name), at + 1)
    word = name[: found.start() - 1].rpartition(".")[2].removesuffix("s")
    return word if word.isidentifier() and word not in taken.values() else f"n{at}"


def _joined(templates: Sequence[str]) -> str:
    """Return one template for names that differ in one run of parts between dots."""
    split = [template.split(".") for template in templates]
    shortest = min(map(len, split))
    head = tail = 0
    while head < shortest - 1 and len({parts[head] for parts in split}) == 1:
        head += 1
    while tail < shortest - head - 1 and len({parts[-tail - 1] for parts in split}) == 1:
        tail += 1
    choices = [".".join(parts[head : len(parts) - tail]) for parts in split]
    if any("{" in choice for choice in choices):
        raise _NoRule(f"{first_three([*templates])} differ in more than one word")
    field = f"{{{_PART}:{'|'.join(choices)}}}"
    return ".".join([*split[0][:head], field, *split[0][len(split[0]) - tail :]])


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, list) else json.dumps(value)


def _require_same(text: str, given: Mapping[str, int], model: _Model) -> None:
    """Require that the rules make each name and shape of the model from those of the files, and the other way."""
    files, tensors = ({f"model.{name}": shape for name, shape in side.items()} for side in (model.files, model.tensors))
    layout = holdfast.Layout(text, sizes=given)
    for one, found, expected in ((layout, files, tensors), (layout.reversed(), tensors, files)):
        try:
            made = one.shapes(found)
        except InvalidError as error:
            raise _NoRule(f"the rules say something else: {error}") from error
        if made != expected:
            unlike = sorted(name for name in {*made, *expected} if made.get(name) != expected.get(name))
            raise _NoRule(f"the rules say something else than the mapping of {first_three(unlike)}")
