"""Optimizer state by FQN, read from `optimizer.state` and `param_groups` only.

PyTorch's state-dict helpers are not used. They run `optimizer.step()` on an unstepped optimizer, fail on partly filled
state, and apply one group's learning rate to all if groups differ.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from holdfast.backends.torch.containers import small_tensor, take_apart
from holdfast.backends.torch.local_shards import coordinates_of, declared_like, dtensor_like
from holdfast.backends.torch.optimizers.members import OptimizerMembers
from holdfast.backends.torch.optimizers.parts import ParameterPart
from holdfast.backends.torch.private_layout import local_tensor
from holdfast.backends.torch.subclasses.flatten import is_subclass
from holdfast.base.geometry.sharded import Sharded
from holdfast.base.types.values import Group, Skipped, Value, is_subclass_record
from holdfast.errors import InvalidError


@dataclass(frozen=True, slots=True)
class OptimizerView:
    """An optimizer and the FQNs of its parameters."""

    optimizer: torch.optim.Optimizer
    """The optimizer."""

    path: str
    """Its path in the state."""

    names: Mapping[torch.Tensor, str]
    """FQN by parameter, in the order of the groups."""

    declared: Mapping[int, Sharded]
    """Layouts declared by the user or read off FSDP1, by the identity of the local tensor."""

    members: OptimizerMembers
    """The optimizer and those inside it."""

    elsewhere: frozenset[int] = frozenset()
    """Parameters without an element on this rank under FSDP1, by identity; only other ranks have their state."""

    ties: Mapping[str, str] = field(default_factory=dict)
    """Further names of tied parameters, each with the name that is used here."""

    parts: Mapping[int, tuple[ParameterPart, ...]] = field(default_factory=dict)
    """Parts of the parameters that are stored in parts, by identity; `names` has the first part's name."""

    owner: str = ""
    """Path of the module or dict to which `names` are relative; empty if they are whole."""

    def whole_name(self, name: str) -> str:
        """Return the name in the state of a parameter with a name in this optimizer."""
        return f"{self.owner}.{name}" if self.owner else name

    def global_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of a whole parameter, of which this rank may hold a part."""
        declared = self.declared.get(id(parameter))
        return tuple(parameter.shape if declared is None else declared.global_shape)

    def names_of(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """Return the FQNs of a parameter: one, or that of each part."""
        parts = self.parts.get(id(parameter))
        return (self.names[parameter],) if parts is None else tuple(part.name for part in parts)

    def declared_for(self, parameter: torch.Tensor, state: torch.Tensor) -> Sharded | None:
        """Return the layout of a state tensor whose parameter is declared, or None."""
        declared = self.declared.get(id(parameter))
        return None if declared is None else declared_like(declared, state)

    def local_shape(self, parameter: torch.Tensor, global_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a state tensor of `global_shape` has in this process."""
        declared = self.declared.get(id(parameter))
        if declared is not None and tuple(declared.global_shape) == global_shape and global_shape:
            return tuple(parameter.shape)
        return global_shape

    def state_fqn(self, name: str, key: str) -> str:
        """Return the FQN of one entry of a parameter's state."""
        return f"{self.path}.state.{name}.{key}"


LISTS_OF_MEMBERS = ("params", "param_names")
"""Entries of a parameter group that list its members; all others are hyperparameters.

torch adds the names if an optimizer is made of `named_parameters()`. They are this job's own: another grouping, or a
module without a wrapper, has others.
"""

OnState = Callable[[str, torch.Tensor, Sharded | None, torch.Tensor], Value]
"""Called for each tensor of the state: its FQN, the tensor, its declared layout, if any, and its parameter."""


def collect_optimizer(view: OptimizerView, on_state: OnState) -> tuple[Group, tuple[str, ...]]:
    """Return the values of an optimizer and the sorted keys of its state; call `on_state` for every tensor of it.

    Equal hyperparameters are stored once, under a digest of their content, so that the records of several ranks merge
    without renumbering. State that the optimizer has not allocated yet stays absent.

    Raises:
        InvalidError: A value or key cannot be stored.
    """
    hyperparameters: dict[str, Value] = {}
    members: dict[str, Value] = {}
    state: dict[str, Value] = {}
    empty_groups: dict[str, Value] = {}
    keys: set[str] = set()
    aliases: dict[str, list[str]] = defaultdict(list)
    for alias, name in view.ties.items():
        aliases[name].append(alias)
    for key in view.members.keys_of_state():
        if key not in view.names:
            raise InvalidError(
                f"{view.path}: state under {str(key)[:80]!r} belongs to no parameter of its groups; "
                "expected state by parameter only. Remove the entry, or leave it out with skip="
            )
    for position, (group, parameters) in enumerate(view.members.groups()):
        values = {
            name: take_apart(value, f"{view.path}.param_groups.{name}", small_tensor)
            for name, value in group.items()
            if name not in LISTS_OF_MEMBERS
        }
        content = hashlib.blake2b(repr(values).encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()
        hyperparameters[content] = values
        if not parameters:
            empty_groups[str(position)] = content
        for parameter in parameters:
            name, parts = view.names[parameter], view.parts.get(id(parameter))
            for part in parts or ():
                members[part.name] = content
                if kept := _collect_state(view, part.name, parameter, on_state, keys, part):
                    state[part.name] = kept
            for stored_name in (name, *aliases[name]) if parts is None else ():
                members[stored_name] = content
                if kept := _collect_state(view, stored_name, parameter, on_state, keys):
                    state[stored_name] = kept
    items: dict[str, Value] = {"hyperparameters": hyperparameters, "param_groups": members, "state": state}
    if empty_groups:
        items["empty_groups"] = empty_groups
    if keepers := view.members.keepers(view.path):
        items["keepers"] = keepers
    return Group("optimizer", items), tuple(sorted(keys))


def _collect_state(
    view: OptimizerView,
    name: str,
    parameter: torch.Tensor,
    on_state: OnState,
    keys: set[str],
    part: ParameterPart | None = None,
) -> dict[str, Value]:
    """Return the entries of the state of a parameter, or of one part, that are not tensors; add its keys to `keys`."""
    kept: dict[str, Value] = {}

    def on_tensor(fqn: str, tensor: torch.Tensor) -> Value:
        if part is not None:
            if "." in fqn.removeprefix(view.state_fqn(name, "")) and tensor.numel() > 1:
                raise InvalidError(
                    f"{fqn}: is in a container, and a state-dict hook of the module splits its parameter, so a load "
                    "could not join the parts; expected a tensor outside of containers. Pass "
                    "dict(module.named_parameters()) in place of the module"
                )
            tensor = part.of(tensor, parameter, fqn)
        return on_state(fqn, tensor, view.declared_for(parameter, tensor), parameter)

    if id(parameter) in view.elsewhere:
        return kept
    for key, value in view.members.state_of(parameter, view.path).items():
        if not isinstance(key, str) or "." in key:
            raise InvalidError(
                f"{view.path}.state.{name}: key {key!r}; expected a name without dots. Rename it, or skip= it"
            )
        neutral = take_apart(value, view.state_fqn(name, key), on_tensor)
        if not isinstance(neutral, Skipped):
            keys.add(key)
        if not isinstance(value, torch.Tensor) or is_subclass_record(neutral):
            kept[key] = neutral
    return kept


def give_hyperparameters(view: OptimizerView, groups: Sequence[Mapping[str, object]]) -> None:
    """Set the hyperparameters of an optimizer whose groups are in the same order."""
    for (group, _), values in zip(view.members.groups(), groups, strict=False):
        group.update({key: value for key, value in values.items() if key not in LISTS_OF_MEMBERS})


def new_state_tensor(
    parameter: torch.Tensor, group: Mapping[str, object], key: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return uninitialised memory for a state tensor that the optimizer has not allocated yet.

    Not zeroed: all of it is filled before the optimizer gets it, and zeroing a gigabyte takes longer than reading it.
    A tensor of the parameter's shape gets the parameter's layout. One of another shape, as in Adafactor, is made by
    `new_empty` of the parameter; for a DTensor it is replicated. As in `Optimizer.load_state_dict`, a step count is in
    host memory unless the group is capturable or fused, and everything else on the parameter's device.
    """
    counts_steps = key == "step" and not shape
    if is_subclass(parameter):
        parameter = _plain_like(parameter)
    if tuple(parameter.shape) == shape and not counts_steps:
        # A load does not fill padding, which the optimizer reads.
        make = torch.empty_like if coordinates_of(parameter, key) is None else torch.zeros_like
        return make(parameter, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
    if shape and isinstance(parameter, DTensor):
        return parameter.detach().new_empty(shape, dtype=dtype)
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    on_host = counts_steps and not group.get("capturable") and not group.get("fused")
    return torch.empty(shape, dtype=dtype, device="cpu" if on_host else local.device)


def shape_of_state(
    stored: tuple[int, ...], stored_parameter: tuple[int, ...], parameter: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the shape of a state tensor for a parameter that may have another shape than was saved.

    Of a state tensor with the parameter's dimensions, each length that was the parameter's is that again. So moments
    follow, and factored ones as in Adafactor.

    Args:
        stored: Shape of the saved state.
        stored_parameter: Shape of the saved parameter.
        parameter: Shape of the parameter now.
    Returns:
        The shape, or None if it is not known: the state has a form of its own.
    """
    if stored_parameter == parameter:
        return stored
    if stored == stored_parameter:
        return parameter
    if math.prod(stored) == 1:
        return stored
    if not len(stored) == len(stored_parameter) == len(parameter):
        return None
    lengths = zip(stored, stored_parameter, parameter, strict=True)
    return tuple(now if length == before else length for length, before, now in lengths)


def _plain_like(parameter: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor in the layout of a tensor subclass: what is stored for it is plain."""
    local = local_tensor(parameter) if isinstance(parameter, DTensor) else parameter
    plain = torch.empty(local.shape, dtype=local.dtype, device=local.device)
    return dtensor_like(plain, parameter) if isinstance(parameter, DTensor) else plain
