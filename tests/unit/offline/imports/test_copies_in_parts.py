"""Copies to a store of objects cut large tensors: stored ones are read in parts, not in the order of their bytes."""

from __future__ import annotations

import uuid
from dataclasses import replace

import numpy as np
import pytest

from holdfast._face import wiring
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.memory import MemoryStore
from holdfast.backends.torch.comm import SoloComm
from holdfast.base.clock import SystemClock
from holdfast.base.geometry.region import FlatRange
from holdfast.core.format.names import step_folder
from holdfast.errors import CorruptError
from holdfast.offline.imports.copy import saved_again
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.training.coordination.job import Job
from tests.doubles.comm import ThreadComm, run_ranks
from tests.doubles.framework import GlobalTensor, NumpyFramework
from tests.support.chunk_decoder import stored_pieces, stored_tensors
from tests.support.coded_states import rounded_to_bfloat16
from tests.support.tuning import tuned

STORED = tuned(
    Settings(chunk_bytes=2 * PAGE_BYTES), window_bytes=2 * PAGE_BYTES, windows_in_flight=2, coded_bytes_min=256
)
COPIED = tuned(
    replace(STORED, chunk_bytes=PAGE_BYTES),
    coded_bytes_min=256,
    cell_elements=7000,
    full_pack_bytes=1 << 15,
)


def state() -> dict[str, object]:
    masters = (np.random.default_rng(0).standard_normal((2, 150, 200)) * 0.02).astype(np.float32)
    halves = {0: (FlatRange(0, 33_333),), 1: (FlatRange(33_333, 60_000),)}
    return {
        "model.w": GlobalTensor("bfloat16", rounded_to_bfloat16(masters)),
        "masters.w": GlobalTensor("float32", masters),
        "moments.w": GlobalTensor("float32", masters * 2, declared=halves),
    }


def stored_with(compression: str) -> MemoryStore:
    store, settings = MemoryStore(uuid.uuid4().hex), replace(STORED, compression=compression)

    def save(comm: ThreadComm) -> None:
        job = Job(comm, SystemClock(), settings, NumpyFramework(comm.rank), codecs=wiring.codecs())
        run = CheckpointManager.over(store, job)
        run.save(1, state()).wait()
        run.close()

    run_ranks(2, save)
    return store


def copy(source: MemoryStore, compression: str) -> MemoryStore:
    location = CheckpointLocation(source, step_folder(1), 1, root=source)
    checkpoint = Checkpoint(location, STORED, lambda array, _: array, codecs=wiring.codecs())
    target = MemoryStore(uuid.uuid4().hex, object_bytes_max=1 << 20)
    settings = replace(COPIED, compression=compression)
    job = Job(SoloComm(), SystemClock(), settings, NumpyFramework(0), codecs=wiring.codecs())
    saved_again(checkpoint, CheckpointLocation(target, "", None), job)
    return target


@pytest.mark.parametrize("before", ["off", "on"])
@pytest.mark.parametrize("after", ["off", "on"])
def test_what_is_cut_is_copied_bit_for_bit(before: str, after: str) -> None:
    copied = copy(stored_with(before), after)
    assert stored_tensors(copied) == {
        fqn: tensor.array.tobytes() for fqn, tensor in state().items() if isinstance(tensor, GlobalTensor)
    }
    assert all(len(pieces) > 2 for pieces in stored_pieces(copied).values())


@pytest.mark.parametrize("before", ["off", "on"])
def test_damage_in_a_part_is_found(before: str) -> None:
    store = stored_with(before)
    for entry in list(store.list()):
        if entry.key.endswith(".safetensors"):
            data = bytearray(store.get(entry.key, 1 << 30))
            data[-300] ^= 1
            store.delete([entry.key])
            store.put(entry.key, bytes(data))
    with pytest.raises(CorruptError, match="Read another copy"):
        copy(store, "off")
