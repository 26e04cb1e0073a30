"""The suites of key-value stores and comms on every implementation."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from holdfast.backends.alone import AloneComm, InProcessKeyValueStore
from holdfast.backends.torch.comm import SoloComm
from holdfast.backends.torch.key_value_store import TorchKeyValueStore
from holdfast.base.ports.comm import Comm, KeyValueStore
from holdfast.errors import UnavailableError
from tests.doubles.comm import (
    CommSuite,
    KeyValueStoreSuite,
    ThreadComm,
    ThreadGroup,
    outcomes_of_ranks,
    run_ranks,
)


class TestThreadBoard(KeyValueStoreSuite):
    @pytest.fixture
    def key_value_store(self) -> KeyValueStore:
        return InProcessKeyValueStore()


class TestOwnBoard(KeyValueStoreSuite):
    @pytest.fixture
    def key_value_store(self) -> KeyValueStore:
        return AloneComm().key_value_store


class TestTorchBoardOverHashStore(KeyValueStoreSuite):
    @pytest.fixture
    def key_value_store(self) -> KeyValueStore:
        return TorchKeyValueStore(dist.PrefixStore("suite", dist.HashStore()))


class TestTorchBoardOverFileStore(KeyValueStoreSuite):
    @pytest.fixture
    def key_value_store(self, tmp_path: Path) -> KeyValueStore:
        return TorchKeyValueStore(dist.PrefixStore("suite", dist.FileStore(str(tmp_path / "store"), 1)))


class TestTorchBoardOverTCPStore(KeyValueStoreSuite):
    @pytest.fixture
    def key_value_store(self) -> KeyValueStore:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
        return TorchKeyValueStore(dist.PrefixStore("suite", store))


class TestThreadComm(CommSuite):
    def run(self, world_size: int, function: Callable[[Comm], object]) -> list[object]:
        return run_ranks(world_size, function)

    def test_a_dead_rank_fails_the_others(self) -> None:
        def talk(comm: ThreadComm) -> None:
            if comm.rank == 1:
                raise ValueError("dead")
            comm.all_gather(b"")

        found = outcomes_of_ranks(3, talk)
        assert [type(each) for each in found] == [UnavailableError, ValueError, UnavailableError]
        with pytest.raises(ExceptionGroup) as raised:
            run_ranks(3, talk)
        assert len(raised.value.exceptions) == 3

    def test_a_rank_that_never_comes_fails_the_others(self) -> None:
        group = ThreadGroup(3, timeout_seconds=0.1)
        found = outcomes_of_ranks(3, lambda comm: b"" if comm.rank == 2 else comm.all_gather(b""), group=group)
        assert [type(each) for each in found] == [UnavailableError, UnavailableError, bytes]


def test_one_process_alone_talks_to_itself() -> None:
    comm = SoloComm()
    assert (comm.rank, comm.world_size) == (0, 1)
    assert comm.broadcast(b"1") == b"1"
    assert comm.all_gather(b"2") == [b"2"]
