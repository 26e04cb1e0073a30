"""Carries out recorded steps again, on a state that holds their base."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch.distributed.tensor import DTensor

from holdfast.backends.torch.containers import plain_leaf, put_together
from holdfast.backends.torch.local_shards import LocalPart, LocalShards, Ranks, dtensor_like, local_of
from holdfast.backends.torch.redo.step_hooks import bare_step
from holdfast.backends.torch.redo.stepped import Stepped, SteppedState
from holdfast.backends.torch.redo.sums import sum_of
from holdfast.backends.torch.redo.values import StateValues
from holdfast.backends.torch.state.gradients import declared_for_gradient
from holdfast.backends.torch.state.restore import TorchRestoration
from holdfast.backends.torch.tensors import TorchSource, TorchTarget, held_storable, storable_dtype
from holdfast.base.ports.framework import Catalog, LocalShard, Selection, Wanted
from holdfast.base.types.redo import OptimizerCall, Record, call_tensor, image_tensor
from holdfast.base.types.values import Group, TensorRef, Value
from holdfast.errors import InvalidError, first_three


class TorchStepRedo:
    """Applies records to one state."""

    def __init__(self, state: Mapping[str, object], selection: Selection, ranks: Ranks) -> None:
        self._state, self._selection, self._ranks = state, selection, ranks
        self._stepped = SteppedState(state, selection, ranks)
        self._values = StateValues(state, selection, self._stepped)
        self._by_path = {stepped.path: stepped for stepped in self._stepped.optimizers}
        self._own_groups = [(stepped, stepped.groups()) for stepped in self._stepped.optimizers]
        self._gradients: dict[tuple[int, str], torch.Tensor] = {}
        """Gradients by the number of the call and the parameter: made once, and filled for each record."""
        self._images: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        """Of each after-image of the record that was asked for: each part of the tensor, and its content to be."""

    def unlike(self, record: Record) -> str:
        """Return why a record cannot be redone here with equal bits; empty if it can."""
        for call in record.calls:
            stepped = self._by_path.get(call.path)
            absent = {*call.gradients}.difference(() if stepped is None else stepped.parameters)
            if absent:
                return f"{call.path} stepped {first_three(sorted(absent))} in training, and does not here"
        here, there = self._stepped.software(), record.software
        for recorded, own in ((there.versions, here.versions), (there.optimizers, here.optimizers)):
            for name in sorted(recorded.keys() | own.keys()):
                if recorded.get(name) != own.get(name):
                    return (
                        f"{name} was {recorded.get(name, 'absent')} in training, and is {own.get(name, 'absent')} here"
                    )
        return ""

    def wanted(self, record: Record) -> Sequence[Wanted]:
        """Return the tensors of a record to read; their memory stays valid until the next call."""
        found = []
        for number, call in enumerate(record.calls):
            stepped = self._by_path[call.path]
            for fqn in call.gradients:
                parameter = stepped.parameters[fqn]
                if (number, fqn) not in self._gradients:
                    self._gradients[number, fqn] = _room_for(parameter)
                grad = self._gradients[number, fqn]
                declared = declared_for_gradient(fqn, stepped.view.declared.get(id(parameter)), parameter, grad)
                held, _ = held_storable(fqn, grad, declared, self._ranks, "")
                found.append(_wanted(call_tensor(number, fqn), fqn, held, storable_dtype(grad, fqn)))
        shards = self._shards(image.fqn for image in record.images)
        self._images = []
        for number, image in enumerate(record.images):
            if image.fqn not in shards:
                raise InvalidError(
                    f"{image.fqn}: has a recorded change, and the state lacks it; pass the state as saved"
                )
            shard, parts = shards[image.fqn].shard, _parts_of(shards[image.fqn])
            room = tuple([LocalPart(part.region, torch.empty_like(part.local)) for part in parts])
            self._images.append([(part.local, each.local) for part, each in zip(parts, room, strict=True)])
            held = LocalShards(shard.tensor.global_shape, shard.layout, shard.holders, room)
            found.append(_wanted(image_tensor(number, image.fqn), image.fqn, held, shard.tensor.dtype))
        return [each for each in found if each.boxes]

    def apply(self, record: Record) -> Sequence[str]:
        """Carry out the calls and after-images of a record; return the FQNs whose sums differ."""
        for number in range(len(record.calls) + 1):
            for image, contents in zip(record.images, self._images, strict=True):
                if image.after_call == number:
                    with torch.no_grad():
                        for part, content in contents:
                            part.copy_(content)
            if number < len(record.calls):
                self._step(number, record.calls[number])
        shards = self._shards(record.sums)
        return [fqn for fqn, total in record.sums.items() if fqn not in shards or _sum(shards[fqn]) != total]

    def finish(self, record: Record) -> None:
        """Restore the values at the boundary of the last record."""
        # Tensors in lists of the state hold their content already. The restoration asks for them by their names.
        tensors = {fqn: self._stepped.others[fqn].shard.tensor for fqn in _references_in(record.tree)}
        size, per_rank, fill = self._ranks.world_size, lambda _: record.per_rank, lambda _: None
        catalog = Catalog(tensors, {}, record.tree, "", record.step, size, per_rank, lambda *_: True, fill)
        TorchRestoration(self._state, catalog, self._selection, self._ranks).finish()
        groups = self._values.groups(record.tree) if self._selection.hyperparameters else self._own_groups
        for stepped, values in groups:
            _give(stepped, values)
        self._gradients.clear()
        held = {*record.held}
        for stepped in self._stepped.optimizers:
            for fqn, parameter in stepped.parameters.items():
                parameter.grad = _room_for(parameter) if fqn in held else None
                if parameter.grad is not None:
                    local_of(parameter.grad).zero_()

    def _step(self, number: int, call: OptimizerCall) -> None:
        stepped = self._by_path[call.path]
        optimizer = stepped.optimizer
        _give(stepped, call.groups)
        with_gradient = {*call.gradients}
        for fqn, parameter in stepped.parameters.items():
            parameter.grad = self._gradients[number, fqn] if fqn in with_gradient else None
        device = next(iter(stepped.parameters.values())).device
        for name, value in call.scaling.items():
            scale = put_together(value, plain_leaf)
            setattr(optimizer, name, scale.to(device) if isinstance(scale, torch.Tensor) else scale)
        try:
            bare_step(optimizer)(optimizer)
        finally:
            for name in call.scaling:
                delattr(optimizer, name)
            # Also after a step that fails: the base may be taken alone, and its first backward adds to what is here.
            for parameter in stepped.parameters.values():
                parameter.grad = None

    def _shards(self, names: Iterable[str]) -> dict[str, LocalShard]:
        """Return the shards of all tensors that no step changes, and of others by their names: to make all takes long.

        Args:
            names: FQNs; of a tensor subclass those of its inner tensors.
        """
        wanted = {prefix for name in names for prefix in accumulate(name.split("."), "{}.{}".format)}
        return self._stepped.others | {
            local.shard.tensor.fqn: local
            for stepped in (self._stepped.optimizers if wanted else ())
            for named in stepped.named()
            if named[0] in wanted
            for local in self._stepped.shards_of(named)
        }


def _room_for(parameter: torch.Tensor) -> torch.Tensor:
    """Return memory for a gradient, placed and laid out as its parameter."""
    local = torch.empty_like(local_of(parameter))
    return dtensor_like(local, parameter) if isinstance(parameter, DTensor) else local


def _wanted(name: str, fqn: str, held: LocalShards, dtype: str) -> Wanted:
    target = TorchTarget(held, dtype)
    return Wanted(name, target.boxes, dtype, held.global_shape, target, fqn)


def _parts_of(local: LocalShard) -> Sequence[LocalPart]:
    assert isinstance(local.source, TorchSource)
    return local.source.parts


def _references_in(value: Value) -> Iterator[str]:
    """Yield the names of the tensors that a tree of values refers to."""
    if isinstance(value, TensorRef):
        yield value.fqn
    items = value.items if isinstance(value, Group) else value
    inner = items.values() if isinstance(items, dict) else items if isinstance(items, list | tuple) else ()
    for each in inner:
        yield from _references_in(each)


def _sum(local: LocalShard) -> int:
    return sum_of(_parts_of(local), local.shard.tensor.global_shape)


def _give(stepped: Stepped, groups: Value) -> None:
    """Set the hyperparameters of an optimizer as they were recorded; a tensor that stays one stays the same object."""
    assert isinstance(groups, Sequence)
    for group, values in zip(stepped.optimizer.param_groups, groups, strict=True):
        for key, recorded in values.items():
            value, present = put_together(recorded, plain_leaf), group.get(key)
            if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor):
                present.copy_(value)
            else:
                group[key] = value
