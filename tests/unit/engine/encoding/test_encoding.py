"""Coded packs: the same bytes from sources and from windows, in file order, and nothing left where it fails."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.clock import SystemClock
from holdfast.engine.arena import Arena
from holdfast.engine.buffers import QUARANTINED
from holdfast.engine.casting import cast
from holdfast.engine.encoding.encode import Encoder, KnownWeights
from holdfast.engine.encoding.meter import SaveMeter
from holdfast.engine.encoding.raw_chunks import ChunkMemory
from holdfast.engine.staging import Staging
from holdfast.engine.writing.completions import Completions
from holdfast.engine.writing.write import PackWriter, WrittenPack
from holdfast.errors import UnavailableError
from holdfast.format.digest import digest_of
from holdfast.format.pack import coded_header_body, stated_pieces
from holdfast.geometry.box import Box
from holdfast.geometry.dtype import DTYPES
from holdfast.ports.codec import Codec, Codecs, StoredPart
from holdfast.ports.framework import LocalShard, Selection, Source
from holdfast.ports.store import Store
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.stores.memory import MemoryStore
from holdfast.testing.faults import Faults, FaultyStore, raise_error
from holdfast.testing.framework import GlobalTensor, NumpyFramework
from holdfast.types.coding import Kind
from holdfast.types.plan import PackItem, PackPlan, Piece, PlannedPack
from holdfast.wiring import codecs
from tests.decoded import raw_chunk
from tests.looked_at import ClockOfLooks

KEY = "0123456789abcdef/coded/r00000.safetensors"
NAME = "coded/r00000.safetensors"
SMALL = Settings(
    chunk_bytes=PAGE_BYTES, window_bytes=PAGE_BYTES, windows_in_flight=1, compression="on", compression_threads=2
)
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
        self.planned = PlannedPack(KEY, b"", self.plan, body.header_bytes({}), lambda codings: body.header({}, codings))

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
        self, store: Store, chosen_codecs: Codecs | None = None, written: Callable[[int], None] | None = None
    ) -> WrittenPack:
        writer = PackWriter(store, self.settings, codecs() if chosen_codecs is None else chosen_codecs)
        return writer.write(self.planned, self.sources, written, None, self.weights())

    def write_staged(self, store: Store, buffers: int) -> WrittenPack:
        arena = Arena(self.settings.window_bytes, buffers * self.settings.window_bytes, SystemClock())
        staging = Staging(arena)
        copying = threading.Thread(target=lambda: staging.copy([self.planned], self.sources))
        copying.start()
        try:
            result = PackWriter(store, self.settings, codecs()).write_staged(
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


@settings(max_examples=40, deadline=None)
@given(
    tensors=st.lists(
        st.tuples(
            st.sampled_from(("float32", "bfloat16", "float16", "float64", "int64", "uint8", "float8_e4m3fn")),
            st.sampled_from((1, 3, 1000, 1024, 4097, 9000)),
            st.sampled_from(KINDS),
        ),
        max_size=5,
    ),
    pair_counts=st.lists(st.tuples(st.sampled_from((1, 1024, 3000, 7001)), st.sampled_from(("bfloat16", "float16")))),
    chunk_pages=st.sampled_from((1, 2, 3)),
    window_pages=st.sampled_from((1, 2, 5)),
    threads=st.integers(1, 3),
    buffers=st.sampled_from((1, 2, 3, 40)),
)
def test_what_is_written_is_the_same_from_sources_and_windows_and_decodes_to_the_state(
    tensors: list[tuple[str, int, str]],
    pair_counts: list[tuple[int, str]],
    chunk_pages: int,
    window_pages: int,
    threads: int,
    buffers: int,
) -> None:
    chosen = replace(
        SMALL,
        chunk_bytes=chunk_pages * PAGE_BYTES,
        window_bytes=window_pages * PAGE_BYTES,
        compression_threads=threads,
        count_nonfinite=True,
    )
    state = {f"t{n}": drawn(dtype, count, kind, n) for n, (dtype, count, kind) in enumerate(tensors)}
    for number, (count, dtype) in enumerate(pair_counts[:2]):
        master = np.random.default_rng(number).standard_normal(count).astype(np.float32)
        with_pair(state, f"p{number}", master, dtype)
    pack = Pack(state, chosen)
    store, staged = memory(), memory(object_bytes_max=1 << 30)
    written = pack.write(store)
    data = store.get(KEY, 1 << 30)
    pack.require_decoded(data, written)
    assert pack.write_staged(staged, buffers) == written
    assert staged.get(KEY, 1 << 30) == data


@pytest.mark.parametrize("chunk_pages", [1, 2, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_chunk_is_encoded_where_it_is_staged_whatever_windows_it_spans(
    threads: int, chunk_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = replace(SMALL, chunk_bytes=chunk_pages * PAGE_BYTES, window_bytes=PAGE_BYTES, compression_threads=threads)
    state = {f"t{n}": drawn("float32", 1500 * (n + 1), "normal", n) for n in range(4)}
    with_pair(state, "w", np.random.default_rng(1).standard_normal(5000).astype(np.float32), "bfloat16")
    pack = Pack(state, chosen)
    written = pack.write(store := memory())
    monkeypatch.setattr(ChunkMemory, "take", lambda self: pytest.fail("a chunk was copied"))
    assert pack.write_staged(staged := memory(), 60) == written
    assert staged.get(KEY, 1 << 30) == store.get(KEY, 1 << 30)


@pytest.mark.parametrize("period", [64, 100, 128, 200, 255, 256])
def test_few_mantissas_are_found_where_rows_repeat(period: int) -> None:
    row = np.random.default_rng(period).standard_normal(period).astype(np.float32)
    state = {"t": GlobalTensor("float32", np.resize(row, 1 << 16))}
    written = Pack(state, replace(SMALL, chunk_bytes=1 << 18)).write(memory())
    assert written.codings[0].codecs == ("dictionary",)


def test_one_wrong_element_of_a_pair_falls_back_with_its_two_chunks_alone() -> None:
    master = np.random.default_rng(1).standard_normal(5 * 1024).astype(np.float32)
    state: dict[str, GlobalTensor] = {}
    with_pair(state, "w", master, "bfloat16")
    state["model.w"].array[2500] ^= 1  # The weight of the third chunk of the master.
    pack = Pack(state)
    written = pack.write(store := memory())
    pack.require_decoded(store.get(KEY, 1 << 30), written)
    by_fqn = dict(zip([item.tensor.fqn for item in pack.plan.items], written.codings, strict=True))
    coding = by_fqn["master.w"]
    names = [coding.codecs[number - 1] if number else "" for number in coding.numbers]
    assert names == ["residual", "residual", "planes", "planes", "residual"]


def test_a_master_without_digests_of_its_weight_is_coded_alone() -> None:
    state: dict[str, GlobalTensor] = {}
    with_pair(state, "w", np.random.default_rng(1).standard_normal(3000).astype(np.float32), "bfloat16")
    pack = Pack(state)
    writer = PackWriter(memory(), SMALL, codecs())
    written = writer.write(pack.planned, pack.sources, None, None, KnownWeights(pack.pairs))
    assert all(coding.codecs == ("planes",) and not coding.pair_fqn for coding in written.codings)


def test_a_header_of_many_windows_and_data_of_one(store: MemoryStore | None = None) -> None:
    state = {f"{'long' * 40}{n}": drawn("float32", 2, "normal", n) for n in range(60)}
    pack = Pack(state)
    assert pack.planned.header_bytes > 5 * PAGE_BYTES
    written = pack.write(store := memory())
    pack.require_decoded(store.get(KEY, 1 << 30), written)


def test_progress_counts_raw_bytes_up_to_the_whole() -> None:
    pack = Pack({"zeros": drawn("float32", 50000, "zeros", 0), "noise": drawn("uint8", 50000, "random", 0)})
    counts: list[int] = []
    written = pack.write(memory(), written=counts.append)
    assert sum(counts) == pack.planned.bytes > written.record.bytes


class SlowFirst:
    """A codec whose first chunk is encoded last."""

    name, base = "zstd", "none"

    def __init__(self, inner: Codec, others: int) -> None:
        self._inner, self._others = inner, threading.Semaphore(0)
        self._count, self._lock = others, threading.Lock()
        self._is_first = True

    def takes(self, dtype: str, base_dtype: str = "") -> bool:
        return True

    def coder(self, dtype: str, base_dtype: str = "") -> SlowFirst:
        return self

    def encode(self, raw: memoryview, base: memoryview | None = None) -> Sequence[StoredPart] | None:
        with self._lock:
            is_first, self._is_first = self._is_first, False
        if is_first:
            for _ in range(self._count):
                assert self._others.acquire(timeout=60)
        else:
            self._others.release()
        return self._inner.coder("int64").encode(raw)


def test_chunks_that_are_encoded_out_of_order_are_written_in_order() -> None:
    pack = Pack({"t": drawn("int64", 512 * 30, "equal", 0)}, replace(SMALL, compression_threads=3))
    expected = pack.write(reference := memory())
    slow = SlowFirst(codecs()["zstd"], others=3)
    assert pack.write(store := memory(), {**codecs(), "zstd": slow}) == expected  # type: ignore[dict-item]
    assert store.get(KEY, 1 << 30) == reference.get(KEY, 1 << 30)


class Broken:
    """A source that fails after some chunks."""

    def __init__(self, inner: Source, after: int) -> None:
        self._inner, self._left = inner, after

    def copy_into(self, piece: Box, start: int, stop: int, buffer: memoryview) -> object:
        self._left -= 1
        if self._left < 0:
            raise ValueError("lost")
        return self._inner.copy_into(piece, start, stop, buffer)


def encoding_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "holdfast-encode"]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_source_that_fails_leaves_nothing(after: int, staged: bool) -> None:
    pack = Pack({"t": drawn("float32", 1024 * 20, "normal", 0)})
    pack.sources = [Broken(pack.sources[0], after)]  # type: ignore[list-item]
    pack.pairs.clear()
    store, quarantined = memory(), len(QUARANTINED)
    with pytest.raises(ValueError, match="lost"):
        pack.write_staged(store, 3) if staged else PackWriter(store, SMALL, codecs()).write(pack.planned, pack.sources)
    assert list(store.list()) == [] and encoding_threads() == []
    # A device may still copy into the buffer of the copy that failed.
    assert staged or len(QUARANTINED) > quarantined


@pytest.mark.parametrize("buffers", [None, 1, 3, 50])
@pytest.mark.parametrize("operation", ["upload", "upload.write", "upload.complete"])
def test_a_store_that_fails_leaves_nothing_and_lends_nothing(operation: str, buffers: int | None) -> None:
    pack = Pack({"t": drawn("float32", 1024 * 20, "random", 0)})
    store = memory()
    faulty = FaultyStore(store, Faults(raise_error(UnavailableError), names={operation}))
    with pytest.raises(UnavailableError, match=operation):
        pack.write(faulty) if buffers is None else pack.write_staged(faulty, buffers)
    assert list(store.list()) == [] and encoding_threads() == []
    pack.write(faulty) if buffers is None else pack.write_staged(faulty, buffers)
    assert [entry.key for entry in store.list()] == [KEY]


def test_a_codec_that_fails_leaves_nothing() -> None:
    class Failing(SlowFirst):
        def encode(self, raw: memoryview, base: memoryview | None = None) -> Sequence[StoredPart] | None:
            raise MemoryError("no room")

    pack = Pack({"t": drawn("int64", 512 * 20, "equal", 0)})
    store = memory()
    with pytest.raises(MemoryError, match="no room"):
        pack.write(store, {**codecs(), "zstd": Failing(codecs()["zstd"], 0)})  # type: ignore[dict-item]
    assert list(store.list()) == [] and encoding_threads() == []


def test_packs_are_completed_later_in_a_store_of_objects() -> None:
    pack = Pack({"t": drawn("float32", 1024 * 20, "normal", 0)})
    store = memory(object_bytes_max=1 << 30)
    writer = PackWriter(store, SMALL, codecs())
    with Completions() as completions:
        written = writer.write(pack.planned, pack.sources, None, completions)
    pack.require_decoded(store.get(KEY, 1 << 30), written)


def test_a_call_that_gives_up_ends_the_write_with_its_next_chunk() -> None:
    pack = Pack({"t": drawn("float32", 1024 * 200, "normal", 0)})
    seen: list[int] = []

    def written(count: int) -> None:
        seen.append(count)
        raise UnavailableError("its call has ended")

    with pytest.raises(UnavailableError, match="its call has ended"):
        pack.write(memory(), written=written)
    assert len(seen) <= 2 and encoding_threads() == []


def test_nonfinite_elements_are_counted() -> None:
    array = np.zeros(5000, np.float32)
    array[[7, 4999]] = np.nan, np.inf
    pack = Pack({"t": GlobalTensor("float32", array)}, replace(SMALL, count_nonfinite=True))
    assert pack.write(memory()).nonfinite == {"t": 2}


@pytest.mark.parametrize("threads", [1, 2])
def test_the_copy_to_windows_counts_as_coding_and_a_wait_for_the_store_does_not(threads: int) -> None:
    """The thread that writes encodes, so whatever else it does makes coding take longer."""
    clock, count, kind = ClockOfLooks(1e-4), 20, Kind("float32", "parameter")
    chosen = replace(SMALL, compression_threads=threads)
    pack = Pack({"t": drawn("float32", 1024 * count, "normal", 0)}, chosen)
    meter = SaveMeter(clock, {"t": kind})

    def append(_: Sequence[StoredPart]) -> None:
        clock.thread.worked += 0.25
        clock.seconds += 100.0

    encoder = Encoder(codecs(), chosen)
    encoder.encode(pack.plan, encoder.from_sources(pack.sources), pack.weights(), append, lambda _: None, meter)
    measured = meter.measured()
    coded = measured.coded[kind]
    assert coded.raw_bytes == 4096 * count
    assert coded.seconds == pytest.approx(0.25 * count, rel=0.05)
    assert measured.processor_seconds == pytest.approx(coded.seconds)
    if threads == 1:
        assert coded.elapsed_seconds < 100.0
