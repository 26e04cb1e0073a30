"""Which checkpoint a load takes: the one asked for, or the newest step of a run that is whole."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from holdfast.errors import CheckpointError, CorruptError, MissingError
from holdfast.manager.place import Place, require_no_checkpoint
from holdfast.manager.provenance import told_time
from holdfast.ports.clock import Clock
from holdfast.repository.catalog import committed_steps
from holdfast.repository.names import step_folder
from holdfast.repository.quarantine import Quarantined, identity_at, quarantine, quarantined

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A step that was not taken although it is newer."""

    step: int
    """The step."""

    why: str
    """What is wrong with it."""


class Choice(Protocol):
    """What rank 0 is asked for the place of a checkpoint to load."""

    @property
    def falls_back(self) -> bool:
        """Whether there may be another where one is damaged; the same on every rank."""
        ...

    @property
    def passed_over(self) -> Sequence[PassedOver]:
        """Steps that were not taken so far."""
        ...

    def next(self, wrong: CheckpointError | None) -> Place | None:
        """Return the place to load from, None if there is nothing.

        Args:
            wrong: What is wrong with the place that was returned before; None at first.
        Raises:
            CorruptError: Nothing else is whole.
        """
        ...


class One:
    """The one checkpoint that was asked for."""

    falls_back = False
    passed_over: Sequence[PassedOver] = ()

    def __init__(self, choose: Callable[[], Place | None]) -> None:
        """Ask for nothing yet.

        Args:
            choose: Returns its place.
        """
        self._choose = choose

    def next(self, wrong: CheckpointError | None) -> Place | None:
        """Return its place; what is wrong with it is the caller's error."""
        if wrong is not None:
            raise wrong
        return self._choose()


class Newest:
    """The steps of a run from the newest down. What is damaged is told, put under quarantine and passed over."""

    falls_back = True

    def __init__(self, home: Place, clock: Clock, is_news: Callable[[str], bool]) -> None:
        """Look at nothing yet.

        Args:
            home: The root of the run.
            clock: For when something was found.
            is_news: Whether something is said for the first time.
        """
        self._home, self._clock, self._is_news = home, clock, is_news
        self._left: list[int] | None = None
        self._known: Mapping[int, Mapping[str, Quarantined]] = {}
        self._step: int | None = None
        self.passed_over: list[PassedOver] = []

    def next(self, wrong: CheckpointError | None) -> Place | None:
        """Return the next older step that is not under quarantine."""
        store = self._home.store
        if self._left is None:
            require_no_checkpoint(store)
            self._left = committed_steps(store)
            self._known = quarantined(store)
        if wrong is not None:
            self._pass_over(wrong)
        while self._left:
            step = self._left.pop()
            if not self._is_quarantined(step):
                self._step = step
                return replace(self._home, folder=step_folder(step), step=step)
        if self.passed_over:
            self._raise_nothing_whole()
        return None

    def _is_quarantined(self, step: int) -> bool:
        known = self._known.get(step)
        try:
            record = known.get(identity_at(self._home.store, step)) if known else None
        except MissingError:
            return False  # Reading it says so.
        if record is None:
            return False
        self.passed_over.append(PassedOver(step, f"under quarantine: {record.why}"))
        if self._is_news(record.key):
            logger.warning(
                "step %d is under quarantine since %s and passed over: %s. `holdfast repair` checks it anew",
                step,
                record.found,
                record.why,
            )
        return True

    def _pass_over(self, wrong: CheckpointError) -> None:
        assert self._step is not None, "something was returned before"
        if isinstance(wrong, MissingError):
            logger.info("step %d went while it was looked at: %s", self._step, wrong)
            return
        logger.warning("step %d is damaged and passed over, older steps are tried: %s", self._step, wrong)
        self.passed_over.append(PassedOver(self._step, str(wrong)))
        try:
            quarantine(self._home.store, self._step, str(wrong), told_time(self._clock))
        except CheckpointError as error:
            # A root that can only be read is resumed from all the same.
            logger.warning("step %d could not be put under quarantine: %s", self._step, error)

    def _raise_nothing_whole(self) -> NoReturn:
        shown = "; ".join(f"step {each.step}: {each.why}" for each in self.passed_over[:5])
        raise CorruptError(
            f"{self._home.store.url}: all {len(self.passed_over)} committed steps are damaged; expected one that is "
            f"whole. {shown}. Try `holdfast repair`, or load what is left of one with step= and only="
        )


def are_all_damage(statuses: Sequence[str | None]) -> bool:
    """Return whether every rank that failed met damaged bytes, so that another step may be whole.

    Args:
        statuses: By rank, an `error_text` or None.
    """
    return all(text is None or json.loads(text)["kind"] == CorruptError.__name__ for text in statuses)
