"""How fast the codecs are, beside zipnn and zstd, in processor seconds of the whole state.

Ours does what a save does with each chunk: it hashes the raw bytes, proves pairs by the digest of the cast, and codes;
and what a load does: it decodes, and compares digests. zipnn and zstd code whole tensors, and hash nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bench import compression_rivals as rivals
from bench import conditions
from bench.compression_rivals import raw_bytes
from bench.compression_state import KINDS, State, bytes_of, repeated, snapshots, split
from bench.part import Measured, Params, Part, Round, Spread, in_turn, spreads_of
from bench.state import MIB
from holdfast import wiring
from holdfast.engine.casting import cast
from holdfast.geometry.chunking import chunk_count, chunk_range
from holdfast.ports.codec import Coder

CHUNK_BYTES = MIB
CODED_BYTES_MIN = 64 << 10
"""Smaller pieces are never coded."""


@dataclass(slots=True)
class Unit:
    """What one thread codes at a time: a chunk, or the chunks of a master that one chunk of its weight proves."""

    coder: Coder
    chunks: list[memoryview]
    windows: memoryview
    """Memory for what is stored, as long as the chunks; a save has windows that it writes."""

    pair: memoryview | None = None
    """The chunk of the weight."""

    pair_dtype: str = ""
    digests: list[bytes] | None = None
    pair_digest: bytes = b""
    stored: list[memoryview] | None = None
    """What `encode` made of the chunks."""

    def encode(self) -> None:
        """Hash and code the chunks."""
        self.digests = [xxhash.xxh3_128_digest(chunk) for chunk in self.chunks]
        base: memoryview | None = None
        if self.pair is not None:
            base = memoryview(np.concatenate([_cast(chunk, self.pair_dtype) for chunk in self.chunks])).cast("B")
            # A save has this digest already: the weight was coded before.
            assert xxhash.xxh3_128_digest(base) == self.pair_digest, "the weights are not their masters, rounded"
        self.stored, end = [], 0
        for number, chunk in enumerate(self.chunks):
            start = end
            for part in self.coder.encode(chunk, self._base_of(number, base)) or [chunk]:
                self.windows[end : end + len(part)] = part
                end += len(part)
            self.stored.append(self.windows[start:end])

    def decode(self, scratch: memoryview) -> None:
        """Decode the chunks and compare their digests. The chunk of a weight was decoded for the weight itself."""
        assert self.stored is not None and self.digests is not None
        for number, (stored, chunk, digest) in enumerate(zip(self.stored, self.chunks, self.digests, strict=True)):
            raw: memoryview = scratch[: len(chunk)]
            if len(stored) == len(chunk):
                raw[:] = stored
            else:
                self.coder.decode(stored, self._base_of(number, self.pair), raw)
            assert xxhash.xxh3_128_digest(raw) == digest, "decoded other bytes"

    def _base_of(self, number: int, base: memoryview | None) -> memoryview | None:
        if base is None:
            return None
        start = number * CHUNK_BYTES // 2
        return base[start : start + len(self.chunks[number]) // 2]


def _cast(chunk: memoryview, dtype: str) -> np.ndarray:
    return cast(np.frombuffer(chunk, np.float32), "float32", dtype)


def units_of(state: State) -> list[Unit]:
    """Return the work of coding a state; pieces that are too small to be coded are left out."""
    codecs = wiring.codecs()
    units: list[Unit] = []
    # Every page of it is written here, before any clock starts.
    windows = memoryview(bytearray(b"\1") * bytes_of(state))

    def add(coder: Coder, chunks: list[memoryview], **pair: Any) -> None:
        nonlocal windows
        count = sum(map(len, chunks))
        units.append(Unit(coder, chunks, windows[:count], **pair))
        windows = windows[count:]

    for name, tensor in state.items():
        if tensor.nbytes < CODED_BYTES_MIN:
            continue
        kind, parameter = split(name)
        dtype, raw = str(tensor.dtype).removeprefix("torch."), raw_bytes(tensor)
        chunks = [
            raw[slice(*chunk_range(len(raw), CHUNK_BYTES, n))] for n in range(chunk_count(len(raw), CHUNK_BYTES))
        ]
        weight = state.get(KINDS["weight"].format(parameter)) if kind == "master" else None
        if weight is None or weight.nbytes < CODED_BYTES_MIN:
            for chunk in chunks:
                add(codecs["planes"].coder(dtype), [chunk])
            continue
        pair_dtype, pair = str(weight.dtype).removeprefix("torch."), raw_bytes(weight)
        coder = codecs["residual"].coder(dtype, pair_dtype)
        for n in range(chunk_count(len(pair), CHUNK_BYTES)):
            proof = pair[slice(*chunk_range(len(pair), CHUNK_BYTES, n))]
            digest = xxhash.xxh3_128_digest(proof)
            add(coder, chunks[2 * n : 2 * n + 2], pair=proof, pair_dtype=pair_dtype, pair_digest=digest)
    return units


class Codecs:
    """All contenders, with one state."""

    def __init__(self, state: State) -> None:
        self.state, self.units = state, units_of(state)
        self._zipnn, self._zstd = rivals.ZipNn(), rivals.zstd_encoder()
        self._stored: list[bytes] = []
        self._scratch = memoryview(bytearray(CHUNK_BYTES))
        self.encoders: list[tuple[str, Callable[[], None]]] = [
            ("encode", self._encode),
            ("zipnn_encode", self._encode_zipnn),
            ("zstd3_encode", self._encode_zstd),
        ]
        self.decoders: list[tuple[str, Callable[[], None]]] = [
            ("decode", self._decode),
            ("zipnn_decode", self._decode_zipnn),
        ]

    def round(self, number: int) -> Round:
        """Return the processor seconds of each contender, and the wall seconds of one and two threads."""
        each: Round = {}
        for name, work in (*in_turn(self.encoders, number), *in_turn(self.decoders, number)):
            start = time.process_time()
            work()
            each[name] = time.process_time() - start
        self._stored.clear()
        for threads in in_turn((1, 2), number):
            start = time.perf_counter()
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(Unit.encode, self.units))
            each[f"wall_{threads}"] = time.perf_counter() - start
        return each

    def _encode(self) -> None:
        for unit in self.units:
            unit.encode()

    def _decode(self) -> None:
        for unit in self.units:
            unit.decode(self._scratch)

    def _encode_zipnn(self) -> None:
        self._stored = [self._zipnn.encode(tensor) for tensor in self.state.values()]

    def _decode_zipnn(self) -> None:
        for stored, tensor in zip(self._stored, self.state.values(), strict=True):
            self._zipnn.decode(stored, tensor.dtype)

    def _encode_zstd(self) -> None:
        for tensor in self.state.values():
            self._zstd(raw_bytes(tensor))


def measure(root: Path, params: Params) -> Measured:
    """Warm up with one snapshot, then measure every round."""
    last = snapshots()[-1]
    Codecs(last).round(0)
    codecs = Codecs(repeated(last, params["mib"] * MIB))
    rounds: list[Round] = []
    gb = bytes_of(codecs.state) / 1e9
    for number in range(params["rounds"]):
        each = codecs.round(number)
        rounds.append(each)
        speeds = ", ".join(f"{name} {gb / seconds:.2f}" for name, seconds in each.items())
        conditions.say(f"round {number + 1} of {params['rounds']}, GB/s: {speeds}")
    return Measured(rounds, [])


def values(rounds: Sequence[Round], params: Params) -> dict[str, list[float]]:
    """Return how many times as fast as the rivals ours is, and two threads as one."""
    ratios = {
        "encode_vs_zipnn": ("zipnn_encode", "encode"),
        "encode_vs_zstd3": ("zstd3_encode", "encode"),
        "decode_vs_zipnn": ("zipnn_decode", "decode"),
        "encode_two_threads": ("wall_1", "wall_2"),
    }
    return {key: [each[theirs] / each[ours] for each in rounds] for key, (theirs, ours) in ratios.items()}


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the same over all rounds."""
    return spreads_of(values(rounds, params))


PART = Part(
    name="codecs",
    question="How fast are the codecs, in processor seconds?",
    ranks=1,
    full={"mib": 512, "rounds": 9},
    quick={"mib": 96, "rounds": 3},
    measure=measure,
    keys=keys,
    values=values,
)
