"""Nodes with agents of their own: the store of one node over the wire, and all nodes as one store."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from holdfast._face.peers.nodes import seen_from_here, write_secret
from holdfast.agent.serving import PeerServer
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.peers.peer import Peer
from holdfast.base.ports.store import Store
from holdfast.base.wire.framing import Credentials, Protection
from holdfast.errors import UnavailableError
from holdfast.settings import Settings
from holdfast.stored.peers.parity_files import protect
from holdfast.stored.peers.roster import Member, Roster, write_roster
from holdfast.stored.peers.union import PeerStore
from holdfast.testing.store import StoreSuite
from tests.unit.agent.conversing import RUN, SECRET

ATTEMPT = "step-000000000020/0123456789abcdef/"
PART = 1 << 16


class Node:
    """A node: a folder, and the agent that serves the folder."""

    def __init__(self, folder: Path, protect: Callable[[Protection], int] | None = None) -> None:
        self.folder = folder
        self.store = LocalStore(folder, settings=Settings())
        credentials = Credentials(RUN, SECRET, folder.name)
        self.server = PeerServer(self.store, credentials, "127.0.0.1", protect=protect)
        self.peer = Peer(self.server.address, credentials, 5)

    def lose(self) -> None:
        """Lose the node with its memory."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        self.peer.close()
        self.server.close()


class Job:
    """Nodes, and the store as a rank of each node has it."""

    def __init__(self, folder: Path, count: int) -> None:
        names = [f"n{number}" for number in range(count)]
        self.nodes = {name: Node(folder / name, partial(self._protect, name)) for name in names}

    def _protect(self, name: str, task: Protection) -> int:
        return protect(self.folders(name), name, task.attempt, task.packs, task.bytes_per_second)

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()

    def folders(self, own: str, without: str = "") -> dict[str, Store]:
        """The folder of each node as one node reaches them."""
        return {name: node.store if name == own else node.peer for name, node in self.nodes.items() if name != without}

    def at(self, own: str, without: str = "") -> PeerStore:
        found = self.folders(own, without)
        return PeerStore("peers://run", found, own, [*found][:3])


class TestPeer(StoreSuite):
    is_asked_for_cached = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        node = Node(tmp_path / "n0")
        yield node.peer
        node.close()


@pytest.mark.long
class TestNodesTogether(StoreSuite):
    is_asked_for_cached = False
    test_writers_beside_movers_lose_nothing = None

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with closing(Job(tmp_path, 4)) as job:
            yield job.at("n3")


def put_packs(job: Job, sizes: tuple[int, ...]) -> dict[str, bytes]:
    packs = {}
    for number, (name, size) in enumerate(zip(job.nodes, sizes, strict=True)):
        key = f"{ATTEMPT}r{number:05d}.safetensors"
        packs[key] = np.random.default_rng(number).integers(0, 256, size, np.uint8).tobytes()
        upload = job.at(name).upload(key, size, PART)
        for start in range(0, size, PART):
            upload.write(start, memoryview(packs[key])[start : start + PART])
        upload.complete()
    return packs


def read(store: Store, key: str) -> bytes:
    memory = bytearray(store.size(key))
    store.read_into(key, [(0, len(memory))], [memoryview(memory)])
    return bytes(memory)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with closing(Job(tmp_path, 4)) as job:
        yield job


def test_a_node_that_dies_is_read_from_the_others(job: Job) -> None:
    packs = put_packs(job, (3_000_000, 2_000_001, 1_000_000, 2_500_000))
    written = {name: {key: len(data)} for name, (key, data) in zip(job.nodes, packs.items(), strict=True)}
    job.at("n0").put_if_absent("step-000000000020/manifest.json", b"manifest")
    for name, node in job.nodes.items():
        assert node.peer.protect(ATTEMPT, written, 1e9, 30) == (833_334 if name == "n0" else 1_000_000)
    before = job.at("n0")
    assert [read(before, key) for key in packs] == [*packs.values()]
    job.nodes["n2"].lose()
    for store in (before, job.at("n3"), job.at("n1", without="n2")):
        assert [read(store, key) for key in packs] == [*packs.values()]
        assert store.get("step-000000000020/manifest.json", 100) == b"manifest"
    job.nodes["n1"].lose()
    with pytest.raises(UnavailableError, match=r"members \[1, 2\] of a group of 4 are lost"):
        read(job.at("n0"), [*packs][2])


def test_a_folder_of_a_node_that_lives_elsewhere_now_is_not_read(job: Job, tmp_path: Path) -> None:
    def member(name: str, server: PeerServer) -> Member:
        return Member(name, name, *server.address)

    here, there = job.nodes["n0"], job.nodes["n1"]
    stale = LocalStore(tmp_path / "host" / "n1", settings=Settings())
    stale.put("latest", b"stale")
    moved = Roster(RUN, None, (member("n0", here.server), member("n1", job.nodes["n2"].server)), made=1.0)
    write_roster(stale, moved)
    own = LocalStore(tmp_path / "host" / "n0", settings=Settings())
    write_roster(own, Roster(RUN, None, (member("n0", here.server), member("n1", there.server)), made=2.0))
    write_secret(own.url, SECRET)
    there.store.put("latest", b"20")
    store = seen_from_here(f"peers://{tmp_path}/host", Settings())
    assert store.get("latest", 10) == b"20"
    write_roster(stale, Roster(RUN, None, (member("n0", here.server), member("n1", there.server)), made=2.0))
    assert seen_from_here(f"peers://{tmp_path}/host", Settings()).get("latest", 10) == b"stale", "read without an agent"
