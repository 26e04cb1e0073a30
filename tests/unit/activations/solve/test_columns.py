"""Columns of a class: right by the rules, and as fast as the fastest of all choices."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from holdfast.activations.profile.unit_profile import Packing, UnitColumn, UnitProfile
from holdfast.activations.solve.columns import (
    HOOK_SECONDS,
    REPLAY_OP_SECONDS,
    REPLAY_SECONDS,
    columns_of,
    keep_all,
    whole_recompute,
)
from tests.unit.activations.solve.traces import MIB, drawn_unit, draws, op, rejects, unit


def bases_run(profile: UnitProfile, column: UnitColumn) -> set[int]:
    return {number for number in column.run if profile.ops[number].base is None}


def all_choices(profile: UnitProfile, *, lossy: bool) -> list[tuple[int, float]]:
    """Return bytes and seconds of every column that the rules allow."""
    bases = [each for each in profile.ops if each.base is None]
    options = [("skip", "run", "keep", *(packing.action for packing in each.packings)) for each in bases]
    found = [(keep_all(profile).device_bytes, 0.0)]
    for actions in product(*options):
        chosen = {each.number: action for each, action in zip(bases, actions, strict=True)}
        run = {base for base, action in chosen.items() if action == "run"}
        store = {base: action for base, action in chosen.items() if action not in ("run", "skip")}
        if rejects(profile, store, run, lossy=lossy):
            continue
        size, seconds = 0, HOOK_SECONDS * len(store)
        for base, action in store.items():
            packed = next((each for each in profile.ops[base].packings if each.action == action), None)
            size += profile.ops[base].bytes if packed is None else packed.device_bytes
            seconds += 0.0 if packed is None else packed.seconds
        if run:
            again = [each for each in profile.ops if (each.number if each.base is None else each.base) in run]
            seconds += sum(each.seconds for each in again) + REPLAY_SECONDS + REPLAY_OP_SECONDS * len(profile.ops)
            seconds += sum(profile.ops[number].seconds for number in draws(profile, run))
        found.append((size, seconds))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_each_column_is_the_fastest_of_its_size(seed: int) -> None:
    lossy = seed % 3 == 0
    profile = drawn_unit(random.Random(seed), 7 if lossy else 8, effects=seed % 4 == 3)
    found = columns_of(profile, error_bound=0.1 if lossy else 0.0)
    everything = all_choices(profile, lossy=lossy)
    recomputed = whole_recompute(profile)
    for each in found:
        if each == recomputed:
            continue  # The replay holds the input of this column: `store` does not name the input.
        assert rejects(profile, dict(each.store), bases_run(profile, each), lossy=lossy) == "" or each.seconds == 0
        fastest = min(seconds for size, seconds in everything if size <= each.device_bytes)
        assert each.seconds == pytest.approx(fastest, abs=1e-8)
    # The sweep reaches the least bytes.
    assert min(each.device_bytes for each in found) == min(size for size, _ in everything)


@pytest.mark.parametrize("seed", range(12))
def test_columns_of_large_units_follow_the_rules(seed: int) -> None:
    rng = random.Random(seed)
    profile = drawn_unit(rng, rng.randint(9, 20), effects=seed % 2 == 1)
    recomputed = whole_recompute(profile)
    for each in columns_of(profile, error_bound=0.0):
        store, run = dict(each.store), bases_run(profile, each)
        if each == recomputed:
            store[0] = "keep"
        assert rejects(profile, store, run) == "" or each == keep_all(profile)
        assert set(each.draw) == draws(profile, run)
        # All views and in-place ops of a storage run with the storage.
        assert set(each.run) == {
            other.number for other in profile.ops if (other.number if other.base is None else other.base) in run
        }


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_independent_ops_is_irrelevant(seed: int) -> None:
    """Without random ops only `reads` orders ops: a renumbered trace has columns of the same bytes and seconds."""
    rng = random.Random(seed)
    profile = drawn_unit(rng, 9)
    ops = [replace(each, is_random=False, base=None, bytes=each.bytes or MIB) for each in profile.ops]
    profile = unit(ops)
    order, waiting = [0], list(range(1, len(ops)))
    while waiting:
        ready = [number for number in waiting if set(ops[number].reads) <= set(order)]
        order.append(rng.choice(ready))
        waiting.remove(order[-1])
    place = {number: index for index, number in enumerate(order)}
    renumbered = [
        replace(ops[number], number=index, reads=tuple(sorted(place[read] for read in ops[number].reads)))
        for index, number in enumerate(order)
    ]
    ours, others = columns_of(profile, 0.0), columns_of(unit(renumbered), 0.0)
    fastest = [
        [min(each.seconds for each in columns if each.device_bytes <= size * MIB) for size in range(8, 60, 4)]
        for columns in (ours, others)
        if min(each.device_bytes for each in columns) <= 8 * MIB
    ]
    assert min(each.device_bytes for each in ours) == min(each.device_bytes for each in others)
    assert not fastest or fastest[0] == pytest.approx(fastest[1], abs=1e-8)


def test_the_first_column_keeps_everything_for_nothing() -> None:
    profile = unit([op(0, is_needed=True), op(1, [0]), op(2, [1], is_needed=True)])
    first = columns_of(profile, 0.0)[0]
    assert first == keep_all(profile)
    assert first.store == ((0, "keep"), (2, "keep"))
    assert (first.run, first.draw, first.seconds, first.device_bytes) == ((), (), 0.0, 2 * MIB)


def test_whole_recompute_runs_the_ancestors_of_what_is_needed() -> None:
    ops = [op(0), op(1, [0]), op(2, [1], is_needed=True), op(3, [2])]
    found = whole_recompute(unit(ops))
    assert found is not None
    assert (found.store, found.run, found.draw) == ((), (1, 2), ())
    assert found.device_bytes == ops[0].bytes, "the replay holds the input"
    assert found.backward_workspace_bytes == unit(ops).recompute_workspace_bytes


def test_a_random_op_before_a_recomputed_one_is_drawn() -> None:
    """The first of two random ops is stored, or skipped; the second runs again and must draw what it drew."""
    packing = Packing("bits", MIB // 32, 1e-5)
    dear = op(1, [0], is_storable=False, seconds=1.0)
    stored = op(2, [1], is_needed=True, is_random=True, packings=(packing,))
    skipped = op(3, [0], is_random=True)
    late = op(4, [0], is_needed=True, is_random=True, is_storable=False)
    profile = unit([op(0, is_needed=True), dear, stored, skipped, late, op(5, [0], is_random=True)])
    packed = [each for each in columns_of(profile, 0.0) if (2, "bits") in each.store]
    assert [(each.run, each.draw) for each in packed] == [((4,), (2, 3))]


def test_an_early_draw_has_its_price() -> None:
    """Storing the late random op is dear in bytes, but running it again would draw the dear early one."""
    early = op(1, [0], is_needed=True, is_random=True, seconds=1.0)
    late = op(2, [0], is_needed=True, is_random=True, seconds=1e-3)
    for each in columns_of(unit([op(0, is_needed=True), early, late]), 0.0):
        if 2 in each.run:
            assert each.seconds > 1.0


def test_an_op_with_an_effect_never_runs_again_and_its_readers_are_kept() -> None:
    packing = Packing("bits", 1000, 1e-6)
    norm = op(1, [0], has_effect=True, is_needed=True, packings=(packing,))
    reader = op(2, [1], is_needed=True, packings=(packing,))
    beyond = op(3, [2], is_needed=True, packings=(packing,))
    profile = unit([op(0, is_needed=True), norm, reader, beyond])
    found = columns_of(profile, 0.0)
    assert whole_recompute(profile) is None
    assert all({(1, "keep"), (2, "keep")} <= set(each.store) for each in found)
    assert any((3, "bits") in each.store for each in found), "an overflow reruns op 3 from the kept output of op 2"
    assert any(each.run == (3,) for each in found)


def test_no_pack_stands_on_a_skipped_output_that_cannot_run_again() -> None:
    norm = op(1, [0], has_effect=True)
    beyond = op(3, [2], is_needed=True, packings=(Packing("bits", 1000, 1e-6),), is_storable=True)
    unstorable = op(2, [1], is_storable=False)
    found = columns_of(unit([op(0, is_needed=True), norm, unstorable, beyond]), 0.0)
    assert [each.store for each in found] == [((0, "keep"), (3, "keep"))]


def test_a_random_op_with_an_effect_forbids_later_draws() -> None:
    early = op(1, [0], is_random=True, has_effect=True)
    late = op(2, [0], is_needed=True, is_random=True)
    profile = unit([op(0, is_needed=True), early, late])
    assert whole_recompute(profile) is None
    assert all(not each.run for each in columns_of(profile, 0.0))


def test_a_replay_unpacks_a_packed_input() -> None:
    packing = Packing("narrow", MIB // 2, 1e-6)
    ops = [op(0, packings=(packing,)), op(1, [0], is_needed=True, bytes=3 * MIB)]
    profile = unit(ops, recompute_workspace_bytes=5 * MIB)
    workspaces = {
        each.device_bytes: each.backward_workspace_bytes for each in columns_of(profile, 0.0) if each.run == (1,)
    }
    assert workspaces == {MIB: 5 * MIB, MIB // 2: 6 * MIB}


def test_views_stand_for_their_base() -> None:
    """Dropout on a CPU: an empty tensor, filled in place, divided in place; a view of the result is saved."""
    ops = [
        op(0, is_needed=True),
        op(1, bytes=4 * MIB, is_storable=True),
        op(2, [1], base=1, bytes=0, is_random=True),
        op(3, [1], base=1, bytes=0),
        op(4, [1], base=1, bytes=0, seconds=0.0, is_needed=True),
    ]
    found = columns_of(unit(ops), 0.0)
    assert found[0].store == ((0, "keep"), (1, "keep"))
    assert [each.run for each in found[1:]] == [(1, 2, 3, 4)]
    assert found[1].seconds >= 3e-3


def test_a_unit_that_cannot_replay_gets_no_replay() -> None:
    packing = Packing("bits", MIB // 8, 1e-5)
    ops = [op(0), op(1, [0], is_needed=True, packings=(packing,)), op(2, [1], is_needed=True, is_storable=False)]
    profile = unit(ops, why_not="takes a cache")
    found = columns_of(profile, 0.0)
    assert [each.store for each in found] == [((1, "keep"), (2, "keep")), ((1, "bits"), (2, "keep"))]
    assert all(not each.run and not each.draw for each in found)


def test_without_an_error_bound_nothing_loses_bits() -> None:
    lossy = Packing("q8", MIB // 4, 0.0, is_lossy=True)
    profile = unit([op(0, is_needed=True, packings=(lossy,)), op(1, [0], is_needed=True, packings=(lossy,))])
    assert not any(each.is_lossy for each in columns_of(profile, 0.0))
    bounded = columns_of(profile, 0.02)
    assert any(each.is_lossy for each in bounded)
    assert all((0, "q8") not in each.store for each in bounded), "the input is never packed with loss"


def test_no_column_is_dominated() -> None:
    found = columns_of(drawn_unit(random.Random(3), 20), 0.0)
    seconds = [each.seconds for each in found]
    assert seconds == sorted(seconds)
    for slow in found:
        for fast in found:
            assert fast is slow or not (
                fast.seconds <= slow.seconds
                and fast.device_bytes <= slow.device_bytes
                and fast.forward_workspace_bytes <= slow.forward_workspace_bytes
                and fast.backward_workspace_bytes <= slow.backward_workspace_bytes
                and all(action == "keep" for _, action in fast.store)
            )
