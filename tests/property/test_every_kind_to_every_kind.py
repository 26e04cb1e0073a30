"""Each way to hold a tensor to each other, with every dtype: what chance might leave out of the random jobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.region import FlatRange
from holdfast.base.geometry.tensor import MeshLayout, Placement, Role
from holdfast.base.types.plan import OPAQUE_FOLDER
from holdfast.core.format.names import step_folder
from holdfast.stored.repository.catalog import read_index, read_manifest
from tests.property.held import LocalShards
from tests.property.states import SETTINGS, Job2Job, Tensor, empty, fresh_store
from tests.property.test_any_mesh_to_any_mesh import (
    STEP,
    load,
    require_balance,
    require_each_byte_once,
    require_each_element_once,
    require_written_by_holders,
    save,
)
from tests.support.tuning import tuned

SHAPE = (61, 67)
NUMEL = math.prod(SHAPE)


def plain(_: int) -> LocalShards:
    return LocalShards()


def rows(ranks: int) -> LocalShards:
    return LocalShards(MeshLayout((ranks,), tuple(range(ranks)), (Placement(0),)))


def replicated_columns(ranks: int) -> LocalShards:
    return LocalShards(MeshLayout((2, ranks // 2), tuple(range(ranks // 2 * 2)), (Placement(None), Placement(1))))


def strided(ranks: int) -> LocalShards:
    return LocalShards(MeshLayout((ranks // 2, 2), tuple(range(ranks // 2 * 2)), (Placement(0, 2), Placement(0))))


def strided_both_ways(ranks: int) -> LocalShards:
    return LocalShards(MeshLayout((ranks // 2, 2), tuple(range(ranks // 2 * 2)), (Placement(0, 4), Placement(1, 3))))


def flat_even(ranks: int) -> LocalShards:
    share = -(-NUMEL // ranks)
    return LocalShards(declared={r: (FlatRange(r * share, min((r + 1) * share, NUMEL)),) for r in range(ranks)})


def flat_round_robin(ranks: int) -> LocalShards:
    """Runs of 101 elements, none of which ends with a row but by chance, dealt in turn."""
    cuts = [*range(0, NUMEL, 101), NUMEL]
    runs = [FlatRange(a, b) for a, b in pairwise(cuts)]
    return LocalShards(declared={rank: tuple(runs[rank::ranks]) for rank in range(ranks)})


def flat_replicas(ranks: int) -> LocalShards:
    """All but the last rank hold the first part, together; an odd element count to share out."""
    cut = NUMEL * 3 // 4
    first: dict[int, tuple[FlatRange, ...]] = {rank: (FlatRange(0, cut),) for rank in range(ranks - 1)}
    return LocalShards(declared={**first, ranks - 1: (FlatRange(cut, NUMEL),)})


def boxes(ranks: int) -> LocalShards:
    """A cross through the tensor, its quarters cut again, dealt in turn."""
    cut = [
        Box((a, c), (b, d)) for a, b in ((0, 7), (7, 40), (40, 61)) for c, d in ((0, 1), (1, 30), (30, 66), (66, 67))
    ]
    return LocalShards(declared={rank: tuple(cut[rank::ranks]) for rank in range(ranks)})


KINDS: tuple[Callable[[int], LocalShards], ...] = (
    plain,
    rows,
    replicated_columns,
    strided,
    strided_both_ways,
    flat_even,
    flat_round_robin,
    flat_replicas,
    boxes,
)


Holder = Callable[[int], LocalShards]
Stored = tuple[MemoryStore, Holder]
"""Where a state is, and how it was held when it was saved."""


def job_of(saved: Holder, loaded: Holder) -> Job2Job:
    """Return a state with every dtype, saved on four ranks and loaded on five."""
    tensors = tuple(
        Tensor(f"t.{name}", name, SHAPE, number, Role.PARAMETER, saved(4), loaded(5))
        for number, name in enumerate(DTYPES)
    )
    return Job2Job(4, 5, tensors)


@pytest.fixture(scope="module")
def stored(request: pytest.FixtureRequest) -> Iterator[Stored]:
    """A state that was saved once, whichever way it is loaded."""
    saved: Holder = request.param
    store, job = fresh_store(), job_of(saved, plain)
    try:
        save(store, job)
        yield store, saved
    finally:
        empty(store)


def pairs() -> list[Any]:
    """Return every two ways; `make test` loads from each to two others, `make test-long` to all."""
    found = []
    for one, saved in enumerate(KINDS):
        for other, loaded in enumerate(KINDS):
            marks = [] if (other - one) % len(KINDS) in (1, 4) else [pytest.mark.long]
            found.append(pytest.param(saved, loaded, marks=marks, id=f"{saved.__name__}-{loaded.__name__}"))
    return found


@pytest.mark.parametrize("stored", KINDS, indirect=True, ids=lambda kind: kind.__name__)
def test_every_kind_stores_all_once(stored: Stored) -> None:
    store, saved = stored
    job = job_of(saved, plain)
    manifest = read_manifest(store, step_folder(STEP))
    index = read_index(store, step_folder(STEP), manifest)
    for tensor in job.tensors:
        require_each_element_once(tensor, index.pieces_of(tensor.fqn))
    require_each_byte_once(store, job, manifest, index)
    require_written_by_holders(job, index)
    require_balance(job, index)


@pytest.mark.parametrize(("stored", "loaded"), pairs(), indirect=["stored"])
def test_from_one_to_the_other(stored: Stored, loaded: Holder) -> None:
    store, saved = stored
    manifest = read_manifest(store, step_folder(STEP))
    load(store, job_of(saved, loaded), read_index(store, step_folder(STEP), manifest))


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_from_one_to_another_through_a_store_of_objects(number: int) -> None:
    cell_elements = 700
    saved, loaded = KINDS[number], KINDS[(number + 4) % len(KINDS)]
    job = job_of(saved, loaded)
    store = fresh_store(object_bytes_max=1 << 30)
    try:
        save(store, job, tuned(SETTINGS, cell_elements=cell_elements, full_pack_bytes=8 * cell_elements))
        manifest = read_manifest(store, step_folder(STEP))
        index = read_index(store, step_folder(STEP), manifest)
        for tensor in job.tensors:
            pieces = list(index.pieces_of(tensor.fqn))
            require_each_element_once(tensor, pieces)
            assert max(piece.region.numel for piece in pieces) <= cell_elements
        require_each_byte_once(store, job, manifest, index)
        require_written_by_holders(job, index)
        load(store, job, index)
    finally:
        empty(store)


def test_what_stock_readers_cannot_read_lies_apart() -> None:
    tensors = tuple(
        Tensor(f"{name}.{dtype}", dtype, SHAPE, 0, Role.PARAMETER, held(3), LocalShards())
        for name, held in (("flat", flat_even), ("box", rows))
        for dtype in ("float32", "complex32", "complex128")
    )
    store = fresh_store()
    try:
        save(store, Job2Job(3, 1, tensors))
        index = read_index(store, step_folder(STEP), read_manifest(store, step_folder(STEP)))
        apart = {fqn for fqn in index.tensors if all(p.pack.startswith(OPAQUE_FOLDER) for p in index.pieces_of(fqn))}
        beside = {
            fqn for fqn in index.tensors if not any(p.pack.startswith(OPAQUE_FOLDER) for p in index.pieces_of(fqn))
        }
        assert beside == {"box.float32"}
        assert apart == {"flat.float32", "flat.complex32", "flat.complex128", "box.complex32", "box.complex128"}
    finally:
        empty(store)
