"""A state taken apart: shards with their bytes, and everything else as a tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from holdfast.errors import InvalidError
from holdfast.frameworks.torch.containers import small_tensor, take_apart
from holdfast.frameworks.torch.fence import FencedObjects, steps_in_backward
from holdfast.frameworks.torch.held import Held, Ranks, held_if_plain, held_of, is_meta, is_ordinary, memory_of
from holdfast.frameworks.torch.optimizers.state import collect_optimizer
from holdfast.frameworks.torch.side_stream import SideStream
from holdfast.frameworks.torch.state import rng
from holdfast.frameworks.torch.state.entries import anything_selected, without
from holdfast.frameworks.torch.state.gradients import (
    SUFFIX,
    declared_for_gradient,
    gradient_of,
    require_module_boundary,
    require_optimizer_boundary,
    says_it_accumulates,
)
from holdfast.frameworks.torch.state.naming import require_fqn
from holdfast.frameworks.torch.state.selection import selected, selected_whole, takes_all
from holdfast.frameworks.torch.state.walk import (
    DictNode,
    ModuleNode,
    Node,
    OptimizerNode,
    Stateful,
    StatefulNode,
    TensorNode,
    ValueNode,
    walk,
)
from holdfast.frameworks.torch.tensors import (
    Ties,
    TorchSource,
    require_storable,
    storable_dtype,
    storage_key,
    torch_dtype,
)
from holdfast.geometry.dtype import DTYPES
from holdfast.geometry.sharded import Sharded
from holdfast.geometry.tensor import Role, Shard, TensorSpec
from holdfast.ports.framework import Collected, LocalShard, Selection
from holdfast.types.per_rank import PerRank, RngState
from holdfast.types.values import Group, PerRankRef, Skipped, TensorRef, Value


def collect(state: Mapping[str, object], selection: Selection, ranks: Ranks) -> Collected:
    """Take a state apart, touching nothing.

    Raises:
        InvalidError: Something in it cannot be saved; the message names its path, type and what to do.
    """
    root = walk(state, ranks.rank_of_global)
    collector = _Collector(selection, ranks, root)
    tree = collector.dict_group(root)
    for side in collector.sides:
        side.follow()
    moves = "; ".join(collector.moving)
    return Collected(
        shards=collector.shards,
        tree=tree,
        aliases=collector.aliases,
        skipped=collector.skipped,
        per_rank=collector.per_rank,
        fence=None if moves else collector.objects.close,
        unfenced_because=moves,
        pin=next((side.pin for side in collector.sides), None),
    )


class _Collector:
    def __init__(self, selection: Selection, ranks: Ranks, root: DictNode) -> None:
        self._selection, self._ranks, self._root = selection, ranks, root
        self._takes_all = takes_all(selection)
        self.shards: list[LocalShard] = []
        self.aliases: dict[str, str] = {}
        self.skipped: list[str] = []
        self.per_rank: dict[str, Value] = {}
        self.objects = FencedObjects()
        self.moving: dict[str, None] = {}
        """What of the state forward or backward change where no optimizer's step tells."""
        self.sides: dict[SideStream, None] = {}
        """Where copies off the GPUs are queued that the state lies on."""
        self._stepped = _stepped(root)
        self._numbers: dict[str, int | None] = {}
        """By name, which of the shards a tensor is; None of a tied one, and where this rank has no part in it."""
        self._ties: Ties[_Named] = Ties()
        self._nowhere: dict[int, _Named] = {}
        """Declared tensors of which this rank has no element, by identity."""

    def dict_group(self, node: DictNode) -> Group:
        items: dict[str, Value] = {}
        for key, child in node.children.items():
            value = self._node(child)
            if value is not None or isinstance(child, ValueNode):
                items[key] = value
        return Group("dict", {key: value for key, value in items.items() if not isinstance(value, Skipped)})

    def _node(self, node: Node) -> Value:
        """Return what of a node goes into the tree; None for a tensor, which the index lists."""
        match node:
            case DictNode():
                return self.dict_group(node)
            case TensorNode():
                stepped = id(node.tensor) in self._stepped
                self._tensor(node.path, node.tensor, _loose_role(node.tensor), node.declared, fenced=stepped)
                for each in memory_of(node.tensor, node.declared, node.path) if self._selection.grads else ():
                    self._gradient(node.path, each, node.declared)
                return None
            case ModuleNode():
                return self._module(node)
            case OptimizerNode():
                return self._optimizer(node)
            case StatefulNode():
                if not selected_whole(self._selection, node.path):
                    self.skipped.append(node.path)
                    return Skipped(node.path)
                state = take_apart(node.stateful.state_dict(), node.path, self._reference)
                return Group("stateful", {"state": state})
            case ValueNode():
                return self._named_values(node.path, node.value)

    def _module(self, node: ModuleNode) -> Group:
        selection = self._selection
        require_module_boundary(
            node.module, node.path, node.tensors, lambda name: selected(selection, name), asked=selection.grads
        )
        self.objects.add(node.module)
        if node.declared:
            self.moving["FSDP1 gives its parameters other memory in forward and backward"] = None
        for fqn, tensor in node.tensors.items():
            role = Role.PARAMETER if isinstance(tensor, torch.nn.Parameter) else Role.BUFFER
            stepped = id(tensor) in self._stepped
            self._tensor(f"{node.path}.{fqn}", tensor, role, node.declared.get(id(tensor)), fenced=stepped)
        for fqn, tensor in node.tensors.items() if selection.grads else ():
            self._gradient(f"{node.path}.{fqn}", tensor, None, by_fsdp1=id(tensor) in node.declared)
        values = {fqn: self._value(f"{node.path}.{fqn}", value) for fqn, value in node.values.items()}
        return Group("module", {fqn: value for fqn, value in values.items() if not isinstance(value, Skipped)})

    def _optimizer(self, node: OptimizerNode) -> Group:
        def on_state(fqn: str, tensor: torch.Tensor, declared: Sharded | None) -> Value:
            is_kept = self._tensor(fqn, tensor, Role.OPTIMIZER, declared, fenced=True)
            return TensorRef(fqn) if is_kept else Skipped(fqn)

        if not self._selection.grads and says_it_accumulates(node.view.optimizer):
            names = dict(_named_parameters(self._root))
            require_optimizer_boundary(
                node.view.optimizer,
                node.path,
                lambda parameter: selected(self._selection, f"{names.get(id(parameter), '')}{SUFFIX}"),
            )
        self.objects.add(node.view.optimizer)
        if steps_in_backward(node.view.names):
            self.moving["parameters have hooks that run in backward, and may be stepped there"] = None
        group = collect_optimizer(node.view, on_state)
        members = group.items["param_groups"]
        assert isinstance(members, dict)
        for name in [name for name in members if not self._takes_part(f"{node.path}.param_groups.{name}")]:
            del members[name]
        return group

    def _gradient(self, name: str, tensor: torch.Tensor, declared: Sharded | None, *, by_fsdp1: bool = False) -> None:
        fqn, grad = f"{name}{SUFFIX}", gradient_of(tensor)
        if grad is not None and self._takes_part(fqn):
            self.moving["gradients change in backward"] = None
            own = declared_for_gradient(fqn, declared, grad, by_fsdp1=by_fsdp1)
            self._tensor(fqn, grad, Role.PARAMETER, own)

    def _named_values(self, path: str, value: object) -> Value:
        if not anything_selected(self._selection, path, value):
            self.skipped.append(path)
            return Skipped(path)
        if isinstance(value, PerRank | RngState):
            self.per_rank[path] = take_apart(own_value(value), path, _value_tensor)
            return PerRankRef(path)
        return take_apart(without(value, path, self._takes_part), path, self._reference)

    def _value(self, path: str, value: object) -> Value:
        return take_apart(value, path, self._reference) if self._takes_part(path) else Skipped(path)

    def _takes_part(self, path: str) -> bool:
        if selected(self._selection, path):
            return True
        self.skipped.append(path)
        return False

    def _reference(self, fqn: str, tensor: torch.Tensor) -> Value:
        if not self._tensor(fqn, tensor, _loose_role(tensor)):
            return Skipped(fqn)
        if self._selection.grads and gradient_of(tensor) is not None and selected(self._selection, f"{fqn}{SUFFIX}"):
            raise InvalidError(
                f"{fqn}{SUFFIX}: the gradient of a tensor that stands in a list or is made by a state_dict() cannot be "
                f"kept; let the tensor stand in a dict or a module, or leave it out with skip='*{SUFFIX}'"
            )
        return TensorRef(fqn)

    def _tensor(
        self, fqn: str, tensor: torch.Tensor, role: Role, declared: Sharded | None = None, *, fenced: bool = False
    ) -> bool:
        """Add a tensor unless it is left out; return whether the checkpoint will have it.

        Args:
            fqn: Its name.
            tensor: The tensor.
            role: Whether copies must agree.
            declared: Its layout, where it does not carry one itself.
            fenced: Whether it changes behind the fence only, as parameters that an optimizer of the state steps do.
        """
        if not (self._takes_all or self._takes_part(fqn)):
            return False
        require_fqn(fqn)
        if fqn in self._numbers:
            raise InvalidError(f"{fqn}: two leaves of the state have this name; rename a key so that names differ")
        held, memory = self._held(fqn, tensor, declared)
        number = None
        first = self._first_of_tie(tensor, declared, (fqn, held, memory))
        if first != fqn:
            self.aliases[fqn] = first
            if not fenced and (tied := self._numbers[first]) is not None:
                self.shards[tied] = replace(self.shards[tied], fenced=False)
        elif held.on_mesh:
            spec = TensorSpec(fqn, storable_dtype(tensor, fqn), held.global_shape)
            regions = tuple([part.region for part in held.parts])
            shard = Shard(spec, held.layout, held.holders, role, regions)
            source = TorchSource(held.parts, memory)
            if source.side is not None:
                self.sides[source.side] = None
            number = len(self.shards)
            self.shards.append(LocalShard(shard, source, fenced))
        self._numbers[fqn] = number
        return True

    def _held(self, fqn: str, tensor: torch.Tensor, declared: Sharded | None) -> tuple[Held, Sequence[torch.Tensor]]:
        """Return what this rank holds of a tensor, and the tensors that stand in the state for it."""
        if declared is None and (plain := held_if_plain(tensor)) is not None:
            return plain, (tensor,)
        memory = memory_of(tensor, declared, fqn)
        for each in memory:
            if not is_ordinary(each):
                require_storable(each, fqn)
                if is_meta(each):
                    raise InvalidError(f"{fqn}: is a meta tensor, it has no bytes to save; materialise it first")
        return held_of(tensor, declared, fqn, self._ranks), memory

    def _first_of_tie(self, tensor: torch.Tensor, declared: Sharded | None, named: _Named) -> str:
        """Return the first name under which a tensor stands in the state.

        Raises:
            InvalidError: The two are stated to be different parts.
        """
        fqn, held, memory = named
        # What is whole has the shape that was asked for already; asked once more, torch makes it anew.
        if 0 not in (held.global_shape if held.holders is None else tensor.shape):
            first, first_held, first_memory = self._ties.first(tensor, named, fqn)
        elif declared is None:
            return fqn
        else:
            # A rank that holds nothing of a tied tensor must know of the tie nevertheless: all ranks list one name.
            first, first_held, first_memory = self._nowhere.setdefault(id(tensor), named)
        if first != fqn and _lies(held, memory) != _lies(first_held, first_memory):
            raise InvalidError(
                f"{fqn}: shares its memory with {first}, but the two are stated to be different parts; "
                "state the same of both, or leave one out with skip="
            )
        return first


_Named = tuple[str, Held, Sequence[torch.Tensor]]
"""A name, what this rank holds under it, and the tensors that stand in the state for it."""


def _stepped(root: DictNode) -> set[int]:
    """Return the identities of all parameters that an optimizer of the state steps.

    Only these are known to change behind the fence: a metric or a running statistic changes in forward, and an
    average whenever it likes, and not every way to write to them is counted.
    """
    found: set[int] = set()
    for child in root.children.values():
        if isinstance(child, DictNode):
            found |= _stepped(child)
        elif isinstance(child, OptimizerNode):
            found.update(map(id, child.view.names))
    return found


def _lies(held: Held, memory: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """Return what two names of one memory must have in common besides its first part."""
    return (held.global_shape, *(part.region for part in held.parts), *map(storage_key, memory[1:]))


def own_value(value: PerRank | RngState) -> object:
    """Return what a rank keeps as its own."""
    if isinstance(value, RngState):
        return rng.captured()
    own = value.value
    return own.state_dict() if isinstance(own, Stateful) and not isinstance(own, type) else own


def _value_tensor(path: str, tensor: torch.Tensor) -> Value:
    return small_tensor(path, tensor, numel_max=16 << 20)


def _named_parameters(node: Node) -> Iterator[tuple[int, str]]:
    """Yield every tensor of modules and dicts by identity, with its name."""
    if isinstance(node, TensorNode):
        yield id(node.tensor), node.path
    elif isinstance(node, ModuleNode):
        yield from ((id(tensor), f"{node.path}.{fqn}") for fqn, tensor in node.tensors.items())
    elif isinstance(node, DictNode):
        for child in node.children.values():
            yield from _named_parameters(child)


def _loose_role(tensor: torch.Tensor) -> Role:
    """Return the role of a tensor that stands in a dict.

    A module's own state dict passed as a dict holds parameters that have lost their type, so floating tensors
    must agree. Others (random states, counters) differ by rank in ordinary runs and count as buffers.
    """
    return Role.PARAMETER if tensor.dtype in _FLOATING else Role.BUFFER


_FLOATING = {torch_dtype(name) for name, dtype in DTYPES.items() if dtype.floating}
