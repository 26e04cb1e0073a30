"""A network namespace for each node of a job: agents talk over one network, which can be cut, training over another.

Needs `ip`, and the right to make namespaces. The key-value store of the training stays in reach of every node.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_CUT_SUBNET, _KEPT_SUBNET = "10.213.7", "10.213.8"
_HOST_NUMBER = 254


class Networks:
    """The namespaces of some nodes."""

    host = f"{_KEPT_SUBNET}.{_HOST_NUMBER}"
    """The address of the test's own process, in reach of every node."""

    def __init__(self, nodes: Sequence[str]) -> None:
        """Make nothing yet."""
        self._nodes = nodes
        self._prefix = f"hf{os.getpid() % 100_000}"

    def make(self) -> None:
        """Make the namespaces."""
        for subnet, kind in ((_CUT_SUBNET, "c"), (_KEPT_SUBNET, "k")):
            bridge = f"{self._prefix}{kind}"
            _ip("link", "add", bridge, "type", "bridge")
            _ip("addr", "add", f"{subnet}.{_HOST_NUMBER}/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
        for node in self._nodes:
            _ip("netns", "add", self.name_of(node))
            inside = ("-n", self.name_of(node))
            _ip(*inside, "link", "set", "lo", "up")
            for subnet, kind in ((_CUT_SUBNET, "c"), (_KEPT_SUBNET, "k")):
                link = self._link(node, kind)
                _ip("link", "add", link, "type", "veth", "peer", "name", kind, "netns", self.name_of(node))
                _ip("link", "set", link, "master", f"{self._prefix}{kind}", "up")
                _ip(*inside, "addr", "add", f"{subnet}.{1 + self._nodes.index(node)}/24", "dev", kind)
                _ip(*inside, "link", "set", kind, "up")

    def name_of(self, node: str) -> str:
        """Return the namespace of a node."""
        return f"{self._prefix}{node}"

    def address_of(self, node: str) -> str:
        """Return the address of a node for the agents of the others."""
        return f"{_CUT_SUBNET}.{1 + self._nodes.index(node)}"

    def cut(self, *nodes: str) -> None:
        """Drop all that passes between the agents of these nodes and all others."""
        for node in nodes:
            _ip("link", "set", self._link(node, "c"), "down")

    def heal(self) -> None:
        """Let all agents reach each other again."""
        for node in self._nodes:
            _ip("link", "set", self._link(node, "c"), "up")

    def end(self) -> None:
        """Remove all; the processes within must have ended."""
        for node in self._nodes:
            for kind in "ck":
                _ip("link", "del", self._link(node, kind), check=False)
            _ip("netns", "del", self.name_of(node), check=False)
        for kind in "ck":
            _ip("link", "del", f"{self._prefix}{kind}", check=False)

    def _link(self, node: str, kind: str) -> str:
        return f"{self.name_of(node)}{kind}"


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
    """Return whether this machine lets the tests make network namespaces and bridges."""
    if shutil.which("ip") is None:
        return False
    name = f"hf{os.getpid() % 100_000}t"
    made = [_ip("netns", "add", name, check=False), _ip("link", "add", name, "type", "bridge", check=False)]
    _ip("netns", "del", name, check=False)
    _ip("link", "del", name, check=False)
    return all(made)


def enter(namespace: str) -> None:
    """Move the calling thread, and threads and processes that it starts, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


def _ip(*arguments: str, check: bool = True) -> bool:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert not (check and done.returncode), f"ip {' '.join(arguments)}: {done.stderr}"
    return done.returncode == 0
