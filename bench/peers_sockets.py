"""Plain sockets between the ranks of a job, the limit of peers: no proof, no framing, `sendfile` to `recv_into`."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch.distributed as dist

from bench import conditions
from bench.state import MIB

WINDOW_BYTES = 8 * MIB
_RANGE = struct.Struct("!QQ")

Bytes = np.ndarray
"""Bytes as numpy sees them."""


class PlainPeers:
    """A file in memory on each rank, which any other rank reads by ranges."""

    def __init__(self, folder: Path, mib: int) -> None:
        """Make the file, and begin to serve it; a collective."""
        self._path = folder / f"plain-{conditions.rank()}"
        self._path.write_bytes(os.urandom(MIB) * mib)
        self._fd = os.open(self._path, os.O_RDONLY)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        threading.Thread(target=self._accept, daemon=True).start()
        self._ports = [0] * dist.get_world_size()
        dist.all_gather_object(self._ports, self._listener.getsockname()[1])

    def connected(self, rank: int) -> socket.socket:
        """Return a new connection to a rank."""
        return _quick(socket.create_connection(("127.0.0.1", self._ports[rank])))

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(_quick(connection),), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(ConnectionError):
            while asked := connection.recv(_RANGE.size, socket.MSG_WAITALL):
                start, stop = _RANGE.unpack(asked)
                while start < stop:
                    start += os.sendfile(connection.fileno(), self._fd, start, stop - start)


def _quick(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def ask(connection: socket.socket, start: int, stop: int) -> None:
    """Ask for a range."""
    connection.sendall(_RANGE.pack(start, stop))


def fill(connection: socket.socket, room: memoryview) -> None:
    """Fill memory with the next bytes of an answer."""
    while room:
        room = room[connection.recv_into(room, 0, socket.MSG_WAITALL) :]


class Pull:
    """One thread that pulls a range from each of some ranks, and makes the XOR of the ranges."""

    def __init__(self, peers: PlainPeers, ranks: Sequence[int], start: int, stop: int) -> None:
        """Connect."""
        self._connections = [peers.connected(rank) for rank in ranks]
        self._start, self._stop = start, stop
        self._room = memoryview(mmap.mmap(-1, WINDOW_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def run(self, window_at: Callable[[int, int], Bytes], take: Callable[[int, Bytes], object]) -> None:
        """Pull once.

        Args:
            window_at: Returns the memory for the XOR of some bytes, from start and stop.
            take: Takes start and XOR of these bytes.
        """
        for connection in self._connections:
            ask(connection, self._start, self._stop)
        for at in range(0, self._stop - self._start, WINDOW_BYTES):
            end = min(at + WINDOW_BYTES, self._stop - self._start)
            window, room = window_at(at, end), self._room[: end - at]
            for connection in self._connections:
                fill(connection, room)
                np.bitwise_xor(window, np.frombuffer(room, np.uint8), out=window)
            take(at, window)


def kept(path: Path, total_bytes: int) -> Bytes:
    """Return the memory of a file whose pages are there."""
    path.write_bytes(b"\1" * total_bytes)
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), total_bytes), np.uint8)
