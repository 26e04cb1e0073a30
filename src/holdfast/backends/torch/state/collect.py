"""Splits a state into shards with their bytes and a tree of everything else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from holdfast.backends.torch.containers import small_tensor, take_apart
from holdfast.backends.torch.fence import close_fence, steps_in_backward
from holdfast.backends.torch.local_shards import DENSE, Ranks, local_of, memory_of
from holdfast.backends.torch.optimizers.custom_state import custom_state, require_whole_state
from holdfast.backends.torch.optimizers.kinds import class_name_of
from holdfast.backends.torch.optimizers.state import OptimizerView, collect_optimizer
from holdfast.backends.torch.side_stream import SideStream
from holdfast.backends.torch.state import gradients, rng
from holdfast.backends.torch.state.metrics import require_kept
from holdfast.backends.torch.state.module_extra_entries import require_loadable
from holdfast.backends.torch.state.naming import is_metric, metric_paths, require_fqn
from holdfast.backends.torch.state.positions_of_data import require_exact_positions
from holdfast.backends.torch.state.selection import Selector, without
from holdfast.backends.torch.state.walk import (
    DictNode,
    ModuleNode,
    Node,
    Stateful,
    StatefulNode,
    TensorNode,
    ValueNode,
    leaves,
    walk,
)
from holdfast.backends.torch.subclasses.flatten import flattened, is_subclass
from holdfast.backends.torch.subclasses.make import require_made_again
from holdfast.backends.torch.tensors import TorchSource, held_storable, require_not_expanded, storable_dtype
from holdfast.backends.torch.ties import Ties
from holdfast.base.geometry.sharded import Sharded
from holdfast.base.geometry.tensor import Role, Shard, TensorSpec
from holdfast.base.ports.framework import Collected, LocalShard, Selection
from holdfast.base.types.manifest import OptimizerRecord
from holdfast.base.types.per_rank import PerRank, RngState
from holdfast.base.types.values import PIECES_RECORD, FrameworkValue, Group, PerRankRef, Skipped, TensorRef, Value
from holdfast.errors import InvalidError, first_three


def collect(state: Mapping[str, object], selection: Selection, ranks: Ranks) -> Collected:
    """Split a state into shards, values and aliases; changes nothing in it.

    Raises:
        InvalidError: The state holds something that cannot be saved; the message names its path and type.
    """
    root = walk(state, ranks.rank_of_global)
    require_exact_positions(root, grads=selection.grads)
    collector = _Collector(selection, ranks, root)
    tree = collector.dict_group(root)
    if PIECES_RECORD in tree.items and _is_kept(tree.items[PIECES_RECORD], PIECES_RECORD, collector.shards):
        collector.refused.append(
            f"{PIECES_RECORD}: Holdfast itself keeps names under this key, so exports would leave it out; expected "
            "another key in the state. Rename it"
        )
    for side in collector.sides:
        side.follow()
    unfenced = "; ".join(collector.unfenced)
    return Collected(
        shards=collector.shards,
        tree=tree,
        aliases=collector.aliases,
        skipped=collector.skipped,
        per_rank=collector.per_rank,
        optimizers=collector.optimizers,
        fence=None if unfenced else partial(close_fence, collector.fenced_objects),
        unfenced_because=unfenced,
        pin=next((side.pin for side in collector.sides), None),
        unmatched=collector.selector.unmatched(),
        refused=collector.refused,
        accumulators=collector.accumulators,
        subclasses=collector.records,
        order=collector.order,
    )


def _is_kept(item: Value, path: str, shards: Sequence[LocalShard]) -> bool:
    """Return whether anything of a part of the state is saved."""
    if isinstance(item, Group):
        has_tensors = any(local.shard.tensor.fqn.startswith(f"{path}.") for local in shards)
        return has_tensors or any(_is_kept(child, f"{path}.{key}", shards) for key, child in item.items.items())
    return not isinstance(item, Skipped)


class _Collector:
    def __init__(self, selection: Selection, ranks: Ranks, root: DictNode) -> None:
        self._selection, self._ranks, self._root = selection, ranks, root
        self.selector = Selector(selection)
        self.shards: list[LocalShard] = []
        self.aliases: dict[str, str] = {}
        self.skipped: list[str] = []
        self.per_rank: dict[str, Value] = {}
        self.optimizers: dict[str, OptimizerRecord] = {}
        self.refused: list[str] = []
        """A message for each tensor that cannot be saved."""
        self.records: dict[str, FrameworkValue] = {}
        """What stands for a tensor subclass in the tree, by its name."""
        self.accumulators: list[str] = []
        self.order: list[str] = []
        """Names of tensors, and of items of dicts and modules, in the order of the state."""
        self.fenced_objects: list[torch.nn.Module | torch.optim.Optimizer] = []
        self.unfenced: dict[str, None] = {}
        """Why forward or backward may change the state where the fence does not see it."""
        self.sides: dict[SideStream, None] = {}
        """Side streams of the GPUs that hold parts of the state."""
        self._stepped = {
            id(parameter) for node in leaves(root) if isinstance(node, OptimizerView) for parameter in node.names
        }
        """Parameters that an optimizer of the state steps, by identity.

        Only these are known to change nowhere but in an optimizer's step or a load, and the fence waits before both.
        Metrics and running statistics change in forward, averages at any time, and version counters do not count every
        kind of write to them.
        """
        self._numbers: dict[str, int | None] = {}
        """Position of each name in `shards`; None for a tied name, and for a tensor without a part on this rank."""
        self._ties = Ties()

    def dict_group(self, node: DictNode) -> Group:
        items: dict[str, Value] = {}
        for key, child in node.children.items():
            self.order.append(child.path)
            value = self._node(child)
            if (value is not None or isinstance(child, ValueNode)) and not isinstance(value, Skipped):
                items[key] = value
        return Group("dict", items)

    def _node(self, node: Node) -> Value:
        """Return a node's entry in the tree; None for a plain tensor, which the index lists."""
        if not self.selector.takes_all:
            self.selector.know(node.path)
        match node:
            case TensorNode():  # First, since most are.
                stepped = id(node.tensor) in self._stepped
                self._tensor(node.path, node.tensor, _loose_role(node.tensor), node.declared, fenced=stepped)
                for local in memory_of(node.tensor, node.declared, node.path) if self._selection.grads else ():
                    self._gradient(node.path, local, node.declared)
                return self.records.get(node.path) if self.records else None
            case DictNode():
                return self.dict_group(node)
            case ModuleNode():
                return self._module(node)
            case OptimizerView():
                return self._optimizer(node)
            case StatefulNode():
                if not self.selector.selects_whole(node.path):
                    self.skipped.append(node.path)
                    return Skipped(node.path)
                return self._state_of_object(node.path, node.stateful, _state_dict_of(node.path, node.stateful))
            case ValueNode():
                return self._named_values(node.path, node.value)

    def _state_of_object(self, path: str, owner: object, state: object) -> Group:
        if not isinstance(state, dict):
            raise InvalidError(
                f"{path}: {type(owner).__name__}.state_dict() returned {type(state).__name__}; expected a dict, as a "
                "load passes to load_state_dict(). Return one, or leave it out with skip="
            )
        on_tensor = self._reference
        if is_metric(owner):
            self.accumulators.append(path)
            on_tensor = partial(self._reference, role=Role.BUFFER)
        return Group("stateful", {"state": take_apart(state, path, on_tensor)})

    def _module(self, node: ModuleNode) -> Group:
        if self.selector.selects_whole(node.path):
            require_kept(node)
        gradients.require_module_boundary(
            node.module, node.path, node.tensors, self.selector.selects, asked=self._selection.grads
        )
        self.fenced_objects.append(node.module)
        self.order += [f"{node.path}.{fqn}" for fqn in node.keys]
        if node.declared:
            self.unfenced["FSDP1 moves its parameters to other memory in forward and backward"] = None
        others = {fqn: tensor for fqn, tensor in node.tensors.items() if not isinstance(tensor, torch.nn.Parameter)}
        buffers = {id(buffer) for buffer in node.module.buffers()} if others else set()
        metrics: Sequence[str] = ()
        if any(id(tensor) not in buffers or _counts(tensor) for tensor in others.values()):
            # Only then, since it walks all modules.
            metrics = [f"{node.path}.{path}".rstrip(".") for path in metric_paths(node.module)]
            self.accumulators += metrics
        for fqn, tensor in node.tensors.items():
            role, name = Role.PARAMETER, f"{node.path}.{fqn}"
            if fqn in others:
                # What a hook makes of a parameter is none by its type, but its copies must agree as well.
                may_differ = id(tensor) in buffers or any(name.startswith(f"{path}.") for path in metrics)
                role = Role.BUFFER if may_differ else _loose_role(tensor)
            stepped = id(tensor) in self._stepped
            self._tensor(name, tensor, role, node.declared.get(id(tensor)), fenced=stepped)
        if self._selection.grads:
            gradients.require_named(node.module, node.path, node.tensors, self.selector.selects)
        for fqn, tensor in node.tensors.items() if self._selection.grads else ():
            self._gradient(f"{node.path}.{fqn}", tensor, None, by_fsdp1=id(tensor) in node.declared)
        values = {
            fqn: take_apart(value, f"{node.path}.{fqn}", self._reference)
            for fqn, value in node.values.items()
            if self._takes_part(f"{node.path}.{fqn}")
        }
        if others or values:
            kept = {fqn: tensor for fqn, tensor in others.items() if f"{node.path}.{fqn}" in self._numbers}
            made_subclasses = [fqn for fqn in others if f"{node.path}.{fqn}" in self.records]
            for fqn, tensor in kept.items():
                require_not_expanded(local_of(tensor), f"{node.path}.{fqn}", "a load could not fill it: it is")
            made = [fqn for fqn in (*kept, *made_subclasses) if id(others[fqn]) not in buffers]
            require_loadable(node, [*made, *values])
        records = ((fqn, self.records.get(f"{node.path}.{fqn}")) for fqn in node.tensors if self.records)
        return Group("module", values | {fqn: record for fqn, record in records if record is not None})

    def _optimizer(self, view: OptimizerView) -> Group:
        def on_state(fqn: str, tensor: torch.Tensor, declared: Sharded | None, parameter: torch.Tensor) -> Value:
            if not self._tensor(fqn, tensor, Role.OPTIMIZER, declared, fenced=True):
                return Skipped(fqn)
            if (record := self.records.get(fqn)) is None:
                return TensorRef(fqn)
            require_made_again(fqn, record, parameter, view.members.steppers())
            return record

        if not self._selection.grads and gradients.is_accumulating(view.optimizer):
            names = dict(_named_tensors(self._root))
            gradients.require_optimizer_boundary(
                view,
                lambda parameter: self.selector.selects(f"{names.get(id(parameter), '')}{gradients.SUFFIX}"),
            )
        self.fenced_objects.append(view.optimizer)
        outside = custom_state(view) if self.selector.selects_whole(view.path) else None
        if outside is not None or view.members.keep_state_inside:
            kind = type(view.optimizer).__name__
            self.unfenced[f"{kind} holds other optimizers, and may change weights or its own state between steps"] = (
                None
            )
        if steps_in_backward(view.names):
            self.unfenced["parameters have hooks that run in backward, and may be stepped there"] = None
        if outside is not None:
            self._record_optimizer(view, ())
            return self._state_of_object(view.path, view.optimizer, require_whole_state(view, outside))
        if self.selector.selects_whole(view.path):
            view.members.require_whole(view.path)
        group, keys = collect_optimizer(view, on_state)
        self._record_optimizer(view, keys)
        kept: set[object] = set()
        for members in (group.items["param_groups"], group.items.get("empty_groups", {})):
            assert isinstance(members, dict)
            for name in [name for name in members if not self._takes_part(f"{view.path}.param_groups.{name}")]:
                del members[name]
            kept.update(members.values())
        hyperparameters = group.items["hyperparameters"]
        assert isinstance(hyperparameters, dict)
        for content in hyperparameters.keys() - kept:
            del hyperparameters[content]  # They may hold what cannot be saved, and no group needs them.
        return group

    def _record_optimizer(self, view: OptimizerView, keys: tuple[str, ...]) -> None:
        # A part and a manifest hold Unicode only. Values may have other names, which their encoding escapes.
        if all(each.isascii() or each == each.encode(errors="ignore").decode() for each in (view.path, *keys)):
            self.optimizers[view.path] = OptimizerRecord(class_name_of(view), keys)

    def _gradient(self, name: str, tensor: torch.Tensor, declared: Sharded | None, *, by_fsdp1: bool = False) -> None:
        fqn, grad = f"{name}{gradients.SUFFIX}", gradients.gradient_of(tensor)
        if grad is not None and self._takes_part(fqn):
            self.unfenced["gradients change in backward"] = None
            grad_declared = gradients.declared_for_gradient(fqn, declared, tensor, grad, by_fsdp1=by_fsdp1)
            self._tensor(fqn, grad, Role.PARAMETER, grad_declared)

    def _named_values(self, path: str, value: object) -> Value:
        if not self.selector.selects_any(path, value):
            self.skipped.append(path)
            return Skipped(path)
        if isinstance(value, PerRank | RngState):
            self.per_rank[path] = take_apart(
                _value_of_rank(path, value), path, partial(small_tensor, numel_max=16 << 20)
            )
            return PerRankRef(path)
        return take_apart(without(value, path, self._takes_part), path, self._reference)

    def _takes_part(self, path: str) -> bool:
        if self.selector.selects(path):
            return True
        self.skipped.append(path)
        return False

    def _reference(self, fqn: str, tensor: torch.Tensor, role: Role | None = None) -> Value:
        if not self._tensor(fqn, tensor, role or _loose_role(tensor)):
            return Skipped(fqn)
        grad_fqn = f"{fqn}{gradients.SUFFIX}"
        if self._selection.grads and gradients.gradient_of(tensor) is not None and self.selector.selects(grad_fqn):
            raise InvalidError(
                f"{grad_fqn}: the gradient of a tensor in a list, or of a tensor that a state_dict() makes, cannot "
                "be saved; expected the tensor in a dict or a module. Move it there, or pass "
                f"skip='*{gradients.SUFFIX}'"
            )
        return self.records.get(fqn) or TensorRef(fqn)

    def _tensor(
        self, fqn: str, tensor: torch.Tensor, role: Role, declared: Sharded | None = None, *, fenced: bool = False
    ) -> bool:
        """Add a tensor unless the selection leaves it out; return whether the checkpoint will hold it.

        Args:
            fqn: Name of the tensor.
            tensor: The tensor.
            role: Whether its copies must agree.
            declared: Its layout, if the tensor does not carry one itself.
            fenced: Whether only code behind the fence changes it, such as the step of an optimizer in the state.
        """
        if not (self.selector.takes_all or self._takes_part(fqn)):
            return False
        if type(tensor) not in DENSE and is_subclass(tensor):
            return self._subclass(fqn, tensor, role, declared, fenced=fenced)
        require_fqn(fqn)
        if fqn in self._numbers:
            raise InvalidError(f"{fqn}: two leaves of the state have this name; expected different names. Rename a key")
        try:
            held, memory = held_storable(fqn, tensor, declared, self._ranks, "materialise it first")
        except InvalidError as error:
            self.refused.append(str(error))
            return False
        number = None
        first = self._ties.first_name(fqn, tensor, held, memory, declared)
        if first != fqn:
            self.aliases[fqn] = first
            if not fenced and (tied := self._numbers[first]) is not None:
                self.shards[tied] = replace(self.shards[tied], fenced=False)
        elif held.holders != ():
            spec = TensorSpec(fqn, storable_dtype(tensor, fqn), held.global_shape)
            parts = held.parts
            regions = (parts[0].region,) if len(parts) == 1 else tuple([part.region for part in parts])
            shard = Shard(spec, held.layout, held.holders, role, regions, held.is_located)
            source = TorchSource(parts, memory)
            if source.side is not None:
                self.sides[source.side] = None
            number = len(self.shards)
            self.shards.append(LocalShard(shard, source, fenced))
        self._numbers[fqn] = number
        return True

    def _subclass(self, fqn: str, tensor: torch.Tensor, role: Role, declared: Sharded | None, *, fenced: bool) -> bool:
        """Add the inner tensors of a tensor subclass; arguments and result as `_tensor`."""
        refused = len(self.refused)
        try:
            taken = flattened(fqn, tensor, declared, self._ranks)
        except InvalidError as error:
            self.refused.append(str(error))
            return False
        names = [f"{fqn}.{inner.name}" for inner in taken.inner]
        kept = [
            self._tensor(name, inner.tensor, role, inner.declared, fenced=fenced)
            for name, inner in zip(names, taken.inner, strict=True)
        ]
        if not all(kept) and len(self.refused) == refused:
            self.refused.append(
                f"{fqn}: only= and skip= leave out some of its inner tensors, {first_three(names)}; expected all or "
                f"none of them. Name {fqn!r} itself"
            )
        if not all(kept):
            return False
        self.records[fqn] = taken.record
        return True


def _state_dict_of(path: str, stateful: Stateful) -> object:
    """Return the state of an object. An error that it raises gets a note with the object's name."""
    try:
        return stateful.state_dict()
    except Exception as error:
        note = f"{path}: {type(stateful).__name__}.state_dict() failed"
        if note not in getattr(error, "__notes__", ()):  # An object may raise one and the same error at each save.
            error.add_note(note)
        raise


def _value_of_rank(path: str, value: PerRank | RngState) -> object:
    """Return the value that this rank saves for itself."""
    if isinstance(value, RngState):
        return rng.captured()
    inner = value.value
    return _state_dict_of(path, inner) if isinstance(inner, Stateful) and not isinstance(inner, type) else inner


def _named_tensors(root: DictNode) -> Iterator[tuple[int, str]]:
    """Yield identity and name of every tensor in modules and dicts."""
    for node in leaves(root):
        if isinstance(node, TensorNode):
            yield id(node.tensor), node.path
        elif isinstance(node, ModuleNode):
            yield from ((id(tensor), f"{node.path}.{fqn}") for fqn, tensor in node.tensors.items())


def _counts(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may hold what a metric counts: several integers."""
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex) and tensor.numel() > 1


def _loose_role(tensor: torch.Tensor) -> Role:
    """Return the role of a tensor in a dict.

    In a module's state dict that is passed as a dict, parameters have lost their type, so copies of floating tensors
    must agree. Other tensors (random states, counters) differ by rank in ordinary runs and count as buffers.
    """
    return Role.PARAMETER if tensor.dtype.is_floating_point or tensor.dtype.is_complex else Role.BUFFER
