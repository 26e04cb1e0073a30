"""What of a training state is its model, and the names its tensors have where there is nothing but the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.errors import InvalidError
from holdfast.types.export import ExportContent
from holdfast.types.values import Group

_MODEL = "model"

Part = Callable[[str], str | None]
"""Takes a name of the content to the one it has in a part of it; None: it does not belong there."""


@dataclass(frozen=True, slots=True)
class PartNames:
    """A part of what is exported, by the names it has there."""

    names: Mapping[str, str]
    """By stored FQN, the name under which a tensor is written: its own, in the order of the content, or, of one that
    is stored outside the part, the first of those it is tied to within."""

    aliases: Mapping[str, str]
    """Every further name, to the one that is written."""


def part_names(content: ExportContent, part: Part) -> PartNames:
    """Return the names of a part: every name of the content that belongs there, stored or tied, and no other."""
    own = ((fqn, part(fqn)) for fqn in content.tensors)
    names = {fqn: name for fqn, name in own if name is not None}
    aliases = {}
    for alias, fqn in content.aliases.items():
        name = part(alias)
        if name is not None and names.setdefault(fqn, name) != name:
            aliases[name] = names[fqn]
    return PartNames(names, aliases)


@dataclass(frozen=True, slots=True)
class ModelNames(PartNames):
    """The model, by the names it has where there is nothing else."""

    key: str
    """Key of the state under which it stood, and which is taken off; empty where there is none."""

    part: Part
    """What belongs to it."""


def model_names(content: ExportContent) -> ModelNames:
    """Return the model, by its names.

    The model is what the state has under the key `model`; without that its one module. The key is taken off. Of several
    modules each keeps its key. In a state without modules, as of a bare state dict, it is everything that is not an
    optimizer's, under the names as they are, also if some begin with `model.`.

    Raises:
        InvalidError: The state has no model.
    """
    key, part = _model_part(content.tree)
    found = part_names(content, part)
    if not found.names:
        keys = sorted({fqn.partition(".")[0] for fqn in content.tensors})
        raise InvalidError(
            f"the state has no model: its tensors lie under {', '.join(keys)[:300] or 'nothing'}; expected `model` or "
            "another module. Export it with the optimizer, or to holdfast"
        )
    return ModelNames(found.names, found.aliases, key, part)


def model_names_if_any(content: ExportContent) -> ModelNames | None:
    """Return the model by its names, or None if the state has none."""
    try:
        return model_names(content)
    except InvalidError:
        return None


def _model_part(tree: Group) -> tuple[str, Part]:
    """Return the key that is taken off the model's names, and which those are."""
    groups = {key: value.kind for key, value in tree.items.items() if isinstance(value, Group)}
    modules = [key for key, kind in groups.items() if kind == "module"]
    optimizers = tuple(f"{key}." for key, kind in groups.items() if kind == "optimizer")
    if isinstance(tree.items.get(_MODEL), Group | dict | list | tuple) and groups.get(_MODEL) != "optimizer":
        modules = [_MODEL]
    if len(modules) == 1:
        prefix = f"{modules[0]}."
        return modules[0], lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None
    if modules:
        prefixes = tuple(f"{key}." for key in modules)
        return "", lambda name: name if name.startswith(prefixes) else None
    return "", lambda name: None if name.startswith(optimizers) else name


def exported_dtype(stored: str, dtype: str | None) -> str:
    """Return what a tensor of the model is cast to: float16, bfloat16, float32 and float64 as asked, others stay.

    Complex numbers have no such type; float8 weights mean nothing without the scales that stand beside them.
    """
    return dtype if dtype is not None and stored in ("float16", "bfloat16", "float32", "float64") else stored
