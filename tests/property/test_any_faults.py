"""Any state, grid, pack size, window and order of faults: what is loaded is what was saved, or an error comes.

`ANY_FAULTS_EXAMPLES=n` draws more of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.wrappers.retrying import RetryingStore
from holdfast.base.geometry.tensor import MeshLayout
from holdfast.base.ports.store import Store
from holdfast.base.types.reports import SaveReport
from holdfast.errors import CheckpointError, CorruptError
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.stored.repository.timelines import committed_steps
from tests.doubles.comm import ThreadComm, outcomes_of_ranks
from tests.doubles.framework import GlobalTensor
from tests.property.held import meshes
from tests.property.states import Tensor, empty, fresh_store, run_of, state_on, tensors
from tests.property.test_any_mesh_to_any_mesh import elements_of
from tests.support.tuning import tuned
from tests.unit.backends.stores.wrappers.by_hand import ClockBySleep
from tests.unit.backends.stores.wrappers.network import (
    FLIPPED,
    LATE,
    LOST_AFTER,
    LOST_BEFORE,
    REFUSED,
    NetworkStore,
    drawn,
)
from tests.unit.ranks import PATIENT, saved

EXAMPLES = int(os.environ.get("ANY_FAULTS_EXAMPLES", "20"))
STEPS = (7, 8)
FOR_EVER = 1e6


@dataclass(frozen=True)
class Case:
    """A state at two steps, how it is stored, and what the network does."""

    save_ranks: int
    load_ranks: int
    states: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    settings: Settings
    object_bytes_max: int
    faults: tuple[str, ...]
    passing: float
    seed: int

    @property
    def is_survivable(self) -> bool:
        """Whether every fault passes if the call is made again for long enough."""
        return self.settings.object_store.retry_seconds_per_call == FOR_EVER and FLIPPED not in self.faults

    def state(self, step: int) -> tuple[Tensor, ...]:
        return self.states[STEPS.index(step)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    # Ranks of which one fails wait for the others, and that is what other tests are about.
    is_survivable = draw(st.booleans())
    save_ranks, load_ranks = (draw(st.integers(1, 3)) if is_survivable else 1), draw(st.integers(1, 3))
    meshed = tuple(
        MeshLayout(shape, ranks, ()) for shape, ranks in draw(st.lists(meshes(save_ranks), min_size=1, max_size=2))
    )
    first = tuple(draw(tensors(number, save_ranks, load_ranks, meshed)) for number in range(draw(st.integers(1, 5))))
    # Some change as a whole, some in a byte, some not at all.
    change = st.sampled_from(({}, {"seed": 99}, {"flips": (5,)}))
    second = tuple(replace(each, **draw(change)) for each in first)
    faults = (REFUSED, LOST_BEFORE, LOST_AFTER)
    if draw(st.booleans()):
        faults = (*faults, LATE)
    if not is_survivable and draw(st.booleans()):
        faults = (*faults, FLIPPED)
    retry_seconds = FOR_EVER if is_survivable else draw(st.sampled_from([0.0, 1.0, 20.0]))
    pages = st.integers(1, 4)
    chosen = tuned(
        replace(
            PATIENT,
            chunk_bytes=draw(pages) * PAGE_BYTES,
            arena_bytes_max=draw(st.sampled_from([None, 0, 64 * PAGE_BYTES])),
            deduplicate=draw(st.booleans()),
            collect_grace_seconds=0.0,
            object_store=replace(
                PATIENT.object_store,
                retry_seconds_per_call=retry_seconds,
                retry_seconds_per_save=max(3 * retry_seconds, 1.0),
            ),
        ),
        window_bytes=draw(pages) * PAGE_BYTES,
        windows_in_flight=draw(st.integers(1, 4)),
    )
    return Case(
        save_ranks,
        load_ranks,
        (first, second),
        tuned(
            chosen,
            cell_elements=draw(st.sampled_from([300, 1000, 5000, 1 << 20])),
            full_pack_bytes=draw(st.sampled_from([1, 500, PAGE_BYTES, 1 << 20])),
            zero_copy_bytes_min=draw(st.sampled_from([1, 1 << 16])),
            unchanged_bytes_min=1,
        ),
        draw(st.sampled_from([1 << 16, 1 << 20, 1 << 40])),
        faults,
        draw(st.sampled_from([0.6, 0.8, 0.95, 0.99])),
        draw(st.integers(0, 1 << 32)),
    )


@pytest.mark.timeout(600)
@settings(max_examples=EXAMPLES, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(cases())
def test_what_is_loaded_is_what_was_saved(case: Case) -> None:
    store = fresh_store()
    networks: list[NetworkStore] = []

    def faulty(rank: int) -> RetryingStore:
        draw = drawn(case.seed + rank, passing=case.passing, faults=case.faults)
        network = NetworkStore(store, draw, object_bytes_max=case.object_bytes_max)
        networks.append(network)
        return RetryingStore(network, case.settings, ClockBySleep(case.seed + rank))

    try:
        faulty_stores = [faulty(rank) for rank in range(case.save_ranks)]
        outcomes = played(case.save_ranks, faulty_stores, case.settings, lambda rank, run: work(case, rank, run))
        for network in networks:
            network.end()
        acknowledged = [set(each) if isinstance(each, list) else set[int]() for each in outcomes]
        for each in outcomes:
            if not isinstance(each, list | CheckpointError):
                raise AssertionError(f"a wrong kind of error: {each!r}") from each  # type: ignore[misc]
        assert not case.is_survivable or all(each == set(STEPS) for each in acknowledged), outcomes
        committed = committed_steps(store)
        if FLIPPED not in case.faults:
            assert set(committed) >= set.union(*acknowledged)
        # Another job meets no fault, and finds each step whole, or damaged by a bit that was stored wrong.
        for step in committed:
            found = played(
                case.load_ranks,
                [store] * case.load_ranks,
                PATIENT,
                lambda rank, run, step=step: load(case, rank, run, step),
            )
            for outcome in found:
                if FLIPPED in case.faults:
                    assert outcome is None or isinstance(outcome, CorruptError), outcome
                else:
                    assert outcome is None, outcome
    finally:
        empty(store)


def played(count: int, stores: list[Store], chosen: Settings, part) -> list[object]:  # type: ignore[no-untyped-def]
    """Return for each rank of a job what its part returned or raised."""

    def rank_work(comm: ThreadComm) -> object:
        run = run_of(comm, stores[comm.rank], chosen)  # type: ignore[arg-type]
        try:
            return part(comm.rank, run)
        finally:
            try:
                run.close()
            except CheckpointError as error:
                assert error is not None  # The part has met it already.

    return outcomes_of_ranks(count, rank_work)


def work(case: Case, rank: int, run: CheckpointManager) -> list[int]:
    """Save each step, and load what is there; return the steps whose save succeeded."""
    acknowledged = []
    for step in STEPS:
        outcome = saved(run, step, {**state_on(case.state(step), Tensor.for_save), "step": step})
        if isinstance(outcome, SaveReport):
            acknowledged.append(step)
        else:
            assert isinstance(outcome, CheckpointError), outcome
            assert not case.is_survivable, outcome
    # On the layout that it was saved on: the ranks are those of the save.
    state = {tensor.fqn: replace(tensor, loaded=tensor.saved).for_load() for tensor in case.state(7)}
    filled: dict[str, object] = {**state, "step": 0}
    try:
        loaded = run.load(filled)
    except CheckpointError as error:
        assert not case.is_survivable, error
        return acknowledged
    if loaded is not None:
        assert FLIPPED in case.faults or not acknowledged or loaded >= acknowledged[-1]
        require_equal(filled, case.state(loaded), rank, loaded)
    return acknowledged


def load(case: Case, rank: int, run: CheckpointManager, step: int) -> None:
    filled: dict[str, object] = {**state_on(case.state(7), Tensor.for_load), "step": 0}
    assert run.load(filled, step) == step
    require_equal(filled, case.state(step), rank, step)


def require_equal(filled: dict[str, object], expected: tuple[Tensor, ...], rank: int, step: int) -> None:
    assert filled["step"] == step
    for tensor in expected:
        target = filled[tensor.fqn]
        assert isinstance(target, GlobalTensor)
        for region in target.regions_on(rank):
            where = elements_of(region, tensor.shape)
            found, wanted = target.array.reshape(-1)[where], tensor.array().reshape(-1)[where]
            assert found.tobytes() == wanted.tobytes(), f"{tensor.fqn} on rank {rank}"
