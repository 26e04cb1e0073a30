"""One torch tensor: what of it this rank holds, its bytes, and how to fill it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Generic, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from holdfast.errors import InvalidError
from holdfast.frameworks.torch.held import (
    Held,
    HeldPart,
    Ranks,
    held_if_plain,
    held_of,
    is_meta,
    is_ordinary,
    local_shards_of,
    memory_of,
)
from holdfast.frameworks.torch.side_stream import SideStream, on_stream, side_stream
from holdfast.frameworks.torch.tickets import DONE, Tickets
from holdfast.geometry.box import Box, flat_range_boxes
from holdfast.geometry.dtype import DTYPES, dtype_named
from holdfast.geometry.region import FlatRange, Region, contains, region_boxes
from holdfast.geometry.sharded import Sharded
from holdfast.ports.framework import Target, Ticket


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype without its module."""
    return _DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


_TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_DTYPE_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}


def storable_dtype(tensor: torch.Tensor, fqn: str) -> str:
    """Return the element type a tensor is stored as.

    Raises:
        InvalidError: Holdfast does not store it.
    """
    return _DTYPE_NAMES.get(tensor.dtype) or dtype_named(dtype_name(tensor.dtype), fqn).name


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a stored element type."""
    return _TORCH_DTYPES[name]


def require_storable(tensor: torch.Tensor, fqn: str) -> None:
    """Refuse tensors whose bytes are not simply those of a dense array.

    Raises:
        InvalidError: Names the tensor, what it is and what to do.
    """
    if is_ordinary(tensor):
        storable_dtype(tensor, fqn)
        return
    kind = type(tensor).__name__
    shards = local_shards_of(tensor)
    if shards is not None:
        for each in shards:
            require_storable(each.tensor, fqn)
        storable_dtype(tensor, fqn)
        return
    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidError(f"{fqn}: {kind} has no shape yet; run the model once, or leave it out with skip=")
    if type(tensor) is not torch.Tensor and not isinstance(tensor, DTensor):
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise InvalidError(f"{fqn}: tensor subclass {kind} cannot be saved; convert it or leave it out with skip=")
        if getattr(tensor, "_is_flat_param", False):
            raise InvalidError(
                f"{fqn}: a FlatParameter of FSDP1 holds many parameters without their names; pass the "
                "FullyShardedDataParallel module itself, wrapped with use_orig_params=True"
            )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise InvalidError(
            f"{fqn}: {tensor.layout} {kind} cannot be saved; expected a dense tensor. Convert it, or skip= it"
        )
    storable_dtype(tensor, fqn)


def held_storable(
    fqn: str, tensor: torch.Tensor, declared: Sharded | None, ranks: Ranks, advice: str
) -> tuple[Held, Sequence[torch.Tensor]]:
    """Return what this rank holds of a tensor, and the tensors of the state with that memory.

    Raises:
        InvalidError: The tensor cannot be stored, or it is a meta tensor; then the message ends with `advice`.
    """
    if declared is None and (plain := held_if_plain(tensor)) is not None:
        return plain, (tensor,)
    memory = memory_of(tensor, declared, fqn)
    for local in memory:
        if not is_ordinary(local):
            require_storable(local, fqn)
            if is_meta(local):
                raise InvalidError(f"{fqn}: is a meta tensor, which has no bytes; {advice}")
    return held_of(tensor, declared, fqn, ranks), memory


class TorchSource:
    """The bytes of what a rank holds of one tensor."""

    def __init__(self, parts: Sequence[HeldPart], memory: Sequence[torch.Tensor]) -> None:
        """Read what is held.

        Args:
            parts: Regions and their memory.
            memory: The tensors that stand in the state, whose memory it is now.
        """
        self._parts, self._memory = parts, memory
        on_gpu = bool(parts) and parts[0].local.is_cuda
        self.side: SideStream | None = side_stream(parts[0].local.device) if on_gpu else None
        """Where copies off a GPU are queued, by whichever thread; None in host memory."""

    def copy_into(self, piece: Region, start: int, stop: int, buffer: memoryview) -> Ticket:
        """Copy a run of a piece's row-major bytes to the front of `buffer`; the piece is one run of a held region."""
        part = self._parts[0]
        if len(self._parts) > 1:
            part = next(each for each in self._parts if contains(each.region, piece))
        offset = 0 if piece is part.region else _first_element(part.region, piece) * part.local.element_size()
        if self.side is None:
            _copy_run(part.local, offset + start, offset + stop, buffer)
            return DONE
        return self.side.queued(lambda: _queue_run(part.local, offset + start, offset + stop, buffer))

    @classmethod
    def copy_together(cls, sources: Sequence[Self], pieces: Sequence[Region], buffer: memoryview) -> Ticket:
        """Copy pieces of several sources, each whole, one after the other."""
        runs: list[torch.Tensor] = []
        side: SideStream | None = None
        tickets = Tickets()
        at = 0
        try:
            for source, piece in zip(sources, pieces, strict=True):
                part = source._parts[0]
                local = part.local
                joins = (
                    (local.is_cpu or source.side is not None)
                    and (piece is part.region or piece == part.region)
                    and _is_one_run(local)
                )
                if runs and not (joins and local.dtype is runs[0].dtype and source.side is side):
                    at += _joined(runs, side, buffer[at:], tickets)
                    runs = []
                if joins:
                    runs.append(local if local.ndim == 1 else local.view(-1))
                    side = source.side
                else:
                    stop = piece.numel * local.itemsize
                    tickets.add(source.copy_into(piece, 0, stop, buffer[at:]))
                    at += stop
            if runs:
                _joined(runs, side, buffer[at:], tickets)
        except BaseException as error:  # noqa: BLE001 - raised by what is called
            return tickets.ended_by(error)
        return tickets

    def sample(self, blocks: int, block_bytes: int) -> bytes:
        """Return at most `blocks` blocks spread evenly over the held bytes of each part."""
        return b"".join(_sampled(part.local, blocks, block_bytes) for part in self._parts)

    def stamp(self) -> object:
        """Return address and version counters of each tensor: of a DTensor both its own counter and its local one."""
        return [
            (local.data_ptr(), _version(each), _version(local)) for each in self._memory for local in _locals_of(each)
        ]

    def copied(self) -> TorchSource:
        """Return a source of clones."""
        parts = [HeldPart(part.region, part.local.clone()) for part in self._parts]
        if self.side is not None:
            self.side.follow()
        return TorchSource(parts, [part.local for part in parts])


def _locals_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    shards = local_shards_of(tensor)
    if shards is not None:
        return [each.tensor for each in shards]
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor]


def _version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to, by operations that count; inference tensors have no counter."""
    return -1 if tensor.is_inference() else tensor._version


def _copy_run(local: torch.Tensor, start: int, stop: int, buffer: memoryview) -> None:
    """Copy a run of a tensor's row-major bytes, of whole elements, to the front of `buffer`.

    A tensor that is not one run of memory, or shows its memory conjugated or negated, is copied box by box: a
    contiguous copy of all of it could be as large as the state.
    """
    if not _is_one_run(local):
        at = 0
        for box in flat_range_boxes(tuple(local.shape), start // local.itemsize, stop // local.itemsize):
            into = torch.frombuffer(buffer, dtype=local.dtype, count=box.numel, offset=at).view(box.shape)
            into.copy_(local[box.relative_to((0,) * local.ndim)])
            at += box.numel * local.itemsize
        return
    if local.is_cpu:
        buffer[: stop - start] = bits_of(local).data.cast("B")[start:stop]
    else:
        run = _bytes(local)[start:stop]
        torch.frombuffer(buffer, dtype=torch.uint8, count=stop - start).copy_(run)


def _queue_run(local: torch.Tensor, start: int, stop: int, buffer: memoryview) -> None:
    """Queue a copy of a run of a device's tensor on the current stream, as `_copy_run` would make it.

    What does not lie as it is stored is brought into order on the device, before it is on its way: host memory may not
    be touched until it has arrived.
    """
    if _is_one_run(local):
        _queue(_bytes(local)[start:stop], buffer)
        return
    at = 0
    for box in flat_range_boxes(tuple(local.shape), start // local.itemsize, stop // local.itemsize):
        ordered = local[box.relative_to((0,) * local.ndim)].resolve_conj().resolve_neg().contiguous()
        _queue(_bytes(ordered), buffer[at:])
        at += ordered.nbytes


def _queue(run: torch.Tensor, buffer: memoryview) -> None:
    """Queue a copy of bytes in one run of a device's memory to the front of `buffer`."""
    if run.numel():
        torch.frombuffer(buffer, dtype=torch.uint8, count=run.numel()).copy_(run, non_blocking=True)


def _bytes(run: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as bytes; one of a single element may say any stride, which `view` would not take."""
    return run.as_strided((run.numel(),), (1,)).view(torch.uint8)


def _is_one_run(local: torch.Tensor) -> bool:
    """Return whether a tensor's memory holds its row-major bytes as they are."""
    return local.is_contiguous() and not (local.is_conj() or local.is_neg())


def _joined(runs: list[torch.Tensor], side: SideStream | None, buffer: memoryview, tickets: Tickets) -> int:
    """Copy 1-d tensors of one dtype and device one after the other to the front of `buffer`; return how many bytes."""
    if side is not None:
        tickets.add(side.queued(lambda: _queue(torch.cat([_bytes(run) for run in runs]), buffer)))
        return sum([run.nbytes for run in runs])
    joined = torch.frombuffer(buffer, dtype=runs[0].dtype, count=sum([run.numel() for run in runs]))
    with torch.no_grad():
        torch.cat(runs, out=joined)
    return joined.nbytes


def _sampled(local: torch.Tensor, blocks: int, block_bytes: int) -> bytes:
    total, itemsize = local.numel() * local.itemsize, local.itemsize
    if not total:
        return b""
    if total <= blocks * block_bytes:
        runs = [(0, total)]
    else:
        run_bytes = -(-block_bytes // itemsize) * itemsize
        stride = (total - run_bytes) / max(blocks - 1, 1)
        starts = (int(number * stride) // itemsize * itemsize for number in range(blocks))
        runs = [(start, start + run_bytes) for start in starts]
    if not local.is_cpu and _is_one_run(local):
        return _gathered(local, runs)
    data = memoryview(bytearray(sum(stop - start for start, stop in runs)))
    at = 0
    for start, stop in runs:
        _copy_run(local, start, stop, data[at : at + stop - start])
        at += stop - start
    return data.tobytes()


def _gathered(local: torch.Tensor, runs: Sequence[tuple[int, int]]) -> bytes:
    """Return runs of a tensor's bytes, brought together where it lies: one wait for a device, and not one a run."""
    whole = _bytes(local)
    return torch.cat([whole[start:stop] for start, stop in runs]).cpu().numpy().tobytes()


def _first_element(held: Region, piece: Region) -> int:
    """Return where a piece begins in a held region, in elements of the region's own order."""
    if isinstance(held, FlatRange):
        assert isinstance(piece, FlatRange), "a piece is of the kind of the region it is cut from"
        return piece.start - held.start
    assert isinstance(piece, Box), "a piece is of the kind of the region it is cut from"
    element = 0
    for at, origin, length in zip(piece.start, held.start, held.shape, strict=True):
        element = element * length + at - origin
    return element


class TorchTarget(Target):
    """What a rank holds of a tensor, to be filled in place."""

    def __init__(self, held: Held, stored_dtype: str) -> None:
        self._stored = torch_dtype(stored_dtype)
        parts = held.parts
        self.boxes: tuple[Box, ...]
        """What is wanted, global coordinates."""
        self.local_bytes: int
        """Bytes of the memory to be filled."""
        if len(parts) == 1 and isinstance(parts[0].region, Box):
            # Nearly all are, and there may be a hundred thousand of them.
            region, local = parts[0].region, parts[0].local
            self._boxes, self.boxes, self.local_bytes = [(region, local)], (region,), local.nbytes
        else:
            self._boxes = _boxes(held)
            self.boxes = tuple([box for box, _ in self._boxes])
            self.local_bytes = sum([part.local.nbytes for part in parts])
        on_gpu = bool(parts) and parts[0].local.is_cuda
        # Other threads fill it, which have streams of their own: it comes after what the caller's stream was given.
        self._stream = torch.cuda.current_stream(parts[0].local.device) if on_gpu else None

    def place(self, part: Box, source: memoryview, source_box: Box) -> None:
        """Copy `part` out of the row-major bytes of `source_box`, converting if the dtypes differ."""
        for box, local in self._boxes:
            # Stated targets may overlap (a halo), and then each of them is to be filled.
            if len(self._boxes) == 1 or box.contains(part):
                self._place(box, local, part, source, source_box)

    @classmethod
    def place_together(
        cls, targets: Sequence[Self], boxes: Sequence[Box], source: memoryview, ranges: Sequence[tuple[int, int]]
    ) -> None:
        """Copy boxes to several targets, one to each."""
        address = np.frombuffer(source, dtype=np.uint8).ctypes.data
        for target, box, (start, stop) in zip(targets, boxes, ranges, strict=True):
            own, local = target._boxes[0]
            # To the memory itself: an array over it, made to be written to once, takes three times as long.
            if (
                box is own
                and len(target._boxes) == 1
                and local.dtype is target._stored
                and stop - start == target.local_bytes
                and local.is_cpu
                and _is_one_run(local)
                and (into := local.data_ptr())
            ):
                ctypes.memmove(into, address + start, stop - start)
            else:
                target.place(box, source[start:stop], box)

    def memory(self, part: Box) -> memoryview | None:
        """Return the one run of host memory that `part` would fill as it is stored, if there is just one."""
        boxes = self._boxes
        if len(boxes) > 1:
            boxes = [each for each in boxes if each[0].contains(part)]
            if len(boxes) != 1:
                return None
        ((box, local),) = boxes
        bits = self._bits(local)
        if bits is None:
            return None
        run = bits if part is box else bits[part.relative_to(box.start)]
        return run.data.cast("B") if run.flags.c_contiguous and run.flags.writeable else None

    def _place(self, box: Box, local: torch.Tensor, part: Box, source: memoryview, source_box: Box) -> None:
        bits = self._bits(local)
        if bits is None:
            stored = torch.frombuffer(source, dtype=self._stored).view(source_box.shape)
            with torch.no_grad(), on_stream(self._stream):
                local[part.relative_to(box.start)].copy_(stored[part.relative_to(source_box.start)])
        elif part is source_box and part is box and bits.flags.c_contiguous:
            bits.data.cast("B")[:] = source
        else:
            given = np.frombuffer(source, dtype=bits.dtype).reshape(source_box.shape)
            bits[part.relative_to(box.start)] = given[part.relative_to(source_box.start)]

    def _bits(self, local: torch.Tensor) -> NDArray[np.generic] | None:
        """Return memory that takes bytes as they are stored; None where they must be converted or go to a device.

        In host memory and without a conversion, numpy copies: one thread, no grad mode, no dispatcher. torch would
        spread each copy over its own threads, which fight with the reading ones for the same cores. What shows its
        memory conjugated or negated is left to torch, which knows what to write there.
        """
        if local.dtype is not self._stored or not local.is_cpu or local.is_conj() or local.is_neg():
            return None
        return bits_of(local) if local.itemsize in _BITS else None


def _boxes(held: Held) -> list[tuple[Box, torch.Tensor]]:
    """Return every box of what is held with its memory; a flat range falls into a few, each a run of it."""
    boxes = []
    for each in held.parts:
        if isinstance(each.region, Box):
            boxes.append((each.region, each.local))
            continue
        at = 0
        for box in region_boxes(each.region, held.global_shape):
            boxes.append((box, each.local[at : at + box.numel].view(box.shape)))
            at += box.numel
    return boxes


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers that carry the bits of any stored dtype, by itemsize."""

_KNOWN_TO_NUMPY = {torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.complex128}


def bits_of(local: torch.Tensor) -> NDArray[np.generic]:
    """Return host memory as an array of any dtype of its itemsize; copying its elements keeps their bits."""
    if local.dtype not in _KNOWN_TO_NUMPY:
        local = local.view(_BITS[local.dtype.itemsize])
    return local.detach().numpy() if local.requires_grad else local.numpy()


def tensor_of(array: object, dtype: str) -> torch.Tensor:
    """Return a numpy array that holds the bits of a stored dtype as a tensor of that dtype."""
    assert isinstance(array, np.ndarray)
    bits = np.ascontiguousarray(array).reshape(array.shape)
    return torch.from_numpy(bits).view(torch_dtype(dtype))


_DENSE = (torch.Tensor, torch.nn.Parameter)
"""Kinds that hold what they show in memory of their own."""

Note = TypeVar("Note")


class Ties(Generic[Note]):
    """Which tensors are the same elements of the same memory, and what was noted of the first of each."""

    def __init__(self) -> None:
        self._at: dict[int, tuple[torch.Tensor, Note]] = {}
        self._first: dict[tuple[object, ...], Note] = {}

    def first(self, tensor: torch.Tensor, note: Note, fqn: str) -> Note:
        """Return what was noted of the first tensor that is these elements of this memory; `note` if it is this one.

        Raises:
            InvalidError: It has elements and no memory.
        """
        local = tensor
        if type(tensor) not in _DENSE:
            if local_shards_of(tensor) is not None:
                return self._first.setdefault(storage_key(tensor), note)
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        # Where no other begins, nothing more need be asked. Who is kept here keeps its address from being given anew.
        address = local.data_ptr()
        if not address and local.numel():
            raise InvalidError(
                f"{fqn}: has the shape {list(local.shape)} and no memory: its storage was freed, or it stands for "
                "zeros that were never made. Give it its memory back first, or leave it out with skip="
            )
        other, others_note = self._at.setdefault(address, (tensor, note))
        if other is tensor:
            return others_note
        self._first.setdefault(storage_key(other), others_note)
        return self._first.setdefault(storage_key(tensor), note)


def has_elements(tensor: torch.Tensor, held: Held) -> bool:
    """Return whether a tensor has elements, so that it has an address."""
    # A plain tensor's shape is in `held`. To ask torch for it again makes a new object for each of 100,000 tensors.
    return 0 not in (held.global_shape if held.holders is None else tensor.shape)


def parts_key(held: Held) -> tuple[object, ...]:
    """Return shape and regions of a tensor: what two names of one memory must have in common."""
    return (held.global_shape, *(part.region for part in held.parts))


def different_parts(fqn: str, first: str) -> InvalidError:
    """Return the error for two names of one memory with different layouts."""
    return InvalidError(
        f"{fqn}: shares its memory with {first}, but the two declare different parts; expected the same layout. "
        "Correct one of them, or leave one out with skip="
    )


def storage_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that two tensors share exactly if they are the same elements of the same memory."""
    if local_shards_of(tensor) is not None:
        return (id(tensor),)
    local = tensor
    lies: tuple[object, ...] = ()
    if isinstance(tensor, DTensor):
        local, lies = tensor._local_tensor, (tensor.shape, *map(str, tensor.placements))
    return (
        local.untyped_storage()._cdata,
        local.storage_offset(),
        local.dtype,
        local.is_conj(),
        local.is_neg(),
        *local.shape,
        *local.stride(),
        *lies,
    )
