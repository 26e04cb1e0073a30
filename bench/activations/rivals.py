"""The other ways to spend less memory on activations: what PyTorch ships, and the rule of torchtitan.

Each way changes the blocks of a model in place. Blocks of copies share parameters, so that all ways train one model.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten
MATMULS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default)
ATTENTION = (
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
)

MEMORY_BUDGETS = (1.0, 0.5, 0.25, 0.0)
"""`activation_memory_budget` of compiled blocks; 1 keeps everything."""

Forward = Callable[..., Any]

Way = Callable[[nn.Module], None]
"""Changes a block in place."""


def full(forward: Forward) -> Forward:
    """Checkpoint each block whole."""
    return partial(checkpoint, forward, use_reentrant=False)


def selective(forward: Forward) -> Forward:
    """Keep the results of matmuls and of attention; compute the rest again."""
    contexts = partial(create_selective_checkpoint_contexts, [*MATMULS, *ATTENTION])
    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def every_second_matmul(forward: Forward) -> Forward:
    """Keep the results of attention and of every second matmul, as torchtitan does."""

    def contexts() -> Any:
        counts: Counter[bool] = Counter()

        def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            counts[context.is_recompute] += op in MATMULS
            is_kept = op in ATTENTION or (op in MATMULS and counts[context.is_recompute] % 2 == 1)
            return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def on_host(forward: Forward) -> Forward:
    """Move saved tensors to host memory, where a CPU has them anyway."""

    def moved(*tensors: torch.Tensor) -> Any:
        with save_on_cpu():
            return forward(*tensors)

    return moved


def compiled(budget: float) -> Way:
    """Compile each block with an activation memory budget.

    Each budget has a backend of its own: torch reuses compiled code where backends are equal.
    """

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    return lambda block: block.compile(backend=backend)


def rivals() -> dict[str, Way]:
    """Return the ways by name. Compiled ones are absent without a C++ compiler."""
    ways = {
        name: partial(_called, by)
        for name, by in (
            ("full", full),
            ("selective", selective),
            ("every_second_matmul", every_second_matmul),
            ("save_on_cpu", on_host),
        )
    }
    if has_compiler():
        # A block that is not compiled after all would be measured under a wrong name.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        ways |= {f"compiled_{100 * budget:.0f}": compiled(budget) for budget in MEMORY_BUDGETS}
    return ways


def has_compiler() -> bool:
    """Return whether torch can compile for a CPU."""
    return shutil.which("g++") is not None or shutil.which("clang++") is not None


def changed(model: nn.Module, way: Way) -> nn.Module:
    """Return a model whose blocks train in another way."""
    for block in model.get_submodule("blocks").children():
        way(block)
    return model


def _called(by: Callable[[Forward], Forward], block: nn.Module) -> None:
    block.forward = by(block.forward)
