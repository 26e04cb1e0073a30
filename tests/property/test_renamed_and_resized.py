"""Whatever names, shapes and layout a state was saved with, `rename` and `partial` fill another one to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.geometry.box import Box
from holdfast.base.types.reports import LoadReport, PartlyFilled
from tests.doubles.comm import ThreadComm, run_ranks
from tests.doubles.framework import GlobalTensor
from tests.property.held import LocalShards, any_held
from tests.property.states import RANKS, SETTINGS, Tensor, empty, examples, fresh_store, run_of, state_on, tensors

STEP = 7


@dataclass(frozen=True, slots=True)
class Resized:
    """A saved tensor, and the name, shape and layout that the loading job has for it."""

    saved: Tensor
    name: str
    shape: tuple[int, ...]
    held: LocalShards

    @property
    def filled(self) -> Box:
        return Box.whole(tuple(map(min, self.shape, self.saved.shape)))

    def target(self) -> GlobalTensor:
        """A tensor of a pattern that no stored byte leaves as it is."""
        flipped = self.saved.for_load().array
        array = np.empty(self.shape, flipped.dtype)
        array.reshape(-1).view(np.uint8)[:] = 1
        array[self.inside] = flipped[self.inside]
        held = self.held
        return GlobalTensor(self.saved.dtype, array, held.layout, self.saved.role, held.declared, held.siblings)

    @property
    def inside(self) -> tuple[slice, ...]:
        return self.filled.relative_to((0,) * len(self.shape))


@st.composite
def resized(draw: st.DrawFn, number: int, name: str, save_ranks: int, load_ranks: int) -> Resized:
    saved = draw(tensors(number, save_ranks, load_ranks, ()))
    lengths = [st.one_of(st.just(length), st.integers(0, 2 * length + 3)) for length in saved.shape]
    shape = draw(st.tuples(*lengths)) if saved.bytes < 4096 else saved.shape
    return Resized(saved, name, shape, draw(any_held(load_ranks, shape, ())))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, int, tuple[Resized, ...], str]:
    save_ranks, load_ranks = draw(RANKS), draw(RANKS)
    count = draw(st.integers(1, 4))
    # Swapped among themselves, moved below another key, or kept.
    names = draw(st.permutations([f"new.{number}" for number in range(count)]))
    found = tuple(draw(resized(number, name, save_ranks, load_ranks)) for number, name in enumerate(names))
    if draw(st.booleans()):
        olds = draw(st.permutations([each.saved.fqn for each in found]))
        found = tuple(replace(each, name=old) for each, old in zip(found, olds, strict=True))
    return save_ranks, load_ranks, found, draw(st.sampled_from(("auto", "always")))


@settings(
    max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(jobs())
def test_any_names_any_shapes_any_layouts(job: tuple[int, int, tuple[Resized, ...], str]) -> None:
    save_ranks, load_ranks, found, share_reads = job
    store = fresh_store()
    # By way of names that nothing has, so that two names may change places.
    rename = {each.saved.fqn: f"between.{number}" for number, each in enumerate(found)}
    rename |= {f"between.{number}": each.name for number, each in enumerate(found)}
    try:
        save(store, save_ranks, [each.saved for each in found])

        def work(comm: ThreadComm) -> tuple[dict[str, GlobalTensor], LoadReport]:
            run = run_of(comm, store, replace(SETTINGS, share_reads=share_reads))
            state = {each.name: each.target() for each in found}
            assert run.load(state, rename=rename, partial=[each.name for each in found]) == STEP
            run.close()
            assert run.load_report is not None
            return state, run.load_report

        for rank, (state, report) in enumerate(run_ranks(load_ranks, work)):
            for each in found:
                require_overlap_filled(each, state[each.name], rank)
            assert report.partial == tuple(
                PartlyFilled(each.name, each.filled.stop, each.shape, each.saved.shape)
                for each in found
                if each.shape != each.saved.shape
            )
    finally:
        empty(store)


def save(store: MemoryStore, ranks: int, saved: Sequence[Tensor]) -> None:
    def work(comm: ThreadComm) -> None:
        run = run_of(comm, store)
        run.save(STEP, state_on(tuple(saved), Tensor.for_save)).wait()
        run.close()

    run_ranks(ranks, work)


def require_overlap_filled(each: Resized, target: GlobalTensor, rank: int) -> None:
    """Every bit of the overlap that the rank holds is as saved, and nothing else was touched."""
    expected = each.target().array.copy()
    stored: NDArray[np.generic] = expected.copy()
    stored[each.inside] = each.saved.array()[each.inside]
    numbers = np.arange(expected.size).reshape(each.shape)
    for region in target.regions_on(rank):
        if isinstance(region, Box):
            held = numbers[region.relative_to((0,) * len(each.shape))].reshape(-1)
        else:
            held = numbers.reshape(-1)[region.start : region.stop]
        expected.reshape(-1)[held] = stored.reshape(-1)[held]
    assert target.array.tobytes() == expected.tobytes(), f"{each.name} on rank {rank}"
