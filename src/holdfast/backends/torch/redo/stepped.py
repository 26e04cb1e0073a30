"""The optimizers of a state whose steps are recorded or carried out again, and the tensors that these steps change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from holdfast.backends.torch.containers import small_tensor, take_apart
from holdfast.backends.torch.fence import steps_in_backward
from holdfast.backends.torch.local_shards import DENSE, Ranks, locals_of
from holdfast.backends.torch.optimizers.custom_state import custom_state
from holdfast.backends.torch.optimizers.state import LISTS_OF_MEMBERS, OptimizerView
from holdfast.backends.torch.private_layout import version_counter, version_counter_of_trained
from holdfast.backends.torch.redo.step_hooks import has_compiled_step
from holdfast.backends.torch.state import gradients
from holdfast.backends.torch.state.collect import collect
from holdfast.backends.torch.state.selection import Selector
from holdfast.backends.torch.state.walk import ModuleNode, leaves, walk
from holdfast.backends.torch.subclasses.flatten import flattened, inner_names, is_subclass
from holdfast.backends.torch.tensors import TorchSource, held_storable, storable_dtype
from holdfast.base.geometry.sharded import Sharded
from holdfast.base.geometry.tensor import Role, Shard, TensorSpec
from holdfast.base.ports.framework import LocalShard, Selection
from holdfast.base.types.redo import Software
from holdfast.base.types.values import Value
from holdfast.errors import InvalidError, first_three

RECORDED = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "Adagrad", "Adadelta", "ASGD", "Adafactor", "Muon"),
    )
    if hasattr(torch.optim, name)
)
"""torch's optimizers whose step is a function of state, gradients and groups."""

_FLAGS = ("foreach", "fused", "maximize", "capturable", "differentiable")
"""Hyperparameters that choose the kernel of a step."""

HeldTensor = tuple[str, torch.Tensor, Sharded | None]
"""FQN, tensor, and the declared layout, if any."""

Marks = tuple[list[Any], ...]
"""Of tensors in an order: identities, addresses and version counters. They differ once a tensor is replaced, moved or
changed.
"""


class Stepped:
    """One optimizer that steps parameters of the state: the innermost one, if others wrap it."""

    def __init__(self, path: str, optimizer: torch.optim.Optimizer, view: OptimizerView, shards: Mapping[str, str]):
        """Find its parameters.

        Args:
            path: Its path in the state; several inside one wrapper have a number each.
            optimizer: The optimizer.
            view: The optimizer of the state that it is, or is inside.
            shards: Name under which each tensor of the state is stored, by its names.
        Raises:
            InvalidError: The state or the selection lacks a parameter.
        """
        self.path, self.optimizer, self.view = path, optimizer, view
        self.kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        self.parameters: dict[str, torch.Tensor] = {}
        self.owners: dict[str, str] = {}
        """Parameter of each name of optimizer state, as far as `named` was asked."""
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            name = view.whole_name(view.names[parameter])
            if name not in shards or id(parameter) in view.parts:
                raise InvalidError(
                    f"{path}: {self.kind} steps {name}, which only= or skip= leaves out, or the module stores in "
                    "parts; expected every stepped parameter among the saved tensors. Select it, or pass "
                    "dict(module.named_parameters()) in place of the module"
                )
            self.parameters[shards[name]] = parameter
        self.members = self.present_members()

    def present_members(self) -> list[list[int]]:
        """Return the identities of the parameters of each group."""
        return [list(map(id, group["params"])) for group in self.optimizer.param_groups]

    def groups(self) -> tuple[Mapping[str, Value], ...]:
        """Return the hyperparameters of each group."""
        return tuple([self._hyperparameters(group) for group in self.optimizer.param_groups])

    def _hyperparameters(self, group: Mapping[str, Any]) -> dict[str, Value]:
        return {
            key: value if type(value) in _PLAIN else take_apart(value, f"{self.path}.{key}", small_tensor)
            for key, value in group.items()
            if key not in LISTS_OF_MEMBERS
        }

    def marks(self) -> Marks:
        """Return the marks of the parameters and of their state, in the order of `named`."""
        tensors: list[object] = [*self.parameters.values()]
        for parameter in self.parameters.values():
            tensors += self.view.members.state_of(parameter).values()
        held = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
        if {*map(type, held)} <= {*DENSE}:
            # The fast path, thrice a step: mapped in C, for a state may have 100,000 tensors. A tuple for each tensor
            # would wake the garbage collector.
            return [*map(id, held)], [*map(torch.Tensor.data_ptr, held)], [*map(version_counter_of_trained, held)]
        return [*map(id, held)], [*map(_mark_of, held)]

    def named(self) -> Iterator[HeldTensor]:
        """Yield the parameters and the tensors of their state."""
        for fqn, parameter in self.parameters.items():
            yield fqn, parameter, self.view.declared.get(id(parameter))
        for fqn, parameter in self.parameters.items():
            for key, value in self.view.members.state_of(parameter).items():
                if isinstance(value, torch.Tensor):
                    state_fqn = self.view.state_fqn(self.view.names[parameter], key)
                    self.owners[state_fqn] = fqn
                    yield state_fqn, value, self.view.declared_for(parameter, value)

    def flags(self) -> str:
        """Return the class and the flags that choose the kernel of a step."""
        flags = {key: {repr(group.get(key)) for group in self.optimizer.param_groups} for key in _FLAGS}
        return " ".join([self.kind, *(f"{key}={'/'.join(sorted(values))}" for key, values in flags.items())])


_PLAIN = {int, float, bool, str, type(None)}


class SteppedState:
    """A state with its optimizers, as steps are recorded of it or carried out again on it."""

    def __init__(
        self, state: Mapping[str, object], selection: Selection, ranks: Ranks, vouched: Sequence[type] | None = None
    ) -> None:
        """Take a state apart.

        Args:
            state, selection: As every later save.
            ranks: This rank and the others.
            vouched: Further classes whose step can be redone; None if any class can be, because it was recorded.
        Raises:
            InvalidError: Its steps cannot be recorded: the message names the optimizer and the remedy.
        """
        collected = collect(state, selection, ranks)
        if collected.refused:
            raise InvalidError(first_three(collected.refused))
        self.ranks, self.root = ranks, walk(state, ranks.rank_of_global)
        held = {local.shard.tensor.fqn: local for local in collected.shards}
        names = {fqn: collected.aliases.get(fqn, fqn) for fqn in (*held, *collected.aliases)}
        nodes = list(leaves(self.root))
        self.modules = [node for node in nodes if isinstance(node, ModuleNode)]
        for node in self.modules:
            if node.declared:
                raise InvalidError(
                    f"{node.path}: FSDP1 moves its parameters between steps, so steps cannot be recorded; expected "
                    "fully_shard (FSDP2) or DDP. Use one of these, or leave differential= out"
                )
        self.optimizers = [
            stepped
            for view in nodes
            if isinstance(view, OptimizerView)
            for stepped in _steppers_of(view, names, Selector(selection), vouched)
        ]
        if not self.optimizers:
            raise InvalidError(
                "differential: the state has no optimizer, so there is no step to record; expected the optimizer in "
                "the state. Add it, or leave differential= out"
            )
        of_steps = {fqn for stepped in self.optimizers for fqn, _, _ in stepped.named()}
        grads = {f"{fqn}{gradients.SUFFIX}" for fqn in held}
        inside = tuple([f"{stepped.view.path}.state." for stepped in self.optimizers])
        self.parameters = {fqn: held[fqn] for each in self.optimizers for fqn in each.parameters if fqn in held}
        """Shards of the parameters that are stepped, by FQN."""
        self.others = {
            fqn: local
            for fqn, local in held.items()
            if fqn not in of_steps and fqn not in grads and not fqn.startswith(inside)
        }
        """Shards of all other tensors, by FQN."""
        parameters = (each for stepped in self.optimizers for each in stepped.parameters.values())
        devices = "/".join(sorted({parameter.device.type for parameter in parameters}))
        self._versions = {
            "torch": str(torch.__version__),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "device": devices,
        }

    def software(self) -> Software:
        """Return what a redo must have in common with these optimizers."""
        return Software(self._versions, {stepped.path: stepped.flags() for stepped in self.optimizers})

    def shards_of(self, named: HeldTensor) -> list[LocalShard]:
        """Return what this rank holds of a tensor: one shard; of a tensor subclass those of its inner tensors."""
        fqn, tensor, declared = named
        if is_subclass(tensor):
            inner = flattened(fqn, tensor, declared, self.ranks).inner
            return [
                shard for each in inner for shard in self.shards_of((f"{fqn}.{each.name}", each.tensor, each.declared))
            ]
        held, memory = held_storable(fqn, tensor, declared, self.ranks, "materialise it first")
        spec = TensorSpec(fqn, storable_dtype(tensor, fqn), held.global_shape)
        pieces = tuple([part.region for part in held.parts])
        shard = Shard(spec, held.layout, held.holders, Role.OPTIMIZER, pieces, held.is_located)
        return [LocalShard(shard, TorchSource(held.parts, memory))]


def _steppers_of(
    view: OptimizerView, names: Mapping[str, str], selector: Selector, vouched: Sequence[type] | None
) -> list[Stepped]:
    """Return the optimizers that step the parameters of an optimizer of the state.

    Raises:
        InvalidError: Their steps cannot be recorded.
    """
    refuse = partial(_refused, view.path)
    view.members.require_whole(view.path)
    steppers = view.members.steppers()
    outside = custom_state(view)
    for optimizer in steppers:
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        if isinstance(optimizer, torch.optim.LBFGS):
            refuse(kind, "calls a closure in its step", "Use another optimizer")
        if has_compiled_step(optimizer):
            refuse(kind, "has a compiled step, whose kernels may differ", "Step it without torch.compile")
        if steps_in_backward(view.names):
            refuse(kind, "has parameters with hooks that run in backward, which may step them", "Step after backward")
        if outside is not None:
            refuse(kind, f"keeps {first_three(outside.names)} outside the state of its parameters", "Use another")
        if vouched is not None and type(optimizer) not in RECORDED.union(vouched):
            remedy = (
                f"Pass Differential(optimizers=({type(optimizer).__name__},)) if state, gradients and groups decide"
            )
            refuse(kind, "is of a class whose step may depend on more", remedy)
    if not all(selector.selects(f"{view.path}.{part}.{name}.") for name in view.names.values() for part in _PARTS):
        refuse(type(view.optimizer).__qualname__, "is left out by only= or skip=", "Select all of it")
    paths = [view.path] if len(steppers) == 1 else [f"{view.path}.{number}" for number in range(len(steppers))]
    return [Stepped(path, each, view, names) for path, each in zip(paths, steppers, strict=True)]


_PARTS = ("state", "param_groups")


def _refused(path: str, kind: str, what: str, remedy: str) -> None:
    raise InvalidError(
        f"{path}: {kind} {what}; expected a step that a record can repeat. {remedy}, or leave differential= out"
    )


def _mark_of(tensor: torch.Tensor) -> tuple[int, ...]:
    marks = [version_counter(tensor)]
    for local in _inner_tensors(tensor):
        marks += local.data_ptr(), version_counter(local)
    return tuple(marks)


def _inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with the memory of a tensor."""
    for local in locals_of(tensor):
        if is_subclass(local):
            for name in inner_names(local, "")[0]:
                yield from _inner_tensors(getattr(local, name))
        else:
            yield local
