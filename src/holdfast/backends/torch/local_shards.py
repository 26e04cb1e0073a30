"""The part of a tensor that this rank holds: regions, and the memory of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from holdfast.backends.torch.private_layout import (
    StridedShard,
    is_flat_parameter,
    local_shards_of,
    local_tensor,
    split_factor_of,
)
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.coordinates import COORDINATES, DECIDING, Located, whole_numbers
from holdfast.base.geometry.placement import held_boxes, held_boxes_in_shard_order, replica_ranks
from holdfast.base.geometry.region import FlatRange, Region
from holdfast.base.geometry.sharded import Sharded
from holdfast.base.geometry.tensor import MeshLayout, Placement
from holdfast.errors import InvalidError, first_three

RankOfGlobal = Callable[[int], int | None]

DENSE = (torch.Tensor, torch.nn.Parameter)
"""Tensor types that own plain memory."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that save and load together."""

    rank: int
    """Its rank in the group."""

    world_size: int
    """Ranks in the group."""

    rank_of_global: RankOfGlobal
    """The group's rank of a global rank, or None if it is not a member."""

    known: dict[object, OnMesh] = field(default_factory=dict, repr=False, compare=False)
    """Cached layouts of DTensors by mesh, placements and shapes; thousands of tensors share a few layouts."""


@dataclass(slots=True)  # Not frozen: one for every tensor of every save, and frozen is half as fast.
class LocalPart:
    """One region and its memory."""

    region: Region
    """Region of the tensor."""

    local: torch.Tensor
    """A view of its elements, so that filling it fills the tensor: of the box's shape, or 1-d for a flat range."""


@dataclass(slots=True)
class LocalShards:
    """The part of one tensor that this rank holds."""

    global_shape: tuple[int, ...]
    """Shape of the whole tensor."""

    layout: MeshLayout | None
    """Mesh and placements; None without a mesh."""

    holders: tuple[int, ...] | None
    """Ranks that hold the same part; None for a plain tensor, empty if this rank is not in the tensor's mesh."""

    parts: tuple[LocalPart, ...]
    """Regions and memory; empty if the split leaves nothing for this rank."""

    is_located: ClassVar[bool] = False
    """Whether the tensor carries its coordinates. A field would need larger blocks of memory for 100,000 objects."""


class LocatedShards(LocalShards):
    """The part of a tensor that carries its coordinates."""

    __slots__ = ()
    is_located: ClassVar[bool] = True


def shards_of(tensor: torch.Tensor, declared: Sharded | None, fqn: str, ranks: Ranks) -> LocalShards:
    """Return the part of a tensor that this rank holds.

    Raises:
        InvalidError: The layout cannot be stored, or the local tensor does not have the size that it states.
    """
    if isinstance(declared, Located):
        return _located(declared, fqn, ranks)
    if declared is not None:
        return _declared(declared, fqn, ranks)
    if isinstance(tensor, DTensor):
        return _of_dtensor(tensor, fqn, ranks)
    shards = local_shards_of(tensor)
    if shards is None:
        return whole_shard(tensor)
    shape = tuple(tensor.shape)
    if not shards:
        return LocalShards(shape, None, (ranks.rank,), ())
    starts = [start for _, start in shards]
    return _declared(Sharded([local for local, _ in shards], shape, starts), fqn, ranks)


def coordinates_of(tensor: torch.Tensor, fqn: str) -> Located | None:
    """Return the coordinates that a tensor carries; None if it carries none.

    Raises:
        InvalidError: It carries a part of them.
    """
    kind = type(tensor)
    if kind in DENSE:
        # The fast path asks for no `__dict__`: torch makes one for each tensor that is asked, and keeps the dict.
        carries = (
            hasattr(tensor, "global_offsets") or hasattr(tensor, "local_offsets") or hasattr(tensor, "local_sizes")
        )
    else:
        carries = any(name in tensor.__dict__ or isinstance(getattr(kind, name, None), property) for name in DECIDING)
    if not carries or isinstance(tensor, DTensor):  # Mesh and placements of a DTensor state its layout.
        return None
    absent = [name for name in COORDINATES if not hasattr(tensor, name)]
    if absent:
        raise InvalidError(
            f"{fqn}: carries {', '.join(name for name in COORDINATES if name not in absent)} without "
            f"{', '.join(absent)}; expected all four attributes, or none. Set those too, or delete the others"
        )
    shape, *boxes = (getattr(tensor, name) for name in COORDINATES)
    return Located(tensor, shape, start=boxes[0], local_offsets=boxes[1], local_sizes=boxes[2])


def whole_shard(tensor: torch.Tensor) -> LocalShards:
    """Return all of a tensor that this rank holds whole."""
    shape, local = tuple(tensor.shape), tensor.detach() if tensor.requires_grad else tensor
    return LocalShards(shape, None, None, (LocalPart(Box.whole(shape), local),))


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, or a DTensor's local tensor, is dense and has memory.

    Such a tensor can be stored and filled; no other check is needed.
    """
    if type(tensor) is DTensor:
        tensor = local_tensor(tensor)
    kind = type(tensor)
    return (
        (kind is torch.Tensor or (kind is torch.nn.Parameter and not is_flat_parameter(tensor)))
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
    )


@dataclass(frozen=True, slots=True)
class OnMesh:
    """Layout on this rank of all DTensors with one mesh, placements and shape."""

    layout: MeshLayout
    """Mesh and placements."""

    holders: tuple[int, ...]
    """Ranks that hold the same part; empty if this rank is not in the mesh."""

    boxes: tuple[tuple[Box, Box], ...]
    """Held boxes, each with its box in the local tensor."""

    global_shape: tuple[int, ...]
    """Shape of the whole tensor."""

    is_one_box: bool
    """Whether one held box is all of the local tensor."""


def _of_dtensor(tensor: DTensor, fqn: str, ranks: Ranks) -> LocalShards:
    known, local = on_mesh(tensor, fqn, ranks), local_of(tensor)
    shape = known.global_shape
    if known.is_one_box:
        return LocalShards(shape, known.layout, known.holders, (LocalPart(known.boxes[0][0], local),))
    parts = [
        LocalPart(box, local if inner.shape == local.shape else local[inner.relative_to((0,) * len(shape))])
        for box, inner in known.boxes
    ]
    return LocalShards(shape, known.layout, known.holders, tuple(parts))


def on_mesh(tensor: DTensor, fqn: str, ranks: Ranks) -> OnMesh:
    """Return the layout of a DTensor on this rank.

    Raises:
        InvalidError: The layout cannot be stored, or the local tensor does not have the size that it states.
    """
    shape, local, placements = tuple(tensor.shape), local_tensor(tensor), tensor.placements
    # The types too: placements of two types can compare equal and split differently.
    key = (tensor.device_mesh, placements, tuple(map(type, placements)), shape, local.shape)
    known = ranks.known.get(key)
    if known is None:
        layout = layout_of(tensor, fqn, ranks.rank_of_global)
        coordinate = tensor.device_mesh.get_coordinate()
        holders: tuple[int, ...] = ()
        boxes: tuple[tuple[Box, Box], ...] = ()
        if coordinate is not None:
            position = tuple(coordinate)
            holders, boxes = replica_ranks(layout, position), _boxes_of(local, layout, shape, position, fqn)
        is_one_box = len(boxes) == 1 and boxes[0][1].shape == local.shape
        known = ranks.known[key] = OnMesh(layout, holders, boxes, shape, is_one_box)
    return known


def layout_of(tensor: DTensor, fqn: str, rank_of_global: RankOfGlobal) -> MeshLayout:
    """Return mesh and placements of a DTensor in ranks of the process group.

    Raises:
        InvalidError: A placement cannot be stored, or the mesh has ranks outside the group.
    """
    placements = []
    for placement in tensor.placements:
        if type(placement) is ShardPlacement:
            placements.append(Placement(placement.dim % max(tensor.ndim, 1)))
        elif type(placement) is StridedShard:
            placements.append(Placement(placement.dim % max(tensor.ndim, 1), split_factor_of(placement)))
        elif type(placement) is Replicate:
            placements.append(Placement(None))
        else:
            advice = "Reduce it first, e.g. tensor.redistribute()" if placement.is_partial() else "Redistribute it"
            raise InvalidError(
                f"{fqn}: placement {type(placement).__name__} {placement} cannot be saved or loaded; "
                f"expected Shard, _StridedShard or Replicate. {advice}"
            )
    mesh = tensor.device_mesh.mesh
    ranks = ranks_in_group(mesh.flatten().tolist(), rank_of_global, f"{fqn}: its mesh")
    return MeshLayout(tuple(mesh.shape), ranks, tuple(placements))


def ranks_in_group(members: Sequence[int], rank_of_global: RankOfGlobal, what: str) -> tuple[int, ...]:
    """Return the process group's ranks of global ranks.

    Raises:
        InvalidError: A rank is not in the process group. The message begins with `what`, which has the ranks.
    """
    ranks = []
    for member in members:
        rank = rank_of_global(member)
        if rank is None:
            raise InvalidError(
                f"{what} holds rank {member}, which is not in process_group; expected only members of process_group. "
                "Pass a process_group that holds all these ranks"
            )
        ranks.append(rank)
    return tuple(ranks)


def locals_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with a tensor's memory on this rank: its local shards, its local tensor, or itself."""
    shards = local_shards_of(tensor)
    if shards is not None:
        return [local for local, _ in shards]
    return [local_tensor(tensor) if isinstance(tensor, DTensor) else tensor]


def is_meta(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, or a shard of it, is on the meta device: a shape without memory."""
    return any(local.is_meta for local in locals_of(tensor))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the dense tensor that holds this rank's elements, without gradient history."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    return local.detach() if local.requires_grad else local


class _LentMemory:
    """Lends host memory to numpy, and keeps the storage that owns it."""

    def __init__(self, storage: torch.UntypedStorage, interface: dict[str, object]) -> None:
        self._storage, self.__array_interface__ = storage, interface


def extent_bytes(local: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last one."""
    if local.is_contiguous() or not local.numel():
        return local.nbytes
    last = sum([(length - 1) * step for length, step in zip(local.shape, local.stride(), strict=True)])
    return (last + 1) * local.itemsize


def storage_of(local: torch.Tensor, extent: int) -> tuple[torch.UntypedStorage, int]:
    """Return the storage of a tensor, and the offset of the tensor's first byte in it.

    Args:
        local: The tensor.
        extent: Its `extent_bytes`.
    Raises:
        InvalidError: The storage ends before the tensor does. To read the tensor would end the process.
    """
    storage, start = local.untyped_storage(), int(local.storage_offset()) * local.itemsize
    if start + extent > storage.nbytes():
        raise InvalidError(
            f"a tensor {list(local.shape)} of {local.dtype} ends at byte {start + extent} of its storage, which has "
            f"{storage.nbytes()}: its memory was freed or made smaller. Allocate it before the call, and keep it until "
            "the call ends"
        )
    return storage, start


def _lent(
    local: torch.Tensor, extent: int, kind: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None
) -> NDArray[np.generic]:
    # Not `Tensor.numpy()`: from then on torch refuses to resize the storage, which is the caller's.
    storage, start = storage_of(local, extent)
    place = (storage.data_ptr() + start, False)
    return np.asarray(_LentMemory(storage, {"data": place, "typestr": kind, "shape": shape, "strides": strides}))


def bits_of(local: torch.Tensor) -> NDArray[np.generic]:
    """Return host memory as an array of integers of the same itemsize, at most 8. The array keeps the memory."""
    itemsize, shape = local.itemsize, tuple(local.shape)
    if local.is_contiguous():
        return _lent(local, local.nbytes, f"<u{itemsize}", shape)
    return _lent(local, extent_bytes(local), f"<u{itemsize}", shape, tuple([n * itemsize for n in local.stride()]))


def bytes_of(local: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory. The view keeps the memory."""
    count = local.nbytes
    return _lent(local, count, "|u1", (count,)).data


def tensors_of(declared: Sharded, fqn: str) -> list[torch.Tensor]:
    """Return the local tensors of a declaration, at least one.

    Raises:
        InvalidError: There are none, or they are not plain tensors.
    """
    tensors = list(declared.tensor) if isinstance(declared.tensor, list | tuple) else [declared.tensor]
    if not tensors:
        raise InvalidError(
            f"{fqn}: Sharded holds no tensor; expected at least one. Leave the name out on a rank without a part"
        )
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
            raise InvalidError(f"{fqn}: Sharded holds {type(tensor).__name__}; expected plain torch tensors")
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def memory_of(tensor: torch.Tensor, declared: Sharded | None, fqn: str) -> list[torch.Tensor]:
    """Return the tensors of the state: the local ones of a declaration, else the tensor itself."""
    return [tensor] if declared is None else tensors_of(declared, fqn)


def memory_bytes(tensor: torch.Tensor, declared: Sharded | None, fqn: str) -> int:
    """Return the bytes of a tensor's elements on this rank."""
    locals_on_rank = (local for held in memory_of(tensor, declared, fqn) for local in locals_of(held))
    return sum(local.numel() * local.element_size() for local in locals_on_rank)


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return a DTensor of a local tensor, in the shape and layout of another DTensor."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def declared_like(declared: Sharded, tensor: torch.Tensor) -> Sharded | None:
    """Return the declaration for optimizer state of a declared parameter, or None.

    Only a declaration of one local tensor applies, and only to state of the same local shape.
    """
    parameter = declared.tensor
    if isinstance(parameter, torch.Tensor) and parameter.shape == tensor.shape and tensor.ndim:
        return replace(declared, tensor=tensor)
    return None


def _located(located: Located, fqn: str, ranks: Ranks) -> LocalShards:
    (tensor,) = tensors_of(located, fqn)
    local = local_of(tensor)
    shape, boxes = located.boxes(tuple(local.shape), f"{fqn}: on rank {ranks.rank}")
    parts = []
    for box, inner in boxes:
        part = local if inner.shape == local.shape else local[inner.relative_to((0,) * local.ndim)]
        # A view exists for any strides: it cuts the dimension of rows into several.
        parts.append(LocalPart(box, part if box.shape == part.shape else part.view(box.shape)))
    held = tuple(part for part in parts if part.region.numel) or (tuple(parts[:1]) if 0 in shape else ())
    return LocatedShards(shape, None, (ranks.rank,), held)


def _declared(declared: Sharded, fqn: str, ranks: Ranks) -> LocalShards:
    tensors = tensors_of(declared, fqn)
    shape = whole_numbers(declared.global_shape)
    if shape is None or any(length < 0 for length in shape):
        raise InvalidError(f"{fqn}: global_shape={declared.global_shape!r}; expected the length of each dimension")
    if (declared.start is None) == (declared.flat_start is None):
        raise InvalidError(f"{fqn}: Sharded has both or neither of start and flat_start; expected one of them")
    several = isinstance(declared.tensor, list | tuple)
    stated = declared.flat_start if declared.start is None else declared.start
    starts = list(stated) if several and isinstance(stated, Sequence) else [stated]
    if len(starts) != len(tensors):
        raise InvalidError(f"{fqn}: Sharded holds {len(tensors)} tensors and {len(starts)} starts; expected one each")
    if len({tensor.dtype for tensor in tensors}) > 1:
        dtypes = first_three(dict.fromkeys(tensor.dtype for tensor in tensors))
        raise InvalidError(f"{fqn}: holds tensors of dtypes {dtypes}; expected one dtype")
    region_of: Callable[..., Region] = _flat_range if declared.start is None else _box
    parts = [
        LocalPart(region_of(start, local, shape, fqn), local)
        for local, start in zip(map(local_of, tensors), starts, strict=True)
    ]
    replicas = _replicas(declared.replicas, fqn, ranks)
    held = tuple(part for part in parts if part.region.numel) or (tuple(parts[:1]) if 0 in shape else ())
    devices = list(dict.fromkeys(str(part.local.device) for part in held))
    if len(devices) > 1:
        raise InvalidError(
            f"{fqn}: its parts on this rank are on devices {devices}; expected one. Move them to one device, or give "
            "the parts on each device a separate name"
        )
    return LocalShards(shape, None, replicas, held)


def _replicas(stated: object, fqn: str, ranks: Ranks) -> tuple[int, ...]:
    if stated is None:
        return (ranks.rank,)
    numbers = whole_numbers(stated)
    if numbers is None or not all(0 <= rank < ranks.world_size for rank in numbers):
        raise InvalidError(
            f"{fqn}: replicas={str(stated)[:80]}; expected ranks of the process group, from 0 to {ranks.world_size - 1}"
        )
    if ranks.rank not in numbers:
        raise InvalidError(
            f"{fqn}: replicas={str(stated)[:80]} lacks this rank, {ranks.rank}; expected every rank that holds the part"
        )
    return tuple(sorted(set(numbers)))


def _flat_range(stated: object, local: torch.Tensor, shape: tuple[int, ...], fqn: str) -> FlatRange:
    numel = torch.Size(shape).numel()
    (start,) = whole_numbers([stated]) or (-1,)
    if local.ndim != 1 or not 0 <= start <= start + local.numel() <= numel:
        raise InvalidError(
            f"{fqn}: flat_start={stated!r} with a local tensor of shape {tuple(local.shape)}; expected a 1-d tensor "
            f"and a run inside the {numel} elements of {shape}"
        )
    return FlatRange(start, start + local.numel())


def _box(stated: object, local: torch.Tensor, shape: tuple[int, ...], fqn: str) -> Box:
    start = whole_numbers(stated)
    if start is not None and len(start) == len(shape) == local.ndim:
        box = Box(start, tuple(a + n for a, n in zip(start, local.shape, strict=True)))
        if Box.whole(shape).contains(box):
            return box
    raise InvalidError(
        f"{fqn}: start={stated!r} with a local tensor of shape {tuple(local.shape)}; expected a box inside {shape}"
    )


def _boxes_of(
    local: torch.Tensor, layout: MeshLayout, shape: tuple[int, ...], coordinate: tuple[int, ...], fqn: str
) -> tuple[tuple[Box, Box], ...]:
    """Return the boxes of a DTensor that this rank holds, each with its box in the local tensor.

    If a length does not divide evenly, `fully_shard` splits differently from what its `_StridedShard` states. The size
    of the local tensor decides between the two.

    Raises:
        InvalidError: The local tensor has neither size, or both sizes agree and the elements differ.
    """
    stated = held_boxes(layout, shape, coordinate)
    ordered = held_boxes_in_shard_order(layout, shape, coordinate)
    fitting = {boxes for boxes in (ordered, stated) if _fits(local, boxes)}
    if len(fitting) == 1:
        return fitting.pop()
    placements = [str(placement) for placement in layout.placements]
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
    """Return the shape of the local tensor that holds some boxes; None without a box."""
    stops = [inner.stop for _, inner in boxes]
    return tuple(map(max, zip(*stops, strict=True))) if stops else None
