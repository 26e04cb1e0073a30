"""Random meshes, placements, tensors and states, and what each rank of a job makes of them."""

from __future__ import annotations

import math
import os
import uuid
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast._face import wiring
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.tensor import MeshLayout, Role
from holdfast.base.ports.readable import Buffers, OnBytes
from holdfast.settings import Settings
from holdfast.training.coordination.job import Job
from tests.doubles.comm import ThreadComm
from tests.doubles.framework import GlobalTensor, NumpyFramework
from tests.property.held import LocalShards, any_held, meshes
from tests.support.tuning import tuned

SETTINGS = tuned(
    Settings(chunk_bytes=4096, arena_bytes_max=1 << 30, commit_timeout_seconds=20.0),
    window_bytes=8192,
    windows_in_flight=2,
    zero_copy_bytes_min=1,
)
WORLD_SIZE_MAX = 16


def examples(count: int) -> int:
    """Return how many examples a dear property takes: so many in the suite, `PROPERTY_TIMES` as many in a campaign."""
    return count * int(os.environ.get("PROPERTY_TIMES", 1))


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be saved, and how two jobs lay it out."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    seed: int
    role: Role
    saved: LocalShards
    loaded: LocalShards
    flips: tuple[int, ...] = ()
    """Bytes of which a bit is another than the seed says, counted round and round."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def array(self) -> NDArray[np.generic]:
        """Every bit pattern the dtype has: NaNs with payloads, negative zeros, subnormals."""
        chance = np.random.default_rng(self.seed)
        raw = chance.integers(0, 2 if self.dtype == "bool" else 256, self.bytes, dtype=np.uint8)
        for flip in self.flips if self.bytes else ():
            raw[flip % self.bytes] ^= 1
        return np.frombuffer(raw.tobytes(), DTYPES[self.dtype].numpy).reshape(self.shape)

    def for_save(self) -> GlobalTensor:
        held = self.saved
        return GlobalTensor(self.dtype, self.array(), held.layout, self.role, held.declared, held.siblings)

    def for_load(self) -> GlobalTensor:
        """A target in which every byte differs from what was saved, so that one not filled shows."""
        flipped = self.array().copy()
        raw = flipped.reshape(-1).view(np.uint8)
        raw ^= 1 if self.dtype == "bool" else 0xFF
        held = self.loaded
        return GlobalTensor(self.dtype, flipped, held.layout, self.role, held.declared, held.siblings)


@dataclass(frozen=True, slots=True)
class Job2Job:
    """A state saved by one job and loaded by another."""

    save_ranks: int
    load_ranks: int
    tensors: tuple[Tensor, ...]


_LENGTHS = st.sampled_from((0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17))
_DTYPES = st.sampled_from(sorted(DTYPES))
_ROLES = st.sampled_from(Role)
_NAMES = st.sampled_from(("layer", "ß.weight", "a.b.c"))
_LARGE_SHAPES = st.sampled_from(((4097,), (64, 80), (3, 1500), (1500, 3), (5, 1, 1111), (9001,), (2, 3, 4, 300)))
SHAPES = st.one_of(st.lists(_LENGTHS, max_size=4).map(tuple), _LARGE_SHAPES)


@st.composite
def tensors(draw: st.DrawFn, number: int, save_ranks: int, load_ranks: int, meshed: tuple[MeshLayout, ...]) -> Tensor:
    shape = draw(SHAPES)
    return Tensor(
        fqn=draw(_NAMES) + f".{number}",
        dtype=draw(_DTYPES),
        shape=shape,
        seed=draw(st.integers(0, 1 << 16)),
        role=draw(_ROLES),
        saved=draw(any_held(save_ranks, shape, meshed)),
        loaded=draw(any_held(load_ranks, shape, ())),
    )


RANKS = st.one_of(st.integers(1, 5), st.integers(1, WORLD_SIZE_MAX))
"""Mostly few: sixteen threads are slow, and what goes wrong mostly does on four."""


@st.composite
def jobs(draw: st.DrawFn) -> Job2Job:
    """Several tensors, most of them on a mesh that others share, as in a real model."""
    save_ranks, load_ranks = draw(RANKS), draw(RANKS)
    meshed = tuple(
        MeshLayout(shape, ranks, ()) for shape, ranks in draw(st.lists(meshes(save_ranks), min_size=1, max_size=2))
    )
    count = draw(st.integers(1, 6))
    return Job2Job(
        save_ranks,
        load_ranks,
        tuple(draw(tensors(number, save_ranks, load_ranks, meshed)) for number in range(count)),
    )


class PartlyCached(MemoryStore):
    """A store that has some bytes at hand, as a page cache does, and leaves rubbish behind them."""

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        """Fill the buffers from the front with as much as the key and the place say."""
        wanted = sum(buffer.nbytes for buffer in buffers)
        share = (wanted, wanted // 2, 0)[zlib.crc32(f"{key} {start}".encode()) % 3]
        data = self.get(key, 1 << 30)[start : start + share] + b"\xa5" * (wanted - share)
        left = share
        for buffer in buffers:
            buffer[:] = data[: buffer.nbytes]
            data = data[buffer.nbytes :]
            if on_bytes is not None:
                on_bytes(buffer[:left])
            left = max(left - buffer.nbytes, 0)
        return share


def fresh_store(object_bytes_max: int | None = None) -> MemoryStore:
    """An empty store that only this test knows."""
    return PartlyCached(uuid.uuid4().hex, object_bytes_max=object_bytes_max)


def empty(store: MemoryStore) -> None:
    """Give the memory of a store back."""
    store.delete([entry.key for entry in store.list()])


def run_of(comm: ThreadComm, store: MemoryStore, settings: Settings = SETTINGS) -> CheckpointManager:
    """A run as the public verbs would build it, over threads and numpy."""
    job = Job(comm, SystemClock(), settings, NumpyFramework(comm.rank), codecs=wiring.codecs())
    return CheckpointManager.over(store, job)


def state_on(tensors: tuple[Tensor, ...], view: Callable[[Tensor], GlobalTensor]) -> Mapping[str, object]:
    return {tensor.fqn: view(tensor) for tensor in tensors}
