"""One torch tensor: the bytes that this rank holds, as a source to read and a target to fill."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from copy import copy
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from holdfast.backends.torch.local_shards import (
    LocalPart,
    LocalShards,
    Ranks,
    bits_of,
    bytes_of,
    coordinates_of,
    extent_bytes,
    is_meta,
    is_ordinary,
    locals_of,
    memory_of,
    shards_of,
    storage_of,
    whole_shard,
)
from holdfast.backends.torch.private_layout import (
    is_flat_parameter,
    local_shards_of,
    local_tensor,
    version_counter,
)
from holdfast.backends.torch.side_stream import SideStream, on_stream, side_stream
from holdfast.backends.torch.tickets import Tickets
from holdfast.base.geometry.box import Box, flat_range_boxes, grid_within
from holdfast.base.geometry.coordinates import Located
from holdfast.base.geometry.dtype import DTYPES, PAIRS, dtype_named
from holdfast.base.geometry.region import Region, contains, first_element, region_boxes
from holdfast.base.geometry.sharded import Sharded
from holdfast.base.ports.framework import DONE, Target, Ticket
from holdfast.errors import InvalidError


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype, without `torch.`."""
    return _DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


_TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_DTYPE_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}

_SLICED_BYTES_MAX = 32 << 10
"""Up to here an assignment to a slice is faster than numpy. It holds Python's lock, and numpy does not."""


def storable_dtype(tensor: torch.Tensor, fqn: str) -> str:
    """Return the stored element type of a tensor.

    Raises:
        InvalidError: Holdfast does not store its dtype.
    """
    return _DTYPE_NAMES.get(tensor.dtype) or dtype_named(dtype_name(tensor.dtype), fqn).name


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a stored element type."""
    return _TORCH_DTYPES[name]


def zeros(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Return zeros of a stored element type. torch cannot set a single element of pairs, so those are set as bytes."""
    return (
        torch.zeros(shape, dtype=torch.uint8).view(torch_dtype(dtype))
        if dtype == PAIRS
        else torch.zeros(shape, dtype=torch_dtype(dtype))
    )


def require_storable(tensor: torch.Tensor, fqn: str) -> None:
    """Refuse tensors whose bytes are not those of a dense array.

    Raises:
        InvalidError: The tensor is of another kind; the message names it.
    """
    if not is_ordinary(tensor):
        _require_dense(tensor, fqn)
    storable_dtype(tensor, fqn)


def require_not_expanded(local: torch.Tensor, fqn: str, subject: str) -> None:
    """Refuse a tensor with several elements at one address, which cannot be filled.

    Raises:
        InvalidError: It is expanded; after `fqn` the message begins with `subject`.
    """
    if any(length > 1 and not step for length, step in zip(local.shape, local.stride(), strict=True)):
        raise InvalidError(
            f"{fqn}: {subject} expanded, so several of its elements share memory; expected memory for each. "
            "Pass tensor.contiguous() or the tensor that was expanded"
        )


def _require_dense(tensor: torch.Tensor, fqn: str) -> None:
    kind = type(tensor).__name__
    shards = local_shards_of(tensor)
    if shards is not None:
        for local, _ in shards:
            require_storable(local, fqn)
        return
    if isinstance(tensor, DTensor) and type(local_tensor(tensor)) is not torch.Tensor:
        require_storable(local_tensor(tensor), fqn)  # Its class says more than the memory that a wrapper has not.
        return
    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidError(f"{fqn}: {kind} has no shape yet; run the model once, or leave it out with skip=")
    if type(tensor) is not torch.Tensor and not isinstance(tensor, DTensor):
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise InvalidError(f"{fqn}: tensor subclass {kind} cannot be saved; convert it or leave it out with skip=")
        if is_flat_parameter(tensor):
            raise InvalidError(
                f"{fqn}: a FlatParameter of FSDP1 holds many parameters without their names; pass the "
                "FullyShardedDataParallel module itself, wrapped with use_orig_params=True"
            )
    if tensor.is_nested:
        what, instead = f"nested {kind}", "value.unbind()"
    elif tensor.is_quantized:
        what, instead = f"quantised {kind} ({tensor.dtype})", "value.int_repr() beside its scale and zero point"
    elif tensor.layout is not torch.strided:
        what, instead = f"{tensor.layout} {kind}", "value.to_dense()"
    else:
        return
    raise InvalidError(
        f"{fqn}: {what} cannot be saved; expected a dense tensor. Pass {instead}, or leave it out with skip=[{fqn!r}]"
    )


def global_shape_of(tensor: torch.Tensor, fqn: str) -> tuple[int, ...]:
    """Return the shape of a whole tensor, of which this rank may hold a part."""
    located = coordinates_of(tensor, fqn)
    return tuple(tensor.shape if located is None else located.global_shape)


def held_storable(
    fqn: str, tensor: torch.Tensor, declared: Sharded | None, ranks: Ranks, advice: str
) -> tuple[LocalShards, Sequence[torch.Tensor]]:
    """Return what this rank holds of a tensor, and the tensors of the state with that memory.

    Raises:
        InvalidError: The tensor cannot be stored, or it is a meta tensor; then the message ends with `advice`.
    """
    if declared is None or isinstance(declared, Located):
        # Those of the tensor itself come before those of the parameter whose state or gradient it is.
        declared = coordinates_of(tensor, fqn) or declared
    if declared is None and type(tensor) is not DTensor and is_ordinary(tensor):
        # The fast path: a state may have 100,000 tensors, nearly all of them ordinary.
        return whole_shard(tensor), (tensor,)
    memory = memory_of(tensor, declared, fqn)
    for local in memory:
        if not is_ordinary(local):
            require_storable(local, fqn)
            if is_meta(local):
                raise InvalidError(f"{fqn}: is a meta tensor, which has no bytes; {advice}")
    return shards_of(tensor, declared, fqn, ranks), memory


class TorchSource:
    """The bytes of one tensor that a rank holds."""

    def __init__(self, parts: Sequence[LocalPart], memory: Sequence[torch.Tensor]) -> None:
        """Make a source.

        Args:
            parts: Held regions and their memory.
            memory: The tensors of the state with that memory; `stamp` watches them for changes.
        """
        self.parts, self._memory = parts, memory
        self._is_stamped = False
        """Whether training may go on while the bytes are copied, and may free them."""
        on_gpu = bool(parts) and parts[0].local.is_cuda
        self.side: SideStream | None = side_stream(parts[0].local.device) if on_gpu else None
        """Stream of copies off a GPU, used by any thread; None for host memory."""
        # The agreement samples on another thread. It must see what the caller's stream holds at the call.
        self._stream = torch.cuda.current_stream(parts[0].local.device) if on_gpu else None

    def copy_into(self, piece: Region, start: int, stop: int, buffer: memoryview) -> Ticket:
        """Copy bytes `[start, stop)` of a piece, in row-major order, to the front of `buffer`.

        The piece is one run of a held region.
        """
        local, offset = self._place_of(piece)
        if self.side is None:
            _copy_run(local, offset + start, offset + stop, buffer)
            return DONE
        return self.side.queued(lambda: _queue_run(local, offset + start, offset + stop, buffer))

    def _place_of(self, piece: Region) -> tuple[torch.Tensor, int]:
        """Return the tensor that holds a piece, and how many of its row-major bytes are before the piece."""
        part = self.parts[0]
        if len(self.parts) > 1:
            part = next(held for held in self.parts if contains(held.region, piece))
        offset = 0 if piece is part.region else first_element(part.region, piece) * part.local.element_size()
        return part.local, offset

    @classmethod
    def copy_together(cls, sources: Sequence[Self], pieces: Sequence[Region], buffer: memoryview) -> Ticket:
        """Copy whole pieces of several sources, one after the other, to the front of `buffer`.

        Neighbours of one dtype and device are copied by one call: 100,000 tiny tensors would take as many.
        """
        runs: list[torch.Tensor] = []
        side: SideStream | None = None
        tickets = Tickets()
        at = 0
        try:
            for source, piece in zip(sources, pieces, strict=True):
                part = source.parts[0]
                local = part.local
                if source._is_stamped:
                    storage_of(local, extent_bytes(local))  # The other ways to copy check it anyway.
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
        except BaseException as error:  # noqa: BLE001 - `ended_by` raises it
            return tickets.ended_by(error)
        return tickets

    def sample(self, blocks: int, block_bytes: int, *, whole_bytes: int, shift: float) -> bytes | memoryview:
        """Return at most `blocks` blocks of `block_bytes` each, spread evenly over the bytes of each part."""
        with on_stream(self._stream):
            samples = [
                _sampled(part.local, _sampled_runs(part.local, blocks, block_bytes, whole_bytes, shift))
                for part in self.parts
            ]
        return samples[0] if len(samples) == 1 else b"".join(samples)

    def stamp(self) -> object:
        """Return address and version counter of each tensor; of a DTensor its own counter and its local tensor's."""
        self._is_stamped = True
        return [
            (local.data_ptr(), version_counter(tensor), version_counter(local))
            for tensor in self._memory
            for local in locals_of(tensor)
        ]

    def moved_parameter(self) -> torch.Tensor | None:
        """Return the parameter of this source if it has other memory now (`parameter.data = …`), which this lacks."""
        held = self._memory[0] if self.parts else None
        if held is None or not held.requires_grad or locals_of(held)[0].data_ptr() == self.parts[0].local.data_ptr():
            return None
        return held

    def copied(self) -> TorchSource:
        """Return a source of clones, which training does not change."""
        parts = [LocalPart(part.region, part.local.clone()) for part in self.parts]
        if self.side is not None:
            self.side.follow()
        return TorchSource(parts, [part.local for part in parts])


def _copy_run(local: torch.Tensor, start: int, stop: int, buffer: memoryview) -> None:
    """Copy bytes `[start, stop)` of a tensor, whole elements in row-major order, to the front of `buffer`.

    A tensor that is not contiguous, or is a conjugated or negated view, is copied box by box: a contiguous copy of all
    of it could be as large as the state.
    """
    if not _is_one_run(local):
        offset = 0
        for box in flat_range_boxes(tuple(local.shape), start // local.itemsize, stop // local.itemsize):
            into = torch.frombuffer(buffer, dtype=local.dtype, count=box.numel, offset=offset).view(box.shape)
            into.copy_(local[box.relative_to((0,) * local.ndim)])
            offset += box.numel * local.itemsize
        return
    if local.is_cpu:
        buffer[: stop - start] = bytes_of(local)[start:stop]
    else:
        run = _bytes(local)[start:stop]
        torch.frombuffer(buffer, dtype=torch.uint8, count=stop - start).copy_(run)


def _queue_run(local: torch.Tensor, start: int, stop: int, buffer: memoryview) -> None:
    """Queue a copy of bytes of a device's tensor on the current stream; arguments and result as `_copy_run`.

    A tensor that is not contiguous is ordered on the device before the copy, since host memory must not be touched
    until the copy is complete.
    """
    if _is_one_run(local):
        _queue(_bytes(local)[start:stop], buffer)
        return
    offset = 0
    for box in flat_range_boxes(tuple(local.shape), start // local.itemsize, stop // local.itemsize):
        ordered = local[box.relative_to((0,) * local.ndim)].resolve_conj().resolve_neg().contiguous()
        _queue(_bytes(ordered), buffer[offset:])
        offset += ordered.nbytes


def _queue(run: torch.Tensor, buffer: memoryview) -> None:
    """Queue a copy of contiguous device memory to the front of `buffer`."""
    if run.numel():
        torch.frombuffer(buffer, dtype=torch.uint8, count=run.numel()).copy_(run, non_blocking=True)


def _bytes(run: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as bytes. Not by `view`: a tensor of one element may state any stride."""
    return run.as_strided((run.numel(),), (1,)).view(torch.uint8)


def _is_one_run(local: torch.Tensor) -> bool:
    """Return whether a tensor's memory is its row-major bytes."""
    return local.is_contiguous() and not (local.is_conj() or local.is_neg())


def _joined(runs: list[torch.Tensor], side: SideStream | None, buffer: memoryview, tickets: Tickets) -> int:
    """Copy 1-d tensors of one dtype and device, one after the other, to the front of `buffer`; return the bytes."""
    if side is not None:
        tickets.add(side.queued(lambda: _queue(torch.cat([_bytes(run) for run in runs]), buffer)))
        return sum([run.nbytes for run in runs])
    joined = torch.frombuffer(buffer, dtype=runs[0].dtype, count=sum([run.numel() for run in runs]))
    with torch.no_grad():
        torch.cat(runs, out=joined)
    return joined.nbytes


def _sampled_runs(
    local: torch.Tensor, blocks: int, block_bytes: int, whole_bytes: int, shift: float
) -> list[tuple[int, int]]:
    """Return the byte ranges of a tensor that are sampled, whole elements each; arguments as `TorchSource.sample`."""
    total, itemsize = local.numel() * local.itemsize, local.itemsize
    if total <= max(whole_bytes, blocks * block_bytes):
        return [(0, total)]
    run_bytes = -(-block_bytes // itemsize) * itemsize
    # From one run before the first byte, and to the last byte: elements at the ends are sampled as often as others.
    places = (int((number + shift) * (total + run_bytes) / blocks) - run_bytes for number in range(blocks))
    starts = [max(min(place, total - run_bytes), 0) // itemsize * itemsize for place in places]
    return [(start, start + run_bytes) for start in starts]


def _sampled(local: torch.Tensor, runs: Sequence[tuple[int, int]]) -> bytes | memoryview:
    """Return byte ranges of a tensor, joined."""
    if not local.numel():
        return b""
    if _is_one_run(local):
        if not local.is_cpu:
            return _gathered(local, runs)
        # One view for all blocks: replicas are sampled in every save, and a view for each takes five times as long.
        held = bytes_of(local)
        return held if len(runs) == 1 else b"".join([held[start:stop] for start, stop in runs])
    data = memoryview(bytearray(sum(stop - start for start, stop in runs)))
    offset = 0
    for start, stop in runs:
        _copy_run(local, start, stop, data[offset : offset + stop - start])
        offset += stop - start
    return data.tobytes()


def _gathered(local: torch.Tensor, runs: Sequence[tuple[int, int]]) -> bytes:
    """Return byte ranges of a tensor, joined on its device, so that the host waits once and not for each range."""
    whole = _bytes(local)
    return torch.cat([whole[start:stop] for start, stop in runs]).cpu().numpy().tobytes()


class TorchTarget(Target):
    """The part of a tensor that a rank holds, to be filled in place."""

    def __init__(self, held: LocalShards, stored_dtype: str) -> None:
        self._stored = torch_dtype(stored_dtype)
        parts = held.parts
        self.boxes: tuple[Box, ...]
        """The wanted boxes, global coordinates."""
        self.memories: Sequence[tuple[Box, torch.Tensor]]
        """The held boxes, each with the memory to fill."""
        self.local_bytes: int
        """Bytes of the memory to fill."""
        if len(parts) == 1 and isinstance(parts[0].region, Box):
            # The fast path: a state may have 100,000 tensors, nearly all of one box.
            region, local = parts[0].region, parts[0].local
            self.memories, self.boxes, self.local_bytes = [(region, local)], (region,), local.nbytes
        else:
            self.memories = _boxes(held)
            self.boxes = tuple([box for box, _ in self.memories])
            self.local_bytes = sum([part.local.nbytes for part in parts])
        on_gpu = bool(parts) and parts[0].local.is_cuda
        # Other threads fill it. Their copies must run after the work on the caller's stream.
        self._stream = torch.cuda.current_stream(parts[0].local.device) if on_gpu else None

    def over(self, memories: Sequence[tuple[Box, torch.Tensor]]) -> TorchTarget:
        """Return a target of the same boxes with other memory, on the host."""
        other = copy(self)
        other.memories, other._stream = memories, None
        return other

    def place(self, part: Box, source: memoryview, source_box: Box) -> None:
        """Copy `part` from the row-major bytes of `source_box`; convert if the dtypes differ."""
        for box, local in self.memories:
            # Declared targets may overlap (a halo); then each of them is filled.
            if len(self.memories) == 1 or box.contains(part):
                self._place(box, local, part, source, source_box)

    def put(self, at: Sequence[slice], elements: NDArray[np.generic]) -> None:
        """Copy elements of a grid; convert if the dtypes differ."""
        around = Box(tuple([each.start for each in at]), tuple([each.stop for each in at]))
        for box, local in self.memories:
            if box.contains(around):
                if (bits := self._bits(local)) is not None:
                    bits[grid_within(at, box)] = elements.view(bits.dtype)
                    continue
                with torch.no_grad(), on_stream(self._stream):
                    local[grid_within(at, box)].copy_(torch.from_numpy(elements.copy()).view(self._stored))

    @classmethod
    def place_together(
        cls, targets: Sequence[Self], boxes: Sequence[Box], source: memoryview, ranges: Sequence[tuple[int, int]]
    ) -> None:
        """Copy one box to each of several targets."""
        address = np.frombuffer(source, dtype=np.uint8).ctypes.data
        for target, box, (start, stop) in zip(targets, boxes, ranges, strict=True):
            held, local = target.memories[0]
            # memmove: an array over the memory, built for one write, takes three times as long.
            if (
                box is held
                and len(target.memories) == 1
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
        """Return the host memory that takes the stored bytes of `part` as they are, if it is one contiguous run."""
        boxes = self.memories
        if len(boxes) > 1:
            boxes = [(box, local) for box, local in boxes if box.contains(part)]
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
            # torch takes no read-only memory, which stores may hand out.
            writable = bytearray(source) if source.readonly else source
            stored = torch.frombuffer(writable, dtype=self._stored).view(source_box.shape)
            with torch.no_grad(), on_stream(self._stream):
                local[part.relative_to(box.start)].copy_(stored[part.relative_to(source_box.start)])
        elif len(source) <= _SLICED_BYTES_MAX and part is source_box and part is box and bits.flags.c_contiguous:
            bits.data.cast("B")[:] = source
        else:
            given = np.frombuffer(source, dtype=bits.dtype).reshape(source_box.shape)
            bits[part.relative_to(box.start)] = given[part.relative_to(source_box.start)]

    def _bits(self, local: torch.Tensor) -> NDArray[np.generic] | None:
        """Return memory that takes stored bytes as they are; None if they must be converted or copied to a device.

        Without a conversion, numpy copies in host memory: one thread, no grad mode, no dispatcher. torch would use its
        own threads for each copy, which compete with the reading threads for cores. Conjugated and negated views are
        left to torch.
        """
        if local.dtype is not self._stored or not local.is_cpu or local.is_conj() or local.is_neg():
            return None
        return bits_of(local) if local.itemsize <= 8 else None


def _boxes(held: LocalShards) -> list[tuple[Box, torch.Tensor]]:
    """Return every held box with its memory. A flat range consists of a few boxes, each contiguous in it."""
    boxes = []
    for part in held.parts:
        if isinstance(part.region, Box):
            boxes.append((part.region, part.local))
            continue
        start = 0
        for box in region_boxes(part.region, held.global_shape):
            boxes.append((box, part.local[start : start + box.numel].view(box.shape)))
            start += box.numel
    return boxes
