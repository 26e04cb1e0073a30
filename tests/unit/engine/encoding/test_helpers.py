"""Helper processes: packs have the same bytes with them and without, whatever becomes of them."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.engine.casting import cast
from holdfast.engine.encoding import helper_main, helper_process
from holdfast.engine.encoding.chunk_encoder import ChunkEncoder, EncodedChunk, PairedWeight
from holdfast.engine.encoding.encode import Encoder
from holdfast.engine.encoding.helper_messages import SLOTS
from holdfast.engine.encoding.helper_process import CodingHelpers, Helper, HelperTask
from holdfast.engine.encoding.meter import SaveMeter
from holdfast.errors import UnavailableError
from holdfast.format.digest import digest_of
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.testing.codec import joined_parts
from holdfast.testing.faults import Faults, FaultyStore, raise_error
from holdfast.types.coding import Kind
from holdfast.wiring import CODING_ENTRY, codecs
from tests.coded_packs import KEY, KINDS, SMALL, Pack, drawn, memory, with_pair
from tests.coding_helpers import BREAKING, FAILING, OTHER_VERSION
from tests.looked_at import ClockOfLooks

TWO = replace(SMALL, compression_threads=2, count_nonfinite=True)
READY_SECONDS_MAX = 60.0


def started(count: int = 1, entry: str = CODING_ENTRY, chosen: Settings = TWO) -> CodingHelpers:
    helpers = CodingHelpers(entry, replace(chosen, compression_threads=count + 1))
    assert helpers.wait_ready(READY_SECONDS_MAX) == count
    return helpers


@pytest.fixture(scope="module")
def helpers() -> Iterator[CodingHelpers]:
    started_once = started(2, chosen=replace(TWO, chunk_bytes=3 * PAGE_BYTES))
    yield started_once
    started_once.close()


def stored(pack: Pack, helpers: CodingHelpers | None = None) -> bytes:
    """Write a pack; return what the store has then."""
    pack.write(store := memory(), helpers=helpers)
    return store.get(KEY, 1 << 30)


def of_many_chunks(chosen: Settings = TWO) -> Pack:
    state = {f"t{n}": drawn("float32", 1024 * 12, kind, n) for n, kind in enumerate(("normal", "random", "sparse"))}
    with_pair(state, "w", np.random.default_rng(1).standard_normal(1024 * 20).astype(np.float32), "bfloat16")
    return Pack(state, chosen)


def the_helper(helpers: CodingHelpers) -> Helper:
    with helpers.lent() as lent:
        (helper,) = lent
    return helper


def pid_of(helper: Helper) -> int:
    return helper._process.pid


def are_slots_free(helpers: CodingHelpers) -> bool:
    """Whether every slot comes back: that of a unit that was taken back, once its helper has come to it."""

    def are_free() -> bool:
        with helpers.lent() as lent:
            return len(lent) > 0 and all(sorted(helper.free_slots) == list(range(SLOTS)) for helper in lent)

    return within(READY_SECONDS_MAX, are_free)


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that has ended and was not waited for does not."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def within(seconds: float, is_so: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    return is_so()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=st.lists(
        st.tuples(
            st.sampled_from(("float32", "bfloat16", "float64", "int64", "uint8", "float8_e4m3fn")),
            st.sampled_from((1, 1000, 4097, 30000)),
            st.sampled_from(KINDS),
        ),
        max_size=4,
    ),
    pair_count=st.sampled_from((0, 1, 3000, 17001)),
    pair_dtype=st.sampled_from(("bfloat16", "float16")),
    chunk_pages=st.sampled_from((1, 2, 3)),
    buffers=st.sampled_from((1, 2, 3, 40)),
)
def test_packs_have_the_same_bytes_with_helpers(
    helpers: CodingHelpers,
    tensors: list[tuple[str, int, str]],
    pair_count: int,
    pair_dtype: str,
    chunk_pages: int,
    buffers: int,
) -> None:
    state = {f"t{n}": drawn(dtype, count, kind, n) for n, (dtype, count, kind) in enumerate(tensors)}
    if pair_count:
        with_pair(state, "p", np.random.default_rng(1).standard_normal(pair_count).astype(np.float32), pair_dtype)
    pack = Pack(state, replace(TWO, chunk_bytes=chunk_pages * PAGE_BYTES))
    alone, beside = memory(), memory()
    assert pack.write(beside, helpers=helpers) == pack.write(alone)
    assert beside.get(KEY, 1 << 30) == alone.get(KEY, 1 << 30)
    staged = memory()
    pack.write_staged(staged, buffers, helpers)
    assert staged.get(KEY, 1 << 30) == alone.get(KEY, 1 << 30)


def answered(task: HelperTask) -> list[EncodedChunk] | None:
    assert within(READY_SECONDS_MAX, lambda: task.wait(0.1))
    return task.chunks


def joined(chunks: Sequence[EncodedChunk] | None) -> list[tuple[bytes, str, bytes, int]]:
    """What is known of chunks, with their stored bytes."""
    return [(chunk.digest, chunk.codec, bytes(joined_parts(chunk.parts)), chunk.nonfinite) for chunk in chunks or ()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_helper_codes_chunks_as_they_are_coded_here(helpers: CodingHelpers, kind: str) -> None:
    array = drawn("float32", 2048, kind, 1).array
    raw = [array[:1024].view(np.uint8).data, array[1024:].view(np.uint8).data]
    here = ChunkEncoder(codecs(), counts_nonfinite=True)
    rounded = cast(array, "float32", "bfloat16").view(np.uint8)
    for weight in (None, PairedWeight("bfloat16", digest_of(rounded.data)), PairedWeight("bfloat16", b"0" * 16)):
        with helpers.lent() as lent:
            task = lent[0].begin("float32", "planes", raw, weight)
            found = joined(answered(task))
            task.release()
        assert found == joined(here.encoded("float32", "planes", raw, weight)) and len(found) == 2


def test_a_helper_encodes_and_every_slot_comes_back() -> None:
    helpers = started()
    helper, pack = the_helper(helpers), of_many_chunks()
    tasks: list[HelperTask] = []

    def begin(*of: Any) -> HelperTask:
        tasks.append(Helper.begin(helper, *of))
        return tasks[-1]

    helper.begin = begin  # type: ignore[method-assign]
    assert stored(pack, helpers) == stored(pack)
    assert len(tasks) > 10 and are_slots_free(helpers)
    assert any(task.chunks is not None for task in tasks)
    helpers.close()


@pytest.mark.parametrize("number", [0, 1])
def test_a_helper_that_was_late_helps_again_with_the_same_pack(number: int) -> None:
    helpers = started(2)
    with helpers.lent() as lent:
        helper = lent[number]
    pack = Pack({"t": drawn("float32", 1024 * 400, "normal", 0)}, TWO)
    tasks: list[HelperTask] = []

    def begin(*of: Any) -> HelperTask:
        tasks.append(Helper.begin(helper, *of))
        return tasks[-1]

    def wake(count: int) -> None:
        counts.append(count)
        if len(counts) == 50:
            os.kill(pid_of(helper), signal.SIGCONT)
            assert within(READY_SECONDS_MAX, lambda: select.select([helper._socket], [], [], 0.1)[0] != [])

    counts: list[int] = []
    helper.begin = begin  # type: ignore[method-assign]
    os.kill(pid_of(helper), signal.SIGSTOP)
    pack.write(store := memory(), written=wake, helpers=helpers)
    assert len(tasks) > SLOTS, "its slots came back"
    assert store.get(KEY, 1 << 30) == stored(pack)
    helpers.close()


def test_chunks_that_a_slow_helper_has_are_written_in_their_turn() -> None:
    helpers, pack = started(), of_many_chunks()
    pid = pid_of(the_helper(helpers))
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(0.3, os.kill, (pid, signal.SIGCONT))
    timer.start()
    assert stored(pack, helpers) == stored(pack)
    assert not the_helper(helpers).is_lost
    helpers.close()


@pytest.mark.parametrize("has_units", [False, True])
def test_what_a_dead_helper_had_is_encoded_here(has_units: bool, caplog: pytest.LogCaptureFixture) -> None:
    helpers, pack, store = started(), of_many_chunks(), memory()
    pid, counts = pid_of(the_helper(helpers)), list[int]()

    def kill_it(count: int) -> None:
        counts.append(count)
        if len(counts) == 5:
            os.kill(pid, signal.SIGKILL)
            assert within(READY_SECONDS_MAX, lambda: not is_alive(pid))

    if has_units:
        os.kill(pid, signal.SIGSTOP)
    pack.write(store, written=kill_it, helpers=helpers)
    assert store.get(KEY, 1 << 30) == stored(pack)
    with helpers.lent() as lent:
        assert lent == []
    (record,) = [each for each in caplog.records if "is lost" in each.message]
    assert (
        str(pid) in record.message and "signal 9, perhaps for memory: then lower compression_threads" in record.message
    )
    assert stored(pack, helpers) == stored(pack), "later packs do without it"
    helpers.close()


def test_a_helper_that_hangs_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_process, "_EXIT_SECONDS_MAX", 0.2)
    helpers, pack = started(), of_many_chunks()
    pid = pid_of(the_helper(helpers))
    os.kill(pid, signal.SIGSTOP)
    for _ in range(2):
        assert stored(pack, helpers) == stored(pack)
    assert not the_helper(helpers).free_slots, "what it may still write to is not used again"
    helpers.close()
    assert not is_alive(pid)


def test_a_chunk_that_a_helper_cannot_code_is_encoded_here() -> None:
    helpers, pack = started(entry=FAILING), of_many_chunks()
    assert stored(pack, helpers) == stored(pack)
    assert not the_helper(helpers).is_lost
    helpers.close()


def test_helpers_that_do_not_start_are_done_without(caplog: pytest.LogCaptureFixture) -> None:
    helpers, pack = CodingHelpers(BREAKING, TWO), of_many_chunks()
    assert stored(pack, helpers) == stored(pack)
    assert helpers.wait_ready(READY_SECONDS_MAX) == 0
    assert "it ended with status 3" in caplog.text
    helpers.close()


def test_a_machine_that_starts_no_process_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    helpers, pack = CodingHelpers(CODING_ENTRY, TWO), of_many_chunks()
    assert stored(pack, helpers) == stored(pack)
    assert "0 of 1 processes that compress were started" in caplog.text


@pytest.mark.parametrize("operation", ["upload.write", "upload.complete"])
def test_a_pack_that_fails_leaves_helpers_to_the_next(operation: str, helpers: CodingHelpers) -> None:
    pack, store = of_many_chunks(), memory()
    faulty = FaultyStore(store, Faults(raise_error(UnavailableError), names={operation}))
    with pytest.raises(UnavailableError, match=operation):
        pack.write(faulty, helpers=helpers)
    assert list(store.list()) == []
    assert stored(pack, helpers) == stored(pack)
    assert are_slots_free(helpers)


def test_two_packs_at_once_share_no_helper(helpers: CodingHelpers) -> None:
    pack = of_many_chunks()
    with helpers.lent() as lent:
        assert len(lent) == 2
        with helpers.lent() as none:
            assert not none
        assert stored(pack, helpers) == stored(pack)


def test_larger_chunks_than_a_slot_are_encoded_here(helpers: CodingHelpers) -> None:
    pack = of_many_chunks(replace(TWO, chunk_bytes=16 * PAGE_BYTES))
    assert stored(pack, helpers) == stored(pack)


def test_processor_time_of_helpers_counts_and_a_wait_for_them_does_not() -> None:
    helpers, kind, clock = started(), Kind("float32", "parameter"), ClockOfLooks(0.0)
    pack = Pack({"t": drawn("float32", 1024 * 100, "normal", 0)}, TWO)
    # By this clock the thread that writes takes no time: what counts is the helper's.
    meter, encoder = SaveMeter(clock, {"t": kind}), Encoder(codecs(), TWO, helpers)
    os.kill(pid := pid_of(the_helper(helpers)), signal.SIGSTOP)
    threading.Timer(0.1, os.kill, (pid, signal.SIGCONT)).start()
    chunks = encoder.from_sources(pack.sources)
    encoder.encode(pack.plan, chunks, pack.weights(), lambda _: time.sleep(0.01), lambda _: None, meter)
    coded = meter.measured().coded[kind]
    assert coded.raw_bytes == 4096 * 100
    assert 0.0 < coded.seconds < 0.5
    helpers.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_asks_a_job_to_save_ends_no_helper(number: signal.Signals) -> None:
    helpers, pack = started(), of_many_chunks()
    os.kill(pid_of(the_helper(helpers)), number)
    assert stored(pack, helpers) == stored(pack)
    assert not the_helper(helpers).is_lost
    helpers.close()


def test_helpers_end_at_once_though_a_forked_process_lives() -> None:
    helpers = started(2)
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    start = time.monotonic()
    helpers.close()
    seconds = time.monotonic() - start
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert seconds < helper_process._EXIT_SECONDS_MAX


@pytest.mark.parametrize("ends", ["killed", "exits", "stops first"])
def test_helpers_end_with_a_parent_whose_forked_process_lives(ends: str) -> None:
    """As a worker of a data loader does, it keeps their socket open."""
    reading, writing = os.pipe()
    if (parent := os.fork()) == 0:
        helpers = started()
        pid = pid_of(the_helper(helpers))
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        os.write(writing, f"{pid} {child}".encode())
        time.sleep(0.0 if ends == "exits" else 60.0)
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        assert select.select([pipe], [], [], READY_SECONDS_MAX)[0]
        pid, child = map(int, os.read(reading, 100).split())
    if ends == "stops first":
        os.kill(parent, signal.SIGSTOP)
        assert is_alive(pid)
    if ends != "exits":
        os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    # By itself it looks for its parent twice as late.
    ended = within(helper_main._LOOK_SECONDS / 2, lambda: not is_alive(pid))
    os.kill(child, signal.SIGKILL)
    assert ended


def test_helpers_outlive_the_thread_that_started_them() -> None:
    found: list[CodingHelpers] = []
    thread = threading.Thread(target=lambda: found.append(started()))
    thread.start()
    thread.join()
    pack = of_many_chunks()
    assert stored(pack, found[0]) == stored(pack) and not the_helper(found[0]).is_lost
    found[0].close()


def test_a_helper_of_another_version_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    helpers, pack = CodingHelpers(OTHER_VERSION, TWO), of_many_chunks()
    assert helpers.wait_ready(READY_SECONDS_MAX) == 0
    assert "of another version" in caplog.text
    assert stored(pack, helpers) == stored(pack)
    helpers.close()


def test_paths_that_are_no_text_are_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    started().close()


def test_helpers_end_with_their_owner() -> None:
    helpers = started(2)
    with helpers.lent() as lent:
        pids = [pid_of(helper) for helper in lent]
        del lent
    assert all(map(is_alive, pids))
    del helpers
    gc.collect()
    assert not any(map(is_alive, pids))


def test_helpers_that_are_closed_are_lent_no_more() -> None:
    helpers, pack = started(), of_many_chunks()
    helpers.close()
    with helpers.lent() as lent:
        assert not lent
    assert stored(pack, helpers) == stored(pack)
    helpers.close()


def test_helpers_that_are_closed_amid_a_save_are_found_lost() -> None:
    helpers, pack, store = started(), of_many_chunks(), memory()
    pid, counts = pid_of(the_helper(helpers)), list[int]()

    def close_them(count: int) -> None:
        counts.append(count)
        if len(counts) == 5:
            closing = threading.Thread(target=helpers.close)
            closing.start()
            closing.join()

    pack.write(store, written=close_them, helpers=helpers)
    assert store.get(KEY, 1 << 30) == stored(pack)
    assert within(READY_SECONDS_MAX, lambda: not is_alive(pid))
    helpers.close()


def test_a_forked_process_uses_none_and_ends_none() -> None:
    helpers = started()
    pid = pid_of(the_helper(helpers))
    if (child := os.fork()) == 0:
        status = 1
        try:
            with helpers.lent() as lent:
                status = len(lent)
            helpers.close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_alive(pid) and stored(of_many_chunks(), helpers)
    assert not the_helper(helpers).is_lost
    helpers.close()


def test_a_helper_ends_after_a_process_that_was_killed() -> None:
    script = (
        "import time\nfrom holdfast.settings import Settings\nfrom holdfast.wiring import CODING_ENTRY\n"
        "from holdfast.engine.encoding.helper_process import CodingHelpers\n"
        "helpers = CodingHelpers(CODING_ENTRY, Settings(compression_threads=2))\n"
        "assert helpers.wait_ready(60) == 1\n"
        "print(helpers._helpers[0]._process.pid, flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert is_alive(pid)
        owner.kill()
    assert within(10.0, lambda: not is_alive(pid))


def test_a_pack_of_one_chunk_is_encoded_by_a_helper_or_here() -> None:
    helpers = started()
    pack = Pack({"t": drawn("float32", 1024, "normal", 0)}, TWO)
    assert stored(pack, helpers) == stored(pack)
    helpers.close()
