"""Coded packs for tests: states of many kinds of bits, planned, written from sources and from staged windows."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from holdfast._face.wiring import codecs
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.framework import LocalShard, Selection, Source
from holdfast.base.ports.store import Store
from holdfast.base.types.plan import PackItem, PackPlan, Piece, PlannedPack
from holdfast.core.engine.arena import Arena
from holdfast.core.engine.casting import cast
from holdfast.core.engine.encoding.encode import KnownWeights
from holdfast.core.engine.staging import Staging
from holdfast.core.engine.writing.write import PackWriter, WrittenPack
from holdfast.core.format.digest import digest_of
from holdfast.core.format.pack import coded_header_body, stated_pieces
from holdfast.settings import PAGE_BYTES, Settings
from tests.doubles.framework import GlobalTensor, NumpyFramework
from tests.support.chunk_decoder import raw_chunk
from tests.support.tuning import tuned

KEY = "0123456789abcdef/coded/r00000.safetensors"
NAME = "coded/r00000.safetensors"
SMALL = tuned(Settings(chunk_bytes=PAGE_BYTES, compression="on"), window_bytes=PAGE_BYTES, windows_in_flight=1)
KINDS = ("random", "normal", "zeros", "few", "sparse", "equal")
State = Mapping[str, GlobalTensor]


def memory(**options: int) -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex, **options)


def drawn(dtype: str, count: int, kind: str, seed: int) -> GlobalTensor:
    """A tensor of one kind of bits."""
    chance = np.random.default_rng(seed)
    itemsize = DTYPES[dtype].itemsize
    normal = chance.standard_normal(count * itemsize // 4 + 2).astype(np.float32)
    data = {
        "random": chance.integers(0, 256, count * itemsize, dtype=np.uint8),
        "normal": normal.view(np.uint8),
        "zeros": np.zeros(count * itemsize, np.uint8),
        "few": (normal.view(np.uint32) & 0xFFFF8000).view(np.uint8),
        "sparse": (normal * (chance.random(len(normal)) < 0.05)).astype(np.float32).view(np.uint8),
        "equal": np.full(count * itemsize, 63, np.uint8),
    }[kind][: count * itemsize]
    return GlobalTensor(dtype, np.ascontiguousarray(data).view(DTYPES[dtype].numpy))


def with_pair(state: dict[str, GlobalTensor], fqn: str, master: np.ndarray, weight_dtype: str) -> None:
    rounded = cast(master, "float32", weight_dtype).view(DTYPES[weight_dtype].numpy)
    state[f"model.{fqn}"] = GlobalTensor(weight_dtype, rounded)
    state[f"master.{fqn}"] = GlobalTensor("float32", master)


class Pack:
    """A coded pack of a state, and its sources."""

    def __init__(self, state: State, settings: Settings = SMALL) -> None:
        self.shards: Sequence[LocalShard] = NumpyFramework(0).collect(dict(state), Selection()).shards
        self.sources: list[Source] = [each.source for each in self.shards]
        self.settings = settings
        items, offset = [], 0
        # Weights first.
        numbers = sorted(range(len(self.shards)), key=lambda n: self.shards[n].shard.tensor.itemsize != 2)
        for number in numbers:
            tensor = self.shards[number].shard.tensor
            codec = "planes" if tensor.dtype in ("bfloat16", "float16", "float32", "float64") else "zstd"
            items.append(PackItem(tensor, self.shards[number].shard.pieces[0], offset, number, codec))
            offset += items[-1].bytes
        self.plan = PackPlan(NAME, tuple(items))
        self.pairs = {
            (item.tensor.fqn, item.region): item.tensor.fqn.replace("master", "model")
            for item in items
            if item.tensor.fqn.startswith("master.")
        }
        weights = {fqn: weight for (fqn, _), weight in self.pairs.items()}
        body = coded_header_body(self.plan, settings.chunk_bytes).with_pairs(weights.values())
        self.planned = PlannedPack(
            KEY, b"", self.plan, body.header_bytes({}), lambda codings, _: body.header({}, codings)
        )

    def weights(self) -> KnownWeights:
        """The weights of its pairs, whose digests are known from an earlier pack."""
        weights = KnownWeights(self.pairs)
        for item in self.plan.items:
            if item.tensor.itemsize == 2:
                data = self.data(item)
                chunk = self.settings.chunk_bytes
                digests = b"".join(digest_of(data[at : at + chunk]) for at in range(0, len(data), chunk))
                weights.record(item.tensor, item.region, digests)
        return weights

    def data(self, item: PackItem) -> bytes:
        buffer = memoryview(bytearray(item.bytes))
        self.sources[item.shard_number].copy_into(item.region, 0, item.bytes, buffer).wait()
        return bytes(buffer)

    def write(
        self,
        store: Store,
        chosen_codecs: Codecs | None = None,
        written: Callable[[int], None] | None = None,
    ) -> WrittenPack:
        writer = PackWriter(store, self.settings, chosen_codecs or codecs())
        return writer.write(self.planned, self.sources, written, None, self.weights())

    def write_staged(self, store: Store, buffers: int, chosen_codecs: Codecs | None = None) -> WrittenPack:
        arena = Arena(self.settings._tuning.window_bytes, buffers * self.settings._tuning.window_bytes, SystemClock())
        staging = Staging(arena)
        copying = threading.Thread(target=lambda: staging.copy([self.planned], self.sources))
        copying.start()
        try:
            result = PackWriter(store, self.settings, chosen_codecs or codecs()).write_staged(
                self.planned, staging, None, None, self.weights()
            )
        except BaseException as error:
            staging.give_up(error)
            raise
        finally:
            copying.join(20)
            assert not copying.is_alive()
            assert len(arena._free) == arena._count
        return result

    def require_decoded(self, data: bytes, written: WrittenPack) -> None:
        """Require that what is stored decodes to the state, by the result of the write and by the header alone."""
        pieces: dict[str, Piece] = {}
        stated = {each.tensor.fqn: each for each in stated_pieces(data[: self.planned.header_bytes], NAME, NAME)}
        assert len(data) == written.record.bytes
        results = zip(self.plan.items, written.digests, written.offsets, written.codings, strict=True)
        for item, digests, offset, coding in results:
            fqn = item.tensor.fqn
            pair = pieces.get(coding.pair_fqn)
            coding = replace(coding, pair=pair)
            pieces[fqn] = Piece(item.tensor, item.region, NAME, offset, digests, self.settings.chunk_bytes, coding)
            count = len(digests) // 16
            assert b"".join(raw_chunk(pieces[fqn], n, lambda _: data) for n in range(count)) == self.data(item), fqn
            assert stated[fqn].start == offset and stated[fqn].stop == offset + pieces[fqn].stored_bytes
            assert stated[fqn].coding == replace(coding, pair=None)
