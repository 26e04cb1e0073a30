"""One torch tensor: what of it this rank holds, its bytes, and how to fill it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from holdfast.errors import InvalidError
from holdfast.ports.framework import Ticket
from holdfast.spec.box import Box
from holdfast.spec.dtype import DTYPES, dtype_named
from holdfast.spec.placement import box_at
from holdfast.spec.tensor import Layout, Placement

RankOfGlobal = Callable[[int], int | None]


class _Done:
    def wait(self) -> None:
        """Return at once: copies within host memory are complete when the call returns."""


DONE: Ticket = _Done()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype without its module."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a stored element type."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def require_storable(tensor: torch.Tensor, fqn: str) -> None:
    """Refuse tensors whose bytes are not simply those of a dense array.

    Raises:
        InvalidError: Names the tensor, what it is and what to do.
    """
    kind = type(tensor).__name__
    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidError(f"{fqn}: {kind} has no shape yet; run the model once, or leave it out with skip=")
    if not isinstance(tensor, DTensor):
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise InvalidError(f"{fqn}: tensor subclass {kind} cannot be saved; convert it or leave it out with skip=")
        if kind in ("FlatParameter", "ShardedTensor"):
            raise InvalidError(f"{fqn}: {kind} is not supported yet; use fully_shard (FSDP2), or skip= it")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise InvalidError(
            f"{fqn}: {tensor.layout} {kind} cannot be saved; expected a dense tensor. Convert it, or skip= it"
        )
    dtype_named(dtype_name(tensor.dtype), fqn)


def layout_of(tensor: DTensor, fqn: str, rank_of_global: RankOfGlobal) -> Layout:
    """Return mesh and placements of a DTensor in ranks of the process group.

    Raises:
        InvalidError: A placement other than Shard and Replicate, or a mesh reaching outside the group.
    """
    placements = []
    for placement in tensor.placements:
        if type(placement) is ShardPlacement:
            placements.append(Placement(placement.dim % max(tensor.ndim, 1)))
        elif type(placement) is Replicate:
            placements.append(Placement(None))
        else:
            advice = "reduce it first, e.g. tensor.redistribute()" if placement.is_partial() else "redistribute it"
            raise InvalidError(
                f"{fqn}: placement {type(placement).__name__} {placement} cannot be saved or loaded; "
                f"expected Shard or Replicate. {advice[0].upper()}{advice[1:]}"
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


def held_box(tensor: torch.Tensor, layout: Layout | None, fqn: str) -> Box | None:
    """Return the box this rank holds of a tensor, or None if the split leaves it nothing or it is off the mesh.

    Raises:
        InvalidError: The local tensor is not as large as mesh and placements say.
    """
    if layout is None or not isinstance(tensor, DTensor):
        return Box.whole(tuple(tensor.shape))
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    box = box_at(layout, tuple(tensor.shape), tuple(coordinate))
    local_shape: tuple[int, ...] = tuple(tensor.to_local().shape)
    expected = box.shape if box is not None else None
    if local_shape != expected and (expected is not None or 0 not in local_shape):
        raise InvalidError(
            f"{fqn}: the local tensor has shape {local_shape}; mesh {layout.mesh_shape} and placements "
            f"{[str(p) for p in layout.placements]} of {tuple(tensor.shape)} give {expected}"
        )
    return box


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the dense tensor that holds this rank's elements, without gradient history."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


class TorchSource:
    """The bytes of one held box."""

    def __init__(self, tensor: torch.Tensor, box: Box | None) -> None:
        self._tensor = tensor
        self._box = box
        self._bytes: torch.Tensor | None = None

    def copy_into(self, piece: Box, start: int, stop: int, slab: memoryview) -> Ticket:
        """Copy a run of a piece's row-major bytes to the front of `slab`; the piece is one run of the held box."""
        assert self._box is not None, "a rank that holds nothing owns nothing"
        data = self._flat()
        offset = self._first_element(piece) * self._tensor.element_size()
        run = data[offset + start : offset + stop]
        if run.device.type == "cpu":
            slab[: stop - start] = run.numpy().data
        else:
            torch.frombuffer(slab, dtype=torch.uint8, count=stop - start).copy_(run)
        return DONE

    def sample(self, blocks: int, block_bytes: int) -> bytes:
        """Return at most `blocks` blocks spread evenly over the held bytes."""
        data = self._flat()
        total = data.numel()
        if total <= blocks * block_bytes:
            return data.cpu().numpy().tobytes()
        stride = (total - block_bytes) / max(blocks - 1, 1)
        starts = [int(number * stride) for number in range(blocks)]
        return torch.cat([data[start : start + block_bytes] for start in starts]).cpu().numpy().tobytes()

    def _flat(self) -> torch.Tensor:
        if self._bytes is None:
            local = local_of(self._tensor).resolve_conj().resolve_neg()
            self._bytes = local.contiguous().reshape(-1).view(torch.uint8)
        return self._bytes

    def _first_element(self, piece: Box) -> int:
        assert self._box is not None
        element = 0
        for at, origin, length in zip(piece.start, self._box.start, self._box.shape, strict=True):
            element = element * length + at - origin
        return element


class TorchTarget:
    """A held box of a tensor, to be filled in place."""

    def __init__(self, tensor: torch.Tensor, box: Box, stored_dtype: str) -> None:
        self._local = local_of(tensor)
        self._box = box
        self._stored = torch_dtype(stored_dtype)
        # In host memory and without a conversion, numpy copies: one thread, no grad mode, no dispatcher. torch
        # would spread each copy over its own threads, which fight with the reading ones for the same cores.
        # What shows its memory conjugated or negated is left to torch, which knows what to write there.
        lazy = self._local.is_conj() or self._local.is_neg()
        plain = self._local.device.type == "cpu" and self._local.dtype == self._stored and not lazy
        self._bits = self._local.view(_BITS[self._stored.itemsize]).numpy() if plain else None

    def place(self, part: Box, source: memoryview, source_box: Box) -> None:
        """Copy `part` out of the row-major bytes of `source_box`, converting if the dtypes differ."""
        taken = part.relative_to(source_box.start)
        given = part.relative_to(self._box.start)
        if self._bits is not None:
            self._bits[given] = np.frombuffer(source, dtype=self._bits.dtype).reshape(source_box.shape)[taken]
            return
        stored = torch.frombuffer(source, dtype=self._stored).view(source_box.shape)
        with torch.no_grad():
            self._local[given].copy_(stored[taken])


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers that carry the bits of any stored dtype, by itemsize."""


def tensor_of(array: object, dtype: str) -> torch.Tensor:
    """Return a numpy array that holds the bits of a stored dtype as a tensor of that dtype."""
    assert isinstance(array, np.ndarray)
    bits = np.ascontiguousarray(array).reshape(array.shape)
    return torch.from_numpy(bits).view(torch_dtype(dtype))


def storage_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that two tensors share exactly if they are the same elements of the same memory."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    placements = tuple(map(str, tensor.placements)) if isinstance(tensor, DTensor) else ()
    return (
        local.untyped_storage()._cdata,
        local.storage_offset(),
        tuple(local.shape),
        local.stride(),
        local.dtype,
        local.is_conj(),
        local.is_neg(),
        tuple(tensor.shape),
        placements,
    )


assert all(isinstance(getattr(torch, name, None), torch.dtype) for name in DTYPES)
