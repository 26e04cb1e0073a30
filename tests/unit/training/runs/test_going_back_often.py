"""A run that goes back again and again: what it stores and what a restart reads does not grow, and nothing is lost."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import suppress

import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.alone import AloneComm
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.base.types.timeline import ANCESTORS_STATED
from holdfast.core.format import timeline as format_of_timeline
from holdfast.core.format.names import accepted_key, manifest_key
from holdfast.core.format.sealed_json import decode_sealed
from holdfast.errors import CheckpointError, InvalidError, MissingError, UnavailableError
from holdfast.policies import KeepPolicy, LatestN, Policies
from holdfast.settings import Settings
from holdfast.stored.repository.epochs import newest_epoch
from holdfast.stored.repository.tags import read_tags
from holdfast.stored.repository.timelines import committed_steps, run_timelines
from holdfast.training.coordination.job import Job
from holdfast.training.runs.removal.named_steps import StepRemoval
from holdfast.training.runs.removal.retention import FORMER_KEPT
from tests.doubles.faults import Faults, FaultyStore, raise_error
from tests.doubles.framework import NumpyFramework
from tests.support.tuning import tuned

SETTINGS = tuned(Settings(lease_seconds=600.0, collect_grace_seconds=0.0, reports=False))
CLOCK = SystemClock()


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    made = MemoryStore(uuid.uuid4().hex)
    yield made
    made.delete([entry.key for entry in made.list()])


def run_on(store: Store, keep: KeepPolicy | None = None) -> CheckpointManager:
    job = Job(AloneComm(), CLOCK, SETTINGS, NumpyFramework(0))
    return CheckpointManager.over(store, job, policies=Policies(keep=keep))


def begin(store: Store) -> None:
    with run_on(store) as run:
        for step in (1, 2):
            run.save(step, {"step": step}).wait()


def go_back(store: Store, step: int | str, keep: KeepPolicy | None = None, **saving: object) -> None:
    """Load a step, save the next two numbers, and end."""
    with run_on(store, keep) as run:
        number = run.load({"step": 0}, step)
        assert number is not None
        run.save(number + 1, {"step": -number - 1}, **saving).wait()  # type: ignore[arg-type]
        run.save(number + 2, {"step": -number - 2}).wait()


def go_back_often(store: Store, times: int, first: int = 1, keep: KeepPolicy | None = None) -> None:
    """Go back `times` times, to the step before the newest each time."""
    for step in range(first, first + times):
        go_back(store, step, keep)


def reads_of_restart(store: Store) -> list[str]:
    """Return the keys of manifests and records that a process reads which resumes, saves a step and ends."""
    faults = Faults()
    with run_on(FaultyStore(store, faults)) as run:
        number = run.load({"step": 0})
        assert number is not None
        run.save(number + 1, {"step": 0}).wait()
    return [each.subject for each in faults.seen if each.name == "get" and each.subject.endswith(".json")]


def manifest_bytes(store: Store) -> int:
    return store.size(manifest_key(committed_steps(store)[-1]))


def test_with_keep_neither_files_nor_reads_nor_a_manifest_grow(store: MemoryStore) -> None:
    begin(store)
    sizes, counts = [], []
    for first in (1, 13, 25):
        go_back_often(store, 12, first, LatestN(2))
        sizes.append(manifest_bytes(store))
        counts.append(len(list(store.list())))
    assert max(counts) <= counts[0] + 2 and max(sizes) <= sizes[0] + 10, (counts, sizes)
    stored = run_timelines(store)
    assert [manifest.step for manifest in stored.chain] == [37, 38]
    assert [manifest.step for manifest in stored.superseded] == [35, 36, 37][-FORMER_KEPT:]
    state = {"step": 0}
    with run_on(store) as run:
        assert run.load(state) == 38 and state["step"] == -38
    # Five manifests, each a few times, and the records of the run.
    assert len(reads_of_restart(store)) <= 45


def test_without_keep_a_manifest_stays_small_and_the_whole_chain_is_found(store: MemoryStore) -> None:
    begin(store)
    times = 2 * ANCESTORS_STATED + 5
    go_back_often(store, times)
    assert manifest_bytes(store) <= 4000
    assert committed_steps(store) == [*range(1, times + 3)]
    assert len(run_timelines(store).superseded) == times
    assert len(run_timelines(store).newest.ancestors) == times
    with run_on(store) as run:
        state = {"step": 0}
        assert run.load(state, 3) == 3 and state["step"] == -3, "a step far before what a manifest states"
    # The step is still of the chain after a restart, and its number is not free.
    reads_of_restart(store)
    assert committed_steps(store)[:4] == [1, 2, 3, 4]


def test_reads_of_a_restart_grow_with_the_steps_and_not_with_how_often_training_went_back(store: MemoryStore) -> None:
    begin(store)
    go_back_often(store, 6)
    few = len(reads_of_restart(store))
    for _ in range(6):
        go_back(store, "latest")
    # Each restart reads what is stored a few times, however it came to be there.
    stored = run_timelines(store)
    assert len(reads_of_restart(store)) - few <= 4 * (len(stored.chain) + len(stored.superseded))


def chain_with_gap(store: MemoryStore) -> None:
    """Go back so often that no manifest states the first timelines, then remove the manifests that linked them."""
    begin(store)
    times = ANCESTORS_STATED + 8
    go_back_often(store, times)
    stored = run_timelines(store)
    middle = range(4, times - 1)
    names = [f"{each.step}@{each.digest}" for each in (*stored.chain, *stored.superseded) if each.step in middle]
    StepRemoval(names, tagged=False, all_steps=False).execute(store, CLOCK, 0.0, SETTINGS.lease_seconds)


def test_the_chain_reaches_over_timelines_without_any_step(store: MemoryStore) -> None:
    chain_with_gap(store)
    last = ANCESTORS_STATED + 10
    assert committed_steps(store) == [1, 2, 3, *range(last - 3, last + 1)]
    go_back(store, 3)
    assert committed_steps(store) == [1, 2, 3, 4, 5]
    assert len(run_timelines(store).newest.ancestors) <= 4


def test_the_next_list_states_the_ancestors_and_the_one_before_helps_if_it_is_damaged(store: MemoryStore) -> None:
    chain_with_gap(store)
    before = committed_steps(store)
    reads_of_restart(store)
    key = accepted_key(newest_epoch(store))
    data = bytearray(store.get(key, 1 << 20))
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))
    assert committed_steps(store) == [*before, before[-1] + 1]


def test_a_reader_of_earlier_versions_refuses_a_list_with_ancestors_by_name(store: MemoryStore) -> None:
    begin(store)
    go_back_often(store, ANCESTORS_STATED)
    key = accepted_key(newest_epoch(store))
    data = store.get(key, 1 << 20)
    assert b'"accepted in a run with timelines"' in data and b'"parents"' not in data
    go_back(store, ANCESTORS_STATED + 1)
    data = store.get(accepted_key(newest_epoch(store)), 1 << 20)
    with pytest.raises(InvalidError, match="is of kind 'accepted in a run with many timelines'"):
        decode_sealed(data, ("accepted", "accepted in a run with timelines"), dict, "here")
    assert b'"format": [\n   1,\n   4\n  ]' in data


def test_a_run_with_long_lists_of_ancestors_goes_on_and_shrinks(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store)
    times = ANCESTORS_STATED + 6
    with monkeypatch.context() as before:
        # Versions before stated all of them.
        before.setattr(format_of_timeline, "ANCESTORS_STATED", 1000)
        go_back_often(store, times)
    long = manifest_bytes(store)
    whole = [*range(1, times + 3)]
    assert committed_steps(store) == whole
    reads_of_restart(store)
    # The same timeline, stated in a shorter form.
    assert committed_steps(store) == [*whole, times + 3]
    assert manifest_bytes(store) < long - 6 * 60
    newest = run_timelines(store).newest
    # The long one is damaged, and does not contradict the short one.
    key = manifest_key(times + 2)
    data = store.get(key, 1 << 20)
    store.put(key, data.replace(b'"world_size": 1', b'"world_size": 2'))
    assert run_timelines(store).newest == newest
    store.put(key, data)
    go_back(store, times + 2)
    assert committed_steps(store) == [*whole, times + 3, times + 4]


@pytest.mark.parametrize("target", ["chain", "superseded"])
def test_going_back_to_a_step_that_no_manifest_states_any_more(store: MemoryStore, target: str) -> None:
    begin(store)
    go_back_often(store, ANCESTORS_STATED + 6)
    stored = run_timelines(store)
    steps = stored.chain if target == "chain" else stored.superseded
    chosen = next(each for each in steps if each.step == 4)
    go_back(store, f"4@{chosen.digest}")
    assert committed_steps(store) == [1, 2, 3, 4, 5, 6]
    assert run_timelines(store).at(4) == chosen


def test_a_tag_keeps_a_superseded_step_that_moved(store: MemoryStore) -> None:
    begin(store)
    go_back(store, 1, LatestN(2))
    (left,) = run_timelines(store).superseded
    with run_on(store) as run:
        run.tag(f"2@{left.digest}", "before")
    go_back_often(store, 8, 2, LatestN(2))
    assert left.digest in {each.digest for each in run_timelines(store).superseded}
    with run_on(store) as run:
        state = {"step": 0}
        assert run.load(state, "before") == 2 and state["step"] == 2
        run.untag("before")
    assert not read_tags(store).whole
    go_back(store, 10, LatestN(2))
    assert left.digest not in {each.digest for each in run_timelines(store).superseded}
    with run_on(store) as run, pytest.raises(MissingError):
        run.load({"step": 0}, f"2@{left.digest}")


PUTS = ("put", "put_if_absent", "move", "delete")


def test_a_crash_while_a_long_chain_goes_on_leaves_the_old_end_or_the_new_one() -> None:
    """Operations that change the store are, one by one, the last of a process: done, or not."""
    template = MemoryStore(uuid.uuid4().hex)
    begin(template)
    go_back_often(template, ANCESTORS_STATED + 2)
    before, last = committed_steps(template), ANCESTORS_STATED + 4
    at, outcomes = 0, set[int]()
    while True:
        at += 3
        store = MemoryStore(uuid.uuid4().hex)
        for entry in template.list():
            store.put(entry.key, template.get(entry.key, 1 << 20))
        faults = Faults(raise_error(UnavailableError), at=at, names=PUTS, lasting=True, after=at % 2 == 0)
        with suppress(CheckpointError):
            go_back(FaultyStore(store, faults), last - 1, LatestN(last + 1))
        steps = committed_steps(store)
        assert steps[: last - 1] == before[: last - 1] == [*range(1, last)]
        assert steps[last - 1 :] in ([last], [last, last + 1])
        outcomes.add(len(run_timelines(store).newest.ancestors))
        if not faults.met:
            break
    assert at > 9 and outcomes == {ANCESTORS_STATED + 2, ANCESTORS_STATED + 3}
