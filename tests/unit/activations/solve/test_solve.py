"""The choice for a model: the fastest within the budget, and right about the peak."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, product

import pytest

from holdfast.activations.profile.unit_profile import ModelProfile, Packing, UnitColumn
from holdfast.activations.solve.columns import columns_of
from holdfast.activations.solve.explain import explained, summary_of
from holdfast.activations.solve.master import GAP, STEP_SHARE, chosen_columns, least_peak
from holdfast.activations.solve.mixed_program import MixedProgram
from holdfast.activations.solve.solve import CURVE_BUDGETS, RESERVE, all_columns, curve_of, solve, solve_again
from holdfast.activations.solve.storages import storages_of
from holdfast.activations.solve.timeline import forward_workspace, may_overflow, step_peak
from holdfast.errors import InvalidError
from tests.unit.activations.solve.traces import MIB, column, drawn_unit, large_model, model, op, unit

Columns = tuple[tuple[UnitColumn, ...], ...]


def drawn_model(rng: random.Random, units: int, columns_count: int) -> tuple[ModelProfile, Columns]:
    """Return a model of two classes whose columns trade time for memory; some of them pack."""
    columns = tuple(
        tuple(
            column(
                size := rng.randint(1, 40),
                rng.randint(0, 60) / 1e3 / (1 + size),
                store=((1, "bits"),) if rng.random() < 0.3 else (),
                forward_workspace_bytes=(size + rng.randint(0, 10)) * MIB,
                backward_workspace_bytes=rng.randint(0, 30) * MIB,
            )
            for _ in range(columns_count)
        )
        for _ in range(2)
    )
    kinds = [
        unit([op(0), op(1, [0], is_needed=True)], recompute_workspace_bytes=rng.randint(1, 50) * MIB) for _ in range(2)
    ]
    gradients = tuple(rng.randint(0, 9) * MIB for _ in range(units))
    return model(*kinds, units=units, gradient_bytes=gradients), columns


def peak_by_hand(profile: ModelProfile, chosen: tuple[UnitColumn, ...]) -> int:
    """Return the peak of a step from the rows of the design, each from sums of its own."""
    peaks = []
    for at, each in enumerate(chosen):
        before = profile.outside_bytes + sum(other.device_bytes for other in chosen[:at])
        kind = profile.classes[profile.order[at][1]]
        peaks.append(before + each.forward_workspace_bytes)
        peaks.append(before + each.device_bytes + profile.gradient_bytes[at] + each.backward_workspace_bytes)
        if any(action != "keep" for _, action in each.store):
            overflow = kind.ops[0].bytes + kind.recompute_workspace_bytes
            peaks.append(before + profile.gradient_bytes[at] + overflow)
    return max(peaks)


def gap_seconds(profile: ModelProfile, added_seconds: float) -> float:
    """Return the seconds that the gap of the solver may cost."""
    return 1.01 * GAP * (STEP_SHARE * profile.step_seconds + added_seconds)


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_the_fastest_that_fits(seed: int) -> None:
    rng = random.Random(seed)
    profile, columns = drawn_model(rng, 4, 5)
    options = []
    for choice in product(range(5), repeat=4):
        chosen = chosen_columns(profile, columns, choice)
        options.append((peak_by_hand(profile, chosen), sum(each.seconds for each in chosen)))
        assert step_peak(profile, chosen).bytes == options[-1][0]
    least = min(peak for peak, _ in options)
    assert least_peak(profile, columns).bytes <= least * (1 + GAP)
    for share in (1.01, 1.2, 1.5, 2.0):
        budget = int(least * share) + 1
        plan = solve(profile, columns, budget, reserve=0.0)
        assert plan.predicted_peak_bytes <= budget
        fastest = min(seconds for peak, seconds in options if peak <= budget * (1 - 1e-5))
        assert (plan.predicted_slowdown - 1) * profile.step_seconds <= fastest + gap_seconds(profile, fastest)


@pytest.mark.parametrize("seed", range(3))
def test_more_budget_never_slows_training(seed: int) -> None:
    profile, columns = drawn_model(random.Random(seed), 12, 8)
    least = least_peak(profile, columns).bytes
    slowdowns = [solve(profile, columns, int(least * (1.02 + step / 8))).predicted_slowdown for step in range(16)]
    for tight, loose in pairwise(slowdowns):
        assert loose - 1 <= tight - 1 + gap_seconds(profile, tight - 1)


def test_the_whole_model_from_traces_fits_every_budget_above_the_floor() -> None:
    rng = random.Random(5)
    profile = model(drawn_unit(rng, 12), drawn_unit(rng, 9), units=7)
    columns = all_columns(profile, 0.0)
    least = least_peak(profile, columns).bytes
    everything = step_peak(profile, chosen_columns(profile, columns, (0,) * 7)).bytes
    for step in range(9):
        budget = int((least + (everything - least) * step / 8) * 1.01)
        plan = solve(profile, columns, budget)
        chosen = chosen_columns(profile, columns, plan.choice)
        assert plan.predicted_peak_bytes == peak_by_hand(profile, chosen) <= budget * (1 - RESERVE)
        assert plan.column_of(3) == chosen[3]
    assert plan.choice == (0,) * 7, "a budget above the peak of keeping everything changes nothing"
    assert plan.predicted_slowdown == 1.0


def test_a_budget_below_the_floor_names_the_floor_and_the_unit() -> None:
    profile, columns = drawn_model(random.Random(1), 5, 6)
    with pytest.raises(InvalidError, match=r"the (forward|backward|overflow) of layers\.\d needs them") as caught:
        solve(profile, columns, MIB)
    floor = int(str(caught.value).split("at least ")[1].split(" bytes")[0].replace(",", ""))
    assert solve(profile, columns, floor).predicted_peak_bytes <= floor
    with pytest.raises(InvalidError, match="expected at least"):
        solve(profile, columns, int(floor * (1 - 2 * GAP)))


def test_the_floor_says_why_a_unit_is_never_recomputed() -> None:
    fixed = unit([op(0), op(1, [0], is_needed=True)], why_not="argument cache may change")
    profile = model(fixed)
    with pytest.raises(InvalidError, match="never recomputed: argument cache may change"):
        solve(profile, all_columns(profile, 0.0), 1000)


def test_equal_columns_are_chosen_by_index_and_equal_inputs_give_equal_plans() -> None:
    kind = unit([op(0), op(1, [0], is_needed=True)])
    profile = model(kind, units=6)
    columns = ((column(9, 0.0), column(4, 0.01), column(4, 0.01), column(1, 0.5)),)
    tight = step_peak(profile, chosen_columns(profile, columns, (1,) * 6)).bytes
    plan = solve(profile, columns, tight + MIB, reserve=0.0)
    assert 2 not in plan.choice
    assert plan == solve(profile, columns, tight + MIB, reserve=0.0)


def test_a_pack_is_refused_where_its_overflow_would_not_fit() -> None:
    kind = unit([op(0), op(1, [0], is_needed=True)], recompute_workspace_bytes=50 * MIB)
    profile = model(kind, units=2)
    packs = column(1, 0.01, store=((1, "bits"),))
    columns = ((column(20, 0.0), packs, column(2, 0.02)),)
    assert may_overflow(packs)
    plan = solve(profile, columns, 30 * MIB)
    assert 1 not in plan.choice
    assert solve(profile, columns, 30 * MIB + 40 * MIB).choice != plan.choice


def test_measured_seconds_change_the_choice() -> None:
    kind = unit([op(0), op(1, [0], is_needed=True)])
    profile = model(kind, units=4)
    columns = ((column(20, 0.0), column(5, 0.01), column(4, 0.02)),)
    assert set(solve(profile, columns, 40 * MIB).choice) <= {0, 1}
    slower = ((columns[0][0], replace(columns[0][1], seconds=0.5), columns[0][2]),)
    assert 1 not in solve(profile, slower, 40 * MIB).choice


def test_another_budget_is_solved_from_the_plan() -> None:
    profile, columns = drawn_model(random.Random(2), 8, 8)
    least = least_peak(profile, columns).bytes
    plan = solve(profile, columns, int(least * 3), error_bound=0.02, reserve=0.01)
    again = solve_again(plan, int(least * 1.2))
    assert again == solve(profile, columns, int(least * 1.2), error_bound=0.02, reserve=0.01)
    assert (again.error_bound, again.reserve, again.budget_bytes) == (0.02, 0.01, int(least * 1.2))


def test_the_forward_holds_the_input_live_outputs_and_stored_bytes() -> None:
    """By hand: op 2 reads 1, op 3 reads 2; nothing is stored, then op 1 is packed, then op 2 is kept."""
    profile = unit([op(0), op(1, [0], bytes=4 * MIB), op(2, [1], bytes=3 * MIB), op(3, [2], bytes=MIB)])
    storages = storages_of(profile, allow_lossy=False)
    assert forward_workspace(profile, storages.values(), {}, {}) == (1 + 4 + 3) * MIB
    assert forward_workspace(profile, storages.values(), {1: MIB}, {}) == (1 + 5 + 3) * MIB
    # Packing takes memory before op 2 runs, when the pack exists.
    assert (
        forward_workspace(profile, storages.values(), {1: MIB}, {1: Packing("bits", MIB, 0.0, workspace_bytes=5 * MIB)})
        == (1 + 4 + 1 + 5) * MIB
    )
    assert forward_workspace(profile, storages.values(), {1: 4 * MIB, 2: 3 * MIB}, {}) == (1 + 4 + 3 + 1) * MIB


def test_a_large_model_is_solved() -> None:
    """256 units of 32 columns; the least peak too. It takes about a second of processor time."""
    profile, columns, budget = large_model()
    plan = solve(profile, columns, budget)
    assert plan.predicted_peak_bytes <= budget
    assert least_peak(profile, columns).bytes < budget


def test_without_time_the_choice_of_least_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, columns = drawn_model(random.Random(4), 6, 6)
    least = least_peak(profile, columns).bytes
    monkeypatch.setattr(MixedProgram, "minimum", lambda self, **options: None)
    plan = solve(profile, columns, 4 * least)
    smallest = [min(range(6), key=lambda index: each[index].device_bytes) for each in columns]
    assert plan.choice == tuple(smallest[kind] for _, kind in profile.order)
    with pytest.raises(InvalidError, match="expected at least"):
        solve(profile, columns, profile.outside_bytes + 1)


def three_units() -> tuple[ModelProfile, Columns]:
    """Return three units of a packed, a skipped and a needed op, with the columns of the class."""
    packing = Packing("bits", MIB // 32, 1e-6)
    ops = [
        op(0, is_needed=True),
        op(1, [0], is_needed=True, packings=(packing,)),
        op(2, [1]),
        op(3, [2], is_needed=True),
    ]
    profile = model(unit(ops, recompute_workspace_bytes=4 * MIB), units=3)
    return profile, (columns_of(profile.classes[0], 0.0),)


def test_a_budget_below_the_floor_names_the_floor_the_unit_and_the_remedies() -> None:
    profile, columns = three_units()
    with pytest.raises(InvalidError, match="expected at least") as caught:
        solve(profile, columns, 3 * MIB)
    text = str(caught.value)
    floor = int(text.partition("expected at least ")[2].partition(" bytes")[0].replace(",", ""))
    assert solve(profile, columns, floor).budget_bytes == floor
    with pytest.raises(InvalidError, match="expected at least"):
        solve(profile, columns, floor - MIB // 64)
    peak = least_peak(profile, columns)
    assert f"the {peak.phase} of {profile.order[peak.unit][0]} needs them" in text
    assert text.endswith("Pass a larger budget or smaller batches, or fit with error_bound=0.02, which may need less")
    with pytest.raises(InvalidError, match=r"smaller batches$"):
        solve(profile, columns, 3 * MIB, error_bound=0.02)


def test_a_plan_explains_itself() -> None:
    profile, columns = three_units()
    plans = [solve(profile, columns, budget * MIB) for budget in (30, 11)]
    roomy, tight = (explained(summary_of(plan)) for plan in plans)
    assert "budget 30.0 MiB: predicted peak" in roomy and "measured" not in roomy
    assert "3 units (layers.0, layers.1, layers.2): 3.0 MiB stored, 0.00 ms added, each" in roomy
    assert "in units: 9.0 MiB kept, 0 B run again; outside: 2.0 MiB, not managed" in roomy
    assert "price: nothing is faster, one GiB less would cost " in roomy
    assert "the peak is in the backward of layers.2" in tight
    assert "run again: " in tight and "ms for a GiB: op" in tight
    measured = explained(summary_of(replace(plans[0], measured_peak_bytes=3 * MIB, measured_slowdown=1.25)))
    assert "measured by the fit: peak 3.0 MiB, step time × 1.250" in measured


def test_a_summary_accounts_for_each_op_of_each_column() -> None:
    profile, columns = three_units()
    for index, each in enumerate(columns[0]):
        plan = replace(solve(profile, columns, 30 * MIB), choice=(index,) * 3)
        (use,) = summary_of(plan).uses
        assert use.stored_bytes == each.device_bytes == sum(group.stored_bytes for group in use.actions.values())
        assert all(group.bytes == MIB * len(group.ops) for group in use.actions.values())
        handled = sorted(name.rpartition(" ")[2] for group in use.actions.values() for name in group.ops)
        assert handled == ["input#0", "op1#1", *(["op2#2"] if each.run else []), "op3#3"]
        fastest, smallest = index == 0, each.device_bytes == min(other.device_bytes for other in columns[0])
        assert (use.ms_per_gib_more is None) == fastest
        assert (use.ms_per_gib_less is None) == smallest


def test_prices_are_the_best_exchange_with_another_column() -> None:
    profile, _ = three_units()
    columns = ((column(8, 0.0), column(4, 0.002), column(2, 0.003), column(1, 0.009)),)
    plan = replace(solve(profile, columns, 100 * MIB), choice=(0, 1, 3))
    plain, middle, least = summary_of(plan).uses
    assert (plain.ms_per_gib_more, plain.ms_per_gib_less) == (None, pytest.approx(1024 * 3 / 6))
    assert middle.ms_per_gib_more == pytest.approx(1024 * 2 / 4) and middle.ms_per_gib_less == pytest.approx(1024 / 2)
    assert (least.ms_per_gib_more, least.ms_per_gib_less) == (pytest.approx(1024 * 6), None)


def test_the_curve_goes_from_the_least_peak_to_plain_training() -> None:
    profile, columns = three_units()
    plan = solve(profile, columns, 30 * MIB)
    curve = curve_of(plan)
    assert 3 <= len(curve) <= CURVE_BUDGETS
    assert curve[0].peak_bytes <= least_peak(profile, columns).bytes * (1 + GAP)
    assert curve[-1].slowdown == 1.0
    for one, other in pairwise(curve):
        assert one.peak_bytes < other.peak_bytes and one.slowdown > other.slowdown
        assert solve(profile, columns, other.peak_bytes + 100, reserve=0.0).predicted_slowdown <= other.slowdown
