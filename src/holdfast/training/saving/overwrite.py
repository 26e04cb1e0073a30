"""Overwriting one checkpoint: the claim of rank 0 before any rank writes, and the replacement of the manifest.

The order of an overwrite, and the checkpoint after a crash in each state:

    claimed    rank 0 holds the claim, and no manifest that others prepared is left. The old checkpoint.
    cleared    rank 0 has removed attempts that no manifest can name any more. The old checkpoint.
    written    every rank has written its files next to the old files and voted. The old checkpoint.
    prepared   the committing rank has stored the new manifest under `overwriting/`. The old checkpoint.
    compared   that rank has then seen the claim, and the manifest that rank 0 saw. The old checkpoint.
    marked     that rank has marked the old attempt as replaced. The old checkpoint.
    published  that rank has moved the new manifest over the old manifest. The new checkpoint.

The files of the old attempt stay for readers. The next overwrite removes these files once the grace has passed.
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
"""How long the end of a save waits for the removal of old attempts. A longer removal continues without the save."""


class Overwriting:
    """Claims the path of one save that may overwrite, on rank 0. Refers to no state and, once ended, to no job."""

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
        """Claim the path, begin to remove attempts that are not needed any more, and return the context for every rank.

        Raises:
            InvalidError: The path is a run or a step of a run, or holds files that are not one checkpoint of Holdfast.
            ConflictError: Another job overwrites the checkpoint.
        """
        job = self._job
        assert job is not None, "a save is claimed before it ends"
        if self._require_replaceable() is not None:
            self._store.require_replacing_moves()
        claim = take_path_claim(self._store, self._clock, self._settings.lease_seconds, job.commits)
        try:
            # Before the manifest is read: an attempt that publishes and ends from now on must count as our own.
            begun, under_way = {*job.attempts_begun}, tuple(sorted(job.attempts_under_way))
            ended = begun.difference(under_way)
            # Only now: manifests that others prepared cannot be published any more.
            seen = self._require_replaceable()
            # A damaged manifest may name any attempt in the folder, and a repair may need the files of that attempt.
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
        """Mark the replaced attempt with the clock of this rank: this rank checks the grace at the next overwrite."""
        replaced = self._replaced
        if replaced is not None:
            with suppress(CheckpointError):
                is_done_soon(
                    lambda: _mark(self._store, replaced, self._clock, self._settings.lease_seconds), self._clock
                )

    def end(self) -> None:
        """Release the claim; called once the save has ended, in success or failure. Never raises."""
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
        """Release the claim on another thread: the caller may be the training thread."""
        try:
            is_done_soon(lambda: release_path_claim(claim), self._clock)
        except UnavailableError:  # No thread could be started.
            release_path_claim(claim)

    def _require_replaceable(self) -> SeenManifest | None:
        """Return the manifest that may be replaced; None for an empty path.

        Raises:
            InvalidError: The content of the path may not be replaced. No file was touched.
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
        """Return the attempts that no manifest names: replaced before the grace, or never published.

        In the call that claims: no rank writes files of this save yet.

        Args:
            seen: The manifest at the path.
            not_ended: Returns the attempts of this job that had not ended before the manifest was read.
        """
        attempts = attempt_folders(self._store)
        marks = replaced_marks(self._store)
        # Called last: each listed attempt of this job has begun by now.
        old = {*attempts, *marks}.difference(not_ended(), [seen.attempt])
        # A mark without its attempt remains after an interrupted removal.
        return [name for name in old if name not in attempts or name not in marks or self._is_over(name, marks[name])]

    def _remove(self, unneeded: Collection[str], claim: PathClaim) -> None:
        """Remove attempts, while the ranks write."""
        store = self._store
        try:
            files = unneeded_files(store, unneeded)
            # After the listing: no listed file belongs to a job that took the claim over.
            require_claim(store, claim.holder.nonce)
            # The manifest that rank 0 saw, or a newer manifest of this job: a small save may end before this removal.
            current = seen_manifest(store)
            if current is not None and current.attempt is not None and current.attempt not in unneeded:
                for keys in files.values():
                    store.delete(keys)
        except CheckpointError as error:
            logger.warning("%s: old attempts stay until the next overwrite: %s", self._location.url, error)

    def _is_over(self, attempt: str, mark: ReplacedMark | None) -> bool:
        """Return whether the grace of a replaced attempt has passed; start the grace if no clock here has the start."""
        holder = this_process(self._clock, self._settings.lease_seconds)
        now = self._clock.monotonic_seconds()
        if mark is not None and can_be_seen(mark.holder):
            return now - mark.monotonic_seconds >= self._settings.collect_grace_seconds
        if mark is not None and mark.is_repeated:
            return True  # Another machine restarted the grace, and has ended an overwrite since.
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
    """Publish a manifest in place of the manifest that rank 0 saw; do nothing if the path had and has no manifest.

    Args:
        location: Where.
        attempt: The attempt that the manifest names.
        data: The manifest.
        overwrite: The manifest that may be replaced.
        job: The ranks that save.
    Returns:
        `committed`; `unknown` if the store failed during the move; None if the manifest is to be put if absent.
    Raises:
        ConflictError: Another manifest is there, or another job took the claim over; nothing was replaced.
        CheckpointError: It is certain that nothing was replaced.
    """
    store = location.store
    # A process alone commits the saves of its threads one after the other, in the order of staging.
    own = {*overwrite.attempts, *(job.attempts_begun if job.comm.world_size == 1 else ())}
    if _require_seen(location, overwrite, own) is None:
        return None
    require_claim(store, overwrite.claim)
    # An earlier save of this job whose committing rank hangs must not replace the manifest of this save.
    clear_away(store, overwrite.claim)
    try:
        prepare_manifest(store, attempt, data)
        # A job that takes the claim over from now on removes the prepared manifest.
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
    """Return the lost claim if that caused an error of a commit: the other job has then removed the files."""
    try:
        require_claim(location.store, overwrite.claim)
    except ConflictError as lost:
        lost.__cause__ = error
        return lost
    except CheckpointError:
        pass  # The first error is more precise.
    return None


def _published_or_taken(location: CheckpointLocation, attempt: str, data: bytes, failure: Exception | None) -> Outcome:
    """Return `committed` if a move has published a manifest; refuse if another job removed the prepared manifest."""
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
    """Return the manifest at the path, which may be replaced; None if the path had and has no manifest.

    Args:
        location: Where.
        overwrite: The manifest that rank 0 saw.
        own: Attempts of this job that the save may replace although rank 0 saw another manifest.
    Raises:
        ConflictError: The manifest at the path is not the manifest that rank 0 saw.
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
    """Return whether a manifest whose move failed is still in place, and cannot be moved later."""
    try:
        return store.traits.failed_calls_are_over and is_prepared(store, attempt)
    except Exception:  # noqa: BLE001 - not certain, whatever the error is
        return False
