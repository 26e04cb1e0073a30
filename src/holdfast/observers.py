"""Observers of saves, loads and drains: `CheckpointManager(root, observers=[jsonl("a.jsonl"), prometheus(port=9464)])`.

An observer of your own is an object with a method `on_event(event)`. This module exports the events.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.base.ports.observer import Observer
from holdfast.base.types.coding import KindCoding, KindDecision
from holdfast.base.types.events import (
    Began,
    Decided,
    DrainSkipped,
    Ended,
    Entered,
    Event,
    Failed,
    LogInterrupted,
    LogRedone,
    LogSealed,
    Operation,
    Phase,
    Progress,
    RankReport,
    StepProtected,
)
from holdfast.errors import InvalidError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = [
    "jsonl",
    "prometheus",
    "progress",
    "Observer",
    "Event",
    "Began",
    "Entered",
    "Decided",
    "Progress",
    "Ended",
    "Failed",
    "DrainSkipped",
    "StepProtected",
    "LogSealed",
    "LogInterrupted",
    "LogRedone",
    "Operation",
    "Phase",
    "RankReport",
    "KindDecision",
    "KindCoding",
]


# Each function imports its sink when it is called: prometheus-client and rich are optional, and slow to import.


def jsonl(path: str | os.PathLike[str]) -> Observer:
    """Return an observer that appends a line of JSON to a file when a save or load begins, ends or fails.

    Ranks of one machine may share a file on a local file system. On a network file system, give each rank its own.

    Args:
        path: The file, in an existing folder. `{rank}` in the path becomes the rank's number.
    Raises:
        InvalidError: The path is not a path, or its folder does not exist.
    """
    from holdfast.training.telemetry.sinks.jsonl import JsonLines

    return JsonLines(path)


def prometheus(
    port: int | None = None, *, address: str = "0.0.0.0", registry: CollectorRegistry | None = None
) -> Observer:
    """Return an observer that keeps Prometheus metrics of saves and loads.

    Needs `pip install 'holdfast[metrics]'`.

    Args:
        port: Port that serves the metrics over HTTP at `/metrics` from now on; processes of one machine need one each.
            None: no server; serve or push the registry yourself.
        address: Address of this machine to serve on.
        registry: Registry for the metrics; None for the default one of `prometheus_client`.
    Raises:
        InvalidError: prometheus-client is not installed, or the port or registry is of the wrong type.
        UnavailableError: The port is in use or not allowed.
    """
    try:
        from holdfast.training.telemetry.sinks.prometheus import observer_in, serve
    except ImportError as error:
        raise InvalidError(
            "observers.prometheus needs prometheus-client, which is not installed: pip install 'holdfast[metrics]'"
        ) from error
    observer = observer_in(registry)
    if port is not None:
        serve(port, address, registry)
    return observer


def progress() -> Observer:
    """Return an observer that draws progress bars of rank 0's saves and loads on stderr, if stderr is a terminal.

    Raises:
        InvalidError: rich is not installed: `pip install 'holdfast[cli]'`.
    """
    try:
        from holdfast.training.telemetry.sinks.progress_bar import on_stderr
    except ImportError as error:
        raise InvalidError(
            "observers.progress needs rich, which is not installed: pip install 'holdfast[cli]'"
        ) from error
    return on_stderr()
