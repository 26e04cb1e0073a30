"""Peers of 1,000 nodes: the list of all agents, placement, judging and the plan of a drain, by the real code.

Agents are real servers over real folders, several hundred in a process, with packs of holes: no data passes. All ends
run on this machine, so a new connection takes the processor time of both ends.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

from bench.shelf_memory import memory_folder
from holdfast._face import wiring
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.agent.serving import PeerServer
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.peers.peer import Peer
from holdfast.base.clock import SystemClock
from holdfast.base.types.manifest import FileRecord, Manifest
from holdfast.base.wire.framing import Credentials
from holdfast.core.format.manifest import encode_manifest
from holdfast.core.format.names import manifest_key, step_folder
from holdfast.core.format.sealed_json import header, sealed
from holdfast.core.plan.placement import Grouping, RosterNode, grouping
from holdfast.settings import Settings
from holdfast.stored.peers.parity_files import parity_keys
from holdfast.stored.peers.safety import step_safety
from holdfast.stored.peers.union import PeerStore
from holdfast.stored.repository.catalog import read_manifest
from holdfast.stored.repository.two_roots import TwoRoots
from holdfast.training.runs.tiers.offline_drain import NearDrain

NODES, STEPS, NODES_PER_SWITCH, PROCESSES = 1000, 8, 20, 4
SETTINGS, SECRET, CALL_SECONDS = Settings(), bytes(range(32)), 60.0
PACK_BYTES, DIGEST = 1 << 30, "0" * 32

Numbers = dict[str, float]


def placed(nodes: int) -> Grouping:
    """Return the groups of so many nodes."""
    return grouping([RosterNode(name_of(number), f"switch{number // NODES_PER_SWITCH}") for number in range(nodes)])


def name_of(number: int) -> str:
    """Return the name of a node."""
    return f"n{number:05d}"


def made_steps(folder: Path, nodes: int) -> list[Manifest]:
    """Save steps of one rank, and let their manifests name a pack of each node."""
    store, steps = LocalStore(folder, settings=SETTINGS), list[Manifest]()
    with CheckpointManager.over(store, wiring.saving_job(False, SETTINGS, store.url)) as run:
        for step in range(1, STEPS + 1):
            run.save(step, {"step": step}).wait()
    for step in range(1, STEPS + 1):
        packs = tuple(FileRecord(f"r{rank:05d}.safetensors", PACK_BYTES, DIGEST) for rank in range(nodes))
        steps.append(replace(read_manifest(store, step_folder(step)), packs=packs))
        store.put(manifest_key(step), encode_manifest(steps[-1]))
    return steps


def made_nodes(folder: Path, steps: list[Manifest], groups: Grouping) -> None:
    """Make the folders of all nodes: a pack without data and a table of each step, and on keepers the small objects."""
    for name in groups.keepers:
        shutil.copytree(folder / "steps", folder / name)
    for manifest in steps:
        attempt = attempt_of_step(manifest)
        for members in groups.groups:
            packs = [{attempt + manifest.packs[int(name[1:])].name: PACK_BYTES} for name in members]
            for number, name in enumerate(members):
                pack, table = folder / name / next(iter(packs[number])), folder / name / parity_keys(attempt)[0]
                for path in (pack, table):
                    path.parent.mkdir(parents=True, exist_ok=True)
                pack.touch()
                os.truncate(pack, PACK_BYTES)
                fields = {"number": number, "nodes": [*members], "packs": packs}
                table.write_bytes(sealed({**header("parity"), **fields}))


def attempt_of_step(manifest: Manifest) -> str:
    """Return the prefix of the attempt of a step."""
    return f"{step_folder(manifest.step or 0)}{manifest.attempt}/"


def serve(folder: Path, first: int, last: int) -> None:
    """Serve the folders of some nodes until the standard input ends; print their ports."""
    servers = [
        PeerServer(LocalStore(folder / name, settings=SETTINGS), Credentials("paper", SECRET, name), "127.0.0.1")
        for name in map(name_of, range(first, last))
    ]
    print(json.dumps([server.address[1] for server in servers]), flush=True)
    sys.stdin.read()


@contextmanager
def agents(folder: Path, nodes: int) -> Iterator[dict[str, int]]:
    """Serve all nodes for a block; return their ports by name."""
    ends = [nodes * number // PROCESSES for number in range(PROCESSES + 1)]
    command, pipe = [sys.executable, "-m", "bench.peers_on_paper", str(folder)], subprocess.PIPE
    processes = [
        subprocess.Popen([*command, str(first), str(last)], stdin=pipe, stdout=pipe, text=True)
        for first, last in pairwise(ends)
    ]
    try:
        ports = [port for each in processes for port in json.loads(each.stdout.readline())]  # type: ignore[union-attr]
        yield {name_of(number): port for number, port in enumerate(ports)}
    finally:
        for each in processes:
            each.communicate()


def looked(folder: Path, steps: list[Manifest], ports: dict[str, int]) -> Numbers:
    """List all agents, place the nodes, judge each step, and plan the drain."""
    found: Numbers = {}

    def timed(name: str, start: float) -> None:
        found[name] = time.perf_counter() - start

    start = time.perf_counter()
    groups = placed(len(ports))
    timed("place", start)
    peers = {
        name: Peer(("127.0.0.1", port), Credentials("paper", SECRET, name), CALL_SECONDS)
        for name, port in ports.items()
    }
    store = PeerStore("peers://paper", peers, name_of(0), groups.keepers)
    start = time.perf_counter()
    files = sum(1 for _ in store.list(""))
    timed("list", start)
    assert files >= len(ports) * STEPS, files
    start = time.perf_counter()
    places = {attempt: store.places_of(attempt) for attempt in map(attempt_of_step, steps)}
    timed("look", start)
    known = SimpleNamespace(places_of=places.__getitem__)
    start = time.perf_counter()
    safe = [step_safety(known, each) for each in steps]  # type: ignore[arg-type]
    timed("judge", start)
    assert {each.text for each in safe} == {f"any 1 node may go, up to {len(groups.groups)} of different groups"}, safe
    keeper, root = (LocalStore(folder / name, settings=SETTINGS) for name in (groups.keepers[0], "root"))
    start = time.perf_counter()
    drain = NearDrain(TwoRoots(keeper, root), SystemClock(), wiring.codecs()).planned()
    timed("drain", start)
    assert drain.files > len(ports) * STEPS, drain
    for peer in peers.values():
        peer.close()
    return found


def measured(nodes: int = NODES, rounds: int = 7) -> Numbers:
    """Return the seconds of the middle round, by key."""
    with memory_folder() as folder:
        steps = made_steps(folder / "steps", nodes)
        made_nodes(folder, steps, placed(nodes))
        with agents(folder, nodes) as ports:
            found = [looked(folder, steps, ports) for _ in range(rounds)]
    numbers = {name: sorted(each[name] for each in found)[rounds // 2] for name in found[0]}
    numbers["plans"] = numbers["place"] + numbers["judge"] + numbers["drain"]
    numbers["all"] = numbers["plans"] + numbers["list"] + numbers["look"]
    return {f"peers_{name}_seconds_{nodes}": value for name, value in numbers.items()}


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
