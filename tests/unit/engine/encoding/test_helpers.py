"""Helper processes: packs have the same bytes with them and without, whatever becomes of them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.clock import SystemClock
from holdfast.engine.encoding import helper_process
from holdfast.engine.encoding.encode import Encoder
from holdfast.engine.encoding.helper_messages import SLOTS
from holdfast.engine.encoding.helper_process import CodingHelpers, Helper
from holdfast.engine.encoding.meter import SaveMeter
from holdfast.errors import UnavailableError
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.testing.faults import Faults, FaultyStore, raise_error
from holdfast.types.coding import Kind
from holdfast.wiring import CODING_ENTRY, codecs
from tests.coded_packs import KEY, KINDS, SMALL, Pack, drawn, memory, with_pair
from tests.coding_helpers import BREAKING, FAILING

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


def test_a_helper_encodes_and_every_slot_comes_back() -> None:
    helpers = started()
    helper, pack = the_helper(helpers), of_many_chunks()
    tasks: list[int] = []
    begin = helper.begin
    helper.begin = lambda *of: (tasks.append(1), begin(*of))[1]  # type: ignore[method-assign]
    assert stored(pack, helpers) == stored(pack)
    assert len(tasks) > 10 and are_slots_free(helpers)
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

    if has_units:
        os.kill(pid, signal.SIGSTOP)
    pack.write(store, written=kill_it, helpers=helpers)
    assert store.get(KEY, 1 << 30) == stored(pack)
    with helpers.lent() as lent:
        assert lent == []
    (record,) = [each for each in caplog.records if "is lost" in each.message]
    assert str(pid) in record.message and "compression_threads" in record.message
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
    assert "it has ended" in caplog.text
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


def test_processor_time_of_helpers_counts() -> None:
    helpers, kind = started(), Kind("float32", "parameter")
    pack = Pack({"t": drawn("float32", 1024 * 200, "normal", 0)}, TWO)
    meter, encoder = SaveMeter(SystemClock(), {"t": kind}), Encoder(codecs(), TWO, helpers)

    def append(_: object) -> None:
        pass

    os.kill(pid := pid_of(the_helper(helpers)), signal.SIGSTOP)
    threading.Timer(0.1, os.kill, (pid, signal.SIGCONT)).start()
    encoder.encode(pack.plan, encoder.from_sources(pack.sources), pack.weights(), append, lambda _: None, meter)
    measured = meter.measured()
    assert measured.coded[kind].raw_bytes == 4096 * 200
    # The wait for it is no coding.
    assert 0 < measured.coded[kind].seconds < 10 and measured.processor_seconds >= measured.coded[kind].seconds
    helpers.close()


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
        with helpers.lent() as lent:
            is_none = not lent
        helpers.close()
        os._exit(0 if is_none else 1)
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
