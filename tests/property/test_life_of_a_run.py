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
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from typing import cast

from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.memory import MemoryStore
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.base.ports.store import Store
from holdfast.core.format.names import manifest_key, step_folder
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, UnavailableError
from holdfast.offline.repair.repair import Repair
from holdfast.policies import KeepPolicy
from holdfast.stored.checkpoint.location import none_allowed
from holdfast.stored.repository.catalog import exists
from holdfast.stored.repository.epochs import RELEASED, newest_epoch, put_heartbeat
from holdfast.stored.repository.tags import read_tags
from holdfast.training.runs.removal.garbage_collection import CheckpointGC, CollectReport, collected
from holdfast.training.runs.removal.named_steps import StepRemoval
from tests.doubles.faults import Action, FaultPoint, Faults, FaultyStore, FaultySyscalls, fail_with, raise_error
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
    LocalShards,
    Mishap,
    Result,
    Switch,
    bury,
    has_link,
    is_of,
    is_of_chain,
    is_seen_damaged,
    lived_by_another,
    run_on,
    state_of,
)
from tests.property.run_model import Position, RunModel
from tests.property.states import examples
from tests.support.mounted_file_systems import workplace

EXAMPLES = int(os.environ.get("LIFE_EXAMPLES", examples(12)))
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
        self.run: CheckpointManager | None = None
        self.content: Content = (0,) * (len(SIZES) + 1)
        self.saves = 0
        self.switch = Switch()
        self.cleanup = ExitStack()
        self.store, self.faulty = self.opened_stores()
        self.model = RunModel(self.store)
        self.trained = Position(self.model)

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
        self.model.reader.close()
        self.cleanup.close()

    # What happens.

    @rule(mishap=MISHAPS)
    def resume(self, mishap: Mishap) -> None:
        """A process starts, and goes on from the newest whole step of the newest timeline."""
        self.end_run()
        run = self.run = run_on(self.faulty)
        state = state_of(self.next_content(frozenset(range(len(SIZES)))))
        chain, last = self.model.chain(), self.model.last
        intact = [held for held in chain if not held.harmed]
        step, error = self.attempted(mishap, lambda: run.load(state))
        if isinstance(error, CorruptError):
            assert not intact, f"{error}, though {intact} are whole"
        elif error is None and step is None:
            assert not self.model.reader.steps()
        elif error is None:
            found = [at for at, held in enumerate(chain) if held.step == step and is_of(state, held.content)]
            assert found, f"step {step} was resumed from wrongly: {chain}"
            loaded = chain[found[0]]
            assert not intact or found[0] <= chain.index(intact[0]), f"{loaded} was resumed, and not {intact[0]}"
            assert last is None or last.harmed or loaded is last, f"{loaded} was resumed, and {last} was saved last"
            assert run.load_report is not None
            skipped = run.load_report.passed_over
            for each in skipped:
                assert any(held.step == each.step for held in self.model.harmed()), f"passed over, and whole: {each}"
            self.train_from(run, loaded, passed_over=bool(skipped))
            event(f"resumed, {len(skipped)} passed over")

    @rule(choice=CHOICES, by_digest=st.booleans(), mishap=MISHAPS)
    @where(lambda self: self.model.held)
    def go_back(self, choice: int, by_digest: bool, mishap: Mishap) -> None:
        """Training loads a step by name, superseded ones too, and will save from there."""
        run, chosen = self.the_run(), self.model.of_choice(choice)
        is_named_by_step = [held for held in self.model.held if held.step == chosen.step] == [chosen]
        is_named_by_step &= chosen in self.model.chain()
        name = chosen.step if is_named_by_step and not by_digest else chosen.name
        state = state_of(tuple(OTHER - seed for seed in chosen.content))
        step, error = self.attempted(mishap, lambda: run.load(state, name))
        if error is None:
            assert step == chosen.step and is_of(state, chosen.content), f"{chosen} was loaded wrongly"
            self.train_from(run, chosen)
            event("went back to a " + ("step of the chain" if chosen in self.model.chain() else "superseded step"))
        else:
            assert chosen.harmed or isinstance(error, UnavailableError), error

    @rule(choice=CHOICES, mishap=MISHAPS)
    @where(lambda self: self.model.held)
    def discard_newer(self, choice: int, mishap: Mishap) -> None:
        """Training loads a step and discards what it leaves: from then on a restart loads that step."""
        run, chosen = self.the_run(), self.model.of_choice(choice)
        state = state_of(tuple(OTHER - seed for seed in chosen.content))
        tagged, before = set(self.model.tags.values()), self.model.chain()
        step, error = self.attempted(mishap, lambda: run.load(state, chosen.name, discard_newer=True))
        self.model.last = None
        if error is not None:
            assert chosen.harmed or isinstance(error, UnavailableError | ConflictError), error
            return
        assert step == chosen.step and is_of(state, chosen.content), f"{chosen} was loaded wrongly"
        self.train_from(run, chosen)
        report = run.load_report
        assert report is not None
        if mishap is NO_MISHAP and not self.model.harmed():
            assert self.model.chain()[:1] == [chosen], f"a restart would not load {chosen}"
            left = [held for held in before if held not in self.model.chain()]
            assert len(report.discarded) == len([held for held in left if held not in tagged]), report
            assert sorted(each.step for each in report.left) == sorted(held.step for held in left if held in tagged)
        event(f"discarded {min(len(report.discarded), 3)}")

    @rule(choice=CHOICES, mishap=MISHAPS)
    @where(lambda self: self.model.held)
    def remove(self, choice: int, mishap: Mishap) -> None:
        """`holdfast rm`: the step that was named goes, and nothing else that a load has not discarded."""
        self.end_run()
        model, chosen = self.model, self.model.of_choice(choice)
        is_tagged, chain = chosen in model.tags.values(), model.chain()
        verb = StepRemoval([chosen.name], tagged=False, all_steps=True)
        report, error = self.attempted(
            mishap,
            lambda: verb.execute(self.faulty, CLOCK, 0.0, SETTINGS.lease_seconds),
            # What a load discarded goes with any collection.
            may_go={chosen, *model.discarded()},
        )
        if model.last is chosen:
            model.last = None
        if report is not None:
            assert report.left or chosen not in model.held
            assert not is_tagged
            if not model.harmed():
                assert model.chain() == [held for held in chain if held in model.held], "superseded steps came back"
            event("removed")
        elif not is_tagged or not isinstance(error, ConflictError):
            assert chosen.harmed or isinstance(error, UnavailableError), error

    @rule(jump=st.integers(1, 3), changes=CHANGES, loss=LOSSES, tag=st.none() | NAMES, mishap=MISHAPS)
    def save(self, jump: int, changes: frozenset[int], loss: float, tag: str | None, mishap: Mishap) -> None:
        """A step is saved, after the one that training came from."""
        self.train()
        if tag in self.model.names():
            tag = None
        self.save_at(self.trained.step + jump, changes, loss, mishap, tag)

    @rule(choice=CHOICES, changes=CHANGES, loss=LOSSES, mishap=MISHAPS)
    @where(lambda self: self.model.held)
    def save_again(self, choice: int, changes: frozenset[int], loss: float, mishap: Mishap) -> None:
        """A step is saved where one lies: refused on its timeline, unless that one is known to be damaged."""
        self.train()
        self.save_at(self.model.of_choice(choice).step, changes, loss, mishap, None)

    @rule(step=st.integers(1, 12), starts_over=st.booleans(), mishap=MISHAPS)
    @where(lambda self: self.model.held)
    def save_unloaded(self, step: int, starts_over: bool, mishap: Mishap) -> None:
        """A process saves that has loaded nothing: refused, unless it starts over."""
        self.end_run()
        run = self.run = run_on(self.faulty, starts_over=starts_over)
        content = self.next_content(frozenset(range(len(SIZES))))
        self.trained = Position(self.model)
        if starts_over or not self.model.manifests():
            self.save_at(step, frozenset(), 0.0, mishap, None)
            return
        _, error = self.attempted(mishap, lambda: run.save(step, state_of(content)).wait())
        assert isinstance(error, InvalidError | UnavailableError), error

    @rule(choice=CHOICES, name=NAMES, mishap=MISHAPS)
    @where(lambda self: self.model.held)
    def tag(self, choice: int, name: str, mishap: Mishap) -> None:
        run, chosen, tags = self.the_run(), self.model.of_choice(choice), self.model.tags
        _, error = self.attempted(mishap, lambda: run.tag(chosen.name, name))
        if error is None:
            assert name not in self.model.names() or tags.get(name) is chosen
            tags[name] = chosen
        elif isinstance(error, ConflictError):
            assert name in self.model.names()
            assert tags.get(name) is not chosen
        elif not isinstance(error, UnavailableError):
            assert chosen.harmed, error

    @rule(choice=CHOICES, mishap=MISHAPS)
    @where(lambda self: self.model.tags)
    def untag(self, choice: int, mishap: Mishap) -> None:
        run, name = self.the_run(), sorted(self.model.tags)[choice % len(self.model.tags)]
        _, error = self.attempted(mishap, lambda: run.untag(name))
        assert error is None or isinstance(error, UnavailableError)
        is_there = name in read_tags(self.store).whole
        assert error is not None or not is_there
        if not is_there:
            del self.model.tags[name]

    @rule(policy=POLICIES, mishap=MISHAPS)
    @where(lambda self: self.model.held)
    def collect(self, policy: KeepPolicy | None, mishap: Mishap) -> None:
        """`holdfast gc`: refused while the run is open for writing, done once it is not."""

        def verb() -> CollectReport:
            return collected(self.faulty, CLOCK, policy, 0.0, SETTINGS.lease_seconds)

        if self.is_holding:
            assert isinstance(self.attempted(NO_MISHAP, verb)[1], ConflictError)
        self.end_run()
        self.collect_by(policy, mishap, verb)

    @rule(policy=POLICIES, mishap=MISHAPS)
    @where(lambda self: self.is_holding)
    def collect_beside_training(self, policy: KeepPolicy | None, mishap: Mishap) -> None:
        """The run collects by itself, and goes on to save with references to what it knows."""
        parts = self.the_run()._parts
        collector = CheckpointGC(self.faulty, CLOCK, policy, parts.writer_lease, parts.pins)
        self.collect_by(policy, mishap, lambda: collector.collect(0.0, lambda _: False))

    @rule(choice=CHOICES, file=CHOICES, at=CHOICES, kind=st.sampled_from(("flip", "cut", "missing")))
    @where(lambda self: self.model.held and len(self.model.harmed()) < 3)
    def corrupt(self, choice: int, file: int, at: int, kind: str) -> None:
        """A file is damaged behind everybody's back: whoever reads all of what it belongs to sees it."""
        chosen = self.model.of_choice(choice)
        files = sorted(key for key in chosen.files - self.model.spoilt if exists(self.store, key))
        absent = chosen.files - self.model.spoilt - set(files)
        # A collection takes what is left of a step whose manifest is gone.
        assert all(has_link(self.store, chosen, key) for key in absent) or chosen.key not in self.model.manifests()
        key = files[file % len(files)] if files else chosen.key
        if not files or (key == chosen.key and self.model.is_twice(chosen)):
            return
        data = bytearray(self.store.get(key, 1 << 30))
        if kind == "missing":
            self.store.delete([key])
        else:
            data[at % len(data)] ^= 1 << at % 8
            self.store.put(key, bytes(data) if kind == "flip" else bytes(data[: at % len(data)]))
        for held in self.model.damaged(key):
            # The header of a pack, which stock readers need, is for the step to check that wrote it.
            is_own = key == held.key or key.startswith(step_folder(held.step))
            assert not is_own or is_seen_damaged(self.store, held), f"{key}: nobody sees it damaged ({kind} at {at})"

    @rule(choice=st.none() | CHOICES, mishap=MISHAPS)
    @where(lambda self: self.model.held)
    def repair(self, choice: int | None, mishap: Mishap) -> None:
        """`holdfast repair`: what it calls whole is, and what was whole stays as it was."""
        self.end_run()
        step = None if choice is None else self.model.of_choice(choice).step
        repair = Repair(self.faulty, none_allowed, CLOCK, SETTINGS)
        harmed = self.model.harmed()
        report, error = self.attempted(mishap, lambda: repair.run(step))
        for each in report.steps if report is not None else ():
            held = self.model.at(each.step)
            if held is None:
                assert each.outcome == "unfinished", each
            elif each.outcome in ("whole", "repaired"):
                held.harmed.clear()
            elif each.outcome == "damaged":
                # What could not be read back is told as what is damaged.
                assert held in harmed or mishap is not NO_MISHAP, f"{each} was whole"
            else:
                assert held.harmed, f"{each} was committed"
        assert error is None or isinstance(error, UnavailableError), error

    @rule(
        verb=st.sampled_from(("save", "collect")),
        at=st.integers(-4, 45),
        policy=POLICIES,
        loads=st.none() | CHOICES,
        jump=st.integers(1, 2),
        others_jump=st.integers(-2, 2),
        changes=CHANGES,
    )
    @where(lambda self: self.is_holding and self.trained.origin)
    def lose_the_epoch(
        self,
        verb: str,
        at: int,
        policy: KeepPolicy | None,
        loads: int | None,
        jump: int,
        others_jump: int,
        changes: frozenset[int],
    ) -> None:
        """In the midst of a verb another process takes over, loads and saves, and then the first goes on."""
        run, parts, model = self.the_run(), self.the_run()._parts, self.model
        content, others = self.next_content(changes), self.next_content(changes)
        step, others_step = self.trained.step + jump, max(1, self.trained.step + others_jump)
        came: list[CheckpointError | None] = []

        def take_over(operation: FaultPoint) -> None:
            put_heartbeat(self.store, newest_epoch(self.store), RELEASED)  # As if the lease were over.
            model.unsure.setdefault(others_step, []).append((others, 0.0))
            chosen = model.of_choice(loads).name if loads is not None and model.held else None
            came.append(lived_by_another(self.store, others_step, others, chosen))
            model.settle()
            if came[-1] is None:
                model.unsure.clear()  # What is not there by now is under an epoch that is over, and may not come.

        names = None if at > 0 else PUBLISHING  # The moment that an epoch is for.
        self.switch.now = Faults(take_over, at=at * self.scale if at > 0 else 1 - at, names=names)
        error, may_go = cast(CheckpointError | None, None), set[LocalShards]()
        try:
            if verb == "save":
                model.unsure.setdefault(step, []).append((content, 0.0))
                run.save(step, state_of(content), metrics={METRIC: 0.0}).wait()
            else:
                may_go = set(model.held) - model.kept_for_certain(policy)
                collector = CheckpointGC(self.faulty, CLOCK, policy, parts.writer_lease, parts.pins)
                collector.collect(0.0, lambda _: False)
        except CheckpointError as failure:
            error = failure
        self.end_run(may_go)
        self.switch.now = Faults()
        model.settle(may_go)
        model.last = None
        for acknowledged, at_step, saved in ((came[:1] == [None], others_step, others), (error is None, step, content)):
            if acknowledged and (saved is others or verb == "save"):
                assert model.with_content(at_step, saved), f"step {at_step} was acknowledged, and is another"

    # What must hold after each of them.

    @invariant()
    def what_is_kept_can_be_read(self) -> None:
        known = {held.digest for held in self.model.held}
        assert set(self.model.manifests().values()) <= known, f"somebody saved what nobody asked for: {known}"
        visible, intact = set(self.model.reader.steps()), self.model.intact()
        assert {held.step for held in self.model.chain() if not held.harmed} <= visible
        assert visible <= {held.step for held in self.model.held}
        for held in self.model.held:
            state = state_of(tuple(OTHER - seed for seed in held.content))
            try:
                self.model.reader.load(state, held.name)
            except CheckpointError as error:
                assert held not in intact, f"{held} is whole, and cannot be read: {error}"
            else:
                assert is_of(state, held.content), f"{held} reads as something else, damaged: {held.harmed}"
            assert held.harmed or not is_seen_damaged(self.store, held), held

    @invariant()
    def what_is_tagged_stays_tagged(self) -> None:
        self.model.require_tags_hold()

    # How it is done.

    @property
    def is_holding(self) -> bool:
        """Whether this process has an open manager that holds the writer lease."""
        return self.run is not None and self.run._parts.writer_lease.epoch > 0

    def the_run(self) -> CheckpointManager:
        if self.run is None:
            self.run = run_on(self.faulty)
        return self.run

    def train(self) -> None:
        """Have a manager that may save: one that loaded a step, or starts over where none can be loaded."""
        if self.trained.origin is None and self.model.held and self.trained.timeline is None:
            self.resume(NO_MISHAP)
            if self.trained.origin is None:
                self.end_run()
                self.run, self.trained = run_on(self.faulty, starts_over=True), Position(self.model)

    def train_from(self, run: CheckpointManager, held: LocalShards, *, passed_over: bool = False) -> None:
        """Go on from a loaded step, unless the process is gone."""
        if self.run is run:
            self.content = held.content
            self.trained = Position(self.model, held, passed_over)

    def end_run(self, may_go: Collection[LocalShards] = ()) -> None:
        """Close the manager; where its store is dead, nothing of that reaches it."""
        run, self.run = self.run, None
        self.trained = Position(self.model)
        if run is not None:
            with suppress(CheckpointError):
                run.close()
            self.settle(may_go)

    def settle(self, may_go: Collection[LocalShards] = ()) -> None:
        self.model.settle(may_go)
        if self.run is None:
            self.model.unsure.clear()

    def next_content(self, changes: frozenset[int]) -> Content:
        """Train on: some tensors are others than before."""
        self.saves += 1
        seeds = (self.saves if at in changes else seed for at, seed in enumerate(self.content[:-1]))
        self.content = (*seeds, self.saves)
        return self.content

    def attempted(
        self, mishap: Mishap, verb: Callable[[], Result], may_go: Collection[LocalShards] = ()
    ) -> tuple[Result | None, CheckpointError | None]:
        """Do something, let a mishap happen in its midst, and take note of what came of what nobody was told."""
        self.switch.now = faults = mishap.faults(self.failure, self.scale)
        result, error = cast(Result | None, None), cast(CheckpointError | None, None)
        try:
            result = verb()
        except CheckpointError as failure:
            error = failure
        if mishap.kind == "crash" and faults.met:
            self.end_run(may_go)
            bury(self.store)
        self.switch.now = Faults()
        self.settle(may_go)
        return result, error

    def save_at(self, step: int, changes: frozenset[int], loss: float, mishap: Mishap, tag: str | None) -> None:
        run, content, model, trained = self.the_run(), self.next_content(changes), self.model, self.trained
        before = model.at(step)
        there = [held for held in model.held if held.step == step]
        others = [held for held in there if not held.harmed]
        model.unsure.setdefault(step, []).append((content, loss))
        tags = () if tag is None else (tag,)
        report, error = self.attempted(
            mishap, lambda: run.save(step, state_of(content), metrics={METRIC: loss}, tags=tags).wait()
        )
        if error is None:
            assert report is not None
            saved = model.with_content(step, content)
            assert saved is not None and saved.timeline is not None, f"step {step} was acknowledged, and is not there"
            over = [held for held in others if is_of_chain(saved.timeline, held)]
            assert not over, f"{over} was saved over by {saved}"
            trained.require_continued_by(saved)
            trained.timeline, trained.step = saved.timeline, step
            event(f"saved on timeline {min(saved.timeline.number, 9)}{' over a number' * bool(others)}")
            model.unsure.pop(step, None)
            return
        trained.is_sure = False
        if isinstance(error, ConflictError):
            # A manifest of the chain that was moved away keeps the number, even if files that it names are damaged.
            is_needed = any(map(trained.came_along, there)) or (before is not None and before.harmed)
            assert is_needed, f"{there} are superseded, and their number is not free: {error}"
        else:
            assert isinstance(error, UnavailableError), error

    def collect_by(self, policy: KeepPolicy | None, mishap: Mishap, verb: Callable[[], CollectReport | None]) -> None:
        model = self.model
        before, kept = set(model.held), model.kept_for_certain(policy)
        is_clear = not model.harmed() and self.run is None and mishap is NO_MISHAP
        is_clear &= not list(self.store.list("readers/"))  # Whoever crashed while reading lives on here.
        is_clear &= not any(map(model.is_twice, before))
        report, error = self.attempted(mishap, verb, may_go=before - kept)
        is_ranked = all(each.loss is not None and not each.harmed for each in model.held)
        assert error is None or isinstance(error, UnavailableError if is_ranked else (UnavailableError, InvalidError))
        if report is not None:
            assert not {held for held in kept if held.key in map(manifest_key, report.steps)}
            assert not is_clear or set(model.held) == kept, f"{set(model.held) - kept} should have gone"
            event(f"collected {len(report.steps)} of {len(before)}")


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
