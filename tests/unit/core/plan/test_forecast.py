"""What a forecast says, against each rank's whole load plan and against what real loads report."""

from __future__ import annotations

import math
import uuid
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import chunk_count
from holdfast.base.geometry.mesh import DescribedMesh, described_mesh
from holdfast.base.geometry.region import FlatRange, Region
from holdfast.base.geometry.tensor import Placement, TensorSpec
from holdfast.base.types.plan import Piece, WantedBoxes
from holdfast.core.plan.forecast import forecast
from holdfast.core.plan.reads import load_plan
from holdfast.errors import InvalidError, MissingError
from holdfast.settings import Settings
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.training.coordination.job import Job
from tests.doubles.comm import ThreadComm, run_ranks
from tests.doubles.framework import GlobalTensor, NumpyFramework
from tests.support.tuning import tuned

CHUNK = 64
SETTINGS = tuned(Settings(chunk_bytes=4096, commit_timeout_seconds=20.0), window_bytes=8192, windows_in_flight=2)


@st.composite
def meshes(draw: st.DrawFn) -> DescribedMesh:
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    placements = tuple(
        Placement(draw(st.sampled_from((None, 0, 0, 1, 2))), draw(st.sampled_from((1, 1, 2)))) for _ in shape
    )
    return DescribedMesh(tuple(f"d{n}" for n in range(len(shape))), shape, placements)


@st.composite
def stored(draw: st.DrawFn) -> dict[str, list[Piece]]:
    """Tensors as boxes of some mesh or as flat ranges, in packs of each writer."""
    pieces: dict[str, list[Piece]] = {}
    ends: dict[int, int] = {}
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
        spec = TensorSpec(f"t{number}", draw(st.sampled_from(("uint8", "float32", "complex128"))), shape)
        regions: list[Region] = [Box.whole(shape)]
        kind = draw(st.sampled_from(("whole", "mesh", "flat")))
        if kind == "mesh":
            mesh = draw(meshes())
            ranks = {mesh.twin_of(rank) for rank in range(mesh.ranks)}
            regions = sorted({box for rank in ranks for box in mesh.boxes_on(rank, shape)}, key=lambda box: box.start)
        elif kind == "flat":
            cuts = sorted(draw(st.lists(st.integers(0, math.prod(shape)), max_size=4)))
            regions = [FlatRange(a, b) for a, b in pairwise([0, *cuts, math.prod(shape)])]
        pieces[spec.fqn] = []
        for region in regions:
            pack = draw(st.integers(0, 2))
            count = chunk_count(region.numel * spec.itemsize, CHUNK)
            offset = ends.get(pack, 4096)
            pieces[spec.fqn].append(Piece(spec, region, f"r{pack:05d}.safetensors", offset, bytes(16 * count), CHUNK))
            ends[pack] = offset + pieces[spec.fqn][-1].bytes
    return pieces


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(stored(), meshes(), st.sampled_from((1, 3 * CHUNK, 1 << 20)))
def test_every_rank_is_told_what_its_load_plan_lists(
    pieces: dict[str, list[Piece]], mesh: DescribedMesh, run_bytes_max: int
) -> None:
    tensors = [each[0].tensor for each in pieces.values() if each]
    told = forecast(mesh, tensors, lambda fqn, _: pieces[fqn], run_bytes_max)
    assert [each.rank for each in told.ranks] == list(range(math.prod(mesh.shape)))
    for each in told.ranks:
        held = {tensor.fqn: mesh.boxes_on(each.rank, tensor.global_shape) for tensor in tensors}
        plan = load_plan([WantedBoxes(*item) for item in held.items()], lambda fqn, _: pieces[fqn], run_bytes_max)
        chunks = [chunk for run in plan.runs for chunk in run.chunks]
        assert (each.bytes, each.chunks, each.reads) == (plan.bytes, len(chunks), len(plan.runs))
        assert each.held_bytes == sum(box.numel * tensor.itemsize for tensor in tensors for box in held[tensor.fqn])
        assert each.bytes >= each.held_bytes
    total = sum(each.bytes for each in told.ranks)
    mean = total / len(told.ranks)
    assert told.bytes == total
    assert told.imbalance == pytest.approx(max(each.bytes for each in told.ranks) / mean if mean else 1.0)
    assert told.stored_bytes == sum(tensor.global_bytes for tensor in tensors)


# ------------------------------------------------------------------------------------------- against real loads


def arrays() -> dict[str, np.ndarray]:
    shapes = {"a": (64, 80), "b": (5000,), "c": (), "d": (3,), "e": (7, 1500), "f": (0, 4)}
    return {fqn: np.arange(math.prod(shape), dtype=np.float32).reshape(shape) for fqn, shape in shapes.items()}


def run_on(comm: ThreadComm, store: MemoryStore) -> CheckpointManager:
    return CheckpointManager.over(store, Job(comm, SystemClock(), SETTINGS, NumpyFramework(comm.rank)))


def laid_out(mesh: DescribedMesh) -> dict[str, object]:
    """The state of a job that has `mesh`, its boxes spelled out rank by rank."""
    return {
        fqn: GlobalTensor(
            "float32", array, declared={rank: mesh.boxes_on(rank, array.shape) for rank in range(mesh.ranks)}
        )
        for fqn, array in arrays().items()
    }


@pytest.fixture(scope="module")
def saved() -> MemoryStore:
    """A checkpoint of three ranks."""
    store = MemoryStore(uuid.uuid4().hex)

    def work(comm: ThreadComm) -> None:
        run = run_on(comm, store)
        run.save(1, laid_out(described_mesh("fsdp=3"))).wait()
        run.close()

    run_ranks(3, work)
    return store


def opened(store: MemoryStore) -> Checkpoint:
    return Checkpoint(CheckpointLocation(store, "step-000000000001/", 1), SETTINGS, lambda array, _: array)


@pytest.mark.parametrize(
    "text", ["dp=3", "fsdp=1", "fsdp=4", "dp=2,fsdp=2", "fsdp=2,tp=2", "fsdp=2,tp=2:S1", "tp=5:S1", "fsdp=3"]
)
def test_real_loads_read_what_was_forecast(saved: MemoryStore, text: str) -> None:
    told = opened(saved).plan_for(text)
    mesh = described_mesh(text)

    def work(comm: ThreadComm) -> int:
        run = run_on(comm, saved)
        run.load(laid_out(mesh))
        run.close()
        assert run.load_report is not None
        return run.load_report.bytes

    assert [each.bytes for each in told.ranks] == run_ranks(mesh.ranks, work)
    assert told.tensors == len(arrays())
    assert told.bytes > 0


def test_a_forecast_of_some_tensors(saved: MemoryStore) -> None:
    told = opened(saved).plan_for("dp=2", ["b", "d"])
    assert told.tensors == 2
    assert [each.held_bytes for each in told.ranks] == [4 * 5003] * 2
    assert opened(saved).plan_for("dp=2", []).imbalance == 1.0
    with pytest.raises(MissingError, match="no tensor 'x'"):
        opened(saved).plan_for("dp=2", ["x"])
    with pytest.raises(InvalidError, match="expected name=size"):
        opened(saved).plan_for("dp")
