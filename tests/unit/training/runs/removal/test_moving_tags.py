"""Tags that move while a collection runs, at every moment of either: the tag always names a step that is stored."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from holdfast.backends.stores.foreign import References
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.core.format.names import manifest_key
from holdfast.core.format.sealed_json import unsealed
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError, UnavailableError
from holdfast.offline.repair.repair import Repair
from holdfast.policies import AnyOf, LatestN, Tagged
from holdfast.stored.leases.writer import hold_writer_lease
from holdfast.stored.repository.catalog import exists, read_run_id
from holdfast.stored.repository.tags import put_tag, read_tags
from holdfast.training.runs.removal.garbage_collection import CheckpointGC
from holdfast.training.runs.tags import tag_step
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.unit.ranks import PATIENT, World, fresh_store, plain, saved

BEFORE, AFTER, NEWEST = 2, 1, 3
KEEP = AnyOf(LatestN(1), Tagged())


@pytest.fixture(scope="module")
def template() -> Store:
    """A run of three steps; the second is the best, and no policy keeps the first."""
    world = World(1)
    world.play(lambda rank, run: [saved(run, step, {"a": plain(step)}) for step in (1, 2, 3)])
    tag_step(world.store, SystemClock(), BEFORE, "best")
    return world.store


def copy_of(template: Store) -> Store:
    store = fresh_store()
    for entry in template.list():
        store.put(entry.key, template.get(entry.key, entry.bytes))
    return store


def collect(store: Store) -> None:
    run_id = read_run_id(store)
    assert run_id is not None
    with hold_writer_lease(store, SystemClock(), 60.0, run_id) as lease:
        CheckpointGC(store, SystemClock(), KEEP, lease).collect(0, lambda _: False)


def move(store: Store) -> str:
    """Move the tag to the step that nothing else keeps; return how it ended."""
    try:
        tag_step(store, SystemClock(), AFTER, "best", move=True)
    except (ConflictError, MissingError) as error:
        return type(error).__name__
    return "moved"


def require_held(store: Store, ended: str) -> None:
    tags = read_tags(store)
    assert not tags.damaged
    tag = tags.whole["best"]
    assert tag.step == (AFTER if ended == "moved" else BEFORE)
    assert exists(store, manifest_key(tag.step)), "the step that has the tag was removed"


@pytest.mark.parametrize("after", [False, True])
def test_a_tag_that_moves_at_any_moment_of_a_collection(template: Store, after: bool) -> None:
    endings = set()
    for at in range(1, 1000):
        store, ended = copy_of(template), [""]

        def act(_: object, store: Store = store, ended: list[str] = ended) -> None:
            ended[0] = move(store)

        faults = Faults(act, at=at, after=after)
        collect(FaultyStore(store, faults))
        if not faults.met:
            break
        if ended[0]:  # Nothing follows an operation that raised.
            require_held(store, ended[0])
            endings.add(ended[0])
    assert at > 20
    assert endings == {"moved", "ConflictError", "MissingError"}, "the mark is seen, and so is the step that is gone"


@pytest.mark.parametrize("after", [False, True])
def test_a_collection_at_any_moment_of_a_tag_that_moves(template: Store, after: bool) -> None:
    endings = set()
    for at in range(1, 1000):
        store = copy_of(template)

        def act(_: object, store: Store = store) -> None:
            collect(store)

        faults = Faults(act, at=at, after=after)
        ended = move(FaultyStore(store, faults))
        if not faults.met:
            break
        require_held(store, ended)
        endings.add(ended)
    assert at > 10
    assert {"moved", "MissingError"} <= endings


def test_a_mark_that_is_carried_out_protects_no_longer(template: Store) -> None:
    """The collector reads the tags after that mark: what is tagged before it stays, what comes after it is refused."""
    store, seen = copy_of(template), []
    faults = Faults()
    collect(FaultyStore(store, faults))
    seen = [(point.name, point.subject.split("/")[0]) for point in faults.seen]
    marked = max(at for at, point in enumerate(seen) if point == ("put", "collecting"))
    assert ("list", "tags") in seen[marked:]
    assert seen.index(("list", "readers"), marked) < seen.index(("list", "tags"), marked), "leases before tags"


def test_two_that_move_one_tag_leave_it_whole(template: Store, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run", settings=PATIENT)
    for entry in template.list():
        store.put(entry.key, template.get(entry.key, entry.bytes), durable=False)
    stopped = threading.Event()
    seen: list[int] = []

    def watch() -> None:
        while not stopped.is_set():
            tags = read_tags(store)
            assert not tags.damaged
            seen.append(tags.whole["best"].step)

    def moves(steps: tuple[int, ...]) -> None:
        for step in steps * 10:
            put_tag(store, step, "best", "now", move=True)

    threads = [threading.Thread(target=moves, args=(steps,)) for steps in ((1, 2), (3, 2, 1))]
    watcher = threading.Thread(target=watch)
    for thread in (watcher, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stopped.set()
    watcher.join()
    assert set(seen) <= {1, 2, 3} and seen
    assert read_tags(store).whole["best"].step in (1, 2)


def test_a_moved_tag_states_the_format_that_lets_it_move(template: Store) -> None:
    store = copy_of(template)
    with pytest.raises(ConflictError, match="--move"):
        tag_step(store, SystemClock(), AFTER, "best")
    assert move(store) == "moved"
    document, _ = unsealed(store.get("tags/best.json", 1 << 16), "here")
    assert document["holdfast"] == {"format": [1, 3], "kind": "tag"}
    assert move(store) == "moved", "again changes nothing"
    tag_step(store, SystemClock(), "best", "paper")
    tag_step(store, SystemClock(), "latest", "last")
    assert {name: tag.step for name, tag in read_tags(store).whole.items()} == {"best": 1, "paper": 1, "last": 3}


def test_a_damaged_tag_moves_and_one_of_a_newer_format_stays(template: Store) -> None:
    store = copy_of(template)
    store.put("tags/best.json", b"damaged")
    with pytest.raises(ConflictError, match="exists and is damaged"):
        tag_step(store, SystemClock(), AFTER, "best")
    assert move(store) == "moved"
    require_held(store, "moved")
    from holdfast.core.format.sealed_json import sealed

    newer = sealed({"holdfast": {"format": [1, 99], "kind": "tag"}, "name": "best"})
    store.put("tags/best.json", newer)
    with pytest.raises(InvalidError, match=r"format 1\.99"):
        move(store)
    assert store.get("tags/best.json", 1 << 16) == newer


def test_a_tag_of_a_damaged_step_is_not_moved(template: Store) -> None:
    store = copy_of(template)
    store.put(manifest_key(AFTER), b"damaged")
    with pytest.raises(CorruptError):
        move(store)
    require_held(store, "refused")


def test_no_tag_is_put_without_a_lease(template: Store) -> None:
    """Without the lease, a collection that has read the tags removes the step although the tag is put in time."""
    store = copy_of(template)

    def refuse(point: FaultPoint) -> None:
        if point.subject.startswith("readers/"):
            raise UnavailableError("the folder is of another user")

    for name, moves in (("best", True), ("new", False)):
        with pytest.raises(UnavailableError, match="no lease could be stored under readers/"):
            tag_step(
                FaultyStore(store, Faults(refuse, names={"put"}, lasting=True)), SystemClock(), AFTER, name, move=moves
            )
    assert {name: tag.step for name, tag in read_tags(store).whole.items()} == {"best": BEFORE}


@pytest.mark.parametrize("is_new", [False, True])
def test_who_moves_a_tag_last_prevails_over_one_whose_step_is_gone(template: Store, is_new: bool) -> None:
    store = copy_of(template)
    name = "new" if is_new else "best"

    def lose(point: FaultPoint) -> None:
        if point.subject == f"tags/{name}.json" and exists(store, manifest_key(AFTER)):
            store.delete([manifest_key(AFTER)])  # As by `rm -rf` of the folder.
            put_tag(store, NEWEST, name, "now", move=True)

    faulty = FaultyStore(
        store, Faults(lose, names={"put_if_absent" if is_new else "replace"}, lasting=True, after=True)
    )
    with pytest.raises(MissingError):
        put_tag(faulty, AFTER, name, "now", move=True)
    assert read_tags(store).whole[name].step == NEWEST


def test_a_repair_leaves_a_tag_that_moves_meanwhile(template: Store) -> None:
    store, seen = copy_of(template), []
    data = store.get(manifest_key(BEFORE), 1 << 20)
    store.put(manifest_key(BEFORE), data[:-40])

    def act(point: FaultPoint) -> None:
        seen.append(point.subject)
        if point.subject == "tags/best.json" and read_tags(store).whole["best"].step != NEWEST:
            tag_step(store, SystemClock(), NEWEST, "best", move=True)

    faulty = FaultyStore(store, Faults(act, names={"get", "list"}, lasting=True, after=True))
    (repaired,) = Repair(faulty, References(()), SystemClock(), PATIENT).run(BEFORE).steps
    assert repaired.outcome == "repaired" and "tags/best.json" in seen
    assert read_tags(store).whole["best"].step == NEWEST


@pytest.mark.parametrize("after", [False, True])
def test_a_repair_leaves_a_tag_that_moves_at_any_look_at_it(template: Store, after: bool) -> None:
    looks = 0
    for nth in range(1, 20):
        store, calls = copy_of(template), list[FaultPoint]()
        store.put(manifest_key(BEFORE), store.get(manifest_key(BEFORE), 1 << 20)[:-40])

        def act(point: FaultPoint, store: Store = store, calls: list[FaultPoint] = calls, nth: int = nth) -> None:
            if point.subject == "tags/best.json":
                calls.append(point)
                if len(calls) == nth:
                    put_tag(store, NEWEST, "best", "now", move=True)

        faulty = FaultyStore(store, Faults(act, lasting=True, after=after))
        (repaired,) = Repair(faulty, References(()), SystemClock(), PATIENT).run(BEFORE).steps
        if len(calls) < nth:
            break
        looks += 1
        assert repaired.outcome == "repaired" and read_tags(store).whole["best"].step == NEWEST
    assert looks >= 4
