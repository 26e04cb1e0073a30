"""State that an optimizer keeps outside the state of its parameters, as its own `state_dict` shows it.

Calling `state_dict` is not always safe: torch's state-dict helpers step an optimizer that has no state yet.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.backends.torch.optimizers.members import OF_THE_BASE_CLASS, directly_inside
from holdfast.backends.torch.optimizers.state import OptimizerView
from holdfast.backends.torch.private_layout import local_tensor
from holdfast.errors import InvalidError, first_three

_STEPPING = {"step", "get_optimizer_state_dict", "get_state_dict"}
"""Names in the code of a `state_dict` that may step. torch's helpers step an optimizer that has no state yet."""

_DEPTH_MAX = 3
"""How deep containers are searched for tensors."""


@dataclass(frozen=True, slots=True)
class CustomState:
    """State that an optimizer keeps outside the `state` of its parameters."""

    names: tuple[str, ...]
    """Entries of its `state_dict`, or its attributes, that hold this state."""

    state: Mapping[str, object] | None
    """What `state_dict()` returned; None if calling it may step the optimizer."""


def custom_state(view: OptimizerView) -> CustomState | None:
    """Return the state that an optimizer keeps outside `state`, or None.

    Every optimizer with a `state_dict` of its own is asked at every save, and on every rank. What an answer holds
    depends on the steps so far: slow weights may begin with any step. And a `state_dict` may be a collective, while
    which parameters have state differs by rank. Of an optimizer that holds no other, only tensors count: plain entries
    were always left out.

    Raises:
        InvalidError: Its `state_dict` raises.
    """
    optimizer = view.optimizer
    if not has_own_state_dict(optimizer):
        return None
    holds_others = any(True for _ in directly_inside(optimizer))
    held = [each for member in view.members for each in (*member.state.values(), *member.param_groups)]
    own = {0, *(_address(tensor) for tensor in _tensors(held, _DEPTH_MAX + 1))}
    if may_step(view):
        names = tuple(_attributes_with_tensors(optimizer, own))
        return CustomState(names, None) if names else None
    try:
        state = optimizer.state_dict()
    except Exception as error:
        if not holds_others:
            return None  # Its state by parameter is all that can be had.
        raise InvalidError(
            f"{view.path}: {type(optimizer).__name__}.state_dict() raised {type(error).__name__}: {error}; expected "
            "its state. Pass the optimizer inside it, or leave it out with skip="
        ) from error
    asked = state
    if not holds_others and _is_copy(state.get("state"), optimizer):
        asked = {key: value for key, value in state.items() if key != "state"}
    unexplained = _unexplained(asked, own, "", plain_too=holds_others)
    names = tuple(dict.fromkeys(name.partition(".")[0] for name in unexplained))
    return CustomState(names, state) if names else None


def require_whole_state(view: OptimizerView, outside: CustomState) -> Mapping[str, object]:
    """Return the state of an optimizer that is saved as an object, by its own `state_dict`.

    Raises:
        InvalidError: Calling `state_dict` may step the optimizer, or it has sharded parameters.
    """
    kind, names = type(view.optimizer).__name__, first_three(outside.names)
    if outside.state is None:
        raise InvalidError(
            f"{view.path}: {kind} keeps tensors in {names}, outside the state of its parameters, and its state_dict() "
            f"may step it; expected state by parameter. {_ADVICE}"
        )
    if is_sharded(view):
        raise InvalidError(
            f"{view.path}: {kind} keeps {names} outside the state of its parameters, and its parameters are sharded; "
            f"expected state by parameter, which alone fits other layouts. {_ADVICE}"
        )
    return outside.state


_ADVICE = "Pass the optimizers inside it, and the rest as an object with state_dict() and load_state_dict()"


def is_sharded(view: OptimizerView) -> bool:
    """Return whether an optimizer has a parameter of which this rank may hold a part only."""
    return any(isinstance(parameter, DTensor) or id(parameter) in view.declared for parameter in view.names)


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Return whether the class of an optimizer overrides `state_dict`."""
    return type(optimizer).state_dict is not Optimizer.state_dict


def may_step(view: OptimizerView) -> bool:
    """Return whether the `state_dict` of an optimizer may step, as far as code can be followed."""
    return any(_may_step(type(each)) for each in (view.optimizer, *view.members) if has_own_state_dict(each))


def _may_step(kind: type[Optimizer]) -> bool:
    if kind not in _may_step_of:
        _may_step_of[kind] = _mentions(kind.state_dict, kind, set())
    return _may_step_of[kind]


_may_step_of: WeakKeyDictionary[type[Optimizer], bool] = WeakKeyDictionary()
"""Answers of `_may_step` by class."""


def _mentions(function: object, kind: type, seen: set[int]) -> bool:
    """Return whether a function, or a function or method that it names, names one of `_STEPPING`."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType) or id(function) in seen:
        return False
    if function.__name__ in _STEPPING:
        return True
    seen.add(id(function))
    if function.__module__.partition(".")[0] == "torch":
        return False
    names = set(_names_in(function.__code__))
    if not names.isdisjoint(_STEPPING):
        return True
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    # All classes, not the attribute of `kind` alone: `super()` calls what a base class overrides.
    methods = [vars(base).get(name) for base in kind.__mro__ for name in names]
    named = [function.__globals__.get(name) for name in names]
    return any(_mentions(each, kind, seen) for each in (*named, *methods, *cells))


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the memory of a tensor; 0 if it has no elements."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    try:
        return local.data_ptr() if local.numel() else 0
    except RuntimeError:
        # Subclasses that wrap other tensors have no address.
        return id(tensor)


def _is_copy(stated: object, optimizer: Optimizer) -> bool:
    """Return whether stated state has the keys, shapes and dtypes of an optimizer's `state`, in the same order.

    Some optimizers return copies, for example in host memory. Tensors of another dtype are no copies: they were
    computed with something that `state` lacks, such as a scale.
    """
    if not isinstance(stated, Mapping) or len(stated) != len(optimizer.state):
        return False
    pairs = zip(stated.values(), optimizer.state.values(), strict=True)
    return all(_form(entries) == _form(own) for entries, own in pairs)


def _form(entries: object) -> object:
    """Return key, shape and dtype of each tensor in the state of one parameter."""
    if not isinstance(entries, Mapping):
        return None
    return {key: (each.shape, each.dtype) for key, each in entries.items() if isinstance(each, torch.Tensor)}


def _unexplained(value: object, own: set[int], name: str, *, plain_too: bool) -> Iterator[str]:
    """Yield the names of entries that are neither state of a parameter, nor in a state dict of an optimizer."""
    if isinstance(value, torch.Tensor):
        if _address(value) not in own:
            yield name
    elif isinstance(value, dict):
        is_state_dict = {"state", "param_groups"} <= value.keys()
        for key, entry in value.items():
            plain_counts = plain_too and not (is_state_dict and key in ("state", "param_groups"))
            yield from _unexplained(entry, own, f"{name}.{key}" if name else str(key), plain_too=plain_counts)
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            yield from _unexplained(entry, own, f"{name}.{number}", plain_too=plain_too)
    elif value is not None and plain_too:
        yield name


def _attributes_with_tensors(optimizer: Optimizer, own: set[int]) -> Iterator[str]:
    """Yield the attributes of an optimizer that hold tensors which are no state of a parameter."""
    for name, value in vars(optimizer).items():
        if name in OF_THE_BASE_CLASS or isinstance(value, torch.nn.Module | Optimizer):
            continue
        if any(_address(tensor) not in own for tensor in _tensors(value)):
            yield name


def _tensors(value: object, depth: int = _DEPTH_MAX) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple) and depth:
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(entry, depth - 1)
