"""The life of a run with a redo log, drawn at random: a restart has the newest step, and every bit of it.

Training is real, in one process: a small network, its optimizer, and a manager whose steps leave records. A crash is a
store that answers nothing any more; another job is a second manager. The model is told what training did and what its
handles said.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

import holdfast
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.ports.store import Store
from holdfast.core.format.names import manifest_key, step_folder
from holdfast.errors import CheckpointError, ConflictError, CorruptError, MissingError, UnavailableError
from holdfast.policies import LatestN
from holdfast.settings import Differential
from holdfast.stored.repository.epochs import RELEASED, newest_epoch, put_heartbeat
from holdfast.stored.repository.logs import BASES_KEPT, records_in, segments_of
from holdfast.training.runs.removal.garbage_collection import collected
from holdfast.training.runs.removal.named_steps import StepRemoval
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.property.life import CHOICES, CLOCK, MISHAPS, NO_MISHAP, Mishap, Switch, bury
from tests.property.logged_run_model import Boundary, LoggedRunModel
from tests.unit.training.redo_log.test_lives import Training

LIVES = int(os.environ.get("LOGGED_LIVES", "40"))
EVERY = 4
SETTINGS = holdfast.Settings(collect_grace_seconds=0, lease_seconds=600)
STEPS = st.integers(1, 6)


Trained = tuple[Boundary, holdfast.SaveHandle | None, bool]
"""The end of a step, its save, and whether the step is of a kind that cannot be recorded."""


class Life:
    """One process of the run."""

    def __init__(self, store: Store, **options: object) -> None:
        self.training = Training(store, every=EVERY, settings=SETTINGS, **options)
        self.origin: int | None = None
        self.step = 0
        self.is_first = True
        """Whether the next checkpoint is the first of this life: until then, a restart finds nothing of it."""
        self.is_logging: bool | None = False
        """Whether the next step is recorded; None if a fault leaves that open."""
        self.requested = 0
        """Checkpoints since the last one of the policy that the log requested."""
        self.has_saved = self.has_failed = False


class LifeOfALoggedRun(RuleBasedStateMachine):
    """One run, from its first step on, and what a restart must find."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)  # On busy cores each small step would wait for the threads of others.
        self.store = MemoryStore(uuid.uuid4().hex)
        self.store.url = f"kept://{uuid.uuid4().hex}"
        self.switch, self.met = Switch(), list[FaultPoint]()
        self.faulty = FaultyStore(self.store, self.switch)
        self.model = LoggedRunModel(self.store)
        self.life: Life | None = None
        self.lives = 0
        self.flipped: set[str] = set()
        """Segments with a flipped bit."""
        self.reader = Training(self.store, differential=False)

    def teardown(self) -> None:
        self.end()
        if reachable := self.model.reachable():
            self.require_loads(reachable)
        self.reader.manager.close()
        torch.set_num_threads(self.threads)
        self.store.delete([entry.key for entry in self.store.list()])

    # What happens.

    @rule(steps=STEPS, odd=st.none() | st.integers(0, 5), hurries=st.booleans(), mishap=MISHAPS)
    def train(self, steps: int, odd: int | None, hurries: bool, mishap: Mishap) -> None:
        """Training takes steps, and one of them may be of a kind that cannot be recorded."""
        life = self.the_life()
        self.train_steps(life, steps, odd, hurries, mishap)

    @rule(mishap=MISHAPS, flush_every=st.sampled_from((1, 1, 3)))
    def restart(self, mishap: Mishap, flush_every: int) -> None:
        """A process ends, and another one goes on at the newest step."""
        self.begin(None, mishap, flush_every)

    @rule(choice=CHOICES, is_new=st.booleans(), mishap=MISHAPS)
    def go_back(self, choice: int, is_new: bool, mishap: Mishap) -> None:
        """Training loads a step by its number, and will save from there."""
        reachable = self.model.reachable()
        if reachable:
            self.begin(reachable[choice % len(reachable)], mishap, 1, is_new=is_new)

    @rule(choice=CHOICES)
    def discard(self, choice: int) -> None:
        """Training loads a checkpoint and discards what it leaves: from then on a restart loads that checkpoint."""
        bases = [each for each in self.model.reachable() if each.digest is not None]
        if not bases:
            return
        chosen = bases[choice % len(bases)]
        self.end()
        life = Life(self.faulty, keep_last=1)
        assert life.training.manager.load(life.training.state, chosen.step, discard_newer=True) == chosen.step
        self.model.chain = self.model.chain[: self.model.chain.index(chosen) + 1]
        self.begun(life, chosen)
        event("discarded")

    @rule(steps=STEPS, follows=st.booleans())
    def live_without_a_log(self, steps: int, follows: bool) -> None:
        """A job without a log goes on, from the newest step or, as an older version, from the newest checkpoint."""
        bases = self.model.bases()
        self.end()
        life = Life(self.faulty, differential=False, keep_last=2)
        newest = self.model.newest()
        if not follows and bases:
            base = self.model.chain[bases[-1]]
            assert life.training.manager.load(life.training.state, base.step) == base.step
            life.training.manager._position.move_on(base.step, leaves_records=False)
            self.begun(life, base)
        else:
            step = life.training.manager.load(life.training.state)
            self.begun(life, self.found(life.training, step, newest))
        self.train_steps(life, steps, None, False, NO_MISHAP)
        self.end()

    @rule(steps=STEPS, late=STEPS)
    def wake_up_late(self, steps: int, late: int) -> None:
        """A job stands still, another one goes on, and then the first one does: what it does counts no more."""
        first = self.the_life()
        self.train_steps(first, 1, None, False, NO_MISHAP)
        self.life = None
        put_heartbeat(self.store, newest_epoch(self.store), RELEASED)  # As if the lease were over.
        second = self.begin(None, NO_MISHAP, 1)
        self.train_steps(second, steps, None, False, NO_MISHAP)
        for number in range(first.step + 1, first.step + 1 + late):
            with suppress(ConflictError):
                first.training.step(number)
            with suppress(ConflictError):
                first.training.settle()
        with suppress(ConflictError):
            first.training.die()
        self.model.settle()
        event("woke up late")

    @rule()
    def collect(self) -> None:
        """`holdfast gc`."""
        self.end()
        if self.model.chain:
            collected(self.store, CLOCK, LatestN(1), 0.0, SETTINGS.lease_seconds)
            self.model.settle()

    @rule(choice=CHOICES)
    def remove(self, choice: int) -> None:
        """`holdfast rm` of a base in the midst of a log: the base before leads as far."""
        inner = self.inner_bases()
        if not inner:
            return
        self.end()
        chosen = inner[choice % len(inner)]
        StepRemoval([chosen.step], tagged=False, all_steps=True).execute(self.store, CLOCK, 0.0, SETTINGS.lease_seconds)
        chosen.digest, chosen.log = None, ""
        self.model.settle()
        event("removed")

    @rule(at=CHOICES)
    def damage_the_newest_base(self, at: int) -> None:
        self.end()
        if len(self.model.bases()) > 1:
            before, base = (self.model.chain[place] for place in self.model.bases()[-2:])
            packs = sorted(
                entry.key for entry in self.store.list(step_folder(base.step)) if entry.key.endswith(".safetensors")
            )
            self.flip(packs[at % len(packs)], at)
            # Where a base began a log of its own, the record of its step may be in the log before, or not.
            base.is_recorded = base.is_recorded if base.log == before.log else None
            base.digest, base.log = None, ""
            self.begin(None, NO_MISHAP, 1)
            event("damaged a base")

    @rule(at=CHOICES)
    def damage_an_inner_manifest(self, at: int) -> None:
        inner = self.inner_bases()
        self.end()
        if inner:
            base = inner[at % len(inner)]
            self.flip(manifest_key(base.step), at)
            base.digest, base.log, base.has_unseen_damage = None, "", True
            self.begin(None, NO_MISHAP, 1)
            event("damaged a manifest")

    @rule(choice=CHOICES, at=CHOICES, is_missing=st.booleans())
    def damage_a_segment(self, choice: int, at: int, is_missing: bool) -> None:
        """The redo ends before the records of a segment that is missing, or before the one that a flipped bit is in."""
        self.end()
        newest = self.model.bases()[-1:]
        log = self.model.chain[newest[0]].log if newest else ""
        if not log:
            return
        segments = segments_of(self.store)[log][0] if log in segments_of(self.store) else []
        if segments:
            segment = segments[choice % len(segments)]
            steps = sorted(records_in(self.store, segment))
            if is_missing:
                self.store.delete([segment.key])
            else:
                if segment.key not in self.flipped:  # The same bit, flipped twice, is no damage.
                    self.flip(segment.key, at)
                    self.flipped.add(segment.key)
                steps = steps[-1:]  # Each record proves its own bytes, and the bytes of the last one are at the end.
            for each in self.model.chain:
                if each.step in steps:
                    each.is_recorded = False
            self.begin(None, NO_MISHAP, 1)
            event("damaged a segment")

    # What must hold. Restarts require the newest step; at the end of a life, all that counts is loaded.

    @rule(choice=CHOICES)
    def look(self, choice: int) -> None:
        """Another process loads the newest step, a step by its number, and none that counts no more."""
        reachable = self.model.reachable()
        if reachable:
            self.require_loads([reachable[choice % len(reachable)]])

    def require_loads(self, chosen: Sequence[Boundary]) -> None:
        training, model = self.reader, self.model
        self.found(training, training.manager.load(training.state), model.newest())
        for each in chosen:
            assert training.manager.load(training.state, each.step) == each.step
            assert training.digest() == each.state, f"{each} has another state"
        beyond = model.reachable(trusting=True)[-1].step + 1
        with pytest.raises((MissingError, CorruptError)):
            training.manager.load(training.state, beyond)

    # How it is done.

    def the_life(self) -> Life:
        return self.begin(None, NO_MISHAP, 1) if self.life is None else self.life

    def begin(self, chosen: Boundary | None, mishap: Mishap, flush_every: int, *, is_new: bool = True) -> Life:
        """Load a step, or the newest one, in a new process or in this one."""
        if is_new or self.life is None:
            self.end()
            self.life = Life(self.faulty, keep_last=1, differential=Differential(flush_every=flush_every))
        life, model = self.life, self.model
        life.is_logging, life.is_first = False, True
        training = life.training
        expected = [chosen] if chosen is not None else model.newest()
        self.arm(mishap)
        try:
            step = training.manager.load(training.state, None if chosen is None else chosen.step)
        except CheckpointError as error:
            assert self.met and isinstance(error, UnavailableError | MissingError), error
            self.end()
            self.heal(mishap)
            return self.begin(None, NO_MISHAP, flush_every)
        if self.met and chosen is None:
            expected = model.reachable(trusting=True)  # A fault takes no step away, and may end a load early.
        self.begun(life, self.found(training, step, expected))
        if chosen is None and not self.met:
            model.see_damage()
        if mishap.kind == "crash" and self.met:
            self.end()
            self.heal(mishap)
            return self.begin(None, NO_MISHAP, flush_every)
        self.heal(mishap)
        return life

    def begun(self, life: Life, found: Boundary | None) -> None:
        self.lives += 1
        torch.manual_seed(self.lives)  # What is trained now differs from what was trained from here before.
        life.origin, life.step = (None, 0) if found is None else (found.step, found.step)
        life.requested, life.has_saved, life.has_failed = 0, False, False
        self.life = life

    def found(self, training: Training, step: int | None, expected: Sequence[Boundary]) -> Boundary | None:
        """Return the boundary that was loaded: one of those expected, with every bit of it."""
        if step is None and not expected:
            return None
        report = training.manager.load_report
        chosen = [each for each in expected if each.step == step]
        assert chosen, f"step {step} was loaded, not one of {expected}: {report}"
        assert training.digest() == chosen[0].state, f"{chosen[0]} has another state: {report}"
        return chosen[0]

    def train_steps(self, life: Life, steps: int, odd: int | None, hurries: bool, mishap: Mishap) -> None:
        training, trained = life.training, list[Trained]()
        has_log = training.manager._redo_log is not None
        hurries = hurries and mishap is NO_MISHAP and life.is_logging is not None
        self.arm(mishap)
        for number in range(steps):
            life.step += 1
            handle = None
            try:
                handle = training.step(life.step, *((lambda: 0.0,) if number == odd else ()))
            except CheckpointError as error:
                self.require_not_of_log(error)
                life.has_failed = True
            trained.append((Boundary(life.step, training.digest(), False), handle, number == odd))
            if not hurries or number == steps - 1:
                self.settle(life, trained, has_log)
                trained = []
        if mishap.kind == "crash" and self.met:
            self.end()
        self.heal(mishap)
        self.model.settle()

    def settle(self, life: Life, trained: Sequence[Trained], has_log: bool) -> None:
        """Wait until saves and seals have ended, and take note of what training was told."""
        training = life.training
        try:
            training.settle()
        except CheckpointError as error:
            self.require_not_of_log(error)
            training.settle()
        log = training.manager._redo_log
        is_sealed = log is None or not log._writer.failure
        for number, (boundary, handle, is_odd) in enumerate(trained):
            was_logging = life.is_logging
            if is_odd or not has_log:
                life.is_logging = False
            elif life.is_first:
                boundary.is_recorded = False
            elif was_logging and not self.met:
                boundary.is_recorded = True
            elif was_logging is not False:
                is_told = handle is None and training.manager.recoverable == boundary.step
                boundary.is_recorded = is_told or None
                life.is_logging = (is_told and is_sealed) or None
            later = [later for _, later, _ in trained[number + 1 :] if later is not None]
            self.note_saved(life, boundary, handle, has_log, may_be_gone=len(later) >= BASES_KEPT)
        if life.is_logging and not self.met:
            assert log is not None and not log.why
            assert training.manager.recoverable == life.step, f"{training.manager.recoverable} at {life.step}"

    def note_saved(
        self, life: Life, boundary: Boundary, handle: holdfast.SaveHandle | None, has_log: bool, *, may_be_gone: bool
    ) -> None:
        """Take note of the end of a save; a collection may have taken a base of a hurried training already."""
        step, is_of_policy = boundary.step, boundary.step % EVERY == 0
        if handle is None:
            is_due = is_of_policy or (has_log and not life.has_saved)
            assert not is_due or self.met, f"no save at step {step}"
        else:
            # A base that failed is tried again, twice.
            is_requested = not is_of_policy and life.has_saved and not life.has_failed
            life.requested = 0 if is_of_policy else life.requested + is_requested
            assert life.requested <= 2, f"step {step} is a base too many"
            life.has_saved = True
            life.has_failed = handle.committed.exception() is not None
        is_committed = handle is not None and handle.committed.exception() is None
        found = self.model.adopt(step) if handle is not None or self.met else None
        assert handle is None or is_committed or self.met, f"step {step} failed: {handle.committed.exception()}"
        assert found is not None or not is_committed or may_be_gone, f"step {step} was acknowledged, and is not there"
        if found is not None or is_committed:
            boundary.digest, boundary.log, is_fork = found or (None, "", True)
            assert found is None or self.met or bool(boundary.log) == has_log
            if life.is_first:
                self.model.cut(boundary, life.origin, is_fork=is_fork)
            life.is_first, life.is_logging = False, (has_log and not self.met) or None
        if not life.is_first:
            self.model.chain.append(boundary)

    def arm(self, mishap: Mishap) -> None:
        self.met.clear()
        self.switch.now = mishap.faults(self.fail, 1)

    def fail(self, point: FaultPoint) -> None:
        self.met.append(point)
        raise UnavailableError(f"a fault was injected at {point.name} of {point.subject!r}")

    def heal(self, mishap: Mishap) -> None:
        self.switch.now = Faults()
        if mishap.kind == "crash" and self.met:
            bury(self.store)
        self.met.clear()

    def require_not_of_log(self, error: CheckpointError) -> None:
        """Require that training would have met an error without a log too."""
        assert any("log/" not in point.subject for point in self.met), error

    def end(self) -> None:
        """End the process as a kill would."""
        life, self.life = self.life, None
        if life is not None:
            with suppress(CheckpointError):
                life.training.settle()
            with suppress(CheckpointError):
                life.training.die()
            self.model.settle()

    def inner_bases(self) -> list[Boundary]:
        """Return bases to which the log leads from a base before: no restart needs them."""
        model = self.model
        return [
            model.chain[place]
            for before, place in pairwise(model.bases())
            if model.chain[place].log and model.reach(before) >= place
        ]

    def flip(self, key: str, at: int) -> None:
        """Flip a bit near the end of a file: where the data is."""
        data = bytearray(self.store.get(key, 1 << 30))
        data[-1 - at % min(len(data), 256)] ^= 1 << at % 8
        self.store.put(key, bytes(data))


TestLifeOfALoggedRun = LifeOfALoggedRun.TestCase
TestLifeOfALoggedRun.settings = settings(
    max_examples=LIVES,
    stateful_step_count=int(os.environ.get("LOGGED_STEPS", "8")),
    deadline=None,
    # A life is told as it was: to make it shorter would take longer than a test may.
    phases=[Phase.generate],
    derandomize="LOGGED_LIVES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
