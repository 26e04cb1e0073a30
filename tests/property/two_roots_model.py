"""What is in the two places of a run, and what must be: told of acknowledgements, for a state machine.

The model knows every step that was acknowledged, the bytes of its files, and what may have become of it. Where those
bytes are still whole it looks up itself, beneath the code that it judges.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, cast

from hypothesis.stateful import RuleBasedStateMachine

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.ports.store import Store
from holdfast.base.types.timeline import Timeline
from holdfast.core.format.names import RUN_FILE, link_name, manifest_key, manifest_keys
from holdfast.errors import UnavailableError
from holdfast.policies import AnyOf, KeepPolicy, LatestN, Tagged
from holdfast.stored.repository.catalog import exists
from holdfast.stored.repository.epochs import current_fence
from holdfast.stored.repository.publish import get_or_none
from holdfast.stored.repository.quarantine import quarantined
from holdfast.stored.repository.tags import read_tags
from holdfast.stored.repository.two_roots import TwoRoots
from tests.doubles.faults import Faults, raise_error
from tests.property.life import (
    SIZES,
    Content,
    LocalShards,
    Switch,
    chain_of,
    is_of,
    kept_by,
)

LOGGER = logging.getLogger("holdfast")
BYTES_MAX = 1 << 30
Place = Literal["near", "root"]


@dataclass(eq=False, repr=False)
class Saved(LocalShards):
    """A step that was acknowledged."""

    is_due: bool = True
    """Whether the root gets it from a drain: not once a drain has skipped it."""

    counts: bool = True
    """Whether it counts: False once a job took an epoch that did not see it."""

    is_gone: bool = False
    """Whether a person removed it."""

    manifest: bytes = b""
    truth: Mapping[str, bytes] = field(default_factory=dict)
    """The bytes of its files, by key, without the manifest."""


@dataclass
class Folder:
    """What a place holds that is away."""

    files: Mapping[str, bytes]
    expected: set[Saved]


def link_of(each: Saved, key: str) -> str:
    """Return the key that the link to a pack has in the folder of a step."""
    own = next(file for file in each.truth if "/index-" in file)
    return f"{own.rpartition('/')[0]}/{link_name(key)}" if key.endswith(".safetensors") else key


class TwoPlaces(RuleBasedStateMachine):
    """One run with a near tier, and what must be there."""

    def __init__(self) -> None:
        super().__init__()
        # A campaign would keep every record: each fault is told several times.
        self.level = LOGGER.level
        LOGGER.setLevel(logging.CRITICAL)
        self.name = uuid.uuid4().hex
        self.stores: dict[Place, Store] = {
            "near": MemoryStore(f"{self.name}-near"),
            "root": MemoryStore(f"{self.name}-root"),
        }
        self.switch = Switch()
        self.run: CheckpointManager | None = None
        self.zombie: CheckpointManager | None = None
        self.has_near = True
        """Whether the manager has the near tier."""
        self.saved: list[Saved] = []
        self.begun: list[Timeline] = []
        self.expected: dict[Place, set[Saved]] = {"near": set(), "root": set()}
        """What must be whole in a place: it was stored there, and nothing may have taken it."""
        self.away: list[Folder] = []
        self.tags: dict[str, Saved] = {}
        self.origin: Saved | None = None
        self.at = 0
        self.content: Content = (0,) * (len(SIZES) + 1)
        self.saves = 0
        self.keep: KeepPolicy | None = None
        self.near_keep: KeepPolicy = AnyOf(LatestN(1), Tagged())
        self.discarded: set[Saved] = set()
        """Steps that a load discarded: a collection may take them."""
        self.torn: set[int] = set()
        self.unnoticed: set[Saved] = set()
        """Steps whose manifest at the root was lost since the job that runs has begun."""
        """Steps of which a manifest was damaged: from then on any manifest of the step may count."""

    # ------------------------------------------------------------------------------------------- what is where

    def view(self) -> Store:
        """Return the run as this host sees it, or as its job does."""
        is_near = self.run is None or self.has_near
        near = self.stores["near"]
        return TwoRoots(near, self.stores["root"]) if is_near and exists(near, RUN_FILE) else self.stores["root"]

    def visible(self) -> tuple[Place, ...]:
        return ("near", "root") if self.run is None or self.has_near else ("root",)

    def is_at(self, each: Saved, place: Place, key: str) -> bool:
        return get_or_none(self.stores[place], key, BYTES_MAX) == each.manifest

    def places(self, each: Saved) -> list[Place]:
        """Return the places that hold the manifest of a step."""
        keys = manifest_keys(each.step, str(each.digest))
        return [place for place in self.visible() if any(self.is_at(each, place, key) for key in keys)]

    def is_whole(self, each: Saved, place: Place) -> bool:
        # A link is read where the pack is gone.
        found = (
            (self.get(place, key) or self.get(place, link_of(each, key)), data) for key, data in each.truth.items()
        )
        return place in self.places_of_all(each) and all(stored == data for stored, data in found)

    def get(self, place: Place, key: str) -> bytes | None:
        return get_or_none(self.stores[place], key, BYTES_MAX)

    def places_of_all(self, each: Saved) -> list[Place]:
        keys = manifest_keys(each.step, str(each.digest))
        both: tuple[Place, ...] = ("near", "root")
        return [place for place in both if any(self.is_at(each, place, key) for key in keys)]

    def trusted(self, each: Saved) -> list[Place]:
        identity = str(each.digest)[:16]
        known = {place: quarantined(self.stores[place]).get(each.step, {}) for place in self.visible()}
        return [place for place in self.places(each) if identity not in known[place]]

    def good_places(self, each: Saved) -> list[Place]:
        return [place for place in self.trusted(each) if self.is_whole(each, place)]

    def in_place(self, place: Place) -> list[Saved]:
        return [each for each in self.saved if place in self.places_of_all(each)]

    def has_other_at_root(self, each: Saved) -> bool:
        """Return whether the root has the number of a step on a newer timeline: the step is not drained over it."""
        others = [other for other in self.saved if other.step == each.step and other is not each]
        return any(self.is_at(other, "root", manifest_key(each.step)) for other in others)

    def harmed(self) -> list[Saved]:
        return [
            each for each in self.saved if any(not self.is_whole(each, place) for place in self.places_of_all(each))
        ]

    def order(self) -> list[Saved]:
        """Return what a resume may take, the newest first."""
        there = [each for each in self.saved if each.counts and not each.is_gone and self.places(each)]
        return cast(list[Saved], chain_of(there, self.begun))

    def best(self) -> Saved | None:
        return next((each for each in self.order() if self.good_places(each)), None)

    def readable(self) -> list[Saved]:
        """Return the steps that a load by name must give."""
        there = [each for each in self.saved if each.counts and not each.is_gone and each.step not in self.torn]
        return [each for each in there if any(self.is_whole(each, place) for place in self.places(each))]

    def kept(self, policy: KeepPolicy | None, here: list[Saved]) -> set[Saved]:
        tagged: set[LocalShards] = {*self.tags.values()}
        known = {place: quarantined(self.stores[place]) for place in self.stores}
        here = [each for each in here if str(each.digest)[:16] not in known["near"].get(each.step, {})] or here
        return cast(set[Saved], kept_by(policy, here, tagged, self.begun)) | set(self.chain_here(here)[:1])

    def chain_here(self, here: list[Saved]) -> list[Saved]:
        return cast(list[Saved], chain_of(here, self.begun))

    def kept_at_root(self, here: list[Saved]) -> set[Saved]:
        counting = [each for each in here if each.counts and not each.is_gone]
        records = quarantined(self.stores["root"])
        counting = [each for each in counting if str(each.digest)[:16] not in records.get(each.step, {})]
        if not counting:
            return set()
        tagged: set[LocalShards] = {*self.tags.values()}
        kept = cast(set[Saved], kept_by(self.keep, counting, tagged, self.begun))
        return kept | set(self.chain_here(counting)[:1]) | (set(counting) & cast(set[Saved], tagged))

    def note_places(self) -> None:
        """Expect from now on what is whole in a place by now."""
        for place in self.stores:
            for each in self.saved:
                if each.counts and not each.is_gone and each not in self.discarded and self.is_whole(each, place):
                    self.expected[place].add(each)
        self.forget_distrusted()

    def forget_distrusted(self) -> None:
        """Expect a step no more in a place that has it under quarantine: who saves the step again moves it there."""
        for place, expected in self.expected.items():
            records = quarantined(self.stores[place])
            expected -= {each for each in expected if str(each.digest)[:16] in records.get(each.step, {})}

    def may_be_gone(self, each: Saved) -> None:
        self.discarded.add(each)
        for expected in self.expected.values():
            expected.discard(each)
        for folder in self.away:
            folder.expected.discard(each)

    def forget(self, each: Saved, place: Place | None = None) -> None:
        for name, expected in self.expected.items():
            if place in (None, name):
                expected.discard(each)
        if place is None:
            for folder in self.away:
                folder.expected.discard(each)
            for tag in [tag for tag, tagged in self.tags.items() if tagged is each]:
                del self.tags[tag]

    def look_at_tags(self) -> None:
        """After a save that failed a tag may have been put or not."""
        for name, tag in read_tags(self.view()).whole.items():
            found = next((each for each in self.saved if (each.step, each.digest) == (tag.step, tag.digest)), None)
            assert found is not None, f"tag {name} is of a step that nobody saved"
            if found is self.saved[-1]:
                self.tags[name] = found

    # ------------------------------------------------------------------------------------------- how it is done

    def go_on_from(self, loaded: Saved) -> None:
        self.origin, self.at, self.content = loaded, loaded.step, loaded.content

    def of_state(self, step: int, state: Mapping[str, object]) -> Saved:
        found = [each for each in self.saved if each.step == step and is_of(state, each.content)]
        assert found, f"step {step} reads as nothing that was saved"
        return found[0]

    def next_content(self, changes: frozenset[int]) -> Content:
        self.saves += 1
        seeds = (self.saves if at in changes else seed for at, seed in enumerate(self.content[:-1]))
        self.content = (*seeds, self.saves)
        return self.content

    @contextmanager
    def failing(self, cut: int | None) -> Iterator[None]:
        if cut is not None:
            self.switch.now = Faults(raise_error(UnavailableError), at=cut, lasting=True)
        try:
            yield
        finally:
            self.switch.now = Faults()

    @contextmanager
    def epochs(self) -> Iterator[None]:
        """Take note of what counts no more, if somebody takes an epoch."""
        before, seen = current_fence(self.stores["root"]).epoch, [each for each in self.saved if self.places(each)]
        known = list(self.saved)
        try:
            yield
        finally:
            if current_fence(self.stores["root"]).epoch > before:
                for each in known:
                    if each not in seen:
                        each.counts = False
                        self.forget_counting(each)

    def forget_counting(self, each: Saved) -> None:
        for expected in (*self.expected.values(), *(folder.expected for folder in self.away)):
            expected.discard(each)

    def take_away(self) -> Folder:
        store = self.stores["near"]
        files = {entry.key: store.get(entry.key, BYTES_MAX) for entry in store.list()}
        store.delete(files)
        folder, self.expected["near"] = Folder(files, self.expected["near"]), set()
        return folder

    def put_back(self, folder: Folder) -> None:
        for key, data in folder.files.items():
            self.stores["near"].put(key, data)
        self.expected["near"] = folder.expected

    @contextmanager
    def near_away(self, is_away: bool) -> Iterator[None]:
        if not is_away:
            yield
            return
        self.away.append(self.take_away())
        try:
            yield
        finally:
            self.put_back(self.away.pop())
