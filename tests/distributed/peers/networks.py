"""A network namespace for each node of a job, in which its agents talk over a network that can be cut.

Needs `ip`, and the right to make namespaces. The training itself goes on: its connections are older than the namespace,
and new ones to the key-value store of this host are passed on.
"""

from __future__ import annotations

import ctypes
import os
import queue
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_SUBNET = "10.213.7"


class Networks:
    """The namespaces of some nodes."""

    def __init__(self, nodes: Sequence[str]) -> None:
        """Make nothing yet."""
        self._nodes = nodes
        self._bridge = f"hf{os.getpid()}"

    def make(self) -> None:
        """Make the namespaces."""
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")
        for node in self._nodes:
            name = self.name_of(node)
            _ip("netns", "add", name)
            _ip("link", "add", name, "type", "veth", "peer", "name", "net", "netns", name)
            _ip("link", "set", name, "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{self.address_of(node)}/24", "dev", "net")
            for link in ("lo", "net"):
                _ip("-n", name, "link", "set", link, "up")

    def name_of(self, node: str) -> str:
        """Return the namespace of a node."""
        return f"{self._bridge}{node}"

    def address_of(self, node: str) -> str:
        """Return the address of a node for the agents of the others."""
        return f"{_SUBNET}.{1 + self._nodes.index(node)}"

    def cut(self, node: str) -> None:
        """Drop all that passes between the agents of a node and the others."""
        _ip("link", "set", self.name_of(node), "down")

    def heal(self) -> None:
        """Let all agents reach each other again."""
        for node in self._nodes:
            _ip("link", "set", self.name_of(node), "up")

    def end(self) -> None:
        """Remove all."""
        for node in self._nodes:
            _ip("link", "del", self.name_of(node), check=False)
            _ip("netns", "del", self.name_of(node), check=False)
        _ip("link", "del", self._bridge, check=False)


@contextmanager
def networks(nodes: Sequence[str]) -> Iterator[Networks]:
    """Make the namespaces of some nodes for a block."""
    made = Networks(nodes)
    try:
        made.make()
        yield made
    finally:
        made.end()


def may_make_networks() -> bool:
    """Return whether this machine lets the tests make namespaces that reach each other."""
    if shutil.which("ip") is None:
        return False
    met = list[bool]()

    def meet(made: Networks) -> None:
        with suppress(OSError):
            _move_to(made.name_of("x"))
            with socket.create_server((made.address_of("x"), 0)) as listener:
                _move_to(made.name_of("y"))
                with socket.create_connection(listener.getsockname(), 5.0):
                    met.append(True)

    with suppress(AssertionError), networks(("x", "y")) as made:
        thread = threading.Thread(target=meet, args=(made,))  # It stays in the last namespace.
        thread.start()
        thread.join()
    return bool(met)


def enter(namespace: str, port: int) -> None:
    """Move the calling thread, and threads and processes that it starts, into a namespace.

    Args:
        namespace: The namespace.
        port: Connections to this port of the host are passed on to the host outside.
    """
    listeners = queue.SimpleQueue[socket.socket]()
    # A thread stays in the namespace in which it was started, and a socket in that of the thread which made it.
    threading.Thread(target=_pass_on, args=(listeners, port), daemon=True).start()
    _move_to(namespace)
    listeners.put(socket.create_server(("127.0.0.1", port)))


def _move_to(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


def _pass_on(listeners: queue.SimpleQueue[socket.socket], port: int) -> None:
    listener = listeners.get()
    while True:
        inside, outside = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
        for ends in ((inside, outside), (outside, inside)):
            threading.Thread(target=_copy, args=ends, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _ip(*arguments: str, check: bool = True) -> bool:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert not (check and done.returncode), f"ip {' '.join(arguments)}: {done.stderr}"
    return done.returncode == 0
