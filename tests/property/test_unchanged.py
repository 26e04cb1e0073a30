"""Whatever changes from step to step, on any layout: what is left in earlier steps reads as it was saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.geometry.dtype import DTYPES
from holdfast.core.format.names import is_pack_name, step_folder, step_of_pack, step_pack_name
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.repository.catalog import read_manifest
from holdfast.stored.repository.publish import packs_named_by
from holdfast.stored.repository.timelines import committed_steps
from tests.doubles.comm import ThreadComm, run_ranks
from tests.doubles.framework import GlobalTensor
from tests.property.states import SETTINGS, Job2Job, Tensor, empty, examples, fresh_store, jobs, run_of, state_on
from tests.support.tuning import tuned

ANY_SIZE = tuned(SETTINGS, unchanged_bytes_min=1)
"""The smallest pieces are compared too."""

Changes = tuple[Mapping[int, int | None], ...]
"""By step, the numbers of the tensors that changed before it: in one byte, or everywhere where there is none."""


@dataclass(frozen=True)
class History:
    """A run that is saved by one job, then by another that loaded what the first left."""

    job: Job2Job
    before: Changes
    after: Changes
    kept: frozenset[int]
    """Which of its steps somebody keeps in the end, by their place in it."""

    index_chunks_max: int

    cell_elements: int | None
    """Where tensors are cut, in a store of objects; None: a store of files."""


@st.composite
def histories(draw: st.DrawFn) -> History:
    job = draw(jobs())
    where = st.one_of(st.none(), st.integers(0, 1 << 16))
    changes = st.dictionaries(st.integers(0, len(job.tensors) - 1), where, max_size=3)
    before = tuple(draw(st.lists(changes, min_size=2, max_size=4)))
    after = tuple(draw(st.lists(changes, min_size=1, max_size=3)))
    kept = draw(st.frozensets(st.integers(0, len(before) + len(after) - 1), min_size=1))
    return History(job, before, after, kept, draw(st.sampled_from((1 << 17, 3))), draw(st.sampled_from((None, 300))))


@settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(histories())
def test_every_step_reads_as_it_was_saved(history: History) -> None:
    store = fresh_store(None if history.cell_elements is None else 1 << 30)
    contents = contents_of(history)
    own = tuned(ANY_SIZE, index_chunks_max=history.index_chunks_max)
    if history.cell_elements is not None:
        own = tuned(own, cell_elements=history.cell_elements, full_pack_bytes=8 * history.cell_elements)
    split = len(history.before)

    def first_job(comm: ThreadComm) -> list[tuple[int, int]]:
        run = run_of(comm, store, own)
        reports = [
            run.save(step, state_on(content, Tensor.for_save)).wait() for step, content in enumerate(contents[:split])
        ]
        run.close()
        return [(each.bytes, each.unchanged_bytes) for each in reports if each is not None]

    def second_job(comm: ThreadComm) -> list[tuple[int, int]]:
        run = run_of(comm, store, own)
        target = state_on(contents[split - 1], Tensor.for_load)
        assert run.load(target) == split - 1
        reports = [
            run.save(split + number, state_on(content, laid_out_anew)).wait()
            for number, content in enumerate(contents[split:])
        ]
        run.close()
        return [(each.bytes, each.unchanged_bytes) for each in reports if each is not None]

    try:
        by_rank = run_ranks(history.job.save_ranks, first_job)
        require_counted(contents[:split], by_rank)
        by_rank = run_ranks(history.job.load_ranks, second_job)
        require_counted(contents[split:], by_rank)
        for step, content in enumerate(contents):
            require_flattened(store, step)
            require_reads(store, step, content)
        require_alone(store, len(contents) - 1, contents[-1])
        keep_only(store, history.kept)
        for step in history.kept:
            require_reads(store, step, contents[step])
    finally:
        empty(store)


def contents_of(history: History) -> list[tuple[Tensor, ...]]:
    """Return what each step holds."""
    now = list(history.job.tensors)
    found = []
    for changed in (*history.before, *history.after):
        for number, where in changed.items():
            old = now[number]
            new = replace(old, seed=old.seed + 1) if where is None else replace(old, flips=(*old.flips, where))
            now[number] = new
        found.append(tuple(now))
    return found


def laid_out_anew(tensor: Tensor) -> GlobalTensor:
    """Return a tensor as the second job holds it."""
    return GlobalTensor(tensor.dtype, tensor.array(), tensor.loaded.layout, tensor.role, tensor.loaded.declared)


def require_counted(contents: list[tuple[Tensor, ...]], by_rank: list[list[tuple[int, int]]]) -> None:
    """Require that nothing is written that the step before holds, laid out as it is."""
    for number, content in enumerate(contents):
        reports = [rank[number] for rank in by_rank]
        assert sum(map(sum, reports)) == sum(tensor.bytes for tensor in content)
        if number:
            old = contents[number - 1]
            changed = sum(new.bytes for new, old in zip(content, old, strict=True) if new != old)
            assert sum(written for written, _ in reports) <= changed


def require_flattened(store: MemoryStore, step: int) -> None:
    """Require that every pack a step names is one that its own step wrote, as that says."""
    for pack in read_manifest(store, step_folder(step)).packs:
        other = step_of_pack(pack.name)
        if other is None:
            assert is_pack_name(pack.name)
            continue
        manifest = read_manifest(store, step_folder(other))
        records = {step_pack_name(other, manifest.attempt, each.name): each for each in manifest.packs}
        assert (records[pack.name].bytes, records[pack.name].digest) == (pack.bytes, pack.digest)


def require_alone(store: MemoryStore, step: int, content: tuple[Tensor, ...]) -> None:
    """Require that the folder of a step reads without the rest of the run: every rank linked the packs it refers to."""
    alone = fresh_store()
    try:
        for entry in store.list(step_folder(step)):
            alone.put(entry.key.removeprefix(step_folder(step)), store.get(entry.key, entry.bytes))
        require_reads_at(CheckpointLocation(alone, "", None), content)
    finally:
        empty(alone)


def require_reads(store: MemoryStore, step: int, content: tuple[Tensor, ...]) -> None:
    require_reads_at(CheckpointLocation(store, step_folder(step), step, root=store), content)


def require_reads_at(location: CheckpointLocation, content: tuple[Tensor, ...]) -> None:
    where = location.url
    checkpoint = Checkpoint(location, ANY_SIZE, lambda array, dtype: array)
    assert list(checkpoint.verify()) == []
    for tensor in content:
        found = checkpoint.read(tensor.fqn)
        assert isinstance(found, np.ndarray)
        assert found.view(DTYPES[tensor.dtype].numpy).tobytes() == tensor.array().tobytes(), f"{where}: {tensor.fqn}"


def keep_only(store: MemoryStore, kept: frozenset[int]) -> None:
    """Remove every manifest of other steps, and every pack that no manifest names then."""
    store.delete([step_folder(step) + "manifest.json" for step in committed_steps(store) if step not in kept])
    named = packs_named_by(read_manifest(store, step_folder(step)) for step in kept)
    packs = [entry.key for entry in store.list() if entry.key.endswith(".safetensors")]
    assert named <= set(packs)
    store.delete([key for key in packs if key not in named])
