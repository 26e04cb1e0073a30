"""The life of a run in two places, drawn at random: whatever happens to either, no step that stands is lost or wrong.

What is done is real, in one process; the drain and the collections run on the thread of the test, so that each example
replays. What must be there is for `two_roots_model.py` to say.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast._face.wiring import codecs
from holdfast.backends.alone import AloneComm
from holdfast.core.format.manifest import decode_manifest
from holdfast.core.format.names import manifest_key, manifest_keys
from holdfast.core.format.step_name import StepName
from holdfast.errors import CheckpointError, ConflictError, CorruptError, MissingError, UnavailableError
from holdfast.policies import AnyOf, EveryNSteps, EveryNth, KeepPolicy, LatestN, Policies, Tagged
from holdfast.stored.repository.epochs import RELEASED, newest_epoch, put_heartbeat
from holdfast.stored.repository.publish import get_or_none
from holdfast.stored.repository.removal import mark_keys
from holdfast.stored.repository.tags import read_tags, remove_tag
from holdfast.stored.repository.timelines import committed_steps
from holdfast.stored.repository.two_roots import TwoRoots
from holdfast.training.coordination.job import Job
from holdfast.training.runs.removal.garbage_collection import CheckpointGC, collected
from holdfast.training.runs.removal.named_steps import StepRemoval
from holdfast.training.runs.tags import tag_step
from holdfast.training.runs.tiers.near import NearPlace
from holdfast.training.runs.tiers.offline_drain import NearDrain
from tests.doubles.faults import FaultyStore
from tests.doubles.framework import NumpyFramework
from tests.property.life import (
    CHANGES,
    CHOICES,
    CLOCK,
    NAMES,
    OTHER,
    SETTINGS,
    SIZES,
    Content,
    files_of,
    is_of,
    state_of,
)
from tests.property.states import examples
from tests.property.two_roots_model import BYTES_MAX, LOGGER, Place, Saved, TwoPlaces

EXAMPLES = int(os.environ.get("LIFE_EXAMPLES", examples(30)))
STEPS = int(os.environ.get("LIFE_STEPS", "25"))
BLANK: Content = (OTHER,) * (len(SIZES) + 1)

CUTS = st.none() | st.integers(1, 40)
"""After how many calls of a store everything fails; None: nothing does."""
ROOT_KEEPS: tuple[KeepPolicy | None, ...] = (
    None,
    AnyOf(LatestN(1), Tagged()),
    AnyOf(LatestN(2), EveryNth(3), Tagged()),
    AnyOf(LatestN(3), Tagged()),
)
Step = tuple[int, bool, frozenset[int], str | None]
"""Of a save: how many steps it is after the last one, whether it is near only, which tensors changed, and a tag."""
TRAINED: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(st.integers(1, 2), st.booleans(), CHANGES, st.none() | st.none() | NAMES), max_size=3
)


def where(holds: Callable[[TwoRootsLife], object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a rule do nothing where something does not hold."""

    def guarded(act: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(act)
        def acting(self: TwoRootsLife, **drawn: object) -> None:
            if holds(self):
                act(self, **drawn)

        return acting

    return guarded


class TwoRootsLife(TwoPlaces):
    """What happens to the run."""

    def teardown(self) -> None:
        self.end("close")
        self.drop_zombie()
        LOGGER.setLevel(self.level)
        for store in self.stores.values():
            store.delete([entry.key for entry in store.list()])

    # ------------------------------------------------------------------------------------------- jobs

    @rule(
        end=st.sampled_from(("close", "drain", "crash")),
        keep=st.sampled_from(ROOT_KEEPS),
        near_keep=st.integers(1, 2),
        has_near=st.sampled_from((True, True, True, False)),
        trained=TRAINED,
    )
    def new_job(self, end: str, keep: KeepPolicy | None, near_keep: int, has_near: bool, trained: list[Step]) -> None:
        """The job ends in one of several ways; another begins and resumes."""
        self.end(end)
        self.keep, self.near_keep = keep, AnyOf(LatestN(near_keep), Tagged())
        self.begin(has_near)
        self.train(trained)

    def begin(self, has_near: bool) -> None:
        self.has_near = has_near
        run = self.opened()
        order, state = self.order(), state_of(BLANK)
        best = next((each for each in order if self.good_places(each)), None)
        try:
            step = run.load(state)
        except (CorruptError, MissingError) as error:
            assert best is None, f"{best} is whole, and the resume says: {error}"
            assert order or self.torn or any(each.is_gone or not each.counts for each in self.saved), error
            run.close()
            self.opened()._position.starts_over = True
            return
        if step is None:
            assert best is None, f"{best} is whole, and nothing was loaded"
            if self.saved:
                run._position.starts_over = True
            return
        loaded = self.of_state(step, state)
        if step not in self.torn:
            assert loaded in order, f"{loaded} was resumed, and is no step of {order}"
            assert best is None or order.index(loaded) <= order.index(best), f"{loaded} was resumed; {best} is newer"
        self.go_on_from(loaded)
        if order and loaded is order[0] and not self.torn:
            assert not run._position.has_gone_back, f"{loaded} is the newest"
        event(f"resumed from {'/'.join(self.places(loaded))}")

    def opened(self) -> CheckpointManager:
        near = NearPlace(FaultyStore(self.stores["near"], self.switch), EveryNSteps(1), 1) if self.has_near else None
        job = Job(AloneComm(), CLOCK, SETTINGS, NumpyFramework(0))
        root = FaultyStore(self.stores["root"], self.switch)
        run = CheckpointManager.over(root, job, policies=Policies(keep=self.keep), near=near)
        run._parts.collecting = None  # Collections and drains are rules.
        if run._near is not None:
            run._near.parts.collecting = None
            run._near.drain._wake_up = lambda: None  # type: ignore[method-assign]
        self.run, self.origin, self.at, self.unnoticed = run, None, 0, set()
        return run

    def end(self, how: str) -> None:
        run, self.run = self.run, None
        if run is None:
            return
        drain = None if run._near is None else run._near.drain
        if how == "crash":
            put_heartbeat(self.stores["root"], newest_epoch(self.stores["root"]), RELEASED)
            self.drop_zombie()
            self.zombie = run
            return
        if how == "drain" and drain is not None and drain._newest is not None:
            newest = next(each for each in self.saved if (each.step, each.digest) == drain._newest)
            drain._add(drain._newest)
            self.run = run
            self.drain_all(None)
            self.run = None
            if self.is_whole(newest, "near"):
                assert "root" in self.places(newest), f"{newest} is the newest step, and a close did not drain it"
        run.close()

    def drop_zombie(self) -> None:
        zombie, self.zombie = self.zombie, None
        if zombie is not None:
            with suppress(CheckpointError):
                zombie.close()

    @rule()
    @where(lambda self: self.zombie is not None and self.zombie._near and self.zombie._parts.writer_lease.epoch)
    def a_dead_job_goes_on(self) -> None:
        """A job that was thought dead drains on: nothing counts that the next job has not taken over."""
        assert self.zombie is not None and self.zombie._near is not None
        with self.epochs(), suppress(CheckpointError):
            self.zombie._near.drain._drain_all()
        self.note_places()

    # ------------------------------------------------------------------------------------------- training

    @initialize(trained=TRAINED, keep=st.sampled_from(ROOT_KEEPS))
    def first(self, trained: list[Step], keep: KeepPolicy | None) -> None:
        self.keep = keep
        self.begin(has_near=True)
        self.train(trained)

    @rule(trained=TRAINED, cut=st.none() | st.none() | st.integers(1, 30))
    def go_on(self, trained: list[Step], cut: int | None) -> None:
        """Training goes on; the last save may meet a fault."""
        self.train(trained[:-1])
        for step in trained[-1:]:
            self.save(*step, cut)

    def train(self, trained: list[Step]) -> None:
        for step in trained:
            self.save(*step)

    def save(
        self, jump: int, near_only: bool, changes: frozenset[int], tag: str | None, cut: int | None = None
    ) -> None:
        if self.run is None:
            self.begin(has_near=True)
        run, step, content = cast(CheckpointManager, self.run), self.at + jump, self.next_content(changes)
        near_only, tags = near_only and self.has_near, () if tag is None else (tag,)
        before, may_go_on = self.origin, self.may_go_on()
        report = None
        with self.epochs(), self.failing(cut):
            handle = run.save(step, state_of(content), move_tags=tags, near_only=near_only)
            # A manifest that cannot be read is not replaced, as in one root.
            refusals = [UnavailableError] * (cut is not None) + [ConflictError] * (step in self.torn)
            with suppress(*refusals):
                report = handle.wait("near")
        place: Place = "near" if self.has_near else "root"
        found = self.adopted(step, content, place)
        if report is None:
            self.end("crash")
            self.look_at_tags()
            return
        assert found is not None, f"step {step} was acknowledged, and is not there"
        if tag is not None and not report.untagged:
            self.tags[tag] = found
        self.look_at_tags()
        self.origin, self.at = found, step
        assert found is self.order()[0], f"{found} was acknowledged, and a restart takes {self.order()[0]}"
        if before is not None and not self.torn and may_go_on:
            assert found.timeline == before.timeline, f"{found} leaves the timeline of {before}, and nothing is newer"

    def may_go_on(self) -> bool:
        """Return whether a save goes on with the timeline: training is at the newest step of the newest timeline."""
        newest = max(self.begun, key=lambda timeline: timeline.number, default=None)
        return self.origin in self.order()[:1] and self.origin is not None and self.origin.timeline == newest

    def adopted(self, step: int, content: Content, place: Place) -> Saved | None:
        """Take a step into the model that is stored by now."""
        store = self.stores[place]
        data = get_or_none(store, manifest_key(step), BYTES_MAX)
        with suppress(CheckpointError):
            manifest = None if data is None else decode_manifest(data, "")
            if data is None or manifest is None or any(each.digest == manifest.digest for each in self.saved):
                return None
            found = Saved(step, manifest_key(step), content, None, manifest.digest, frozenset())
            found.timeline, found.manifest, found.is_due = manifest.timeline, data, not manifest.near_only
            found.files = files_of(manifest, found) - {found.key}
            known = {key: each.truth[key] for each in self.saved for key in each.truth}
            found.truth = {key: known.get(key) or store.get(key, BYTES_MAX) for key in found.files}
            self.saved.append(found)
            self.begun.append(manifest.timeline)
            self.note_places()
            return found
        return None

    @rule(choice=CHOICES, discards=st.booleans(), trained=TRAINED)
    @where(lambda self: self.run is not None and self.readable())
    def go_back(self, choice: int, discards: bool, trained: list[Step]) -> None:
        """Training goes back to any step that is whole, on its timeline or left."""
        run, readable = cast(CheckpointManager, self.run), self.readable()
        chosen, state = readable[choice % len(readable)], state_of(BLANK)
        chain = self.order()
        name = str(chosen.step) if self.is_by_number(chosen) else f"{chosen.step}@{chosen.digest}"
        with self.epochs():
            run.load(state, name, discard_newer=discards)
        assert is_of(state, chosen.content), f"{chosen} reads as something else"
        self.go_on_from(chosen)
        timeline = run._position._timeline
        if discards and timeline is not None:
            self.begun.append(timeline)
            for each in chain:
                if each not in self.order() and each not in self.tags.values():
                    self.may_be_gone(each)
        self.train(trained)

    def is_by_number(self, chosen: Saved) -> bool:
        return next((each for each in self.order() if each.step == chosen.step), None) is chosen and not self.torn

    @rule()
    @where(lambda self: self.run is not None and self.origin is not None and self.places(self.origin))
    def distrust(self) -> None:
        run, origin = cast(CheckpointManager, self.run), cast(Saved, self.origin)
        if run._position.origin != (origin.step, origin.digest):
            return
        before = self.trusted(origin)
        try:
            run.distrust("training went wrong")
        except MissingError:
            assert not before
            return
        self.forget_distrusted()
        assert self.trusted(origin) == before[1:], f"{before} were trusted, now {self.trusted(origin)}"

    # ------------------------------------------------------------------------------------------- drain, collection

    @rule(cut=CUTS)
    @where(lambda self: self.run is not None and self.has_near)
    def drain(self, cut: int | None) -> None:
        self.drain_all(cut)

    def drain_all(self, cut: int | None) -> None:
        assert self.run is not None and self.run._near is not None
        drain = self.run._near.drain
        # A tag makes a step due, when the drain looks.
        tagged = {(tag.step, tag.digest) for tag in read_tags(self.stores["root"]).whole.values()}
        waiting = [each for each in self.saved if (each.step, each.digest) in {*drain._due, *tagged}]
        waiting = [each for each in waiting if each in self.in_place("near") and "root" not in self.places(each)]
        stays = self.kept_at_root([*self.in_place("root"), *waiting])
        with self.failing(cut), suppress(UnavailableError, CorruptError):
            drain._drain_all()
        self.note_places()
        for each in waiting:
            is_out = (each.step, each.digest) not in drain._due
            # What the root had when the job looked, and lost since, the next job finds.
            is_lacking = "root" not in self.places(each) and each.step not in self.torn and each not in self.unnoticed
            if is_lacking and self.is_whole(each, "near") and each.counts and cut is None:
                assert each not in stays or self.has_other_at_root(each), f"{each} is due, and was not drained"
            if is_out and "root" not in self.places(each) and each not in stays:
                each.is_due = False

    @rule(cut=CUTS, removes=st.booleans(), choice=st.none() | CHOICES)
    def drain_without_a_job(self, cut: int | None, removes: bool, choice: int | None) -> None:
        self.end("close")
        near, root = (FaultyStore(self.stores[place], self.switch) for place in ("near", "root"))
        near_steps = [each for each in self.in_place("near") if each.counts and not each.is_gone]
        chosen = near_steps[choice % len(near_steps)] if choice is not None and near_steps else None
        named = None if chosen is None else StepName(step=chosen.step, digest=str(chosen.digest))
        removes = removes and chosen is None
        best = self.best()
        request = NearDrain(TwoRoots(near, root), CLOCK, codecs(), named)
        report = None
        with self.epochs(), self.failing(cut):
            try:
                report = request.execute(SETTINGS.lease_seconds, remove=removes)
            except MissingError as error:
                assert not near_steps or (chosen is not None and chosen not in self.order()), error
            except UnavailableError:
                assert cut is not None
            except ConflictError as error:
                assert chosen is not None and self.has_other_at_root(chosen), error
            except CorruptError as error:
                assert self.torn or any(not self.is_whole(each, "near") for each in near_steps), error
        # The records of epochs stay.
        if removes and not any(entry.key.startswith("step-") for entry in self.stores["near"].list()):
            self.expected["near"].clear()
        self.note_places()
        if report is not None:
            for step in report.steps:
                assert any(each.step == step and "root" in self.places(each) for each in self.saved), report
        is_due = best is not None and best in self.order()[:1] and self.is_whole(best, "near")
        if cut is None and chosen is None and best is not None and is_due:
            assert "root" in self.places(best), f"{best} is the newest, and was not drained"

    @rule(place=st.sampled_from(("near", "root")), cut=CUTS)
    @where(lambda self: self.run is not None and self.run._parts.writer_lease.epoch > 0)
    def collect(self, place: Place, cut: int | None) -> None:
        assert self.run is not None
        parts = self.run._parts if place == "root" else None if self.run._near is None else self.run._near.parts
        if parts is None or (place == "root" and self.keep is None):
            return
        drain = None if self.run._near is None else self.run._near.drain
        due = [each for each in self.saved if drain is not None and (each.step, each.digest) in drain._due]
        policy = self.keep if place == "root" else self.near_keep
        here = [each for each in self.in_place(place) if each.counts and not each.is_gone]
        stays = self.kept_at_root(here) if place == "root" else {*self.kept(self.near_keep, here), *due}
        self.expected[place] &= stays
        collector = CheckpointGC(
            FaultyStore(self.stores[place], self.switch), CLOCK, policy, parts.writer_lease, parts.pins
        )
        with self.failing(cut), suppress(*[UnavailableError] * (cut is not None)):
            report = collector.collect(0.0, lambda _: False)
            event(f"collected {place}: {bool(report and report.steps)}")
        if cut is not None:
            self.end("crash")

    @rule(keep=st.sampled_from(ROOT_KEEPS))
    def collect_without_a_job(self, keep: KeepPolicy | None) -> None:
        self.end("close")
        here = [each for each in self.in_place("root") if each.counts and not each.is_gone]
        self.keep = keep
        self.expected["root"] &= self.kept_at_root(here)
        with self.epochs(), suppress(MissingError):
            collected(self.stores["root"], CLOCK, keep, 0.0, SETTINGS.lease_seconds, self.view())

    # ------------------------------------------------------------------------------------------- people

    @rule(choice=CHOICES, is_away=st.booleans())
    @where(lambda self: self.readable())
    def remove(self, choice: int, is_away: bool) -> None:
        """`holdfast rm`, with the near tier or while it is away."""
        self.end("close")
        with self.near_away(is_away):
            chosen = self.readable()[choice % len(self.readable())] if self.readable() else None
            if chosen is None:
                return
            removal = StepRemoval([f"{chosen.step}@{chosen.digest}"], tagged=True, all_steps=True)
            with self.epochs():
                try:
                    report = removal.execute(self.view(), CLOCK, 0.0, SETTINGS.lease_seconds)
                except CorruptError:
                    assert self.torn
                    return
            assert not report.left, report
            chosen.is_gone = True
            self.forget(chosen)

    @rule(choice=CHOICES, name=NAMES, is_away=st.sampled_from((False, False, True)))
    @where(lambda self: self.readable())
    def tag(self, choice: int, name: str, is_away: bool) -> None:
        with self.near_away(is_away and self.run is None):
            readable = self.readable()
            if readable:
                chosen = readable[choice % len(readable)]
                try:
                    tag_step(self.view(), CLOCK, f"{chosen.step}@{chosen.digest}", name, move=True)
                except ConflictError as error:
                    # A collector was killed, and nobody has taken its epoch yet.
                    assert any(map(mark_keys, self.stores.values())), error
                else:
                    self.tags[name] = chosen

    @rule(choice=CHOICES, is_away=st.sampled_from((False, False, True)))
    @where(lambda self: self.tags)
    def untag(self, choice: int, is_away: bool) -> None:
        name = sorted(self.tags)[choice % len(self.tags)]
        with self.near_away(is_away and self.run is None):
            remove_tag(self.view(), name)
        del self.tags[name]

    # ------------------------------------------------------------------------------------------- mishaps

    @rule(keeps=st.booleans())
    def lose_the_near_tier(self, keeps: bool) -> None:
        self.end("crash")
        self.drop_zombie()
        folder = self.take_away()
        if keeps and folder.files:
            self.away = [*self.away[-2:], folder]

    @rule(choice=CHOICES)
    @where(lambda self: self.away)
    def an_earlier_near_tier_comes_back(self, choice: int) -> None:
        self.end("crash")
        self.drop_zombie()
        back = self.away.pop(choice % len(self.away))
        self.take_away()
        self.put_back(back)

    @rule(
        choice=CHOICES,
        place=st.sampled_from(("near", "root")),
        file=CHOICES,
        kind=st.sampled_from(("flip", "flip", "cut", "missing")),
        may_tear=st.sampled_from((False, False, False, True)),
    )
    @where(lambda self: self.saved)
    def damage(self, choice: int, place: Place, file: int, kind: str, may_tear: bool) -> None:
        here, store = self.in_place(place), self.stores[place]
        if not here or len(self.harmed()) > 2:
            return
        chosen = here[choice % len(here)]
        keys = sorted(key for key in chosen.truth if get_or_none(store, key, BYTES_MAX) is not None)
        if may_tear:
            keys += [key for key in manifest_keys(chosen.step, str(chosen.digest)) if self.is_at(chosen, place, key)]
            self.torn.add(chosen.step)
            self.unnoticed |= {chosen} if place == "root" else set()
        if not keys:
            return
        key = keys[-1] if may_tear else keys[file % len(keys)]
        data = bytearray(store.get(key, BYTES_MAX))
        data[file % len(data)] ^= 1
        if kind == "missing":
            store.delete([key])
        else:
            store.put(key, bytes(data) if kind == "flip" else bytes(data[: file % len(data)]))
        if may_tear and kind == "missing":
            self.forget(chosen, place)
        self.expected[place] = {each for each in self.expected[place] if self.is_whole(each, place)}
        for folder in self.away:
            folder.expected = {each for each in folder.expected if each is not chosen or place != "near"}

    # ------------------------------------------------------------------------------------------- what must hold

    @invariant()
    def what_is_kept_is_whole(self) -> None:
        for place, expected in self.expected.items():
            for each in expected:
                assert self.is_whole(each, place), f"{each} is kept, and is lost {place}"

    @invariant()
    def the_run_lists_what_there_is(self) -> None:
        if not self.torn:
            wanted = {each.step for each in self.order()}
            assert set(committed_steps(self.view())) == wanted, f"{committed_steps(self.view())}: {self.order()}"

    @invariant()
    def tags_are_where_they_were_put(self) -> None:
        tags = read_tags(self.view())
        assert not tags.damaged
        names = {name: (tag.step, tag.digest) for name, tag in tags.whole.items()}
        assert names == {name: (each.step, each.digest) for name, each in self.tags.items()}


TestTwoRoots = TwoRootsLife.TestCase
TestTwoRoots.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    phases=[Phase.generate],  # A life is told as it was: to make it shorter would take longer than a test may.
    derandomize="LIFE_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
