"""Does the parts of a campaign that one server takes: `python -m tests.campaign.server_parts NAME`, for `__main__`.

The server lives as long as this process. Lines that begin with `campaign:` are for people, the others for the log.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import holdfast
from tests.campaign import kills, network, races, secrets
from tests.campaign.record import CAMPAIGN, FOLDER, ROOT, Block, Options, Record
from tests.doubles.fault_proxy import FaultProxy
from tests.servers.azurite import azurite
from tests.servers.ceph import ceph
from tests.servers.server import S3Server, Server
from tests.support.object_server import PROGRAM, object_server

_BLOCK_SECONDS_MAX = 3600
_FAILURE_CHARACTERS_MAX = 4000


@contextmanager
def _ministack() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="ministack-") as folder, object_server(Path(folder), keeps_data=True) as it:
        yield it


@contextmanager
def _bluestore() -> Iterator[Server]:
    with ceph(objectstore="bluestore") as server:
        server.name = "ceph-bluestore"
        yield server


SERVERS: dict[str, Callable[[], object]] = {
    "ministack": _ministack,
    "ceph": ceph,
    "ceph-bluestore": _bluestore,
    "azurite": azurite,
}


@dataclass(frozen=True)
class Part:
    """One kind of work, done in blocks."""

    servers: tuple[str, ...]
    rounds: Callable[[Options], int]
    block_rounds: int
    work: Callable[[Server, Path, int, int], Counter[str]]
    """Gets server, folder, seed and rounds; returns what it counted, or raises."""


def say(text: str) -> None:
    """Print a line for people."""
    print(f"campaign: {text}", flush=True)


def _races(server: Server, folder: Path, seed: int, rounds: int) -> Counter[str]:
    counts, _ = races.raced(server, folder, rounds=rounds)
    return counts


def _network(server: Server, folder: Path, seed: int, rounds: int) -> Counter[str]:
    assert isinstance(server, S3Server)
    port = int(server.endpoint.rpartition(":")[2])
    with FaultProxy("127.0.0.1", port) as proxy:
        return network.play(server, proxy, seed=seed, rounds=rounds)


def _client_kills(server: Server, folder: Path, seed: int, rounds: int) -> Counter[str]:
    return kills.clients_killed(server, folder, seed=seed, kills=rounds)


_KILLED = {"ministack": [PROGRAM], "ceph": ["rgw"], "ceph-bluestore": ["rgw", "osd"]}
"""Programs that are killed. Without bluestore an OSD keeps nothing that was acknowledged."""


def _server_kills(server: Server, folder: Path, seed: int, rounds: int) -> Counter[str]:
    return kills.servers_killed(server, _KILLED[server.name], seed=seed, kills=rounds)


_COMMANDS = (["ls"], ["ls", "--json"], ["verify"], ["gc", "--grace", "0"], ["rm", "1", "--grace", "0"], ["ls"])


def _commands(server: Server, folder: Path, seed: int, rounds: int) -> Counter[str]:
    """Save a run and use the command on it, so that its output is among what is looked through."""
    counts = Counter[str]()
    for _ in range(rounds):
        url = server.new_url()
        settings = server.settings()
        with holdfast.CheckpointManager(url, settings=settings, process_group=False, preemption=False) as manager:
            manager.save(1, network.state_of(1)).wait()
            manager.save(2, network.state_of(2)).wait()
        for words in _COMMANDS:
            command = [sys.executable, "-c", "from holdfast.cli import main; main()", words[0], url, *words[1:]]
            environment = os.environ | server.environment
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
            print(f"holdfast {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}", flush=True)
            assert done.returncode == 0, f"holdfast {' '.join(words)}: {done.stderr}"
            counts["commands"] += 1
    return counts


PARTS = {
    "commands": Part(("ministack", "ceph", "azurite"), lambda _: 1, 1, _commands),
    "races": Part(("ministack", "ceph", "azurite"), lambda options: options.rounds, 50, _races),
    "network": Part(("ministack", "ceph"), lambda options: options.faults, 48, _network),
    "client kills": Part(("ministack", "ceph"), lambda options: options.kills, 10, _client_kills),
    "server kills": Part(("ministack", "ceph", "ceph-bluestore"), lambda options: options.kills, 10, _server_kills),
}


def wanted(options: Options) -> list[tuple[str, str, int]]:
    """Return server, part and rounds of all that the options ask for."""
    return [
        (server, name, part.rounds(options))
        for server in SERVERS
        for name, part in PARTS.items()
        if CAMPAIGN == "stores" and server in part.servers and options.wants(server, name)
    ]


def _seed_of(options: Options, server: str, part: str, number: int) -> int:
    return zlib.crc32(f"{options.seed} {server} {part} {number}".encode())


def _blocks(options: Options, name: str) -> list[tuple[int, str, int]]:
    """Return number, part and first round of each block of a server: the first of all parts, then the second ones.

    So an interrupted campaign has done something of each part.
    """
    blocks = []
    for server, part, rounds in wanted(options):
        if server == name:
            firsts = range(0, rounds, PARTS[part].block_rounds)
            blocks += [(number, part, first) for number, first in enumerate(firsts)]
    return sorted(blocks, key=lambda block: block[0])


def _do(server: Server, record: Record, number: int, name: str, first: int) -> None:
    """Do a block, and keep what came of it."""
    part = PARTS[name]
    rounds = part.rounds(record.options)
    if not record.has(server.name, name, number):
        count = min(part.block_rounds, rounds - first)
        seed = _seed_of(record.options, server.name, name, number)
        print(f"{server.name}, {name}, block {number}, seed {seed}", flush=True)
        began, failure, counts = time.monotonic(), "", Counter[str]()
        folder = Path(tempfile.mkdtemp(prefix=f"{server.name}-{name.replace(' ', '-')}-", dir=FOLDER))
        faulthandler.dump_traceback_later(_BLOCK_SECONDS_MAX, exit=True)
        try:
            counts = part.work(server, folder, seed, count)
            _require_no_secret(server, counts)
        except Exception as error:
            failure = "".join(traceback.format_exception(error))
            print(failure, flush=True)
        finally:
            faulthandler.cancel_dump_traceback_later()
        seconds = round(time.monotonic() - began, 1)
        done, software = 0 if failure else count, f"{server.name} {server.version}"
        shown = failure[-_FAILURE_CHARACTERS_MAX:].replace(f"{ROOT}/", "")
        record.add(Block(server.name, name, number, seed, count, done, seconds, software, dict(counts), shown))
        said = f"FAILED: {failure.strip().splitlines()[-1][:200]}" if failure else "passed"
        say(f"{server.name}, {name}: rounds {first + 1} to {first + count} of {rounds} in {seconds:.0f} s: {said}")


def _require_no_secret(server: Server, counts: Counter[str]) -> None:
    # The bytes of a whole campaign would fill the memory of a server.
    sought = secrets.in_objects(server, server.secrets, delete=True)
    assert not sought.found, f"a credential is in {', '.join(sought.found[:10])}"
    counts["objects without a credential"] += sought.looked_at


def main(name: str) -> None:
    """Do all parts of one server that are asked for and not done."""
    record = Record(Options.from_json(os.environ["CAMPAIGN_OPTIONS"]))
    with SERVERS[name]() as server:  # type: ignore[attr-defined]
        os.environ.update({**server.environment, **secrets.unused_variables(server)})
        for number, part, first in _blocks(record.options, name):
            _do(server, record, number, part, first)


if __name__ == "__main__":
    secrets.let_cores_be_written()
    main(sys.argv[1])
