"""Gradients: saved on request, and noticed where a save would lose them.

In the middle of gradient accumulation a parameter's gradient is state like any other. Who accumulates without
reducing keeps it where no rank can give it away: then the save is refused, whatever was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Protocol, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import InvalidError
from holdfast.frameworks.torch.fsdp1 import is_wrapper
from holdfast.geometry.sharded import Sharded

SUFFIX = ".grad"
"""What a gradient's FQN has after its parameter's."""


class _Parameter(Protocol):
    """A parameter in FSDP2's hands, as far as it is looked into."""

    sharded_param: nn.Parameter
    unsharded_accumulated_grad: torch.Tensor | None


class _Group(Protocol):
    fsdp_params: list[_Parameter]
    _partial_reduce_output: torch.Tensor | None


class _State(Protocol):
    _fsdp_param_groups: list[_Group]


class _Module(Protocol):
    def _get_fsdp_state(self) -> _State: ...


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a tensor of the state, if it has one; one frozen for the moment may have one too."""
    return tensor.grad if tensor.is_leaf else None


def declared_for_gradient(
    fqn: str, declared: Sharded | None, grad: torch.Tensor, *, by_fsdp1: bool = False
) -> Sharded | None:
    """Return the layout of a gradient whose parameter has one declared by hand, or None.

    Raises:
        InvalidError: It does not lie as its parameter does, or FSDP1 keeps it inside its flat parameter.
    """
    if by_fsdp1:
        raise InvalidError(
            f"{fqn}: FSDP1 keeps gradients inside its flat parameter, where they are neither saved nor loaded. Save "
            f"after the optimizer's step, use fully_shard (FSDP2), or leave it out with skip='*{SUFFIX}'"
        )
    if declared is None:
        return None
    if not isinstance(declared.tensor, torch.Tensor) or declared.tensor.shape != grad.shape:
        raise InvalidError(
            f"{fqn}: a gradient of shape {tuple(grad.shape)} whose parameter is declared by hand; expected one local "
            "tensor of the parameter's own shape. Save after the optimizer's step, or leave it out with "
            f"skip='*{SUFFIX}'"
        )
    return Sharded(grad, declared.global_shape, declared.start, declared.flat_start, declared.replicas)


def room_for_gradient(parameter: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """Return the parameter's gradient if it can be filled, else zeros that lie as the parameter does.

    Args:
        parameter: The parameter.
        stored: The dtype that was saved, for a parameter that takes gradients of any (`grad_dtype` is None).
    """
    dtype = getattr(parameter, "grad_dtype", parameter.dtype) or stored
    grad = parameter.grad
    if grad is not None and grad.is_leaf and grad.dtype == dtype and _lies_as(grad, parameter):
        return grad
    return torch.zeros_like(parameter.detach(), dtype=dtype, memory_format=torch.preserve_format)


def give_gradient(parameter: torch.Tensor, grad: torch.Tensor | None, fqn: str) -> None:
    """Set a parameter's gradient.

    Raises:
        InvalidError: torch refuses it.
    """
    try:
        parameter.grad = grad
    except RuntimeError as error:
        raise InvalidError(
            f"{fqn}: torch refuses this gradient: {error}. Leave it out with skip='*{SUFFIX}'"
        ) from error


def forget_unreduced(module: nn.Module) -> None:
    """Drop what FSDP2 keeps of gradients beside the parameters' own, or the next backward would add it."""
    for group, held in _held_by_fsdp2(module):
        held.unsharded_accumulated_grad = None
        group._partial_reduce_output = None
        if (unsharded := getattr(held, "_unsharded_param", None)) is not None:
            unsharded.grad = None


def _lies_as(grad: torch.Tensor, parameter: torch.Tensor) -> bool:
    if isinstance(parameter, DTensor) and (not isinstance(grad, DTensor) or grad.placements != parameter.placements):
        return False
    return grad.shape == parameter.shape and grad.stride() == parameter.stride() and grad.layout == parameter.layout


def require_module_boundary(
    module: nn.Module, path: str, tensors: Mapping[str, torch.Tensor], takes_part: Callable[[str], bool], asked: bool
) -> None:
    """Refuse a module in the middle of gradient accumulation whose gradients would be lost.

    Args:
        module: The module.
        path: Where it stands in the state.
        tensors: Its tensors by FQN.
        takes_part: Whether `only` and `skip` let a name take part.
        asked: Whether gradients are saved with it.
    Raises:
        InvalidError: Says who accumulates and what to do.
    """

    @cache
    def names() -> dict[int, str]:
        # Made only where somebody accumulates: every save comes by here.
        return {id(tensor): f"{path}.{fqn}{SUFFIX}" for fqn, tensor in tensors.items()}

    def is_lost(parameter: torch.Tensor) -> bool:
        return takes_part(names().get(id(parameter), path))

    for parameter in _unreduced(module):
        if is_lost(parameter):
            name = names().get(id(parameter), path)
            raise InvalidError(
                f"{name}: accumulated by fully_shard without gradient synchronisation, so no rank holds it reduced and "
                "it cannot be kept. Save after a backward with set_requires_gradient_sync(True), or pass grads=True "
                f"and skip='*{SUFFIX}' to do without it"
            )
    for name, each in module.named_modules():
        where = f"{path}.{name}" if name else path
        if asked or not _says_no_sync(each):
            continue
        if any(parameter.grad is not None and is_lost(parameter) for parameter in each.parameters()):
            raise InvalidError(
                f"{where}: {type(each).__name__} is inside no_sync(), in the middle of gradient accumulation; a "
                f"resumed run would lose what it has gathered. {_ADVICE}"
            )


def says_it_accumulates(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer says it is in the middle of gradient accumulation.

    Accelerate's optimizers say so: `gradient_state.sync_gradients` is false until the last micro-batch.
    """
    return getattr(getattr(optimizer, "gradient_state", None), "sync_gradients", True) is False


def require_optimizer_boundary(
    optimizer: torch.optim.Optimizer, path: str, takes_part: Callable[[torch.Tensor], bool]
) -> None:
    """Refuse an optimizer that accumulates gradients which would be lost.

    Args:
        optimizer: One that says it accumulates.
        path: Where it stands in the state.
        takes_part: Whether `only` and `skip` let a parameter's gradient take part.
    Raises:
        InvalidError: Says what to do.
    """
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    if any(each.grad is not None and takes_part(each) for each in parameters):
        raise InvalidError(
            f"{path}: {type(optimizer).__name__} says it is in the middle of gradient accumulation; a resumed run "
            f"would lose what it has gathered. {_ADVICE}"
        )


_ADVICE = "Save after the optimizer's step, pass grads=True to keep the gradients, or skip='*.grad' to do without them"


def _says_no_sync(module: nn.Module) -> bool:
    if isinstance(module, DistributedDataParallel):
        return not module.require_backward_grad_sync
    return is_wrapper(module) and getattr(module, "_sync_gradients", True) is False


def _unreduced(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of which FSDP2 keeps a gradient that it has not reduced yet."""
    for group, held in _held_by_fsdp2(module):
        unsharded = getattr(held, "_unsharded_param", None)
        gathered = held.unsharded_accumulated_grad is not None
        if gathered or group._partial_reduce_output is not None or getattr(unsharded, "grad", None) is not None:
            yield held.sharded_param


def _held_by_fsdp2(module: nn.Module) -> Iterator[tuple[_Group, _Parameter]]:
    for each in module.modules():
        # By name, so that nobody pays for the import of FSDP.
        if any(kind.__name__ == "FSDPModule" for kind in type(each).__mro__):
            for group in cast("_Module", each)._get_fsdp_state()._fsdp_param_groups:
                for held in group.fsdp_params:
                    yield group, held
