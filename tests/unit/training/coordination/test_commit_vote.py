"""Who commits, who aborts, and that no rank believes what is not true, whatever a board or store does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.clock import SystemClock
from holdfast.base.types.reports import SaveReport
from holdfast.core.format.names import step_folder
from holdfast.errors import CheckpointError, ConflictError, UnavailableError
from holdfast.stored.publishing.outcome import Outcome, OutcomeKind, aborted, committed, unknown
from holdfast.training.coordination.commit_vote import CommitVote, Vote
from holdfast.training.coordination.job import Job
from tests.doubles.comm import ThreadComm, run_ranks
from tests.doubles.faults import FaultPoint, Faults, FaultyKeyValueStore, FaultyStore, raise_error, stall_until
from tests.unit.ranks import HASTY, PATIENT, World, plain, saved, sharded

VOTE = Vote(1, "0" * 32)


def ballots(world_size: int, part: Callable[[int, CommitVote], object]) -> list[object]:
    def work(comm: ThreadComm) -> object:
        job = Job(comm, SystemClock(), HASTY)
        try:
            return part(comm.rank, CommitVote(job, 0, "a" * 16, "save"))
        finally:
            job.close()

    return run_ranks(world_size, work)


def voted(ballot: CommitVote) -> Outcome:
    """Vote, and wait for the outcome unless this rank is to commit."""
    outcome = ballot.vote(VOTE)
    return ballot.await_outcome() if outcome.kind is OutcomeKind.VOTING else outcome


def test_the_last_to_vote_commits_and_reads_every_vote() -> None:
    def part(rank: int, ballot: CommitVote) -> object:
        if ballot.vote(Vote(rank, "0" * 32)).kind is OutcomeKind.VOTING:
            return ballot.await_outcome()
        votes = ballot.votes()
        ballot.announce(committed("digest", ("bad",)))
        return votes

    outcomes = ballots(4, part)
    assert outcomes.count(committed("digest", ("bad",))) == 3
    assert [Vote(rank, "0" * 32) for rank in range(4)] in outcomes


def test_an_abort_reaches_every_rank_with_its_reason_kind_and_rank() -> None:
    def part(rank: int, ballot: CommitVote) -> object:
        if rank == 1:
            return ballot.abort(ConflictError("said why: äöü"))
        return voted(ballot)

    outcomes = ballots(3, part)
    for rank in (0, 2):
        outcome = outcomes[rank]
        assert isinstance(outcome, Outcome) and outcome.kind is OutcomeKind.ABORTED
        assert isinstance(outcome.error, ConflictError)
        assert str(outcome.error) == "rank 1 aborted: said why: äöü"


def test_an_abort_after_the_count_is_complete_is_undecided() -> None:
    first_voted = threading.Event()

    def part(rank: int, ballot: CommitVote) -> object:
        if rank == 0:
            found = [ballot.vote(VOTE).kind]
            first_voted.wait(10.0)
            return [*found, ballot.abort(UnavailableError("late")).kind]
        found = [ballot.vote(VOTE).kind]
        first_voted.set()
        return found

    first, second = ballots(2, part)
    assert isinstance(first, list)
    assert sorted([first[0], second[0]]) == [OutcomeKind.PUBLISHING, OutcomeKind.VOTING]  # type: ignore[index]
    assert first[1] is OutcomeKind.ASK_STORAGE


def test_a_count_completed_after_an_abort_commits_nothing() -> None:
    """A rank whose vote counted lost the reply and gave up before the last rank voted."""
    gave_up = threading.Event()

    def part(rank: int, ballot: CommitVote) -> object:
        if rank == 0:
            assert ballot.vote(VOTE).kind is OutcomeKind.VOTING
            ballot.abort(UnavailableError("reply lost"))
            gave_up.set()
            return None
        assert gave_up.wait(10.0)
        return ballot.vote(VOTE)

    outcome = ballots(2, part)[1]
    assert isinstance(outcome, Outcome) and outcome.kind is OutcomeKind.ABORTED
    assert "rank 0 aborted: reply lost" in str(outcome.error)


def test_who_never_voted_is_named_at_the_deadline() -> None:
    def part(rank: int, ballot: CommitVote) -> object:
        return voted(ballot) if rank != 1 else None

    for rank, outcome in enumerate(ballots(3, part)):
        if rank != 1:
            assert isinstance(outcome, Outcome) and outcome.kind is OutcomeKind.ABORTED
            assert isinstance(outcome.error, UnavailableError)
            assert "ranks [1] did not finish" in str(outcome.error)


def test_a_committer_that_falls_silent_leaves_the_outcome_undecided() -> None:
    def part(rank: int, ballot: CommitVote) -> object:
        return "silent" if ballot.vote(VOTE).kind is OutcomeKind.PUBLISHING else ballot.await_outcome()

    outcomes = ballots(3, part)
    assert outcomes.count("silent") == 1
    undecided = [each for each in outcomes if isinstance(each, Outcome)]
    assert len(undecided) == 2
    assert all(each.kind is OutcomeKind.ASK_STORAGE for each in undecided)


@pytest.mark.parametrize("certain", (True, False))
def test_what_a_committer_failed_with_reaches_the_others(certain: bool) -> None:
    failure = ConflictError("somebody else")

    def part(rank: int, ballot: CommitVote) -> object:
        if ballot.vote(VOTE).kind is OutcomeKind.PUBLISHING:
            return ballot.announce(aborted(failure) if certain else unknown("the folder was not synced"))
        return ballot.await_outcome()

    others = [each for each in ballots(3, part) if each is not None]
    assert len(others) == 2
    for each in others:
        assert isinstance(each, Outcome)
        if certain:
            assert each.kind is OutcomeKind.ABORTED
            assert isinstance(each.error, ConflictError) and str(each.error) == "somebody else"
        else:
            assert each == unknown("the folder was not synced")


def require_true(world: World, step: int, outcomes: list[object]) -> None:
    """What every rank believes of a step agrees with what lies on storage."""
    attempts = {each.attempt for each in outcomes if isinstance(each, SaveReport)}
    committed = step in world.committed()
    if attempts:
        assert committed, f"a rank believes in a commit that is not there: {outcomes}"
        assert attempts == {world.manifest(step).attempt}
    for each in outcomes:
        if not isinstance(each, SaveReport):
            assert isinstance(each, CheckpointError), repr(each)
            assert not committed or "outcome unknown" in str(each), f"committed, but a rank says: {each}"
    if committed:
        require_whole(world, step)


def require_whole(world: World, step: int) -> None:
    """Every file the manifest names is there and every tensor can be read."""
    manifest = world.manifest(step)
    for record in (*manifest.packs, *manifest.parts, *manifest.indexes):
        assert world.store.size(f"{step_folder(step)}{manifest.attempt}/{record.name}") == record.bytes
    fresh = World(1, store=world.store)

    def load(_: int, run: CheckpointManager) -> object:
        into = {"w": sharded(1), "b": plain(-1.0)}
        into["w"].array[:] = -1.0
        assert run.load(into, step) == step
        return (into["w"].array == sharded(1).array).all() and (into["b"].array == 2.0).all()

    assert fresh.play(load) == [True]


def operations_of_a_save(world_size: int, faulty: int) -> int:
    """How many operations of the board one rank does in one whole save, at most."""
    faults = Faults()
    world = World(world_size, boards={faulty: lambda key_value_store: FaultyKeyValueStore(key_value_store, faults)})
    world.play(lambda rank, run: saved(run, 1, {"w": sharded(world_size), "b": plain(2.0)}))
    return len(faults.seen)


BOARD_FAULTS = [
    pytest.param(False, False, id="once"),
    pytest.param(False, True, id="reply-lost"),
    pytest.param(True, False, id="from-then-on"),
]


@pytest.mark.parametrize(("lasting", "after"), BOARD_FAULTS)
@pytest.mark.parametrize("faulty", (0, 1))
def test_a_board_that_fails_at_any_operation_leaves_every_rank_with_the_truth(
    faulty: int, lasting: bool, after: bool
) -> None:
    def met_at(at: int) -> int:
        faults = Faults(raise_error(UnavailableError), at=at, lasting=lasting, after=after)

        world = World(
            2, settings=HASTY, boards={faulty: lambda key_value_store: FaultyKeyValueStore(key_value_store, faults)}
        )
        healed = threading.Barrier(2, action=faults.heal, timeout=20.0)

        def part(rank: int, run: CheckpointManager) -> object:
            first = saved(run, 1, {"w": sharded(2), "b": plain(2.0)})
            healed.wait()
            return first, saved(run, 2, {"w": sharded(2), "b": plain(2.0)})

        outcomes = world.play(part)
        assert all(isinstance(each, tuple) for each in outcomes), f"at {at}: {outcomes}, {faults.seen}"
        require_true(world, 1, [each[0] for each in outcomes])  # type: ignore[index]
        require_true(world, 2, [each[1] for each in outcomes])  # type: ignore[index]
        assert 2 in world.committed(), f"the save after the fault at {at}: {outcomes}"
        return faults.met

    with ThreadPoolExecutor(6) as pool:
        met = list(pool.map(met_at, range(1, operations_of_a_save(2, faulty) + 2)))
    assert sum(each > 0 for each in met) > 5


STORE_FAULTS = [pytest.param(False, id="before"), pytest.param(True, id="reply-lost")]


@pytest.mark.parametrize("after", STORE_FAULTS)
@pytest.mark.parametrize("faulty", (0, 1))
def test_a_store_that_fails_at_any_operation_leaves_every_rank_with_the_truth(faulty: int, after: bool) -> None:
    recording = Faults()
    plainly = World(2)
    plainly = World(2, store=plainly.store, stores={faulty: FaultyStore(plainly.store, recording)})
    plainly.play(lambda rank, run: saved(run, 1, {"w": sharded(2), "b": plain(2.0)}))

    def require_at(at: int) -> None:
        faults = Faults(raise_error(UnavailableError), at=at, after=after)
        world = World(2, settings=HASTY)
        world = World(2, settings=HASTY, store=world.store, stores={faulty: FaultyStore(world.store, faults)})
        here = threading.Barrier(2, action=faults.heal, timeout=20.0)

        def part(rank: int, run: CheckpointManager) -> object:
            first = saved(run, 1, {"w": sharded(2), "b": plain(2.0)})
            here.wait()
            return first, saved(run, 2, {"w": sharded(2), "b": plain(2.0)})

        outcomes = world.play(part)
        assert all(isinstance(each, tuple) for each in outcomes), f"at {at}: {outcomes}, {faults.seen}"
        require_true(world, 1, [each[0] for each in outcomes])  # type: ignore[index]
        require_true(world, 2, [each[1] for each in outcomes])  # type: ignore[index]
        assert 2 in world.committed()

    # The first operation asks whether the root is a checkpoint, before there is a run.
    assert recording.seen[0] == FaultPoint("size", "manifest.json")
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(require_at, range(2, len(recording.seen) + 6)))


def test_a_committer_slower_than_the_deadline_and_later_saves_never_loses_its_files() -> None:
    """While one rank is publishing, the others lose patience and save on; then it publishes all the same."""
    release, stalled = threading.Event(), threading.Event()
    world = World(2, settings=HASTY)

    def stall(operation: FaultPoint) -> None:
        if operation.subject == f"{step_folder(1)}manifest.json":
            stalled.set()
            stall_until(release)(operation)

    class Stalled(Faults):
        def around(self, name, subject, call, *, always_done=False, kind=""):  # type: ignore[no-untyped-def]
            if name == "put_if_absent":
                stall(FaultPoint(name, subject))
            return call()

    slow = FaultyStore(world.store, Stalled())
    world = World(2, settings=HASTY, store=world.store, stores={0: slow, 1: slow})

    def part(rank: int, run: CheckpointManager) -> object:
        first = run.save(1, {"w": sharded(2), "b": plain(2.0)})
        assert stalled.wait(10.0)
        later = [run.save(step, {"w": sharded(2), "b": plain(2.0)}) for step in (2, 3, 4, 5)]
        time.sleep(3 * HASTY.commit_timeout_seconds)
        release.set()
        found = []
        for handle in (first, *later):
            try:
                found.append(handle.wait(timeout=20.0))
            except CheckpointError as error:
                found.append(error)  # type: ignore[arg-type]
        return found

    outcomes = world.play(part)
    assert 1 in world.committed()
    for number, step in enumerate((1, 2, 3, 4, 5)):
        require_true(world, step, [each[number] for each in outcomes])  # type: ignore[index]


def test_a_rank_whose_commit_thread_sleeps_through_later_saves_loses_nothing() -> None:
    """A rank is held between its vote and the result; its files must outlive whatever it finds on waking."""
    release = threading.Event()
    held = threading.Event()

    class Holding(Faults):
        def around(self, name, subject, call, *, always_done=False, kind=""):  # type: ignore[no-untyped-def]
            if name == "get_many" and subject.endswith("/result") and not held.is_set():
                held.set()
                release.wait(20.0)
            return call()

    faults = Holding()
    world = World(
        2,
        settings=HASTY,
        boards={0: lambda b: FaultyKeyValueStore(b, faults), 1: lambda b: FaultyKeyValueStore(b, faults)},
    )
    state = {"w": sharded(2), "b": plain(2.0)}

    def part(rank: int, run: CheckpointManager) -> object:
        handles = [run.save(1, state)]
        assert held.wait(10.0)
        handles += [run.save(step, state) for step in (2, 3, 4, 5)]
        time.sleep(3 * HASTY.commit_timeout_seconds)
        release.set()
        found = []
        for handle in handles:
            try:
                found.append(handle.wait(timeout=20.0))
            except CheckpointError as error:
                found.append(error)  # type: ignore[arg-type]
        return found

    outcomes = world.play(part)
    assert held.is_set()
    assert 1 in world.committed()
    for number, step in enumerate((1, 2, 3, 4, 5)):
        require_true(world, step, [each[number] for each in outcomes])  # type: ignore[index]


def test_a_rank_that_cannot_write_aborts_everywhere_and_only_its_attempt_is_removed() -> None:
    inner = World(3)
    faults = Faults(raise_error(UnavailableError), names={"upload.write"}, lasting=True)
    world = World(3, store=inner.store, stores={2: FaultyStore(inner.store, faults)})
    here = threading.Barrier(3, timeout=20.0)
    state = {"w": sharded(3), "b": plain(2.0)}

    def part(rank: int, run: CheckpointManager) -> object:
        if rank == 0:
            faults.heal()
        here.wait()
        first = saved(run, 1, state)
        here.wait()
        if rank == 0:
            faults._action = raise_error(UnavailableError)
        here.wait()
        second = saved(run, 2, state)
        here.wait()
        files = [name for name in world.files() if name.startswith(step_folder(2))]
        here.wait()
        if rank == 0:
            faults.heal()
        here.wait()
        return first, second, files, saved(run, 2, state)

    outcomes = world.play(part)
    require_true(world, 1, [each[0] for each in outcomes])  # type: ignore[index]
    for rank, each in enumerate(outcomes):
        assert isinstance(each, tuple)
        assert isinstance(each[1], UnavailableError)
        assert rank == 2 or "rank 2 aborted" in str(each[1])
        assert each[2] == []
        assert isinstance(each[3], SaveReport)
    assert world.committed() == [1, 2]
    require_whole(world, 1)
    require_whole(world, 2)


@pytest.mark.parametrize("dead", (0, 1))
def test_a_rank_that_dies_before_its_vote_is_named_by_the_others(dead: int) -> None:
    """It opened the save, then never voted."""
    world = World(2, settings=HASTY)
    faults = Faults(raise_error(UnavailableError), names={"upload"}, lasting=True)
    silent = Faults(raise_error(UnavailableError), names={"compare_set", "add"}, at=2 if dead == 0 else 1, lasting=True)
    world = World(
        2,
        settings=HASTY,
        store=world.store,
        stores={dead: FaultyStore(world.store, faults)},
        boards={dead: lambda key_value_store: FaultyKeyValueStore(key_value_store, silent)},
    )
    outcomes = world.play(lambda rank, run: saved(run, 1, {"w": sharded(2), "b": plain(2.0)}))
    assert faults.met
    assert silent.met
    assert isinstance(outcomes[1 - dead], UnavailableError)
    assert f"ranks [{dead}] did not finish" in str(outcomes[1 - dead])
    assert world.committed() == []


def test_an_older_job_at_the_same_step_is_a_conflict_and_loses_only_its_own() -> None:
    """Two jobs save one step at once: one wins, the other is told so, and what won is whole."""
    first = World(2, settings=PATIENT)
    second = World(2, settings=PATIENT, store=first.store)
    state = {"w": sharded(2), "b": plain(2.0)}
    both = threading.Barrier(4, timeout=20.0)
    found: dict[int, list[object]] = {}

    def play(number: int, world: World) -> None:
        def part(rank: int, run: CheckpointManager) -> object:
            both.wait()
            return saved(run, 1, state)

        found[number] = world.play(part)

    threads = [threading.Thread(target=play, args=each) for each in ((0, first), (1, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    winners = [number for number in found if all(isinstance(each, SaveReport) for each in found[number])]
    assert len(winners) == 1, found
    assert all(isinstance(each, CheckpointError) for each in found[1 - winners[0]])
    require_whole(first, 1)
