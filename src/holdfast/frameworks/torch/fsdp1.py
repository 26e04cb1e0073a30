"""FSDP1: reads which run of each parameter this rank holds off the shard of the flat parameter.

With `use_orig_params=True` every parameter is a 1-d view of this rank's shard, and so is its optimizer state. FSDP1's
own sharded state dict gathers and splits all of it again; here nothing moves and no collective runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from holdfast.errors import InvalidError
from holdfast.frameworks.torch.held import RankOfGlobal, ranks_in_group
from holdfast.geometry.sharded import Sharded

if TYPE_CHECKING:
    # Imported for their types only: importing FSDP1 is slow.
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._flat_param import FlatParamHandle


def is_wrapper(module: nn.Module) -> TypeGuard[FullyShardedDataParallel]:
    """Return whether a module is a `FullyShardedDataParallel`; by name, to avoid its slow import."""
    return any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__)


def declarations(module: nn.Module, path: str, rank_of_global: RankOfGlobal) -> dict[int, Sharded]:
    """Return this rank's part of each parameter that FSDP1 shards, by the parameter's identity.

    Padding belongs to no parameter. Parameters that are gathered now (for example after an evaluation under
    SHARD_GRAD_OP) are resharded first, as FSDP2 does.

    Args:
        module: Any module; wrappers are found at every depth.
        path: Its path in the state.
        rank_of_global: Returns the rank in the saving group for a global rank.
    Raises:
        InvalidError: `use_orig_params=False`, a forward or backward is running, or a layout is not one run.
    """
    declared: dict[int, Sharded] = {}
    for name, wrapper in module.named_modules():
        if not is_wrapper(wrapper) or (handle := wrapper._handle) is None:
            continue
        where = f"{path}.{name}" if name else path
        _require_usable(wrapper, handle, where)
        if not handle.uses_sharded_strategy:
            # NO_SHARD, or a single rank: every rank holds whole parameters of their own shape.
            continue
        replicas = _replicas(wrapper, handle, where, rank_of_global)
        _drop_gathered(wrapper, handle)
        flat = handle.flat_param
        assert flat._params is not None, "use_orig_params=True keeps the parameters"
        for parameter, info, shape in zip(flat._params, flat._shard_param_infos, flat._shapes, strict=True):
            start = info.intra_param_start_idx or 0
            declared[id(parameter)] = Sharded(parameter, tuple(shape), flat_start=start, replicas=replicas)
    return declared


def holds_any(declared: Sharded) -> bool:
    """Return whether this rank has any element of a parameter that FSDP1 shards.

    Without one, the parameter gets no gradient and the optimizer never steps it. Its step count does not advance, so
    it is not a copy of the other ranks' count.
    """
    return isinstance(declared.tensor, torch.Tensor) and declared.tensor.numel() > 0


def state_entries(module: nn.Module) -> dict[str, object]:
    """Return the entries of a module's state dict, the module's own objects, without FSDP1's hooks.

    FSDP1's hooks would gather every parameter. All other hooks run.
    """
    if not any(map(is_wrapper, module.modules())):
        return dict(module.state_dict(keep_vars=True))
    entries: dict[str, object] = {}
    _enter(module, "", entries)
    return entries


def _require_usable(wrapper: FullyShardedDataParallel, handle: FlatParamHandle, where: str) -> None:
    if not handle._use_orig_params:
        raise InvalidError(
            f"{where}: FullyShardedDataParallel with use_orig_params=False keeps parameters as one flat run without "
            "names; expected use_orig_params=True (training is the same), or fully_shard (FSDP2)"
        )
    if wrapper.training_state.name != "IDLE":
        raise InvalidError(
            f"{where}: FullyShardedDataParallel is in {wrapper.training_state.name}; save and load between steps, "
            "outside of forward, backward and summon_full_params"
        )
    flat = handle.flat_param
    for fqn, contiguous, extension in zip(flat._fqns, flat._contiguities, flat._param_extensions, strict=True):
        if extension is not None:
            raise InvalidError(
                f"{where}.{fqn}: FSDP1 over tensor parallelism cannot be saved or loaded; use fully_shard (FSDP2)"
            )
        if handle.uses_sharded_strategy and not contiguous:
            raise InvalidError(
                f"{where}.{fqn}: FSDP1 cuts this parameter in the order of its strides, which are not row-major; "
                "make it contiguous before wrapping it, or use fully_shard (FSDP2)"
            )


def _replicas(
    wrapper: FullyShardedDataParallel, handle: FlatParamHandle, where: str, rank_of_global: RankOfGlobal
) -> tuple[int, ...] | None:
    """Return the ranks that hold the same shard (HYBRID_SHARD), or None for this rank alone."""
    what = f"{where}: the group of FSDP1"
    ranks_in_group(dist.get_process_group_ranks(handle.process_group), rank_of_global, what)
    if "HYBRID" not in wrapper.sharding_strategy.name:
        return None
    return tuple(sorted(ranks_in_group(dist.get_process_group_ranks(wrapper._inter_node_pg), rank_of_global, what)))


def _drop_gathered(wrapper: FullyShardedDataParallel, handle: FlatParamHandle) -> None:
    """Drop gathered copies of parameters; local, without a collective.

    SHARD_GRAD_OP keeps the gathered copy beside the shard and uses it in the next forward without a check. Values
    loaded into the shard would have no effect.
    """
    if not hasattr(handle.flat_param, "_local_shard"):
        # No forward has run yet, so only the shard exists.
        return
    from torch.distributed.fsdp._runtime_utils import _reshard

    _reshard(wrapper, handle, True)


def _enter(module: nn.Module, prefix: str, entries: dict[str, object]) -> None:
    """Add a module's entries as `Module.state_dict` does, without hooks of FSDP1 wrappers."""
    if not any(map(is_wrapper, module.modules())):
        module.state_dict(destination=entries, prefix=prefix, keep_vars=True)
        return
    runs_hooks = not is_wrapper(module)
    for before in module._state_dict_pre_hooks.values() if runs_hooks else ():
        before(module, prefix, True)
    module._save_to_state_dict(entries, prefix, True)
    for name, child in module._modules.items():
        if child is not None:
            _enter(child, f"{prefix}{name}.", entries)
    for after in module._state_dict_hooks.values() if runs_hooks else ():
        result = after(module, entries, prefix, {})
        if isinstance(result, dict) and result is not entries:
            entries.clear()
            entries.update(result)
