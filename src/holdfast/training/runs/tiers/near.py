"""The near tier of one manager: its place, its schedule, the parts of its saves, and its drain."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from holdfast.base.ports.store import Store
from holdfast.base.types.reports import SaveReport
from holdfast.errors import CheckpointError, ConflictError, InvalidError, first_three, shown_bytes
from holdfast.policies import PEERS_SCHEME, AnyOf, KeepPolicy, LatestN, SavePolicy, Tagged
from holdfast.settings import MIB
from holdfast.stored.repository.catalog import read_run_id
from holdfast.stored.repository.near_tier import empty_near, read_near, require_same_run
from holdfast.stored.repository.two_roots import TwoRoots
from holdfast.training.coordination.job import Job, error_text, raise_together
from holdfast.training.loading.statuses import gather_errors
from holdfast.training.runs.run_parts import RunParts, RunState
from holdfast.training.runs.step_request import StepRequest
from holdfast.training.runs.tiers.agent import AgentStarter
from holdfast.training.runs.tiers.agent_files import forget_job, has_other_job, note_job
from holdfast.training.runs.tiers.drain import Drain
from holdfast.training.runs.tiers.drain_facts import manifest_in, undrained
from holdfast.training.runs.tiers.offline_drain import NearDrain
from holdfast.training.runs.tiers.protecting import PeerGroup, Protecting
from holdfast.training.runs.tiers.room import NearRoom
from holdfast.training.saving.handle import SaveHandle
from holdfast.training.telemetry.dispatcher import EventDispatcher

logger = logging.getLogger(__name__)

_LATE_RELEASE_SECONDS = 0.2
_FEW_BYTES = 64 * MIB
"""A near tier in memory of fewer bytes is most likely a small mount."""


@dataclass(frozen=True, slots=True)
class NearPlace:
    """Where steps are saved before the root, and which of them stay."""

    store: Store
    """The folder."""

    save: SavePolicy
    """When a step is saved near alone."""

    keep_last: int
    """Newest steps that stay."""

    bytes_max: int | None = None
    """Most bytes of all files; None for what the file system holds."""

    is_memory: bool = False
    """Whether the folder is in memory, so that the end of the job empties it."""

    spares: tuple[Callable[[], int], Callable[[], None]] | None = None
    """Returns the bytes of collected files that the next step takes again, and removes these files; None on a disk."""

    agent: Sequence[str] = ()
    """The command of the agent; empty for none."""

    peers: PeerGroup | None = None
    """How the nodes protect each other; None where all ranks see one folder."""

    folder: Store | None = None
    """The folder of the node of this rank; None where all ranks see one folder."""


class NearTier:
    """The near tier of one manager, on one rank."""

    def __init__(
        self,
        job: Job,
        place: NearPlace,
        root: RunParts,
        keep: KeepPolicy | None,
        state: RunState,
        dispatcher: EventDispatcher,
    ) -> None:
        """Start before the first step; a collective.

        Args:
            job: The ranks.
            place: The near tier.
            root: The parts of saves into the root.
            keep: The retention policy of the root.
            state: The state of the run.
            dispatcher: Passes events of drains to observers.
        Raises:
            InvalidError: The near tier is of another run or root, or a rank does not see the folder.
        """
        run = state.home.store
        assert isinstance(run, TwoRoots), "a near tier makes two places"
        self._job_nonce = _require_seen(job, run)
        self._place, self._job, self._run, self._root = place, job, run, root
        self.parts = RunParts(job, place.store, AnyOf(LatestN(place.keep_last), Tagged()), state, tier="near")
        """The parts of saves into the near tier."""
        self.drain = Drain(job, run, self.parts, root, keep, dispatcher)
        """Copies due steps to the root."""
        node_share = 1.0 if place.peers is None else place.peers.node_share
        self.room = NearRoom(place.store, place.bytes_max, place.spares, place.folder, node_share)
        """Whether the next step has a place near."""
        if place.is_memory and place.bytes_max is not None and job.comm.rank == 0:
            logger.log(
                logging.INFO if place.bytes_max >= _FEW_BYTES else logging.WARNING,
                "%s: the near tier is in memory, and takes up to %s; it needs %d times the bytes of a step, and those "
                "of each step within collect_grace_seconds (%g). More: Tier(bytes_max=…), or a larger /dev/shm (docker "
                "run --shm-size, sizeLimit of an emptyDir)",
                place.store.url,
                shown_bytes(place.bytes_max),
                place.keep_last + 1,
                job.settings.collect_grace_seconds,
            )
        self._agent = (
            AgentStarter(place.store.url, place.agent, job.clock) if place.agent and job.comm.rank == 0 else None
        )
        self._protecting: Protecting | None = None
        if place.peers is not None:
            self.parts.replicates = place.peers.protects
            self._protecting = Protecting(place.peers, self.parts, dispatcher, lambda: not self.drain.has_earlier)
            self._protecting.start()
        self.parts.may_collect = lambda: self.drain.has_adopted
        self.parts.on_commit = self._note_commit
        self.parts.why_no_room = self.room.why_not

    def watch(self, handle: SaveHandle, request: StepRequest, *, is_due: bool) -> None:
        """Learn from the end of a save whether the near tier takes steps, and end its handle after the drain."""
        handle.near.add_done_callback(self._note_end)
        if self._protecting is not None and self.parts.replicates:
            self._protecting.watch(handle, request)
        if is_due:
            self.drain.watch(handle, request)

    def _note_end(self, ended: Future[SaveReport]) -> None:
        self.room.note_end(ended)
        if ended.exception() is None and ended.result().tier == "root":
            # The steps of an earlier job may fill the near tier. They go once the due ones are drained.
            with suppress(CheckpointError):
                self.drain.adopt_earlier()
                self.parts.collect_soon()

    def _note_commit(self, step: int, digest: str, is_due: bool) -> None:
        if self._job.comm.rank == 0 and (manifest := manifest_in(self._place.store, (step, digest))) is not None:
            self.room.note_saved(manifest)
        if self._agent is not None:
            try:
                self._agent.require()
                if error := self._agent.error():
                    self._job.warn_once(self._place.store.url, f"the agent cannot bring steps to the root: {error}")
            except OSError as error:
                self._job.warn_once(self._place.store.url, f"no agent could be started: {error}")
        if self._protecting is not None and self.parts.replicates:
            self._protecting.note_commit(step, digest)
        self.drain.note_commit(step, digest, is_due)

    def note_loaded(self, step: int, digest: str) -> None:
        """Take note of the step that training continues from."""
        if self._protecting is not None:
            self._protecting.note_loaded(step, digest)

    def close(self, may_wait: Callable[[], bool]) -> None:
        """Drain the newest step, empty a near tier in memory, and end the run in both places.

        Args:
            may_wait: Whether to wait for the drain, and for steps that are due for deletion; asked again and again.
        """
        job = self._job

        def drains() -> bool:
            # A preempted job uses the rest of its grace.
            deadline = job.process_deadline
            return may_wait() if deadline is None else job.clock.monotonic_seconds() < deadline

        try:
            if self._protecting is not None:
                self._protecting.close(drains)
            is_whole = self.drain.close(drains)
            if not is_whole and job.process_deadline is not None:
                # The root is too slow for the grace: its answer to the release must not cost the exit code.
                self.parts.writer_lease.release_seconds_max = _LATE_RELEASE_SECONDS
            if self.parts.collecting is not None:
                self.parts.collecting.close(lambda: None, may_wait)  # The parts of the root release the lease.
            if is_whole and self._place.is_memory and job.comm.rank == 0 and self.parts.writer_lease.epoch:
                with suppress(CheckpointError):
                    self.parts.writer_lease.require(self._root.store)
                    empty_near(self._run)
            if job.comm.rank == 0 and not self.parts.writer_lease.epoch:
                self._drain_for_earlier_job(drains)
        finally:
            self._root.close(may_wait)
            if self._job_nonce:
                forget_job(self._place.store, self._job_nonce)
            if self._place.peers is not None:
                self._place.peers.release()  # Last: until then the agents must serve.

    def _drain_for_earlier_job(self, may_wait: Callable[[], bool]) -> None:
        """Drain at the end of a job that has saved nothing, as `holdfast drain` does; also empty a tier in memory."""
        place, job = self._place, self._job
        request = NearDrain(self._run, job.clock, job.codecs)
        try:
            if read_run_id(place.store) is None or has_other_job(place.store):
                return
            steps = request.planned().steps
            if steps and not may_wait():
                logger.warning("%s", undrained(steps[-1], "the job has saved nothing, and its end does not wait"))
            elif steps or place.is_memory:
                report = request.execute(job.settings.lease_seconds, remove=place.is_memory)
                logger.info("steps [%s] of an earlier job are in the root", first_three(report.steps))
        except ConflictError as error:  # As of a process that only reads beside the job.
            logger.info("%s: nothing is drained: %s", place.store.url, error)
        except CheckpointError as error:
            logger.warning("%s: the steps of the earlier job are not drained: %s", place.store.url, error)


def _require_seen(job: Job, run: TwoRoots) -> str:
    """Refuse a folder that is of another run, or that a rank does not see; a collective.

    Returns:
        On rank 0, the nonce of the job for the agent; empty beside another living job.
    """
    own: Exception | None = None
    nonce = ""
    token, probe = job.nonce.encode(), f"near-probe-{job.nonce}.json"
    if job.comm.rank == 0:
        try:
            require_same_run(run)
            _tell_of_other_near(run)
            run.near.put(probe, token, durable=False)
            nonce = note_job(run.near, job.clock, job.settings.lease_seconds)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer, whatever the error is
            own = error
    _raise_on_all(job, own)
    sees = False
    with suppress(CheckpointError):
        sees = run.near.get(probe, 1024) == token
    blind = [rank for rank, answer in enumerate(job.comm.all_gather(bytes([sees]))) if answer == b"\0"]
    if job.comm.rank == 0:
        with suppress(CheckpointError):
            run.near.delete([probe])
    if blind:
        raise InvalidError(
            f"{run.near.url}: ranks [{first_three(blind)}] do not see the folder as rank 0 does; expected one folder "
            "for all ranks, on one host or on a shared file system. Nothing was saved. Choose a folder that every rank "
            "sees"
        )
    return nonce


def _tell_of_other_near(run: TwoRoots) -> None:
    record = read_near(run.root)
    if record is None:
        return
    is_here = record.host == platform.node() or record.url.startswith(PEERS_SCHEME)
    if record.url != run.near.url or not is_here:
        logger.warning(
            "%s: the last near tier of the run was %s on host %s, not %s: newer steps may lie there. The first save "
            "leaves these out for good. To keep them: holdfast drain %s",
            run.url,
            record.url,
            record.host,
            run.near.url,
            record.url,
        )
    elif read_run_id(run.near) is None:
        logger.warning(
            "%s: was the near tier of the run, and is empty now: steps that only this folder had are lost. The run "
            "goes on from the root",
            run.near.url,
        )


def _raise_on_all(job: Job, own: Exception | None) -> None:
    texts = gather_errors(job.comm, None if own is None else error_text(own))
    raise_together(texts, job.comm.rank, own)
