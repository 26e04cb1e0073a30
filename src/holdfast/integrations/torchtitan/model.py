"""The model of a training: one module, or the modules that a pipeline gives to this rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.distributed.fsdp import FSDPModule

from holdfast.errors import InvalidError

logger = logging.getLogger(__name__)

_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})
"""Segments that activation checkpointing and compilation put into names."""


class TitanModel:
    """Names the tensors of the model, and fills them."""

    def __init__(self, parts: Sequence[torch.nn.Module]) -> None:
        """Take the modules.

        Raises:
            InvalidError: A module keeps state that is neither parameter nor buffer.
        """
        self._parts = tuple(parts)
        kept = [
            name or type(module).__name__
            for part in self._parts
            for name, module in part.named_modules()
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state
        ]
        if kept:
            raise InvalidError(
                f"model: {', '.join(kept[:3])} ({len(kept)} modules) keep extra state, which HoldfastManager does not "
                "save; expected parameters and buffers alone. Save such a model with torchtitan's CheckpointManager"
            )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters and persistent buffers by name, without the segments of wrappers.

        They are the tensors of training themselves, not what state-dict hooks make of them. A hook that splits a fused
        projection gathers it on every rank, and the optimizer keeps moments of the parameter, not of its parts.

        Raises:
            InvalidError: Two tensors have one name.
        """
        for module in {each for part in self._parts for each in part.modules() if isinstance(each, FSDPModule)}:
            module.reshard()  # A forward may have left whole parameters in the place of the shards.
        found: dict[str, torch.Tensor] = {}
        origins: dict[str, str] = {}
        for part in self._parts:
            for name, tensor in (*part.named_parameters(remove_duplicate=False), *_persistent_buffers(part)):
                plain = ".".join(segment for segment in name.split(".") if segment not in _WRAPPERS)
                if plain in found and found[plain] is not tensor:
                    raise InvalidError(
                        f"model: {origins[plain]} and {name} are both saved as {plain}; expected one tensor for each "
                        "name. Rename one of the modules"
                    )
                found[plain], origins[plain] = tensor, name
        return found

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what the modules' own `state_dict` returns: the names that torchtitan's adapters know."""
        return {name: tensor for part in self._parts for name, tensor in part.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Fill the modules from a state under the names of `state_dict`; a warning names what it lacks."""
        missing: set[str] = set()
        for part in self._parts:
            missing |= set(part.load_state_dict(dict(state), strict=False).missing_keys)
        if missing:
            first = ", ".join(sorted(missing)[:3])
            logger.warning("%d tensors of the model were not loaded and stay as they are: %s", len(missing), first)


def _persistent_buffers(part: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in part.named_modules(remove_duplicate=False):
        own = dict(module.named_buffers(recurse=False))
        if not own:
            continue
        saved = module.state_dict(keep_vars=True)  # Says which buffers are persistent.
        for name, buffer in own.items():
            if name in saved:
                yield (f"{prefix}.{name}" if prefix else name), buffer
