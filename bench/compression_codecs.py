"""How fast the codecs are, beside zipnn and zstd, in processor seconds of the whole state.

Ours is the encoder of a save: it hashes raw bytes, proves pairs by the digest of the cast, codes, and copies what is to
be written. Decoding is what a load does with each chunk: it decodes, and compares the digest. zipnn and zstd code whole
tensors, and hash nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench import compression_rivals as rivals
from bench import conditions
from bench.compression_rivals import raw_bytes
from bench.compression_state import KINDS, State, bytes_of, repeated, snapshots, split
from bench.part import Measured, Params, Part, Round, Spread, in_turn, spreads_of
from bench.settings import settings
from bench.state import MIB
from holdfast._face import wiring
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import DIGEST_BYTES, chunk_range, pair_range
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.codec import Coder, StoredPart
from holdfast.base.types.plan import PackItem, PackPlan
from holdfast.core.engine.buffers import copy_part
from holdfast.core.engine.encoding.encode import EncodedPiece, Encoder, KnownWeights
from holdfast.core.format.digest import digest_of
from holdfast.core.plan.coding.coded_pieces import codec_for

CODED_BYTES_MIN = 64 << 10
"""Smaller pieces are never coded."""

WEIGHTS, OTHERS = 0, 1
"""The packs of a save: weights come first, for their digests prove the pairs."""


class InPlace:
    """The raw chunks of a state, encoded where they are."""

    def __init__(self, state: State) -> None:
        self._raw = {name: raw_bytes(tensor) for name, tensor in state.items()}

    def take(self, item: PackItem, start: int, stop: int) -> Chunk:
        """Return a chunk of a piece."""
        return Chunk(self._raw[item.tensor.fqn][start:stop])

    def close(self) -> None:
        """Do nothing."""


class Chunk:
    """A chunk of a tensor, in the memory of the tensor."""

    def __init__(self, raw: memoryview) -> None:
        self._raw = raw

    def bytes(self) -> memoryview:
        """Return its bytes."""
        return self._raw

    def release(self) -> None:
        """Do nothing: the tensor keeps its memory."""


class Ours:
    """A state, encoded and decoded as a save and a load do it."""

    def __init__(self, state: State) -> None:
        self.codecs, self.chunk_bytes = wiring.codecs(), settings().chunk_bytes
        self._state, self._chunks = state, InPlace(state)
        self._packs = [PackPlan(f"coded/r00000-{number}.safetensors", items) for number, items in _packed(state)]
        # Every page is written here, before a clock starts. A save has windows that it writes.
        self._windows = memoryview(bytearray(b"\1") * bytes_of(state))
        self._end = 0
        self._encoded: list[tuple[PackItem, EncodedPiece, int]] = []
        self._scratch = memoryview(bytearray(self.chunk_bytes))

    def encode(self) -> None:
        """Encode the whole state."""
        encoder = Encoder(self.codecs, settings())
        pairs = {
            (item.tensor.fqn, item.region): KINDS["weight"].format(split(item.tensor.fqn)[1])
            for item in self._packs[OTHERS].items
            if split(item.tensor.fqn)[0] == "master"
        }
        weights, self._end, self._encoded = KnownWeights(pairs), 0, []
        for pack in self._packs:
            start = self._end
            for item, piece in zip(
                pack.items,
                encoder.encode(pack, self._chunks, weights, self._append, lambda raw_bytes: None),
                strict=True,
            ):
                weights.record(item.tensor, item.region, piece.digests)
                self._encoded.append((item, piece, start))
                start += piece.coding.starts[-1]

    def _append(self, parts: Sequence[StoredPart]) -> None:
        for part in parts:
            copy_part(part, 0, self._windows[self._end : self._end + len(part)])
            self._end += len(part)

    def decode(self) -> None:
        """Decode the whole state, and compare all digests."""
        for item, piece, start in self._encoded:
            for number, coder, base in self._chunks_of(item, piece):
                first, last = chunk_range(item.bytes, self.chunk_bytes, number)
                stored = self._windows[start + piece.coding.starts[number] : start + piece.coding.starts[number + 1]]
                raw = self._scratch[: last - first]
                if coder is None:
                    raw[:] = stored
                else:
                    coder.decode(stored, base, raw)
                digest = piece.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
                assert digest_of(raw) == digest, f"{item.tensor.fqn}: decoded other bytes"

    def _chunks_of(self, item: PackItem, piece: EncodedPiece) -> Iterator[tuple[int, Coder | None, memoryview | None]]:
        """Yield each chunk with its coder, and with what it is coded against: a load has decoded that before."""
        coding = piece.coding
        pair = self._state[coding.pair_fqn] if coding.pair_fqn else None
        for number, codec in enumerate(coding.numbers):
            if not codec:
                yield number, None, None
                continue
            known = self.codecs[coding.codecs[codec - 1]]
            if known.base == "none" or pair is None:
                yield number, known.coder(item.tensor.dtype), None
                continue
            first, last = chunk_range(item.bytes, self.chunk_bytes, number)
            of, start, stop = pair_range(self.chunk_bytes, number, last - first, 2)
            base = raw_bytes(pair)[of * self.chunk_bytes :][start:stop]
            yield number, known.coder(item.tensor.dtype, str(pair.dtype).removeprefix("torch.")), base


def _packed(state: State) -> Iterator[tuple[int, tuple[PackItem, ...]]]:
    """Yield the pieces of the two packs. Those that are too small to be coded are left out."""
    for number in (WEIGHTS, OTHERS):
        items: list[PackItem] = []
        for name, tensor in state.items():
            if tensor.nbytes < CODED_BYTES_MIN or (split(name)[0] == "weight") != (number == WEIGHTS):
                continue
            spec = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            items.append(PackItem(spec, Box.whole(spec.global_shape), 0, 0, codec_for(spec.dtype)))
        yield number, tuple(items)


class Codecs:
    """All contenders, with one state."""

    def __init__(self, state: State) -> None:
        self.state, self._ours = state, Ours(state)
        self._zipnn, self._zstd = rivals.ZipNn(), rivals.zstd_encoder()
        self._stored: list[bytes] = []
        self.encoders: list[tuple[str, Callable[[], None]]] = [
            ("encode", self._ours.encode),
            ("zipnn_encode", self._encode_zipnn),
            ("zstd3_encode", self._encode_zstd),
        ]
        self.decoders: list[tuple[str, Callable[[], None]]] = [
            ("decode", self._ours.decode),
            ("zipnn_decode", self._decode_zipnn),
        ]

    def round(self, number: int) -> Round:
        """Return the processor seconds of each contender."""
        each: Round = {}
        for name, work in (*in_turn(self.encoders, number), *in_turn(self.decoders, number)):
            start = time.process_time()
            work()
            each[name] = time.process_time() - start
        self._stored = []
        return each

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
    whole = {name: tensor.clone() for name, tensor in repeated(last, params["mib"] * MIB).items()}
    codecs, rounds = Codecs(whole), []
    for number in range(params["rounds"]):
        each = codecs.round(number)
        rounds.append(each)
        speeds = ", ".join(f"{name} {bytes_of(whole) / seconds / 1e9:.2f}" for name, seconds in each.items())
        conditions.say(f"round {number + 1} of {params['rounds']}, GB/s: {speeds}")
    return Measured(rounds, [])


def values(rounds: Sequence[Round], params: Params) -> dict[str, list[float]]:
    """Return how many times as fast as the rivals ours is."""
    ratios = {
        "encode_vs_zipnn": ("zipnn_encode", "encode"),
        "encode_vs_zstd3": ("zstd3_encode", "encode"),
        "decode_vs_zipnn": ("zipnn_decode", "decode"),
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
