"""What `compression="auto"` makes of stores of several speeds: how long saves take, and what it costs training.

A store is a folder behind a line of so many bytes a second that all ranks share. Raw and auto save the same state in
turn, each to a store of its own. Between rounds the state becomes that of another step, as in training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from bench import conditions, device
from bench.compression_speed import sharded
from bench.compression_state import KINDS, Batches, MixedTraining, State, bytes_of, repeated, snapshots, split
from bench.compression_store import CappedStore, Line, manager_over
from bench.part import Measured, Params, Part, Round, Spread, in_turn, spreads_of
from bench.settings import settings
from bench.state import MIB
from holdfast.backends.stores.local import LocalStore

UNCAPPED = 0
CAPS_MB = (100, 250, 500, 1000, UNCAPPED)
"""Megabytes a second of the stores."""

SLOW_MB, TRAINING_MB = 100, 250
MODES = ("off", "auto")
WARM_SAVES = 2
"""Saves before the first that counts: the first one measures, the second one is the first that can know."""


@contextmanager
def managers(root: Path, cap_mb: int) -> Iterator[dict[str, holdfast.CheckpointManager]]:
    """Open a run for each mode, each in a store of its own with a line of its own."""
    with ExitStack() as stack:
        found: dict[str, holdfast.CheckpointManager] = {}
        for mode in MODES:
            chosen, folder = settings(compression=mode), root / mode
            store = LocalStore(folder, settings=chosen)
            if cap_mb != UNCAPPED:
                conditions.on_first_rank(lambda: root.mkdir(parents=True, exist_ok=True))
                line = Line(root / f"line-{mode}-{cap_mb}", cap_mb * 1_000_000)
                stack.callback(line.close)
                store = CappedStore(folder, chosen, line)
            found[mode] = stack.enter_context(manager_over(store, chosen))
        yield found


# ------------------------------------------------------------------------------- seconds of saves


def measure(root: Path, params: Params) -> Measured:
    """Save at every speed."""
    mesh = device.mesh()
    states = [sharded(mesh, state) for state in snapshots()]
    state = sharded(mesh, repeated(snapshots()[-1], params["mib"] * MIB))
    rounds: list[Round] = []
    notes: list[str] = []
    for cap_mb in CAPS_MB:
        with managers(root, cap_mb) as runs:
            rounds += _saves_at(cap_mb, runs, state, states, params["rounds"], notes)
        conditions.removed(root)
    return Measured(rounds, notes)


def _saves_at(
    cap_mb: int,
    runs: dict[str, holdfast.CheckpointManager],
    state: State,
    states: Sequence[State],
    count: int,
    notes: list[str],
) -> list[Round]:
    rounds: list[Round] = []
    decided = ""
    for number in range(WARM_SAVES + count):
        _become(state, states[number % len(states)])
        each: Round = {}
        for mode in in_turn(MODES, number):
            conditions.quiet_disk()
            reports: list[holdfast.SaveReport] = []
            save = partial(_save, runs[mode], number, state, reports)
            each[f"{mode}_{cap_mb}"] = conditions.timed(save)
            conditions.removed(Path(reports[0].url))
            if mode == "auto":
                decided = decisions(reports[0])
        if number >= WARM_SAVES:
            rounds.append(each)
            seconds = ", ".join(f"{name} {value:.2f}" for name, value in each.items())
            conditions.say(f"{said(cap_mb)}, save {number + 1}, seconds: {seconds}")
    notes.append(f"auto at {said(cap_mb)}: {decided}")
    return rounds


def _save(run: holdfast.CheckpointManager, step: int, state: State, reports: list[holdfast.SaveReport]) -> None:
    report = run.save(step, state).wait()
    assert report is not None
    reports.append(report)


def said(cap_mb: int) -> str:
    """Return the speed of a store as text."""
    return f"{cap_mb / 1000:g} GB/s" if cap_mb != UNCAPPED else "no cap"


def decisions(report: holdfast.SaveReport) -> str:
    """Return how rank 0 stored each kind of tensor, as the report of its last save says."""
    found = []
    for coding in report.codings:
        ratio = "" if coding.ratio is None else f" {coding.ratio:.2f}"
        found.append(f"{coding.kind} {coding.codec or 'raw'}{ratio} ({coding.why})")
    return "; ".join(found) or "nothing reported"


def _become(state: State, source: State) -> None:
    """Give every copy of a repeated state the values of a snapshot."""
    for name, tensor in state.items():
        kind, parameter = split(name)
        conditions.local(tensor).copy_(conditions.local(source[KINDS[kind].format(parameter.partition(".")[2])]))


def values(rounds: Sequence[Round], params: Params) -> dict[str, list[float]]:
    """Return raw seconds ÷ those of auto: at the slowest store, and at the one where auto does worst."""
    by_cap = {cap: ratios_at(rounds, cap) for cap in CAPS_MB}
    return {"auto_vs_raw_worst": min(by_cap.values(), key=statistics.median), "auto_vs_raw_slow": by_cap[SLOW_MB]}


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the same over all rounds."""
    return spreads_of(values(rounds, params))


def ratios_at(rounds: Sequence[Round], cap_mb: int) -> list[float]:
    """Return raw seconds ÷ those of auto, round by round, at one speed."""
    return [each[f"off_{cap_mb}"] / each[f"auto_{cap_mb}"] for each in rounds if f"off_{cap_mb}" in each]


SAVES = Part(
    name="auto",
    question="How long do saves take to stores of several speeds, raw and with compression='auto'?",
    ranks=2,
    full={"mib": 512, "rounds": 9},
    quick={"mib": 96, "rounds": 2},
    measure=measure,
    keys=keys,
    values=values,
)

# ------------------------------------------------------------------------------- what it costs training

STEP_SECONDS, STEP_SECONDS_OFF = 0.5, 0.1
STEPS_A_SAVE = 10
RATE = 6e-5
"""The learning rate at which the training of the snapshots ended."""


class Models:
    """Several GPTs that one rank trains side by side, as a pipeline stage of its own, from the last snapshot on."""

    def __init__(self, mib: int) -> None:
        last, self.rank = snapshots()[-1], dist.get_rank()
        self._batches, self._rows = Batches(seed=self.rank), 1
        count = max(round(mib * MIB / bytes_of(last)), 1)
        self._trainings = [continued(last) for _ in range(count)]
        self.step_seconds: list[float] = []

    def state(self) -> State:
        """Return the tensors of all models."""
        found: State = {}
        for number, training in enumerate(self._trainings):
            for name, tensor in training.state().items():
                kind, parameter = split(name)
                found[KINDS[kind].format(f"stage{self.rank}.copy{number}.{parameter}")] = tensor
        return found

    def step(self) -> None:
        """Train every model one step. The ranks keep pace, as in training."""
        start = time.perf_counter()
        for training in self._trainings:
            training.step(self._batches.next(self._rows), RATE)
        dist.barrier()
        self.step_seconds.append(time.perf_counter() - start)

    def settle(self) -> float:
        """Choose the rows of a batch for which a step takes half a second; return its seconds."""
        for _ in range(5):
            self.step_seconds.clear()
            for _ in range(3):
                self.step()
            seconds = conditions.slowest(statistics.median(self.step_seconds))
            if abs(seconds - STEP_SECONDS) < STEP_SECONDS_OFF / 2:
                break
            self._rows = max(round(self._rows * STEP_SECONDS / seconds), 1)
        return seconds

    def steps(self, manager: holdfast.CheckpointManager, first: int) -> None:
        """Train ten steps. The first one saves, and the save commits before the last one ends."""
        self.step()
        handle = manager.save(first, self.state())
        for _ in range(STEPS_A_SAVE - 1):
            self.step()
        report = handle.wait()
        assert report is not None and report.staging == "copy", report


def continued(state: State) -> MixedTraining:
    """Return a training that goes on from a snapshot."""
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        kind, parameter = split(name)
        tensors.setdefault(parameter, {})[kind] = tensor.clone()
    training = MixedTraining({parameter: each["master"] for parameter, each in tensors.items()})
    for parameter, each in tensors.items():
        moments = {"step": torch.tensor(300.0), "exp_avg": each["exp_avg"], "exp_avg_sq": each["exp_avg_sq"]}
        training.optimizer.state[training.masters[parameter]] = moments
    return training


def measure_training(root: Path, params: Params) -> Measured:
    """Alternate ten steps with a raw save and ten steps with auto, until each has all its steps."""
    models = Models(params["mib_per_rank"])
    conditions.say(f"a step takes {models.settle():.2f} s")
    rounds: list[Round] = []
    typical: list[float] = []
    with managers(root, TRAINING_MB) as runs:
        for number in range(WARM_SAVES + params["steps"] // STEPS_A_SAVE):
            each: Round = {}
            models.step_seconds.clear()
            for mode in in_turn(MODES, number):
                each[mode] = conditions.timed(partial(models.steps, runs[mode], number))
                conditions.removed(root / mode / f"step-{number:012d}")
            if number >= WARM_SAVES:
                rounds.append(each)
                typical.append(conditions.slowest(statistics.median(models.step_seconds)))
                done = (number + 1 - WARM_SAVES) * STEPS_A_SAVE
                seconds = f"{each['auto']:.2f} s with auto, {each['off']:.2f} s raw"
                conditions.say(f"steps {done} of {params['steps']}: {seconds}")
    step = statistics.median(typical)
    off = abs(step - STEP_SECONDS) > STEP_SECONDS_OFF
    return Measured(rounds, [f"slowdown: a step took {step:.2f} s, not {STEP_SECONDS}"] if off else [])


def values_of_training(rounds: Sequence[Round], params: Params) -> dict[str, list[float]]:
    """Return the time of ten steps with auto over that of ten steps with a raw save."""
    return {"coding_slowdown": [each["auto"] / each["off"] for each in rounds]}


def keys_of_training(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the total time with auto over the time with raw saves; lowest and highest are ratios of ten steps."""
    (each,) = values_of_training(rounds, params).values()
    whole = sum(one["auto"] for one in rounds) / sum(one["off"] for one in rounds)
    return {"coding_slowdown": Spread(whole, min(each), max(each))}


TRAINING = Part(
    name="slowdown",
    question="How much longer does training take whose background saves compress?",
    ranks=2,
    full={"mib_per_rank": 256, "steps": 200},
    quick={"mib_per_rank": 96, "steps": 20},
    measure=measure_training,
    keys=keys_of_training,
    values=values_of_training,
)
