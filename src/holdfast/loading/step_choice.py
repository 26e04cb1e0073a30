"""Which checkpoint a load takes: the one asked for, or the newest step of a run that is whole."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from holdfast.checkpoint.location import CheckpointLocation, is_all_there, require_no_checkpoint
from holdfast.clock import Clock, utc_now_text
from holdfast.errors import CheckpointError, ConflictError, CorruptError, MissingError, UnavailableError, printable
from holdfast.format.names import step_folder
from holdfast.repository.catalog import committed_steps
from holdfast.repository.quarantine import QuarantineRecord, identity_at, quarantine, quarantined
from holdfast.types.reports import SkippedStep

logger = logging.getLogger(__name__)

_LISTINGS_MAX = 10
"""How often steps are listed where one goes while it is looked at."""


@dataclass(frozen=True, slots=True)
class StepDamage:
    """What ranks found wrong with a checkpoint that they began to load."""

    error: CheckpointError
    """What it is."""

    ranks: frozenset[int]
    """Ranks that met it."""

    is_absence: bool
    """Whether all that it says is that files are not there: one rank may fail to see what another does."""


class StepSelector(Protocol):
    """What rank 0 is asked for the place of a checkpoint to load."""

    @property
    def falls_back(self) -> bool:
        """Whether there may be another where one is damaged; the same on every rank."""
        ...

    @property
    def passed_over(self) -> Sequence[SkippedStep]:
        """Steps that were not taken so far."""
        ...

    @property
    def newer(self) -> Sequence[int]:
        """Newer steps that are not known to be damaged and were not asked for, ascending."""
        ...

    def next(self, wrong: StepDamage | None) -> CheckpointLocation | None:
        """Return the place to load from, None if there is nothing.

        Args:
            wrong: What is wrong with the place that was returned before; None at first.
        Raises:
            CorruptError: Nothing else is whole.
            UnavailableError: A rank does not see what is there.
        """
        ...

    def settle(self) -> None:
        """Note what was found damaged, once the load is over, however it ended; never raises on purpose."""
        ...


class ExactStep:
    """The one checkpoint that was asked for."""

    falls_back = False
    passed_over: Sequence[SkippedStep] = ()

    def __init__(
        self, choose: Callable[[], CheckpointLocation | None], newer: Callable[[], Sequence[int]] = tuple
    ) -> None:
        """Ask for nothing yet.

        Args:
            choose: Returns its place.
            newer: Returns the newer steps that exist.
        """
        self._choose, self._list_newer = choose, newer
        self.newer: Sequence[int] = ()

    def next(self, wrong: StepDamage | None) -> CheckpointLocation | None:
        """Return its place; what is wrong with it is the caller's error."""
        if wrong is not None:
            raise wrong.error
        place = self._choose()
        self.newer = self._list_newer()
        return place

    def settle(self) -> None:
        """Note nothing: what was asked for is the caller's to judge."""


@dataclass(frozen=True, slots=True)
class _CandidateStep:
    step: int
    identity: str
    why: str
    ranks: frozenset[int]


class NewestValid:
    """The steps of a run from the newest down. What is damaged is told, put under quarantine and passed over."""

    falls_back = True
    newer: Sequence[int] = ()

    def __init__(self, home: CheckpointLocation, clock: Clock, is_news: Callable[[str], bool]) -> None:
        """Look at nothing yet.

        Args:
            home: The root of the run.
            clock: For when something was found.
            is_news: Whether something is said for the first time.
        """
        self._home, self._clock, self._is_news = home, clock, is_news
        self._left: list[int] = []
        self._listings = 0
        self._had_steps = False
        self._known: Mapping[int, Mapping[str, QuarantineRecord]] = {}
        self._taken: tuple[int, str] | None = None
        self._done: set[tuple[int, str]] = set()
        self._found: list[_CandidateStep] = []
        self.passed_over: list[SkippedStep] = []

    def next(self, wrong: StepDamage | None) -> CheckpointLocation | None:
        """Return the next older step that is not under quarantine."""
        store = self._home.store
        if not self._listings:
            require_no_checkpoint(store)
            self._list()
        if wrong is not None:
            self._judge(wrong)
        while self._left:
            step = self._left.pop()
            try:
                # Before it is judged: what is noted then is of no manifest that came afterwards.
                taken = step, identity_at(store, step)
            except MissingError:
                self._list()
                continue
            if taken not in self._done and not self._is_quarantined(*taken):
                self._taken = taken
                return replace(self._home, folder=step_folder(step), step=step)
        if self.passed_over:
            self._raise_nothing_whole()
        if self._had_steps:
            raise MissingError(f"{store.url}: its steps went while they were looked at; expected one that stays")
        return None

    def settle(self) -> None:
        """Put under quarantine what was found damaged."""
        for each in self._found:
            try:
                quarantine(self._home.store, each.step, each.identity, each.why, utc_now_text(self._clock))
            except (MissingError, ConflictError) as gone:
                logger.info("step %d is not put under quarantine: %s", each.step, printable(str(gone)))
            except CheckpointError as error:
                # A root that can only be read is resumed from all the same.
                logger.warning("step %d could not be put under quarantine: %s", each.step, printable(str(error)))
        self._found.clear()

    def _list(self) -> None:
        """List the steps, again where one went: what took its place may be newer than what is left."""
        if self._listings == _LISTINGS_MAX:
            raise UnavailableError(
                f"{self._home.store.url}: steps went while they were looked at, {_LISTINGS_MAX} times; expected one "
                "that stays. Load again"
            )
        self._listings += 1
        self._left = committed_steps(self._home.store)
        self._known = quarantined(self._home.store)
        self._had_steps = self._had_steps or bool(self._left)

    def _is_quarantined(self, step: int, identity: str) -> bool:
        record = self._known.get(step, {}).get(identity)
        if record is None:
            return False
        self._done.add((step, identity))
        self.passed_over.append(SkippedStep(step, f"under quarantine: {record.why}"))
        if self._is_news(record.key):
            logger.warning(
                "step %d is under quarantine since %s and passed over: %s. `holdfast repair` checks it anew",
                step,
                printable(record.found),
                printable(record.why),
            )
        return True

    def _judge(self, wrong: StepDamage) -> None:
        """Pass over what was taken last, if it is still there and the same."""
        assert self._taken is not None, "something was returned before"
        step, identity = self._taken
        told = printable(str(wrong.error))
        if isinstance(wrong.error, MissingError) or not self._is_still(step, identity):
            logger.info("step %d went, or was replaced, while it was looked at: %s", step, told)
            self._list()
            return
        if wrong.is_absence and is_all_there(replace(self._home, folder=step_folder(step), step=step)):
            raise UnavailableError(
                f"step {step}: {wrong.error}. Rank 0 looked again, and every file of the step is there in its full "
                f"size; expected that {_told_ranks(wrong.ranks)} finds them too: look at the mounts of that machine, "
                "and load again. Nothing was put under quarantine"
            )
        logger.warning("step %d is damaged and passed over, older steps are tried: %s", step, told)
        self._done.add((step, identity))
        self.passed_over.append(SkippedStep(step, str(wrong.error)))
        self._found.append(_CandidateStep(step, identity, str(wrong.error), wrong.ranks))

    def _is_still(self, step: int, identity: str) -> bool:
        try:
            return identity_at(self._home.store, step) == identity
        except MissingError:
            return False

    def _raise_nothing_whole(self) -> NoReturn:
        shown = "; ".join(f"step {each.step}: {each.why}" for each in self.passed_over[:5])
        count = len(self.passed_over)
        ranks = {each.ranks for each in self._found}
        if count == len(self._found) > 1 and len(ranks) == 1 and len(only := ranks.pop()) == 1 and 0 not in only:
            self._found.clear()
            raise UnavailableError(
                f"{self._home.store.url}: {_told_ranks(only)} finds all {count} committed steps damaged, and no other "
                f"rank finds any of them so; expected one that is whole. {shown}. Look at the machine of that rank; "
                "`holdfast verify` tells on another whether they are. Nothing was put under quarantine"
            )
        raise CorruptError(
            f"{self._home.store.url}: all {count} committed steps are damaged; expected one that is "
            f"whole. {shown}. Try `holdfast repair`, or load what is left of one with step= and only="
        )


def _told_ranks(ranks: frozenset[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)[:20]))}"


def damage_in(error: CorruptError, statuses: Sequence[str | None]) -> StepDamage | None:
    """Return what is wrong, if every rank that failed met damaged bytes, so that another step may be whole.

    Args:
        error: What this rank raises.
        statuses: By rank, an `error_text` or None.
    """
    failed = {rank: json.loads(text) for rank, text in enumerate(statuses) if text is not None}
    if any(each["kind"] != CorruptError.__name__ for each in failed.values()):
        return None
    return StepDamage(error, frozenset(failed), all(each["absent"] for each in failed.values()))
