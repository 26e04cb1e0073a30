"""Gradients: saved on request; a save that would lose them is refused.

In the middle of gradient accumulation a parameter's gradient is part of the state. FSDP2 may accumulate it without
reducing it over ranks; then no rank has a value to save, and the save is refused in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.backends.torch.local_shards import coordinates_of
from holdfast.backends.torch.optimizers.state import OptimizerView
from holdfast.backends.torch.private_layout import is_without_reduction, unreduced_parameters
from holdfast.base.geometry.sharded import Sharded
from holdfast.errors import InvalidError

SUFFIX = ".grad"
"""Suffix of a gradient's FQN, after its parameter's FQN."""


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a tensor, or None. A tensor that is frozen now may still have one."""
    return tensor.grad if tensor.is_leaf else None


def declared_for_gradient(
    fqn: str, declared: Sharded | None, parameter: torch.Tensor, grad: torch.Tensor, *, by_fsdp1: bool = False
) -> Sharded | None:
    """Return the layout of a gradient whose parameter's layout is declared, or that the parameter carries, or None.

    Raises:
        InvalidError: Its shape is not the parameter's, or FSDP1 keeps it inside its flat parameter.
    """
    if by_fsdp1:
        raise InvalidError(
            f"{fqn}: FSDP1 keeps gradients inside its flat parameter, where they cannot be saved or loaded. Save "
            f"after the optimizer's step, use fully_shard (FSDP2), or leave it out with skip='*{SUFFIX}'"
        )
    declared = declared or coordinates_of(parameter, fqn)
    if declared is None:
        return None
    if not isinstance(declared.tensor, torch.Tensor) or declared.tensor.shape != grad.shape:
        raise InvalidError(
            f"{fqn}: has shape {tuple(grad.shape)}, and its parameter is declared by hand; expected one local "
            "tensor of the parameter's own shape. Save after the optimizer's step, or leave it out with "
            f"skip='*{SUFFIX}'"
        )
    return replace(declared, tensor=grad)


def room_for_gradient(parameter: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """Return the parameter's gradient if it can be filled, else zeros with the parameter's layout.

    Args:
        parameter: The parameter.
        stored: The saved dtype, for a parameter that accepts gradients of any dtype (`grad_dtype` is None).
    """
    dtype = getattr(parameter, "grad_dtype", parameter.dtype) or stored
    grad = parameter.grad
    if grad is not None and grad.is_leaf and grad.dtype == dtype and _has_layout_of(grad, parameter):
        return grad
    return torch.zeros_like(parameter.detach(), dtype=dtype, memory_format=torch.preserve_format)


def give_gradient(parameter: torch.Tensor, grad: torch.Tensor | None, fqn: str) -> None:
    """Set a parameter's gradient.

    Raises:
        InvalidError: torch does not accept it.
    """
    try:
        parameter.grad = grad
    except RuntimeError as error:
        raise InvalidError(
            f"{fqn}: torch does not accept this gradient: {error}. Leave it out with skip='*{SUFFIX}'"
        ) from error


def _has_layout_of(grad: torch.Tensor, parameter: torch.Tensor) -> bool:
    if isinstance(parameter, DTensor) and (not isinstance(grad, DTensor) or grad.placements != parameter.placements):
        return False
    return grad.shape == parameter.shape and grad.stride() == parameter.stride() and grad.layout == parameter.layout


def require_module_boundary(
    module: nn.Module, path: str, tensors: Mapping[str, torch.Tensor], takes_part: Callable[[str], bool], asked: bool
) -> None:
    """Refuse a module in the middle of gradient accumulation whose gradients would be lost.

    Args:
        module: The module.
        path: Its path in the state.
        tensors: Its tensors by FQN.
        takes_part: Whether `only` and `skip` select a name.
        asked: Whether gradients are saved with it.
    Raises:
        InvalidError: Names the module that accumulates.
    """

    @cache
    def names() -> dict[int, str]:
        # Built only if a module accumulates, since every save calls this function.
        return {id(tensor): f"{path}.{fqn}{SUFFIX}" for fqn, tensor in tensors.items()}

    def is_lost(parameter: torch.Tensor) -> bool:
        return takes_part(names().get(id(parameter), path))

    for parameter in unreduced_parameters(module):
        if is_lost(parameter):
            name = names().get(id(parameter), path)
            raise InvalidError(
                f"{name}: accumulated by fully_shard without gradient synchronisation, so no rank has the reduced "
                "gradient and it cannot be saved. Save after a backward with set_requires_gradient_sync(True), or pass "
                f"grads=True and skip='*{SUFFIX}' to do without it"
            )
    for name, child in module.named_modules():
        if asked or not _is_in_no_sync(child):
            continue
        if any(parameter.grad is not None and is_lost(parameter) for parameter in child.parameters()):
            raise InvalidError(
                f"{f'{path}.{name}' if name else path}: {type(child).__name__} is inside no_sync(), in the middle of "
                f"gradient accumulation; a resumed run would lose the gradients so far. {_ADVICE}"
            )


def require_named(
    module: nn.Module, path: str, tensors: Mapping[str, torch.Tensor], takes_part: Callable[[str], bool]
) -> None:
    """Refuse gradients without a name: of parameters that a state-dict hook replaces.

    Args:
        module: The module.
        path: Its path in the state.
        tensors: Tensors of its state dict by FQN.
        takes_part: Whether `only` and `skip` select a name.
    Raises:
        InvalidError: Names the parameter.
    """
    named = {id(tensor) for tensor in tensors.values()}
    for name, parameter in module.named_parameters():
        fqn = f"{path}.{name}{SUFFIX}"
        if parameter.grad is not None and id(parameter) not in named and takes_part(fqn):
            raise InvalidError(
                f"{fqn}: a state-dict hook stores this parameter under other names, so its gradient has none; expected "
                f"the parameter itself in state_dict(). Save after the optimizer's step, or leave it out with "
                f"skip='*{SUFFIX}'"
            )


def is_accumulating(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer states that it is in the middle of gradient accumulation.

    Accelerate's optimizers do: `gradient_state.sync_gradients` is false until the last micro-batch.
    """
    return getattr(getattr(optimizer, "gradient_state", None), "sync_gradients", True) is False


def require_optimizer_boundary(view: OptimizerView, takes_part: Callable[[torch.Tensor], bool]) -> None:
    """Refuse an optimizer that accumulates gradients which would be lost.

    Args:
        view: An optimizer that accumulates.
        takes_part: Whether `only` and `skip` select a parameter's gradient.
    Raises:
        InvalidError: A gradient would be lost.
    """
    if any(parameter.grad is not None and takes_part(parameter) for parameter in view.names):
        raise InvalidError(
            f"{view.path}: {type(view.optimizer).__name__} is in the middle of gradient accumulation; a resumed run "
            f"would lose the gradients so far. {_ADVICE}"
        )


_ADVICE = "Save after the optimizer's step, pass grads=True to keep the gradients, or skip='*.grad' to do without them"


def _is_in_no_sync(module: nn.Module) -> bool:
    if isinstance(module, DistributedDataParallel):
        return not module.require_backward_grad_sync
    return is_without_reduction(module)
