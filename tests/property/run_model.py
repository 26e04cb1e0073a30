"""What must be there of a run: told of acknowledgements, it looks at storage only for what nobody was told.

Each checkpoint that was committed is held until it may go. Which of them a resume takes follows from what the
manifests state of their timelines, once they were read: by the words of the format, not by the code that reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from holdfast.base.ports.store import Store
from holdfast.base.types.timeline import ANCESTORS_STATED, FIRST_TIMELINE, Fork, Timeline
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX, run_fields_of_manifest
from holdfast.core.format.names import SUPERSEDED_FOLDER, manifest_key, step_folder, superseded_in, superseded_key
from holdfast.core.format.sealed_json import stated_digest
from holdfast.core.format.timeline import timeline_in_damaged
from holdfast.errors import CheckpointError
from holdfast.policies import KeepPolicy
from holdfast.stored.repository.catalog import manifest_digest, step_folders
from holdfast.stored.repository.epochs import current_fence
from holdfast.stored.repository.quarantine import is_quarantined, stated_timelines
from holdfast.stored.repository.tags import read_tags
from holdfast.stored.repository.timeline_records import timeline_records
from tests.property.life import (
    METRIC,
    SETTINGS,
    Content,
    LocalShards,
    chain_of,
    files_of,
    is_of_chain,
    kept_by,
    last_left,
    manifest_of,
    run_on,
    siblings,
)


class RunModel:
    """Every checkpoint of one run, and every tag."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.reader = run_on(store, replace(SETTINGS, reports=False))
        self.held: list[LocalShards] = []
        self.tags: dict[str, LocalShards] = {}
        self.taken: set[str] = set()
        """Tags of steps that are gone or were saved again since: names that mean nothing, and are not free."""
        self.spoilt: set[str] = set()
        """Every file that was damaged; who refers to it later is harmed from the first."""
        self.unsure: dict[int, list[tuple[Content, float]]] = {}
        """Saves that ended in an error, by step: storage knows what became of them."""
        self.last: LocalShards | None = None
        """The checkpoint that was committed last; None where two processes saved at once, or one out of order."""
        self.is_torn = False
        """Whether a manifest was ever damaged: it may have been the only one that told of its timeline."""

    def intact(self) -> list[LocalShards]:
        return [held for held in self.held if not held.harmed]

    def harmed(self) -> list[LocalShards]:
        return [held for held in self.held if held.harmed]

    def chain(self) -> list[LocalShards]:
        """Return what a resume may take, the newest first."""
        return chain_of(self.held, self.begun())

    def begun(self) -> list[Timeline]:
        """Return the timelines that are stated beside manifests that can be read, and do not contradict these."""
        records = timeline_records(self.store, current_fence(self.store))
        stated = [*(record.timeline for record in records), *stated_timelines(self.store), *self._in_damaged()]
        proven = {held.timeline for held in self.held if held.timeline is not None}
        return [one for one in stated if not any(one.contradicts(other) for other in proven)]

    def _in_damaged(self) -> Iterator[Timeline]:
        """Yield what the texts of damaged manifests state: one may have been the only one of its timeline."""
        for held in self.held:
            if held.timeline is None:
                with suppress(CheckpointError):
                    stated = timeline_in_damaged(self.store.get(held.key, MANIFEST_BYTES_MAX))
                    if stated is not None:
                        yield stated

    def discarded(self) -> set[LocalShards]:
        """Return what loads have discarded and a collection may remove."""
        records = timeline_records(self.store, current_fence(self.store))
        names = {name for record in records for name in record.discarded}
        chosen = {held for held in self.held if (held.step, held.digest) in names}
        return chosen - set(self.chain()) - set(self.tags.values())

    def at(self, step: int) -> LocalShards | None:
        """Return the checkpoint whose manifest is in the folder of a step."""
        return next((held for held in self.held if held.key == manifest_key(step)), None)

    def of_choice(self, choice: int) -> LocalShards:
        return sorted(self.held, key=lambda held: (held.step, held.content))[choice % len(self.held)]

    def with_content(self, step: int, content: Content) -> LocalShards | None:
        return next((held for held in self.held if held.step == step and held.content == content), None)

    def names(self) -> set[str]:
        return {*self.tags, *self.taken}

    def kept_for_certain(self, policy: KeepPolicy | None) -> set[LocalShards]:
        """Return what a policy keeps, even if damaged steps of which nobody knows take the places of whole ones."""
        gone = self.discarded()
        counted = [
            held
            for held in self.held
            if held not in gone
            and held.timeline is not None
            and not (held.harmed and not held.is_moved and is_quarantined(self.store, held.step))
        ]
        begun, tagged = self.begun(), set(self.tags.values())
        chain = chain_of(counted, begun)
        newest = {max(left, key=lambda held: held.step) for left in last_left(counted, begun)} | set(chain[:1])
        return {*kept_by(policy, counted, tagged, begun), *newest, *(tagged - set(chain))} & set(self.intact())

    def settle(self, may_go: Collection[LocalShards] = ()) -> None:
        """Take note of what storage says of what nobody was told."""
        stored = self.manifests()
        for held in list(self.held):
            if stored.get(held.key) == held.digest:
                if held.key not in stored and self.is_swept(held):
                    self.forget(held)
                elif held.timeline is None:
                    self.look_again(held)  # The same digest closes a damaged manifest and a repaired one.
                continue
            if held.key in stored and held.harmed and held.step not in self.unsure:
                self.look_again(held)  # It was repaired.
            elif (place := self._moved_to(held, stored)) is not None:
                if held.key in held.harmed:
                    held.harmed.add(place)
                    self.spoilt.add(place)
                held.files = held.files - {held.key} | {place}
                held.key = place
            elif held in may_go or held.harmed:
                self.forget(held)
        known = {(held.step, held.digest) for held in self.held}
        for key, digest in stored.items():
            step = _step_of(key)
            if (step, digest) not in known and step in self.unsure:
                self.adopt(step, key, digest, self.unsure[step])
        for name, tag in read_tags(self.store).whole.items():
            if name not in self.names():
                tagged = [held for held in self.held if (held.step, held.digest) == (tag.step, tag.digest)]
                assert tagged, f"tag {name} is of a step that nobody saved"
                self.tags[name] = tagged[0]

    def _moved_to(self, held: LocalShards, stored: Mapping[str, str | None]) -> str | None:
        """Return where a manifest lies that is gone from its place; None if it is nowhere."""
        moved = superseded_key(held.step, str(held.digest))
        if moved in stored:
            return moved
        if not held.harmed:
            return None
        # A save that was killed had put it under a drawn name, to replace it.
        known = {other.key for other in self.held}
        places = (key for key, digest in stored.items() if (_step_of(key), digest) == (held.step, held.digest))
        return next((key for key in places if key not in known), None)

    def manifests(self) -> Mapping[str, str | None]:
        """Return the digest of every manifest that is stored and was not published by a writer that was replaced."""
        fence = current_fence(self.store)
        keys = [entry.key for entry in self.store.list(SUPERSEDED_FOLDER)]
        keys += [manifest_key(step) for step in step_folders(self.store)]
        found: dict[str, str | None] = {}
        for key in keys:
            with suppress(CheckpointError):
                data = self.store.get(key, MANIFEST_BYTES_MAX)
                try:
                    fields = run_fields_of_manifest(data, key)
                except CheckpointError:
                    found[key] = stated_digest(data)
                else:
                    if fence.admits(_step_of(key), fields.epoch, fields.digest):
                        found[key] = fields.digest
        return found

    def adopt(self, step: int, key: str, digest: str | None, attempts: Sequence[tuple[Content, float]]) -> None:
        """Take a step that is newly there into the model: it is one of those that somebody tried to save."""
        self.spoilt.discard(key)
        # Not from the tensors: they may lie in a pack that was damaged before this step came to refer to it.
        told: dict[str, object] = {"seeds": None}
        self.reader.load(told, f"{step}@{digest}", only="seeds")
        found = [attempt for attempt in attempts if list(attempt[0]) == told["seeds"]]
        assert found, f"step {step} is none of those that were saved there"
        held = LocalShards(step, key, *found[-1], digest, frozenset())
        self.look_again(held)
        held.harmed = set(held.files & self.spoilt)
        before = siblings(held, self.held)
        self.held.append(held)
        self.last = held if not self.is_torn and all(other.step < step for other in before) else None

    def look_again(self, held: LocalShards) -> None:
        """Take note of what a manifest says that is another than before."""
        digest = manifest_digest(self.store, held.step, held.key)
        if digest != held.digest:
            again = read_tags(self.store).of(held.step, str(digest))
            self.tags |= dict.fromkeys(again, held)
            self.taken -= set(again)
        held.digest, held.timeline = digest, None
        with suppress(CheckpointError):
            manifest = manifest_of(self.store, held)
            held.files, held.loss = files_of(manifest, held), manifest.metrics.get(METRIC)
            held.timeline = manifest.timeline

    def damaged(self, key: str) -> list[LocalShards]:
        """Take note of a file that was damaged; return the checkpoints that need it."""
        self.spoilt.add(key)
        needing = [held for held in self.held if key in held.files]
        for held in needing:
            held.harmed.add(key)
            if key == held.key:
                self.look_again(held)
                self.is_torn, self.last = True, None
        return needing

    def is_swept(self, held: LocalShards) -> bool:
        """Return whether a collection has taken all files of a step that lost its manifest: nobody can repair it."""
        stored = {entry.key for entry in self.store.list(step_folder(held.step))}
        return stored.isdisjoint(held.files)

    def forget(self, held: LocalShards) -> None:
        """Note that a step is gone: its tags hold nothing any more, and are there all the same."""
        self.held.remove(held)
        lost = {name for name, tagged in self.tags.items() if tagged is held}
        self.taken |= lost
        for name in lost:
            del self.tags[name]

    def require_tags_hold(self) -> None:
        """Require that every tag that was given is there, and of the same checkpoint."""
        tags = read_tags(self.store)
        assert not tags.damaged
        for name, held in self.tags.items():
            assert tags.whole[name].step == held.step
            assert held.harmed or name in tags.of(held.step, str(held.digest)), f"{name} holds nothing"

    def is_twice(self, held: LocalShards) -> bool:
        """Return whether a crash left a manifest in a second place."""
        stored = self.manifests().items()
        return any(key != held.key and (_step_of(key), digest) == (held.step, held.digest) for key, digest in stored)


class Position:
    """Where training came from, and what the manifest of its next save must state."""

    def __init__(self, model: RunModel, origin: LocalShards | None = None, passed_over: bool = False) -> None:
        """Begin with a load, or with nothing loaded.

        Args:
            model: What is there.
            origin: The step that was loaded.
            passed_over: Whether newer steps were found damaged then.
        """
        self._model, self.origin, self.passed_over = model, origin, passed_over
        self.timeline: Timeline | None = None
        """The timeline of the saves since."""
        self.step = 0 if origin is None else origin.step
        """The step that was loaded or saved last."""
        self.is_sure = True
        """Whether no save failed since: one may have decided on the timeline before."""
        self._loaded = None if origin is None else origin.timeline
        self._digest = "" if origin is None else str(origin.digest)
        self._held, self._chain = list(model.held), model.chain()
        self._known = {held.timeline.id: held.timeline.number for held in self._held if held.timeline is not None}
        begun = model.begun()
        self._known |= {timeline.id: timeline.number for timeline in begun}
        newest = max(begun, key=lambda timeline: timeline.number, default=None)
        self._goes_on_elsewhere = newest is not None and self._is_newer_elsewhere(newest)
        """Whether a load began the newest timeline at another step, which is gone: no save can go on from there."""

    def _is_newer_elsewhere(self, timeline: Timeline) -> bool:
        if self.origin is None or self._loaded is None or timeline.number <= self._loaded.number:
            return False
        return timeline.ancestors[:1] != (Fork(self._loaded.id, self.origin.step, self._digest),)

    def came_along(self, held: LocalShards) -> bool:
        """Return whether training came from a step, or saved it: then its number is not free."""
        if self.timeline is not None:
            return is_of_chain(self.timeline, held)
        if self.origin is None or self._loaded is None or not is_of_chain(self._loaded, held):
            return False
        is_own = held.timeline is not None and held.timeline.id == self._loaded.id
        return not is_own or held.step <= self.origin.step or self._chain[:1] == [self.origin]

    def require_continued_by(self, saved: LocalShards) -> None:
        """Require that an acknowledged step states the timeline that training is on."""
        timeline = saved.timeline
        assert timeline is not None, "it can be read"
        if self.timeline is not None:
            assert timeline.id == self.timeline.id, f"{saved} left its timeline"
            return
        is_new = timeline.id not in self._known
        has_harmed = any(held.harmed for held in self._held)
        if self.origin is None or self._loaded is None:
            assert has_harmed or is_new or timeline == FIRST_TIMELINE, f"{saved} was not begun anew"
            assert timeline.ancestors == ()
            assert not (is_new and self._known) or timeline.number > max(self._known.values())
            return
        chain, origin = self._chain, self.origin
        newer = chain[: chain.index(origin)] if origin in chain else []
        is_left = origin not in chain or any(not held.harmed for held in newer) or self.passed_over
        is_left |= self.is_sure and saved.step < origin.step
        assert is_new or not is_left or origin.harmed, f"{saved} mixes with steps that were left: {chain} from {origin}"
        is_end = chain[:1] == [origin] and self.is_sure and not has_harmed and saved.step > origin.step
        is_end &= not self._goes_on_elsewhere
        assert not (is_new and is_end), f"{saved} begins a timeline at the newest step {origin}"
        if is_new:
            assert timeline.number > max(self._known.values()), f"{saved} is not of the newest timeline"
            fork = Fork(self._loaded.id, origin.step, self._digest)
            # Without those of which no step is there any more.
            there = {held.timeline.id for held in self._model.held if held.timeline is not None}
            older = [each for each in self._loaded.ancestors if each.timeline in there]
            stated = [each for each in timeline.ancestors[1:] if each.timeline in there]
            assert timeline.ancestors[:1] == (fork,) and set(timeline.ancestors[1:]) <= set(self._loaded.ancestors)
            assert stated == older[: len(stated)]
            assert len(stated) == len(older) or len(timeline.ancestors) == ANCESTORS_STATED


def _step_of(key: str) -> int:
    moved = superseded_in(key)
    return moved[0] if moved is not None else int(key.removeprefix("step-")[:12])
