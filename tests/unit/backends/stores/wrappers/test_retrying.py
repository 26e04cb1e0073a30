"""Each method of a store whose requests and replies get lost: what may be tried again, and what counts as done."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.stores.memory import MemoryStore
from holdfast.backends.stores.wrappers.held_memory import HeldMemory
from holdfast.backends.stores.wrappers.retrying import RetryingStore
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.store import Store
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError, UnavailableError
from holdfast.settings import MIB, PAGE_BYTES, ObjectSettings, Settings
from tests.doubles.faults import FaultPoint, Faults, FaultyStore, raise_error, stall_until
from tests.unit.backends.stores.wrappers.by_hand import ClockBySleep
from tests.unit.backends.stores.wrappers.network import LOST_AFTER, LOST_BEFORE, PASS, REFUSED, NetworkStore

KEY, NEW_KEY = "a/key", "a/moved"


class Rig:
    def __init__(self, *fates: str, settings: Settings | None = None) -> None:
        self.memory = MemoryStore(uuid.uuid4().hex)
        self.clock = ClockBySleep()
        left = iter(fates)
        self.network = NetworkStore(self.memory, lambda: next(left, PASS))
        self.store = RetryingStore(self.network, settings or Settings(), self.clock)

    def stored(self, key: str = KEY) -> bytes | None:
        try:
            return self.memory.get(key, 1 << 20)
        except MissingError:
            return None


class TestPutIfAbsent:
    def test_its_own_object_is_a_success(self) -> None:
        rig = Rig(LOST_AFTER)
        rig.store.put_if_absent(KEY, b"ours")
        assert rig.stored() == b"ours"
        assert [text.split()[0] for text in rig.network.requests] == ["put_if_absent", "put_if_absent", "get"]

    def test_the_comparison_is_tried_again_too(self) -> None:
        rig = Rig(LOST_AFTER, PASS, REFUSED, LOST_BEFORE, PASS, LOST_AFTER)
        rig.store.put_if_absent(KEY, b"ours")
        assert rig.stored() == b"ours"

    @pytest.mark.parametrize("theirs", (b"them", b"ours, and more", b"", b"our"))
    def test_another_object_is_a_lost_race(self, theirs: bytes) -> None:
        rig = Rig(LOST_BEFORE)
        rig.memory.put(KEY, theirs)
        with pytest.raises(ConflictError):
            rig.store.put_if_absent(KEY, b"ours")
        assert rig.stored() == theirs

    @pytest.mark.parametrize("fates", ((), (REFUSED,)))
    def test_equal_bytes_of_another_writer_are_a_lost_race_if_no_try_had_an_effect(
        self, fates: tuple[str, ...]
    ) -> None:
        rig = Rig(*fates)
        rig.memory.put(KEY, b"ours")
        with pytest.raises(ConflictError):
            rig.store.put_if_absent(KEY, b"ours")

    @pytest.mark.parametrize(
        ("fate", "text"), ((LOST_AFTER, "The outcome is unknown"), (REFUSED, "None of the requests took effect"))
    )
    def test_at_the_deadline_the_error_says_what_is_known(self, fate: str, text: str) -> None:
        rig = Rig(*[fate, REFUSED] * 1000)
        with pytest.raises(UnavailableError, match=text) as caught:
            rig.store.put_if_absent(KEY, b"ours")
        assert not isinstance(caught.value, TemporaryError)
        assert f"{rig.store.url}/{KEY}" in str(caught.value)


class TestOtherMethods:
    @pytest.mark.parametrize(
        "fates", ((LOST_BEFORE,), (LOST_AFTER,), (PASS, LOST_AFTER), (PASS, LOST_BEFORE), (PASS, LOST_AFTER) * 3)
    )
    @pytest.mark.parametrize("there", (None, b"", b"1", b"other"))
    def test_a_move_that_was_made_is_a_success(self, fates: tuple[str, ...], there: bytes | None) -> None:
        """Whether it was made or not: what is at the new key is replaced once, and the move is not taken for made."""
        rig = Rig(*fates)
        rig.memory.put(KEY, b"1")
        if there is not None:
            rig.memory.put(NEW_KEY, there)
        rig.store.move(KEY, NEW_KEY)
        assert (rig.stored(), rig.stored(NEW_KEY)) == (None, b"1")

    def test_what_came_to_the_old_key_after_a_move_stays(self) -> None:
        rig = Rig(PASS, LOST_AFTER)
        rig.memory.put(KEY, b"1")
        rig.clock.sleep = lambda seconds: rig.memory.put(KEY, b"2")  # type: ignore[method-assign]
        rig.store.move(KEY, NEW_KEY)
        assert (rig.stored(), rig.stored(NEW_KEY)) == (b"2", b"1")

    def test_a_move_of_nothing_is_missing(self) -> None:
        for fates in ((), (REFUSED,), (LOST_BEFORE,), (LOST_AFTER,)):
            with pytest.raises(MissingError):
                Rig(*fates).store.move(KEY, NEW_KEY)

    def test_a_listing_goes_on_where_it_was_cut(self) -> None:
        rig = Rig(PASS, REFUSED, PASS, LOST_AFTER, PASS, PASS, LOST_BEFORE, REFUSED)
        keys = [f"a/{number:02}" for number in range(11)]
        for key in keys:
            rig.memory.put(key, b"1")
        assert [entry.key for entry in rig.store.list("a/")] == keys
        assert rig.store.retry_counts.retries == 4
        with pytest.raises(InvalidError):
            rig.store.list("no slash")

    def test_ranges_that_were_taken_are_not_read_again(self) -> None:
        rig = Rig()
        rig.memory.put(KEY, bytes(range(100)))
        came: list[tuple[int, bytes]] = []
        ranges = [(start, start + 10) for start in range(0, 100, 10)]

        class CutAfterThree(ForwardingStore):
            def read_into(self, key, ranges, buffers, on_range=None) -> None:  # type: ignore[no-untyped-def]
                def take(number: int, data: memoryview) -> None:
                    if number == 3:
                        raise TemporaryError("connection cut")
                    on_range(number, data)

                self._inner.read_into(key, ranges, buffers, take)

        store = RetryingStore(CutAfterThree(rig.memory), Settings(), rig.clock)
        buffer = memoryview(bytearray(10))
        store.read_into(KEY, ranges, [buffer] * 10, lambda number, data: came.append((number, bytes(data))))
        assert came == [(number, bytes(range(start, stop))) for number, (start, stop) in enumerate(ranges)]
        assert store.retry_counts.retries == 3

    def test_an_error_of_the_taker_is_final(self) -> None:
        rig = Rig()
        rig.memory.put(KEY, b"0123456789")

        def refuse(number: int, data: memoryview) -> None:
            raise CorruptError("not what was saved")

        with pytest.raises(CorruptError, match="not what was saved"):
            rig.store.read_into(KEY, [(0, 5)], [memoryview(bytearray(5))], refuse)
        assert len(rig.network.requests) == 1

    def test_many_keys_are_deleted_in_batches(self) -> None:
        rig = Rig(PASS, REFUSED, LOST_AFTER)
        keys = [f"a/{number}" for number in range(2500)]
        for key in keys:
            rig.memory.put(key, b"")
        rig.store.delete(iter(keys))
        assert not list(rig.memory.list())
        assert len(rig.network.requests) == 5

    def test_a_call_that_hangs_is_abandoned(self) -> None:
        memory, released = MemoryStore(uuid.uuid4().hex), threading.Event()
        memory.put(KEY, b"1")
        faults = Faults(stall_until(released), names={"get"})
        settings = Settings(object_store=ObjectSettings(silence_timeout_seconds=0.01))
        store = RetryingStore(FaultyStore(memory, faults), settings, ClockBySleep())
        # The first try hangs until the end of the test.
        assert store.get(KEY, 1) == b"1"
        assert store.retry_counts.retries == store.retry_counts.throttled >= faults.met == 1
        released.set()

    def test_what_lasts_is_not_tried_again(self) -> None:
        faults = Faults(raise_error(UnavailableError), lasting=True)
        store = RetryingStore(FaultyStore(MemoryStore(uuid.uuid4().hex), faults), Settings(), ClockBySleep())
        calls: list[Callable[[], object]] = [
            lambda: store.size(KEY), lambda: store.get(KEY, 1), lambda: store.put(KEY, b""), lambda: list(store.list()),
            lambda: store.put_if_absent(KEY, b""), lambda: store.delete([KEY]), lambda: store.folders(),
            lambda: store.move(KEY, NEW_KEY), lambda: store.sync(""), lambda: store.link(KEY, NEW_KEY),
            lambda: store.identity(KEY), lambda: store.upload(KEY, 1, PAGE_BYTES),
            lambda: store.read_into(KEY, [(0, 1)], [memoryview(bytearray(1))]),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(UnavailableError, match="a fault was injected"):
                call()
        assert faults.met == len(calls)


class TestUploads:
    def test_an_object_sent_whole_is_completed_again(self) -> None:
        rig = Rig(PASS, LOST_AFTER, REFUSED, LOST_BEFORE)
        upload = rig.store.upload(KEY, 5, PAGE_BYTES)
        upload.write(0, memoryview(b"12345"))
        upload.complete()
        assert rig.stored() == b"12345"

    def test_parts_are_sent_again_and_their_memory_is_released_once(self) -> None:
        memory = MemoryStore(uuid.uuid4().hex)
        faults = Faults(raise_error(TemporaryError), names={"upload.write"}, at=2, after=True)
        store = RetryingStore(FaultyStore(memory, faults), Settings(), ClockBySleep())
        upload = store.upload(KEY, 2 * PAGE_BYTES, PAGE_BYTES)
        released: list[int] = []
        for number in range(2):
            data = memoryview(bytearray([number + 1]) * PAGE_BYTES)
            upload.write(number * PAGE_BYTES, data, lambda number=number: released.append(number))  # type: ignore[misc]
        upload.complete()
        assert memory.get(KEY, MIB) == b"\1" * PAGE_BYTES + b"\2" * PAGE_BYTES
        assert sorted(released) == [0, 1] and faults.counted == 3

    def test_memory_is_held_until_the_last_try_is_over(self) -> None:
        released: list[int] = []
        held = HeldMemory(lambda: released.append(1))
        abandoned, second = held.hold(), held.hold()
        second()
        second()
        held.let_go()
        assert not released
        abandoned()
        assert released == [1]

    def test_the_cap_is_shared_by_the_ranks(self) -> None:
        rig = Rig(settings=Settings(max_bytes_per_second=4 * MIB))
        store = rig.store.for_operation("save of step 7", 0, 4)
        data = memoryview(bytes(2 * MIB))
        began = rig.clock.seconds
        for number in range(11):
            upload = store.upload(f"pack-{number}", data.nbytes, data.nbytes)
            upload.write(0, data)
            upload.complete()
        assert rig.clock.seconds - began == pytest.approx(20)


class TestOperations:
    def test_a_save_has_one_deadline_and_the_store_all_counts(self) -> None:
        # Every second request fails: each call would succeed in the end.
        fates = iter(lambda: REFUSED, None)
        rig = Rig(settings=Settings(object_store=ObjectSettings(retry_seconds_per_save=3)))
        rig.network._draw = lambda: next(fates) if len(rig.network.requests) % 2 == 0 else PASS
        store = rig.store.for_operation("save of step 7", 0, 1)
        before = rig.store.retry_counts
        with pytest.raises(UnavailableError, match=r"may take 3 s, settings.object_store.retry_seconds_per_save"):
            for number in range(1000):
                store.put(f"key-{number}", b"")
        counts = store.retry_counts.since(before)
        assert counts == rig.store.retry_counts.since(before)
        assert counts.retries > 10 and 3 <= counts.seconds < 3.2
        # The next save begins anew, and so does the store itself.
        rig.store.for_operation("save of step 8", 0, 1).put("key", b"")
        rig.store.put("key", b"")

    def test_a_store_without_retries_is_left_as_it_is(self) -> None:
        memory = MemoryStore(uuid.uuid4().hex)
        assert memory.for_operation("save", 0, 1) is memory
        assert memory.retry_counts.retries == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_reads_while_a_thread_of_the_parent_was_asking() -> None:
    memory, released = MemoryStore(uuid.uuid4().hex), threading.Event()
    memory.put(KEY, b"1")
    asked = threading.Event()

    def hang(_: FaultPoint) -> None:
        asked.set()
        released.wait(60)

    store = RetryingStore(
        FaultyStore(memory, Faults(hang, names={"size"})),
        Settings(object_store=ObjectSettings(silence_timeout_seconds=60)),
    )
    limit = store._limit
    limit._most = 1
    limit._reset()
    asking = threading.Thread(target=lambda: store.size(KEY))
    asking.start()
    assert asked.wait(60)
    # The thread of the parent has the only slot.
    child = os.fork()
    if not child:
        os._exit(7 if store.get(KEY, 1) == b"1" else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    released.set()
    asking.join(60)


FATES = st.sampled_from([PASS, PASS, REFUSED, LOST_BEFORE, LOST_AFTER])
DAEMON_POOL = st.lists(
    st.tuples(st.sampled_from(["put", "put_if_absent", "replace", "delete", "move", "upload"]), st.integers(0, 2)),
    max_size=12,
)


@given(st.lists(FATES, max_size=60), DAEMON_POOL)
def test_any_order_of_faults_leaves_what_the_calls_say(fates: list[str], calls: list[tuple[str, int]]) -> None:
    """With a deadline for a few tries, a call succeeds, or its error says whether it may have had an effect."""
    rig = Rig(*fates, settings=Settings(object_store=ObjectSettings(retry_seconds_per_call=0.3)))
    model: dict[str, bytes] = {}
    moved = 0

    def made(method: str, key: str, data: bytes) -> dict[str, bytes]:
        """Make a call; return what must be stored if it succeeds."""
        nonlocal moved
        if method == "put":
            after = model | {key: data}
            rig.store.put(key, data)
        elif method == "replace":
            after = model | {key: data}
            rig.store.replace(key, data, model.get(key))
        elif method == "put_if_absent":
            after = model | {key: data}
            rig.store.put_if_absent(key, data)
        elif method == "delete":
            after = {each: value for each, value in model.items() if each != key}
            rig.store.delete([key])
        elif method == "move":
            moved += 1
            after = {f"moved-{moved}" if each == key else each: value for each, value in model.items()}
            rig.store.move(key, f"moved-{moved}")
        else:
            after = model | {key: data}
            upload = rig.store.upload(key, len(data), PAGE_BYTES)
            upload.write(0, memoryview(data))
            upload.complete()
        return after

    for number, (method, place) in enumerate(calls):
        key, data = f"key-{place}", b"content %d" % number
        before = dict(model)
        try:
            model = made(method, key, data)
        except (ConflictError, MissingError) as error:
            assert (key in before) is isinstance(error, ConflictError)
        except UnavailableError as error:
            found = content(rig.memory)
            if "None of the requests took effect" in str(error):
                assert found == before
            else:
                assert "outcome is unknown" in str(error)
                # Changed as asked, or not at all; the other keys are as they were.
                changed = {each for each in found.keys() | before.keys() if found.get(each) != before.get(each)}
                assert not changed or changed in ({key}, {key, f"moved-{moved}"})
                assert all(found.get(each) in (None, data, before.get(key)) for each in changed)
            model = found
        assert content(rig.memory) == model


def content(store: Store) -> dict[str, bytes]:
    return {entry.key: store.get(entry.key, 1 << 20) for entry in store.list()}
