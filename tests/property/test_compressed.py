"""A compressed state comes back bit for bit on any layout, whether ranks exchange bytes or not.

A state has 16-bit weights with float32 masters, moments, and tensors of any bits and dtypes. Tiny limits let small
tensors be coded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast._face import wiring
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.geometry.tensor import MeshLayout, Placement, Role
from holdfast.base.types.reports import LoadReport
from holdfast.core.format.index.index import Index
from holdfast.core.format.names import is_coded_pack_name, step_folder
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.repository.catalog import read_index, read_manifest
from tests.doubles.comm import ThreadComm, run_ranks
from tests.doubles.framework import GlobalTensor
from tests.property.held import LocalShards, any_held, meshes
from tests.property.states import SETTINGS, Job2Job, Tensor, empty, examples, fresh_store, run_of, state_on, tensors
from tests.property.test_any_mesh_to_any_mesh import require_filled_within
from tests.support.coded_states import rounded_to_bfloat16
from tests.support.tuning import tuned

STEP = 7
ON = tuned(
    replace(SETTINGS, compression="on"),
    coded_bytes_min=256,
    zero_copy_bytes_min=1,
    exchange_bytes_max=64 << 10,
)
_SHAPES = st.sampled_from(((4097,), (64, 80), (3, 1500), (1500, 3), (5, 1, 1111), (9001,), (2, 3, 4, 300), (100,)))


@dataclass(frozen=True, slots=True)
class Trained(Tensor):
    """Numbers as training leaves them; a few elements have any bits, NaN payloads and infinities among them."""

    def array(self) -> NDArray[np.generic]:
        chance = np.random.default_rng(self.seed)
        masters = (chance.standard_normal(self.shape) * 0.02).astype(np.float32)
        flat = masters.reshape(-1).view(np.uint32)
        odd = chance.integers(0, flat.size, chance.integers(0, 9))
        flat[odd] = chance.integers(0, 1 << 32, len(odd), dtype=np.uint32)
        if self.fqn.startswith("moments."):
            with np.errstate(all="ignore"):
                return np.square(masters)
        if self.dtype == "float32":
            return masters
        weights = rounded_to_bfloat16(masters)
        raw = weights.reshape(-1)
        for flip in self.flips:
            raw[flip % raw.size] ^= 1  # Where a weight is not its master rounded.
        return weights


@st.composite
def trained_jobs(draw: st.DrawFn) -> Job2Job:
    """A few parameters with masters and moments, most of them laid out alike, beside tensors of any kind."""
    save_ranks, load_ranks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    meshed = tuple(MeshLayout(shape, ranks, ()) for shape, ranks in [draw(meshes(save_ranks))])
    found: list[Tensor] = [
        draw(tensors(number, save_ranks, load_ranks, meshed)) for number in range(draw(st.integers(0, 1)))
    ]
    for number in range(draw(st.integers(1, 2))):
        shape, seed = draw(_SHAPES), draw(st.integers(0, 1 << 16))
        saved, loaded = draw(any_held(save_ranks, shape, meshed)), draw(any_held(load_ranks, shape, ()))
        flips = tuple(draw(st.lists(st.integers(0, 1 << 16), max_size=3)))
        weight = Trained(f"model.{number}.weight", "bfloat16", shape, seed, Role.PARAMETER, saved, loaded, flips)
        master = replace(weight, fqn=f"masters.{number}.weight", dtype="float32", role=Role.OPTIMIZER, flips=())
        moment = replace(master, fqn=f"moments.{number}.weight.exp_avg_sq")
        if draw(st.booleans()):
            master = replace(master, loaded=draw(any_held(load_ranks, shape, ())))
        if draw(st.integers(0, 3)) == 0:
            master = replace(master, saved=draw(any_held(save_ranks, shape, meshed)))
        found += [weight, master, moment]
    return Job2Job(save_ranks, load_ranks, tuple(found))


@settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(trained_jobs(), st.sampled_from(("never", "always", "auto")), st.sampled_from((None, 1 << 30)))
def test_saved_on_one_layout_loaded_on_another(job: Job2Job, share_reads: str, object_bytes_max: int | None) -> None:
    store = fresh_store(object_bytes_max)
    try:
        save(store, job)
        require_undamaged(store)
        load(store, job, share_reads)
    finally:
        empty(store)


def save(store: MemoryStore, job: Job2Job) -> None:
    def work(comm: ThreadComm) -> None:
        run = run_of(comm, store, ON)
        run.save(STEP, {**state_on(job.tensors, Tensor.for_save), "step": 7}).wait()
        run.close()

    run_ranks(job.save_ranks, work)


def require_undamaged(store: MemoryStore) -> None:
    location = CheckpointLocation(store, step_folder(STEP), STEP, root=store)
    checkpoint = Checkpoint(location, ON, lambda array, _: array, codecs=wiring.codecs())
    assert list(checkpoint.verify()) == []


def load(store: MemoryStore, job: Job2Job, share_reads: str) -> list[LoadReport]:
    def work(comm: ThreadComm) -> tuple[dict[str, object], LoadReport]:
        run = run_of(comm, store, replace(ON, share_reads=share_reads))
        state = {**state_on(job.tensors, Tensor.for_load), "step": 0}
        assert run.load(state) == STEP
        run.close()
        assert run.load_report is not None
        return state, run.load_report

    found = run_ranks(job.load_ranks, work)
    for rank, (state, _) in enumerate(found):
        assert state["step"] == 7
        for tensor in job.tensors:
            target = state[tensor.fqn]
            assert isinstance(target, GlobalTensor)
            require_filled_within(tensor, target, rank)
    return [report for _, report in found]


@pytest.mark.parametrize("load_ranks", (2, 3, 5))
def test_a_job_reads_each_stored_byte_once(load_ranks: int) -> None:
    """Sharded alike, weights and masters need each other's bytes on the same ranks."""
    shape, store = (1024, 70), fresh_store()
    weight = Trained("model.weight", "bfloat16", shape, 5, Role.PARAMETER, sharded_rows(3), sharded_rows(load_ranks))
    master = replace(weight, fqn="masters.weight", dtype="float32", role=Role.OPTIMIZER)
    job = Job2Job(3, load_ranks, (weight, master, replace(master, fqn="moments.weight.exp_avg_sq")))
    try:
        save(store, job)
        index = require_paired(store)
        stored_bytes = sum(piece.stored_bytes for piece in index.all_pieces())
        assert stored_bytes < 0.75 * sum(piece.bytes for piece in index.all_pieces())
        read_bytes = sum(report.bytes for report in load(store, job, "always"))
        assert read_bytes <= 1.05 * stored_bytes
        alone_bytes = [report.bytes for report in load(store, job, "never")]
        assert sum(alone_bytes) < 1.3 * stored_bytes, "chunks at the edges of shards are read twice"
    finally:
        empty(store)


def sharded_rows(ranks: int) -> LocalShards:
    return LocalShards(MeshLayout((ranks,), tuple(range(ranks)), (Placement(0),)))


def require_paired(store: MemoryStore) -> Index:
    """Require that masters are coded against their weights; return the index."""
    folder = step_folder(STEP)
    manifest = read_manifest(store, folder)
    index = read_index(store, folder, manifest)
    assert any(is_coded_pack_name(pack.name) for pack in manifest.packs)
    for piece in index.pieces_of("masters.weight"):
        assert piece.coding is not None and piece.coding.pair_fqn == "model.weight"
        assert piece.coding.codecs == ("residual",)
    return index
