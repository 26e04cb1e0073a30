"""The folders of several nodes as one store, with nodes that are lost or silent."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.backends.stores.local import LocalStore
from holdfast.base.ports.store import Store
from holdfast.errors import ConflictError, InvalidError, MissingError, UnavailableError
from holdfast.settings import Settings
from holdfast.stored.peers.parity_files import WINDOW_BYTES, parity_keys, protect
from holdfast.stored.peers.union import PeerStore
from holdfast.testing.store import StoreSuite

ATTEMPT = "step-000000000020/0123456789abcdef/"
PART = 1 << 16
CALLS = {"get", "size", "list", "folders", "read_into", "put", "put_if_absent", "delete", "move"}


class SilentStore(LocalStore):
    """The folder of a node that does not answer while it is silent."""

    is_silent = False

    def __getattribute__(self, name: str) -> object:
        if name in CALLS and object.__getattribute__(self, "is_silent"):
            raise UnavailableError(f"{object.__getattribute__(self, 'url')}: no answer within 10 s. Start the agent")
        return super().__getattribute__(name)


class Nodes:
    """The folders of some nodes, and the store as a rank of each node has it."""

    def __init__(self, folder: Path, count: int, keepers: int = 3) -> None:
        self.folder, self.names = folder, [f"node-{number}" for number in range(count)]
        self.keepers = self.names[:keepers]
        self.packs: dict[str, dict[str, int]] = {name: {} for name in self.names}
        self.stores: dict[str, SilentStore] = {name: self.new_store(name) for name in self.names}

    def new_store(self, name: str) -> SilentStore:
        return SilentStore(self.folder / name, settings=Settings())

    def at(self, number: int, names: list[str] | None = None) -> PeerStore:
        nodes: Mapping[str, Store] = {name: self.stores[name] for name in names or self.names}
        return PeerStore("peers://run", nodes, self.names[number], [each for each in self.keepers if each in nodes])

    def lose(self, number: int) -> None:
        """Lose a node with its memory; an empty one has its place."""
        shutil.rmtree(self.folder / self.names[number])

    def put_packs(self, sizes: list[int]) -> dict[str, bytes]:
        """Write a pack on each node; return all."""
        packs = {}
        for number, size in enumerate(sizes):
            key = f"{ATTEMPT}r{number:05d}.safetensors"
            self.packs[self.names[number]] = {key: size}
            packs[key] = np.random.default_rng(number).integers(0, 256, size, np.uint8).tobytes()
            upload = self.at(number).upload(key, size, PART)
            for start in range(0, size, PART):
                upload.write(start, memoryview(packs[key])[start : start + PART])
            upload.complete()
        return packs

    def protect(self, names: list[str] | None = None) -> None:
        for name in names or self.names:
            protect({each: self.stores[each] for each in names or self.names}, name, ATTEMPT, self.packs)


def read(store: Store, key: str, start: int = 0, stop: int | None = None) -> bytes:
    memory = bytearray((store.size(key) if stop is None else stop) - start)
    store.read_into(key, [(start, start + len(memory))], [memoryview(memory)])
    return bytes(memory)


class TestPeerStore(StoreSuite):
    is_asked_for_cached = False
    # Keepers move an object one after the other, and the writer lease leaves one writer.
    test_writers_beside_movers_lose_nothing = None

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return Nodes(tmp_path, 4).at(3)


class TestPeerStoreOfOneNode(StoreSuite):
    is_asked_for_cached = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return Nodes(tmp_path, 1).at(0)


LOSSES = [(4, [700_000, 1_234_567, 0, 999_999]), (2, [300_000, 5]), (3, [1, 1, 400_000]), (5, [65_536] * 5)]


@pytest.mark.parametrize(("count", "sizes"), LOSSES, ids=str)
def test_any_one_lost_node_is_read_through_parity(tmp_path: Path, count: int, sizes: list[int]) -> None:
    nodes = Nodes(tmp_path, count)
    packs = nodes.put_packs(sizes)
    nodes.protect()
    for lost in range(count):
        shutil.move(tmp_path / nodes.names[lost], tmp_path / "away")
        store = nodes.at((lost + 1) % count)
        for key, data in packs.items():
            assert read(store, key) == data
            assert read(store, key, len(data) // 3, 2 * len(data) // 3) == data[len(data) // 3 : 2 * len(data) // 3]
            taken: list[bytes] = []
            halves = [(0, len(data) // 2), (len(data) // 2, len(data))]
            memory = [memoryview(bytearray(stop - start)) for start, stop in halves]
            store.read_into(key, halves, memory, lambda number, view: taken.append(bytes(view)))  # noqa: B023
            assert b"".join(taken) == data
        shutil.rmtree(tmp_path / nodes.names[lost], ignore_errors=True)
        shutil.move(tmp_path / "away", tmp_path / nodes.names[lost])


def test_two_lost_nodes_of_a_group_are_refused_and_of_two_groups_read(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 4)
    packs = nodes.put_packs([100_000, 200_000, 150_000, 50_000])
    nodes.protect(nodes.names[:2])
    nodes.protect(nodes.names[2:])
    nodes.lose(1)
    nodes.lose(2)
    store = nodes.at(0)
    assert [read(store, key) for key in packs] == [*packs.values()]
    nodes.lose(3)
    with pytest.raises(MissingError, match="r00002"):
        read(nodes.at(0), [*packs][2])
    assert read(nodes.at(0), [*packs][1]) == [*packs.values()][1]


def test_a_silent_node_is_no_absent_one(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 5)
    packs = nodes.put_packs([50_000] * 5)
    nodes.stores["node-4"].is_silent = True
    store = nodes.at(0)
    with pytest.raises(UnavailableError, match="node-4"):
        read(store, [*packs][4])
    store.delete([[*packs][4]])  # The other nodes have removed the pack.
    for name in ("node-1", "node-2", "node-3"):
        nodes.stores[name].is_silent = True
    with pytest.raises(UnavailableError, match="may still have objects"):
        store.delete([[*packs][4]])
    for each in nodes.stores.values():
        each.is_silent = False
    nodes.protect()
    nodes.stores["node-4"].is_silent = True
    assert read(nodes.at(0), [*packs][4]) == [*packs.values()][4], "through parity"
    nodes.stores["node-4"].is_silent = False
    assert read(store, [*packs][4]) == [*packs.values()][4], "the same store, once the node answers"


def test_a_node_that_dies_while_it_is_read_is_read_through_parity(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 4)
    packs = nodes.put_packs([200_000] * 4)
    nodes.protect()
    store, key, taken = nodes.at(0), [*packs][2], list[tuple[int, bytes]]()
    bounds = [(0, 50_000), (50_000, 120_000), (120_000, 200_000)]

    def dies(key: str, ranges: Any, buffers: Any, on_range: Any = None) -> None:
        LocalStore.read_into(nodes.stores["node-2"], key, ranges[:1], buffers[:1], on_range)
        shutil.rmtree(tmp_path / "node-2")
        raise UnavailableError("the node died")

    def take(number: int, view: memoryview) -> None:
        taken.append((number, bytes(view)))

    nodes.stores["node-2"].read_into = dies  # type: ignore[method-assign]
    store.read_into(key, bounds, [memoryview(bytearray(stop - start)) for start, stop in bounds], take)
    assert taken == [(number, packs[key][start:stop]) for number, (start, stop) in enumerate(bounds)]


def test_an_error_of_the_caller_is_no_answer_of_a_node(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    packs = nodes.put_packs([20_000] * 3)
    nodes.protect()

    def refuse(number: int, view: memoryview) -> None:
        raise UnavailableError("no room for the range")

    for number, key in enumerate(packs):
        for reader in range(3):
            with pytest.raises(UnavailableError, match="no room"):
                nodes.at(reader).read_into(key, [(0, 9)], [memoryview(bytearray(9))], refuse)
        if number == 0:
            nodes.lose(2)


def test_small_objects_outlive_any_one_keeper(tmp_path: Path) -> None:
    for lost in range(3):
        nodes = Nodes(tmp_path / str(lost), 5)
        store = nodes.at(4)
        store.put_if_absent("step-000000000020/manifest.json", b"manifest")
        store.put("latest", b"20")
        with pytest.raises(ConflictError):
            store.put_if_absent("step-000000000020/manifest.json", b"another")
        nodes.lose(lost)
        for number in range(5):
            assert nodes.at(number).get("latest", 100) == b"20"
        assert "step-000000000020" in nodes.at(4).folders()


def test_too_few_keepers_store_nothing_that_counts(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 5)
    for name in nodes.keepers[:2]:
        nodes.stores[name].is_silent = True
    store = nodes.at(4)
    with pytest.raises(UnavailableError, match=r"1 of keepers .* expected 2"):
        store.put_if_absent("step-000000000020/manifest.json", b"manifest")
    with pytest.raises(UnavailableError, match="expected 2 of 3"):
        store.get("another", 100)
    with pytest.raises(UnavailableError, match="node-0"):
        store.folders()
    for name in nodes.keepers[:2]:
        nodes.stores[name].is_silent = False
    store.put_if_absent("step-000000000020/manifest.json", b"manifest")
    assert all((tmp_path / name / "step-000000000020/manifest.json").exists() for name in nodes.keepers)


def test_the_first_keeper_decides_before_others_are_asked(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 4)
    nodes.stores["node-0"].is_silent = True
    nodes.stores["node-1"].put("manifest", b"another")
    with pytest.raises(UnavailableError, match="0 of keepers"):
        nodes.at(3).put_if_absent("manifest", b"manifest")
    assert not (tmp_path / "node-2/manifest").exists()
    nodes.stores["node-0"].is_silent = False
    with pytest.raises(UnavailableError, match="1 of keepers"):
        nodes.at(3).put_if_absent("manifest", b"manifest")
    assert nodes.at(3).get("manifest", 10) == b"manifest", "the object counts or not"


def test_later_keepers_store_at_once(tmp_path: Path) -> None:
    nodes, both = Nodes(tmp_path, 4), threading.Barrier(2)

    def put(store: LocalStore, key: str, data: bytes, **more: Any) -> None:
        both.wait(20)
        LocalStore.put(store, key, data, **more)

    for name in nodes.keepers[1:]:
        nodes.stores[name].put = partial(put, nodes.stores[name])  # type: ignore[method-assign]
    nodes.at(3).put("latest", b"20")
    assert all((tmp_path / name / "latest").read_bytes() == b"20" for name in nodes.keepers)


def test_what_is_deleted_takes_its_parity_along(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    packs = nodes.put_packs([30_000] * 3)
    nodes.protect()
    assert sum(path.name == "xor" for path in tmp_path.rglob("*")) == 3
    assert not any("parity" in entry.key for entry in nodes.at(0).list()) and "parity" not in nodes.at(0).folders()
    nodes.at(0).delete(packs)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_node_is_told_of_the_packs_that_are_there(tmp_path: Path) -> None:
    nodes, told = Nodes(tmp_path, 4), dict[str, set[str]]()
    packs = nodes.put_packs([1000] * 4)

    def delete(name: str, keys: list[str]) -> None:
        told[name] = {*keys}
        LocalStore.delete(nodes.stores[name], keys)

    for name in nodes.names:
        nodes.stores[name].delete = partial(delete, name)  # type: ignore[method-assign]
    nodes.at(0).delete([*packs, "latest"])
    for name, key in zip(nodes.names, packs, strict=True):
        assert told[name] == {key, "latest", *parity_keys(ATTEMPT)}
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


NEXT = "step-000000000030/0123456789abcdef/"


def protect_next(nodes: Nodes) -> list[str]:
    """Protect another attempt; return the names of the nodes that keep parity of the first one."""
    key = f"{NEXT}r00000.safetensors"
    nodes.stores["node-0"].put(key, bytes(500))
    for name in nodes.names:
        protect(nodes.stores, name, NEXT, {each: {key: 500} if each == "node-0" else {} for each in nodes.names})
    return [name for name in nodes.names if (nodes.folder / name / parity_keys(ATTEMPT)[0]).exists()]


def test_parity_that_outlived_its_packs_goes_with_the_next_protection(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    packs = nodes.put_packs([1000] * 3)
    nodes.protect()
    assert protect_next(nodes) == nodes.names
    for name in nodes.names[:2]:
        nodes.stores[name].delete(packs)
    assert protect_next(nodes) == nodes.names, "one node still has a pack"
    nodes.stores["node-2"].delete(packs)
    fails = SilentStore(tmp_path / "node-2", settings=Settings())
    fails.is_silent = True
    with pytest.raises(UnavailableError):
        protect({**nodes.stores, "node-2": fails}, "node-0", "step-000000000040/0123456789abcdef/", nodes.packs)
    assert (tmp_path / "node-0" / parity_keys(ATTEMPT)[0]).exists(), "a silent node may have a pack"
    assert protect_next(nodes) == []
    assert [path.parent.name for path in tmp_path.rglob("table.json")] == [NEXT[:-1].replace("/", ".")] * 3


def test_parity_of_a_lost_node_that_alone_wrote_stays(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    key, data = next(iter(nodes.put_packs([1000, 0, 0]).items()))
    nodes.protect()
    nodes.lose(0)
    assert protect_next(nodes) == nodes.names[1:]
    assert read(nodes.at(1), key) == data


def test_parity_that_was_begun_is_made_anew(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    packs = nodes.put_packs([30_000] * 3)
    for number, name in enumerate(nodes.names):
        begun = tmp_path / name / parity_keys(ATTEMPT)[1]
        begun.parent.mkdir(parents=True)
        begun.write_bytes(b"half")
        assert nodes.at(number).size([*packs][number]) == 30_000
    nodes.protect()
    nodes.lose(1)
    assert read(nodes.at(0), [*packs][1]) == [*packs.values()][1]


def test_a_damaged_table_counts_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = Nodes(tmp_path, 3)
    packs = nodes.put_packs([30_000] * 3)
    nodes.protect()
    table = tmp_path / "node-0" / parity_keys(ATTEMPT)[0]
    whole = table.read_bytes()
    for damaged in (whole[:-5], whole.replace(b"30000", b"40000", 1)):
        table.write_bytes(damaged)
        assert [read(nodes.at(1), key) for key in packs] == [*packs.values()], "no parity is needed"
    assert "node-0" in caplog.text
    nodes.lose(2)
    with pytest.raises(MissingError, match=r"node-0.*no parity"):
        read(nodes.at(1), [*packs][2])
    table.write_bytes(whole)
    assert read(nodes.at(1), [*packs][2]) == [*packs.values()][2]


def test_parity_outlives_a_node_that_is_protected_again(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    packs = nodes.put_packs([30_000] * 3)
    nodes.protect()
    nodes.lose(2)
    for name in ("node-0", "node-1"):
        assert protect(dict(nodes.stores), name, ATTEMPT, nodes.packs) == 15_000
    assert read(nodes.at(0), [*packs][2]) == [*packs.values()][2]
    (tmp_path / "node-1" / parity_keys(ATTEMPT)[1]).unlink()
    with pytest.raises(UnavailableError, match="node node-2 lacks 1 of 1 packs"):
        nodes.protect()


def test_parity_is_of_all_packs_although_a_later_step_needs_some(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    packs = nodes.put_packs([30_000] * 3)
    needed = {
        name: dict(list(of_node.items())[:1]) if name == "node-1" else {} for name, of_node in nodes.packs.items()
    }
    nodes.stores["node-1"].put(extra := [*packs][1].replace(".safetensors", "-1.safetensors"), bytes(range(200)))
    for name in nodes.stores:
        protect(dict(nodes.stores), name, ATTEMPT, needed)
    tables = [(tmp_path / name / parity_keys(ATTEMPT)[0]).read_bytes() for name in nodes.stores]
    nodes.packs["node-1"][extra] = 200
    for name in nodes.stores:
        protect(dict(nodes.stores), name, ATTEMPT, nodes.packs)
    assert [(tmp_path / name / parity_keys(ATTEMPT)[0]).read_bytes() for name in nodes.stores] == tables, (
        "whole already"
    )
    nodes.lose(1)
    assert read(nodes.at(0), [*packs][1]) == [*packs.values()][1]


def test_parity_leaves_the_network_to_others(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    nodes.put_packs([20_000_000, 20, 30_000])
    pauses: list[float] = []
    assert protect(dict(nodes.stores), "node-1", ATTEMPT, nodes.packs, 1e6, pauses.append) == 10_000_000
    assert sum(pauses) == pytest.approx((10_000_000 + 15_000) / 1e6), "all that was pulled"
    assert max(pauses) == WINDOW_BYTES / 1e6


def test_a_holder_that_lists_and_does_not_read_is_no_absent_one(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 4)
    packs = nodes.put_packs([30_000] * 4)

    def fails(*arguments: Any) -> None:
        raise UnavailableError("no answer within 10 s")

    nodes.stores["node-3"].read_into = fails  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match="no answer within 10 s"):
        read(nodes.at(0), [*packs][3])


def test_an_agent_of_another_run_holds_up_no_other_node(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 4)
    packs = nodes.put_packs([30_000] * 4)
    nodes.protect()

    def stranger(*arguments: Any, **more: Any) -> Any:
        raise InvalidError("the agent has another run: found run-8; expected run-7")

    for name in CALLS:
        setattr(nodes.stores["node-3"], name, stranger)
    assert [read(nodes.at(0), key) for key in packs] == [*packs.values()]


def test_a_pack_that_goes_after_a_look_is_missing(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 4)
    packs = nodes.put_packs([30_000] * 4)
    nodes.protect()
    store, key = nodes.at(0), [*packs][2]
    assert read(store, key) == packs[key]
    nodes.at(1).delete(packs)
    with pytest.raises(MissingError, match="r00002"):
        read(store, key, 0, 100)


def test_a_lost_pack_is_looked_for_once(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 4)
    packs = nodes.put_packs([30_000] * 4)
    nodes.protect()
    nodes.lose(3)
    store, asked = nodes.at(0), list[str]()
    listing = LocalStore.list
    for name in nodes.names:
        node = nodes.stores[name]
        node.list = lambda prefix="", node=node, **more: asked.append(prefix) or listing(node, prefix, **more)  # type: ignore
    for _ in range(10):
        assert read(store, [*packs][3]) == [*packs.values()][3]
    assert len(asked) == 4


def test_parity_of_an_attempt_goes_with_its_packs_alone(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    packs = nodes.put_packs([30_000] * 3)
    nodes.at(0).put(f"{ATTEMPT}overview.msgpack", b"overview")
    nodes.protect()
    nodes.at(0).delete([f"{ATTEMPT}overview.msgpack"])
    nodes.lose(1)
    assert read(nodes.at(0), [*packs][1]) == [*packs.values()][1]
