"""Hostile peers: each is refused by name, in bounded memory, and an honest peer is served meanwhile."""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from holdfast.backends.stores.peers.peer import Peer
from holdfast.base.wire.framing import Credentials
from holdfast.settings import MIB
from tests.unit.agent.conversing import NODE, PACK, PACK_BYTES, RUN, SECRET, AgentProcess, Raw, agent_process
from tests.unit.agent.hostile import CLOSED, CONVERSATIONS

pytestmark = pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to write to")

PROVING_SECONDS, IDLE_SECONDS = 1.0, 1.0
CLOSING_SECONDS = 3.0


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as name:
        root = Path(name) / "run"
        (root / PACK).parent.mkdir(parents=True)
        (root / PACK).write_bytes(os.urandom(PACK_BYTES))
        (root / "a").mkdir()
        (root / "a" / "x").write_bytes(b"x")
        (root / "small").write_bytes(b"small")
        (root / ".hidden").write_bytes(b"hidden")
        (root.parent / "secret").write_bytes(b"outside")
        (root / "link").symlink_to(root.parent / "secret")
        (root / "linked").symlink_to(root.parent)
        os.mkfifo(root / "pipe")
        yield root


def outcome(agent: AgentProcess, name: str) -> tuple[int, str]:
    """Carry out a conversation; return the status of the refusal and all that the agent said."""
    raw = Raw(agent.port)
    try:
        answer = CONVERSATIONS[name][1](raw)
        if answer is None:
            assert raw.is_closed(CLOSING_SECONDS), name
            return CLOSED, ""
        return answer.status, repr(answer)
    finally:
        raw.socket.close()


def served(agent: AgentProcess, until: threading.Event, content: bytes) -> list[float]:
    """Read as an honest peer until an event; return the seconds of each round, on a connection of its own."""
    buffer, seconds = bytearray(MIB), []
    while not until.is_set() or not seconds:
        begun = time.monotonic()
        peer = Peer(("127.0.0.1", agent.port), Credentials(RUN, SECRET, NODE), timeout_seconds=10)
        peer.read_into(PACK, [(MIB, MIB + len(buffer))], [memoryview(buffer)])
        assert buffer == content[MIB : 2 * MIB]
        assert bytes(peer.get("small", 10)) == b"small"
        assert [entry.key for entry in peer.list("a/")] == ["a/x"]
        peer.close()
        seconds.append(time.monotonic() - begun)
        time.sleep(0.02)
    return seconds


def test_each_is_refused_while_an_honest_peer_is_served(folder: Path) -> None:
    content, names = (folder / PACK).read_bytes(), sorted(str(path) for path in folder.rglob("*"))
    over, at_once = threading.Event(), threading.Event()
    at_once.set()
    with agent_process(folder, PROVING_SECONDS, IDLE_SECONDS) as agent, ThreadPoolExecutor(32) as threads:
        served(agent, at_once, content)
        before = agent.forget_peak()
        honest = threads.submit(served, agent, over, content)
        try:
            found = dict(zip(CONVERSATIONS, threads.map(lambda name: outcome(agent, name), CONVERSATIONS), strict=True))
        finally:
            over.set()
        seconds = honest.result()
        peak = agent.memory_bytes("VmHWM")
        printed = agent.end()
    assert len(CONVERSATIONS) >= 60
    wrong = {name: (found[name][0], status) for name, (status, _) in CONVERSATIONS.items() if found[name][0] != status}
    assert not wrong, f"found, expected: {wrong}"
    assert max(seconds) < 1, seconds
    assert peak - before <= 64 * MIB, (peak, before)
    # Of all that was sent, only the one object that was stored before too many bytes came is there.
    assert sorted(str(path) for path in folder.rglob("*")) == sorted([*names, str(folder / "long")])
    assert (folder / "small").read_bytes() == b"small" and (folder / PACK).read_bytes() == content
    output = printed + "".join(text for _, text in found.values())
    assert "refused GET /../secret" in printed
    for secret in (
        SECRET.hex(),
        base64.b64encode(SECRET).decode(),
        repr(SECRET)[2:-1],
        SECRET.decode("latin-1"),
        "outside",
    ):
        assert secret not in output
