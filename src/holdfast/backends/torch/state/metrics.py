"""Metrics of torchmetrics that keep what they count out of their state dict, as they do by default."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from holdfast.backends.torch.state.naming import is_metric, named_metrics
from holdfast.backends.torch.state.walk import ModuleNode
from holdfast.errors import InvalidError, first_three

logger = logging.getLogger(__name__)

_warned: set[str] = set()


def require_kept(node: ModuleNode) -> None:
    """Refuse a metric, or a collection of metrics, of which a save or load would take nothing.

    A metric inside a model is left to the model: it may be there for the log alone, and be reset at each epoch. If it
    has counted something, a warning is logged once.

    Raises:
        InvalidError: The metrics keep their state out of `state_dict()`, and the module has nothing else.
    """
    # One of each class first: names of all modules take time, and few models hold metrics.
    if not any(map(is_metric, {type(child): child for child in node.module.modules()}.values())):
        return
    left_out = {name: metric for name, metric in named_metrics(node.module).items() if _keeps_out(metric, name, node)}
    if not left_out:
        return
    paths = [f"{node.path}.{name}" if name else node.path for name in left_out]
    advice = "call .persistent(True) of the metric"
    if not node.tensors and not node.values:
        raise InvalidError(
            f"{node.path}: {type(node.module).__name__} keeps what it counts out of state_dict(), so nothing of "
            f"{first_three(paths)} would be saved or loaded; expected its state. Before the save and before the load, "
            f"{advice}, or leave it out with skip={[node.path]!r}"
        )
    counted = [path for path, metric in zip(paths, left_out.values(), strict=True) if _has_counted(metric)]
    if counted and node.path not in _warned:
        _warned.add(node.path)
        logger.warning(
            "%s: metrics that keep what they count out of state_dict() are not saved, and begin anew after a load. "
            "To keep it, %s",
            first_three(counted),
            advice,
        )


def _keeps_out(metric: torch.nn.Module, name: str, node: ModuleNode) -> bool:
    """Return whether a metric has state (of torchmetrics: `metric_state`) that its state dict lacks."""
    kept: Mapping[str, object] | None = getattr(metric, "metric_state", None)
    prefix = f"{name}." if name else ""
    return any(f"{prefix}{key}" not in node.tensors and f"{prefix}{key}" not in node.values for key in kept or ())


def _has_counted(metric: torch.nn.Module) -> bool:
    return bool(getattr(metric, "update_called", False))
