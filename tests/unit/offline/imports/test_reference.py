"""A step that references files elsewhere, loaded by several ranks: each opens them for itself, or gets their bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from holdfast._face import wiring
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.alone import AloneComm
from holdfast.backends.stores.foreign import References
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.base.geometry.tensor import MeshLayout, Placement
from holdfast.errors import InvalidError
from holdfast.offline.imports.import_step import import_step
from holdfast.settings import Settings
from holdfast.training.coordination.job import Job
from tests.doubles.comm import ThreadComm, ThreadGroup, outcomes_of_ranks
from tests.doubles.framework import GlobalTensor, NumpyFramework
from tests.unit.ranks import PATIENT, fresh_store

RANKS = 3
STEP = 5
ARRAYS = {
    "rows": np.arange(40 * 300, dtype=np.float32).reshape(40, 300),
    "whole": np.arange(9000, dtype=np.int64),
    "tiny": np.arange(3, dtype=np.uint8),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_file(ARRAYS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def store(source: Path) -> MemoryStore:
    store = fresh_store()
    job = Job(AloneComm(), SystemClock(), PATIENT)
    import_step(wiring.checkpoint_at(source, PATIENT), store, job, STEP, copied=False)
    job.close()
    return store


def played(store: MemoryStore, settings: Settings, roots: dict[int, list[str]]) -> list[object]:
    """Return for each rank what it read and got from others, or what it raised."""
    split = MeshLayout((RANKS,), tuple(range(RANKS)), (Placement(0),))

    def work(comm: ThreadComm) -> object:
        state = {
            "model.rows": GlobalTensor("float32", np.zeros((40, 300), np.float32), split),
            "model.whole": GlobalTensor("int64", np.zeros(9000, np.int64)),
            "model.tiny": GlobalTensor("uint8", np.zeros(3, np.uint8)),
        }
        job = Job(comm, SystemClock(), settings, NumpyFramework(comm.rank))
        run = CheckpointManager.over(store, job, References(roots.get(comm.rank, [])))
        try:
            assert run.load(state, strict=False) == STEP
        finally:
            run.close()
        for name, expected in ARRAYS.items():
            tensor = state[f"model.{name}"]
            for region in tensor.regions_on(comm.rank):
                part = region.relative_to((0,) * expected.ndim)  # type: ignore[union-attr]
                np.testing.assert_array_equal(tensor.array[part], expected[part])
        assert run.load_report is not None
        return run.load_report.bytes, run.load_report.exchanged_bytes

    return outcomes_of_ranks(RANKS, work, group=ThreadGroup(RANKS))


@pytest.mark.parametrize("exchange", ("never", "always"))
def test_every_rank_gets_what_it_wants(store: MemoryStore, source: Path, exchange: str) -> None:
    settings = replace(PATIENT, share_reads=exchange)
    found = played(store, settings, {rank: [str(source)] for rank in range(RANKS)})
    whole_bytes = ARRAYS["whole"].nbytes
    assert all(isinstance(each, tuple) for each in found), found
    read, exchanged = (sum(counts) for counts in zip(*found, strict=True))  # type: ignore[arg-type]
    assert (read > RANKS * whole_bytes) == (exchange == "never")
    assert (exchanged > 0) == (exchange == "always")


def test_where_one_rank_allows_nothing_every_rank_hears_of_it(store: MemoryStore, source: Path) -> None:
    for forbidden in (0, 2):
        roots = {rank: [str(source)] for rank in range(RANKS) if rank != forbidden}
        found = played(store, replace(PATIENT, share_reads="never"), roots)
        assert all(isinstance(each, InvalidError) and "allowed_roots" in str(each) for each in found), found
