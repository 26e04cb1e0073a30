"""The XOR of ranges, window by window, into memory that holds other bytes; and parity in the memory of older parity."""

from __future__ import annotations

import os
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from holdfast.backends.stores.shelf import ShelfStore
from holdfast.base.ports.readable import Buffers, OnRange
from holdfast.core.plan.parity import ParityInput, xor_into
from holdfast.settings import MIB, Settings
from holdfast.stored.peers import parity_files
from holdfast.stored.peers.parity_files import attempt_of, parity_keys, protect, xor_windows


@pytest.mark.parametrize("seed", range(60))
def test_ranges_in_any_order_with_gaps_and_overlaps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_files, "WINDOW_BYTES", 16)
    monkeypatch.setattr(parity_files, "_PIECE_BYTES", 5)
    chance = random.Random(seed)
    total_bytes, source, inputs = chance.randint(0, 70), chance.randbytes(200), list[ParityInput]()
    for _ in range(chance.randint(0, 8)):
        at = chance.randint(0, total_bytes)
        start = chance.randint(0, 100)
        inputs.append(ParityInput(0, "pack", start, start + chance.randint(0, total_bytes - at), at))
    expected = bytearray(total_bytes)
    for each in inputs:
        xor_into(expected, each.at, source[each.start : each.stop])
    found = memoryview(bytearray(b"\xaa" * total_bytes))

    def read(part: ParityInput, buffers: Buffers, on_range: OnRange | None) -> None:
        at = part.start
        for number, buffer in enumerate(buffers):
            buffer[:] = source[at : at + len(buffer)]
            at += len(buffer)
            if on_range is not None:
                on_range(number, buffer)
        assert at == part.stop

    for start, window in xor_windows(inputs, total_bytes, lambda start, stop: found[start:stop], read):
        assert window == found[start : start + 16]
    assert found == expected


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to write to")
def test_parity_is_made_in_the_memory_of_parity_that_was_removed() -> None:
    keys = [f"step-{step:012d}/0123456789abcdef/r00000.safetensors" for step in (1, 2)]
    with TemporaryDirectory(dir="/dev/shm") as folder:
        nodes = {name: ShelfStore(Path(folder, name), settings=Settings()) for name in "ab"}
        nodes["b"].put("other", bytes(10 * MIB))  # A store keeps no more removed memory than it holds objects.
        inodes = []
        for key, size in zip(keys, (9 * MIB + 5, 9 * MIB + 2), strict=True):
            content, attempt = os.urandom(size), attempt_of(key) or ""
            nodes["a"].put(key, content)
            assert protect(nodes, "b", attempt, {"a": {key: size}, "b": {}}) == size
            path = Path(folder, "b", parity_keys(attempt)[1])
            assert path.read_bytes() == content
            inodes.append(path.stat().st_ino)
            nodes["b"].delete(parity_keys(attempt))
    assert inodes[0] == inodes[1]
