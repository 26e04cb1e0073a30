"""The store over fsspec on OpenSSH: `pytest tests/campaign/on_sftp.py`. Needs sshd, ssh-keygen, and paramiko."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import fsspec.config
import pytest
import torch

import holdfast
from holdfast.backends.stores.fsspec.abilities import Abilities, abilities
from holdfast.backends.stores.fsspec.placing import Way
from holdfast.backends.stores.fsspec.store import FileSystemStore
from holdfast.backends.stores.wrappers.retrying import RetryingStore
from holdfast.base.ports.store import Store
from holdfast.settings import Settings
from holdfast.testing.store import StoreSuite
from tests.distributed.stores.object_cases import TRAINED
from tests.distributed.stores.object_worker import RACERS
from tests.distributed.stores.test_object_stores import work
from tests.everyday.test_file_systems import (  # noqa: F401 - run here too, with the fixture `url` below
    test_a_checkpoint_at_a_path,
    test_a_run_lives_there,
)
from tests.servers.sftp import SftpServer, sftp
from tests.support.gloo_worlds import Case, run_world

ROUNDS = int(os.environ.get("RACE_ROUNDS", "20"))


@pytest.fixture(scope="module")
def server() -> Iterator[SftpServer]:
    pytest.importorskip("paramiko")
    with sftp() as server:
        fsspec.config.conf["sftp"] = {"key_filename": str(server.key_file), "username": server.user}
        yield server
        del fsspec.config.conf["sftp"]


@pytest.fixture
def variables(server: SftpServer) -> dict[str, str]:
    return {"FSSPEC_SFTP_KEY_FILENAME": str(server.key_file), "FSSPEC_SFTP_USERNAME": server.user}


@pytest.fixture
def url(server: SftpServer) -> str:
    return server.new_url()


class TestSftp(StoreSuite):
    is_asked_for_cached: ClassVar[bool] = False

    @pytest.fixture
    def store(self, url: str) -> Store:
        settings = Settings()
        return RetryingStore(FileSystemStore(url, settings=settings), settings, requests_in_flight_max=8)


def test_what_openssh_can_do(url: str) -> None:
    store = FileSystemStore(url, settings=Settings())
    found = abilities(store.url, store.systems, store._clock)
    assert found == Abilities(Way.RENAME, replaces_at_once=True, spares_full_folders=True)


def test_one_of_eight_writers_wins(url: str, variables: dict[str, str], tmp_path: Path) -> None:
    work("race", url, ROUNDS, tmp_path / "outcomes", variables=variables)
    outcomes = [json.loads((tmp_path / f"outcomes.{number}").read_text()) for number in range(RACERS)]
    for turn in range(ROUNDS):
        came = [each[turn] for each in outcomes]
        assert sorted(came) == ["ConflictError"] * (RACERS - 1) + ["won"], f"round {turn}: {came}"
        assert set(holdfast.open_checkpoint(f"{url}/{turn}").read("winner").tolist()) == {came.index("won")}


def test_two_ranks_train(url: str, variables: dict[str, str], tmp_path: Path) -> None:
    case = Case("tests.distributed.stores.object_cases:trains", {"url": url, "variables": variables})
    for value in run_world(2, [case], tmp_path).values("trains"):
        assert value == TRAINED


def _reads(url: str) -> None:
    assert holdfast.open_checkpoint(url).read("weights")[9] == 9


def test_a_forked_process_reads(url: str) -> None:
    holdfast.save(url, {"weights": torch.arange(10)}, process_group=False)
    _reads(url)
    process = multiprocessing.get_context("fork").Process(target=_reads, args=(url,))
    process.start()
    process.join()
    assert process.exitcode == 0
    _reads(url)


def test_a_large_tensor_goes_through_many_packs(url: str) -> None:
    state = {"weights": torch.randn(40 << 20 >> 2, generator=torch.Generator().manual_seed(1)), "bias": torch.ones(9)}
    holdfast.save(url, state, process_group=False)
    loaded = {"weights": torch.zeros_like(state["weights"]), "bias": torch.zeros(9)}
    holdfast.load(url, loaded, process_group=False)
    assert torch.equal(loaded["weights"], state["weights"]) and torch.equal(loaded["bias"], state["bias"])


def test_connections_that_are_cut_are_made_anew(url: str, server: SftpServer) -> None:
    with holdfast.CheckpointManager(url, process_group=False, preemption=False) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"weights": torch.full((1000,), float(step))}).wait()
            for child in _children(server.processes["sshd"].pid):
                os.kill(child, 9)
        state = {"weights": torch.zeros(1000)}
        assert manager.load(state) == 3 and state["weights"][0] == 3


def _children(pid: int) -> list[int]:
    found = []
    for each in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path("/proc", each, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found += [int(each), *_children(int(each))]
    return found
