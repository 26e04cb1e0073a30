"""Which checkpoint a load takes: the one at a path, the step that the caller names, or the newest undamaged step.

Rank 0 goes through the candidates of a `StepChoice` until one is sound: `resolve`. The other ranks load what rank 0
sends. If any rank then finds damage, and the choice falls back, all ranks begin again with the next candidate.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count

from holdfast.base.clock import Clock, utc_now_text
from holdfast.base.ports.store import Store
from holdfast.base.types.reports import SkippedStep
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX
from holdfast.core.format.names import manifest_key
from holdfast.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    MissingError,
    UnavailableError,
    first_three,
    printable,
)
from holdfast.stored.checkpoint.location import CheckpointLocation, is_all_there, require_no_checkpoint
from holdfast.stored.repository.catalog import require_run
from holdfast.stored.repository.near_tier import read_near
from holdfast.stored.repository.publish import get_or_none
from holdfast.stored.repository.quarantine import QuarantineRecord, identity_at, quarantine, quarantined
from holdfast.stored.repository.timelines import RunTimelines, StoredManifest
from holdfast.stored.repository.two_roots import TwoRoots
from holdfast.training.coordination.job import raise_together
from holdfast.training.loading.named_step import StepQuery, location_of, no_step
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


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that a load may take."""

    location: CheckpointLocation
    """Where the checkpoint is stored."""

    places: tuple[int, ...] = ()
    """Which of near tier (0) and root (1) hold the checkpoint, in the order of reading; empty if the run has one place.
    """

    newer: tuple[int, ...] = ()
    """Newer steps that were not asked for, ascending."""

    passed_over: tuple[SkippedStep, ...] = ()
    """Newer steps that were found damaged."""

    discards: bool = False
    """Whether rank 0 discards the newer steps after the load."""

    requires_whole: bool = False
    """Whether any pack that is too short is damage; otherwise only a tensor in the missing part is refused."""


Candidates = Generator[Candidate, StepDamage | None, None]
"""The checkpoints that a load may take. `send` takes the damage of the last candidate, and None for the first one."""


class StepChoice:
    """The choice of the checkpoint of one load. Every rank makes a choice; rank 0 alone asks for candidates."""

    def __init__(
        self,
        home: CheckpointLocation,
        find: StepQuery | None = None,
        *,
        newer: Callable[[RunTimelines, StoredManifest], tuple[int, ...]] = lambda stored, chosen: (),
        discards: bool = False,
        is_path: bool = False,
        may_be_empty: bool = False,
    ) -> None:
        """Look at no storage yet.

        Args:
            home: The root of a run, or one checkpoint.
            find: Finds the step that the caller names; None for the newest valid step.
            newer: Returns the newer steps that exist, for a step that the caller names.
            discards: Whether this rank discards the newer steps after the load. If ranks differ, all are refused.
            is_path: Whether the home is one checkpoint.
            may_be_empty: Whether the caller knows that the home is the root of a run, which may have no step yet.
        """
        self.home, self.discards = home, discards
        self._roots = home.store if isinstance(home.store, TwoRoots) else None
        self.falls_back = self._roots is not None or (find is None and not (is_path and home.root is not None))
        """Whether a damaged checkpoint leads to another try; the same on every rank."""
        self._find, self._list_newer, self._is_path, self._may_be_empty = find, newer, is_path, may_be_empty
        self._judged: set[tuple[int, str]] = set()
        self._passed_over: list[SkippedStep] = []
        self._to_quarantine: list[tuple[Candidate, str, StepDamage]] = []

    def candidates(
        self,
        announce: Callable[[CheckpointLocation], None] = lambda location: None,
        is_first_occurrence: Callable[[str], bool] = lambda text: True,
    ) -> Candidates:
        """Yield the checkpoints that the load may take, each after the damage of the one before.

        Args:
            announce: Called with a step before its manifest is read, to store the reader lease.
            is_first_occurrence: Returns whether a text is new to this job's log.
        Raises:
            CorruptError: The only checkpoint is damaged, or every step is.
            MissingError: There is no such step.
            UnavailableError: A rank cannot see files that are there.
        """
        if self._find is not None or not self.falls_back:
            yield from self._named()
        elif self._is_path:
            yield from self._at_path()
        else:
            yield from self._newest_first(announce, is_first_occurrence)

    def settle(self, clock: Clock) -> None:
        """Quarantine the steps that were found damaged, once the load has ended. Storage errors are logged, not raised.

        Args:
            clock: For the time in quarantine records.
        """
        for candidate, identity, damage in self._to_quarantine:
            location, why, found = candidate.location, str(damage.error), utc_now_text(clock)
            step = location.step
            assert step is not None, "a run holds steps"
            try:
                quarantine(location.store, step, location.manifest_key, identity, why, found)
            except (MissingError, ConflictError) as gone:
                logger.info("step %d is not quarantined: %s", step, printable(str(gone)))
            except CheckpointError as error:
                # A load from a read-only root still succeeds.
                logger.warning("step %d could not be quarantined: %s", step, printable(str(error)))
        self._to_quarantine.clear()

    def _named(self) -> Candidates:
        """Yield the step that the caller names, in each place that holds it."""
        candidates = [Candidate(self.home)]  # The path of a step: no save overwrites a step.
        if self._find is not None:
            stored, chosen = self._find(self.home.store)
            newer = self._list_newer(stored, chosen)
            data = None if self._roots is None else get_or_none(self._roots, chosen.key, MANIFEST_BYTES_MAX)
            placed = self._placed(chosen, data)
            candidates = [replace(each, newer=newer, discards=self.discards) for each in placed]
        first: StepDamage | None = None
        for candidate in candidates:
            damage = yield candidate
            assert damage is not None, "another place is tried after damage alone"
            first = first or damage
        assert first is not None, "the step is somewhere"
        raise first.error

    def _placed(self, manifest: StoredManifest, data: bytes | None) -> list[Candidate]:
        """Return the step in each place that holds it, the near tier first.

        Args:
            manifest: The manifest, as both places list it.
            data: Its bytes; None if they were not read, or are too many.
        """
        location = replace(location_of(self.home, manifest), chosen=data)
        held = [] if self._roots is None or data is None else self._roots.holding(manifest.key, data)
        placed = []
        for number, key in held:
            moved = None if key == manifest_key(manifest.step) else key
            places = (number, *(other for other, _ in held if other != number))
            placed.append(Candidate(replace(location, moved_manifest=moved).at(places), places))
        return placed or [Candidate(location)]

    def _at_path(self) -> Candidates:
        """Yield the checkpoint at a path, with its manifest. Another job may overwrite the checkpoint meanwhile.

        After damage, yield the path again if another checkpoint is there by now; else raise the damage.
        """
        damage: StepDamage | None = None
        seen: str | None = None
        for overwrites in count():
            manifest: bytes | None = None
            with suppress(CheckpointError):  # A later read raises the error.
                manifest = self.home.store.get(self.home.manifest_key, MANIFEST_BYTES_MAX)
            before, seen = seen, None if manifest is None else hex_digest_of(manifest)
            if damage is not None:
                if seen is None or seen == before:
                    raise damage.error
                if overwrites == _OVERWRITES_MAX:
                    raise UnavailableError(
                        f"{self.home.url}: overwritten {_OVERWRITES_MAX} times while the load read it; expected a "
                        "checkpoint that stays as long. Load again"
                    )
                logger.info("%s: overwritten while it was read; the load begins again", self.home.url)
            damage = yield Candidate(replace(self.home, chosen=manifest))

    def _newest_first(
        self, announce: Callable[[CheckpointLocation], None], is_first_occurrence: Callable[[str], bool]
    ) -> Candidates:
        """Yield the steps of the newest timeline and its ancestors, from the newest down.

        Damaged steps are logged, skipped, and quarantined by `settle`. In a run with one timeline a step is read when
        its turn comes: the older steps are not read at all.
        """
        store = self.home.store
        if not self._may_be_empty:
            require_no_checkpoint(store)
        order = ResumeOrder(store, lambda listed: announce(location_of(self.home, listed)))
        for _ in range(_LISTINGS_MAX):
            with suppress(StepsChanged):
                yield from self._of_one_listing(order, is_first_occurrence)
                break
        else:
            raise UnavailableError(
                f"{store.url}: {_LISTINGS_MAX} times a step was deleted while the load looked at it; "
                "expected one that stays. Load again"
            )
        if self._passed_over:
            raise self._all_damaged()
        if order.had_steps:
            raise MissingError(
                f"{store.url}: every step was deleted while the load looked at it; expected one that stays. Load again"
            )
        if not self._may_be_empty:
            require_run(store)
            raise no_step(store)

    def _of_one_listing(self, order: ResumeOrder, is_first_occurrence: Callable[[str], bool]) -> Candidates:
        """Yield the steps of one listing. Once a step is deleted, a replacement may be newer than the untried steps.

        Raises:
            StepsChanged: The steps must be listed again.
        """
        order.list()
        if order.has_near and self._roots is None and is_first_occurrence(f"near tier of {self.home.store.url}"):
            _tell_of_near(self.home.store)
        records = _Records() if order.may_have_records else None
        # The identity belongs to the judged bytes: a record must not name a manifest that a later save put there.
        for manifest, identity, data in order.manifests():
            if (manifest.step, identity) in self._judged:
                continue
            whys: list[str] = []
            for candidate in self._placed(manifest, data):
                record = None if records is None else records.of(candidate.location, identity)
                if record is None:
                    passed_over = tuple(self._passed_over)
                    damage = yield replace(candidate, passed_over=passed_over, requires_whole=True)
                    assert damage is not None, "another place or an older step is tried after damage alone"
                    self._judge(manifest, identity, candidate, damage)
                    whys.append(str(damage.error))
                    continue
                whys.append(f"quarantined: {record.why}")
                if is_first_occurrence(record.key):
                    logger.warning(
                        "step %d is skipped%s: quarantined since %s: %s. `holdfast repair` checks it again",
                        manifest.step,
                        self._where(candidate),
                        printable(record.found),
                        printable(record.why),
                    )
            self._judged.add((manifest.step, identity))
            self._passed_over.append(SkippedStep(manifest.step, "; ".join(whys)))

    def _where(self, candidate: Candidate) -> str:
        return f" in {candidate.location.store.url}" if candidate.places else ""

    def _judge(self, manifest: StoredManifest, identity: str, candidate: Candidate, damage: StepDamage) -> None:
        """Pass over a damaged copy; raise `StepsChanged` if the step was deleted or replaced meanwhile."""
        step, text = manifest.step, printable(str(damage.error))
        if isinstance(damage.error, MissingError) or not self._is_still(manifest.key, identity):
            logger.info("step %d was deleted or replaced while the load looked at it: %s", step, text)
            raise StepsChanged
        if damage.is_absence and is_all_there(candidate.location):
            ranks = f"rank{'s' * (len(damage.ranks) > 1)} {first_three(sorted(damage.ranks))}"
            raise UnavailableError(
                f"step {step}: {damage.error}. Rank 0 looked again and sees every file of the step in its full size; "
                f"expected that {ranks} can read them too. Check the mounts of that machine and "
                "load again. Nothing was quarantined"
            )
        rest = "the other place is" if len(candidate.places) > 1 and candidate.places[0] == 0 else "older steps are"
        logger.warning("step %d is damaged and skipped%s; %s tried: %s", step, self._where(candidate), rest, text)
        self._to_quarantine.append((candidate, identity, damage))

    def _is_still(self, key: str, identity: str) -> bool:
        try:
            return identity_at(self.home.store, key) == identity
        except MissingError:
            return False

    def _all_damaged(self) -> CheckpointError:
        shown = first_three([f"step {skipped.step}: {skipped.why}" for skipped in self._passed_over])
        count, url = len(self._passed_over), self.home.store.url
        ranks = frozenset[int]().union(*(damage.ranks for _, _, damage in self._to_quarantine))
        # Several steps, all damaged for one rank only: the fault is its machine's. Rank 0 is excepted, since it alone
        # reads every manifest and index.
        if count == len(self._to_quarantine) > 1 and len(ranks) == 1 and ranks != {0}:
            (rank,) = ranks
            self._to_quarantine.clear()
            return UnavailableError(
                f"{url}: rank {rank} finds all {count} committed steps damaged, and no other rank finds damage; "
                f"expected one undamaged step. {shown}. Check the machine of that rank; `holdfast verify` on another "
                "machine shows whether the steps are damaged. Nothing was quarantined"
            )
        return CorruptError(
            f"{url}: all {count} committed steps are damaged; expected one undamaged step. {shown}. Try `holdfast "
            "repair`, or load the undamaged part of one with step= and only="
        )


def _tell_of_near(root: Store) -> None:
    with suppress(CheckpointError):
        if near := read_near(root):
            logger.warning(
                "%s: the run has a near tier, %s on host %s, where newer steps may lie; this load takes those of the "
                "root. To go on from the newest: CheckpointManager(root, near=holdfast.Tier(…)). A save without near= "
                "leaves the steps out that only the near tier has",
                root.url,
                near.url,
                near.host,
            )


class _Records:
    """The records of quarantine of each place, read when they are first asked for."""

    def __init__(self) -> None:
        self._by_url: dict[str, Mapping[int, Mapping[str, QuarantineRecord]]] = {}

    def of(self, location: CheckpointLocation, identity: str) -> QuarantineRecord | None:
        """Return the record of a manifest in the place of a location; None if there is none."""
        store, step = location.store, location.step
        assert step is not None, "a run holds steps"
        if store.url not in self._by_url:
            self._by_url[store.url] = quarantined(store)
        return self._by_url[store.url].get(step, {}).get(identity)


def raise_or_fall_back(
    statuses: Sequence[str | None], own_rank: int, own: Exception | None, *, falls_back: bool
) -> None:
    """Raise on every rank if any rank failed.

    Args:
        statuses: By rank, an `error_text` or None.
        own_rank: This rank.
        own: This rank's error.
        falls_back: Whether a damaged checkpoint leads to another try.
    Raises:
        StepDamaged: On every rank: all ranks that failed found damaged bytes, and another step may be undamaged.
        CheckpointError: As `raise_together`.
    """
    try:
        raise_together(statuses, own_rank, own)
    except CorruptError as error:
        failed = {rank: json.loads(text) for rank, text in enumerate(statuses) if text is not None}
        # Another step would fail as well, if a rank met any other error.
        if not falls_back or any(status["kind"] != CorruptError.__name__ for status in failed.values()):
            raise
        is_absence = all(status["absent"] for status in failed.values())
        raise StepDamaged(StepDamage(error, frozenset(failed), is_absence)) from error
