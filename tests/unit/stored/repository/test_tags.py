"""Tags on a store: put once, read back, and damage of one is told of that one alone."""

from __future__ import annotations

import pytest

from holdfast.base.clock import SystemClock
from holdfast.core.format.sealed_json import sealed, unsealed
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, MissingError
from holdfast.stored.repository.removal import mark_key, mark_keys, remove_marks
from holdfast.stored.repository.tags import put_tag, read_tags, remove_tag, remove_tag_of_step, require_tag_name
from holdfast.stored.repository.timelines import displace
from holdfast.training.runs.tags import tag_step
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.unit.ranks import World, plain, saved

WHEN = "2026-03-01T10:00:00+00:00"


@pytest.fixture
def world() -> World:
    world = World(1)
    for each in world.play(lambda rank, run: [saved(run, step, {"a": plain(step)}) for step in (1, 2)])[0]:  # type: ignore[attr-defined]
        assert not isinstance(each, Exception), each
    return world


def test_a_tag_is_put_once_and_read_back(world: World) -> None:
    store = world.store
    first = put_tag(store, 1, "paper", WHEN)
    assert put_tag(store, 1, "paper", "later") == first, "the same again changes nothing"
    with pytest.raises(ConflictError, match="names step 1"):
        put_tag(store, 2, "paper", WHEN)
    put_tag(store, 1, "best", WHEN)
    tags = read_tags(store)
    assert list(tags.whole) == ["best", "paper"] and not tags.damaged
    digest = world.manifest(1).digest
    assert tags.of(1, digest) == ("best", "paper")
    assert tags.of(1, "0" * 32) == (), "a step removed and saved again is another"
    remove_tag(store, "paper")
    assert list(read_tags(store).whole) == ["best"]
    with pytest.raises(MissingError, match="there are: best"):
        remove_tag(store, "paper")
    put_tag(store, 2, "paper", WHEN)


def test_no_step_no_tag(world: World) -> None:
    with pytest.raises(MissingError, match="no committed step 7"):
        put_tag(world.store, 7, "paper", WHEN)
    assert not read_tags(world.store).whole


@pytest.mark.parametrize("after", [False, True])
def test_a_tag_stays_with_its_manifest_that_makes_room_meanwhile(world: World, after: bool) -> None:
    digest = world.manifest(1).digest

    def make_room(operation: FaultPoint) -> None:
        assert operation.subject == "tags/paper.json"
        displace(world.store, 1, digest, 1)

    store = FaultyStore(world.store, Faults(make_room, names=("put_if_absent",), after=after))
    tag_step(store, SystemClock(), 1, "paper")
    assert read_tags(world.store).of(1, digest) == ("paper",)


def test_a_tag_goes_to_the_manifest_that_it_means_although_the_step_was_saved_again() -> None:
    world = World(1)
    world.play(lambda rank, run: [saved(run, step, {"a": plain(step)}) for step in (1, 2)])
    store, old = world.store, world.manifest(2).digest
    world.play(lambda rank, run: (run.load({"a": plain(0.0)}, 1), saved(run, 2, {"a": plain(-2)})))
    new = world.manifest(2).digest
    assert put_tag(store, 2, "old", WHEN, old).digest == old != put_tag(store, 2, "new", WHEN).digest == new
    with pytest.raises(MissingError, match="no committed step 2@00000000 to tag"):
        put_tag(store, 2, "none", WHEN, "0" * 32)
    assert set(read_tags(store).whole) == {"old", "new"}


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "ä", "x" * 101, "a b", "-f", 7, None])
def test_names_that_are_none_are_refused(name: object) -> None:
    with pytest.raises(InvalidError, match="expected 1 to 100"):
        require_tag_name(name)


def test_every_flipped_bit_of_a_tag_is_found_and_others_are_read(world: World) -> None:
    store = world.store
    put_tag(store, 1, "paper", WHEN)
    put_tag(store, 2, "whole", WHEN)
    data = store.get("tags/paper.json", 1 << 16)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        store.put("tags/paper.json", bytes(flipped))
        tags = read_tags(store)
        assert list(tags.whole) == ["whole"] and list(tags.damaged) == ["paper"]
    with pytest.raises(ConflictError, match="exists and is damaged"):
        put_tag(store, 1, "paper", WHEN)
    remove_tag(store, "paper")


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("step", -1),
        ("step", True),
        ("step", "1"),
        ("step", 10**12),
        ("manifest", "short"),
        ("manifest", None),
        ("created", 7),
        ("name", "other"),
        ("holdfast", {"format": [2, 0], "kind": "tag"}),
        ("holdfast", {"format": [1, 2], "kind": "run"}),
        ("holdfast", None),
    ],
)
def test_a_sealed_tag_that_says_something_impossible_is_damaged(world: World, field: str, bad: object) -> None:
    store = world.store
    put_tag(store, 1, "paper", WHEN)
    document, _ = unsealed(store.get("tags/paper.json", 1 << 16), "here")
    store.put("tags/paper.json", sealed({**document, field: bad}))
    (error,) = read_tags(store).damaged.values()
    assert isinstance(error, CorruptError | InvalidError) and isinstance(error, CheckpointError)


def test_what_is_no_tag_in_the_folder_is_passed_over(world: World) -> None:
    for key in ("tags/note.txt", "tags/deeper/paper.json", "tags/-x.json"):
        world.store.put(key, b"not ours")
    assert read_tags(world.store) == type(read_tags(world.store))()


def test_a_late_collector_may_clear_a_tag_that_is_being_removed(world: World) -> None:
    tag_step(world.store, SystemClock(), 1, "old")

    def collect(operation: FaultPoint) -> None:
        if operation.name == "get" and operation.subject.startswith("collecting/"):
            remove_marks(world.store, mark_keys(world.store))

    faults = Faults(collect, lasting=True)
    remove_tag_of_step(FaultyStore(world.store, faults), read_tags(world.store).whole["old"], mark_key("0" * 32))
    assert any(call.subject.startswith("collecting/") for call in faults.seen)
    assert not read_tags(world.store).whole
