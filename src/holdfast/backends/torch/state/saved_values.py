"""What a checkpoint has under a name of the state: its entries, and whether it is of another kind than the state's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from numbers import Number

import torch

from holdfast.base.ports.framework import Catalog, Misfit
from holdfast.base.types.values import Group, Value, is_subclass_record


def children_of(saved: Value) -> Mapping[str, Value]:
    """Return the entries of a saved value by name; the items of a list or tuple by number."""
    if isinstance(saved, Group):
        return saved.items
    if isinstance(saved, dict):
        return {key: value for key, value in saved.items() if isinstance(key, str)}
    if isinstance(saved, list | tuple):
        return {str(number): item for number, item in enumerate(saved)}
    return {}


def misfit_of_value(path: str, present: object, saved: Value, catalog: Catalog) -> Misfit | None:
    """Return why a plain value of the state cannot take what the checkpoint has under its name; None if it has nothing.

    Args:
        path: Name of the value.
        present: The value in the state.
        saved: The `Group` that the checkpoint's tree has there; anything else if it has none.
        catalog: The checkpoint.
    """
    if isinstance(saved, Group):
        found, wanted = _GROUPS[saved.kind]
    elif catalog.stored_fqn(path) in catalog.tensors:
        found, wanted = "a tensor", "a tensor"
    else:
        return None
    return Misfit(
        f"{path} is {found} in the checkpoint and {_noun(present)} here: pass {wanted}", is_certain=True, fqn=path
    )


def lost_optimizers(path: str, present: object, saved: Value) -> Iterator[Misfit]:
    """Yield a misfit for each state dict, of an optimizer without state, in a plain value of the state.

    A load would set another dict in its place. A caller who goes on with the first has no moments, and under a mesh the
    moments of the other would be whole on each rank.

    Args:
        path: Name of the value.
        present: The value in the state.
        saved: What the checkpoint has there.
    """
    if isinstance(present, dict) and _is_unstepped(present):
        state = children_of(saved).get("state")
        if state.items if isinstance(state, Group) else state:
            yield Misfit(
                f"{path} is the state dict of an optimizer with state in the checkpoint, and of one without state "
                "here: pass the optimizer itself, and the load makes its state",
                is_certain=True,
                fqn=f"{path}.state",
            )
        return
    pairs: Iterable[tuple[object, object, Value]] = ()  # The entries of a group are compared one by one.
    if isinstance(present, dict) and isinstance(saved, dict):
        pairs = ((key, present[key], saved[key]) for key in present if key in saved)
    elif isinstance(present, list | tuple) and isinstance(saved, list | tuple):
        pairs = zip(range(len(saved)), present, saved, strict=False)
    for key, mine, theirs in pairs:
        if isinstance(mine, dict | list | tuple):
            yield from lost_optimizers(f"{path}.{key}", mine, theirs)


def _is_unstepped(value: Mapping[object, object]) -> bool:
    """Return whether a dict has the form of `Optimizer.state_dict()` before the first step."""
    groups, state = value.get("param_groups"), value.get("state")
    are_groups = isinstance(groups, list) and all(isinstance(each, dict) and "params" in each for each in groups)
    return are_groups and bool(groups) and isinstance(state, dict) and not state


def misfit_of_tensor(path: str, saved: Value) -> Misfit | None:
    """Return why a tensor of the state cannot take the value that the checkpoint has under its name."""
    if is_subclass_record(saved):
        kind = saved.value.get("class") if isinstance(saved.value, dict) else None
        text = f"{path} is a {str(kind)[:200]} in the checkpoint and a tensor here: pass one of that class"
        return Misfit(text, is_certain=True)
    if saved is None or isinstance(saved, str | Number):
        found = _noun(saved)
        return Misfit(f"{path} is {found} in the checkpoint and a tensor here: pass {found}", is_certain=True, fqn=path)
    return None


_GROUPS = {
    "dict": ("a dict or list of tensors or objects", "one with the same keys"),
    "module": ("a module", "the module"),
    "optimizer": ("an optimizer", "the optimizer"),
    "stateful": ("the state of an object", "an object with state_dict() and load_state_dict()"),
}
"""What each kind of group was in the saved state, and what to pass for it."""


def _noun(value: object) -> str:
    """Return the kind of a value with its article, as in "a float"."""
    if value is None:
        return "None"
    kind = "tensor" if isinstance(value, torch.Tensor) else type(value).__name__
    return f"{'an' if kind[0] in 'aeioAEIO' else 'a'} {kind}"
