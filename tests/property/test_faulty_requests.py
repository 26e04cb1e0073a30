"""Any state, windows, chunks and order of faults of a network: what is loaded is what was saved, or an error comes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.wrappers.retrying import RetryingStore
from holdfast.base.geometry.tensor import MeshLayout, Placement
from holdfast.base.types.reports import SaveReport
from holdfast.errors import CheckpointError, UnavailableError
from holdfast.settings import PAGE_BYTES, Settings
from tests.doubles.framework import GlobalTensor
from tests.support.tuning import tuned
from tests.unit.backends.stores.wrappers.by_hand import ClockBySleep
from tests.unit.backends.stores.wrappers.network import NetworkStore, drawn
from tests.unit.ranks import PATIENT, World, fresh_store, saved

STEPS = (1, 2)


def tensor(step: int, rows: int, world_size: int) -> GlobalTensor:
    array = (np.arange(rows * 3, dtype=np.float32) * step + step).reshape(rows, 3)
    return GlobalTensor("float32", array, MeshLayout((world_size,), tuple(range(world_size)), (Placement(0),)))


def state_of(step: int, rows: int, world_size: int) -> dict[str, object]:
    return {"sharded": tensor(step, rows, world_size), "same": tensor(7, rows, world_size), "step": step}


@settings(max_examples=15, phases=(Phase.explicit, Phase.generate))  # A smaller example may take 20 s of waiting.
@given(
    seed=st.integers(0, 1 << 32),
    passing=st.sampled_from([0.2, 0.5, 0.8, 0.95]),
    rows=st.integers(2, 3000),
    pages=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    retry_seconds=st.sampled_from([0.0, 1.0, 1e6]),
    deduplicate=st.booleans(),
)
def test_what_is_loaded_is_what_was_saved(
    seed: int,
    passing: float,
    rows: int,
    pages: tuple[int, int],
    retry_seconds: float,
    deduplicate: bool,
) -> None:
    # Ranks of which one fails are the subject of other tests: they wait for each other.
    world_size = 2 if retry_seconds == 1e6 else 1
    chosen = tuned(
        replace(
            PATIENT,
            chunk_bytes=pages[0] * PAGE_BYTES,
            deduplicate=deduplicate,
            object_store=replace(
                PATIENT.object_store,
                retry_seconds_per_call=retry_seconds,
                retry_seconds_per_save=max(3 * retry_seconds, 1.0),
            ),
        ),
        window_bytes=pages[1] * PAGE_BYTES,
    )
    store = fresh_store()

    def faulty(rank: int) -> RetryingStore:
        network = NetworkStore(store, drawn(seed + rank, passing=passing))
        return RetryingStore(network, chosen, ClockBySleep(seed + rank))

    world = World(world_size, chosen, store, {rank: faulty(rank) for rank in range(world_size)})
    outcomes = world.play(lambda rank, run: work(run, rows, world_size, chosen))
    committed = world.committed()
    for each in outcomes:
        if isinstance(each, UnavailableError) and retry_seconds < 1e6:
            continue  # The manager could not even be made.
        assert isinstance(each, list), f"a wrong kind of error: {each!r}"
        # What was acknowledged is there.
        assert set(each) <= set(committed)
    # Whatever is there is whole: another job loads it without faults.
    for step in committed:
        World(world_size, chosen, store).play(lambda rank, run, step=step: require_loaded(run, step, rows, world_size))  # type: ignore[misc]


def work(run: CheckpointManager, rows: int, world_size: int, chosen: Settings) -> list[int]:
    """Save each step, and load what is there; return the steps whose save succeeded."""
    acknowledged = []
    for step in STEPS:
        outcome = saved(run, step, state_of(step, rows, world_size))
        if isinstance(outcome, SaveReport):
            acknowledged.append(step)
        else:
            assert isinstance(outcome, CheckpointError)
            assert chosen.object_store.retry_seconds_per_call < 1e6 or not isinstance(outcome, UnavailableError)
    filled = state_of(0, rows, world_size)
    try:
        loaded = run.load(filled)
    except CheckpointError:
        return acknowledged
    if loaded is not None:
        assert not acknowledged or loaded >= acknowledged[-1]
        require_equal(filled, loaded, rows, world_size, run)
    return acknowledged


def require_loaded(run: CheckpointManager, step: int, rows: int, world_size: int) -> None:
    filled = state_of(0, rows, world_size)
    assert run.load(filled, step) == step
    require_equal(filled, step, rows, world_size, run)


def require_equal(filled: dict[str, object], step: int, rows: int, world_size: int, run: CheckpointManager) -> None:
    expected = state_of(step, rows, world_size)
    assert filled["step"] == step
    for name in ("sharded", "same"):
        found, wanted = filled[name], expected[name]
        assert isinstance(found, GlobalTensor) and isinstance(wanted, GlobalTensor)
        for box in found.regions_on(run._job.comm.rank):
            parts = tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))  # type: ignore[union-attr]
            assert np.array_equal(found.array[parts], wanted.array[parts])
