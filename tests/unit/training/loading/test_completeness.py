"""A load that would leave a byte of a tensor as it was is refused on every rank before any changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.clock import SystemClock
from holdfast.base.ports.framework import Catalog, Restoration, Selection
from holdfast.base.ports.store import Store
from holdfast.errors import InvalidError
from holdfast.training.coordination.job import Job
from tests.doubles.comm import ThreadComm, outcomes_of_ranks, run_ranks
from tests.doubles.framework import GlobalTensor, NumpyFramework
from tests.unit.ranks import PATIENT, fresh_store, plain, run_of, sharded


class Forgetful(NumpyFramework):
    """Asks on rank 1 for one tensor less than its state holds."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.forgets = rank == 1

    def restoration(self, state: Mapping[str, object], catalog: Catalog, selection: Selection) -> Restoration:
        whole = super().restoration(state, catalog, selection)
        return replace(whole, wanted=whole.wanted[:-1]) if self.forgets else whole


def saved_by_two() -> Store:
    store = fresh_store()

    def save(comm: ThreadComm) -> None:
        run = run_of(comm, store)
        run.save(1, {"a": plain(1.0), "b": sharded(2)}).wait()
        run.close()

    run_ranks(2, save)
    return store


def test_a_byte_that_no_plan_fills_is_refused_everywhere() -> None:
    store = saved_by_two()
    states = [{"a": plain(0.0), "b": sharded(2)} for _ in range(2)]
    for state in states:
        state["b"].array[:] = -1

    def load(comm: ThreadComm) -> None:
        run = CheckpointManager.over(store, Job(comm, SystemClock(), PATIENT, Forgetful(comm.rank)))
        try:
            run.load(states[comm.rank])
        finally:
            run.close()

    for outcome in outcomes_of_ranks(2, load):
        assert isinstance(outcome, InvalidError)
        assert "the state holds 496 bytes" in str(outcome)
        assert "the plan fills 400" in str(outcome)
    assert all((state["a"].array == 0).all() and (state["b"].array == -1).all() for state in states)


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_rank_reports_what_it_holds(ranks: int) -> None:
    store = saved_by_two()

    def load(comm: ThreadComm) -> tuple[int, int, int]:
        run = run_of(comm, store)
        state: dict[str, object] = {"a": plain(0.0), "b": sharded(ranks)}
        assert isinstance(state["b"], GlobalTensor)
        state["b"].array[:] = np.nan
        run.load(state)
        run.close()
        assert run.load_report is not None
        return run.load_report.tensors, run.load_report.tensor_bytes, run.load_report.loaded_bytes

    rows = [16] if ranks == 1 else [6, 6, 4]
    assert run_ranks(ranks, load) == [(2, 400 + 12 * each, 400 + 12 * each) for each in rows]
