"""The optimizers whose steps are redone: every class, and every kernel that a class has."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tests.support.redo_log.recorded_training import Make

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.05}),
    "sgd-nesterov-foreach": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "sgd-fused": ("SGD", {"lr": 0.05, "fused": True}),  # With momentum, torch 2.13 takes no late first gradient.
    "adam-amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True, "foreach": False}),
    "adam-fused": ("Adam", {"lr": 0.01, "amsgrad": True, "fused": True}),
    "adamw-foreach": ("AdamW", {"lr": 0.01, "foreach": True}),
    "adamw-tensor-lr": ("AdamW", {"lr": torch.tensor(0.01), "foreach": False}),
    "adamw-fused": ("AdamW", {"lr": 0.01, "fused": True}),
    "adamax": ("Adamax", {"lr": 0.01}),
    "nadam-foreach": ("NAdam", {"lr": 0.01, "foreach": True}),
    "radam": ("RAdam", {"lr": 0.01}),
    "rmsprop": ("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "rprop": ("Rprop", {"lr": 0.01}),
    "adagrad": ("Adagrad", {"lr": 0.05, "lr_decay": 0.1}),
    "adagrad-fused": ("Adagrad", {"lr": 0.05, "fused": True}),
    "adadelta": ("Adadelta", {"lr": 0.5}),
    "asgd-foreach": ("ASGD", {"lr": 0.05, "foreach": True}),
    "adafactor": ("Adafactor", {"lr": 0.05}),
    "muon": ("Muon", {"lr": 0.05}),
}


def maker_of(variant: str) -> Make | None:
    """Return the function that makes an optimizer; None if this torch lacks the class."""
    name, hyperparameters = VARIANTS[variant]
    kind = getattr(torch.optim, name, None)
    return None if kind is None else lambda groups: kind(groups, **copy.deepcopy(hyperparameters))
