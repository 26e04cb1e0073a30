"""The ranks that save and load together, for the life of the process."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import NoReturn

from holdfast.base.clock import Clock
from holdfast.base.interrupts import GUARD
from holdfast.base.ports.codec import NO_CODECS, Codecs
from holdfast.base.ports.comm import Comm, KeyValueStore
from holdfast.base.ports.gradients import RecordingFramework
from holdfast.base.types.reports import SaveReport
from holdfast.core.engine.arena import Arena
from holdfast.core.engine.background import BackgroundQueue, WriteProgress
from holdfast.core.engine.memory_limits import MemoryShare, memory_statement
from holdfast.core.format.digest import short_digest_of
from holdfast.core.plan.declared_parts import SumCache
from holdfast.core.plan.plan_cache import PlanCache, SavePlan
from holdfast.errors import BY_NAME, CheckpointError, CorruptError, MissingError, UnavailableError, translated
from holdfast.settings import Settings
from holdfast.training.coordination.compression_stats import JobCoding
from holdfast.training.telemetry.node_reports import IDENTITY_BYTES, NodeReports, node_identity

logger = logging.getLogger(__name__)

_NONCE_BYTES = 8
_STATED_BYTES = _NONCE_BYTES + IDENTITY_BYTES
"""Bytes that every rank states. The memory domains of the rank may follow."""

_HELD_SECONDS_MAX = 300.0
"""How long a save may hold the training thread, unless the settings say otherwise."""

VERDICT_GRACE_SECONDS = 2.0
"""Extra seconds that the other ranks wait for the verdict on a save: rank 0 may set the verdict at its own deadline."""

_ANNOUNCE_SECONDS_MIN = 1.0
"""Shortest time for a call to the key-value store, so that a rank can announce its end after its deadline."""

_LAYOUTS_MAX = 16
"""Layouts for which a rank remembers the differing names. A run has few layouts: one before the optimizer's first
step, one after."""

_ATTEMPTS_MAX = 1000
"""Attempts that a job remembers: more than begin while one attempt is under way."""


class SaveHistory:
    """The outcomes of the saves of a job so far: whether ranks ever agreed, and the number of failures in a row."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._committed_at: float | None = None
        self.has_agreed = False
        """Whether the ranks have agreed on a save. Until then, a wrong state or call is raised in the call."""
        self.failures = 0
        """Saves that failed since the last commit, or since a call raised because of too many failures."""

    def note_committed(self) -> None:
        """Take note of a commit."""
        with GUARD:
            self.failures, self._committed_at = 0, self._clock.monotonic_seconds()

    def note_failed(self) -> str:
        """Count a failed save; return the count and the time since the last commit, for a log line."""
        with GUARD:
            self.failures += 1
            if self._committed_at is None:
                since = "no save of this process has been committed"
            else:
                since = f"the last commit was {self._clock.monotonic_seconds() - self._committed_at:,.0f} s ago"
            return f"failure {self.failures} in a row; {since}"

    def note_raised(self) -> None:
        """Restart the count: a call has raised, so the caller knows of the failures."""
        with GUARD:
            self.failures = 0


class Job:
    """The ranks that save and load together, and the resources that these ranks share for the life of the process.

    Saving and loading both take a job. A nonce separates its keys from the keys of an earlier job on the same key-value
    store. Construction is a collective: rank 0 states the nonce, and every rank states its node and memory domains.
    """

    def __init__(
        self,
        comm: Comm,
        clock: Clock,
        settings: Settings,
        framework: RecordingFramework | None = None,
        *,
        codecs: Codecs = NO_CODECS,
        saves: bool = True,
        queues: tuple[BackgroundQueue, BackgroundQueue] | None = None,
    ) -> None:
        """Agree on the nonce, and count the ranks that share memory with this rank.

        Args:
            comm: The ranks.
            clock: Time and randomness.
            settings: How the job saves and loads.
            framework: Takes states apart and fills them; None for a job that only moves stored bytes.
            codecs: The codecs of chunks.
            saves: False for a job that only loads: such a job needs no keys, and construction is not a collective.
            queues: The queues for copies and commits of another job to share; None for new queues.
        """
        self.comm, self.clock, self.settings, self._framework, self.codecs = comm, clock, settings, framework, codecs
        statements = _statements(comm, clock, settings) if saves else []
        self.nonce = statements[0][:_NONCE_BYTES].hex() if saves else ""
        memory = MemoryShare(statement[_STATED_BYTES:] for statement in statements)
        self.node_reports = NodeReports(comm.rank, [one[_NONCE_BYTES:_STATED_BYTES] for one in statements], self.nonce)
        """Stores the reports of this rank."""
        self._process = os.getpid()
        self.process_deadline: float | None = None
        """Monotonic time at which the process will be killed, if known. No wait for other ranks lasts longer."""
        self.sequence = 0
        """Number of the next save. A rank that missed saves advances it."""
        self.numbering = threading.Lock()  # Taken only on threads of DAEMON_POOL, which no handler interrupts.
        """Held while a save takes its number: a signal handler may save while another save takes a number."""
        self.history = SaveHistory(clock)
        """The outcomes of the saves of this job so far."""
        self.arena = Arena(settings._tuning.window_bytes, settings.arena_bytes_max, clock, memory)
        """Memory for copies of the state."""
        self.plan_cache: PlanCache[SavePlan] = PlanCache()
        """Plans of earlier saves."""
        self.coding = JobCoding()
        """Owned kinds and measurements that saves with compression share."""
        self.part_sums = SumCache()
        """Sums of the declared parts of earlier saves."""
        self.copies, self.commits = queues or _new_queues(clock)
        """Copies of states; and writes, votes and commits of saves, away from the training thread. One queue of copies:
        two concurrent saves could each hold half of the buffers and wait forever."""
        self.differing: dict[bytes, frozenset[str]] = {}
        """By fingerprint of a layout, the names that differed at its last save. The agreement skips these names."""
        self.progress = self.commits.progress
        """The writes of this process. No wait for a write lasts for ever if storage does not answer."""
        self.attempts_under_way: set[str] = set()
        """Ids of the attempts of this process that have not ended. No removal of leftovers takes files of these."""
        self.attempts_begun: deque[str] = deque(maxlen=_ATTEMPTS_MAX)
        """Ids of the last attempts of this process, ended or not: a save may replace the checkpoint of any of these."""
        self._logged, self._keys = set[str](), list[tuple[int, str]]()
        # Taken on threads of DAEMON_POOL, and on the commit thread: no handler waits for this lock.
        self._keys_lock = threading.Lock()

    def with_settings(self, settings: Settings) -> Job:
        """Return a job of the same ranks with other settings, over the same connections and threads.

        A collective. Close neither of the jobs: `close` ends the threads of both.
        """
        queues = self.copies, self.commits
        job = Job(self.comm, self.clock, settings, self._framework, codecs=self.codecs, queues=queues)
        # Saves of both jobs end in one order: a save of one job may overwrite a checkpoint of the other.
        job.attempts_under_way, job.attempts_begun = self.attempts_under_way, self.attempts_begun
        job.coding = JobCoding(self.coding.histories)
        return job

    @property
    def framework(self) -> RecordingFramework:
        """The framework that takes states apart and fills them."""
        assert self._framework is not None, "this job moves stored bytes only"
        return self._framework

    @property
    def key_value_store(self) -> KeyValueStore:
        """The job's key-value store."""
        return self.comm.key_value_store

    def key(self, *parts: object) -> str:
        """Return a key of this job."""
        return "/".join((self.nonce, *map(str, parts)))

    def keys_of(self, ranks: Iterable[int], *parts: object) -> list[str]:
        """Return for each rank the key of this job that ends with the rank."""
        prefix = self.key(*parts)
        return [f"{prefix}/{rank}" for rank in ranks]

    def attempt_id(self, sequence: int, step: int) -> str:
        """Return the id of one try at one step, 16 hex digits: hash(nonce, sequence, step)."""
        return short_digest_of(self.nonce.encode(), str(sequence).encode(), str(step).encode()).hex()

    def begin_attempt(self, attempt: str, ended: Future[SaveReport]) -> None:
        """Count an attempt as under way until the attempt has ended."""
        under_way = self.attempts_under_way
        under_way.add(attempt)
        self.attempts_begun.append(attempt)
        # Without the job: the handle of the save may be kept for long.
        ended.add_done_callback(lambda _: under_way.discard(attempt))

    def deadline(self) -> float:
        """Return the monotonic time at which a wait for other ranks that begins now must end."""
        return self._deadline_after(self.settings.commit_timeout_seconds)

    @property
    def agreement_seconds(self) -> float:
        """How long this rank waits for the others to agree on a save, from the arrival of this rank.

        The training thread waits. The absent ranks may wait in a collective of the training. So this wait must end well
        before such a collective times out.
        """
        settings = self.settings
        if settings.agreement_timeout_seconds is not None:
            return settings.agreement_timeout_seconds
        return min(self._held_seconds_max, settings.commit_timeout_seconds)

    @property
    def stall_seconds(self) -> float:
        """How long a save may hold the training thread while this process writes no byte."""
        seconds = self.settings.stall_timeout_seconds
        return self._held_seconds_max if seconds is None else seconds

    @property
    def _held_seconds_max(self) -> float:
        """How long a save may hold a training thread while other ranks wait in a collective of the training."""
        seconds = self.comm.timeout_seconds
        return _HELD_SECONDS_MAX if seconds is None else min(seconds / 2, _HELD_SECONDS_MAX)

    def agreement_deadline(self) -> float:
        """Return the monotonic time at which an agreement on a save that begins now must end."""
        return self._deadline_after(self.agreement_seconds)

    def _deadline_after(self, timeout: float) -> float:
        now = self.clock.monotonic_seconds()
        return now + (
            timeout
            if self.process_deadline is None
            else min(timeout, max(self.process_deadline - now, _ANNOUNCE_SECONDS_MIN))
        )

    def is_elected(self, key: str) -> bool:
        """Return whether this rank is the first to claim a key. The elected rank does the work for all.

        Raises:
            UnavailableError: The key-value store failed.
            TimeoutError: The key-value store gave no answer.
        """
        return is_elected(self.comm, key, self.seconds_left(self.deadline()))

    @property
    def asking_seconds(self) -> float:
        """How long the other ranks wait for the findings of the elected rank, which makes a request for each rank."""
        return 2.0 + 0.002 * self.comm.world_size

    @property
    def verdict_seconds(self) -> float:
        """How long after the deadline of a rank a verdict on a save may come: the waits of `SaveAgreement`."""
        # The limit of a high rank, and then the wait of that rank for the elected rank.
        return VERDICT_GRACE_SECONDS + 2 * self.asking_seconds

    def seconds_left(self, deadline: float) -> float:
        """Return the seconds left until a deadline, at least a few milliseconds."""
        return max(deadline - self.clock.monotonic_seconds(), 0.005)

    def record_differing(self, layout: bytes, names: frozenset[str]) -> None:
        """Record the buffers and values that differ under a layout, and forget the layout recorded longest ago."""
        self.differing.pop(layout, None)
        self.differing[layout] = names
        if len(self.differing) > _LAYOUTS_MAX:
            del self.differing[next(iter(self.differing))]

    def is_first_occurrence(self, message: str) -> bool:
        """Return whether a message was not logged before, and record it as logged."""
        if message in self._logged:
            return False
        self._logged.add(message)
        return True

    def warn_once(self, name: str, text: str) -> None:
        """Log a warning on rank 0, unless the same text was logged before.

        Args:
            name: Name of the save or load that the warning is about.
            text: The warning.
        """
        if self.comm.rank == 0 and self.is_first_occurrence(text):
            logger.warning("%s: %s", name, text)

    def record_keys(self, sequence: int, keys: Sequence[str]) -> None:
        """Record keys that this rank set for a save; `delete_keys_before` removes them."""
        with self._keys_lock:
            self._keys += [(sequence, key) for key in keys]

    def delete_agreement_keys_before(self, sequence: int) -> None:
        """Remove this rank's keys of the agreements before an agreement that all ranks have entered.

        A rank takes part in one agreement after the other, and reads the refusal of a missed agreement before the next.
        Keys of votes stay: a rank may still wait for the outcome of an earlier save.
        """
        self._delete_keys(sequence, self.key("opening", ""))

    def delete_keys_before(self, sequence: int) -> None:
        """Remove this rank's keys of saves before a committed save, so that the key-value store stays small.

        A commit needs every rank's vote, and a rank votes only after its earlier saves have ended. So no rank still
        waits on those keys. A weaker rule would be wrong: a rank that finds no outcome aborts the attempt as undecided.
        """
        self._delete_keys(sequence)

    def _delete_keys(self, sequence: int, prefix: str = "") -> None:
        with self._keys_lock:
            old = [each for each in self._keys if each[0] < sequence and each[1].startswith(prefix)]
            self._keys = [each for each in self._keys if each[0] >= sequence or not each[1].startswith(prefix)]
        try:
            self.key_value_store.delete([key for _, key in old])
        except BaseException:
            with self._keys_lock:
                self._keys += old  # The next commit tries again.
            raise

    def close(self) -> None:
        """Wait for the saves in the background, end the threads, and free the arena."""
        self.copies.close()
        self.commits.close()
        self.arena.close()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked after the job was made. A fork does not copy the job's threads."""
        return os.getpid() != self._process


def _new_queues(clock: Clock) -> tuple[BackgroundQueue, BackgroundQueue]:
    progress = WriteProgress(clock)
    return BackgroundQueue("holdfast-copy", progress), BackgroundQueue("holdfast-commit", progress)


def is_elected(comm: Comm, key: str, seconds: float) -> bool:
    """Return whether this rank is the first to claim a key within a time limit; as `Job.is_elected`."""
    own = str(comm.rank).encode()
    return comm.key_value_store.compare_set(key, b"", own, seconds) == own


def _statements(comm: Comm, clock: Clock, settings: Settings) -> list[bytes]:
    """Return the statements of all ranks to a new job: the nonce of rank 0, and the node and memory of each rank."""
    nonce = clock.random_bytes(_NONCE_BYTES) if comm.rank == 0 else bytes(_NONCE_BYTES)
    # Only an arena without a stated budget needs the number of ranks that share memory.
    memory = memory_statement() if settings.arena_bytes_max is None else b""
    return comm.all_gather(nonce + node_identity() + memory)


def error_text(error: BaseException) -> str:
    """Return an error as ASCII text that another rank can raise again."""
    ours = translated(error)
    return json.dumps({"kind": type(ours).__name__, "message": str(ours)[:20_000], "absent": is_absence(error)})


def is_absence(error: BaseException) -> bool:
    """Return whether an error reports damage because a named file is missing."""
    if not isinstance(error, CorruptError):
        return False
    cause = error.__cause__
    while cause is not None and not isinstance(cause, MissingError):
        cause = cause.__cause__
    return cause is not None


def error_from(text: str, prefix: str = "") -> CheckpointError:
    """Return the error that `error_text` encoded, of the same class."""
    document = json.loads(text)
    return BY_NAME.get(document["kind"], UnavailableError)(prefix + document["message"])


def raise_together(statuses: Sequence[str | None], own_rank: int, own_error: BaseException | None) -> None:
    """Raise on every rank if any rank failed.

    A rank that failed raises its own error. The others raise the error of the lowest failing rank, with that rank in
    the message. If several ranks failed, the cause is a group of all errors.

    Args:
        statuses: By rank, an `error_text` or None.
        own_rank: This rank.
        own_error: Error of this rank; None without a failure.
    """
    failed = [(rank, text) for rank, text in enumerate(statuses) if text is not None]
    if not failed:
        return
    errors = [error_from(text, f"rank {rank}: ") for rank, text in failed]
    cause = ExceptionGroup(f"{len(errors)} ranks failed", errors) if len(errors) > 1 else None
    if own_error is not None:
        _raise_from(own_error, cause)
    _raise_from(errors[0], cause)


def _raise_from(error: BaseException, cause: BaseException | None) -> NoReturn:
    if cause is None:
        raise error
    raise error from cause
