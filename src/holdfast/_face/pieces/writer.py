"""A save that its caller has planned: the same packs, parts and commit as any other save, without an agreement.

    opened    `open` on the coordinator: the path is claimed, and every rank gets a ticket. Nothing is written.
    written   `write` on every rank: its packs are durable, and it has a part for the coordinator.
    finished  `finish` on the coordinator, with the parts of all ranks: the checkpoint is committed, or nothing is.

The caller carries tickets and parts. If a rank fails, the caller does not call `finish`: nothing becomes visible, and
`abort`, the next `open` of that path in the process, or the next save there removes what was written.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from holdfast._face import wiring
from holdfast._face.pieces.names import MARK, tree_of_pieces
from holdfast._face.pieces.torch_bytes import PickledValue, unpickled_value
from holdfast.backends.alone import AloneComm
from holdfast.backends.foreign.dcp.metadata import Path
from holdfast.backends.torch.dcp_pieces.planned import collected_pieces, neutral_value
from holdfast.base.clock import SystemClock
from holdfast.base.geometry.tensor_piece import TensorPiece
from holdfast.base.interrupts import GUARD, Latch
from holdfast.base.ports.framework import Collected
from holdfast.base.types.reports import SaveReport
from holdfast.base.types.values import Group, Value
from holdfast.core.engine.background import is_done_soon
from holdfast.core.format.part import RankPart
from holdfast.core.format.state_order import numbers_of, paths_of
from holdfast.core.format.values import values as codec
from holdfast.errors import CheckpointError, ConflictError, InvalidError, first_three, refusal
from holdfast.settings import Settings
from holdfast.stored.publishing.outcome import OutcomeKind
from holdfast.training.coordination.agreement.records import Agreement
from holdfast.training.coordination.commit_vote import Vote
from holdfast.training.coordination.job import Job
from holdfast.training.coordination.message_codec import decode_message, encode_message
from holdfast.training.coordination.save_context import SaveContext
from holdfast.training.saving.attempt import SaveAttempt
from holdfast.training.saving.fingerprint import StateFingerprint
from holdfast.training.saving.handle import typed
from holdfast.training.saving.rank_packs import Owners, deduplicate, name_packs, plan
from holdfast.training.saving.save import Share, Written, report_of, stage, write
from holdfast.training.saving.target import claim_in_time, path_target

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Ticket:
    """What one rank needs to take part in an attempt."""

    attempt: str
    rank: int
    ranks: int
    url: str
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class _Written:
    """What one rank wrote: the vote for its part, and its values. The coordinator writes its own part later."""

    attempt: str
    rank: int
    vote: Vote | None
    values: bytes


class PieceWriter:
    """Saves one checkpoint by path, planned by its caller. Each rank makes one, with the same arguments."""

    def __init__(self, path: object, *, overwrite: bool = False, settings: Settings = wiring.DEFAULT_SETTINGS) -> None:
        """Look at no storage yet.

        Args:
            path: The folder that becomes the checkpoint.
            overwrite: Replace the checkpoint at the path, if there is one. It stays whole until the new one is.
            settings: How to save.
        Raises:
            InvalidError: It is not a path, or its scheme is not supported.
        """
        self._settings, self._overwrite = settings, overwrite
        self._location = wiring.saved_at(path, settings, overwrite=overwrite)
        self._attempt: SaveAttempt | None = None
        self._written: tuple[Share, RankPart, Written] | None = None

    @property
    def url(self) -> str:
        """Where the checkpoint goes."""
        return self._location.url

    def open(self, ranks: int) -> list[bytes]:
        """Claim the path, and return a ticket for each rank. On the coordinator, which is rank 0.

        Args:
            ranks: Ranks that write.
        Raises:
            ConflictError: The path holds a checkpoint, or another job overwrites it.
            InvalidError: `overwrite` at what Holdfast did not write as one checkpoint.
            UnavailableError: Storage failed, or gave no answer within `settings.agreement_timeout_seconds`: the other
                ranks wait for their tickets.
        """
        self.abort()
        _give_up_earlier(self.url)
        job = self._job(0, ranks)
        target = path_target(job, self._location, overwrite=self._overwrite)
        attempt = SaveAttempt(job, target, awaited=True)
        claim = partial(target.hooks.claim, False)
        try:
            context = claim_in_time(job, claim, attempt.name, job.agreement_deadline(), self.url)
        except BaseException as error:
            attempt.handle.end_with(error)
            raise
        assert context is not None, "no rank holds the checkpoint as a load has filled it"
        attempt.record_agreement(_agreement(job.clock.random_bytes(8).hex(), 0, context))
        with GUARD:
            self._attempt = _opened[self.url] = attempt
        name = attempt.agreement.attempt
        tickets = (_Ticket(name, rank, ranks, self.url, self._settings.chunk_bytes) for rank in range(ranks))
        return [encode_message(ticket) for ticket in tickets]

    def write(self, ticket: bytes, pieces: Iterable[TensorPiece], values: Mapping[str, object]) -> bytes:
        """Write what this rank has; return the part that the coordinator needs of it.

        Args:
            ticket: The ticket of this rank.
            pieces: Boxes of tensors. Those of all ranks cover every tensor exactly once.
            values: Everything else that this rank saves, by name: of the closed set of plain values, tensors in them,
                or a `PickledValue`.
        Raises:
            InvalidError: A tensor or value cannot be saved, or the ticket is of another path. Nothing of this rank is
                left.
            CheckpointError: Storage failed. Nothing of this rank is left.
        """
        given = decode_message(ticket, _Ticket)
        self._require_own(given)
        taken = list(pieces)
        encoded = _encoded(values, taken.append)
        is_coordinator = given.rank == 0
        attempt = self._attempt if is_coordinator else self._attempt_of(given)
        if attempt is None or attempt.agreement.attempt != given.attempt:
            raise _given_up(self.url)
        collected = collected_pieces(taken, given.rank)
        fingerprint = StateFingerprint(collected, attempt.job, attempt.location)

        def write_own() -> Vote | None:
            share = _staged(attempt, collected, fingerprint)
            part, result = write(share)
            if not is_coordinator:
                return attempt.write_part(part)
            # Its part has the values of all ranks.
            with GUARD:
                if self._attempt is not attempt:
                    raise _given_up(self.url)
                self._written = share, part, result
            return None

        vote = _done(attempt, write_own)
        return encode_message(_Written(given.attempt, given.rank, vote, encoded))

    def finish(
        self,
        parts: Sequence[bytes],
        *,
        paths: Mapping[str, Path] | None = None,
        mark: Mapping[str, object] | None = None,
    ) -> SaveReport:
        """Commit the checkpoint. On the coordinator.

        Args:
            parts: What `write` returned on each rank, in any order.
            paths: How tensors and values nest in the state that they are of: their paths by name. None, or a name that
                is not in it: it is a key of the state.
            mark: The mark of the integration that saves.
        Raises:
            InvalidError: The pieces do not cover every tensor exactly once, or a part is missing. Nothing is visible.
            ConflictError: Another save published first, or took over.
            CorruptError: A part or a pack is not what its rank wrote.
            UnavailableError: Storage failed, or the outcome is unknown.
        """
        with GUARD:
            own = self._written
        attempt = self._taken()
        if attempt is None:
            raise _given_up(self.url)
        try:
            if own is None:
                raise _given_up(self.url)
            share, part, result = own
            written = _of_all_ranks(parts, attempt)
            tree = tree_of_pieces(_merged(written), paths or {}, self.url)
            if mark is not None:
                tree.items[MARK] = dict(mark)
            ways = (path[:depth] for path in (paths or {}).values() for depth in range(1, len(path) + 1))
            own_part = replace(part, tree=codec.dumps(codec.encode(tree, "")))
            whole = _ordered(own_part, tree, (".".join(map(str, way)) for way in ways))
            own_vote = _done(attempt, lambda: attempt.write_part(whole))
            attempt.commit_vote.carry({each.rank: each.vote for each in written if each.vote is not None})
            over = Latch()
            attempt.handle.near.add_done_callback(lambda _: over.set())
            # On the commit thread, as every save: an interrupt of this thread must not end what is perhaps published.
            attempt.finish_in_background(
                lambda: attempt.conclude(attempt.vote_and_commit(own_vote), lambda: report_of(share, result))
            )
            report = attempt.handle.wait()
        except BaseException as error:
            _end(attempt, error)
            raise
        over.wait()  # Callbacks run in order, on the commit thread: the caller finds the claim gone.
        assert report is not None, "committed comes with a report"
        return report

    def abort(self) -> None:
        """Give up what `open` began, unless `finish` was called; remove what the ranks wrote. Never raises."""
        attempt = self._taken()
        if attempt is not None:
            _end(attempt, _given_up(self.url))

    def _taken(self) -> SaveAttempt | None:
        """Return what `open` began, to end it: nobody else does; None if it has been ended."""
        with GUARD:
            attempt, self._attempt = self._attempt, None
            self._written = None
        # Another writer of the path may have ended it.
        with GUARD:
            if attempt is None or _opened.get(self.url) is not attempt:
                return None
            del _opened[self.url]
            return attempt

    def _job(self, rank: int, ranks: int) -> Job:
        # It exchanges nothing: the caller does. So construction is no collective.
        return Job(_PlannedRank(rank, ranks), SystemClock(), self._settings, codecs=wiring.codecs(), saves=False)

    def _attempt_of(self, ticket: _Ticket) -> SaveAttempt:
        """Return the attempt on a rank that is not the coordinator."""
        job = self._job(ticket.rank, ticket.ranks)
        attempt = SaveAttempt(job, path_target(job, self._location), awaited=True)
        attempt.record_agreement(_agreement(ticket.attempt, ticket.rank, SaveContext(run_id="", created="")))
        return attempt

    def _require_own(self, ticket: _Ticket) -> None:
        if ticket.url != self.url:
            raise InvalidError(
                f"{self.url}: rank {ticket.rank} saves here, and rank 0 to {ticket.url}; expected one path. Make it "
                "the same on every rank (a time or rank in it differs)"
            )
        if ticket.chunk_bytes != self._settings.chunk_bytes:
            raise InvalidError(
                f"{self.url}: settings.chunk_bytes is {self._settings.chunk_bytes} on rank {ticket.rank} and "
                f"{ticket.chunk_bytes} on rank 0; expected the same on every rank"
            )


def _staged(attempt: SaveAttempt, collected: Collected, fingerprint: StateFingerprint) -> Share:
    """Plan, deduplicate and stage the pieces of this rank, as `save` does after an agreement."""
    target, agreement, trace = attempt.target, attempt.agreement, attempt.trace
    with trace.phase("plan"):
        planned = plan(attempt.job, target, collected, Owners.agreed(agreement, collected), fingerprint.shards)
    attempt.end_pause_for(planned.save.bytes)
    with trace.phase("compare"):
        rest, weights = deduplicate(target, planned.save, collected, agreement.context, attempt.link_pack)
    packs = name_packs(planned, rest, weights, attempt.folder, attempt.provenance)
    return stage(attempt, packs, collected, fingerprint)


class _PlannedRank(AloneComm):
    """One of several ranks whose caller communicates for them."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, ranks


_opened: dict[str, SaveAttempt] = {}
"""By URL, what a coordinator of this process has opened and neither finished nor aborted."""


def _give_up_earlier(url: str) -> None:
    """Give up an earlier save to the same path that its caller never finished: its claim would stay in the way.

    Its writer may be gone.
    """
    with GUARD:
        earlier = _opened.pop(url, None)
    if earlier is not None:
        _end(earlier, _given_up(url))


def _agreement(attempt: str, rank: int, context: SaveContext) -> Agreement:
    """Return what ranks would have agreed on: the caller's plan leaves nothing to decide but the attempt."""
    return Agreement(
        sequence=0,
        attempt=attempt,
        class_ranks=(rank,),
        shared={},
        is_leader=rank == 0,
        divergent=(),
        drift=None,
        context=context,
    )


def _done(attempt: SaveAttempt, work: Callable[[], T]) -> T:
    """Return the result of work for an attempt; if it fails, the files of this rank are removed, and it raises."""
    attempt.begin()
    try:
        return work()
    except BaseException as error:  # noqa: BLE001 - the error is raised here, or the handle holds the failure
        attempt.end_in_call(error)
    failure = attempt.handle.failure
    assert failure is not None, "the handle holds the failure"
    raise failure


def _end(attempt: SaveAttempt, error: BaseException) -> None:
    """End an attempt that is not committed, and remove the files of all ranks unless it may be. Never raises."""
    handle = attempt.handle
    if not handle.near.done():
        failure = typed(error, attempt.name) if isinstance(error, Exception) else _given_up(attempt.location.url)
        if attempt.commit_vote.abort(failure).kind is not OutcomeKind.ABORTED:
            return  # The commit thread publishes it.
        # Its claim on the path ends with the handle.
        handle.fail(failure)
    if handle.may_be_committed or handle.failure is None:
        return
    store, folder = attempt.location.store, f"{attempt.location.folder}{attempt.agreement.attempt}/"
    why = "their removal hangs"
    try:
        # The next save to the path, or an error, waits for it.
        if is_done_soon(
            lambda: store.delete([*(entry.key for entry in store.list(folder)), f"{folder}nothing"]), attempt.job.clock
        ):
            return
    except CheckpointError as failure:
        why = str(failure)
    logger.warning(
        "%s: files of the failed attempt stay for now, the next save to the path removes them: %s", attempt.name, why
    )


def _given_up(url: str) -> ConflictError:
    return ConflictError(
        f"{url}: this save was given up, or never opened: another save to the path began in this process, or an "
        "earlier step failed. Nothing was committed. Wait for one save before the next to the same path"
    )


_SKIP = re.compile(r"leave it out with skip=\[.*\]$")
"""How messages about values of a state end. Callers with a plan of their own have no `skip`."""


def _encoded(values: Mapping[str, object], add: Callable[[TensorPiece], None]) -> bytes:
    """Return the values of a rank, encoded; their tensors become pieces.

    Raises:
        InvalidError: Names those that cannot be saved, and what to do.
    """
    neutral = {
        name: unpickled_value(value, name, add) if isinstance(value, PickledValue) else neutral_value(value, name, add)
        for name, value in values.items()
    }
    refused: list[str] = []
    document = codec.encode(neutral, "", refused, entries_are_whole=True)
    if refused:
        raise refusal([_SKIP.sub("leave it out of the state", text) for text in refused])
    return codec.dumps(document)


def _ordered(part: RankPart, tree: Group, order: Iterable[str]) -> RankPart:
    """Return a part that states the order of the names of all parts."""
    fqns, own = part.index.table.fqns, [*part.aliases, *paths_of(tree)]
    order, known = dict.fromkeys(order), {*fqns, *own}
    foreign = tuple(name for name in order if name not in known)
    return replace(part, order=numbers_of(order, fqns, [*own, *foreign]), order_names=foreign)


def _of_all_ranks(parts: Sequence[bytes], attempt: SaveAttempt) -> list[_Written]:
    """Return what every rank wrote, by rank.

    Raises:
        InvalidError: A part is missing, or is of another attempt.
    """
    written = {each.rank: each for each in (decode_message(part, _Written) for part in parts)}
    ranks, name = attempt.job.comm.world_size, attempt.agreement.attempt
    lacking = [rank for rank in range(ranks) if rank not in written or written[rank].attempt != name]
    if lacking or len(parts) != ranks:
        raise InvalidError(
            f"{attempt.location.url}: ranks {first_three(lacking) or 'beyond the last'} have no part of this attempt; "
            f"expected one of each of {ranks} ranks. Nothing was committed; save again"
        )
    return [written[rank] for rank in range(ranks)]


def _merged(written: Sequence[_Written]) -> dict[str, Value]:
    """Return the values of all ranks by name; where several have one, that of the lowest rank."""
    merged: dict[str, Value] = {}
    for each in written:
        decoded = codec.decode(codec.loads(each.values), "")
        assert isinstance(decoded, dict), "a rank sends a dict of its values"
        for name, value in decoded.items():
            merged.setdefault(name, value)
    return merged
