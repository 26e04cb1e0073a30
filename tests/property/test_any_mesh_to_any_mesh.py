"""Whatever layout a state was saved on, it comes back bit-exact on whatever layout it is loaded on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.placement import coordinate_of, sibling_ranks
from holdfast.base.geometry.region import FlatRange, Region, contains, region_boxes
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.plan import OPAQUE_FOLDER, Piece, WantedBoxes
from holdfast.base.types.reports import LoadReport
from holdfast.core.format.index.index import Index
from holdfast.core.format.names import rank_of_pack, step_folder
from holdfast.core.plan.reads import load_plan
from holdfast.settings import Settings
from holdfast.stored.repository.catalog import read_index, read_manifest
from tests.doubles.comm import ThreadComm, run_ranks
from tests.doubles.framework import GlobalTensor
from tests.property.states import SETTINGS, Job2Job, Tensor, empty, examples, fresh_store, jobs, run_of, state_on

STEP = 7


@settings(
    max_examples=examples(50),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(jobs())
def test_saved_on_one_layout_loaded_on_another(job: Job2Job) -> None:
    store = fresh_store()
    try:
        save(store, job)
        folder = step_folder(STEP)
        manifest = read_manifest(store, folder)
        index = read_index(store, folder, manifest)
        stored = [tensor for tensor in job.tensors if tensor.fqn in index.tensors]
        assert {tensor.fqn for tensor in stored} == {each.fqn for each in job.tensors}
        for tensor in stored:
            require_each_element_once(tensor, index.pieces_of(tensor.fqn))
        require_each_byte_once(store, job, manifest, index)
        require_written_by_holders(job, index)
        require_balance(job, index)
        load(store, job, index)
    finally:
        empty(store)


def save(store: MemoryStore, job: Job2Job, chosen: Settings = SETTINGS) -> None:
    def work(comm: ThreadComm) -> int:
        run = run_of(comm, store, chosen)
        report = run.save(STEP, {**state_on(job.tensors, Tensor.for_save), "step": 7}).wait()
        run.close()
        assert report is not None
        return report.bytes

    written = run_ranks(job.save_ranks, work)
    assert sum(written) == sum(tensor.bytes for tensor in job.tensors), f"bytes by rank: {written}"


def require_each_element_once(tensor: Tensor, pieces: Sequence[Piece]) -> None:
    count = np.zeros(tensor.shape, dtype=np.int64)
    for piece in pieces:
        # A piece names an element once, so that adding to all of them at a time counts right.
        count.reshape(-1)[elements_of(piece.region, tensor.shape)] += 1
    assert (count == 1).all(), f"{tensor.fqn}: covered {count.min()} to {count.max()} times by {pieces}"


def require_each_byte_once(store: MemoryStore, job: Job2Job, manifest: Manifest, index: Index) -> None:
    data_bytes = 0
    for pack in manifest.packs:
        raw = store.get(f"{step_folder(STEP)}{manifest.attempt}/{pack.name}", 1 << 30)
        header_bytes = 8 + int.from_bytes(raw[:8], "little")
        assert header_bytes % 4096 == 0
        data_bytes += len(raw) - header_bytes
        at = header_bytes
        for piece in sorted((p for p in index.all_pieces() if p.pack == pack.name), key=lambda p: (p.offset, p.bytes)):
            assert piece.offset == at
            assert piece.offset % piece.tensor.itemsize == 0
            assert len(piece.digests) == 16 * math.ceil(piece.bytes / SETTINGS.chunk_bytes)
            at += piece.bytes
        assert at == len(raw)
    assert data_bytes == sum(tensor.bytes for tensor in job.tensors) == manifest.tensor_bytes


def require_written_by_holders(job: Job2Job, index: Index) -> None:
    for tensor in job.tensors:
        held = tensor.for_save()
        for piece in index.pieces_of(tensor.fqn):
            rank = rank_of_pack(piece.pack)
            assert any(contains(each, piece.region) for each in held.regions_on(rank)), f"rank {rank}: {piece}"
            readable = not isinstance(piece.region, FlatRange) and bool(DTYPES[tensor.dtype].safetensors)
            assert piece.pack.startswith(OPAQUE_FOLDER) != readable, (
                "stock readers see what they can make sense of, only that"
            )


def require_balance(job: Job2Job, index: Index) -> None:
    """Within one replica group no member writes more than its even part and the unit that cannot be cut."""
    loads: Counter[tuple[tuple[int, ...], int]] = Counter()
    units: Counter[tuple[int, ...]] = Counter()
    for tensor in job.tensors:
        held = tensor.for_save()
        groups = {rank: replicas_of(held, rank) for rank in range(job.save_ranks) if held.is_on(rank)}
        for rank, group in groups.items():
            if group is not None:
                assert rank in group
                assert all(groups[other] == group for other in group)
                for region in held.regions_on(rank):
                    units[group] = max(units[group], uncut_bytes(tensor, region))
        for piece in index.pieces_of(tensor.fqn):
            rank = rank_of_pack(piece.pack)
            group = groups[rank]
            if group is not None:
                loads[group, rank] += piece.bytes
    for group, unit in units.items():
        written = [loads[group, rank] for rank in group]
        even = sum(written) / len(group)
        assert max(abs(each - even) for each in written) <= unit + 1, f"{group}: {written}, unit {unit}"


def replicas_of(held: GlobalTensor, rank: int) -> tuple[int, ...] | None:
    """Return the ranks with the regions of a rank, those on sibling meshes included; None for a plain tensor."""
    layout = held.layout_on(rank)
    if layout is None or not held.siblings:
        return held.holders_with(rank)
    meshes = [each.mesh for each in (held.layout, *held.siblings) if each is not None]
    return sibling_ranks(layout, coordinate_of(layout, rank), meshes)


def uncut_bytes(tensor: Tensor, region: Region) -> int:
    itemsize = DTYPES[tensor.dtype].itemsize
    held_bytes = region.numel * itemsize
    if held_bytes < SETTINGS.chunk_bytes:
        return held_bytes
    if isinstance(region, FlatRange):
        return itemsize
    longer = [length for length in region.shape if length > 1]
    return held_bytes // longer[0] if longer else held_bytes


def load(store: MemoryStore, job: Job2Job, index: Index) -> None:
    def work(comm: ThreadComm) -> tuple[dict[str, object], LoadReport]:
        run = run_of(comm, store)
        state = {**state_on(job.tensors, Tensor.for_load), "step": 0}
        assert run.load(state) == STEP
        run.close()
        assert run.load_report is not None
        return state, run.load_report

    for rank, (state, report) in enumerate(run_ranks(job.load_ranks, work)):
        assert state["step"] == 7
        for tensor in job.tensors:
            target = state[tensor.fqn]
            assert isinstance(target, GlobalTensor)
            require_filled_within(tensor, target, rank)
        require_needed_chunks(job, index, rank, report)


def require_filled_within(tensor: Tensor, target: GlobalTensor, rank: int) -> None:
    """Every bit of what the rank wants is as saved, and nothing else was touched."""
    expected = tensor.for_load().array.copy()
    for region in target.regions_on(rank):
        where = elements_of(region, tensor.shape)
        expected.reshape(-1)[where] = tensor.array().reshape(-1)[where]
    assert target.array.tobytes() == expected.tobytes(), f"{tensor.fqn} on rank {rank}"


def require_needed_chunks(job: Job2Job, index: Index, rank: int, report: LoadReport) -> None:
    wanted = {tensor.fqn: tensor.for_load().regions_on(rank) for tensor in job.tensors}
    boxes = {t.fqn: tuple(box for each in wanted[t.fqn] for box in region_boxes(each, t.shape)) for t in job.tensors}
    plan = load_plan([WantedBoxes(*each) for each in boxes.items()], index.pieces_near, SETTINGS._tuning.window_bytes)
    planned = [(run.pack, chunk.offset, chunk.bytes) for run in plan.runs for chunk in run.chunks]
    needed = {
        (piece.pack, piece.offset + start, min(SETTINGS.chunk_bytes, piece.bytes - start))
        for fqn, regions in wanted.items()
        for piece in index.pieces_of(fqn)
        for start in chunk_starts(piece, regions, SETTINGS)
    }
    assert len(planned) == len(set(planned)), "a chunk is read twice"
    assert set(planned) == needed
    for run in plan.runs:
        assert (run.start, run.stop) == (run.chunks[0].offset, run.chunks[-1].offset + run.chunks[-1].bytes)
        assert run.stop - run.start == sum(chunk.bytes for chunk in run.chunks), "a run has a gap"
        assert run.stop - run.start <= SETTINGS._tuning.window_bytes
    assert report.bytes == sum(count for _, _, count in needed)


def chunk_starts(piece: Piece, regions: Sequence[Region], settings: Settings) -> set[int]:
    """Which chunks hold an element of the regions, element by element."""
    shape = piece.tensor.global_shape
    wanted = np.zeros(math.prod(shape), dtype=bool)
    for region in regions:
        wanted[elements_of(region, shape)] = True
    found = np.flatnonzero(wanted[elements_of(piece.region, shape)]) * piece.tensor.itemsize // settings.chunk_bytes
    return {int(number) * settings.chunk_bytes for number in np.unique(found)}


def elements_of(region: Region, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the row-major numbers of a region's elements, in the region's own order."""
    numbers = np.arange(math.prod(shape), dtype=np.int64)
    if isinstance(region, FlatRange):
        return numbers[region.start : region.stop]
    return numbers.reshape(shape)[region.relative_to((0,) * len(shape))].reshape(-1)
