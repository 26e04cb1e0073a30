"""What happens in the life of a run, and what must be there afterwards: said a second time, and otherwise."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar, cast

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.alone import AloneComm
from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.timeline import ANCESTORS_STATED, Timeline
from holdfast.core.format.names import epoch_key, link_name, manifest_key, step_folder
from holdfast.errors import CheckpointError
from holdfast.policies import AllOf, AnyOf, BestN, EveryNth, KeepPolicy, LatestN, SavePolicy, Tagged
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.repository.catalog import exists, manifest_in, read_manifest_bytes
from holdfast.stored.repository.epochs import newest_epoch, put_epoch, read_epoch
from holdfast.stored.repository.publish import packs_named_by
from holdfast.training.coordination.job import Job
from tests.doubles.faults import Action, Faults
from tests.doubles.framework import GlobalTensor, NumpyFramework
from tests.support.tuning import tuned

SETTINGS = tuned(
    Settings(
        chunk_bytes=PAGE_BYTES,
        arena_bytes_max=1 << 20,
        # Only one process is here, and who is gone is seen at once.
        lease_seconds=600.0,
        collect_grace_seconds=0.0,
    ),
    window_bytes=2 * PAGE_BYTES,
    windows_in_flight=2,
    unchanged_bytes_min=1,
)
CLOCK = SystemClock()
SIZES = {"frozen": 2 * PAGE_BYTES + 100, "slow": PAGE_BYTES, "moving": PAGE_BYTES + 1, "small": 7}
METRIC = "loss"
PUBLISHING = ("put_if_absent", "link", "rename_noreplace")
"""Operations of stores and of systems that make something visible that was not there."""

OTHER = 1 << 30
"""Seeds from here down are of what nobody saves."""

Content = tuple[int, ...]
"""What a step holds: a seed for each tensor, and the number of the save, which no other has."""


@functools.lru_cache(4096)
def array_of(name: str, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng((seed, SIZES[name])).integers(0, 256, SIZES[name], dtype=np.uint8)


def state_of(content: Content) -> dict[str, object]:
    state: dict[str, object] = {
        name: GlobalTensor("uint8", array_of(name, seed).copy()) for name, seed in zip(SIZES, content[:-1], strict=True)
    }
    return {**state, "seeds": list(content)}


def is_of(state: Mapping[str, object], content: Content) -> bool:
    """Return whether a state is, to the bit, what was saved."""
    for name, seed in zip(SIZES, content[:-1], strict=True):
        tensor = state[name]
        array = tensor.array if isinstance(tensor, GlobalTensor) else tensor
        if not np.array_equal(cast(NDArray[np.uint8], array), array_of(name, seed)):
            return False
    return list(cast(list[int], state["seeds"])) == list(content)


@dataclass(frozen=True, slots=True)
class Mishap:
    """What happens in the midst of a verb."""

    kind: Literal["none", "error", "crash"]
    """`error`: one operation of the store fails. `crash`: none succeeds from there on, and the process is gone."""

    at: int
    """At which operation; of system calls there are several times as many."""

    after: bool
    """Whether that operation is done all the same, and only its reply lost."""

    def faults(self, action: Action, scale: int) -> Faults:
        if self.kind == "none":
            return Faults()
        return Faults(action, at=self.at * scale, lasting=self.kind == "crash", after=self.after)


NO_MISHAP = Mishap("none", 1, after=False)
Result = TypeVar("Result")


class Switch(Faults):
    """Faults that can be others for every verb."""

    def __init__(self) -> None:
        super().__init__()
        self.now = Faults()

    def around(
        self, name: str, subject: str, call: Callable[[], Result], *, always_done: bool = False, kind: str = ""
    ) -> Result:
        return self.now.around(name, subject, call, always_done=always_done, kind=kind)


@dataclass(eq=False)
class LocalShards:
    """A checkpoint that was committed; several may have one step, on different timelines."""

    step: int

    key: str
    """Where its manifest is: in the folder of the step, or moved away for one of a newer timeline."""

    content: Content
    loss: float | None
    """What it is ranked by; None once a repair could not tell it any more."""

    digest: str | None
    """What tells its manifest from another at the step."""

    files: frozenset[str]
    """Keys of all that it consists of, packs of other steps included."""

    harmed: set[str] = field(default_factory=set)
    """Those of them that were damaged: it may be unreadable since, but never wrong."""

    timeline: Timeline | None = None
    """What its manifest states; None if that cannot be read."""

    @property
    def name(self) -> str:
        """What tells it from others of its step."""
        return f"{self.step}@{str(self.digest)[:16]}"

    @property
    def is_moved(self) -> bool:
        return self.key != manifest_key(self.step)

    def __repr__(self) -> str:
        number = self.timeline.number if self.timeline is not None else "?"
        return f"{self.name} (timeline {number}{', moved' * self.is_moved}{', harmed' * bool(self.harmed)})"


MISHAPS = st.one_of(
    st.just(NO_MISHAP),
    st.builds(Mishap, st.sampled_from(("error", "crash")), st.integers(1, 45), st.booleans()),
)
CHANGES = st.frozensets(st.sampled_from(range(len(SIZES))), max_size=2)
NAMES = st.sampled_from(("best", "paper", "v1"))
LOSSES = st.integers(0, 5).map(float)
CHOICES = st.integers(0, 1 << 16)
"""Chooses one of what there is, round and round."""
_RULES = st.one_of(
    st.builds(LatestN, st.integers(1, 3)),
    st.builds(EveryNth, st.integers(2, 4)),
    st.builds(BestN, st.integers(1, 2), st.just(METRIC), st.sampled_from(("min", "max"))),
    st.just(Tagged()),
)
POLICIES: st.SearchStrategy[KeepPolicy | None] = st.one_of(
    st.none(),
    _RULES,
    st.builds(lambda a, b: AnyOf(a, b), _RULES, _RULES),
    st.builds(lambda a, b: AllOf(a, b), _RULES, _RULES),
)


def manifest_of(store: Store, held: LocalShards) -> Manifest:
    folder = step_folder(held.step)
    return manifest_in(folder, read_manifest_bytes(store, folder, held.key), held.key)


def files_of(manifest: Manifest, held: LocalShards) -> frozenset[str]:
    """Return the keys of all that a step consists of."""
    records = (*manifest.parts, *manifest.indexes, *((manifest.overview,) if manifest.overview else ()))
    own = {f"{step_folder(held.step)}{manifest.attempt}/{record.name}" for record in records}
    return frozenset({held.key, *own, *packs_named_by([manifest])})


def has_link(store: Store, held: LocalShards, pack: str) -> bool:
    """Return whether a step holds a pack of another step by a link: a collection may then remove the original."""
    own = {key.rpartition("/")[0] for key in held.files if key.startswith(step_folder(held.step))}
    return any(exists(store, f"{folder}/{link_name(pack)}") for folder in own)


def is_of_chain(newest: Timeline, held: LocalShards) -> bool:
    """Return whether a checkpoint is what a timeline, or one before it, came along."""
    if held.timeline is None:
        return False
    last = {fork.timeline: fork.step for fork in newest.ancestors} | {newest.id: math.inf}
    return held.step <= last.get(held.timeline.id, -1)


def chain_of(steps: Iterable[LocalShards], begun: Iterable[Timeline] = ()) -> list[LocalShards]:
    """Return what a resume may take, the newest first.

    Args:
        steps: What is there.
        begun: Timelines that records state.
    """
    stated = [held for held in steps if held.timeline is not None]
    timelines = [*begun, *(held.timeline for held in stated if held.timeline is not None)]
    if not timelines:
        return []
    newest = whole(max(timelines, key=lambda timeline: (timeline.number, timeline.id)), timelines)
    order = [newest.id, *(fork.timeline for fork in newest.ancestors)]
    chain = [held for held in stated if is_of_chain(newest, held)]
    return sorted(chain, key=lambda held: (order.index(cast(Timeline, held.timeline).id), -held.step))


def whole(timeline: Timeline, others: Iterable[Timeline]) -> Timeline:
    """Return a timeline with the ancestors that its manifests leave out: others state them."""
    stated = {other.id: other.ancestors for other in others}
    ancestors = list(timeline.ancestors)
    while len(ancestors) >= ANCESTORS_STATED and (more := stated.get(ancestors[-1].timeline)):
        ancestors += more
    return replace(timeline, ancestors=tuple(ancestors))


def kept_by(
    policy: KeepPolicy | SavePolicy | None,
    steps: Collection[LocalShards],
    tagged: set[LocalShards],
    begun: Collection[Timeline] = (),
) -> set[LocalShards]:
    """Return what a policy keeps, said a second time and otherwise."""
    if policy is None:
        return set(steps)
    if isinstance(policy, AnyOf | AllOf):
        each = [kept_by(part, steps, tagged, begun) for part in policy.policies]
        return set.union(*each) if isinstance(policy, AnyOf) else set.intersection(*each)
    if isinstance(policy, LatestN):
        return set(chain_of(steps, begun)[: policy.n])
    if isinstance(policy, EveryNth):
        recent = set(chain_of(steps, begun)).union(*last_left(steps, begun))
        return {held for held in recent if held.step % policy.n == 0}
    if isinstance(policy, BestN):
        sign = 1 if policy.mode == "min" else -1
        ranked = sorted(
            (held for held in steps if held.loss is not None),
            key=lambda held: (sign * cast(float, held.loss), -held.step),
        )
        return set(ranked[: policy.n])
    assert isinstance(policy, Tagged)
    return tagged & set(steps)


def last_left(steps: Iterable[LocalShards], begun: Iterable[Timeline] = ()) -> list[list[LocalShards]]:
    """Return the steps of each of the last three timelines before the newest one."""
    timelines = {held.timeline for held in steps if held.timeline is not None}
    newest = max((*timelines, *begun), key=lambda timeline: (timeline.number, timeline.id), default=None)
    numbers = sorted(timeline.number for timeline in timelines if timeline != newest)[-3:]
    return [[held for held in steps if held.timeline and held.timeline.number == number] for number in numbers]


def siblings(held: LocalShards, steps: Iterable[LocalShards]) -> list[LocalShards]:
    """Return those of the same timeline."""
    assert held.timeline is not None, "of what can be read"
    return [other for other in steps if other.timeline is not None and other.timeline.id == held.timeline.id]


def run_on(store: Store, settings: Settings = SETTINGS, *, starts_over: bool = False) -> CheckpointManager:
    """Return a manager of a process alone."""
    run = CheckpointManager.over(store, Job(AloneComm(), CLOCK, settings, NumpyFramework(0)))
    run._position.starts_over = starts_over
    run._parts.collecting = None  # What was discarded goes by a verb of its own, not behind the others.
    return run


def lived_by_another(store: Store, step: int, content: Content, loads: str | None) -> CheckpointError | None:
    """Have another process load a step, or resume, save a step and end; return what that save met."""
    other = run_on(store)
    try:
        with suppress(CheckpointError):
            other.load(state_of(content), loads)
        other.save(step, state_of(content), metrics={METRIC: 0.0}).wait()
    except CheckpointError as error:
        return error
    finally:
        other.close()
    return None


def bury(store: Store) -> None:
    """Have the process that holds the newest epoch be one that is gone: ours lives on, where a crash ends it."""
    number = newest_epoch(store)
    record = read_epoch(store, number) if number else None
    if record is not None:
        gone = replace(record, holder=replace(record.holder, started=record.holder.started + 1))
        store.delete([epoch_key(number)])
        put_epoch(store, gone)


def is_seen_damaged(store: Store, held: LocalShards) -> bool:
    """Return whether reading all of a checkpoint back finds damage."""
    moved = held.key if held.is_moved else None
    location = CheckpointLocation(store, step_folder(held.step), held.step, root=store, moved_manifest=moved)
    try:
        return bool(list(Checkpoint(location, SETTINGS, lambda array, _: array).verify()))
    except CheckpointError:
        return True
