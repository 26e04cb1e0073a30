"""Decides which part of a training state is the model, and the names of its tensors in a model-only file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.base.types.export import ExportContent
from holdfast.base.types.values import Group
from holdfast.errors import InvalidError, first_three

_MODEL = "model"

Part = Callable[[str], str | None]
"""Maps a name of the content to its name in a part of it; None if it is not in the part."""


@dataclass(frozen=True, slots=True)
class PartNames:
    """The tensors of a part of an export, by their names in that part."""

    part: Part
    """Maps a name of the content to its name in the part."""

    names: Mapping[str, str]
    """Name in the part by stored FQN, in the order of the content. If the stored name is outside the part, it is the
    first tied name inside."""

    aliases: Mapping[str, str]
    """Each further name in the part, to the name in `names`."""

    key: str
    """Key of the part in the state, which is removed from its names; empty if there is none."""


def part_names(content: ExportContent, part: Part, key: str = "") -> PartNames:
    """Return all names of a part, stored and tied."""
    stored = ((fqn, part(fqn)) for fqn in content.tensors)
    names = {fqn: name for fqn, name in stored if name is not None}
    aliases = {}
    for alias, fqn in content.aliases.items():
        name = part(alias)
        # If the stored name is outside the part, the first tied name inside takes its place.
        if name is not None and names.setdefault(fqn, name) != name:
            aliases[name] = names[fqn]
    return PartNames(part, names, aliases, key)


def model_names(content: ExportContent, *, required: bool) -> PartNames:
    """Return the names of the model.

    The model is the value under the key `model`, or else the only module; the key is removed from its names. If there
    are several modules, each keeps its key. In a state without modules, e.g. a bare state dict, the model is everything
    outside optimizers, and names stay as they are, even those that begin with `model.`.

    Args:
        content: The content of the checkpoint.
        required: Whether to refuse a state without a model. If not, its model has no names.
    Raises:
        InvalidError: The state has no model.
    """
    key, part = _model_part(content.tree)
    model = part_names(content, part, key)
    if required and not model.names:
        keys = first_three(sorted({fqn.partition(".")[0] for fqn in content.tensors}))
        raise InvalidError(
            f"the state has no model: its tensors are under {keys or 'no key'}; expected `model` or another module. "
            "Export it with the optimizer, or to holdfast"
        )
    return model


def _model_part(tree: Group) -> tuple[str, Part]:
    """Return the key that is removed from the model's names, and the mapping of names."""
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
    """Return the element type of a model tensor in the export: `dtype` for floats of 16 to 64 bits, else unchanged.

    Complex tensors have no counterpart, and float8 weights are meaningless without the scales that are stored beside.
    """
    return dtype if dtype is not None and stored in ("float16", "bfloat16", "float32", "float64") else stored
