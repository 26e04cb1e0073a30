"""What happens in the life of a run, and what must be there afterwards: said a second time, and otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar, cast

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.location import CheckpointLocation
from holdfast.checkpoint_manager import CheckpointManager
from holdfast.clock import SystemClock
from holdfast.coordination.job import Job
from holdfast.errors import CheckpointError
from holdfast.format.names import epoch_key, manifest_key, step_folder
from holdfast.frameworks.alone import AloneComm
from holdfast.policies import AllOf, AnyOf, BestN, EveryNth, KeepPolicy, LatestN, SavePolicy, Tagged
from holdfast.ports.store import Store
from holdfast.repository.catalog import read_manifest
from holdfast.repository.epochs import newest_epoch, put_epoch, read_epoch
from holdfast.repository.publish import packs_named_by
from holdfast.repository.quarantine import is_quarantined
from holdfast.repository.timelines import committed_steps
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.testing.faults import Action, Faults
from holdfast.testing.framework import GlobalTensor, NumpyFramework
from tests.going_on import goes_on
from tests.tuned import tuned

SETTINGS = tuned(
    Settings(
        chunk_bytes=PAGE_BYTES,
        window_bytes=2 * PAGE_BYTES,
        windows_in_flight=2,
        arena_bytes_max=1 << 20,
        # Only one process is here, and who is gone is seen at once.
        lease_seconds=600.0,
        collect_grace_seconds=0.0,
    ),
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
"""What a step holds: a seed for each tensor."""


@functools.lru_cache(4096)
def array_of(name: str, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng((seed, SIZES[name])).integers(0, 256, SIZES[name], dtype=np.uint8)


def state_of(content: Content) -> dict[str, object]:
    state: dict[str, object] = {
        name: GlobalTensor("uint8", array_of(name, seed).copy()) for name, seed in zip(SIZES, content, strict=True)
    }
    return {**state, "seeds": list(content)}


def is_of(state: Mapping[str, object], content: Content) -> bool:
    """Return whether a state is, to the bit, what was saved."""
    for name, seed in zip(SIZES, content, strict=True):
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

    def around(self, name: str, subject: str, call: Callable[[], Result], *, always_done: bool = False) -> Result:
        return self.now.around(name, subject, call, always_done=always_done)


@dataclass
class Held:
    """A step that was committed."""

    content: Content
    loss: float | None
    """What it is ranked by; None once a repair could not tell it any more."""

    digest: str | None
    """What tells its manifest from another at the step."""

    files: frozenset[str]
    """Keys of all that it consists of, packs of other steps included."""

    harmed: set[str] = field(default_factory=set)
    """Those of them that were damaged: it may be unreadable since, but never wrong."""


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
POLICIES: st.SearchStrategy[KeepPolicy] = st.one_of(
    _RULES,
    st.builds(lambda a, b: AnyOf(a, b), _RULES, _RULES),
    st.builds(lambda a, b: AllOf(a, b), _RULES, _RULES),
)


def files_of(store: Store, step: int) -> frozenset[str]:
    """Return the keys of all that a step consists of."""
    manifest = read_manifest(store, step_folder(step))
    records = (*manifest.parts, *manifest.indexes, *((manifest.overview,) if manifest.overview else ()))
    own = {f"{step_folder(step)}{manifest.attempt}/{record.name}" for record in records}
    return frozenset({manifest_key(step), *own, *packs_named_by([manifest])})


def loss_of(store: Store, step: int) -> float | None:
    """Return what a step says that it is ranked by."""
    return read_manifest(store, step_folder(step)).metrics.get(METRIC)


def kept_by(policy: KeepPolicy | SavePolicy, steps: Mapping[int, Held], tagged: set[int]) -> set[int]:
    """Return what a policy keeps, said a second time and otherwise."""
    if isinstance(policy, AnyOf | AllOf):
        each = [kept_by(part, steps, tagged) for part in policy.policies]
        return set.union(*each) if isinstance(policy, AnyOf) else set.intersection(*each)
    if isinstance(policy, LatestN):
        return {step for step in steps if sum(other > step for other in steps) < policy.n}
    if isinstance(policy, EveryNth):
        return {step for step in steps if step % policy.n == 0}
    if isinstance(policy, BestN):
        sign = 1 if policy.mode == "min" else -1

        ranked = sorted((sign * each.loss, -step) for step, each in steps.items() if each.loss is not None)
        return {-step for _, step in ranked[: policy.n]}
    assert isinstance(policy, Tagged)
    return tagged & set(steps)


def run_on(store: Store, settings: Settings = SETTINGS) -> CheckpointManager:
    """Return a manager of a process alone."""
    return goes_on(CheckpointManager.over(store, Job(AloneComm(), CLOCK, settings, NumpyFramework(0))))


def lived_by_another(store: Store, step: int, content: Content, loads: int | None) -> CheckpointError | None:
    """Have another process resume, save a step and end; return what that save met."""
    other = run_on(store)
    try:
        state = state_of(content)
        with suppress(CheckpointError):
            other.load(state, loads)
            if loads is not None and is_older(store, loads):
                other.load(state)
        other.save(step, state_of(content), metrics={METRIC: 0.0}).wait()
    except CheckpointError as error:
        return error
    finally:
        other.close()
    return None


def is_older(store: Store, step: int) -> bool:
    """Return whether a resume would rather take another step."""
    return any(each > step and not is_quarantined(store, each) for each in committed_steps(store))


def bury(store: Store) -> None:
    """Have the process that holds the newest epoch be one that is gone: ours lives on, where a crash ends it."""
    number = newest_epoch(store)
    record = read_epoch(store, number) if number else None
    if record is not None:
        gone = replace(record, holder=replace(record.holder, started=record.holder.started + 1))
        store.delete([epoch_key(number)])
        put_epoch(store, gone)


def is_seen_damaged(store: Store, step: int) -> bool:
    """Return whether reading all of a step back finds damage."""
    location = CheckpointLocation(store, step_folder(step), step, root=store)
    try:
        return bool(list(Checkpoint(location, SETTINGS, lambda array, _: array).verify()))
    except CheckpointError:
        return True
