"""Processor time of proven reads over the wire of peers, beside plain sockets; the time of both ends counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from bench import conditions
from bench.part import Measured, Params, Part, Round, Spread, in_turn, spread_of
from bench.peers_place import near
from bench.peers_sockets import WINDOW_BYTES, PlainPeers, ask, fill
from bench.state import MIB
from holdfast.agent.serving import PeerServer
from holdfast.backends.stores.peers.peer import Peer
from holdfast.backends.stores.shelf import ShelfStore
from holdfast.base.wire.framing import Credentials
from holdfast.settings import Settings

PACK = "step-000000000001/0123456789abcdef/r00000.safetensors"
CREDENTIALS = Credentials("bench", bytes(range(32)), "n1")
CALL_SECONDS = 60.0


def measure(root: Path, params: Params) -> Measured:
    """Let rank 0 read a pack of rank 1 over and over, 8 MiB at a time."""
    reads, rounds, places = conditions.rank() == 0, list[Round](), [None, None]
    folder = ShelfStore(near() / "n1", settings=Settings())
    server = PeerServer(folder, CREDENTIALS, "127.0.0.1")
    dist.all_gather_object(places, server.address)
    plain = PlainPeers(near().parent, params["mib"])
    if not reads:
        folder.put(PACK, (near().parent / "plain-1").read_bytes())
    peer, connection = Peer(places[1], CREDENTIALS, CALL_SECONDS), plain.connected(1)
    room, ranges = memoryview(bytearray(WINDOW_BYTES)), range(0, params["mib"] * MIB, WINDOW_BYTES)

    def over_sockets(start: int, stop: int) -> None:
        ask(connection, start, stop)
        fill(connection, room)

    def over_wire(start: int, stop: int) -> None:
        peer.read_into(PACK, [(start, stop)], [room])

    def work(read: Callable[[int, int], None]) -> None:
        for start in ranges if reads else ():
            read(start, start + WINDOW_BYTES)
        conditions.barrier()

    for number in range(-1, params["rounds"]):
        this: Round = {}
        for name, read in in_turn([("wire", over_wire), ("sockets", over_sockets)], number):
            this |= conditions.measured(name, lambda read=read: work(read))
        if number >= 0:
            rounds.append(this)
            conditions.say(", ".join(f"{name} {value:.3f}" for name, value in this.items()))
    peer.close()
    server.close()
    return Measured(rounds, [])


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the ratio of processor times."""
    return {"wire_cpu_vs_sockets": spread_of([each["wire_cpu"] / each["sockets_cpu"] for each in rounds])}


PART = Part(
    name="peers_wire",
    question="How much processor time do proven reads take beside plain sockets?",
    ranks=2,
    full={"mib": 2048, "rounds": 9},
    quick={"mib": 512, "rounds": 3},
    measure=measure,
    keys=keys,
)
