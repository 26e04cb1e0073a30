"""Each verb that looks and then acts, with another process between any two of its calls."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Epoch
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX
from holdfast.core.format.names import epoch_key, manifest_key
from holdfast.core.format.sealed_json import stated_digest
from holdfast.errors import CheckpointError, ConflictError, MissingError
from holdfast.settings import Settings
from holdfast.stored.leases.process import this_process
from holdfast.stored.repository.epochs import newest_epoch, put_accepted, put_epoch
from holdfast.stored.repository.manifest_removal import remove_manifest
from holdfast.stored.repository.overwriting import (
    claim_of,
    clear_away,
    put_claim,
    read_claim,
    release_claim,
    require_claim,
    take_claim_away,
)
from holdfast.stored.repository.publish import get_or_none, holds, publish
from holdfast.stored.repository.quarantine import identity_at, quarantine, supersede
from holdfast.stored.repository.removal import mark_key
from holdfast.stored.repository.tags import put_tag, read_tags, remove_tag, remove_tag_of_step
from holdfast.stored.repository.timelines import displace
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.support.between_calls import Gap, StoreWithoutLinks, every_gap
from tests.unit.ranks import World, fresh_store, plain, saved

CLOCK = SystemClock()
WHEN = "2026-03-01T10:00:00+00:00"
KEY, OURS = "manifest.json", b"ours, and no other"
CLAIM, ASIDE = "overwriting/claim.json", "overwriting/0123456789abcdef.aside.json"
CONTENTS = {"gone": None, "larger": b"of another job" * 9, "ours": OURS, "another's": b"of another, "}

Fresh = Callable[[], Store]


@pytest.fixture(params=["memory", "no links", "local"])
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fresh]:
    """Makes empty stores."""

    def make() -> Store:
        if request.param == "local":
            return LocalStore(tmp_path / uuid.uuid4().hex, settings=Settings())
        store = fresh_store()
        return StoreWithoutLinks(store) if request.param == "no links" else store

    yield make


def prepared(fresh: Fresh, *parts: Callable[[Store], object]) -> Fresh:
    def make() -> Store:
        store = fresh()
        for part in parts:
            part(store)
        return store

    return make


def become(data: bytes | None, key: str = KEY) -> Callable[[Store], None]:
    return lambda store: store.delete([key]) if data is None else store.put(key, data)


def count_of(gaps: Iterator[Gap], judge: Callable[[Gap], None]) -> int:
    count = 0
    for count, gap in enumerate(gaps, 1):  # noqa: B007 - the last number is the count
        judge(gap)
    return count


@pytest.mark.parametrize("before", CONTENTS)
@pytest.mark.parametrize("change", CONTENTS)
def test_a_put_that_must_be_first_succeeds_exactly_if_it_is_stored(before: str, change: str) -> None:
    def judge(gap: Gap) -> None:
        found = get_or_none(gap.store, KEY, 1000)
        assert found in (OURS, CONTENTS[change], CONTENTS[before]), "what another job stored was not touched"
        if gap.outcome is None:
            assert found == OURS
        else:
            assert isinstance(gap.outcome, ConflictError) and found != OURS
            assert "another writer published first" in str(gap.outcome)

    begun = prepared(fresh_store, become(CONTENTS[before]))
    assert count_of(every_gap(begun, lambda store: publish(store, KEY, OURS), become(CONTENTS[change])), judge)


@pytest.mark.parametrize("before", CONTENTS)
@pytest.mark.parametrize("change", CONTENTS)
def test_whether_it_is_ours_is_one_look(before: str, change: str) -> None:
    for gap in every_gap(
        prepared(fresh_store, become(CONTENTS[before])), lambda store: holds(store, KEY, OURS), become(CONTENTS[change])
    ):
        assert gap.outcome == (CONTENTS[change] == OURS)


@pytest.mark.parametrize("comes", [1, 3])
def test_a_key_that_others_free_again_is_put_in_the_end(fresh: Fresh, comes: int) -> None:
    """Each put meets an object, and each look finds none."""
    turns = iter([b"of another job", None] * comes)

    def flicker(store: Store, turn: int = 0) -> None:
        become(next(turns, None))(store)

    for gap in every_gap(fresh, lambda store: publish(store, KEY, OURS), flicker, flicker):
        assert gap.outcome is None and gap.store.get(KEY, 100) == OURS


# --------------------------------------------------------------------------------------------------------- claims

OWN, NEXT, DEAD = (replace(this_process(CLOCK, 30.0), host=host) for host in ("own", "next" * 9, "dead"))


def take_over(store: Store) -> None:
    """Take the claim as another job does that has seen no heartbeat for a lease."""
    found = read_claim(store)
    if found is not None:
        take_claim_away(store, found.data)
    assert put_claim(store, claim_of(NEXT))
    clear_away(store, NEXT.nonce)


def require_next(store: Store, turn: int = 0) -> None:
    require_claim(store, NEXT.nonce)


def come_and_go(store: Store) -> None:
    take_over(store)
    release_claim(store, claim_of(NEXT))


def test_a_claim_that_is_released_late_is_that_of_the_next_job(fresh: Fresh) -> None:
    begun = prepared(fresh, become(claim_of(OWN), CLAIM))
    gaps = every_gap(begun, lambda store: release_claim(store, claim_of(OWN)), take_over, require_next)

    def judge(gap: Gap) -> None:
        assert gap.outcome is None
        require_next(gap.store)
        found = read_claim(gap.store)
        assert found is not None and found.holder == NEXT

    assert count_of(gaps, judge) >= 3


@pytest.mark.parametrize("change", [become(None, CLAIM), come_and_go], ids=["gone", "another came and went"])
def test_a_claim_that_is_released_brings_none_back(fresh: Fresh, change: Callable[[Store], None]) -> None:
    begun = prepared(fresh, become(claim_of(OWN), CLAIM))
    for gap in every_gap(begun, lambda store: release_claim(store, claim_of(OWN)), change):
        assert gap.outcome is None and read_claim(gap.store) is None


def test_the_claim_of_a_dead_process_is_removed_and_no_other(fresh: Fresh) -> None:
    begun = prepared(fresh, become(claim_of(DEAD), CLAIM))
    for gap in every_gap(begun, lambda store: take_claim_away(store, claim_of(DEAD)), take_over, require_next):
        assert gap.outcome is None
        require_next(gap.store)
    for gap in every_gap(begun, lambda store: take_claim_away(store, claim_of(DEAD)), come_and_go):
        assert read_claim(gap.store) is None


@pytest.mark.parametrize("before", [None, claim_of(OWN), b"torn"], ids=["none", "own", "torn"])
@pytest.mark.parametrize("after", [None, claim_of(NEXT), b"torn"], ids=["none", "next", "torn"])
def test_a_claim_is_read_as_one_object(fresh: Fresh, before: bytes | None, after: bytes | None) -> None:
    """A holder that is None means bytes that cannot be read: their heartbeat is not watched."""
    holders = {claim_of(OWN): OWN, claim_of(NEXT): NEXT}
    for gap in every_gap(prepared(fresh, become(before, CLAIM)), read_claim, become(after, CLAIM)):
        found = gap.outcome
        assert found is None or found.holder == holders.get(found.data)  # type: ignore[attr-defined]


def test_a_job_sees_the_claim_that_another_has_moved_aside_in_error(fresh: Fresh) -> None:
    """As a process does that then ends: nobody but the holder puts the claim back."""
    begun = prepared(fresh, become(claim_of(OWN), ASIDE))
    begun_twice = prepared(fresh, become(claim_of(OWN), ASIDE), become(claim_of(DEAD), ASIDE.replace("0", "f", 1)))
    for make in (begun, begun_twice):
        store = make()
        require_claim(store, OWN.nonce)
        found = read_claim(store)
        assert found is not None and found.holder == OWN


def test_a_job_looks_while_another_puts_its_claim_back(fresh: Fresh) -> None:
    """The other process takes a claim away that it saw, finds that it has moved this one, and links it back."""

    def take_wrongly(store: Store) -> None:
        take_claim_away(store, claim_of(DEAD))

    for gap in every_gap(
        prepared(fresh, become(claim_of(OWN), CLAIM)), lambda store: require_claim(store, OWN.nonce), take_wrongly
    ):
        assert gap.outcome is None
    for at in (1, 2, 3):
        store, turns = prepared(fresh, become(claim_of(OWN), ASIDE))(), iter(range(1, 9))

        def put_back(point: FaultPoint, store: Store = store, turns: Iterator[int] = turns, at: int = at) -> None:
            if next(turns) == at:
                store.move(ASIDE, CLAIM)

        require_claim(FaultyStore(store, Faults(put_back, lasting=True)), OWN.nonce)


@pytest.mark.parametrize("change", [take_over, come_and_go])
def test_a_claim_that_another_job_has_had_since_is_lost(fresh: Fresh, change: Callable[[Store], None]) -> None:
    """That job may have removed files of the holder."""
    for gap in every_gap(
        prepared(fresh, become(claim_of(OWN), ASIDE)), lambda store: require_claim(store, OWN.nonce), change
    ):
        found = read_claim(gap.store)
        assert found is None or found.holder == NEXT
        # Without an error it had seen its claim before the other job came.
        assert gap.outcome is None or (
            isinstance(gap.outcome, ConflictError) and "may not overwrite" in str(gap.outcome)
        )


# ----------------------------------------------------------------------------------------------------------- tags


@pytest.fixture(scope="module")
def run() -> MemoryStore:
    """A run with steps 1, 2 and 3. Each test takes a copy."""
    world = World(1)
    world.play(lambda rank, manager: [saved(manager, step, {"a": plain(step)}) for step in (1, 2, 3)])
    assert world.committed() == [1, 2, 3]
    return world.store


def copied(run: MemoryStore) -> Fresh:
    def make() -> Store:
        store = fresh_store()
        for entry in run.list():
            store.put(entry.key, run.get(entry.key, 1 << 20))
        return store

    return make


def tagged(step: int, created: str = WHEN) -> Callable[[Store], object]:
    return lambda store: put_tag(store, step, "best", created, move=True)


def untagged(store: Store) -> None:
    store.delete(["tags/best.json"])


def tag_at(store: Store) -> int | None:
    tags = read_tags(store)
    assert not tags.damaged
    return tags.whole["best"].step if "best" in tags.whole else None


CHANGES = {"gone": untagged, "larger": tagged(1, WHEN * 3), "ours": tagged(2), "another's": tagged(3)}


@pytest.mark.parametrize("before", CHANGES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_tag_is_put_or_refused_for_the_step_that_has_it(run: MemoryStore, before: str, change: str) -> None:
    begun = prepared(copied(run), CHANGES[before])
    for gap in every_gap(begun, lambda store: put_tag(store, 2, "best", WHEN), CHANGES[change]):
        if isinstance(gap.outcome, CheckpointError):
            assert isinstance(gap.outcome, ConflictError)
            assert any(f"names step {step}; expected a free name" in str(gap.outcome) for step in (1, 3))
            assert tag_at(gap.store) != 2 or change == "ours"
        else:
            assert tag_at(gap.store) == 2 or gap.point.name != "put_if_absent", "what came after it prevails"


@pytest.mark.parametrize("before", CHANGES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_tag_moves_whatever_comes_between(run: MemoryStore, before: str, change: str) -> None:
    begun = prepared(copied(run), CHANGES[before])
    after = prepared(begun, CHANGES[change])
    for gap in every_gap(begun, lambda store: put_tag(store, 2, "best", WHEN, move=True), CHANGES[change]):
        assert not isinstance(gap.outcome, CheckpointError), gap
        assert tag_at(gap.store) in (2, tag_at(after()))


@pytest.mark.parametrize("before", [untagged, tagged(1)])
@pytest.mark.parametrize("moved", [None, untagged, tagged(3)], ids=["alone", "and untagged", "and moved on"])
def test_the_tag_of_a_step_that_goes_meanwhile_takes_no_other_with_it(
    run: MemoryStore, before: Callable[[Store], None], moved: Callable[[Store], None] | None
) -> None:
    begun = prepared(copied(run), before)
    former = tag_at(begun())

    def go(store: Store) -> None:
        store.delete([manifest_key(2)])

    met = 0
    for later in range(1, 9):
        come = list[Store]()

        def then(store: Store, turn: int, later: int = later, come: list[Store] = come) -> None:
            if turn == later and moved is not None:
                moved(store)
                come.append(store)

        for gap in every_gap(begun, lambda store: put_tag(store, 2, "best", WHEN, move=True), go, then):
            if isinstance(gap.outcome, CheckpointError):
                assert isinstance(gap.outcome, MissingError), gap
                assert tag_at(gap.store) == (tag_at(prepared(begun, moved)()) if gap.store in come else former), gap
                met += 1
    assert met


@pytest.mark.parametrize("change", [*CHANGES.values(), None], ids=[*CHANGES, "removed by itself"])
def test_the_tag_of_a_step_that_is_removed_goes_unless_it_names_another(
    run: MemoryStore, change: Callable[[Store], object] | None
) -> None:
    begun = prepared(copied(run), tagged(1))
    (tag,) = read_tags(begun()).whole.values()
    for gap in every_gap(
        begun, lambda store: remove_tag_of_step(store, tag, mark_key("0" * 32)), change or (lambda store: None)
    ):
        assert gap.outcome is None
        assert tag_at(gap.store) in ((None,) if change is None else (None, tag_at(prepared(begun, change)())))
        if change is CHANGES["another's"]:
            assert tag_at(gap.store) == 3, "it has moved to another step"
        if change is None:
            assert not list(gap.store.list("collecting/"))


@pytest.mark.parametrize("change", CHANGES)
def test_a_tag_is_removed_by_name(run: MemoryStore, change: str) -> None:
    for gap in every_gap(prepared(copied(run), tagged(1)), lambda store: remove_tag(store, "best"), CHANGES[change]):
        assert gap.outcome is None or (change == "gone" and isinstance(gap.outcome, MissingError))
        assert tag_at(gap.store) is None


# ------------------------------------------------------------------------------------------- manifests and epochs

NEW_WRITER = Epoch(2, "run", replace(OWN, nonce="9" * 32))


def manifest_of(store: Store, step: int) -> bytes:
    return store.get(manifest_key(step), MANIFEST_BYTES_MAX)


def next_epoch(store: Store) -> None:
    put_epoch(store, replace(NEW_WRITER, number=newest_epoch(store) + 1))


def saved_by_another(step: int, *, larger: bool = False) -> Callable[[Store], None]:
    """A writer that takes the epoch and then saves the step anew: another manifest is there."""

    def change(store: Store) -> None:
        next_epoch(store)
        store.put(manifest_key(step), manifest_of(store, 3) + b" " * 500 * larger)

    return change


def without(step: int) -> Callable[[Store], None]:
    return lambda store: store.delete([manifest_key(step)])


def judged(store: Store) -> None:
    quarantine(store, 2, manifest_key(2), identity_at(store, manifest_key(2)), "damaged", WHEN)


def superseded_now(store: Store) -> object:
    return supersede(store, 2, 1)


def displaced_now(store: Store) -> object:
    return displace(store, 2, str(stated_digest(manifest_of(store, 2))), 1)


def withdrawn_now(store: Store) -> object:
    return remove_manifest(store, 2, manifest_key(2), manifest_of(store, 2), 1)


@pytest.mark.parametrize("larger", [False, True])
@pytest.mark.parametrize("verb", [superseded_now, displaced_now, withdrawn_now])
def test_the_manifest_of_a_newer_writer_stays(run: MemoryStore, verb: Callable[[Store], object], larger: bool) -> None:
    begun, change = prepared(copied(run), judged), saved_by_another(2, larger=larger)
    for gap in every_gap(begun, verb, change):
        assert not isinstance(gap.outcome, CheckpointError) or isinstance(gap.outcome, ConflictError), gap
        assert manifest_of(gap.store, 2) == manifest_of(prepared(begun, change)(), 2), gap


@pytest.mark.parametrize("verb", [superseded_now, displaced_now, withdrawn_now])
def test_a_manifest_that_another_has_removed_is_not_damaged(run: MemoryStore, verb: Callable[[Store], object]) -> None:
    for gap in every_gap(prepared(copied(run), judged), verb, without(2)):
        assert not isinstance(gap.outcome, CheckpointError) or isinstance(gap.outcome, MissingError), gap
        assert get_or_none(gap.store, manifest_key(2), MANIFEST_BYTES_MAX) is None


def test_what_is_superseded_is_the_manifest_that_was_judged(run: MemoryStore) -> None:
    """Another manifest comes under the same epoch: only the comparison of the bytes can tell."""
    begun = prepared(copied(run), judged)
    for gap in every_gap(begun, superseded_now, lambda store: store.put(manifest_key(2), manifest_of(store, 3))):
        assert manifest_of(gap.store, 2) == manifest_of(begun(), 3), gap
        kept = [entry.key for entry in gap.store.list("quarantine/") if entry.key.endswith("manifest.json")]
        assert all(gap.store.get(key, MANIFEST_BYTES_MAX) == manifest_of(begun(), 2) for key in kept)


@pytest.mark.parametrize("change", [next_epoch, saved_by_another(2)], ids=["an epoch", "an epoch and a manifest"])
def test_an_epoch_is_begun_once(run: MemoryStore, change: Callable[[Store], None]) -> None:
    own = Epoch(2, "run", OWN)
    for gap in every_gap(copied(run), lambda store: put_epoch(store, own), change):
        is_ours = gap.outcome is None
        assert is_ours or isinstance(gap.outcome, ConflictError)
        assert (OWN.nonce.encode() in gap.store.get(epoch_key(2), 1 << 16)) == is_ours


def test_the_list_of_an_epoch_is_put_once(run: MemoryStore) -> None:
    def put(steps: dict[int, str | None]) -> Callable[[Store], object]:
        return lambda store: put_accepted(store, 2, "run", steps)

    for change, expected in ((put({1: "a" * 32}), None), (put({1: "a" * 32, 2: "b" * 32}), ConflictError)):
        for gap in every_gap(copied(run), put({1: "a" * 32}), change):
            assert gap.outcome is None if expected is None else isinstance(gap.outcome, expected)
