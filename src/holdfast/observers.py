"""Who hears of saves and loads: `CheckpointManager(root, observers=[jsonl("events.jsonl"), prometheus(port=9464)])`.

Your own is an object with a method `on_event(event)`; the events are those of `holdfast.types.events`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast import wiring
from holdfast.ports.observer import Observer
from holdfast.types.events import Began, Ended, Entered, Event, Failed, Operation, Phase, Progress, RankReport

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
    "Progress",
    "Ended",
    "Failed",
    "Operation",
    "Phase",
    "RankReport",
]


def jsonl(path: str | os.PathLike[str]) -> Observer:
    """Return what appends a line of JSON to a file when a save or load begins, ends or fails.

    Ranks of one machine may share a file on a local file system; on a network one let each have its own.

    Args:
        path: The file, in a folder that is there; `{rank}` in it becomes the number of the rank.
    Raises:
        InvalidError: It is no path, or its folder is not there.
    """
    return wiring.json_lines(path)


def prometheus(
    port: int | None = None, *, address: str = "0.0.0.0", registry: CollectorRegistry | None = None
) -> Observer:
    """Return what keeps metrics of saves and loads for Prometheus; needs `pip install 'holdfast[metrics]'`.

    Args:
        port: Where they are served from now on, over HTTP at `/metrics`; processes of one machine need one each. None:
            they are only kept in the registry, for a server or push gateway of your own.
        address: Which of the machine's addresses serves them.
        registry: Where they are kept; None for the default one of `prometheus_client`.
    Raises:
        InvalidError: prometheus-client is not installed, or the port is none.
        UnavailableError: The port cannot be had.
    """
    return wiring.prometheus_metrics(port, address, registry)


def progress() -> Observer:
    """Return what shows rank 0's saves and loads on stderr while they are under way, where that is a terminal.

    Raises:
        InvalidError: rich is not installed: `pip install 'holdfast[cli]'`.
    """
    return wiring.terminal_progress()
