"""Refuses to save a position of data that would name other samples than the weights have seen."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

from holdfast.backends.torch.data.batches import Batches
from holdfast.backends.torch.data.loader import Loader
from holdfast.backends.torch.state.walk import DictNode, ModuleNode, StatefulNode, TensorNode, ValueNode, leaves
from holdfast.base.types.per_rank import PerRank
from holdfast.errors import InvalidError


def require_exact_positions(root: DictNode, *, grads: bool) -> None:
    """Refuse a state whose position of data cannot be exact.

    Args:
        root: The state.
        grads: Whether gradients are saved.
    Raises:
        InvalidError: Data ranks are not named although tensors are on a mesh of several dimensions; gradients are saved
            within a step; a `GradScaler` may skip steps that the position counts; or the state holds the loader of
            `Batches` in their place.
    """
    objects = list(_objects(root))
    for path, value in objects:
        if isinstance(getattr(value, "batch_sampler", None), Batches):
            raise InvalidError(
                f"{path}: {type(value).__name__} counts its own batches, and its sampler is holdfast.data.Batches; "
                "expected the Batches in the state in place of the loader. Put the object passed as batch_sampler there"
            )
    require_named_ranks(root)
    for path, position in objects:
        if not isinstance(position, Batches):
            continue
        if isinstance(position, Loader):
            if grads and position.is_within_step:
                raise InvalidError(
                    f"{path}: grads=True within a step would store the sum of some of its micro-batches, and a load "
                    "goes on at the start of the step; expected a save after optimizer.step(). Finish the step, or "
                    "save with grads=False"
                )
        elif not position.is_told and (scaler := _enabled_scaler(objects)) is not None:
            raise InvalidError(
                f"{path}: {scaler} is a GradScaler, which may skip an optimizer step, and the position of Batches "
                "moves with optimizer steps; expected step_done() after scaler.update(). Call it before the first "
                "save, or use holdfast.data.Loader"
            )


def require_named_ranks(root: DictNode) -> None:
    """Refuse positions that take all ranks for data ranks, where a tensor is on a mesh of several dimensions.

    Raises:
        InvalidError: Names the tensor and the dimensions. Nothing in a mesh says which dimensions hold data.
    """
    of_all = (node.path for node in leaves(root) if isinstance(node, StatefulNode) and _takes_all(node.stateful))
    if (path := next(of_all, None)) is None:
        return
    for fqn, tensor in _tensors(root):
        if isinstance(tensor, DTensor) and tensor.device_mesh.ndim > 1:
            names = tensor.device_mesh.mesh_dim_names or tuple(map(str, range(tensor.device_mesh.ndim)))
            raise InvalidError(
                f"{path}: all ranks are data ranks, but {fqn} is on a mesh of the dimensions {', '.join(names)}; "
                "expected the dimensions that hold data by name, since ranks that differ in others must see equal "
                f"batches. Pass mesh=mesh['dp'], or mesh=mesh[{names}] if all of them hold data"
            )


def _takes_all(value: object) -> bool:
    return isinstance(value, Batches) and not value.has_named_ranks


def _objects(root: DictNode) -> Iterator[tuple[str, object]]:
    """Yield path and object of everything with a `state_dict()` of its own, also inside `PerRank`."""
    for node in leaves(root):
        if isinstance(node, StatefulNode):
            yield node.path, node.stateful
        elif isinstance(node, ValueNode) and isinstance(node.value, PerRank):
            yield node.path, node.value.value


def _tensors(root: DictNode) -> Iterator[tuple[str, torch.Tensor]]:
    for node in leaves(root):
        if isinstance(node, TensorNode):
            yield node.path, node.tensor
        elif isinstance(node, ModuleNode):
            yield from ((f"{node.path}.{fqn}", tensor) for fqn, tensor in node.tensors.items())


def _enabled_scaler(objects: list[tuple[str, object]]) -> str | None:
    return next((path for path, each in objects if isinstance(each, torch.amp.GradScaler) and each.is_enabled()), None)
