"""What differs between a run and its redo is recorded, named, or found by the sums where they are due."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest

from holdfast.backends.torch.redo.step_redo import TorchStepRedo
from holdfast.base.types.redo import Record
from tests.crash.redo_log.departures import KINDS, Bits, Departure, Run, bits_of, departure_of
from tests.support.redo_log.logged_runs import memory_store

DEPARTURES = int(os.environ.get("DEPARTURES", "30"))
"""Seeds; `make campaign` takes more."""

SEEDS = [
    pytest.param(seed, id=f"{seed}-{departure_of(seed).kind}", marks=() if seed < 8 else pytest.mark.long)
    for seed in range(DEPARTURES)
]


class Watched:
    """Compares each record that is applied with the run: a difference that is due must be answered."""

    def __init__(self, truth: dict[int, Bits], monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[int, set[str]]] = []
        """Steps at which due sums differ, with the tensors."""
        self.passed: list[tuple[int, set[str], set[str]]] = []
        bare = TorchStepRedo.apply

        def apply(redo: TorchStepRedo, record: Record) -> object:
            answer, held = bare(redo, record), bits_of(redo._stepped)
            due = {fqn for fqn in record.sums if held[fqn] != truth[record.step][fqn]}
            if due:
                self.found.append((record.step, due))
            if due != {*answer}:
                self.passed.append((record.step, due, {*answer}))
            return answer

        monkeypatch.setattr(TorchStepRedo, "apply", apply)


def recorded(departure: Departure, run: Run) -> dict[int, Bits]:
    """Train with the departure, and die."""

    def change(step: int) -> None:
        if step == departure.at:
            departure.change(run)

    def nothing(_: int) -> None:
        pass

    pair = (nothing, change) if departure.is_at_end else (change, nothing)
    with departure.in_run() if departure.in_run is not None else nullcontext():
        truth: dict[int, Bits] = run.train(1, departure.last, *pair)
    run.manager.close()
    return truth


@pytest.mark.parametrize("seed", SEEDS)
def test_a_departure_is_found_where_it_is_due(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    departure, store = departure_of(seed), memory_store()
    run = Run(store, departure.make)
    truth = recorded(departure, run)
    watched = Watched(truth, monkeypatch)
    again = Run(store, departure.make_again or departure.make)
    with departure.in_redo() if departure.in_redo is not None else nullcontext():
        step = again.manager.load(again.state)
    report = again.manager.load_report
    assert report is not None and step is not None
    is_right = again.bits() == truth[step]
    again.manager.close()

    assert not watched.passed
    if watched.found:
        outcome = "sums"
        (first, names), *_ = watched.found
        assert (step, report.redone_steps, is_right) == (1, 0, True)
        assert f"the redo did not give the recorded state: step {first} differs in" in report.why_not_further
        assert min(names) in report.why_not_further
        assert len(watched.found) == 2, "one try, and one more"
    elif step < departure.last:
        outcome = "named"
        assert report.why_not_further and is_right
    elif is_right:
        outcome = "interrupted" if run.whys else "right"
    else:
        outcome = "not due"
    told = report.why_not_further or run.whys
    print(f"{seed} {departure.kind}, step {departure.at} of {departure.last}: {outcome}: {told}")
    # A departure that the sums are to find may change no bit, or no tensor in whose turn a record was.
    possible = {"sums", "not due", "right"} if departure.expected == "sums" else {departure.expected}
    assert outcome in possible, (outcome, report)


def test_every_kind_has_a_seed() -> None:
    assert {departure_of(seed.values[0]).kind for seed in SEEDS} == {*KINDS}
