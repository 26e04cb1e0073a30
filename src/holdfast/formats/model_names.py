"""What of a training state is its model, and the names its tensors have where there is nothing but the model."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.errors import InvalidError
from holdfast.spec.export import ExportContent
from holdfast.spec.values import Group

_MODEL = "model"


def model_names(content: ExportContent) -> Mapping[str, str]:
    """Return the names of the model's tensors by stored FQN, in the order of the content.

    The model is what is stored under `model.`; without that the one module of the state. Its key is taken off. Of
    several modules each keeps its key. In a state without modules it is everything that is not an optimizer's.

    Raises:
        InvalidError: The state has no model.
    """
    groups = {key: value.kind for key, value in content.tree.items.items() if isinstance(value, Group)}
    modules = [key for key, kind in groups.items() if kind == "module"]
    if groups.get(_MODEL) in ("module", "dict") or any(fqn.startswith(f"{_MODEL}.") for fqn in content.tensors):
        modules = [_MODEL]
    if len(modules) == 1:
        prefix = f"{modules[0]}."
        names = {fqn: fqn.removeprefix(prefix) for fqn in content.tensors if fqn.startswith(prefix)}
    elif modules:
        prefixes = tuple(f"{key}." for key in modules)
        names = {fqn: fqn for fqn in content.tensors if fqn.startswith(prefixes)}
    else:
        others = tuple(f"{key}." for key, kind in groups.items() if kind == "optimizer")
        names = {fqn: fqn for fqn in content.tensors if not fqn.startswith(others)}
    if not names:
        keys = sorted({fqn.partition(".")[0] for fqn in content.tensors})
        raise InvalidError(
            f"the state has no model: its tensors lie under {', '.join(keys)[:300] or 'nothing'}; expected `model` or "
            "another module. Export it with the optimizer, or to holdfast"
        )
    return names


def model_aliases(content: ExportContent, names: Mapping[str, str]) -> Mapping[str, str]:
    """Return the model's tied names: each name that is not stored to that under which it is.

    Args:
        content: What is exported.
        names: As `model_names` returned them.
    """
    taken = {fqn: len(fqn) - len(name) for fqn, name in names.items()}
    return {alias[taken[fqn] :]: names[fqn] for alias, fqn in content.aliases.items() if fqn in names}


def exported_dtype(stored: str, dtype: str | None) -> str:
    """Return what a tensor of the model is cast to: float16, bfloat16, float32 and float64 as asked, others stay.

    Complex numbers have no such type; float8 weights mean nothing without the scales that stand beside them.
    """
    return dtype if dtype is not None and stored in ("float16", "bfloat16", "float32", "float64") else stored
