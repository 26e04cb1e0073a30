"""Lets the nodes of peers protect each step that is near: each node makes parity of the packs of its group.

States of a step; each rank has a thread, and those of one node that leads it ask the agent of the node:

    near       -> protecting  rank 0 takes the newest step, and names the step by the next key of the key-value store
    near       -> skipped     rank 0 has taken a newer step
    protecting -> replicated  each node has made its parity: the last one sets a key that all ranks await
    protecting -> failed      an agent could not, or `protect_timeout_seconds` have passed

Training waits for nothing here. The newest replicated step is pinned, so that no collection takes the step before a
newer one is replicated.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from holdfast.base.interrupts import GUARD, start_thread
from holdfast.base.ports.temporary import TemporaryError
from holdfast.base.types.events import StepProtected
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.removal import StepAndDigest
from holdfast.core.format.names import rank_of_pack
from holdfast.errors import CheckpointError, UnavailableError, first_three
from holdfast.stored.peers.parity_files import attempt_of
from holdfast.stored.peers.safety import pack_keys
from holdfast.training.runs.removal.pins import StepPin
from holdfast.training.runs.run_parts import RunParts
from holdfast.training.runs.step_request import StepRequest
from holdfast.training.runs.tiers.drain_facts import manifest_in
from holdfast.training.saving.handle import SaveHandle
from holdfast.training.telemetry.dispatcher import EventDispatcher

logger = logging.getLogger(__name__)

_TOLD_MAX = 1024
_POLL_SECONDS, _PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX = 1.0, 0.005, 0.2
_END_SECONDS, _VERDICT_SECONDS = 2.0, 5.0
_KEYS_KEPT = 16
"""Steps whose keys stay in the key-value store for ranks that are late."""

_NAMED_SECONDS = 30.0
"""Longest wait for rank 0 to name a step that is near."""

_END = b"end"


@dataclass(frozen=True, slots=True)
class PeerGroup:
    """How the nodes of a job protect each other, as one rank sees it."""

    own: str
    """The node of this rank."""

    node_of_rank: tuple[str, ...]
    """The node of each rank."""

    group_of: Mapping[str, tuple[str, ...]]
    """By node, the nodes of its group, in the order that all of them use."""

    node_share: float
    """The part of the bytes of a step that each node takes, with parity."""

    timeout_seconds: float
    """Longest time for one step."""

    protect: Callable[[str, dict[str, dict[str, int]], float], None] | None
    """Has the agent of the own node make parity of an attempt: takes the prefix, the packs of each node of the group by
    key, and seconds. None on ranks that do not lead their node."""

    require_agent: Callable[[], None] | None
    """Starts the agent of the own node again if it is dead. None on ranks that do not lead their node."""

    release: Callable[[], None]
    """Gives up the lock of the job on the folder of the node."""

    note_replicated: Callable[[], None]
    """Told of each replicated step: nodes that are no part of the job need not be asked any more."""

    @property
    def protects(self) -> bool:
        """Whether the own node has others that protect it: not if the job has one node."""
        return len(self.group_of[self.own]) > 1

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return len(self.group_of)

    def packs_of(self, manifest: Manifest) -> dict[str, dict[str, dict[str, int]]]:
        """Return the packs of a step and of the older steps that it refers to: by attempt, node of the group, and key.

        The ranks of the job have written all of them: the first step of a job refers to no older one.
        """
        attempts: dict[str, dict[str, dict[str, int]]] = {}
        for pack, key in zip(manifest.packs, pack_keys(manifest), strict=True):
            packs = attempts.setdefault(attempt_of(key) or "", {name: {} for name in self.group_of[self.own]})
            node = self.node_of_rank[rank_of_pack(pack.name)]
            if node in packs:
                packs[node][key] = pack.bytes
        return attempts


class Protecting:
    """The thread of one rank that has steps protected."""

    def __init__(
        self, group: PeerGroup, parts: RunParts, dispatcher: EventDispatcher, may_forget: Callable[[], bool]
    ) -> None:
        """Start no thread yet.

        Args:
            group: How the nodes protect each other.
            parts: The parts of saves into the store of all nodes.
            dispatcher: Passes events to observers.
            may_forget: Whether no step of an earlier job waits for the drain.
        """
        self._dispatcher, self._may_forget = dispatcher, may_forget
        self._job, self._group, self._near, self._parts = parts.job, group, parts.store, parts
        self._is_first = self._job.comm.rank == 0
        self._wake = threading.Event()  # Set under GUARD, as that of the drain.
        self._is_closing = self._is_given_up = False
        self._thread: threading.Thread | None = None
        # Guarded by GUARD: the commit thread adds, the thread here takes.
        self._near_steps: list[StepAndDigest] = []
        """Near, and not named by rank 0 yet."""
        self._named_early: list[StepAndDigest] = []
        """Named by rank 0 before this rank has taken note of them."""
        self._handles: list[tuple[StepAndDigest, SaveHandle]] = []
        self._ends: dict[StepAndDigest, CheckpointError | None] = {}
        self._pinned: dict[StepAndDigest, StepPin] = {}
        """On rank 0: the newest replicated step, the newest one that waits, and the one that is protected now."""
        self._taken: StepAndDigest | None = None
        """On rank 0: the step that is protected now, or was last."""
        self._older: list[StepAndDigest] = []
        """Those that were pinned when the step was taken that is protected now."""
        self._number = 0
        """Number of the next step that rank 0 names."""

    def note_commit(self, step: int, digest: str) -> None:
        """Take note of a step that is near. On the commit thread of each rank."""
        with GUARD:
            if (step, digest) in self._named_early:
                self._named_early.remove((step, digest))
            else:
                self._near_steps.append((step, digest))
            passed = [name for name in self._near_steps[:-1] if name != self._taken]
            self._wake.set()
        self._pin((step, digest))
        for name in passed:  # An outage may last, and no step but the newest one will be protected after it.
            self._unpin(name)

    def note_loaded(self, step: int, digest: str) -> None:
        """Keep a loaded step until a newer one is replicated: the nodes that protected the step may be lost."""
        self._pin((step, digest))

    def watch(self, handle: SaveHandle, request: StepRequest) -> None:
        """End the moment `replicated` of a handle once the step of its request is protected, or is not."""
        handle.near.add_done_callback(lambda _: None if request.saved is None else self._watch(request.saved, handle))

    def close(self, may_wait: Callable[[], bool]) -> None:
        """Protect what waits, as long as the caller may wait, and end the thread."""
        clock, thread = self._job.clock, self._thread
        with GUARD:
            self._is_closing = True
            self._wake.set()
        deadline = clock.monotonic_seconds() + self._group.timeout_seconds
        while thread is not None and thread.is_alive() and clock.monotonic_seconds() < deadline and may_wait():
            thread.join(_PAUSE_SECONDS_MAX)
        self._is_given_up = True
        if thread is not None:
            thread.join(_END_SECONDS)  # A thread that waits for other ranks must not outlive Python.
        with GUARD:
            left, self._handles = self._handles, []
        for name, handle in left:
            handle.end_unreplicated(_unprotected(name[0], "the manager was closed"))

    def _watch(self, name: StepAndDigest, handle: SaveHandle) -> None:
        with GUARD:
            if name not in self._ends:
                self._handles.append((name, handle))
                return
        _end_handle(handle, self._ends[name])

    def _pin(self, name: StepAndDigest) -> None:
        if self._is_first and name not in self._pinned:
            pin = self._pinned[name] = StepPin(name[0], is_drain=True)
            self._parts.pins.pin(pin, None)

    def _unpin(self, name: StepAndDigest) -> None:
        pin = self._pinned.pop(name, None)
        if pin is not None:
            self._parts.pins.unpin(pin, is_committed=True)

    def start(self) -> None:
        """Start the thread, which keeps the agent of the node alive."""
        with GUARD:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="holdfast-protect", daemon=True)
                start_thread(self._thread)

    # ----------------------------------------------------------------------------------------- on the thread

    def _work(self) -> None:
        while not self._is_given_up:
            try:
                names = self._next_names()
            except Exception as error:  # noqa: BLE001 - the same number is asked for again
                self._job.warn_once(self._near.url, f"steps are not protected: {error}")
                if self._is_closing:
                    return
                self._job.clock.sleep(_POLL_SECONDS)
                continue
            if names is None:
                return
            if names:
                self._protect(names)

    def _protect(self, names: list[StepAndDigest]) -> None:
        """Have the last of some steps protected, and end all of them. Each number is used once, whatever happens."""
        start, failure = self._job.clock.monotonic_seconds(), None
        try:
            failure = self._protected(names[-1])
        except Exception as error:  # noqa: BLE001 - the next step may go well
            failure = _unprotected(names[-1][0], f"{type(error).__name__}: {error}")
        self._number += 1
        self._end(names, failure)
        self._tell(names[-1][0], failure, self._job.clock.monotonic_seconds() - start)
        try:
            if failure is None and self._may_forget():
                self._group.note_replicated()
            self._parts.collect_soon()  # The collection after the commit found the older step pinned.
        except Exception as error:  # noqa: BLE001 - as after the next step
            self._job.warn_once(self._near.url, f"after a step was protected: {error}")

    def _next_names(self) -> list[StepAndDigest] | None:
        """Return steps of which the last is protected next, and the others are skipped; None at the end."""
        self._require_agent()
        job, key = self._job, self._job.key("protect", self._number)
        if not self._near_steps:
            self._wake.wait(_POLL_SECONDS)
        with GUARD:
            self._wake.clear()
            names, self._older = [*self._near_steps], list(self._pinned)
            self._taken = names[-1] if names else self._taken
        if not names and not self._is_closing:
            return []
        value: bytes | None = json.dumps(names).encode() if names else _END
        if job.comm.world_size > 1 and self._is_first:
            # The first text counts: other ranks may have read it although an earlier call has failed.
            seconds = job.settings.commit_timeout_seconds
            value = job.key_value_store.compare_set(key, b"", value or _END, seconds)
            self._forget(self._number - _KEYS_KEPT)
        elif job.comm.world_size > 1:
            # Rank 0 names each of these steps.
            value = self._awaited(key, _NAMED_SECONDS if names else _POLL_SECONDS)
            if value is None:
                return None if self._is_closing else []
        if value == _END:
            return None
        named = [(step, digest) for step, digest in json.loads(value or b"[]")]
        with GUARD:
            self._named_early += [each for each in named if each not in self._near_steps]
            self._near_steps = [each for each in self._near_steps if each not in named]
        return named

    def _awaited(self, key: str, seconds: float) -> bytes | None:
        """Return the value of a key; None if nothing came in time, or if the close waits no longer.

        The thread sleeps between looks: c10d prints a warning for each wait that runs out, and a wait in c10d cannot be
        ended.
        """
        clock, store = self._job.clock, self._job.key_value_store
        deadline, pause = clock.monotonic_seconds() + seconds, _PAUSE_SECONDS_MIN
        while not store.present(key):
            if self._is_given_up or clock.monotonic_seconds() > deadline:
                return None
            clock.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS_MAX)
        (value,) = store.get_many([key], _POLL_SECONDS)
        return value

    def _require_agent(self) -> None:
        if self._group.require_agent is not None:
            try:
                self._group.require_agent()
            except OSError as error:
                self._job.warn_once(self._near.url, f"no agent could be started: {error}")

    def _forget(self, number: int) -> None:
        if number >= 0:
            names = [self._job.key("protect", number), self._job.key("protected", number)]
            nodes = [self._job.key("protected", number, node) for node in self._group.group_of]
            with suppress(CheckpointError, TimeoutError):
                self._job.key_value_store.delete([*names, f"{names[1]}/count", *nodes])

    def _protected(self, name: StepAndDigest) -> CheckpointError | None:
        """Have a step protected; return why it is not, None if each node has its parity."""
        job, group = self._job, self._group
        done, store, seconds = job.key("protected", self._number), job.key_value_store, group.timeout_seconds
        deadline = job.clock.monotonic_seconds() + seconds
        if group.protect is not None:
            try:
                self._ask(name, deadline)
                store.set(f"{done}/{group.own}", b"1", seconds)
                if store.add(f"{done}/count", 1, seconds) == group.nodes:
                    store.set(done, b"+", seconds)
            except CheckpointError as error:
                store.compare_set(done, b"", f"node {group.own}: {error}".encode("ascii", "replace"), seconds)
        answer = self._awaited(done, job.seconds_left(deadline))
        if answer is None and self._is_first:
            lacking = [node for node in group.group_of if not store.present(f"{done}/{node}")]
            text = f"nodes [{first_three(lacking)}] have not made their parity within {seconds:g} s"
            answer = store.compare_set(done, b"", text.encode("ascii", "replace"), seconds)
        elif answer is None:
            answer = self._awaited(done, _VERDICT_SECONDS) or f"no word of rank 0 within {seconds:g} s".encode()
        return None if answer == b"+" else _unprotected(name[0], answer.decode())

    def _ask(self, name: StepAndDigest, deadline: float) -> None:
        """Have the agent of the own node make its parity; again until the deadline, as after an agent was killed."""
        manifest = manifest_in(self._near, name)
        if manifest is None:
            raise UnavailableError(f"step {name[0]}: the near tier has lost the manifest")
        assert self._group.protect is not None, "asked on the rank that leads the node"
        for attempt, packs in self._group.packs_of(manifest).items():
            while True:
                try:
                    self._group.protect(attempt, packs, self._job.seconds_left(deadline))
                    break
                except TemporaryError:
                    if self._is_given_up or self._job.clock.monotonic_seconds() + _PAUSE_SECONDS_MAX > deadline:
                        raise
                    self._require_agent()
                    self._job.clock.sleep(_PAUSE_SECONDS_MAX)

    def _end(self, names: list[StepAndDigest], error: CheckpointError | None) -> None:
        newest = names[-1]
        why = f"step {newest[0]} has come, and is protected first"
        ends: dict[StepAndDigest, CheckpointError | None] = {name: _unprotected(name[0], why) for name in names[:-1]}
        ends[newest] = error
        with GUARD:
            self._ends |= ends
            while len(self._ends) > _TOLD_MAX:
                del self._ends[next(iter(self._ends))]
            ended = [(name, handle) for name, handle in self._handles if name in ends]
            self._handles = [each for each in self._handles if each[0] not in ends]
        for name in ends if error is not None else self._older:
            if error is not None or name != newest:
                self._unpin(name)
        for name, handle in ended:
            _end_handle(handle, ends[name])

    def _tell(self, step: int, error: CheckpointError | None, seconds: float) -> None:
        if not self._is_first:
            return
        if error is None:
            logger.info("step %d is protected after %.2f s: any one node of a group may go", step, seconds)
        else:
            logger.warning("%s: %s", self._near.url, error)
        why, now = "" if error is None else str(error), self._job.clock.unix_seconds()
        self._dispatcher.dispatch(StepProtected(step, self._near.url, 0, seconds, why, now))


def _end_handle(handle: SaveHandle, error: CheckpointError | None) -> None:
    if error is None:
        handle.reach_replicated()
    else:
        handle.end_unreplicated(error)


def _unprotected(step: int, why: str) -> UnavailableError:
    return UnavailableError(
        f"step {step} is near, and not protected: {why}. Expected parity on each node of each group. The loss of a "
        "node would lose the step; an older protected step stays"
    )
