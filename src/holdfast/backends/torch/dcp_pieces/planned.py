"""Makes sources and targets of named pieces, and neutral values of objects that may hold tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from holdfast.backends.torch.containers import take_apart
from holdfast.backends.torch.local_shards import DENSE, LocalPart, LocalShards, is_meta
from holdfast.backends.torch.state.naming import require_fqn
from holdfast.backends.torch.tensors import (
    TorchSource,
    TorchTarget,
    dtype_name,
    require_not_expanded,
    require_storable,
    storable_dtype,
    torch_dtype,
)
from holdfast.base.geometry.dtype import PAIRS
from holdfast.base.geometry.tensor import Role, Shard, TensorSpec
from holdfast.base.geometry.tensor_piece import TensorPiece
from holdfast.base.ports.framework import Collected, LocalShard
from holdfast.base.types.values import Group, TensorRef, Value
from holdfast.errors import InvalidError


def collected_pieces(pieces: Iterable[TensorPiece], rank: int) -> Collected:
    """Return the pieces of a rank as a state taken apart: a shard for each tensor, all of it for this rank to write.

    An empty piece of a tensor that has elements is left out. What cannot be stored is in `refused`.
    """
    refused: list[str] = []
    held: dict[str, tuple[TensorSpec, list[LocalPart]]] = {}
    for piece in pieces:
        try:
            local = _dense(piece)
            spec = TensorSpec(piece.fqn, storable_dtype(local, piece.fqn), piece.global_shape)
            part = LocalPart(piece.box(tuple(local.shape)), local.detach())
            if local.numel() or 0 in piece.global_shape:
                _add(held, spec, part)
        except InvalidError as error:
            refused.append(str(error))
    shards = []
    for spec, parts in held.values():
        source = TorchSource(parts, [part.local for part in parts])
        if source.side is not None:
            source.side.follow()
        shard = Shard(spec, None, (rank,), Role.PARAMETER, tuple(part.region for part in parts))
        shards.append(LocalShard(shard, source))
    return Collected(shards=shards, tree=Group("dict"), aliases={}, skipped=(), refused=refused)


def _dense(piece: TensorPiece) -> torch.Tensor:
    """Return the tensor of a piece.

    Raises:
        InvalidError: It is not dense memory of a dtype that is stored, or its name cannot be stored.
    """
    require_fqn(piece.fqn)
    tensor = piece.tensor
    if not isinstance(tensor, torch.Tensor) or type(tensor) not in DENSE:
        raise InvalidError(
            f"{piece.fqn}: a piece is {type(tensor).__name__}; expected a plain tensor. Convert it, or leave it out of "
            "the state"
        )
    require_storable(tensor, piece.fqn)
    if is_meta(tensor):
        raise InvalidError(f"{piece.fqn}: is a meta tensor, which has no bytes; materialise it first")
    return tensor


def _add(held: dict[str, tuple[TensorSpec, list[LocalPart]]], spec: TensorSpec, part: LocalPart) -> None:
    known, parts = held.setdefault(spec.fqn, (spec, []))
    if known != spec or (parts and parts[0].local.device != part.local.device):
        raise InvalidError(
            f"{spec.fqn}: pieces of {known.dtype} {list(known.global_shape)} and of {spec.dtype} "
            f"{list(spec.global_shape)}, or on two devices; expected one tensor. Correct the plan that names them"
        )
    parts.append(part)


def target_of(piece: TensorPiece, stored_dtype: str) -> TorchTarget:
    """Return the memory of a piece as a target.

    Raises:
        InvalidError: It cannot take the stored elements: another kind of dtype, expanded, or no dense memory.
    """
    tensor = _dense(piece)
    _require_castable(piece.fqn, tensor.dtype, stored_dtype)
    require_not_expanded(tensor, piece.fqn, "a load could not fill it: it is")
    part = LocalPart(piece.box(tuple(tensor.shape)), tensor.detach())
    return TorchTarget(LocalShards(piece.global_shape, None, None, (part,)), stored_dtype)


def _require_castable(fqn: str, wanted: torch.dtype, stored_dtype: str) -> None:
    stored = torch_dtype(stored_dtype)
    kinds = [(dtype.is_floating_point, dtype.is_complex) for dtype in (stored, wanted)]
    is_convertible = kinds[0] == kinds[1] and any(kinds[0]) and PAIRS not in (stored_dtype, dtype_name(wanted))
    if stored is not wanted and not is_convertible:
        raise InvalidError(
            f"{fqn}: {stored_dtype} in the checkpoint and {dtype_name(wanted)} here; expected the same, or both "
            f"floating or both complex. Load into {stored_dtype} and convert it afterwards"
        )


def neutral_value(value: object, name: str, add: Callable[[TensorPiece], None]) -> Value:
    """Return an object with neutral values in place of torch objects; its tensors become pieces of their own.

    Args:
        value: The object.
        name: Its name: those of its tensors begin with it.
        add: Takes the piece of each tensor.
    Raises:
        InvalidError: It is nested too deeply.
    """

    def on_tensor(path: str, tensor: torch.Tensor) -> Value:
        add(TensorPiece(path, tuple(tensor.shape), (0,) * tensor.ndim, tensor))
        return TensorRef(path)

    return take_apart(value, name, on_tensor)
