"""An observer that counts saves and loads as Prometheus metrics."""

from __future__ import annotations

import threading
import weakref
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from holdfast.base.types.events import (
    Began,
    DrainSkipped,
    Ended,
    Event,
    Failed,
    LogInterrupted,
    LogRedone,
    LogSealed,
    Phase,
    RankReport,
    StepProtected,
)
from holdfast.errors import InvalidError, UnavailableError
from holdfast.training.telemetry.log_lines import blocked_seconds

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Bounds of the histograms, about half a power of ten apart: from an empty save to one far too slow."""


class PrometheusMetrics:
    """The metrics of one registry, and its only observer. The label `rank` separates the ranks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register the metrics.

        Raises:
            ValueError: The registry holds other metrics of the same names.
        """
        by_rank = ("verb", "rank")
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, buckets=_SECONDS, registry=registry)
        self.operations = counter(
            "holdfast_operations",
            "Saves, loads and drains that have ended; outcome is done or failed.",
            (*by_rank, "outcome"),
        )
        self.under_way = gauge(
            "holdfast_operations_under_way", "Saves, loads and drains that have begun and not ended.", by_rank
        )
        self.bytes = counter("holdfast_bytes", "Bytes of tensors that the rank wrote, or read from storage.", by_rank)
        self.seconds = histogram(
            "holdfast_seconds", "Seconds until the save was committed, or the load had filled the state.", by_rank
        )
        self.phase_seconds = counter(
            "holdfast_phase_seconds",
            "Seconds in each phase; docs/observing.md describes the phases.",
            (*by_rank, "phase"),
        )
        self.held_seconds = histogram(
            "holdfast_held_seconds",
            "How long a save blocked training: its call, without the work in the background.",
            ("rank",),
        )
        self.retries = counter(
            "holdfast_retries", "Requests to an object store that were made again during saves and loads.", by_rank
        )
        self.retry_seconds = counter(
            "holdfast_retry_seconds", "Seconds of saves and loads in which a request was being made again.", by_rank
        )
        self.throttled = counter(
            "holdfast_throttled", "Requests that an object store refused or left unanswered under load.", by_rank
        )
        by_kind = ("rank", "kind", "codec")
        self.codings = counter(
            "holdfast_codings", "Saves that stored a kind of tensors by a codec; codec raw: as they are.", by_kind
        )
        self.coding_raw_bytes = counter(
            "holdfast_coding_raw_bytes", "Bytes of these tensors, before they were coded.", by_kind
        )
        self.coding_stored_bytes = counter(
            "holdfast_coding_stored_bytes", "Bytes that packs hold for these tensors.", by_kind
        )
        self.last_step = gauge(
            "holdfast_last_step", "Step of the last save that was committed, or of the last load.", by_rank
        )
        self.last_unix_seconds = gauge("holdfast_last_timestamp_seconds", "Unix time at which it ended.", by_rank)
        self.bandwidth = gauge(
            "holdfast_last_bytes_per_second",
            "Bytes per second of the last save or load, while it moved bytes.",
            by_rank,
        )
        rank = ("rank",)
        self.recoverable_step = gauge("holdfast_recoverable_step", "Step to which a restart would come back.", rank)
        self.log_bytes = counter("holdfast_log_bytes", "Bytes of the redo log that the rank made durable.", rank)
        self.log_wait_seconds = counter("holdfast_log_wait_seconds", "Seconds that training waited for the log.", rank)
        self.log_interruptions = counter("holdfast_log_interruptions", "Times that the redo log lost a record.", rank)
        self.skips = counter(
            "holdfast_drain_skips", "Due steps that the root did not get: too slow for its steps.", rank
        )
        self.protected_step = gauge("holdfast_protected_step", "Newest step that stands the loss of a node.", rank)
        self.unprotected = counter("holdfast_unprotected", "Near steps that the nodes did not protect.", rank)
        self._recoverable: dict[int, int] = {}

    def on_event(self, event: Event) -> None:
        """Update the metrics."""
        if isinstance(event, Began):
            self.under_way.labels(event.operation.verb, event.operation.rank).inc()
        elif isinstance(event, Ended):
            self._count_ended(event.report)
        elif isinstance(event, Failed):
            verb, rank = event.operation.verb, event.operation.rank
            self.operations.labels(verb, rank, "failed").inc()
            if event.has_begun:
                self.under_way.labels(verb, rank).dec()
            self._count_phases(verb, rank, event.phases)
        elif isinstance(event, LogSealed):
            self.log_bytes.labels(event.rank).inc(event.bytes)
            self.log_wait_seconds.labels(event.rank).inc(event.waited_seconds)
            if event.recoverable is not None:
                self._set_recoverable(event.rank, event.recoverable)
        elif isinstance(event, LogInterrupted):
            self.log_interruptions.labels(event.rank).inc()
        elif isinstance(event, DrainSkipped):
            self.skips.labels(event.rank).inc()
        elif isinstance(event, StepProtected):
            if event.why:
                self.unprotected.labels(event.rank).inc()
            else:
                self.protected_step.labels(event.rank).set(event.step)
        elif isinstance(event, LogRedone):
            self._set_recoverable(event.rank, event.step)

    def _set_recoverable(self, rank: int, step: int) -> None:
        self._recoverable[rank] = step
        self.recoverable_step.labels(rank).set(step)

    def _count_ended(self, report: RankReport) -> None:
        verb, rank = report.operation.verb, report.operation.rank
        self.operations.labels(verb, rank, "done").inc()
        self.under_way.labels(verb, rank).dec()
        self.bytes.labels(verb, rank).inc(report.bytes)
        self.seconds.labels(verb, rank).observe(report.seconds)
        for metric, name in (
            (self.retries, "retries"),
            (self.retry_seconds, "retry_seconds"),
            (self.throttled, "throttled"),
        ):
            metric.labels(verb, rank).inc(float(report.facts.get(name, 0)))
        self.bandwidth.labels(verb, rank).set(report.bytes_per_second)
        self.last_unix_seconds.labels(verb, rank).set(report.began_unix_seconds + report.seconds)
        if report.operation.step is not None:
            step = report.operation.step
            self.last_step.labels(verb, rank).set(step)
            # Records after a base may be sealed before the base is committed. A drained step was near before.
            self._set_recoverable(rank, max(step, self._recoverable.get(rank, step)) if verb != "load" else step)
        if verb == "save":
            self.held_seconds.labels(rank).observe(_blocked_seconds(report))
        for coding in report.codings:
            labels = rank, coding.kind, coding.codec or "raw"
            self.codings.labels(*labels).inc()
            self.coding_raw_bytes.labels(*labels).inc(coding.raw_bytes)
            self.coding_stored_bytes.labels(*labels).inc(coding.stored_bytes)
        self._count_phases(verb, rank, report.phases)

    def _count_phases(self, verb: str, rank: int, phases: tuple[Phase, ...]) -> None:
        for phase in phases:
            self.phase_seconds.labels(verb, rank, phase.name).inc(phase.seconds)


def _blocked_seconds(report: RankReport) -> float:
    facts = report.facts
    staged_seconds, fence_seconds = float(facts["staged_seconds"]), float(facts["fence_seconds"])
    return blocked_seconds(str(facts.get("staging")), staged_seconds, fence_seconds, report.phases)


_lock = threading.Lock()
_known: weakref.WeakKeyDictionary[CollectorRegistry, PrometheusMetrics] = weakref.WeakKeyDictionary()


def observer_in(registry: object) -> PrometheusMetrics:
    """Return the observer of a registry; None is the default registry of prometheus-client.

    Raises:
        InvalidError: It is no registry, or it holds other metrics of the same names.
    """
    checked = _registry(registry)
    with _lock:
        if checked not in _known:
            try:
                # One observer for each registry: a registry refuses a name that is registered twice.
                _known[checked] = PrometheusMetrics(checked)
            except ValueError as error:
                raise InvalidError(
                    f"prometheus: {error}; expected a registry without metrics of these names"
                ) from error
        return _known[checked]


def serve(port: object, address: object, registry: object) -> None:
    """Serve a registry over HTTP from now on.

    Raises:
        InvalidError: The port or the address is invalid.
        UnavailableError: The port is taken, or the address cannot be bound.
    """
    if type(port) is not int or not 1 <= port <= 65535:
        raise InvalidError(f"prometheus: port={port!r}; expected a whole number from 1 to 65535, or None")
    if not isinstance(address, str):
        raise InvalidError(f"prometheus: address is {type(address).__name__}; expected text, such as '127.0.0.1'")
    try:
        start_http_server(port, address, _registry(registry))
    except UnicodeError as error:
        raise InvalidError(f"prometheus: address={address[:80]!r}: {error}; expected the name of a host") from error
    except OSError as error:
        raise UnavailableError(
            f"prometheus: {address}:{port}: {error.strerror or error}; expected a port that is free. Give each process "
            "of a host its own, such as port=9464 + local rank"
        ) from error


def _registry(registry: object) -> CollectorRegistry:
    chosen = REGISTRY if registry is None else registry
    if not isinstance(chosen, CollectorRegistry):
        raise InvalidError(f"prometheus: registry is {type(chosen).__name__}; expected a CollectorRegistry, or None")
    return chosen
