"""What a loop says of a step, metrics and tags, and what a policy then keeps."""

from __future__ import annotations

from itertools import cycle

import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.core.format.names import step_folder
from holdfast.errors import CorruptError, InvalidError, UnavailableError
from holdfast.policies import AnyOf, BestN, EveryNSteps, EverySeconds, KeepPolicy, LatestN, Policies, Tagged
from holdfast.stored.repository.catalog import read_manifest
from holdfast.stored.repository.tags import read_tags
from holdfast.training.coordination.job import Job
from tests.doubles.comm import ThreadComm, ThreadGroup, outcomes_of_ranks
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.doubles.framework import NumpyFramework
from tests.unit.ranks import PATIENT, World, fresh_store, plain

STATE = {"a": plain(1.0)}


def run_at(store: Store, keep: KeepPolicy | None = None, comm: ThreadComm | None = None) -> CheckpointManager:
    comm = comm or ThreadComm(ThreadGroup(1), 0)
    job = Job(comm, SystemClock(), PATIENT, NumpyFramework(comm.rank))
    return CheckpointManager.over(store, job, policies=Policies(keep=keep))


def test_tags_come_with_the_commit_and_a_taken_one_stays_where_it_is() -> None:
    store = fresh_store()
    run = run_at(store)
    run.save(1, STATE, tags="first").wait()
    run.save(2, STATE, tags=["second", "other"]).wait()
    assert {tag.name: tag.step for tag in read_tags(store).whole.values()} == {"first": 1, "second": 2, "other": 2}
    report = run.save(3, STATE, tags=["third", "first"]).wait()
    assert report is not None and len(report.untagged) == 1
    assert "first: " in report.untagged[0] and "tag 'first' names step 1" in report.untagged[0]
    tags = {tag.name: tag.step for tag in read_tags(store).whole.values()}
    assert run.steps() == [1, 2, 3] and tags == {"first": 1, "second": 2, "other": 2, "third": 3}
    report = run.save(4, STATE, tags="fourth", move_tags={"first", "new"}).wait()
    assert report is not None and report.untagged == ()
    tags = {tag.name: tag.step for tag in read_tags(store).whole.values()}
    assert tags == {"first": 4, "second": 2, "other": 2, "third": 3, "fourth": 4, "new": 4}
    run.close()


@pytest.mark.parametrize(
    "bad",
    [
        {"tags": ["a/b"]},
        {"tags": 7},
        {"move_tags": "300"},
        {"move_tags": {"latest"}},
        {"metrics": {"loss": "low"}},
        {"metrics": [1]},
    ],
)
def test_what_one_rank_says_wrong_is_refused_on_all(bad: dict[str, object]) -> None:
    store = fresh_store()

    def work(comm: ThreadComm) -> object:
        run = run_at(store, comm=comm)
        try:
            run.save(1, STATE, **(bad if comm.rank == 1 else {})).wait()  # type: ignore[arg-type]
        except InvalidError as error:
            return str(error)
        finally:
            run.close()
        return None

    said = outcomes_of_ranks(3, work, group=ThreadGroup(3))
    assert all(isinstance(each, str) and "expected" in each for each in said), said


def test_a_tag_that_is_taken_while_the_save_runs_costs_the_tag_not_the_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from holdfast.training.runs import tags as tagging

    store = fresh_store()
    run = run_at(store)
    run.save(1, STATE).wait()
    tagging.tag_step(store, SystemClock(), 1, "paper")
    # As if the tag had been free when the save began.
    tagging.tag_saved(store, SystemClock(), 1, read_manifest(store, step_folder(1)).digest, {"paper": False})
    run.save(2, STATE).wait()
    tagging.tag_saved(
        store, SystemClock(), 2, read_manifest(store, step_folder(2)).digest, {"paper": False, "mine": False}
    )
    assert "step 2 is saved, but not tagged paper" in caplog.text
    assert {tag.name: tag.step for tag in read_tags(store).whole.values()} == {"paper": 1, "mine": 2}
    run.close()


@pytest.mark.parametrize("name", ["put_if_absent", "list", "replace"])
def test_storage_that_fails_at_a_tag_costs_the_tag_not_the_step(name: str) -> None:
    store = fresh_store()
    first = run_at(store)
    first.save(1, STATE, tags="best").wait()
    first.close()

    def fail(point: FaultPoint) -> None:
        if point.subject.startswith(("tags/", "readers/") if point.name == "list" else "tags/"):
            raise UnavailableError("no answer")

    run = run_at(FaultyStore(store, Faults(fail, names=(name,), lasting=True)))
    run.load(dict(STATE))
    report = run.save(2, STATE, tags="new", move_tags="best").wait()
    assert report is not None and run.steps() == [1, 2]
    tags = {tag.name: tag.step for tag in read_tags(store).whole.values()}
    untagged = {text.partition(":")[0] for text in report.untagged}
    assert untagged == {tag for tag in ("new", "best") if tags.get(tag) != 2}
    assert tags["best"] in (1, 2), "a tag that moves is not lost"
    assert untagged or name == "list"
    run.close()


def test_a_metric_that_no_step_has_refuses_the_save_and_an_old_one_serves() -> None:
    store = fresh_store()
    policy = AnyOf(BestN(1, "loss"), LatestN(1))
    first = run_at(store, policy)
    for metrics in (None, {}, {"los": 1.0}):
        with pytest.raises(InvalidError, match="'loss'"):
            first.save(1, STATE, metrics=metrics)
    assert first.steps() == []
    first.save(1, STATE, metrics={"loss": 0.5}).wait()
    first.save(2, STATE).wait()
    first.close(wait=False)
    # After a restart the steps that are there tell that the metric exists.
    again = run_at(store, policy)
    again.load(dict(STATE))
    again.save(3, STATE).wait()
    again.close(wait=False)
    assert World(1, store=store).manifest(1).metrics == {"loss": 0.5}
    assert World(1, store=store).manifest(3).metrics == {}


class WanderingClock(SystemClock):
    """A wall clock that somebody sets a day back or forward before every look at it."""

    def __init__(self) -> None:
        self.days = cycle((0, -1, 1, -2, 2))

    def unix_seconds(self) -> float:
        return 1_772_000_000.0 + 86_400 * next(self.days)


def test_a_wall_clock_that_is_set_changes_nothing() -> None:
    store = fresh_store()
    job = Job(ThreadComm(ThreadGroup(1), 0), WanderingClock(), PATIENT, NumpyFramework(0))
    policies = Policies(AnyOf(EveryNSteps(2), EverySeconds(3600)), AnyOf(LatestN(2), Tagged()))
    run = CheckpointManager.over(store, job, policies=policies)
    saved = [step for step in range(1, 13) if run.maybe_save(step, STATE) is not None]
    run.wait()
    assert saved == [2, 4, 6, 8, 10, 12] == run.steps()
    run.tag(4, "early")
    assert list(run.kept()) == [4, 10, 12]
    times = [World(1, store=store).manifest(step).created for step in saved]
    assert times != sorted(times), "or the clock did not wander"
    run.close(wait=False)


def test_what_is_kept_follows_metrics_tags_and_damage() -> None:
    store = fresh_store()
    run = run_at(store, AnyOf(BestN(1, "loss"), LatestN(2), Tagged()))
    for step in range(1, 7):
        run.save(step, STATE, metrics={"loss": abs(step - 2.0)}).wait()
    run.tag(1, "paper")
    assert list(run.kept()) == [1, 2, 5, 6]
    assert run.kept()[2] == ("min loss",) and run.kept()[1] == ("tag paper",)
    # A damaged step takes no place from a whole one.
    store.put("step-000000000006/manifest.json", b"damaged")
    assert list(run.kept()) == [1, 2, 4, 5, 6]
    assert run.kept()[6] == ("its manifest cannot be read",)
    run.untag("paper")
    assert list(run.kept()) == [2, 4, 5, 6]
    run.tag(3, "x")
    store.put("tags/x.json", b"damaged")
    with pytest.raises(CorruptError, match=r"x\.json"):
        run.kept()
    run.close(wait=False)
