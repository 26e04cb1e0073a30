"""Ranks as threads of one process, and the suites that every key-value store and comm must pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

import pytest

from holdfast.backends.alone import InProcessKeyValueStore
from holdfast.base.ports.comm import Comm, KeyValueStore
from holdfast.errors import InvalidError, UnavailableError, first_three

_Result = TypeVar("_Result")

_TIMEOUT_SECONDS = 30.0


class ThreadGroup:
    """What the ranks of one group share: a key-value store, and collectives with a deadline."""

    def __init__(self, world_size: int, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
        """Make a group of `world_size` ranks; a collective waits at most `timeout_seconds` for the others."""
        self.world_size = world_size
        self.key_value_store = InProcessKeyValueStore()
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._rounds: list[dict[int, object]] = []
        self._calls = [0] * world_size
        self._dead = False

    def meet(self, rank: int, payload: _Result) -> list[_Result]:
        """Return every rank's payload once all have called.

        Raises:
            UnavailableError: A rank did not call in time, or has died.
        """
        with self._changed:
            number = self._calls[rank]
            self._calls[rank] += 1
            if number == len(self._rounds):
                self._rounds.append({})
            payloads = self._rounds[number]
            payloads[rank] = payload
            self._changed.notify_all()
            # A collective that all ranks have reached is complete, even if a rank dies afterwards.
            self._changed.wait_for(lambda: len(payloads) == self.world_size or self._dead, self._timeout_seconds)
            if len(payloads) < self.world_size:
                absent = [other for other in range(self.world_size) if other not in payloads]
                raise UnavailableError(f"rank {rank}: ranks {first_three(absent)} did not call collective {number}")
            return [cast(_Result, payloads[other]) for other in range(self.world_size)]

    def rank_died(self) -> None:
        """Make every collective that waits for a rank fail from now on, as after the loss of a process."""
        with self._changed:
            self._dead = True
            self._changed.notify_all()


class ThreadComm:
    """One rank of a group of threads."""

    timeout_seconds: float | None = None
    """A group of threads trains nothing."""

    group_id = "threads"
    """Each group has a key-value store of its own."""

    def __init__(self, group: ThreadGroup, rank: int, key_value_store: KeyValueStore | None = None) -> None:
        """Join a group.

        Args:
            group: What the ranks share.
            rank: This rank.
            key_value_store: This rank's view of the key-value store, if it has one of its own.
        """
        self._group = group
        self.rank = rank
        self.world_size = group.world_size
        self.key_value_store = group.key_value_store if key_value_store is None else key_value_store
        """This rank's view of the key-value store."""

    def broadcast(self, payload: bytes | None) -> bytes:
        """Return rank 0's payload."""
        return self._group.meet(self.rank, bytes(payload or b"") if self.rank == 0 else b"")[0]

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, by rank."""
        return self._group.meet(self.rank, bytes(payload))

    def bitwise_or(self, payload: bytes) -> bytes:
        """Return the bitwise OR of the payloads of all ranks."""
        payloads = self._group.meet(self.rank, bytes(payload))
        sizes = [len(each) for each in payloads]
        if len({*sizes}) > 1:
            raise InvalidError(f"rank {self.rank}: payloads have {first_three(sizes)} bytes; expected one length")
        joined = 0
        for each in payloads:
            joined |= int.from_bytes(each)
        return joined.to_bytes(len(payload))

    def exchange(self, gives: Mapping[int, Sequence[memoryview]], takes: Mapping[int, Sequence[memoryview]]) -> None:
        """Send bytes to other ranks and receive theirs."""
        sent = {rank: [bytes(buffer) for buffer in buffers] for rank, buffers in gives.items()}
        for sender, received in enumerate(self._group.meet(self.rank, sent)):
            taken = takes.get(sender, ())
            sizes = [len(data) for data in received.get(self.rank, [])]
            expected = [len(buffer) for buffer in taken]
            if sizes != expected:
                raise InvalidError(f"rank {self.rank}: rank {sender} sends {sizes} bytes; expected {expected}")
            for buffer, data in zip(taken, received.get(self.rank, []), strict=True):
                buffer[:] = data


def run_ranks(
    world_size: int,
    function: Callable[[ThreadComm], _Result],
    *,
    group: ThreadGroup | None = None,
    view_of: Callable[[int, KeyValueStore], KeyValueStore] = lambda _, key_value_store: key_value_store,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> list[_Result]:
    """Return what `function` returned on each rank, by rank.

    Args:
        world_size: Number of ranks, one thread each.
        function: What each rank runs.
        group: What the ranks share; None: a new group.
        view_of: Returns a rank's own view of the key-value store, given the rank and the store.
        timeout_seconds: Limit for the whole run.
    Raises:
        ExceptionGroup: One error per failed rank, with its rank in a note.
    """
    results: dict[int, _Result] = {}

    def keep_result(comm: ThreadComm) -> None:
        results[comm.rank] = function(comm)

    outcomes = outcomes_of_ranks(world_size, keep_result, group=group, view_of=view_of, timeout_seconds=timeout_seconds)
    failures = [failure for failure in outcomes if failure is not None]
    if failures:
        raise BaseExceptionGroup(f"{len(failures)} of {world_size} ranks failed", failures)
    return [results[rank] for rank in range(world_size)]


def outcomes_of_ranks(
    world_size: int,
    function: Callable[[ThreadComm], _Result],
    *,
    group: ThreadGroup | None = None,
    view_of: Callable[[int, KeyValueStore], KeyValueStore] = lambda _, key_value_store: key_value_store,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> list[_Result | BaseException]:
    """Return what `function` returned or raised on each rank; arguments as for `run_ranks`."""
    shared = ThreadGroup(world_size, timeout_seconds=timeout_seconds) if group is None else group
    outcomes: list[_Result | BaseException] = [TimeoutError("still running")] * world_size

    def work(rank: int) -> None:
        comm = ThreadComm(shared, rank, view_of(rank, shared.key_value_store))
        try:
            outcomes[rank] = function(comm)
        except BaseException as error:
            error.add_note(f"on rank {rank}")
            outcomes[rank] = error
            shared.rank_died()

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_seconds
    for rank, thread in enumerate(threads):
        thread.join(max(deadline - time.monotonic(), 0.0))
        if thread.is_alive():
            outcomes[rank] = TimeoutError(f"rank {rank} is still running after {timeout_seconds} s")
            shared.rank_died()
    return outcomes


class KeyValueStoreSuite:
    """Every promise of `KeyValueStore`. Subclass it in a test module and override the fixture `key_value_store`."""

    @pytest.fixture
    def key_value_store(self) -> KeyValueStore:
        """Return an empty key-value store; override."""
        raise NotImplementedError("override the fixture `key_value_store` with one that returns an empty store")

    def test_set_and_get(self, key_value_store: KeyValueStore) -> None:
        data = bytes(range(256))
        key_value_store.set("a/b", data, 5.0)
        key_value_store.set("c", b"1", 5.0)
        assert key_value_store.get_many(["c", "a/b", "c"], 5.0) == [b"1", data, b"1"]
        assert key_value_store.get_many([], 5.0) == []

    def test_set_again_replaces(self, key_value_store: KeyValueStore) -> None:
        key_value_store.set("key", b"longer before", 5.0)
        key_value_store.set("key", b"after", 5.0)
        assert key_value_store.get_many(["key"], 5.0) == [b"after"]

    def test_get_waits_until_every_key_is_set(self, key_value_store: KeyValueStore) -> None:
        key_value_store.set("first", b"1", 5.0)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(key_value_store.get_many, ["first", "second"], 30.0)
            assert not found.done()
            key_value_store.set("second", b"2", 5.0)
            assert found.result(30.0) == [b"1", b"2"]

    def test_a_wait_on_one_thread_holds_up_no_other(self, key_value_store: KeyValueStore) -> None:
        with ThreadPoolExecutor(4) as pool:
            waits = [pool.submit(key_value_store.wait, [f"later/{number}"], 30.0) for number in range(4)]
            for number in range(4):
                key_value_store.set(f"other/{number}", b"1", 5.0)
                assert not any(wait.done() for wait in waits)
            for number in range(4):
                key_value_store.set(f"later/{number}", b"1", 5.0)
            for wait in waits:
                assert wait.result(30.0) is None

    def test_a_wait_that_runs_out_is_a_timeout_and_the_board_lives_on(self, key_value_store: KeyValueStore) -> None:
        key_value_store.set("there", b"1", 5.0)
        for wait in (key_value_store.get_many, key_value_store.wait):
            with pytest.raises(TimeoutError):
                wait(["there", "never"], 0.05)
        assert key_value_store.get_many(["there"], 5.0) == [b"1"]

    def test_wait_for_what_is_there_returns_at_once(self, key_value_store: KeyValueStore) -> None:
        key_value_store.set("key", b"1", 5.0)
        key_value_store.wait(["key"], 0.5)
        key_value_store.wait([], 0.5)

    def test_present_does_not_wait(self, key_value_store: KeyValueStore) -> None:
        assert not key_value_store.present("key")
        key_value_store.set("key", b"1", 5.0)
        assert key_value_store.present("key")
        key_value_store.add("count", 1, 5.0)
        assert key_value_store.present("count")
        assert key_value_store.present("key", "count")
        assert not key_value_store.present("key", "never", "count")

    def test_add_counts_every_thread(self, key_value_store: KeyValueStore) -> None:
        with ThreadPoolExecutor(4) as pool:
            totals = list(pool.map(lambda _: key_value_store.add("count", 1, 30.0), range(64)))
        assert sorted(totals) == list(range(1, 65))
        assert key_value_store.add("count", 10, 5.0) == 74

    def test_compare_set_sets_what_is_absent_and_only_that(self, key_value_store: KeyValueStore) -> None:
        assert key_value_store.compare_set("key", b"", b"first", 5.0) == b"first"
        assert key_value_store.compare_set("key", b"", b"second", 5.0) == b"first"
        assert key_value_store.get_many(["key"], 5.0) == [b"first"]

    def test_compare_set_replaces_what_was_expected(self, key_value_store: KeyValueStore) -> None:
        key_value_store.set("key", b"before", 5.0)
        assert key_value_store.compare_set("key", b"other", b"after", 5.0) == b"before"
        assert key_value_store.compare_set("key", b"before", b"after", 5.0) == b"after"
        assert key_value_store.get_many(["key"], 5.0) == [b"after"]

    def test_compare_set_has_one_winner(self, key_value_store: KeyValueStore) -> None:
        with ThreadPoolExecutor(4) as pool:
            for turn in range(20):
                calls = [
                    pool.submit(key_value_store.compare_set, f"key{turn}", b"", b"%d" % number, 30.0)
                    for number in range(8)
                ]
                values = {call.result(30.0) for call in calls}
                assert len(values) == 1
                assert key_value_store.get_many([f"key{turn}"], 5.0) == list(values)

    def test_compare_set_wakes_who_waits(self, key_value_store: KeyValueStore) -> None:
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(key_value_store.get_many, ["key"], 30.0)
            key_value_store.compare_set("key", b"", b"1", 5.0)
            assert found.result(30.0) == [b"1"]

    def test_delete_forgets(self, key_value_store: KeyValueStore) -> None:
        for key in ("a", "b", "c"):
            key_value_store.set(key, b"1", 5.0)
        key_value_store.delete(["a", "c", "never"])
        key_value_store.delete([])
        assert [key_value_store.present(key) for key in ("a", "b", "c")] == [False, True, False]
        with pytest.raises(TimeoutError):
            key_value_store.get_many(["a"], 0.05)
        assert key_value_store.compare_set("a", b"", b"anew", 5.0) == b"anew"


class CommSuite:
    """Every promise of `Comm`. Subclass it in a test module and override `run`."""

    def run(self, world_size: int, function: Callable[[Comm], object]) -> list[object]:
        """Return what `function` returned on each rank; override."""
        raise NotImplementedError("override `run` with one that calls the function on every rank")

    @pytest.mark.parametrize("world_size", (1, 2, 5))
    def test_ranks_and_size(self, world_size: int) -> None:
        found = self.run(world_size, lambda comm: (comm.rank, comm.world_size))
        assert found == [(rank, world_size) for rank in range(world_size)]

    def test_the_id_of_the_group_is_the_same_on_every_rank(self) -> None:
        assert len({*self.run(3, lambda comm: comm.group_id)}) == 1

    @pytest.mark.parametrize("world_size", (1, 4))
    @pytest.mark.parametrize("payload", (b"", b"\0", bytes(range(256)) * 300))
    def test_broadcast_gives_the_payload_of_rank_0(self, world_size: int, payload: bytes) -> None:
        found = self.run(world_size, lambda comm: comm.broadcast(payload if comm.rank == 0 else None))
        assert found == [payload] * world_size

    @pytest.mark.parametrize("world_size", (1, 4))
    def test_all_gather_gives_every_payload_by_rank(self, world_size: int) -> None:
        found = self.run(world_size, lambda comm: comm.all_gather(bytes([comm.rank + 1]) * 1000 * comm.rank))
        assert found == [[bytes([rank + 1]) * 1000 * rank for rank in range(world_size)]] * world_size

    def test_all_gather_of_nothing(self) -> None:
        assert self.run(3, lambda comm: comm.all_gather(b"")) == [[b""] * 3] * 3

    @pytest.mark.parametrize("world_size", (1, 2, 5))
    def test_bitwise_or_joins_the_bits_of_all_ranks(self, world_size: int) -> None:
        found = self.run(world_size, lambda comm: comm.bitwise_or(bytes((1 << comm.rank, 0, 128)) * 1000))
        assert found == [bytes(((1 << world_size) - 1, 0, 128)) * 1000] * world_size

    def test_bitwise_or_of_nothing(self) -> None:
        assert self.run(3, lambda comm: comm.bitwise_or(b"")) == [b""] * 3

    @pytest.mark.parametrize("world_size", (1, 2, 5))
    def test_exchange_gives_every_rank_what_is_meant_for_it(self, world_size: int) -> None:
        def sent(sender: int, receiver: int) -> list[bytes]:
            """Return nothing for some pairs of ranks, several buffers of unequal lengths for others."""
            return [
                bytes([sender, receiver, number]) * (1 + 1000 * sender + number)
                for number in range((sender + receiver) % 3)
            ]

        def talk(comm: Comm) -> dict[int, list[bytes]]:
            others = [rank for rank in range(comm.world_size) if rank != comm.rank]
            gives = {rank: [memoryview(bytearray(data)) for data in sent(comm.rank, rank)] for rank in others}
            takes = {rank: [memoryview(bytearray(len(data))) for data in sent(rank, comm.rank)] for rank in others}
            comm.exchange(gives, takes)
            return {rank: [bytes(buffer) for buffer in buffers] for rank, buffers in takes.items()}

        expected = [
            {sender: sent(sender, rank) for sender in range(world_size) if sender != rank} for rank in range(world_size)
        ]
        assert self.run(world_size, talk) == expected

    def test_exchange_gives_the_same_memory_to_several(self) -> None:
        def talk(comm: Comm) -> bytes:
            buffer = memoryview(bytearray(b"once" * 1000 if comm.rank == 0 else 4000))
            if comm.rank == 0:
                comm.exchange({1: [buffer[:2000], buffer[2000:]], 2: [buffer[:2000]]}, {})
            else:
                comm.exchange({}, {0: [buffer[:2000], buffer[2000:]] if comm.rank == 1 else [buffer[:2000]]})
            return bytes(buffer)

        first, second, third = self.run(3, talk)
        assert (first, second, third) == (b"once" * 1000, b"once" * 1000, b"once" * 500 + bytes(2000))

    def test_an_exchange_in_which_a_rank_has_no_part(self) -> None:
        def talk(comm: Comm) -> bytes:
            buffer = memoryview(bytearray(b"x" if comm.rank == 0 else b"-"))
            comm.exchange({2: [buffer]} if comm.rank == 0 else {}, {0: [buffer]} if comm.rank == 2 else {})
            comm.exchange({}, {})
            return bytes(buffer) + comm.all_gather(b"")[0]

        assert self.run(3, talk) == [b"x", b"-", b"x"]

    def test_collectives_follow_each_other(self) -> None:
        def talk(comm: Comm) -> list[object]:
            results: list[object] = []
            for turn in range(10):
                results.append(comm.broadcast(b"%d" % turn if comm.rank == 0 else None))
                results.append(comm.all_gather(b"%d-%d" % (turn, comm.rank)))
            return results

        found = self.run(3, talk)
        assert found[0] == found[1] == found[2]
        assert found[0][-1] == [b"9-0", b"9-1", b"9-2"]  # type: ignore[index]

    def test_the_board_is_one_for_all_ranks(self) -> None:
        def talk(comm: Comm) -> list[bytes]:
            comm.key_value_store.set(f"from/{comm.rank}", b"%d" % comm.rank, 30.0)
            return comm.key_value_store.get_many([f"from/{rank}" for rank in range(comm.world_size)], 30.0)

        assert self.run(4, talk) == [[b"0", b"1", b"2", b"3"]] * 4
