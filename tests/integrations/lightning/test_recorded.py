"""The shapes that `make test` uses in place of Lightning are those of the real classes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

lightning = pytest.importorskip("lightning")

from tests.unit.integrations.recorded_lightning import SHAPES, VERSION, functions_of  # noqa: E402

CLASSES = [(module, name) for module, shapes in SHAPES.items() for name in shapes]


def parameters_of(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Names and kinds of the parameters; annotations and defaults may differ in form."""
    return [(each.name, each.kind) for each in inspect.signature(function).parameters.values()]


def test_the_recorded_version_is_the_installed_one() -> None:
    assert lightning.__version__ == VERSION


@pytest.mark.parametrize(("module", "name"), CLASSES, ids=[f"{module}.{name}" for module, name in CLASSES])
def test_the_real_one_has_the_same_methods(module: str, name: str) -> None:
    real, recorded = getattr(importlib.import_module(module), name), SHAPES[module][name]
    if not isinstance(recorded, type):
        assert parameters_of(real) == parameters_of(recorded)
        return
    for method, function in functions_of(recorded).items():
        assert parameters_of(getattr(real, method)) == parameters_of(function), method
    if "__init__" in vars(recorded) and "options" not in inspect.signature(recorded).parameters:
        found = inspect.signature(real).parameters
        assert [each for each in inspect.signature(recorded).parameters if each not in found] == []


def test_lightnings_strategies_have_the_fields_that_ours_read() -> None:
    from lightning.fabric.strategies import ModelParallelStrategy as Fabrics
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

    for kind in (ModelParallelStrategy, FSDPStrategy, Fabrics):
        for field in ("global_rank", "world_size", "is_global_zero", "broadcast", "barrier"):
            assert hasattr(kind, field), (kind, field)
    for kind in (ModelParallelStrategy, FSDPStrategy):
        for field in ("model", "optimizers", "lightning_module"):
            assert hasattr(kind, field), (kind, field)


def test_the_wrapped_optimizer_is_where_it_was() -> None:
    import torch
    from lightning.pytorch.core.optimizer import LightningOptimizer

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert LightningOptimizer(optimizer).optimizer is optimizer
