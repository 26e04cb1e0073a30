"""Validates the metrics passed to `save()`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import METRIC_CHARACTERS_MAX, is_metric_name
from holdfast.core.format.names import step_folder
from holdfast.errors import CheckpointError, InvalidError
from holdfast.policies import BestN, KeepPolicy, rules_of
from holdfast.stored.repository.catalog import read_manifest
from holdfast.stored.repository.timelines import committed_steps


def checked_metrics(metrics: object) -> dict[str, float]:
    """Return the metrics of a step as numbers by name.

    Raises:
        InvalidError: A name is not valid, or a value is not a number.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidError(f"metrics: {type(metrics).__name__}; expected a dict such as {{'loss': 0.1}}")
    return {_name(name): _number(name, value) for name, value in metrics.items()}


def _name(name: object) -> str:
    if not isinstance(name, str) or not is_metric_name(name):
        raise InvalidError(
            f"metrics: name {str(name)[:80]!r}; expected text of 1 to {METRIC_CHARACTERS_MAX} characters, such as "
            "'loss', all printable, without '$' at its start"
        )
    return name


def _number(name: object, value: object) -> float:
    try:
        if value is None or isinstance(value, str | bytes):
            raise TypeError("no number")
        # A loss that still needs grad converts with a warning.
        detach = getattr(value, "detach", None)
        return float(value if detach is None else detach())  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidError(
            f"metrics: {name} is {type(value).__name__} {str(value)[:80]!r}; expected one number ({error})"
        ) from error


class WantedMetrics:
    """The metrics by which a policy ranks steps. A name that no step has is a misspelling: it would keep nothing."""

    def __init__(self, store: Store, keep: KeepPolicy | None) -> None:
        self._store = store
        self._unseen = {rule.metric for rule in rules_of(keep) if isinstance(rule, BestN)}

    def require_in(self, metrics: Mapping[str, float]) -> None:
        """Refuse a save if neither it nor any earlier step has a metric of the policy. Called on rank 0.

        Raises:
            InvalidError: Names the metric.
        """
        self._unseen -= metrics.keys()
        if not self._unseen:
            return
        for step in reversed(committed_steps(self._store)):
            with suppress(CheckpointError):  # Damaged or removed: its metrics are unknown.
                self._unseen -= read_manifest(self._store, step_folder(step)).metrics.keys()
            if not self._unseen:
                return
        raise InvalidError(
            f"keep: ranks steps by {sorted(self._unseen)}, which neither this step nor any before it has; this one has "
            f"{sorted(metrics) or 'no metrics'}. Give it: save(step, state, metrics={{{min(self._unseen)!r}: …}})"
        )
