"""Exact packs: every bit of a tensor comes back. A function returns None for content that does not fit its pack."""

from __future__ import annotations

from functools import partial

import torch

from holdfast.activations.runtime.dense import PackedTensor, TensorGeometry, block_elements, elements_of
from holdfast.backends.codecs.planes import PlanesCodec
from holdfast.backends.codecs.sparse import SparseCodec
from holdfast.backends.torch.local_shards import bytes_of
from holdfast.base.ports.codec import GAIN_PARTS, Coder

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by bytes of an element. They compare bits: NaN equals itself, and 0 differs from −0."""

_GATHER = 0x0102040810204080
"""Eight bytes of 0 or 1 times this number: the highest byte has the eight bits, the first byte in the lowest bit."""

_PIECE_BYTES = 1 << 20
"""Raw bytes that a checkpoint codec codes at a time, as in a checkpoint."""

_CODECS = {codec.name: codec for codec in (PlanesCodec(), SparseCodec())}


def pack_bits(tensor: torch.Tensor) -> PackedTensor | None:
    """Return a tensor of at most two values, of any type with elements of up to 8 bytes."""
    elements = elements_of(tensor)
    if elements is None or elements.element_size() not in _INTEGERS:
        return None
    integers = elements.view(_INTEGERS[elements.element_size()])
    bits = torch.empty(-(-len(integers) // 8), dtype=torch.uint8, device=integers.device)
    first = integers[0] if len(integers) else integers.new_zeros(())
    other = None
    size = block_elements(integers.device)
    for start in range(0, len(integers), size):
        block = integers[start : start + size]
        if len(block) % 8:
            block = torch.cat([block, first.expand(-len(block) % 8)])
        is_set = _words_differing(block, first)
        if other is None and is_set.amax():
            other = block[is_set.view(torch.uint8).argmax()]
        if other is not None and (is_set & _words_differing(block, other)).amax():
            return None
        bits[start // 8 : (start + size) // 8].copy_(is_set * _GATHER >> 56)
    other = first if other is None else other
    return PackedTensor(TensorGeometry.of(tensor), (bits, torch.stack([first, other])), _fill_from_bits)


def _fill_from_bits(elements: torch.Tensor, bits: torch.Tensor, values: torch.Tensor) -> None:
    """Write elements from one bit an element, the first one in the lowest bit, and the values of both bits."""
    integers = elements.view(values.dtype)
    byte, bit = torch.arange(256, device=elements.device), torch.arange(8, device=elements.device)
    elements_of_byte = values[byte[:, None] >> bit & 1]
    size = block_elements(elements.device)
    for block, packed in zip(torch.split(integers, size), torch.split(bits, size // 8), strict=True):
        if len(block) == 8 * len(packed):
            torch.index_select(elements_of_byte, 0, packed.int(), out=block.view(-1, 8))
        else:
            block.copy_(elements_of_byte.index_select(0, packed.int()).view(-1)[: len(block)])


def _words_differing(block: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a byte for each element, 1 if the element differs from a value; eight bytes to an int64.

    A comparison takes four times as long: torch has no vector instructions for integers there.
    """
    return (block ^ value).bool().view(torch.int64)


def pack_narrow(tensor: torch.Tensor) -> PackedTensor | None:
    """Return a float32 tensor whose elements all have 16 low bits of zero."""
    elements = elements_of(tensor)
    if elements is None or elements.dtype is not torch.float32:
        return None
    integers = elements.view(torch.int32)
    halves = torch.empty(len(integers), dtype=torch.int16, device=integers.device)
    size = block_elements(integers.device)
    for start in range(0, len(integers), size):
        block = integers[start : start + size]
        if (block & 0xFFFF).amax():
            return None
        # A cast to bfloat16 would change the bits of NaN.
        halves[start : start + size].copy_(block.view(torch.int16)[1::2])
    return PackedTensor(TensorGeometry.of(tensor), (halves.view(torch.bfloat16),), torch.Tensor.copy_)


def pack_pieces(tensor: torch.Tensor, codec: str, *, device_bytes_max: int | None = None) -> PackedTensor | None:
    """Return a tensor in host memory, coded by a codec of the checkpoints.

    Args:
        tensor: Any tensor.
        codec: `planes` or `sparse`.
        device_bytes_max: More bytes than this overflow.
    """
    elements = elements_of(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if elements is None or elements.device.type != "cpu" or not _CODECS[codec].takes(dtype):
        return None
    coder = _CODECS[codec].coder(dtype)
    pieces = []
    for piece in torch.split(elements.view(torch.uint8), _PIECE_BYTES):
        parts = coder.encode(bytes_of(piece)) if len(piece) else None
        if parts is None:
            pieces.append(piece.clone())
        else:
            pieces.append(piece.new_empty(sum(map(len, parts))))
            room = bytes_of(pieces[-1])
            for part in parts:
                if isinstance(part, memoryview):
                    room[: len(part)] = part
                else:
                    part.write(0, room[: len(part)])
                room = room[len(part) :]
        if device_bytes_max is not None and sum(map(len, pieces)) > device_bytes_max:
            return None
    # 1/32 of the raw bytes is the least gain that a codec keeps.
    reserve_bytes = elements.nbytes // GAIN_PARTS
    return PackedTensor(TensorGeometry.of(tensor), tuple(pieces), partial(_fill_from_pieces, coder), reserve_bytes)


def _fill_from_pieces(coder: Coder, elements: torch.Tensor, *pieces: torch.Tensor) -> None:
    """Write elements from stored forms of 1 MiB each; a piece that did not shrink is raw, and has its raw length."""
    for piece, stored in zip(torch.split(elements.view(torch.uint8), _PIECE_BYTES), pieces, strict=True):
        if len(stored) == len(piece):
            piece.copy_(stored)
        else:
            coder.decode(bytes_of(stored), None, bytes_of(piece))
