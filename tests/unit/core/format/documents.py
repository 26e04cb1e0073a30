"""A manifest to start from, and a bound on what reading bad bytes may take."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.base.types.manifest import FileRecord, Manifest, Parent
from holdfast.base.types.values import Group

MEMORY_MAX = 32 << 20


@contextmanager
def little_memory() -> Iterator[None]:
    """Fail if a block takes far more memory than the few bytes it is given could justify."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY_MAX
    finally:
        tracemalloc.stop()


def manifest() -> Manifest:
    return Manifest(
        run_id="run",
        step=7,
        attempt="0123456789abcdef",
        created="2026-01-01T00:00:00+00:00",
        parent=Parent("run", 6, "f" * 32),
        world_size=2,
        layouts=({"mesh": [2], "placements": ["Shard(0)"], "tensors": 1},),
        software={"python": "3.11"},
        tensors=5,
        tensor_bytes=10927,
        aliases={"tied": "w"},
        tree=Group("dict", {"step": 7, "lr": 0.1, "name": "ü", "nested": Group("dict", {"t": (1, None)})}),
        packs=(
            FileRecord("r00000.safetensors", 1 << 16, "a" * 32),
            FileRecord("r00001.safetensors", 1 << 16, "a" * 32),
            FileRecord("r00001-1.safetensors", 4096, "b" * 32),
            FileRecord("enc/r00000.safetensors", 1 << 16, "b" * 32),
            FileRecord("enc/r00001.safetensors", 1 << 16, "b" * 32),
        ),
        parts=tuple(FileRecord(f"parts/r0000{n}.msgpack", 100, "c" * 32) for n in range(2)),
        indexes=(FileRecord("index-00000.msgpack", 300, "d" * 32),),
    )
