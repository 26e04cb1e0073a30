"""The life of a run, drawn at random: whatever happens to it, no step that it keeps is ever lost, wrong or unreadable.

What is done is real, in one process: a crash is a store that answers nothing any more from some operation on, a lost
epoch another writer that comes in the midst of one. What must be there afterwards is for the model to say, which is
told of acknowledgements, and looks at storage only for what nobody was told.
"""

from __future__ import annotations

import errno
import functools
import os
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import cast

from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.checkpoint.location import none_allowed
from holdfast.checkpoint_manager import CheckpointManager
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, UnavailableError
from holdfast.format.names import manifest_key, step_folder
from holdfast.offline.repair.repair import Repair
from holdfast.policies import KeepPolicy
from holdfast.ports.store import Store
from holdfast.repository.catalog import manifest_digest
from holdfast.repository.epochs import RELEASED, newest_epoch, put_heartbeat
from holdfast.repository.quarantine import is_quarantined
from holdfast.repository.tags import read_tags
from holdfast.repository.timelines import committed_steps
from holdfast.runs.garbage_collection import CheckpointGC, CollectReport, collected
from holdfast.stores.local import LocalStore
from holdfast.stores.memory import MemoryStore
from holdfast.stores.syscalls import Syscalls
from holdfast.testing.faults import Action, FaultPoint, Faults, FaultyStore, FaultySyscalls, fail_with, raise_error
from tests.crash.mounts import workplace
from tests.property.life import (
    CHANGES,
    CHOICES,
    CLOCK,
    LOSSES,
    METRIC,
    MISHAPS,
    NAMES,
    NO_MISHAP,
    OTHER,
    POLICIES,
    PUBLISHING,
    SETTINGS,
    SIZES,
    Content,
    Held,
    Mishap,
    Result,
    Switch,
    bury,
    files_of,
    is_of,
    is_seen_damaged,
    kept_by,
    lived_by_another,
    loss_of,
    run_on,
    state_of,
)

EXAMPLES = int(os.environ.get("LIFE_EXAMPLES", "24"))
STEPS = int(os.environ.get("LIFE_STEPS", "40"))


def where(holds: Callable[[LifeOfARun], object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a rule do nothing where something does not hold.

    Hypothesis's own preconditions draw other rules there. What a fault met depends on threads, so the same draws may
    end in another model, and Hypothesis refuses to go on where the rules to be drawn from are others than before.
    """

    def guarded(act: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(act)
        def acting(self: LifeOfARun, **drawn: object) -> None:
            if holds(self):
                act(self, **drawn)

        return acting

    return guarded


class LifeOfARun(RuleBasedStateMachine):
    """One run, from its first save on, and what must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, Held] = {}
        self.tags: dict[str, int] = {}
        self.taken: set[str] = set()
        """Tags of steps that are gone or were saved again since: names that mean nothing, and are not free."""
        self.spoilt: set[str] = set()
        """Every file that was damaged; who refers to it later is harmed from the first."""
        self.unsure: dict[int, list[tuple[Content, float]]] = {}
        """Saves that ended in an error, by step: storage knows what became of them."""
        self.run: CheckpointManager | None = None
        self.content: Content = (0,) * len(SIZES)
        self.seeds = 0
        self.switch = Switch()
        self.cleanup = ExitStack()
        self.store, self.faulty = self.opened_stores()
        self.reader = run_on(self.store, replace(SETTINGS, reports=False))

    # What differs between stores.

    failure: Action
    """How an operation fails."""

    scale: int
    """Operations, roughly, for each that an object store has."""

    def opened_stores(self) -> tuple[Store, Store]:
        """Return a new root, and the same again, with whatever `switch` says now."""
        raise NotImplementedError

    def teardown(self) -> None:
        self.end_run()
        self.reader.close()
        self.cleanup.close()

    # What happens.

    @rule(mishap=MISHAPS)
    def resume(self, mishap: Mishap) -> None:
        """A process starts, and goes on from the newest whole step."""
        self.end_run()
        self.run = run_on(self.faulty)
        state = state_of(self.next_content(frozenset(range(len(SIZES)))))
        run = self.run
        step, error = self.attempted(mishap, lambda: run.load(state))
        intact = self.intact()
        if isinstance(error, CorruptError):
            assert not intact, f"{error}, though {intact} are whole"
        elif error is None and step is None:
            assert not committed_steps(self.store)
        elif error is None:
            assert step is not None and step >= max(intact, default=0)
            assert is_of(state, self.held[step].content), f"step {step} was resumed from wrongly"
            assert run.load_report is not None
            for each in run.load_report.passed_over:
                assert self.held[each.step].harmed, f"{each.step} is whole, and was passed over: {each.why}"
            self.content = self.held[step].content
            event(f"resumed, {len(run.load_report.passed_over)} passed over")

    @rule(jump=st.integers(1, 3), changes=CHANGES, loss=LOSSES, tag=st.none() | NAMES, mishap=MISHAPS)
    def save(self, jump: int, changes: frozenset[int], loss: float, tag: str | None, mishap: Mishap) -> None:
        """A step is saved, after those that are there."""
        if tag in self.names():
            tag = None
        self.save_at(max(self.held, default=0) + jump, changes, loss, mishap, tag)

    @rule(choice=CHOICES, changes=CHANGES, loss=LOSSES, mishap=MISHAPS)
    @where(lambda self: self.held)
    def save_again(self, choice: int, changes: frozenset[int], loss: float, mishap: Mishap) -> None:
        """A step is saved where one lies: refused, unless that one is known to be damaged."""
        self.save_at(self.step_at(choice), changes, loss, mishap, None)

    @rule(choice=CHOICES, name=NAMES, mishap=MISHAPS)
    @where(lambda self: self.held)
    def tag(self, choice: int, name: str, mishap: Mishap) -> None:
        run, step = self.the_run(), self.step_at(choice)
        _, error = self.attempted(mishap, lambda: run.tag(step, name))
        if error is None:
            assert name not in self.names() or self.tags.get(name) == step
            self.tags[name] = step
        elif isinstance(error, ConflictError):
            assert name in self.names()
            assert self.tags.get(name) != step
        elif not isinstance(error, UnavailableError):
            assert self.held[step].harmed, error

    @rule(choice=CHOICES, mishap=MISHAPS)
    @where(lambda self: self.tags)
    def untag(self, choice: int, mishap: Mishap) -> None:
        run, name = self.the_run(), sorted(self.tags)[choice % len(self.tags)]
        _, error = self.attempted(mishap, lambda: run.untag(name))
        assert error is None or isinstance(error, UnavailableError)
        is_there = name in read_tags(self.store).whole
        assert error is not None or not is_there
        if not is_there:
            del self.tags[name]

    @rule(policy=POLICIES, mishap=MISHAPS)
    @where(lambda self: self.held)
    def collect(self, policy: KeepPolicy, mishap: Mishap) -> None:
        """`holdfast gc`: refused while the run is open for writing, done once it is not."""

        def verb() -> CollectReport:
            return collected(self.faulty, CLOCK, policy, 0.0, SETTINGS.lease_seconds)

        if self.is_holding:
            assert isinstance(self.attempted(NO_MISHAP, verb)[1], ConflictError)
        self.end_run()
        self.collect_by(policy, mishap, verb)

    @rule(policy=POLICIES, mishap=MISHAPS)
    @where(lambda self: self.is_holding)
    def collect_beside_training(self, policy: KeepPolicy, mishap: Mishap) -> None:
        """The run collects by itself, and goes on to save with references to what it knows."""
        collector = CheckpointGC(
            self.faulty, CLOCK, policy, self.the_run()._parts.writer_lease, self.the_run()._parts.pins
        )
        self.collect_by(policy, mishap, lambda: collector.collect(0.0, lambda _: False))

    @rule(choice=CHOICES, file=CHOICES, at=CHOICES, kind=st.sampled_from(("flip", "cut", "missing")))
    @where(lambda self: sum(bool(each.harmed) for each in self.held.values()) < 3 and self.held)
    def corrupt(self, choice: int, file: int, at: int, kind: str) -> None:
        """A file is damaged behind everybody's back: whoever reads all of what it belongs to sees it."""
        files = sorted(self.held[self.step_at(choice)].files - self.spoilt)
        if not files:
            return
        key = files[file % len(files)]
        data = bytearray(self.store.get(key, 1 << 30))
        if kind == "missing":
            self.store.delete([key])
        else:
            data[at % len(data)] ^= 1 << at % 8
            self.store.put(key, bytes(data) if kind == "flip" else bytes(data[: at % len(data)]))
        self.spoilt.add(key)
        for step, each in self.held.items():
            if key in each.files:
                each.harmed.add(key)
                each.digest = manifest_digest(self.store, step)
                # The header of a pack, which stock readers need, is for the step to check that wrote it.
                is_own = key.startswith(step_folder(step))
                assert not is_own or is_seen_damaged(self.store, step), (
                    f"{key}: nobody sees it damaged ({kind} at {at})"
                )

    @rule(choice=st.none() | CHOICES, mishap=MISHAPS)
    @where(lambda self: self.held)
    def repair(self, choice: int | None, mishap: Mishap) -> None:
        """`holdfast repair`: what it calls whole is, and what was whole stays as it was."""
        self.end_run()
        step = None if choice is None else self.step_at(choice)
        repair = Repair(self.faulty, none_allowed, CLOCK, SETTINGS)
        report, error = self.attempted(mishap, lambda: repair.run(step))
        harmed = [step for step, each in self.held.items() if each.harmed]
        for each in report.steps if report is not None else ():
            if each.outcome in ("whole", "repaired"):
                self.held[each.step].harmed.clear()
            elif each.outcome == "damaged":
                # What could not be read back is told as what is damaged.
                assert each.step in harmed or mishap is not NO_MISHAP, f"{each} was whole"
            else:
                assert each.step not in self.intact(), f"{each} was committed"
        for damaged in harmed:
            self.look_again(damaged)
        assert error is None or isinstance(error, UnavailableError), error

    @rule(
        verb=st.sampled_from(("save", "collect")),
        at=st.integers(-4, 45),
        policy=POLICIES,
        loads=st.none() | CHOICES,
        jump=st.integers(1, 2),
        others_jump=st.integers(1, 2),
        changes=CHANGES,
    )
    @where(lambda self: self.is_holding)
    def lose_the_epoch(
        self,
        verb: str,
        at: int,
        policy: KeepPolicy,
        loads: int | None,
        jump: int,
        others_jump: int,
        changes: frozenset[int],
    ) -> None:
        """In the midst of a verb another process takes over, resumes and saves, and then the first goes on."""
        run, newest = self.the_run(), max(self.held, default=0)
        content, others = self.next_content(changes), self.next_content(changes)
        step, others_step = newest + jump, newest + others_jump
        came: list[CheckpointError | None] = []

        def take_over(operation: FaultPoint) -> None:
            put_heartbeat(self.store, newest_epoch(self.store), RELEASED)  # As if the lease were over.
            self.unsure.setdefault(others_step, []).append((others, 0.0))
            chosen = self.step_at(loads) if loads is not None and self.held else None
            came.append(lived_by_another(self.store, others_step, others, chosen))
            self.settle()
            if came[-1] is None:
                self.unsure.clear()  # What is not there by now is under an epoch that is over, and may not come.

        names = None if at > 0 else PUBLISHING  # The moment that an epoch is for.
        self.switch.now = Faults(take_over, at=at * self.scale if at > 0 else 1 - at, names=names)
        error: CheckpointError | None = None
        may_go: set[int] = set()
        try:
            if verb == "save":
                self.unsure.setdefault(step, []).append((content, 0.0))
                run.save(step, state_of(content), metrics={METRIC: 0.0}).wait()
            else:
                may_go = set(self.held) - self.kept_for_certain(policy)
                CheckpointGC(self.faulty, CLOCK, policy, run._parts.writer_lease, run._parts.pins).collect(
                    0.0, lambda _: False
                )
        except CheckpointError as failure:
            error = failure
        self.end_run()
        self.switch.now = Faults()
        self.settle(may_go)
        for acknowledged, at_step, saved in ((came[:1] == [None], others_step, others), (error is None, step, content)):
            if acknowledged and (saved is others or verb == "save"):
                assert self.held[at_step].content == saved, f"step {at_step} was acknowledged, and is another"

    # What must hold after each of them.

    @invariant()
    def what_is_kept_can_be_read(self) -> None:
        visible, intact = committed_steps(self.store), self.intact()
        assert set(intact) <= set(visible) <= set(self.held), f"{visible} are there; {intact} should be"
        for step in visible:
            held = self.held[step]
            state = state_of(tuple(OTHER - seed for seed in held.content))
            try:
                self.reader.load(state, step)
            except CheckpointError as error:
                assert held.harmed, f"step {step} is whole, and cannot be read: {error}"
            else:
                assert is_of(state, held.content), f"step {step} reads as something else, damaged: {held.harmed}"
            assert held.harmed or not is_seen_damaged(self.store, step)

    @invariant()
    def what_is_tagged_stays_tagged(self) -> None:
        tags = read_tags(self.store)
        assert not tags.damaged
        for name, step in self.tags.items():
            assert tags.whole[name].step == step
            assert self.held[step].harmed or name in tags.of(step, str(self.held[step].digest)), f"{name} holds nothing"

    # How it is done.

    @property
    def is_holding(self) -> bool:
        """Whether this process has an open manager that may write."""
        return self.run is not None and self.run._parts.writer_lease.epoch > 0

    def the_run(self) -> CheckpointManager:
        if self.run is None:
            self.run = run_on(self.faulty)
        return self.run

    def end_run(self) -> None:
        """Close the manager; where its store is dead, nothing of that reaches it."""
        run, self.run = self.run, None
        if run is not None:
            with suppress(CheckpointError):
                run.close()
            self.settle()

    def next_content(self, changes: frozenset[int]) -> Content:
        """Train on: some tensors are others than before."""
        self.seeds += 1
        self.content = tuple(self.seeds if at in changes else seed for at, seed in enumerate(self.content))
        return self.content

    def attempted(
        self, mishap: Mishap, verb: Callable[[], Result], may_go: Collection[int] = ()
    ) -> tuple[Result | None, CheckpointError | None]:
        """Do something, let a mishap happen in its midst, and take note of what came of what nobody was told."""
        self.switch.now = faults = mishap.faults(self.failure, self.scale)
        result: Result | None = None
        error: CheckpointError | None = None
        try:
            result = verb()
        except CheckpointError as failure:
            error = failure
        if mishap.kind == "crash" and faults.met:
            self.end_run()
            bury(self.store)
        self.switch.now = Faults()
        self.settle(may_go)
        return result, error

    def save_at(self, step: int, changes: frozenset[int], loss: float, mishap: Mishap, tag: str | None) -> None:
        run, content, before = self.the_run(), self.next_content(changes), self.held.get(step)
        if before is None or before.harmed:
            self.unsure.setdefault(step, []).append((content, loss))
        tags = () if tag is None else (tag,)
        report, error = self.attempted(
            mishap, lambda: run.save(step, state_of(content), metrics={METRIC: loss}, tags=tags).wait()
        )
        if error is None:
            assert report is not None
            assert before is None or before.harmed, f"step {step} was saved over"
            assert self.held[step].content == content
            self.unsure.pop(step, None)
        elif isinstance(error, ConflictError):
            assert step in self.held, error
        else:
            assert isinstance(error, UnavailableError), error

    def collect_by(self, policy: KeepPolicy, mishap: Mishap, verb: Callable[[], CollectReport | None]) -> None:
        before, kept = set(self.held), self.kept_for_certain(policy)
        is_clear = set(self.intact()) == before and self.run is None and mishap is NO_MISHAP
        is_clear &= not list(self.store.list("readers/"))  # Whoever crashed while reading lives on here.
        report, error = self.attempted(mishap, verb, may_go=before - kept)
        is_ranked = all(each.loss is not None and not each.harmed for each in self.held.values())
        assert error is None or isinstance(error, UnavailableError if is_ranked else (UnavailableError, InvalidError))
        if report is not None:
            assert set(report.steps) <= before - kept
            assert not is_clear or set(self.held) == kept
            event(f"collected {len(report.steps)} of {len(before)}")

    # The model.

    def intact(self) -> list[int]:
        return sorted(step for step, each in self.held.items() if not each.harmed)

    def names(self) -> set[str]:
        return {*self.tags, *self.taken}

    def step_at(self, choice: int) -> int:
        return sorted(self.held)[choice % len(self.held)]

    def kept_for_certain(self, policy: KeepPolicy) -> set[int]:
        """Return the whole steps that a policy keeps, even if damaged ones of which nobody knows take their places."""
        counted = {step: self.held[step] for step in committed_steps(self.store)}
        for step in [step for step, each in counted.items() if each.harmed and is_quarantined(self.store, step)]:
            del counted[step]
        if not counted:
            return set()
        return {*kept_by(policy, counted, set(self.tags.values())), max(counted)} & set(self.intact())

    def settle(self, may_go: Collection[int] = ()) -> None:
        """Take note of what storage says of what nobody was told."""
        visible = committed_steps(self.store)
        for step in set(may_go) - set(visible):
            self.forget(step)
            del self.held[step]
        for step in set(self.unsure) & set(visible):
            known = self.held.get(step)
            if known is None or known.digest != manifest_digest(self.store, step):
                self.adopt(step, self.unsure[step])
        if self.run is None:
            self.unsure.clear()
        for name, tag in read_tags(self.store).whole.items():
            if name not in self.names():
                self.tags[name] = tag.step

    def adopt(self, step: int, attempts: Sequence[tuple[Content, float]]) -> None:
        """Take a step that is newly there into the model: it is one of those that somebody tried to save."""
        self.forget(step)
        self.spoilt.discard(manifest_key(step))
        # Not from the tensors: they may lie in a pack that was damaged before this step came to refer to it.
        told: dict[str, object] = {"seeds": None}
        self.reader.load(told, step, only="seeds")
        found = [attempt for attempt in attempts if list(attempt[0]) == told["seeds"]]
        assert found, f"step {step} is none of those that were saved there"
        self.held[step] = Held(*found[-1], None, frozenset())
        self.look_again(step)
        self.held[step].harmed = set(self.held[step].files & self.spoilt)

    def look_again(self, step: int) -> None:
        """Take note of the files of a step whose manifest is another than before."""
        held, digest = self.held[step], manifest_digest(self.store, step)
        if digest != held.digest:
            again = read_tags(self.store).of(step, str(digest))
            self.tags |= dict.fromkeys(again, step)
            self.taken -= set(again)
        held.digest = digest
        with suppress(CheckpointError):
            held.files, held.loss = files_of(self.store, step), loss_of(self.store, step)

    def forget(self, step: int) -> None:
        """Note that a step is gone: its tags hold nothing any more, and are there all the same."""
        lost = {name for name, tagged in self.tags.items() if tagged == step}
        self.taken |= lost
        for name in lost:
            del self.tags[name]


class InMemory(LifeOfARun):
    """On a store that fails by the operation."""

    failure, scale = staticmethod(raise_error(UnavailableError)), 1

    def opened_stores(self) -> tuple[Store, Store]:
        store = MemoryStore(uuid.uuid4().hex)
        self.cleanup.callback(lambda: store.delete([entry.key for entry in store.list()]))
        return store, FaultyStore(store, self.switch)


class OnDisk(LifeOfARun):
    """On a file system that fails by the system call."""

    failure, scale = staticmethod(fail_with(errno.EIO)), 8

    def opened_stores(self) -> tuple[Store, Store]:
        root = self.cleanup.enter_context(workplace()) / "root"
        syscalls = cast(Syscalls, FaultySyscalls(Syscalls(), self.switch))
        return LocalStore(root, settings=SETTINGS), LocalStore(root, settings=SETTINGS, syscalls=syscalls)


LIVES = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    # A life is told as it was: to make it shorter would take longer than a test may.
    phases=[Phase.generate],
    derandomize="LIFE_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestInMemory = InMemory.TestCase
TestInMemory.settings = LIVES
TestOnDisk = OnDisk.TestCase
TestOnDisk.settings = LIVES
