"""What ranks publish when their statements differ: enough to name what differs, in bytes that do not grow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.geometry.tensor import Role
from holdfast.base.ports.comm import KeyValueStore
from holdfast.base.types.reports import SaveReport
from holdfast.training.coordination.agreement.details import (
    SharedTensors,
    decode_details,
    decode_difference,
    details_by_rank,
    encode_details,
    encode_difference,
    entries_of,
    fitting_names,
    shared_tensors,
)
from holdfast.training.coordination.agreement.records import Details
from tests.unit.ranks import World, plain

WORLD, TENSORS = 32, 300

Digests = st.dictionaries(st.sampled_from("abcdefghijklmnopqrst"), st.sampled_from(["00" * 8, "11" * 8, "22" * 8]))


class CountingStore:
    """Counts the bytes of agreements that come to one rank."""

    def __init__(self, key_value_store: KeyValueStore) -> None:
        self._key_value_store = key_value_store
        self.received = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._key_value_store, name)

    def get_many(self, keys: Sequence[str], timeout_seconds: float) -> list[bytes]:
        found = self._key_value_store.get_many(keys, timeout_seconds)
        # The commit thread asks too, at any moment.
        self.received += sum(len(each) for key, each in zip(keys, found, strict=True) if "/opening/" in key)
        return found


def received_at_saves(states: Sequence[Callable[[int], dict[str, object]]]) -> list[list[tuple[SaveReport, int]]]:
    """Save states one after the other; return by save and rank the report and the bytes that came to the rank."""
    stores: dict[int, CountingStore] = {}
    here = threading.Barrier(WORLD, timeout=60.0)

    def counting(rank: int) -> Callable[[KeyValueStore], KeyValueStore]:
        def view(key_value_store: KeyValueStore) -> KeyValueStore:
            stores[rank] = CountingStore(key_value_store)
            return stores[rank]  # type: ignore[return-value]

        return view

    def part(rank: int, run: CheckpointManager) -> list[tuple[SaveReport, int]]:
        found = []
        for step, state in enumerate(states):
            here.wait()
            stores[rank].received = 0
            handle = run.save(step, state(rank))
            received = stores[rank].received
            here.wait()
            found.append((handle.wait(timeout=60.0), received))
        return found

    world = World(WORLD, boards={rank: counting(rank) for rank in range(WORLD)})
    by_rank = world.play(part)
    for outcome in by_rank:
        assert isinstance(outcome, list), outcome
    return [list(each) for each in zip(*by_rank, strict=True)]  # type: ignore[arg-type]


def steps(stage: int = 0) -> dict[str, object]:
    """The step counters of an optimizer, as plain tensors."""
    return {
        f"optimizer.state.layers.{stage}.{number}.weight.step": plain(1.0, role=Role.OPTIMIZER, count=1)
        for number in range(TENSORS)
    }


OWN_SHARE = TENSORS * 100


def test_one_value_that_differs_by_rank_costs_little_at_the_first_save_and_nothing_after() -> None:
    first, second, third = received_at_saves([lambda rank: {**steps(), "position": rank, "lr": 0.1}] * 3)
    for rank, (report, received) in enumerate(first):
        assert report.divergent == ("position",)
        assert received <= OWN_SHARE + (64 if rank else 512) * WORLD
    for save in (second, third):
        for rank, (report, received) in enumerate(save):
            assert report.divergent == ("position",)
            # Rank 0 reads the statements, the others one verdict.
            assert received <= (64 * WORLD if rank == 0 else 600)


def test_a_name_that_comes_to_differ_later_is_found_beside_one_that_is_known() -> None:
    saves = received_at_saves(
        [
            lambda rank: {**steps(), "position": rank, "lr": 0.1},
            lambda rank: {**steps(), "position": rank, "lr": 0.1 if rank != 7 else 0.2},
            lambda rank: {**steps(), "position": rank, "lr": 0.1 if rank != 7 else 0.2},
            lambda rank: {**steps(), "position": 5, "lr": 0.1},
            lambda rank: {**steps(), "position": 5, "lr": 0.1},
        ]
    )
    found = [{report.divergent for report, _ in save} for save in saves]
    assert found == [{("position",)}, {("lr", "position")}, {("lr", "position")}, {()}, {()}]


@pytest.mark.parametrize("odd", [{"more": 1}, {"empty": {}}, {"b": 2, "a": 1}])
def test_a_value_that_only_some_ranks_have_is_not_asked_for_again(odd: dict[str, object]) -> None:
    def state(rank: int) -> dict[str, object]:
        return {**steps(), "cfg": {"a": 1, "b": 2} if rank % 2 else odd}

    saves = received_at_saves([state] * 3)
    assert max(received for _, received in saves[0]) > 64 * WORLD
    for save in saves[1:]:
        assert max(received for _, received in save) <= 64 * WORLD


def test_ranks_of_a_pipeline_receive_nothing_of_other_stages() -> None:
    def state(rank: int) -> dict[str, object]:
        return {**steps(rank // 2), f"stage{rank // 2}": 1, "tied": plain(3.0, count=2000)}

    ((*found,),) = received_at_saves([state])
    for rank, (report, received) in enumerate(found):
        assert report.divergent == ()
        assert rank == 0 or received <= OWN_SHARE + 64 * WORLD
    assert sum(report.bytes for report, _ in found) == WORLD // 2 * TENSORS * 4 + 8000


@given(Digests, Digests, Digests, Digests)
def test_what_differs_comes_back(
    agreeing: dict[str, str], other: dict[str, str], own_agreeing: dict[str, str], own_other: dict[str, str]
) -> None:
    own_agreeing = {**agreeing, **{name: digest for name, digest in own_agreeing.items() if name in agreeing}}
    lowest, own = Details("x", {}, agreeing, other, []), Details("x", {}, own_agreeing, own_other, [])
    assert decode_details(encode_details(lowest)) == lowest
    found, uneven = decode_difference(lowest, list(entries_of(lowest)), encode_difference(lowest, own))
    assert found.agreeing.keys() == {name for name in agreeing if agreeing[name] != own_agreeing[name]}
    extra = sorted({*own_other} - {*other})[:8]
    differing = {name for name, digest in own_other.items() if other.get(name, digest) != digest}
    assert found.other.keys() == differing.union(extra)
    assert uneven == ({*other} - {*own_other}).union(extra)
    exact = [(name, own_agreeing) for name in sorted(found.agreeing)]
    exact += [(name, own_other) for name in sorted(found.other) if name in other]
    for name, digests in exact[:8]:
        assert (found.agreeing if digests is own_agreeing else found.other)[name] == digests[name]
    for name in extra:
        assert found.other[name] == own_other[name]


def test_a_difference_in_everything_takes_a_bit_an_entry() -> None:
    names = [f"model.layers.{number}.norm.running_mean" for number in range(4000)]
    lowest = Details("x", {}, {}, dict.fromkeys(names, "00" * 8), ())
    own = Details("x", {}, {}, {name: f"{number:016x}" for number, name in enumerate(names, 1)}, ())
    record = encode_difference(lowest, own)
    assert len(record) < 512
    assert decode_difference(lowest, list(entries_of(lowest)), record)[0].other.keys() == {*names}


def test_tensors_of_several_classes_are_told_to_those_only() -> None:
    found = shared_tensors([["a", "tied"], ["b"], ["c", "tied", "norm"], ["norm"]])
    assert sorted(found) == [0, 2, 3]
    classes = [(0, 4), (1, 5), (2, 6), (3, 7)]
    decoded = {number: SharedTensors.decode(each.encode()).holders(classes) for number, each in found.items()}
    assert decoded == {
        0: {"tied": (0, 2, 4, 6)},
        2: {"tied": (0, 2, 4, 6), "norm": (2, 3, 6, 7)},
        3: {"norm": (2, 3, 6, 7)},
    }


def test_a_rank_that_equals_the_lowest_in_a_name_that_others_differ_in_says_so() -> None:
    lowest = Details("x", {}, {"w": "00" * 8}, {"a": "00" * 8, "b": "00" * 8, "c": "00" * 8}, ["a"])
    first = Details("x", {}, {"w": "11" * 8}, {"a": "11" * 8, "b": "00" * 8, "c": "00" * 8}, ["a"])
    second = Details("x", {}, {"w": "00" * 8}, {"a": "22" * 8, "c": "00" * 8, "d": "33" * 8}, ["a"])
    records = [encode_details(lowest), encode_difference(lowest, first), encode_difference(lowest, second)]
    found, uneven = details_by_rank((0, 1, 2), [(0, 1, 2)], lambda ranks: [records[rank] for rank in ranks])
    assert uneven == {"b", "d"}
    assert found[0] == lowest
    assert (found[1].agreeing, found[1].other) == ({"w": "11" * 8}, {"a": "11" * 8})
    assert (found[2].agreeing, found[2].other) == ({"w": "00" * 8}, {"a": "22" * 8, "d": "33" * 8})


def test_names_that_only_some_ranks_have_fill_a_verdict_with_32_characters_a_rank_at_most() -> None:
    names = {f"cache.rank{number:06}" for number in range(40_000)}
    assert fitting_names({"b", "a"}, 2) == ("a", "b")
    assert fitting_names(names, 2) == tuple(sorted(names)[: (16 << 10) // 16])
    assert fitting_names(names, 16_384) == tuple(sorted(names)[: 2 * 16_384])
