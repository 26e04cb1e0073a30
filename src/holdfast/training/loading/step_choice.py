"""Which checkpoint a load takes: the one asked for, or the newest undamaged step of a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from holdfast.base.clock import Clock, utc_now_text
from holdfast.base.ports.store import Store
from holdfast.base.types.reports import SkippedStep
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX
from holdfast.core.format.names import manifest_key, step_folder
from holdfast.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    InvalidError,
    MissingError,
    UnavailableError,
    first_three,
    printable,
)
from holdfast.stored.checkpoint.location import CheckpointLocation, is_all_there, require_no_checkpoint
from holdfast.stored.repository.catalog import manifest_digest
from holdfast.stored.repository.epochs import current_fence, fenced_error, is_valid
from holdfast.stored.repository.quarantine import QuarantineRecord, identity_at, quarantine, quarantined
from holdfast.stored.repository.timelines import RunTimelines, StoredManifest, run_timelines
from holdfast.training.coordination.job import raise_together
from holdfast.training.loading.resume_order import ResumeOrder, StepsChanged

logger = logging.getLogger(__name__)

_OVERWRITES_MAX = 10
"""How often a load begins again because its checkpoint was overwritten."""

_LISTINGS_MAX = 10
"""Listings of the steps in one load, at most: one at first, then one for each step that is deleted meanwhile."""


@dataclass(frozen=True, slots=True)
class StepDamage:
    """Damage that ranks found in a checkpoint that they began to load."""

    error: CheckpointError
    """What is damaged."""

    ranks: frozenset[int]
    """Ranks that found it."""

    is_absence: bool
    """Whether the damage is only that files are missing: a rank may fail to see files that another sees."""


class StepDamaged(Exception):
    """Every rank knows that the step is damaged, and that an older one is tried next."""

    def __init__(self, damage: StepDamage) -> None:
        super().__init__(str(damage.error))
        self.damage = damage


Announce = Callable[[CheckpointLocation], None]
"""Stores a lease on a step of a run."""


def unannounced(location: CheckpointLocation) -> None:
    """Store no lease: for a process that looks without one."""


class StepSelector(Protocol):
    """Chooses the checkpoint of a load. Only rank 0 calls `next`."""

    @property
    def falls_back(self) -> bool:
        """Whether a damaged checkpoint leads to another try; the same on every rank."""
        ...

    @property
    def discards(self) -> bool:
        """Whether this rank discards the newer steps after the load; the same on every rank, or all are refused."""
        ...

    @property
    def requires_whole(self) -> bool:
        """Whether any pack that is too short is damage; otherwise only a tensor in its missing part is refused."""
        ...

    @property
    def passed_over(self) -> Sequence[SkippedStep]:
        """Newer steps that were found damaged so far."""
        ...

    @property
    def newer(self) -> Sequence[int]:
        """Newer steps that were not asked for, ascending."""
        ...

    def next(self, damage: StepDamage | None, announce: Announce = unannounced) -> CheckpointLocation | None:
        """Return the checkpoint to load; None: there is nothing.

        Args:
            damage: The damage of the checkpoint that this returned before; None on the first call.
            announce: Called with a step before its manifest is read, if nobody reads that again: it stores the lease.
        Raises:
            CorruptError: Every other checkpoint is damaged too.
            UnavailableError: A rank cannot see files that are there.
        """
        ...

    def settle(self) -> None:
        """Record the damage that was found, once the load has ended. Storage errors are logged, not raised."""
        ...


class ExactStep:
    """The one checkpoint that was asked for."""

    falls_back = False
    requires_whole = False
    passed_over: Sequence[SkippedStep] = ()

    def __init__(
        self,
        choose: Callable[[], CheckpointLocation | None],
        newer: Callable[[], Sequence[int]] = tuple,
        *,
        discards: bool = False,
    ) -> None:
        """Look at no storage yet.

        Args:
            choose: Returns its location.
            newer: Returns the newer steps that exist.
            discards: Whether this rank discards them after the load.
        """
        self.discards = discards
        self._choose, self._list_newer = choose, newer
        self.newer: Sequence[int] = ()

    def next(self, damage: StepDamage | None, announce: Announce = unannounced) -> CheckpointLocation | None:
        """Return its location; raise its damage."""
        if damage is not None:
            raise damage.error
        location = self._choose()
        self.newer = self._list_newer()
        return location

    def settle(self) -> None:
        """Do nothing: only a search for the newest step quarantines."""


class PathSelector:
    """The checkpoint at a path, which another job may overwrite while it is read."""

    falls_back = True
    discards = False
    requires_whole = False
    passed_over: Sequence[SkippedStep] = ()
    newer: Sequence[int] = ()

    def __init__(self, location: CheckpointLocation) -> None:
        """Look at no storage yet.

        Args:
            location: The path.
        """
        self._location = location
        self._tries = 0
        self._seen: str | None = None

    def next(self, damage: StepDamage | None, announce: Announce = unannounced) -> CheckpointLocation:
        """Return its location with its manifest, again if another checkpoint is there by now; else raise the damage."""
        manifest = self._manifest()
        seen, before = None if manifest is None else hex_digest_of(manifest), self._seen
        self._tries, self._seen = self._tries + 1, seen
        if damage is not None:
            if seen is None or seen == before:
                raise damage.error
            if self._tries > _OVERWRITES_MAX:
                raise UnavailableError(
                    f"{self._location.url}: overwritten {_OVERWRITES_MAX} times while the load read it; expected a "
                    "checkpoint that stays as long. Load again"
                )
            logger.info("%s: overwritten while it was read; the load begins again", self._location.url)
        return replace(self._location, chosen=manifest)

    def settle(self) -> None:
        """Do nothing: only a search for the newest step quarantines."""

    def _manifest(self) -> bytes | None:
        """Return the stored manifest; None if there is none, or if a later read must say what is wrong."""
        with suppress(CheckpointError):
            return self._location.store.get(self._location.manifest_key, MANIFEST_BYTES_MAX)
        return None


@dataclass(frozen=True, slots=True)
class _DamagedStep:
    manifest: StoredManifest
    identity: str
    why: str
    ranks: frozenset[int]


class NewestValid:
    """The steps of the newest timeline and its ancestors, from the newest down.

    Damaged steps are logged, quarantined and skipped. In a run with one timeline a step is read when it is tried: the
    older ones are not read at all.
    """

    falls_back = True
    discards = False
    requires_whole = True
    newer: Sequence[int] = ()

    def __init__(
        self,
        home: CheckpointLocation,
        clock: Clock,
        is_first_occurrence: Callable[[str], bool],
        *,
        is_root: bool = False,
    ) -> None:
        """Look at no storage yet.

        Args:
            home: The root of the run.
            clock: For the time in quarantine records.
            is_first_occurrence: Returns whether a text is new to this job's log.
            is_root: Whether the caller knows that the path is no single checkpoint.
        """
        self._home, self._clock, self._is_first_occurrence = home, clock, is_first_occurrence
        self._is_root = is_root
        self._order = ResumeOrder(home.store)
        self._listings = 0
        self._records: Mapping[int, Mapping[str, QuarantineRecord]] = {}
        self._current: tuple[StoredManifest, str] | None = None
        self._judged: set[tuple[int, str]] = set()
        self._to_quarantine: list[_DamagedStep] = []
        self.passed_over: list[SkippedStep] = []

    def next(self, damage: StepDamage | None, announce: Announce = unannounced) -> CheckpointLocation | None:
        """Return the next older step that is not quarantined."""
        store = self._home.store
        if not self._listings:
            if not self._is_root:
                require_no_checkpoint(store)
            self._list()
        if damage is not None:
            self._judge(damage)
        while True:
            try:
                tried = self._order.next(lambda listed: announce(location_of(self._home, listed)))
            except StepsChanged:
                self._list()
                continue
            if tried is None:
                break
            # The identity is of the bytes that are judged: a record must not name a manifest that a save put there
            # afterwards.
            manifest, identity = tried.manifest, tried.identity
            if (manifest.step, identity) not in self._judged and not self._is_quarantined(manifest.step, identity):
                self._current = manifest, identity
                return replace(location_of(self._home, manifest), chosen=tried.data)
        if self.passed_over:
            self._raise_all_damaged()
        if self._order.had_steps:
            raise MissingError(
                f"{store.url}: every step was deleted while the load looked at it; expected one that stays. Load again"
            )
        return None

    def settle(self) -> None:
        """Quarantine the steps that were found damaged."""
        for damaged in self._to_quarantine:
            step, key = damaged.manifest.step, damaged.manifest.key
            try:
                quarantine(self._home.store, step, key, damaged.identity, damaged.why, utc_now_text(self._clock))
            except (MissingError, ConflictError) as gone:
                logger.info("step %d is not quarantined: %s", step, printable(str(gone)))
            except CheckpointError as error:
                # A load from a read-only root still succeeds.
                logger.warning("step %d could not be quarantined: %s", step, printable(str(error)))
        self._to_quarantine.clear()

    def _list(self) -> None:
        """List the steps, again after one was deleted: its replacement may be newer than the untried ones."""
        if self._listings == _LISTINGS_MAX:
            raise UnavailableError(
                f"{self._home.store.url}: {_LISTINGS_MAX} times a step was deleted while the load looked at it; "
                "expected one that stays. Load again"
            )
        self._listings += 1
        self._order.list()
        self._records = quarantined(self._home.store) if self._order.may_have_records else {}

    def _is_quarantined(self, step: int, identity: str) -> bool:
        record = self._records.get(step, {}).get(identity)
        if record is None:
            return False
        self._judged.add((step, identity))
        self.passed_over.append(SkippedStep(step, f"quarantined: {record.why}"))
        if self._is_first_occurrence(record.key):
            logger.warning(
                "step %d is skipped: quarantined since %s: %s. `holdfast repair` checks it again",
                step,
                printable(record.found),
                printable(record.why),
            )
        return True

    def _judge(self, damage: StepDamage) -> None:
        """Skip the current step, unless it was deleted or replaced meanwhile."""
        assert self._current is not None, "next() has returned a step"
        manifest, identity = self._current
        step, text = manifest.step, printable(str(damage.error))
        if isinstance(damage.error, MissingError) or not self._is_still(manifest.key, identity):
            logger.info("step %d was deleted or replaced while the load looked at it: %s", step, text)
            self._list()
            return
        if damage.is_absence and is_all_there(location_of(self._home, manifest)):
            ranks = f"rank{'s' * (len(damage.ranks) > 1)} {first_three(sorted(damage.ranks))}"
            raise UnavailableError(
                f"step {step}: {damage.error}. Rank 0 looked again and sees every file of the step in its full size; "
                f"expected that {ranks} can read them too. Check the mounts of that machine and "
                "load again. Nothing was quarantined"
            )
        logger.warning("step %d is damaged and skipped; older steps are tried: %s", step, text)
        self._judged.add((step, identity))
        self.passed_over.append(SkippedStep(step, str(damage.error)))
        self._to_quarantine.append(_DamagedStep(manifest, identity, str(damage.error), damage.ranks))

    def _is_still(self, key: str, identity: str) -> bool:
        try:
            return identity_at(self._home.store, key) == identity
        except MissingError:
            return False

    def _raise_all_damaged(self) -> NoReturn:
        shown = first_three([f"step {skipped.step}: {skipped.why}" for skipped in self.passed_over])
        count, url = len(self.passed_over), self._home.store.url
        ranks = frozenset[int]().union(*(damaged.ranks for damaged in self._to_quarantine))
        # Several steps, all damaged for one rank only: the fault is its machine's. Rank 0 is excepted, since it alone
        # reads every manifest and index.
        if count == len(self._to_quarantine) > 1 and len(ranks) == 1 and ranks != {0}:
            (rank,) = ranks
            self._to_quarantine.clear()
            raise UnavailableError(
                f"{url}: rank {rank} finds all {count} committed steps damaged, and no other rank finds damage; "
                f"expected one undamaged step. {shown}. Check the machine of that rank; `holdfast verify` on another "
                "machine shows whether the steps are damaged. Nothing was quarantined"
            )
        raise CorruptError(
            f"{url}: all {count} committed steps are damaged; expected one undamaged step. {shown}. Try `holdfast "
            "repair`, or load the undamaged part of one with step= and only="
        )


def find_step(
    store: Store, step: int, digest: str, listed: RunTimelines | None = None
) -> tuple[RunTimelines, StoredManifest]:
    """Return the timelines of a run, and the manifest of one step.

    Args:
        store: The root of the run.
        step: The step.
        digest: First digits of the digest of its manifest; empty for the step that a resume could take.
        listed: The timelines, if they were read already, from a path that is no single checkpoint.
    Raises:
        InvalidError: The path is one checkpoint, or several manifests have these digits.
        MissingError: No such step counts; the message names others.
    """
    if listed is None:
        require_no_checkpoint(store)
        listed = run_timelines(store)
    stored = listed
    found = stored.at(step)
    matching = [] if found is None else [found]
    if digest:
        matching = [
            manifest
            for manifest in (*stored.chain, *stored.superseded)
            if manifest.step == step
            and (manifest.digest or manifest_digest(store, step, manifest.key) or "").startswith(digest)
        ]
    if len(matching) == 1:
        return stored, matching[0]
    asked = f"{step}@{digest}" if digest else str(step)
    if matching:
        digests = first_three(f"{step}@{manifest.digest}" for manifest in matching)
        raise InvalidError(f"{store.url}: {asked} names several manifests: {digests}. Give more digits")
    superseded = [f"{step}@{(manifest.digest or '')[:8]}" for manifest in stored.superseded_at(step)]
    if superseded:
        raise MissingError(
            f"{store.url}: no step {asked} on the newest timeline; a newer timeline superseded it. Load it by its "
            f"digest: {first_three(superseded)}"
        )
    is_fenced = False
    with suppress(MissingError):
        is_fenced = not is_valid(store, current_fence(store), step)
    if is_fenced:
        raise fenced_error(f"{store.url}/{manifest_key(step)}")
    newest = first_three(manifest.step for manifest in reversed(stored.chain)) or "none"
    raise MissingError(
        f"{store.url}: no committed step {asked}; committed, newest first: {newest}. Choose one of them "
        "(holdfast ls lists all)"
    )


def location_of(home: CheckpointLocation, manifest: StoredManifest) -> CheckpointLocation:
    """Return the location of a step of a run.

    Args:
        home: The root of the run.
        manifest: Its manifest.
    """
    moved = None if manifest.key == manifest_key(manifest.step) else manifest.key
    return replace(
        home,
        folder=step_folder(manifest.step),
        step=manifest.step,
        moved_manifest=moved,
        digest=manifest.digest,
    )


def raise_or_fall_back(
    statuses: Sequence[str | None], own_rank: int, own: Exception | None, selector: StepSelector
) -> None:
    """Raise on every rank if any rank failed.

    Args:
        statuses: By rank, an `error_text` or None.
        own_rank: This rank.
        own: This rank's error.
        selector: The load's.
    Raises:
        StepDamaged: On every rank, if an older step may be undamaged.
        CheckpointError: As `raise_together`.
    """
    try:
        raise_together(statuses, own_rank, own)
    except CorruptError as error:
        damage = damage_in(error, statuses) if selector.falls_back else None
        if damage is not None:
            raise StepDamaged(damage) from error
        raise


def damage_in(error: CorruptError, statuses: Sequence[str | None]) -> StepDamage | None:
    """Return the damage, if every rank that failed found damaged bytes; None: another step would fail as well.

    Args:
        error: This rank's error.
        statuses: By rank, an `error_text` or None.
    """
    failed = {rank: json.loads(text) for rank, text in enumerate(statuses) if text is not None}
    if any(status["kind"] != CorruptError.__name__ for status in failed.values()):
        return None
    return StepDamage(error, frozenset(failed), all(status["absent"] for status in failed.values()))
