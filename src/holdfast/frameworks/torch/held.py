"""What this rank holds of a tensor: which regions, and the memory of each."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, SupportsIndex

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.errors import InvalidError
from holdfast.geometry.box import Box
from holdfast.geometry.placement import held_boxes, held_boxes_in_shard_order, replica_ranks
from holdfast.geometry.region import FlatRange, Region
from holdfast.geometry.sharded import Sharded
from holdfast.geometry.tensor import Layout, Placement

RankOfGlobal = Callable[[int], int | None]


class ShardOfTensorMetadata(Protocol):
    """Where a local shard of a `ShardedTensor` lies."""

    shard_offsets: Sequence[int]


class LocalShardOfTensor(Protocol):
    """A local shard of a `ShardedTensor`."""

    tensor: torch.Tensor
    metadata: ShardOfTensorMetadata


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that save and load together."""

    rank: int
    """Its rank in the group."""

    world_size: int
    """Ranks in the group."""

    rank_of_global: RankOfGlobal
    """The group's rank of a global rank, or None if it is not a member."""

    known: dict[object, _OnMesh] = field(default_factory=dict, repr=False, compare=False)
    """How DTensors lie, by mesh, placements and shapes: thousands of tensors lie in a few ways."""


@dataclass(slots=True)  # Not frozen: made for every tensor at every save, and frozen fields take twice the time.
class HeldPart:
    """One region and its memory."""

    region: Region
    """Which part of the tensor."""

    local: torch.Tensor
    """Its elements: of the box's shape, or 1-d for a flat range; a view, so that filling it fills the tensor."""


@dataclass(slots=True)
class Held:
    """What this rank holds of one tensor."""

    global_shape: tuple[int, ...]
    """Shape of the whole tensor."""

    layout: Layout | None
    """Mesh and placements, where there are any."""

    holders: tuple[int, ...] | None
    """Ranks stated to hold the same; None for a plain tensor."""

    parts: tuple[HeldPart, ...]
    """Regions and memory; empty where the split leaves nothing."""

    on_mesh: bool = True
    """Whether this rank has any part in the tensor at all."""


def held_of(tensor: torch.Tensor, declared: Sharded | None, fqn: str, ranks: Ranks) -> Held:
    """Return what this rank holds of a tensor.

    Raises:
        InvalidError: The layout cannot be kept, or the local tensor is not as large as it says.
    """
    if declared is not None:
        return _declared(declared, fqn, ranks)
    if isinstance(tensor, DTensor):
        return _of_dtensor(tensor, fqn, ranks)
    shards = local_shards_of(tensor)
    if shards is None:
        return _whole(tensor)
    shape = tuple(tensor.shape)
    starts = [tuple(each.metadata.shard_offsets) for each in shards]
    local_tensors = [each.tensor for each in shards]
    if not shards:
        return Held(shape, None, (ranks.rank,), ())
    return _declared(Sharded(local_tensors, shape, starts), fqn, ranks)


def held_if_plain(tensor: torch.Tensor) -> Held | None:
    """Return what this rank holds of an ordinary tensor that says nothing of a layout, all of it; None of any other.

    Asked first of every tensor of which nothing is declared: there may be a hundred thousand, nearly all of them such.
    """
    return None if type(tensor) is DTensor or not is_ordinary(tensor) else _whole(tensor)


def _whole(tensor: torch.Tensor) -> Held:
    """Return what is held of a tensor of which this rank holds all."""
    shape = tuple(tensor.shape)
    return Held(shape, None, None, (HeldPart(Box.whole(shape), local_of(tensor)),))


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, or what a DTensor holds here, is a dense one with memory: nearly all are.

    Of these nothing else need be asked, to know that they can be stored and filled.
    """
    if type(tensor) is DTensor:
        tensor = tensor._local_tensor
    kind = type(tensor)
    return (
        (kind is torch.Tensor or (kind is torch.nn.Parameter and not getattr(tensor, "_is_flat_param", False)))
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
    )


@dataclass(frozen=True, slots=True)
class _OnMesh:
    """How DTensors of one mesh, placements and shape lie on this rank."""

    layout: Layout
    holders: tuple[int, ...]
    boxes: tuple[tuple[Box, Box], ...]
    """What is held, and where each box lies in the local tensor."""

    on_mesh: bool = True


def _of_dtensor(tensor: DTensor, fqn: str, ranks: Ranks) -> Held:
    shape, local = tuple(tensor.shape), local_of(tensor)
    placements = tensor.placements
    # Of two kinds placements can be equal, and yet split otherwise.
    key = (tensor.device_mesh, placements, tuple(map(type, placements)), shape, local.shape)
    known = ranks.known.get(key)
    if known is None:
        layout = layout_of(tensor, fqn, ranks.rank_of_global)
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            known = _OnMesh(layout, (), (), on_mesh=False)
        else:
            at = tuple(coordinate)
            known = _OnMesh(layout, replica_ranks(layout, at), _boxes_of(local, layout, shape, at, fqn))
        ranks.known[key] = known
    parts = [
        HeldPart(box, local if where.shape == local.shape else local[where.relative_to((0,) * len(shape))])
        for box, where in known.boxes
    ]
    return Held(shape, known.layout, known.holders, tuple(parts), known.on_mesh)


def layout_of(tensor: DTensor, fqn: str, rank_of_global: RankOfGlobal) -> Layout:
    """Return mesh and placements of a DTensor in ranks of the process group.

    Raises:
        InvalidError: A placement that cannot be kept, or a mesh reaching outside the group.
    """
    placements = []
    for placement in tensor.placements:
        if type(placement) is ShardPlacement:
            placements.append(Placement(placement.dim % max(tensor.ndim, 1)))
        elif type(placement) is _StridedShard:
            placements.append(Placement(placement.dim % max(tensor.ndim, 1), int(placement.split_factor)))
        elif type(placement) is Replicate:
            placements.append(Placement(None))
        else:
            advice = "Reduce it first, e.g. tensor.redistribute()" if placement.is_partial() else "Redistribute it"
            raise InvalidError(
                f"{fqn}: placement {type(placement).__name__} {placement} cannot be saved or loaded; "
                f"expected Shard, _StridedShard or Replicate. {advice}"
            )
    mesh = tensor.device_mesh.mesh
    ranks = []
    for each in mesh.flatten().tolist():
        rank = rank_of_global(each)
        if rank is None:
            raise InvalidError(
                f"{fqn}: its mesh holds rank {each}, which is not in process_group; "
                "expected every rank of the mesh to take part. Pass the group that holds the whole mesh"
            )
        ranks.append(rank)
    return Layout(tuple(mesh.shape), tuple(ranks), tuple(placements))


def local_shards_of(tensor: torch.Tensor) -> list[LocalShardOfTensor] | None:
    """Return the local shards of a `ShardedTensor`; None for any other tensor, without importing that class."""
    if type(tensor).__name__ != "ShardedTensor" or not hasattr(tensor, "local_shards"):
        return None
    return list(tensor.local_shards())


def is_meta(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a shape and no memory."""
    shards = local_shards_of(tensor)
    return tensor.is_meta if shards is None else any(each.tensor.is_meta for each in shards)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the dense tensor that holds this rank's elements, without gradient history."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach() if local.requires_grad else local


def tensors_of(declared: Sharded, fqn: str) -> list[torch.Tensor]:
    """Return the local tensors of a declaration, at least one.

    Raises:
        InvalidError: They are no tensors.
    """
    tensors = list(declared.tensor) if isinstance(declared.tensor, list | tuple) else [declared.tensor]
    if not tensors:
        raise InvalidError(f"{fqn}: Sharded holds no tensor; leave the name out on a rank that holds nothing of it")
    for each in tensors:
        if not isinstance(each, torch.Tensor) or isinstance(each, DTensor):
            raise InvalidError(f"{fqn}: Sharded holds {type(each).__name__}; expected plain torch tensors")
    return [each for each in tensors if isinstance(each, torch.Tensor)]


def memory_of(tensor: torch.Tensor, declared: Sharded | None, fqn: str) -> list[torch.Tensor]:
    """Return the tensors that stand in the state: the local ones of a declaration, else the tensor itself."""
    return [tensor] if declared is None else tensors_of(declared, fqn)


def memory_bytes(tensor: torch.Tensor, declared: Sharded | None, fqn: str) -> int:
    """Return the bytes of a tensor's elements on this rank."""
    shards = local_shards_of(tensor)
    own = memory_of(tensor, declared, fqn) if shards is None else [each.tensor for each in shards]
    return sum(local.numel() * local.element_size() for local in map(local_of, own))


def declared_like(declared: Sharded, tensor: torch.Tensor) -> Sharded | None:
    """Return the declaration of a tensor that lies as a declared one does (its optimizer state), or None.

    Only a declaration of one local tensor can be carried over, to a tensor of the same local shape.
    """
    own = declared.tensor
    if isinstance(own, torch.Tensor) and own.shape == tensor.shape and tensor.ndim:
        return Sharded(tensor, declared.global_shape, declared.start, declared.flat_start, declared.replicas)
    return None


def _declared(declared: Sharded, fqn: str, ranks: Ranks) -> Held:
    tensors = tensors_of(declared, fqn)
    shape = _whole_numbers(declared.global_shape)
    if shape is None or any(length < 0 for length in shape):
        raise InvalidError(f"{fqn}: global_shape={declared.global_shape!r}; expected the length of each dimension")
    if (declared.start is None) == (declared.flat_start is None):
        raise InvalidError(f"{fqn}: Sharded needs either start or flat_start, and not both")
    several = isinstance(declared.tensor, list | tuple)
    stated = declared.flat_start if declared.start is None else declared.start
    starts = list(stated) if several and isinstance(stated, Sequence) else [stated]
    if len(starts) != len(tensors):
        raise InvalidError(f"{fqn}: Sharded holds {len(tensors)} tensors and {len(starts)} starts; expected one each")
    parts = []
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise InvalidError(f"{fqn}: holds tensors of dtypes {[str(each.dtype) for each in tensors]}; expected one")
    for tensor, start in zip(tensors, starts, strict=True):
        local = local_of(tensor)
        if declared.start is None:
            parts.append(HeldPart(_flat_range(start, local, shape, fqn), local))
        else:
            parts.append(HeldPart(_box(start, local, shape, fqn), local))
    replicas = _replicas(declared.replicas, fqn, ranks)
    held = tuple(part for part in parts if part.region.numel) or (tuple(parts[:1]) if 0 in shape else ())
    devices = list(dict.fromkeys(str(part.local.device) for part in held))
    if len(devices) > 1:
        raise InvalidError(
            f"{fqn}: its parts on this rank lie on devices {devices}; expected one. Bring them to one device, or give "
            "those of each device a name of their own"
        )
    return Held(shape, None, replicas, held)


def _replicas(stated: object, fqn: str, ranks: Ranks) -> tuple[int, ...]:
    if stated is None:
        return (ranks.rank,)
    numbers = _whole_numbers(stated)
    if numbers is None or not all(0 <= each < ranks.world_size for each in numbers):
        raise InvalidError(
            f"{fqn}: replicas={stated!r}; expected ranks of the process group, from 0 to {ranks.world_size - 1}"
        )
    if ranks.rank not in numbers:
        raise InvalidError(
            f"{fqn}: replicas={stated!r} lacks this rank, {ranks.rank}; expected every rank that holds it"
        )
    return tuple(sorted(set(numbers)))


def _whole_numbers(stated: object) -> tuple[int, ...] | None:
    """Return a sequence of whole numbers as such; None for anything else, fractions and text included."""
    if not isinstance(stated, Sequence) or isinstance(stated, str | bytes):
        return None
    if any(isinstance(each, bool) or not isinstance(each, SupportsIndex) for each in stated):
        return None
    return tuple(operator.index(each) for each in stated)


def _flat_range(stated: object, local: torch.Tensor, shape: tuple[int, ...], fqn: str) -> FlatRange:
    numel = torch.Size(shape).numel()
    (start,) = _whole_numbers([stated]) or (-1,)
    if local.ndim != 1 or not 0 <= start <= start + local.numel() <= numel:
        raise InvalidError(
            f"{fqn}: flat_start={stated!r} with a local tensor of shape {tuple(local.shape)}; expected a 1-d tensor "
            f"and a run inside the {numel} elements of {shape}"
        )
    return FlatRange(start, start + local.numel())


def _box(stated: object, local: torch.Tensor, shape: tuple[int, ...], fqn: str) -> Box:
    start = _whole_numbers(stated)
    if start is not None and len(start) == len(shape) == local.ndim:
        box = Box(start, tuple(a + n for a, n in zip(start, local.shape, strict=True)))
        if Box.whole(shape).contains(box):
            return box
    raise InvalidError(
        f"{fqn}: start={stated!r} with a local tensor of shape {tuple(local.shape)}; expected a box inside {shape}"
    )


def _boxes_of(
    local: torch.Tensor, layout: Layout, shape: tuple[int, ...], coordinate: tuple[int, ...], fqn: str
) -> tuple[tuple[Box, Box], ...]:
    """Return what this rank holds of a DTensor: each box, and where it lies in the local tensor.

    `_StridedShard` says one thing and `fully_shard` does another where a length does not divide evenly: the size of
    the local tensor tells which of the two it is.

    Raises:
        InvalidError: The local tensor is of neither size, or of both with different elements.
    """
    stated = held_boxes(layout, shape, coordinate)
    ordered = held_boxes_in_shard_order(layout, shape, coordinate)
    fitting = {boxes for boxes in (ordered, stated) if _fits(local, boxes)}
    if len(fitting) == 1:
        return fitting.pop()
    placements = [str(each) for each in layout.placements]
    if fitting:
        raise InvalidError(
            f"{fqn}: {shape} does not divide evenly over mesh {layout.mesh_shape} with placements {placements}, and "
            f"this rank's elements may be {[str(box) for box, _ in ordered]} or {[str(box) for box, _ in stated]}. "
            "Pad the tensor to a length that divides"
        )
    raise InvalidError(
        f"{fqn}: the local tensor has shape {tuple(local.shape)}; mesh {layout.mesh_shape} and placements "
        f"{placements} of {shape} give {_local_shape(stated)}"
    )


def _fits(local: torch.Tensor, boxes: Sequence[tuple[Box, Box]]) -> bool:
    return 0 in local.shape if not boxes else _local_shape(boxes) == tuple(local.shape)


def _local_shape(boxes: Sequence[tuple[Box, Box]]) -> tuple[int, ...] | None:
    """Return the shape of the local tensor that holds some boxes; None for none of them."""
    wheres = [where.stop for _, where in boxes]
    return tuple(map(max, zip(*wheres, strict=True))) if wheres else None
