"""An overwrite with another save or process between any two of its calls: no save of the job is lost.

Each test names what comes between. It comes before the first call, before the second, and so on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import holdfast
from holdfast.base.ports.store import Store
from holdfast.base.types.reports import SaveReport
from holdfast.errors import ConflictError
from holdfast.stored.repository.overwriting import read_claim, take_claim_away
from holdfast.training.coordination.job import Job
from holdfast.training.saving.save import save_and_wait
from tests.support.between_calls import every_gap
from tests.support.overwritten_checkpoint import job_of, request, save, state_of
from tests.unit.ranks import fresh_store


def number_in_memory(store: Store) -> object:
    checkpoint = holdfast.open_checkpoint(store.url)
    assert list(checkpoint.verify()) == []
    return checkpoint.objects["number"]


def saved_before() -> Store:
    store = fresh_store()
    save(store, 1)
    return store


class Beside:
    """A save of the same job on another thread. It ends before the one beside it goes on, unless it has to wait."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number = job, number
        self.outcome: object = None
        self._thread = threading.Thread(target=self._save)
        self._store: Store | None = None

    def come(self, store: Store) -> None:
        self._store = store
        self._thread.start()
        self._thread.join(0.02)

    def end(self) -> object:
        if self._store is not None:
            self._thread.join()
        return self.outcome

    def _save(self) -> None:
        assert self._store is not None
        try:
            self.outcome = save_and_wait(self.job, *request(self.job, self._store, state_of(self.number)))
        except Exception as error:
            self.outcome = error


@pytest.mark.parametrize("fresh", [fresh_store, saved_before], ids=["nothing there", "one there"])
def test_two_saves_of_one_job_are_both_committed(fresh: Callable[[], Store]) -> None:
    besides = list[Beside]()

    def save_beside(store: Store) -> object:
        job = job_of()
        besides.append(Beside(job, 3))
        try:
            return save_and_wait(job, *request(job, store, state_of(2)))
        finally:
            besides[-1].end()
            job.close()

    for gap in every_gap(fresh, save_beside, lambda store: besides[-1].come(store)):
        assert isinstance(gap.outcome, SaveReport), gap
        assert isinstance(besides[-1].outcome, SaveReport), (gap.point, besides[-1].outcome)
        assert number_in_memory(gap.store) in (2, 3) and read_claim(gap.store) is None


def taken_over(store: Store) -> None:
    """Another job saves, as one that has seen no heartbeat of the claim for a lease."""
    claim = read_claim(store)
    if claim is not None:
        take_claim_away(store, claim.data)
    save(store, 9)


def test_a_job_that_is_taken_for_dead_undoes_nothing_and_names_the_cause() -> None:
    lost = 0
    for gap in every_gap(saved_before, lambda store: save(store, 2), taken_over):
        number = number_in_memory(gap.store)
        if not isinstance(gap.outcome, SaveReport):
            assert isinstance(gap.outcome, ConflictError) and number == 9, gap
            assert "this job may not overwrite the checkpoint any more" in str(gap.outcome)
            lost += 1
        assert number in (2, 9) and read_claim(gap.store) is None
    assert lost > 20


@pytest.mark.parametrize("fresh", [fresh_store, saved_before], ids=["nothing there", "one there"])
def test_a_manifest_that_is_removed_meanwhile_is_not_taken_for_another(fresh: Callable[[], Store]) -> None:
    for gap in every_gap(fresh, lambda store: save(store, 2), lambda store: store.delete(["manifest.json"])):
        if not isinstance(gap.outcome, SaveReport):
            assert isinstance(gap.outcome, ConflictError) and "the checkpoint was removed" in str(gap.outcome), gap


def test_two_jobs_that_begin_at_once_leave_one_whole() -> None:
    """The second one saves whole between two calls of the first, while there is no claim."""

    def other(store: Store) -> None:
        if read_claim(store) is None:
            save(store, 9)

    for gap in every_gap(saved_before, lambda store: save(store, 2), other):
        assert isinstance(gap.outcome, SaveReport), gap
        assert number_in_memory(gap.store) in (2, 9) and read_claim(gap.store) is None
        if gap.point.name == "upload":
            break  # From the claim on there is one.
