"""Overwriting one checkpoint: what rank 0 does before any rank writes, and how the committing rank replaces a manifest.

The order of an overwrite, and what a crash leaves in each state:

    claimed    rank 0 holds the claim, and nothing that others prepared is left. The old checkpoint.
    cleared    rank 0 has removed attempts that no manifest can name any more. The old checkpoint.
    written    every rank has written its files beside the old ones and voted. The old checkpoint.
    prepared   the committing rank has stored the new manifest under `overwriting/`. The old checkpoint.
    compared   it has seen its claim after that, then the manifest that rank 0 saw. The old checkpoint.
    marked     it has marked the old attempt as replaced. The old checkpoint.
    published  it has moved the new manifest over the old one. The new checkpoint.

The files of the old attempt stay for readers. The next overwrite removes them once the grace has passed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress

from holdfast.base.clock import Clock, utc_now_text
from holdfast.base.interrupts import GUARD
from holdfast.base.ports.store import Store
from holdfast.core.engine.background import DAEMON_POOL, is_done_soon, wait_in_slices
from holdfast.core.format.names import MANIFEST_FILE, step_of_folder
from holdfast.core.format.sealed_json import stated_digest
from holdfast.errors import CheckpointError, ConflictError, InvalidError, MissingError, UnavailableError
from holdfast.stored.checkpoint.location import CheckpointLocation, require_no_run
from holdfast.stored.leases.path_claim import PathClaim, release_path_claim, take_path_claim
from holdfast.stored.leases.process import can_be_seen, this_process
from holdfast.stored.publishing.outcome import Outcome, committed, unknown
from holdfast.stored.repository.catalog import exists
from holdfast.stored.repository.overwriting import (
    ReplacedMark,
    SeenManifest,
    attempt_folders,
    clear_away,
    foreign_file_at,
    is_ours,
    is_prepared,
    prepare_manifest,
    publish_prepared,
    put_replaced_mark,
    remove_prepared,
    replaced_marks,
    require_claim,
    seen_manifest,
    unneeded_files,
    was_published,
)
from holdfast.training.coordination.job import Job
from holdfast.training.coordination.save_context import Overwrite, SaveContext

logger = logging.getLogger(__name__)

_REMOVAL_SECONDS_MAX = 5.0
"""How long the end of a save waits for the removal of old attempts. If it takes longer, it goes on."""


class Overwriting:
    """What rank 0 does at the path of one save that may overwrite. It refers to no state and, once ended, to no job."""

    def __init__(self, location: CheckpointLocation, job: Job) -> None:
        """Look at no storage yet.

        Args:
            location: The path.
            job: The ranks that save.
        """
        self._location, self._store = location, location.store
        self._clock, self._settings = job.clock, job.settings
        self._job: Job | None = job
        self._claim: PathClaim | None = None
        self._removal: Future[None] | None = None
        self._replaced: str | None = None
        self._is_ended = False

    def claim(self) -> SaveContext:
        """Claim the path, begin to remove what is not needed there any more, and return the context for every rank.

        Raises:
            InvalidError: The path is a run or a step of one, or holds what Holdfast did not write as one checkpoint.
            ConflictError: Another job overwrites the checkpoint.
        """
        job = self._job
        assert job is not None, "a save is claimed before it ends"
        if self._require_replaceable() is not None:
            self._store.require_replacing_moves()
        claim = take_path_claim(self._store, self._clock, self._settings.lease_seconds, job.commits)
        try:
            # Before the manifest is read: an attempt that publishes and ends from now on must count as one of ours.
            begun, under_way = {*job.attempts_begun}, tuple(sorted(job.attempts_under_way))
            ended = begun.difference(under_way)
            # Only now: what others prepared cannot be published any more.
            seen = self._require_replaceable()
            # Each attempt beside a damaged manifest may be the one that it names, and hold what a repair needs.
            if seen is not None and seen.attempt is None:
                logger.warning("%s: the checkpoint there is damaged; it is overwritten as asked", self._location.url)
            elif seen is not None:
                self._replaced = seen.attempt
                unneeded = self._unneeded(seen, lambda: {*under_way, *job.attempts_begun} - ended)
                if unneeded:
                    self._removal = DAEMON_POOL.submit(lambda: self._remove(unneeded, claim))
        except BaseException:
            release_path_claim(claim)
            raise
        with GUARD:
            is_late = self._is_ended
            self._claim = None if is_late else claim
        if is_late:  # The save has ended while storage was slow to answer.
            release_path_claim(claim)
        return SaveContext(
            run_id=self._clock.random_bytes(8).hex(),
            created=utc_now_text(self._clock),
            overwrite=Overwrite(claim.holder.nonce, "" if seen is None else seen.identity, under_way),
        )

    def note_replaced(self) -> None:
        """Have the clock of this rank count for the attempt that was replaced: this rank looks again next time."""
        replaced = self._replaced
        if replaced is not None:
            with suppress(CheckpointError):
                is_done_soon(
                    lambda: _mark(self._store, replaced, self._clock, self._settings.lease_seconds), self._clock
                )

    def end(self) -> None:
        """Release the claim; called once the save has ended, however it ended. Never raises."""
        with GUARD:
            self._is_ended, self._job = True, None
            claim, self._claim = self._claim, None
        removal, self._removal = self._removal, None
        try:
            if removal is not None:
                with suppress(Exception):
                    wait_in_slices(removal, _REMOVAL_SECONDS_MAX, self._clock, lambda: None)
        finally:
            if claim is not None:
                self._release(claim)

    def _release(self, claim: PathClaim) -> None:
        """Release the claim on another thread: this one may be the training thread."""
        try:
            is_done_soon(lambda: release_path_claim(claim), self._clock)
        except UnavailableError:  # No thread could be started.
            release_path_claim(claim)

    def _require_replaceable(self) -> SeenManifest | None:
        """Return the manifest that may be replaced, None if nothing is there.

        Raises:
            InvalidError: What is there may not be replaced. It was not touched.
        """
        location, store = self._location, self._store
        name = location.url.rstrip("/").rpartition("/")[2]
        if location.root is not None or step_of_folder(name) is not None:
            raise InvalidError(
                f"{location.url}: is a step of a run; expected the path of a single checkpoint. A step is never "
                "overwritten. Save to another path, or the next step with CheckpointManager.save"
            )
        if location.foreign is not None and location.foreign.name:
            raise InvalidError(f"{location.url}: is a file; {_NOT_OURS}")
        require_no_run(store, "overwrite one checkpoint here")
        try:
            seen, stranger = seen_manifest(store), None
            if seen is None:
                stranger = foreign_file_at(store)
                # An earlier save of this job may have published since the first look.
                seen = seen_manifest(store)
        except InvalidError as error:
            raise InvalidError(f"{error}. It was not overwritten, and nothing was touched") from error
        if seen is None and stranger is not None:
            raise InvalidError(f"{location.url}: holds {stranger} and no {MANIFEST_FILE}; {_NOT_OURS}")
        if seen is not None and seen.attempt is None and not is_ours(store, seen):
            raise InvalidError(f"{location.url}: its {MANIFEST_FILE} is not of Holdfast; {_NOT_OURS}")
        return seen

    def _unneeded(self, seen: SeenManifest, not_ended: Callable[[], Collection[str]]) -> list[str]:
        """Return the attempts that no manifest names: those replaced before the grace, and those never published.

        In the call that claims: no rank writes files of this save yet.

        Args:
            seen: The manifest that is there.
            not_ended: Returns the attempts of this job that had not ended before the manifest was read.
        """
        attempts = attempt_folders(self._store)
        marks = replaced_marks(self._store)
        # Asked for last: each listed attempt of this job has begun by now.
        old = {*attempts, *marks}.difference(not_ended(), [seen.attempt])
        # A mark without its attempt is what a removal that was cut off has left.
        return [name for name in old if name not in attempts or name not in marks or self._is_over(name, marks[name])]

    def _remove(self, unneeded: Collection[str], claim: PathClaim) -> None:
        """Remove attempts, while the ranks write."""
        store = self._store
        try:
            files = unneeded_files(store, unneeded)
            # After the listing: no listed file belongs to a job that took the claim over.
            require_claim(store, claim.holder.nonce)
            # What rank 0 saw, or what this job has published since: a small save may be quicker than this.
            current = seen_manifest(store)
            if current is not None and current.attempt is not None and current.attempt not in unneeded:
                for keys in files.values():
                    store.delete(keys)
        except CheckpointError as error:
            logger.warning("%s: old attempts stay until the next overwrite: %s", self._location.url, error)

    def _is_over(self, attempt: str, mark: ReplacedMark | None) -> bool:
        """Return whether the grace of a replaced attempt has passed; begin it if no clock here says when it began."""
        holder = this_process(self._clock, self._settings.lease_seconds)
        now = self._clock.monotonic_seconds()
        if mark is not None and can_be_seen(mark.holder):
            return now - mark.monotonic_seconds >= self._settings.collect_grace_seconds
        if mark is not None and mark.is_repeated:
            return True  # Another machine began it anew, and has ended an overwrite since.
        put_replaced_mark(self._store, attempt, ReplacedMark(holder, now, is_repeated=True))
        return False


_NOT_OURS = (
    "expected a checkpoint of Holdfast, or nothing. overwrite=True replaces nothing else, and nothing was touched. "
    "Save to another path, or remove it first if it is not needed"
)


def _mark(store: Store, attempt: str, clock: Clock, lease_seconds: float) -> None:
    holder = this_process(clock, lease_seconds)
    put_replaced_mark(store, attempt, ReplacedMark(holder, clock.monotonic_seconds(), is_repeated=False))


def replace_manifest(
    location: CheckpointLocation, attempt: str, data: bytes, overwrite: Overwrite, job: Job
) -> Outcome | None:
    """Publish a manifest in place of the one that rank 0 saw; do nothing if none was and is there.

    Args:
        location: Where.
        attempt: The attempt that the manifest names.
        data: The manifest.
        overwrite: What it may replace.
        job: The ranks that save.
    Returns:
        `committed`; `unknown` if the store failed as it was replaced; None if the manifest is to be put if absent.
    Raises:
        ConflictError: Another manifest is there, or another job took the claim over; nothing was replaced.
        CheckpointError: It is certain that nothing was replaced.
    """
    store = location.store
    # A process alone commits the saves of its threads one after the other, in the order in which they are staged.
    own = {*overwrite.attempts, *(job.attempts_begun if job.comm.world_size == 1 else ())}
    if _require_seen(location, overwrite, own) is None:
        return None
    require_claim(store, overwrite.claim)
    # An earlier save of this job whose committing rank hangs must not replace what this one publishes.
    clear_away(store, overwrite.claim)
    try:
        prepare_manifest(store, attempt, data)
        # A job that takes the claim over from now on removes what is prepared.
        require_claim(store, overwrite.claim)
        replaced = _require_seen(location, overwrite, own)
        if replaced is not None and replaced.attempt is not None:
            _mark(store, replaced.attempt, job.clock, job.settings.lease_seconds)
    except BaseException:
        with suppress(CheckpointError):
            remove_prepared(store, attempt)
        raise
    failure: Exception | None = None
    try:
        publish_prepared(store, attempt)
    except MissingError as taken:
        failure = taken
    except Exception as error:
        if _is_certainly_prepared(store, attempt):
            with suppress(CheckpointError):
                remove_prepared(store, attempt)
            raise
        return unknown(str(error))
    return _published_or_taken(location, attempt, data, failure)


def lost_claim_of(location: CheckpointLocation, overwrite: Overwrite, error: Exception) -> ConflictError | None:
    """Return the loss of the claim if that is behind an error of a commit: another job has removed its files then."""
    try:
        require_claim(location.store, overwrite.claim)
    except ConflictError as lost:
        lost.__cause__ = error
        return lost
    except CheckpointError:
        pass  # What failed first says more.
    return None


def _published_or_taken(location: CheckpointLocation, attempt: str, data: bytes, failure: Exception | None) -> Outcome:
    """Return `committed` if a move has published a manifest; refuse if another job had removed what was prepared."""
    try:
        is_published = was_published(location.store, attempt, data)
        is_there = is_published or exists(location.store, MANIFEST_FILE)
    except CheckpointError as error:
        return unknown(str(error))
    if not is_published:
        what = "another job took over" if is_there else "the checkpoint was removed"
        raise ConflictError(
            f"{location.url}: {what} while this save published it; expected to be the only one that changes it. What "
            "is there is not of this save. Stop the other job, or save elsewhere"
        ) from failure
    digest = stated_digest(data)
    assert digest is not None, "a manifest is sealed"
    return committed(digest)


def _require_seen(location: CheckpointLocation, overwrite: Overwrite, own: Collection[str]) -> SeenManifest | None:
    """Return the manifest that is there, which may be replaced; None if there is none, and was none.

    Args:
        location: Where.
        overwrite: What rank 0 saw.
        own: Attempts of this job that the save may replace although rank 0 saw another manifest.
    Raises:
        ConflictError: Another manifest is there than rank 0 saw.
    """
    found = seen_manifest(location.store)
    if found is None and not overwrite.seen:
        return None
    if found is not None and (found.identity == overwrite.seen or found.attempt in own):
        return found
    what = "was removed" if found is None else "was saved by another job"
    raise ConflictError(
        f"{location.url}: the checkpoint {what} while this save was under way; expected the one that it found. Nothing "
        "was replaced. Save again to overwrite it, or save elsewhere"
    )


def _is_certainly_prepared(store: Store, attempt: str) -> bool:
    """Return whether a manifest whose move failed is where it was, and cannot be moved later."""
    try:
        return store.traits.failed_calls_are_over and is_prepared(store, attempt)
    except Exception:  # noqa: BLE001 - not certain, whatever the error is
        return False
