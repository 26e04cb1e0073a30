"""Agents of nodes of peers: real processes that serve, over folders in the memory of this host."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from holdfast._face.near_folder import near_folder_at
from holdfast._face.peers.nodes import store_of, write_secret
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.types.epoch import Epoch, Holder
from holdfast.core.engine.child_python import command_of
from holdfast.settings import Settings
from holdfast.stored.leases.process import this_process
from holdfast.stored.leases.writer import hold_writer_lease
from holdfast.stored.peers.parity_files import parity_keys
from holdfast.stored.peers.roster import Member, Roster, write_roster
from holdfast.stored.peers.union import PeerStore
from holdfast.stored.repository.epochs import put_epoch
from holdfast.stored.repository.near_tier import ensure_near
from holdfast.stored.repository.two_roots import TwoRoots
from holdfast.training.runs.tiers.agent import AgentStarter
from holdfast.training.runs.tiers.agent_files import (
    JOB_FILE,
    LOG_FILE,
    AgentStatus,
    hold_job_lock,
    is_agent_running,
    read_serving,
    read_status,
)
from tests.distributed.peers.nodes import kill, node_memory
from tests.support.forked_processes import await_within

ATTEMPT = "step-000000000001/0123456789abcdef/"
SECRET = b"s" * 32
SETTINGS = Settings(lease_seconds=2.0)
await_ = partial(await_within, 30.0)


class Nodes:
    """Nodes with a folder and an agent each; the test is their job."""

    def __init__(self, memory: Path, root: Path, *, orphan_seconds: float = 0.5, linger_seconds: float = 0.5) -> None:
        self.url, self.root, self.memory = f"peers://{memory}", root, memory
        self.seconds = {"orphan_seconds": orphan_seconds, "linger_seconds": linger_seconds}
        self.names: list[str] = []
        self.locks: dict[str, int] = {}

    def folder(self, name: str) -> str:
        return str(self.memory / name)

    def start(
        self, name: str, secret: bytes = SECRET, *, awaits_roster: bool = True, orphan_seconds: float = 0
    ) -> None:
        """Start the agent of a node, and await that the agent listens."""
        os.makedirs(self.folder(name), mode=0o700, exist_ok=True)
        write_secret(self.folder(name), secret)
        self.locks[name] = hold_job_lock(self.folder(name))
        request = {"url": self.url, "node": name, "folder": self.folder(name), "root": str(self.root), **self.seconds}
        request |= {"host": "127.0.0.1", "port": 0, "awaits_roster": awaits_roster, "settings": asdict(SETTINGS)}
        request |= {"orphan_seconds": orphan_seconds} if orphan_seconds else {}
        command = [*command_of("holdfast._face.agent_api:main"), json.dumps(request)]
        AgentStarter(self.folder(name), command, SystemClock()).require()
        await_(lambda: read_serving(self.folder(name)) is not None)
        self.names.append(name)

    def meet(self) -> PeerStore:
        """Give each node the roster of all that listen; return their store, as a process on the first node has it."""
        members = []
        for name in self.names:
            serving = read_serving(self.folder(name))
            assert serving is not None
            members.append(Member(name, name, serving.host, serving.port))
        roster = Roster(str(self.root), None, tuple(members), made=time.time())
        folders = {name: near_folder_at(self.folder(name), SETTINGS) for name in self.names}
        for folder in folders.values():
            write_roster(folder, roster)
        return store_of(self.url, roster, self.names[0], folders, SECRET)

    def files(self) -> list[str]:
        """Return the packs and the parity on all nodes."""
        found = [*self.memory.glob("*/step-*/*/*"), *self.memory.glob("*/parity/*/*")]
        return sorted(path.relative_to(self.memory).parts[0] for path in found)

    def die(self) -> None:
        """End the job, as a kill of its ranks does."""
        while self.locks:
            os.close(self.locks.popitem()[1])

    def status(self, name: str) -> AgentStatus | None:
        return read_status(self.folder(name))

    def is_running(self, name: str) -> bool:
        return is_agent_running(self.folder(name))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with node_memory() as memory:
        nodes = Nodes(memory, tmp_path / "root")
        yield nodes
        nodes.die()


def note_job_elsewhere(near: PeerStore) -> Holder:
    """Put the file of a job whose process runs on another host; return the process."""
    holder = replace(this_process(SystemClock(), 2.0), boot="another", host="another")
    near.put(JOB_FILE, json.dumps(asdict(holder)).encode())
    return holder


def save_elsewhere(nodes: Nodes, near: PeerStore) -> TwoRoots:
    """Leave what a job of another host leaves that was killed in its first save: packs and parity that do not count."""
    run = TwoRoots(near, LocalStore(nodes.root, settings=SETTINGS))
    run_id = ensure_near(run, "1" * 32, "0")
    put_epoch(run, Epoch(1, run_id, note_job_elsewhere(near)))
    for name in nodes.names:
        folder = near_folder_at(nodes.folder(name), SETTINGS)
        folder.put(f"{ATTEMPT}r00000.safetensors", b"pack")
        folder.put(parity_keys(ATTEMPT)[1], b"parity")
    return run


def test_a_job_of_another_host_that_has_saved_nothing_lives_while_it_locks_the_node(nodes: Nodes) -> None:
    nodes.start("a")
    nodes.start("b")
    time.sleep(1.5)
    assert nodes.is_running("a"), "the job that holds the lock has no roster yet"
    note_job_elsewhere(nodes.meet())
    await_(lambda: nodes.status("a") is not None and nodes.status("b") is not None)
    time.sleep(1.5)
    assert [(status.state, status.is_running) for status in map(nodes.status, "ab") if status] == [
        ("watching", True)
    ] * 2
    nodes.die()
    await_(lambda: not nodes.is_running("a") and not nodes.is_running("b"))


def test_an_agent_without_the_secret_refuses_to_serve(nodes: Nodes) -> None:
    nodes.start("a", b"")
    serving = read_serving(nodes.folder("a"))
    assert serving is not None and "expected a secret of 32 bytes" in serving.error
    await_(lambda: not nodes.is_running("a"))


@pytest.mark.long
def test_an_agent_that_awaits_its_job_asks_the_others_by_one_client(nodes: Nodes) -> None:
    nodes.seconds["orphan_seconds"] = 60.0
    for name in ("a", "b"):
        nodes.start(name)
    nodes.meet()
    nodes.die()
    serving = read_serving(nodes.folder("b"))
    assert serving is not None
    time.sleep(3.0)
    # Closed connections stay in the table of the kernel for a minute. Each has two ends.
    ends = Path("/proc/net/tcp").read_text().count(f":{serving.port:04X} ")
    assert ends <= 8, "a client keeps its connection"


def test_an_agent_takes_the_drain_of_another_one_for_no_job_and_leaves_no_pack(nodes: Nodes) -> None:
    nodes.start("a")
    run = save_elsewhere(nodes, nodes.meet())
    assert nodes.files() == ["a", "a"]
    nodes.die()
    await_(lambda: (status := nodes.status("a")) is not None and status.state == "lingering")
    with hold_writer_lease(run, SystemClock(), 3.0, "1" * 32):
        await_(lambda: not nodes.is_running("a"))
    assert nodes.files() == []


@pytest.mark.long
@pytest.mark.parametrize("is_known", [True, False])
def test_an_agent_that_is_left_alone_ends_and_keeps_what_the_root_may_lack(nodes: Nodes, is_known: bool) -> None:
    for name in "abc":
        nodes.start(name)
    save_elsewhere(nodes, nodes.meet())
    await_(lambda: nodes.status("c") is not None)
    lost = [serving.pid for serving in (read_serving(nodes.folder(name)) for name in "ab") if serving is not None]
    if not is_known:
        kill(*lost)
    nodes.die()
    await_(lambda: (status := nodes.status("c")) is not None and status.state == "orphaned")
    kill(*lost)
    await_(lambda: not nodes.is_running("c"))
    assert ("c" in nodes.files()) is not is_known
    log = (nodes.memory / "c" / LOG_FILE).read_text()
    assert log.count("whether a job lives is unknown") <= 2 and ("keeps 2 files" in log) is not is_known
