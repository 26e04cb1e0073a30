"""Training states in coded packs that are made chunk by chunk, without the save path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from holdfast._face import wiring
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import chunk_count, chunk_range, pair_range
from holdfast.base.geometry.region import FlatRange, Region
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.packs import Packs, packs_under
from holdfast.base.ports.readable import Readable
from holdfast.base.types.plan import Coding, Piece
from holdfast.core.format.codec_names import needs_pair
from holdfast.core.format.digest import digest_of
from holdfast.settings import PAGE_BYTES
from tests.contract.codec_suite import joined_parts

ATTEMPT = "0123456789abcdef/"
CHUNK = PAGE_BYTES

Bits = NDArray[np.generic]


def training_values(shape: Sequence[int], seed: int) -> tuple[Bits, Bits]:
    """Masters as training leaves them, in fp32, and the bits of the bf16 weights to which they round."""
    masters = (np.random.default_rng(seed).standard_normal(tuple(shape)) * 0.02).astype(np.float32)
    return masters, rounded_to_bfloat16(masters)


def rounded_to_bfloat16(numbers: Bits) -> NDArray[np.uint16]:
    """The bits of float32 numbers rounded to bfloat16, to the nearest, ties to even; NaNs keep their upper bits."""
    bits = numbers.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16).astype(np.uint16), rounded)


def elements_of(region: Region, values: Bits) -> Bits:
    """The elements of a region, in the order in which they are stored."""
    if isinstance(region, FlatRange):
        return values.reshape(-1)[region.start : region.stop]
    return np.ascontiguousarray(values[region.relative_to((0,) * values.ndim)]).reshape(-1)


@dataclass
class CodedPieces:
    """Packs in memory, and their pieces by tensor, as an index would list them."""

    store: MemoryStore = field(default_factory=lambda: MemoryStore("coded-by-hand"))
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    values: dict[str, Bits] = field(default_factory=dict)
    packs: dict[str, bytearray] = field(default_factory=dict)

    def add(
        self,
        spec: TensorSpec,
        region: Region,
        values: Bits,
        pack: str,
        codecs: Sequence[str],
        pair: Piece | None = None,
    ) -> Piece:
        """Append a piece to a pack. Its chunks are coded by the codecs in turn, or raw where one gains nothing."""
        self.values[spec.fqn] = values
        raw = memoryview(elements_of(region, values).tobytes())
        data = self.packs.setdefault(pack, bytearray(bytes(PAGE_BYTES)))
        offset, digests, numbers, stored = len(data), b"", [], []
        for number in range(chunk_count(len(raw), CHUNK)):
            start, stop = chunk_range(len(raw), CHUNK, number)
            chunk = raw[start:stop]
            digests += digest_of(chunk)
            # As a writer does, both chunks of a base are coded against it, or neither.
            coded = self._coded(spec, chunk, codecs[number // 2 % len(codecs)] if codecs else "", number, pair)
            numbers.append(codecs.index(codecs[number // 2 % len(codecs)]) + 1 if coded is not None else 0)
            stored.append(bytes(chunk) if coded is None else coded)
        data += b"".join(stored)
        coding = None
        if codecs:
            is_paired = any(number and needs_pair(codecs[number - 1]) for number in numbers)
            starts = (0, *accumulate(map(len, stored)))
            coding = Coding(
                tuple(codecs),
                bytes(numbers),
                starts,
                pair.tensor.fqn if pair is not None and is_paired else "",
                pair if is_paired else None,
            )
        piece = Piece(spec, region, pack, offset, digests, CHUNK, coding)
        self.pieces.setdefault(spec.fqn, []).append(piece)
        return piece

    def _coded(self, spec: TensorSpec, chunk: memoryview, codec: str, number: int, pair: Piece | None) -> bytes | None:
        if not codec:
            return None
        base, base_dtype = None, ""
        if needs_pair(codec):
            assert pair is not None
            base_dtype = pair.tensor.dtype
            which, start, stop = pair_range(CHUNK, number, len(chunk), 2)
            first, last = chunk_range(pair.bytes, CHUNK, which)
            whole = memoryview(elements_of(pair.region, self.values[pair.tensor.fqn]).tobytes())[first:last]
            base = whole[start:stop]
        parts = wiring.codecs()[codec].coder(spec.dtype, base_dtype).encode(chunk, base)
        return None if parts is None else joined_parts(parts)

    def finish(self) -> Mapping[str, int]:
        """Store the packs; return their sizes by name."""
        for name, data in self.packs.items():
            self.store.put(ATTEMPT + name, bytes(data))
        return {name: len(data) for name, data in self.packs.items()}

    def packs_in(self, files: Readable) -> Packs:
        return packs_under(files, ATTEMPT)

    def near(self, fqn: str, _: Box) -> list[Piece]:
        return self.pieces[fqn]


def stored_training(shape: tuple[int, ...], regions: Sequence[Region], seed: int = 0) -> CodedPieces:
    """A tensor `w` in bf16, its fp32 masters `m` and a moment `v`. Every region is a piece of each, in one pack.

    Weights come before what is coded against them, as the save path stores them.
    """
    made = CodedPieces(MemoryStore(f"coded-by-hand-{seed}-{len(regions)}-{shape}"))
    masters, weights = training_values(shape, seed)
    moments = np.square(masters).astype(np.float32)
    for number, region in enumerate(regions):
        pack = f"coded/r{number:05d}.safetensors"
        pair = made.add(TensorSpec("w", "bfloat16", shape), region, weights, pack, ["planes"])
        made.add(TensorSpec("m", "float32", shape), region, masters, pack, ["residual"], pair)
        made.add(TensorSpec("v", "float32", shape), region, moments, pack, ["planes"])
    made.finish()
    return made
