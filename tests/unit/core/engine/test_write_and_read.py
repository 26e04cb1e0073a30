"""Packs written through windows and read back in runs, whatever the sizes; what happens when a store fails."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load as load_safetensors

from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.base.geometry.box import Box
from holdfast.base.ports.codec import NO_CODECS
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.framework import LocalShard, Selection
from holdfast.base.ports.packs import Packs, packs_under
from holdfast.base.ports.ranges import hand_out
from holdfast.base.ports.readable import Buffers, ByteRanges, OnBytes, OnRange, Readable
from holdfast.base.types.plan import Piece, PlannedPack, WantedBoxes
from holdfast.core.engine import read
from holdfast.core.engine.arena import Arena
from holdfast.core.engine.buffers import BufferPool, allocate_aligned
from holdfast.core.engine.decoding.decode import Decoder
from holdfast.core.engine.placing import Placing
from holdfast.core.engine.read import execute, read_through
from holdfast.core.engine.staging import Staging
from holdfast.core.engine.target import HostTarget
from holdfast.core.engine.writing.write import PackWriter, WrittenPack
from holdfast.core.format.digest import digest_of
from holdfast.core.format.pack import header_of
from holdfast.core.plan.ownership import Owned
from holdfast.core.plan.packing import packs_of
from holdfast.core.plan.reads import load_plan
from holdfast.errors import CorruptError, MissingError, UnavailableError
from holdfast.settings import MIB, PAGE_BYTES, Settings
from tests.doubles.faults import FaultPoint, Faults, FaultyStore, raise_error
from tests.doubles.framework import GlobalTensor, NumpyFramework
from tests.support.tuning import tuned

KEY = "0123456789abcdef/r00000.safetensors"
SMALL = tuned(Settings(chunk_bytes=PAGE_BYTES), window_bytes=PAGE_BYTES, windows_in_flight=1)


def packs_in(files: Readable) -> Packs:
    return packs_under(files, "0123456789abcdef/")


def memory() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


def shards_of(sizes: Sequence[int]) -> list[LocalShard]:
    chance = np.random.default_rng(len(sizes))
    state = {
        f"t{n}": GlobalTensor("uint8", chance.integers(0, 256, size, dtype=np.uint8)) for n, size in enumerate(sizes)
    }
    return list(NumpyFramework(0).collect(state, Selection()).shards)


def planned(shards: Sequence[LocalShard]) -> PlannedPack:
    whole = [Owned(number, each.shard.pieces[0]) for number, each in enumerate(shards)]
    (pack,) = packs_of(0, [each.shard for each in shards], whole, 1 << 20)
    return PlannedPack(KEY, header_of(pack, {}), pack)


def write(
    store: object,
    shards: Sequence[LocalShard],
    settings: Settings,
    writer: PackWriter | None = None,
    *,
    staged: bool = False,
) -> WrittenPack:
    pack = planned(shards)
    writer = PackWriter(store, settings) if writer is None else writer  # type: ignore[arg-type]
    sources = [each.source for each in shards]
    if not staged:
        return writer.write(pack, sources)
    arena = arena_for(pack, settings)
    staging = Staging(arena)
    staging.copy([pack], sources)
    for each in shards:
        each.source.array[...] = 0  # type: ignore[attr-defined]  # What happens to the state now must not matter.
    written = writer.write_staged(pack, staging)
    require_all_back(arena)
    return written


def arena_for(pack: PlannedPack, settings: Settings) -> Arena:
    """Return an arena with room for one pack and not a buffer more."""
    count = -(-pack.bytes // settings._tuning.window_bytes)
    return Arena(settings._tuning.window_bytes, count * settings._tuning.window_bytes, SystemClock())


def require_all_back(arena: Arena) -> None:
    assert len(arena._free) == arena._count


def pieces_of(shards: Sequence[LocalShard], written: WrittenPack, chunk_bytes: int) -> dict[str, list[Piece]]:
    pack = planned(shards)
    start = len(pack.header)
    return {
        item.tensor.fqn: [
            Piece(item.tensor, item.region, "r00000.safetensors", start + item.data_offset, digests, chunk_bytes)
        ]
        for item, digests in zip(pack.plan.items, written.digests, strict=True)
    }


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from((0, 1, 4095, 4096, 4097, 8192, 12289, 30000)), min_size=1, max_size=6),
    st.sampled_from((1, 2, 3)),
    st.sampled_from((1, 2, 3)),
    st.integers(1, 4),
    st.booleans(),
)
def test_what_is_written_is_read_back(
    sizes: list[int], chunk_pages: int, window_pages: int, flights: int, staged: bool
) -> None:
    chosen = tuned(
        Settings(chunk_bytes=chunk_pages * PAGE_BYTES),
        window_bytes=window_pages * PAGE_BYTES,
        windows_in_flight=flights,
    )
    store = memory()
    shards = shards_of(sizes)
    written = write(store, shards, chosen, staged=staged)
    shards = shards_of(sizes)
    raw = store.get(KEY, 1 << 30)
    assert written.record.bytes == len(raw)
    arrays = load_safetensors(raw)
    pieces = pieces_of(shards, written, chosen.chunk_bytes)
    targets = []
    wanted = []
    for each in shards:
        expected = bytearray(each.shard.tensor.global_bytes)
        each.source.copy_into(each.shard.pieces[0], 0, len(expected), memoryview(expected)).wait()
        assert arrays[each.shard.tensor.fqn].tobytes() == expected
        (piece,) = pieces[each.shard.tensor.fqn]
        step = chosen.chunk_bytes
        chunks = [bytes(expected[at : at + step]) for at in range(0, len(expected), step)]
        assert piece.digests == b"".join(digest_of(chunk) for chunk in chunks)
        targets.append((HostTarget("uint8", each.shard.pieces[0]), bytes(expected)))
        wanted.append(WantedBoxes(each.shard.tensor.fqn, each.shard.pieces))
    plan = load_plan(wanted, lambda fqn, _: pieces[fqn], chosen._tuning.window_bytes)
    execute(plan, packs_in(store), [target for target, _ in targets], chosen, NO_CODECS)
    assert [target.array.tobytes() for target, _ in targets] == [expected for _, expected in targets]


class AtHand(MemoryStore):
    """Has a number of bytes of each read at hand and scribbles over the rest of the buffers."""

    count = 0

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        data, left = self.get(key, 1 << 30)[start:], self.count
        for buffer in buffers:
            came = max(min(left, buffer.nbytes), 0)
            buffer[:] = data[:came] + b"?" * (buffer.nbytes - came)
            if on_bytes is not None:
                on_bytes(buffer[:came])
            data, left = data[buffer.nbytes :], left - came
        return min(self.count, sum(buffer.nbytes for buffer in buffers))


@pytest.mark.parametrize("part_bytes_max", (PAGE_BYTES, MIB))
@pytest.mark.parametrize("zero_copy_bytes_min", (1, 3000, PAGE_BYTES, 1 << 20))
def test_any_part_of_a_run_may_lie_at_hand(
    zero_copy_bytes_min: int, part_bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks with memory of their own and chunks without, side by side in one run, arrive in part or whole."""
    monkeypatch.setattr(read, "_PART_BYTES_MAX", part_bytes_max)
    store = AtHand(uuid.uuid4().hex)
    shards = shards_of([5000, 20, 9000, 20, 20, 4096, 3000, 0, 8193])
    written = write(store, shards, SMALL)
    pieces = pieces_of(shards, written, SMALL.chunk_bytes)
    wanted = [WantedBoxes(each.shard.tensor.fqn, each.shard.pieces) for each in shards]
    chosen = tuned(SMALL, window_bytes=8 * PAGE_BYTES, zero_copy_bytes_min=zero_copy_bytes_min)
    plan = load_plan(wanted, lambda fqn, _: pieces[fqn], chosen._tuning.window_bytes)
    assert len(plan.runs) == 1
    for count in range(0, plan.bytes + 500, 499):
        store.count = count
        for files in (store, FillsBuffers(store)):
            targets = [HostTarget("uint8", each.shard.pieces[0]) for each in shards]
            execute(plan, packs_in(files), targets, chosen, NO_CODECS)
            for target, each in zip(targets, shards, strict=True):
                expected = bytearray(each.shard.tensor.global_bytes)
                each.source.copy_into(each.shard.pieces[0], 0, len(expected), memoryview(expected)).wait()
                assert target.array.tobytes() == expected, (count, each.shard.tensor.fqn)


@pytest.mark.parametrize("is_at_hand", (True, False))
def test_targets_that_overlap_are_no_damage(is_at_hand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them wins is open, but a sound checkpoint is never called corrupt for it."""

    class Shared(HostTarget):
        def __init__(self, array: np.ndarray) -> None:
            super().__init__("uint8", Box.whole(array.shape))
            self.array = array

    monkeypatch.setattr(read, "_PART_BYTES_MAX", PAGE_BYTES)  # So each chunk is a part, which its target may take.
    store = AtHand(uuid.uuid4().hex)
    store.count = is_at_hand * (1 << 20)
    shards = shards_of([2 * PAGE_BYTES, PAGE_BYTES])
    written = write(store, shards, SMALL)
    pieces = pieces_of(shards, written, SMALL.chunk_bytes)
    chosen = tuned(SMALL, window_bytes=8 * PAGE_BYTES, zero_copy_bytes_min=1)
    wanted = [WantedBoxes(each.shard.tensor.fqn, each.shard.pieces) for each in shards]
    plan = load_plan(wanted, lambda fqn, _: pieces[fqn], chosen._tuning.window_bytes)
    memory_of_both = np.zeros(2 * PAGE_BYTES, dtype=np.uint8)
    targets = [Shared(memory_of_both), Shared(memory_of_both[:PAGE_BYTES])]
    filling = FillsBuffers(store)
    execute(plan, packs_in(filling), targets, chosen, NO_CODECS)
    assert memory_of_both.any()
    assert is_at_hand or all(np.shares_memory(buffer, memory_of_both) for buffer in filling.buffers)


def test_damage_in_what_lies_at_hand_is_found() -> None:
    store = AtHand(uuid.uuid4().hex)
    store.count = 1 << 20
    shards = shards_of([3 * PAGE_BYTES])
    written = write(store, shards, SMALL)
    pieces = pieces_of(shards, written, SMALL.chunk_bytes)
    raw = bytearray(store.get(KEY, 1 << 30))
    raw[-1] ^= 1
    store.put(KEY, bytes(raw))
    plan = load_plan(
        [WantedBoxes("t0", shards[0].shard.pieces)], lambda fqn, _: pieces[fqn], SMALL._tuning.window_bytes
    )
    with pytest.raises(CorruptError, match=r"t0.*r00000\.safetensors: bytes .* hash to"):
        execute(
            plan, packs_in(store), [HostTarget("uint8", shards[0].shard.pieces[0])],
            tuned(SMALL, zero_copy_bytes_min=1), NO_CODECS,
        )  # fmt: skip


class Refusing(HostTarget):
    """Takes nothing."""

    def __init__(self, error: Exception) -> None:
        super().__init__("uint8", Box((0,), (3 * PAGE_BYTES,)))
        self.error = error

    def memory(self, part: Box) -> memoryview | None:
        return None

    def place(self, part: Box, source: memoryview, source_box: Box) -> None:
        raise self.error


@pytest.mark.parametrize("error", [TimeoutError("the device is late"), MissingError("no such device"), OSError("lost")])
def test_an_error_of_a_target_is_not_taken_for_one_of_the_store(tmp_path: Path, error: Exception) -> None:
    store = LocalStore(tmp_path, settings=SMALL)
    shards = shards_of([3 * PAGE_BYTES])
    pieces = pieces_of(shards, write(store, shards, SMALL), SMALL.chunk_bytes)
    plan = load_plan(
        [WantedBoxes("t0", shards[0].shard.pieces)], lambda fqn, _: pieces[fqn], SMALL._tuning.window_bytes
    )
    with pytest.raises(type(error)) as raised:
        execute(plan, packs_in(store), [Refusing(error)], SMALL, NO_CODECS)
    assert raised.value is error


@pytest.mark.parametrize("operation", ("upload", "upload.write", "upload.complete"))
def test_a_pack_that_cannot_be_written_leaves_nothing_and_says_so(operation: str) -> None:
    store = memory()
    faults = Faults(raise_error(UnavailableError), names={operation})
    with pytest.raises(UnavailableError, match=operation):
        write(FaultyStore(store, faults), shards_of([30000]), SMALL)
    assert faults.met == 1
    assert list(store.list()) == []
    assert write(FaultyStore(store, faults), shards_of([30000]), SMALL).record.bytes == store.size(KEY)


def test_a_source_that_fails_leaves_nothing() -> None:
    class Broken:
        def copy_into(self, piece: Box, start: int, stop: int, buffer: memoryview) -> object:
            raise ValueError("lost")

    store = memory()
    shards = shards_of([30000])
    with pytest.raises(ValueError, match="lost"):
        PackWriter(store, SMALL).write(planned(shards), [Broken()])  # type: ignore[list-item]
    assert list(store.list()) == []


@pytest.mark.parametrize("flights", (1, 2))
def test_copying_and_writing_go_on_beside_each_other_through_an_arena_of_one_slab(flights: int) -> None:
    chosen = tuned(SMALL, windows_in_flight=flights)
    store = memory()
    shards = shards_of([20 * PAGE_BYTES, 100])
    pack = planned(shards)
    arena = Arena(PAGE_BYTES, PAGE_BYTES, SystemClock())
    staging = Staging(arena)
    sources = [each.source for each in shards]
    copying = threading.Thread(target=lambda: staging.copy([pack], sources))
    copying.start()
    written = PackWriter(store, chosen).write_staged(pack, staging)
    copying.join(20.0)
    staging.raise_failure()
    assert store.get(KEY, 1 << 30) == _written_whole(shards) and written.record.bytes == pack.bytes
    assert arena._count == len(arena._free) == 1


def _written_whole(shards: Sequence[LocalShard]) -> bytes:
    store = memory()
    write(store, shards, SMALL)
    return bytes(store.get(KEY, 1 << 30))


def test_who_gives_up_ends_a_copy_that_waits_for_memory() -> None:
    """Nobody writes, so no buffer comes back."""
    shards = shards_of([20 * PAGE_BYTES])
    pack = planned(shards)
    arena = Arena(PAGE_BYTES, 2 * PAGE_BYTES, SystemClock())
    staging = Staging(arena)
    sources = [each.source for each in shards]
    copying = threading.Thread(target=lambda: staging.copy([pack], sources), daemon=True)
    copying.start()
    while arena._free or not arena._count:
        threading.Event().wait(0.001)
    staging.give_up(UnavailableError("full"))
    staging.give_up(UnavailableError("a later one"))
    copying.join(20.0)
    assert not copying.is_alive()
    staging.wait()
    for end in (staging.take, staging.take, staging.raise_failure):
        with pytest.raises(UnavailableError, match="full"):
            end()
    require_all_back(arena)


@pytest.mark.parametrize("fails_at", ("source", "upload"))
def test_what_fails_while_it_is_staged_or_written_gives_its_slabs_back(fails_at: str) -> None:
    class Broken:
        def copy_into(self, piece: Box, start: int, stop: int, buffer: memoryview) -> object:
            if start:
                raise ValueError("lost")
            return shards[0].source.copy_into(piece, start, stop, buffer)

    def fail(operation: FaultPoint) -> None:
        raise UnavailableError("full")

    shards = shards_of([20 * PAGE_BYTES])
    pack = planned(shards)
    arena = arena_for(pack, SMALL)
    staging = Staging(arena)
    source = Broken() if fails_at == "source" else shards[0].source
    staging.copy([pack], [source])  # type: ignore[list-item]
    store = FaultyStore(memory(), Faults(fail, names={"upload.write"}, lasting=True))
    expected = UnavailableError if fails_at == "upload" else ValueError
    with pytest.raises(expected, match="full" if fails_at == "upload" else "lost") as caught:
        PackWriter(store, SMALL).write_staged(pack, staging)
    staging.give_up(caught.value)
    require_all_back(arena)


@pytest.mark.parametrize("startable", (0, 1))
def test_a_host_without_threads_to_spare_writes_all_the_same(monkeypatch: pytest.MonkeyPatch, startable: int) -> None:
    """Some versions of Python start no thread once the interpreter exits, and a save may be pending then."""
    start = threading.Thread.start
    started: list[str] = []

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("holdfast-write"):
            if len(started) == startable:
                raise RuntimeError("can't start new thread")
            started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    shards = shards_of([20 * PAGE_BYTES])
    for staged in (False, True):
        store = memory()
        started.clear()
        written = write(store, shards_of([20 * PAGE_BYTES]), SMALL, staged=staged)
        assert store.size(KEY) == written.record.bytes
        assert load_safetensors(store.get(KEY, 1 << 30))["t0"].tobytes() == shards[0].source.array.tobytes()  # type: ignore[attr-defined]


@pytest.mark.parametrize("flights", (1, 3))
def test_a_writer_lives_through_any_number_of_failures(flights: int) -> None:
    """A window that was given up unwritten must come back to the writer, or a later save waits for ever."""
    settings_of = tuned(Settings(chunk_bytes=PAGE_BYTES), window_bytes=PAGE_BYTES, windows_in_flight=flights)
    inner = memory()
    first = threading.Event()

    def fail(operation: FaultPoint) -> None:
        # The first write fails late and those behind it are slow, so that one is still queued when it is seen.
        failing = not first.is_set()
        first.set()
        threading.Event().wait(0.02 if failing else 0.05)
        if failing:
            raise UnavailableError("full")

    store = FaultyStore(inner, Faults(fail, names={"upload.write"}, lasting=True))
    writer = PackWriter(store, settings_of)
    shards = shards_of([20 * PAGE_BYTES])
    for _ in range(3 * flights + 3):
        first.clear()
        with pytest.raises(UnavailableError, match="full"):
            write(store, shards, settings_of, writer)
    first.set()
    # A daemon, so that a writer that waits for ever fails this test and does not hold up the interpreter's exit.
    later = threading.Thread(target=write, args=(store, shards, settings_of, writer), daemon=True)
    later.start()
    later.join(20.0)
    assert not later.is_alive()
    assert inner.size(KEY) > 20 * PAGE_BYTES


def test_a_damaged_chunk_is_named_and_not_placed() -> None:
    store = memory()
    shards = shards_of([30000])
    written = write(store, shards, SMALL)
    pieces = pieces_of(shards, written, SMALL.chunk_bytes)
    raw = bytearray(store.get(KEY, 1 << 30))
    at = pieces["t0"][0].offset + 2 * PAGE_BYTES + 77
    raw[at] ^= 1
    store.put(KEY, bytes(raw))
    target = HostTarget("uint8", Box((0,), (30000,)))
    target.array[:] = 0
    plan = load_plan(
        [WantedBoxes("t0", (Box((0,), (30000,)),))], lambda fqn, _: pieces[fqn], SMALL._tuning.window_bytes
    )
    with pytest.raises(CorruptError, match=rf"t0: .*{KEY}: bytes {at - 77}–{at - 77 + PAGE_BYTES}"):
        execute(plan, packs_in(store), [target], SMALL, NO_CODECS)
    assert not target.array[2 * PAGE_BYTES : 3 * PAGE_BYTES].any()
    untouched = HostTarget("uint8", Box((0,), (PAGE_BYTES,)))
    beside = load_plan(
        [WantedBoxes("t0", (Box((0,), (PAGE_BYTES,)),))], lambda fqn, _: pieces[fqn], SMALL._tuning.window_bytes
    )
    execute(beside, packs_in(store), [untouched], SMALL, NO_CODECS)


class FlipsOnTheWay(ForwardingStore):
    """Flips a bit in the bytes of one range of each of the first reads, as a network may."""

    def __init__(self, inner: MemoryStore, *, number: int, reads: int) -> None:
        super().__init__(inner)
        self.number, self.left = number, reads

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        self.left -= 1
        flipped = self.number if self.left >= 0 and len(ranges) > self.number else None
        held = [bytearray(self.get(key, 1 << 30)[start:stop]) for start, stop in ranges]
        if flipped is not None:
            held[flipped][-1] ^= 1
        hand_out(held, buffers, on_range)


@pytest.mark.parametrize("number", (0, 2))
def test_a_bit_that_was_flipped_on_the_way_is_read_again(number: int, caplog: pytest.LogCaptureFixture) -> None:
    shards = shards_of([3 * MIB])
    inner = memory()
    pieces = pieces_of(shards, write(inner, shards, Settings()), Settings().chunk_bytes)
    whole = shards[0].shard.pieces
    plan = load_plan([WantedBoxes("t0", whole)], lambda fqn, _: pieces[fqn], Settings()._tuning.read_window_bytes)
    target = HostTarget("uint8", whole[0])
    execute(
        plan,
        packs_in(FlipsOnTheWay(inner, number=number, reads=1)),
        [target],
        Settings(),
        NO_CODECS,
    )
    assert np.array_equal(target.array, shards[0].source.array)  # type: ignore[attr-defined]
    (said,) = caplog.records
    assert "right when they were read again" in said.message
    # Twice wrong is damage.
    with pytest.raises(CorruptError, match="hash to"):
        store = FlipsOnTheWay(inner, number=0, reads=2)
        execute(plan, packs_in(store), [target], Settings(), NO_CODECS)


class FillsBuffers(ForwardingStore):
    """Reads into the memory that it is given, as a plain connection does, and notes that memory."""

    def __init__(self, inner: MemoryStore, *, flipped: Sequence[int] = (), fails_at: int | None = None) -> None:
        super().__init__(inner)
        self.flipped, self.fails_at = list(flipped), fails_at
        self.buffers: list[memoryview] = []

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        data = self.get(key, 1 << 30)
        for number, ((start, stop), buffer) in enumerate(zip(ranges, buffers, strict=True)):
            if len(self.buffers) == self.fails_at:
                raise UnavailableError("the connection is lost")
            buffer[:] = data[start:stop]
            if self.flipped and self.flipped[0] == len(self.buffers):
                self.flipped.pop(0)
                buffer[-1] ^= 1
            self.buffers.append(buffer)
            if on_range is not None:
                on_range(number, buffer.cast("B"))


def read_in_place(store: FillsBuffers, sizes: Sequence[int], chosen: Settings) -> list[HostTarget]:
    """Write tensors of these sizes below a store, read them through it, and return what was filled."""
    shards = shards_of(sizes)
    pieces = pieces_of(shards, write(store._inner, shards, chosen), chosen.chunk_bytes)
    wanted = [WantedBoxes(each.shard.tensor.fqn, each.shard.pieces) for each in shards]
    targets = [HostTarget("uint8", each.shard.pieces[0]) for each in shards]
    execute(load_plan(wanted, lambda fqn, _: pieces[fqn], 4 * MIB), packs_in(store), targets, chosen, NO_CODECS)
    for each, target in zip(shards, targets, strict=True):
        assert np.array_equal(target.array, each.source.array), each.shard.tensor.fqn  # type: ignore[attr-defined]
    return targets


ONE_BY_ONE = tuned(Settings(), windows_in_flight=1)


def test_large_chunks_are_read_straight_into_their_targets() -> None:
    store = FillsBuffers(memory())
    large, *small = read_in_place(store, [2 * MIB + 5 * PAGE_BYTES, 700, 800], ONE_BY_ONE)
    filled = sum(buffer.nbytes for buffer in store.buffers if np.shares_memory(buffer, large.array))
    assert filled == 2 * MIB, "the rest of it is small, and goes through a buffer with its neighbours"
    assert not any(np.shares_memory(buffer, each.array) for buffer in store.buffers for each in small)


def test_a_chunk_that_is_wrong_in_its_target_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    store = FillsBuffers(memory(), flipped=[1])
    (target,) = read_in_place(store, [3 * MIB], ONE_BY_ONE)
    assert not np.shares_memory(store.buffers[-1], target.array), "the second read goes through a buffer"
    (said,) = caplog.records
    assert "right when they were read again" in said.message


def test_targets_that_two_threads_fill_at_once_are_not_blamed_on_the_machine(caplog: pytest.LogCaptureFixture) -> None:
    both_filled = threading.Barrier(2, timeout=60)

    class Together(FillsBuffers):
        def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
            def take(number: int, data: memoryview) -> None:
                both_filled.wait()
                assert on_range is not None
                on_range(number, data)

            super().read_into(key, ranges, buffers, None if on_range is None else take)

    shards = shards_of([MIB, MIB])
    inner = memory()
    pieces = pieces_of(shards, write(inner, shards, Settings()), Settings().chunk_bytes)
    wanted = [WantedBoxes(each.shard.tensor.fqn, each.shard.pieces) for each in shards]
    targets = [HostTarget("uint8", each.shard.pieces[0]) for each in shards]
    targets[1].array = targets[0].array
    plan = load_plan(wanted, lambda fqn, _: pieces[fqn], MIB)
    execute(plan, packs_in(Together(inner)), targets, tuned(Settings(), windows_in_flight=2), NO_CODECS)
    assert caplog.records, "whoever filled it first found the bytes of the other"
    assert all("or tensors of the state share memory" in each.message for each in caplog.records)


def test_a_chunk_that_is_wrong_twice_is_damage() -> None:
    with pytest.raises(CorruptError, match=r"t0.*bytes .* hash to"):
        read_in_place(FillsBuffers(memory(), flipped=[0, 3]), [3 * MIB], ONE_BY_ONE)


def test_a_connection_that_is_lost_within_a_target_is_an_error() -> None:
    with pytest.raises(UnavailableError, match="lost"):
        read_in_place(FillsBuffers(memory(), fails_at=2), [3 * MIB], ONE_BY_ONE)


def test_what_is_read_for_others_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    shards = shards_of([PAGE_BYTES])
    inner = memory()
    pieces = pieces_of(shards, write(inner, shards, SMALL), SMALL.chunk_bytes)
    whole = shards[0].shard.pieces
    (run,) = load_plan([WantedBoxes("t0", whole)], lambda fqn, _: pieces[fqn], SMALL._tuning.read_window_bytes).runs
    packs = packs_in(FlipsOnTheWay(inner, number=0, reads=1))
    target = HostTarget("uint8", whole[0])
    (data,) = read_through(run, Placing(packs, [target], Decoder(NO_CODECS)), allocate_aligned(4 * PAGE_BYTES))
    assert bytes(data) == target.array.tobytes() == shards[0].source.array.tobytes()  # type: ignore[attr-defined]
    assert "read again" in caplog.text


def test_a_missing_and_a_truncated_pack_are_corrupt() -> None:
    store = memory()
    shards = shards_of([30000])
    pieces = pieces_of(shards, write(store, shards, SMALL), SMALL.chunk_bytes)
    plan = load_plan(
        [WantedBoxes("t0", (Box((0,), (30000,)),))], lambda fqn, _: pieces[fqn], SMALL._tuning.window_bytes
    )
    raw = store.get(KEY, 1 << 30)
    for change in (lambda: store.put(KEY, raw[:-1]), lambda: store.delete([KEY])):
        change()
        with pytest.raises(CorruptError, match="r00000"):
            execute(
                plan,
                packs_in(store),
                [HostTarget("uint8", Box((0,), (30000,)))],
                SMALL,
                NO_CODECS,
            )


def test_an_empty_plan_reads_nothing() -> None:
    faults = Faults()
    plan = load_plan([WantedBoxes("t0", (Box((0,), (0,)),))], lambda *_: [], 4096)
    execute(
        plan, packs_under(FaultyStore(memory(), faults), "x/"), [HostTarget("uint8", Box((0,), (0,)))], SMALL, NO_CODECS
    )
    assert faults.seen == []


def test_slabs_are_few_and_reused() -> None:
    buffers = BufferPool(2, 5000)
    first, second = buffers.take(), buffers.take()
    assert len(first) >= 5000
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(buffers.take)
        assert not third.done()
        buffers.give(first)
        assert third.result(10.0) is first
    buffers.give(second)
    with buffers.lent() as lent:
        assert lent is second


def test_a_slab_begins_on_a_page() -> None:
    for count in (1, PAGE_BYTES, PAGE_BYTES + 1):
        buffer = allocate_aligned(count)
        assert np.frombuffer(buffer, np.uint8).ctypes.data % PAGE_BYTES == 0
        assert len(buffer) >= count


def test_a_forked_child_is_given_no_slab() -> None:
    """Else every buffer the parent writes to afterwards would first be copied, page by page."""
    buffer = allocate_aligned(4 << 20)
    buffer[:] = b"x" * len(buffer)
    child = os.fork()
    if child == 0:
        os._exit(int(any(buffer[::PAGE_BYTES])))
    buffer[:PAGE_BYTES] = b"y" * PAGE_BYTES
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert bytes(buffer) == b"y" * PAGE_BYTES + b"x" * (len(buffer) - PAGE_BYTES)
