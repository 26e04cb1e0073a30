"""One save, from the state to the published manifest."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

from holdfast.checkpoint.location import CheckpointLocation
from holdfast.clock import utc_now_text
from holdfast.coordination.agreement import Agreement, SaveAgreement
from holdfast.coordination.commit_vote import Aborted, CommitVote, OutcomeUnknown, Vote
from holdfast.coordination.job import Job
from holdfast.engine.gc_pause import GcPause, is_small_transfer
from holdfast.engine.write import PackWriter, WrittenPack
from holdfast.errors import CheckpointError, ConflictError, InvalidError, UnavailableError
from holdfast.format.digest import hex_digest_of, short_digest_of
from holdfast.format.index.index_builder import IndexBuilder
from holdfast.format.names import part_name
from holdfast.format.pack import header_body
from holdfast.format.part import RankPart, encode_part
from holdfast.plan.ownership import owned_by
from holdfast.plan.packing import packs_of
from holdfast.plan.plan_cache import SavePlan, save_plan
from holdfast.ports.framework import Collected, Selection
from holdfast.ports.store import Store
from holdfast.repository.catalog import confirmed_manifest
from holdfast.repository.epochs import require_counted
from holdfast.saving.commit import PublishedLate, PublishFailed, assembled, epoch_of, published, sweep
from holdfast.saving.deduplication import Deduplicator
from holdfast.saving.fingerprint import StateFingerprint
from holdfast.saving.handle import SaveHandle
from holdfast.saving.health import Watch
from holdfast.saving.provenance import layouts_of
from holdfast.saving.transfer import Transfer
from holdfast.telemetry.dispatcher import EventDispatcher
from holdfast.telemetry.operation import OperationTrace
from holdfast.types.health import Health, findings_of
from holdfast.types.manifest import Manifest, Parent
from holdfast.types.plan import PlannedPack
from holdfast.types.reports import SaveReport

logger = logging.getLogger(__name__)


class Save:
    """One save on one rank."""

    def __init__(
        self,
        job: Job,
        location: CheckpointLocation,
        writer: PackWriter,
        claim: Callable[[CheckpointLocation], Mapping[str, object]],
        parent_of: Callable[[], Parent | None],
        on_commit: Callable[[CheckpointLocation, str, str], None],
        *,
        awaited: bool = False,
        inherited: Mapping[str, object] | None = None,
        dispatcher: EventDispatcher | None = None,
        unchanged: Deduplicator | None = None,
        pause: GcPause | None = None,
    ) -> None:
        """Prepare a save.

        Args:
            job: The ranks that save together.
            place: Where the checkpoint goes.
            writer: Writes packs there.
            claim: Looks at the place before anybody writes, on rank 0; returns what every rank is to be told.
            parent_of: Asked for the step that this one follows, once all is written.
            on_commit: Told the place, the run's id and the manifest's digest.
            awaited: Whether the caller waits for the commit whatever comes.
            inherited: What every rank is to be told besides.
            audience: Who hears of it.
            unchanged: What is stored already.
            pause: Of who awaits: holds Python's collector off past the call, and is ended early where storage or other
                ranks may take long. None: for the length of the call.
        """
        self._job, self._place, self._writer = job, location, writer
        self._inherited = {} if inherited is None else inherited
        self._unchanged = unchanged or Deduplicator(location, None, writer, job.settings)
        self._claim, self._parent_of, self._on_commit = claim, parent_of, on_commit
        self._step = -1 if location.step is None else location.step
        self._name = f"save of {location.url}" if location.step is None else f"save of step {location.step}"
        self._trace = OperationTrace(
            "save", location.step, location.url, job.comm, job.clock, dispatcher or EventDispatcher((), job.clock)
        )
        self._staged_seconds = 0.0
        self._queued_seconds = 0.0
        self._own_keys: list[str] = []
        self._awaited = awaited
        self._own_pause = GcPause()
        self._pause = pause or self._own_pause
        """Until much data is known to move: what is made for thousands of tiny tensors is not walked meanwhile."""
        self.handle = SaveHandle(self._name, awaited=awaited)
        self.handle.committed.add_done_callback(self._trace.fail_with)

    def begin(self, collect: Callable[[], Collected]) -> SaveHandle:
        """Agree, write this rank's share, and leave the commit to the background.

        Args:
            collect: Takes apart what is saved.
        Raises:
            InvalidError: The state, or what the ranks are about to do, is wrong; nothing was written.
        """
        if self._job.is_inherited:
            raise InvalidError(
                f"{self._name}: this process was forked from the one that made the manager; expected saves from the "
                "process that made it. Make a CheckpointManager of its own here, with process_group=False"
            )
        self._trace.begin(self._place.step, self._place.url)
        try:
            self._pause.begin()
            self._begin(collect)
        except BaseException as error:
            self._trace.fail(error)
            raise
        finally:
            self._own_pause.end()
        return self.handle

    def _begin(self, collect: Callable[[], Collected]) -> None:
        try:
            opening = SaveAgreement(self._job, self._step, short_digest_of(self._place.url.encode()))
            try:
                with self._trace.phase("collect"):
                    collected = collect()
                    digests = StateFingerprint(collected, self._job, self._place)
                    statement = digests.statement(self._step)
            except BaseException as error:
                refusal = _refusal(error, self._name)
                opening.refuse(refusal)
                if refusal is error:
                    raise
                raise refusal from error
            with self._trace.phase("agree"):
                agreement = opening.agree(statement, digests.details, self._survey)
        except InvalidError:
            raise
        except (CheckpointError, TimeoutError) as error:
            self.handle.fail(_typed(error, self._name))
            return
        commit_vote = CommitVote(self._job, agreement.sequence, agreement.attempt, self._name)
        # Whoever takes it ends the save: the background, or this call where it does not come so far.
        turn = threading.Lock()
        transfer: Transfer | None = None
        try:
            with self._trace.phase("plan"):
                plan, is_new = self._plan(collected, digests, agreement)
            if not is_small_transfer(plan.bytes):
                self._pause.end()
            with self._trace.phase("compare"):
                sources = [each.source for each in collected.shards]
                plan = self._unchanged.pieces_to_write(plan, sources, agreement.note)
                packs = self._packs(plan, agreement)
            self._own_keys += [pack.key for pack in packs]
            with self._trace.phase("replicas") if self._job.settings.compare_replicas else nullcontext():
                watch = Watch(collected, agreement, self._job)
            part_of = self._part_of(collected, digests, agreement, watch)
            transfer = Transfer(self._job, self._name, self._writer, packs, self._reach_staged, self._trace)
            self.handle.settle = transfer.settle
            self.handle.abandon = partial(_abandon, commit_vote, transfer)
            transfer.begin(collected, awaited=self._awaited)
            report_of = self._report_of(plan, is_new, collected, agreement, transfer)

            def vote_of() -> Vote:
                return self._write_part(agreement, part_of(packs, transfer.written()))

            self._queued_seconds = self._trace.seconds
            if not self._job.commits.is_idle:
                self._pause.end()
            self._job.commits.submit(self._finish, turn, commit_vote, agreement, vote_of, report_of)
        except BaseException as error:
            if turn.acquire(blocking=False):
                if transfer is not None:
                    transfer.give_up(error)
                self._lose(commit_vote, agreement, error)
            if not isinstance(error, Exception):
                # Ctrl-C is the caller's, but the other ranks must not wait for this one.
                raise

    def _survey(self) -> Mapping[str, object]:
        """Look at the place before anybody writes, on rank 0."""
        return {**self._claim(self._place), "created": utc_now_text(self._job.clock), **self._inherited}

    def _plan(self, collected: Collected, digests: StateFingerprint, agreement: Agreement) -> tuple[SavePlan, bool]:
        """Decide what this rank writes, or find that it was decided before; return whether it was not."""
        rank, settings = self._job.comm.rank, self._job.settings
        shards = [each.shard for each in collected.shards]
        holders = agreement.holders_of_each([each.tensor.fqn for each in shards if each.holders is None])

        def plan() -> SavePlan:
            owned = owned_by(rank, shards, holders, settings.chunk_bytes)
            packs = packs_of(rank, shards, owned, settings._tuning.pack_header_bytes_max)
            return save_plan(tuple((pack, header_body(pack)) for pack in packs), settings._tuning.unchanged_bytes_min)

        return self._job.plan_cache.of(digests.shards, holders, plan)

    def _packs(self, plan: SavePlan, agreement: Agreement) -> list[PlannedPack]:
        provenance = self._provenance(agreement)
        return [
            PlannedPack(self._key(agreement, pack.name), body.header(provenance), pack) for pack, body in plan.packs
        ]

    def _reach_staged(self) -> None:
        self._staged_seconds = self._trace.seconds
        self.handle.reach_staged()

    def _report_of(
        self, plan: SavePlan, is_new: bool, collected: Collected, agreement: Agreement, transfer: Transfer
    ) -> Callable[[], SaveReport]:
        """Return what makes the report, once the save is committed."""
        skipped = tuple(collected.skipped)

        def report() -> SaveReport:
            return SaveReport(
                step=self._place.step,
                url=self._place.url,
                attempt=agreement.attempt,
                bytes=plan.bytes,
                unchanged_bytes=self._unchanged.bytes,
                tensors=plan.tensors,
                planned=is_new,
                staging=transfer.staging,
                staged_seconds=self._staged_seconds,
                fence_seconds=transfer.fence_seconds,
                waited_seconds=transfer.waited_seconds,
                committed_seconds=self._trace.seconds,
                divergent=agreement.divergent,
                skipped=skipped,
                phases=self._trace.phases,
            )

        return report

    def _part_of(
        self, collected: Collected, digests: StateFingerprint, agreement: Agreement, watch: Watch
    ) -> Callable[[Sequence[PlannedPack], Sequence[WrittenPack]], RankPart]:
        """Return what makes this rank's part, once its packs are written."""
        job, unchanged, speaks = self._job, self._unchanged, agreement.is_leader
        # Also what falls to other ranks to write: a tensor nobody wrote must be missed when all is merged.
        tensors = [each.shard.tensor for each in collected.shards] if speaks else []
        aliases, layouts = (dict(collected.aliases), layouts_of(collected)) if speaks else ({}, ())
        tree = digests.tree_bytes if speaks else None
        per_rank = digests.per_rank_bytes

        def part_of(packs: Sequence[PlannedPack], written: Sequence[WrittenPack]) -> RankPart:
            with GcPause():
                listing = IndexBuilder(job.settings.chunk_bytes, tensors)
                for pack, each in zip(packs, written, strict=True):
                    listing.add_pack(pack.plan, len(pack.header), each.digests)
                    unchanged.note(pack, each, agreement.attempt)
                for piece in unchanged.pieces:
                    listing.add(piece.tensor, piece.region, piece.pack, piece.offset, piece.digests)
                index = listing.index()
            return RankPart(
                rank=job.comm.rank,
                attempt=agreement.attempt,
                index=index,
                packs=(*(each.record for each in written), *unchanged.packs),
                tree=tree,
                aliases=aliases,
                layouts=layouts,
                per_rank=per_rank,
                counted=watch.counted([*(each.nonfinite for each in written), unchanged.nonfinite]),
                replicas=watch.replicas,
                world_size=job.comm.world_size,
            )

        return part_of

    def _write_part(self, agreement: Agreement, part: RankPart) -> Vote:
        with self._trace.phase("part"):
            with GcPause():
                data = encode_part(part)
            key = self._key(agreement, part_name(part.rank))
            self._own_keys.append(key)
            self._place.store.put_if_absent(key, data)
        return Vote(len(data), hex_digest_of(data))

    def _finish(
        self,
        turn: threading.Lock,
        commit_vote: CommitVote,
        agreement: Agreement,
        vote_of: Callable[[], Vote],
        report_of: Callable[[], SaveReport],
    ) -> None:
        """Vote, commit or wait for who does; runs in the background and never leaves a handle undecided."""
        if not turn.acquire(blocking=False):
            return
        self._trace.note("queue", self._queued_seconds, self._trace.seconds)
        try:
            self._conclude(commit_vote, agreement, vote_of, report_of)
        except BaseException as error:
            if not self.handle.committed.done():
                self._fail_unknown(f"{type(error).__name__}: {error}")
            raise

    def _conclude(
        self,
        commit_vote: CommitVote,
        agreement: Agreement,
        vote_of: Callable[[], Vote],
        report_of: Callable[[], SaveReport],
    ) -> None:
        try:
            digest = self._decide(commit_vote, agreement, vote_of)
        except Aborted as aborted:
            self._remove_own()
            self.handle.fail(aborted.error)
        except OutcomeUnknown as undecided:
            self._ask_storage(agreement, report_of, undecided)
        except Exception as error:  # noqa: BLE001 - a failed save never ends training
            self._lose(commit_vote, agreement, error)
        else:
            self._succeed(agreement, report_of, digest, commit_vote.unhealthy)

    def _decide(self, commit_vote: CommitVote, agreement: Agreement, vote_of: Callable[[], Vote]) -> str:
        """Return the digest of the manifest once it is published."""
        own = vote_of()
        with self._trace.phase("vote"):
            completes = commit_vote.vote(own)
        if not completes:
            self._pause.end()
            with self._trace.phase("wait"):
                return commit_vote.await_result()
        try:
            digest, health = self._publish(commit_vote.votes(), agreement)
        except PublishFailed as failure:
            commit_vote.announce_failure(failure, certain=False)
            raise OutcomeUnknown(str(failure), storage_knows=False) from failure
        except PublishedLate as late:
            commit_vote.announce_doubt(str(late))
            raise OutcomeUnknown(str(late)) from late
        except Exception as error:
            commit_vote.announce_failure(error, certain=True)
            raise Aborted(_typed(error, self._name)) from error
        commit_vote.announce_committed(digest, findings_of(health))
        with self._trace.phase("sweep"):
            sweep(self._place, agreement.attempt, self._name, epoch_of(agreement.note))
        return digest

    def _publish(self, votes: list[Vote], agreement: Agreement) -> tuple[str, Health | None]:
        location = self._place
        with self._trace.phase("index"):
            data, health = assembled(
                location, agreement.attempt, votes, agreement.note, self._parent_of, self._job.settings, self._own_keys
            )
        with self._trace.phase("publish"):
            return published(location, data, epoch_of(agreement.note)), health

    def _ask_storage(
        self, agreement: Agreement, report_of: Callable[[], SaveReport], undecided: OutcomeUnknown
    ) -> None:
        """The board cannot say what became of the attempt: the manifest can, if it is there."""
        manifest = None
        if undecided.storage_knows:
            try:
                manifest = confirmed_manifest(self._place.store, self._place.folder)
            except CheckpointError:
                manifest = None
        if manifest is not None and manifest.attempt == agreement.attempt:
            try:
                self._require_counted(manifest)
            except ConflictError as fenced:
                self.handle.fail(fenced)
            except CheckpointError as failure:
                self._fail_unknown(f"{undecided.reason}; {failure}")
            else:
                found = findings_of(manifest.health)
                self._succeed(agreement, report_of, manifest.digest, found)
        elif manifest is not None:
            self._remove_own()
            error = ConflictError(f"{self._name}: attempt {manifest.attempt} published first; {undecided.reason}")
            self.handle.fail(error)
        else:
            self._fail_unknown(undecided.reason)

    def _require_counted(self, manifest: Manifest) -> None:
        if manifest.epoch and manifest.step is not None:
            require_counted(self._place.store, manifest.step, manifest.epoch, manifest.digest)

    def _succeed(
        self, agreement: Agreement, report_of: Callable[[], SaveReport], digest: str, unhealthy: Sequence[str]
    ) -> None:
        report = replace(report_of(), unhealthy=tuple(unhealthy))
        self._on_commit(self._place, str(agreement.note["run_id"]), digest)
        if self._job.comm.rank == 0:
            logger.info(
                "%s: committed in %.2f s, %d bytes on this rank", self._name, report.committed_seconds, report.bytes
            )
            if unhealthy:
                logger.warning("%s: committed, but marked unhealthy: %s", self._name, "; ".join(unhealthy))
        store = self._place.store if self._job.settings.reports else None
        self._trace.end(report, agreement.attempt, store, self._place.folder)
        self.handle.reach_committed(report)
        try:
            self._job.forget_before(agreement.sequence)
        except CheckpointError as error:
            logger.warning("%s: old keys of the key-value store stay for now: %s", self._name, error)

    def _lose(self, commit_vote: CommitVote, agreement: Agreement, error: BaseException) -> None:
        """A failure on this rank before anything was published: abort everywhere, leave nothing behind."""
        try:
            commit_vote.abort(error)
        except OutcomeUnknown as undecided:
            self._fail_unknown(f"{error}; {undecided.reason}", error)
            return
        self._remove_own()
        self.handle.fail(_typed(error, self._name))

    def _fail_unknown(self, reason: str, cause: BaseException | None = None) -> None:
        failure = _unknown(self._name, self._place, reason)
        failure.__cause__ = cause
        self.handle.may_come = True
        self.handle.fail(failure)

    def _remove_own(self) -> None:
        """Remove this attempt's files of this rank; only once it is certain that it cannot be committed."""
        try:
            self._place.store.delete(self._own_keys)
        except CheckpointError as error:
            logger.warning("%s: files of the failed attempt stay for now: %s", self._name, error)

    def _key(self, agreement: Agreement, name: str) -> str:
        return f"{self._place.folder}{agreement.attempt}/{name}"

    def _provenance(self, agreement: Agreement) -> dict[str, str]:
        step = "" if self._place.step is None else str(self._place.step)
        return {"step": step, "attempt": agreement.attempt, "rank": str(self._job.comm.rank)}


def save_checkpoint(
    job: Job,
    store: Store,
    state: Mapping[str, object],
    selection: Selection,
    pause: GcPause | None,
) -> SaveHandle:
    """Begin to save the one checkpoint that `store` is to hold.

    Args:
        job: Who saves.
        store: Where.
        state, selection: What.
        pause: Of who awaits the commit whatever comes, as for `Save`; None if nobody does.
    Raises:
        InvalidError: As `Save.begin`.
    """

    def claim(location: CheckpointLocation) -> dict[str, object]:
        location.require_empty()
        return {"run_id": job.clock.random_bytes(8).hex()}

    location = CheckpointLocation(store, "", None)
    writer = PackWriter(store, job.settings)
    save = Save(job, location, writer, claim, lambda: None, lambda *_: None, awaited=pause is not None, pause=pause)
    return save.begin(lambda: job.framework.collect(state, selection))


def _abandon(commit_vote: CommitVote, transfer: Transfer, error: CheckpointError) -> None:
    # Somebody may be publishing: then it ends by itself.
    with suppress(OutcomeUnknown):
        commit_vote.abort(error)
        transfer.give_up(error)


def _unknown(name: str, location: CheckpointLocation, reason: str) -> UnavailableError:
    return UnavailableError(
        f"{name}: outcome unknown: {reason}. The checkpoint may or may not be at {location.url}; nothing was removed. "
        "Look there (holdfast ls) before saving this step again"
    )


def _refusal(error: BaseException, name: str) -> BaseException:
    """Return what a state that could not be taken apart is refused with, on this rank and on the others alike."""
    if isinstance(error, CheckpointError) or not isinstance(error, Exception):
        return error
    if isinstance(error, MemoryError | OSError) or type(error).__name__ == "OutOfMemoryError":
        # The state is not wrong and training need not end: the next save may find room.
        return UnavailableError(f"{name}: the state could not be taken apart now: {type(error).__name__}: {error}")
    return InvalidError(f"{name}: the state could not be taken apart: {type(error).__name__}: {error}")


def _typed(error: BaseException, name: str) -> CheckpointError:
    """Return an error as one of ours, so that a handle never raises anything else."""
    if isinstance(error, CheckpointError):
        return error
    typed = UnavailableError(f"{name}: {type(error).__name__}: {error}")
    typed.__cause__ = error
    return typed
