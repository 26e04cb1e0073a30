"""Coded packs: the same bytes from sources and from windows, in file order, and nothing left where it fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._face.wiring import codecs
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.geometry.box import Box
from holdfast.base.ports.codec import StoredPart
from holdfast.base.ports.framework import Source
from holdfast.base.types.coding import Kind
from holdfast.core.engine.buffers import QUARANTINED
from holdfast.core.engine.encoding.encode import Encoder, KnownWeights
from holdfast.core.engine.encoding.meter import SaveMeter
from holdfast.core.engine.encoding.raw_chunks import ChunkMemory
from holdfast.core.engine.writing.completions import Completions
from holdfast.core.engine.writing.write import PackWriter
from holdfast.errors import UnavailableError
from holdfast.settings import PAGE_BYTES
from tests.doubles.faults import Faults, FaultyStore, raise_error
from tests.doubles.framework import GlobalTensor
from tests.support.coded_packs import KEY, KINDS, SMALL, Pack, drawn, memory, with_pair
from tests.support.cpu_clock import ClockOfLooks
from tests.support.tuning import tuned


class FailingCodec:
    """Takes every type, and codes none."""

    name, base = "planes", "none"

    def takes(self, dtype: str, base_dtype: str = "") -> bool:
        return True

    def coder(self, dtype: str, base_dtype: str = "") -> FailingCodec:
        return self

    def encode(self, raw: memoryview, base: memoryview | None = None) -> Sequence[StoredPart] | None:
        raise MemoryError("no room")


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
    buffers=st.sampled_from((1, 2, 3, 40)),
)
def test_what_is_written_is_the_same_from_sources_and_windows_and_decodes_to_the_state(
    tensors: list[tuple[str, int, str]],
    pair_counts: list[tuple[int, str]],
    chunk_pages: int,
    window_pages: int,
    buffers: int,
) -> None:
    chosen = tuned(
        replace(SMALL, chunk_bytes=chunk_pages * PAGE_BYTES, count_nonfinite=True),
        window_bytes=window_pages * PAGE_BYTES,
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
def test_a_chunk_is_encoded_where_it_is_staged_whatever_windows_it_spans(
    chunk_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tuned(replace(SMALL, chunk_bytes=chunk_pages * PAGE_BYTES), window_bytes=PAGE_BYTES)
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


class Broken:
    """A source that fails after some chunks."""

    def __init__(self, inner: Source, after: int) -> None:
        self._inner, self._left = inner, after

    def copy_into(self, piece: Box, start: int, stop: int, buffer: memoryview) -> object:
        self._left -= 1
        if self._left < 0:
            raise ValueError("lost")
        return self._inner.copy_into(piece, start, stop, buffer)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_source_that_fails_leaves_nothing(after: int, staged: bool) -> None:
    pack = Pack({"t": drawn("float32", 1024 * 20, "normal", 0)})
    pack.sources = [Broken(pack.sources[0], after)]  # type: ignore[list-item]
    pack.pairs.clear()
    store, quarantined = memory(), len(QUARANTINED)
    with pytest.raises(ValueError, match="lost"):
        pack.write_staged(store, 3) if staged else PackWriter(store, SMALL, codecs()).write(pack.planned, pack.sources)
    assert list(store.list()) == []
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
    assert list(store.list()) == []
    pack.write(faulty) if buffers is None else pack.write_staged(faulty, buffers)
    assert [entry.key for entry in store.list()] == [KEY]


@pytest.mark.parametrize("buffers", [None, 1, 3, 50])
def test_a_codec_that_fails_leaves_nothing_and_lends_nothing(buffers: int | None) -> None:
    pack = Pack({"t": drawn("int64", 512 * 20, "equal", 0)})
    store, failing = memory(), {**codecs(), "zstd": FailingCodec()}
    with pytest.raises(MemoryError, match="no room"):
        pack.write(store, failing) if buffers is None else pack.write_staged(store, buffers, failing)  # type: ignore[arg-type]
    assert list(store.list()) == []


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
    assert len(seen) <= 2


def test_nonfinite_elements_are_counted() -> None:
    array = np.zeros(5000, np.float32)
    array[[7, 4999]] = np.nan, np.inf
    pack = Pack({"t": GlobalTensor("float32", array)}, replace(SMALL, count_nonfinite=True))
    assert pack.write(memory()).nonfinite == {"t": 2}


def test_the_copy_to_windows_counts_as_coding_and_a_wait_for_the_store_does_not() -> None:
    """The thread that writes encodes, so whatever else it does makes coding take longer."""
    clock, count, kind = ClockOfLooks(1e-4), 20, Kind("float32", "parameter")
    pack = Pack({"t": drawn("float32", 1024 * count, "normal", 0)})
    meter = SaveMeter(clock, {"t": kind})

    def append(_: Sequence[StoredPart]) -> None:
        clock.thread.worked += 0.25
        clock.seconds += 100.0

    encoder = Encoder(codecs(), SMALL)
    encoder.encode(pack.plan, encoder.from_sources(pack.sources), pack.weights(), append, lambda _: None, meter)
    measured = meter.measured()
    coded = measured.coded[kind]
    assert coded.raw_bytes == 4096 * count
    assert coded.seconds == pytest.approx(0.25 * count, rel=0.05)
    assert measured.processor_seconds == pytest.approx(coded.seconds)
    assert coded.elapsed_seconds < 100.0
