"""FSDP1: reads which run of each parameter this rank holds off the shard of the flat parameter.

With `use_orig_params=True` every parameter is a 1-d view of this rank's shard, and so is its optimizer state. FSDP1's
own sharded state dict gathers and splits all of it again; here nothing moves and no collective runs.
"""

from __future__ import annotations

import torch
from torch import nn

from holdfast.backends.torch.local_shards import RankOfGlobal, ranks_in_group
from holdfast.backends.torch.private_layout import (
    FlatParameterView,
    add_own_entries,
    children_of,
    flat_parameter_of,
    is_wrapper,
    run_state_dict_hooks,
    run_state_dict_pre_hooks,
)
from holdfast.base.geometry.sharded import Sharded
from holdfast.errors import InvalidError


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
        if (flat := flat_parameter_of(wrapper)) is None:
            continue
        where = f"{path}.{name}" if name else path
        _require_usable(flat, where)
        if not flat.is_sharded:
            # NO_SHARD, or a single rank: every rank holds whole parameters of their own shape.
            continue
        replicas = _replicas(flat, where, rank_of_global)
        # SHARD_GRAD_OP keeps the gathered copy beside the shard and uses it in the next forward without a check. Values
        # loaded into the shard would have no effect.
        flat.drop_gathered()
        for parameter, start, shape in flat.parts():
            declared[id(parameter)] = Sharded(parameter, shape, flat_start=start, replicas=replicas)
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


def _require_usable(flat: FlatParameterView, where: str) -> None:
    if not flat.keeps_parameters:
        raise InvalidError(
            f"{where}: FullyShardedDataParallel with use_orig_params=False keeps parameters as one flat run without "
            "names; expected use_orig_params=True (training is the same), or fully_shard (FSDP2)"
        )
    if flat.activity != "IDLE":
        raise InvalidError(
            f"{where}: FullyShardedDataParallel is in {flat.activity}; save and load between steps, "
            "outside of forward, backward and summon_full_params"
        )
    for fqn, is_row_major, is_cut_twice in flat.cuts():
        if is_cut_twice:
            raise InvalidError(
                f"{where}.{fqn}: FSDP1 over tensor parallelism cannot be saved or loaded; use fully_shard (FSDP2)"
            )
        if flat.is_sharded and not is_row_major:
            raise InvalidError(
                f"{where}.{fqn}: FSDP1 cuts this parameter in the order of its strides, which are not row-major; "
                "make it contiguous before wrapping it, or use fully_shard (FSDP2)"
            )


def _replicas(flat: FlatParameterView, where: str, rank_of_global: RankOfGlobal) -> tuple[int, ...] | None:
    """Return the ranks that hold the same shard (HYBRID_SHARD), or None for this rank alone."""
    what = f"{where}: the group of FSDP1"
    ranks_in_group(flat.ranks(), rank_of_global, what)
    replicas = flat.replica_ranks()
    return None if replicas is None else tuple(sorted(ranks_in_group(replicas, rank_of_global, what)))


def _enter(module: nn.Module, prefix: str, entries: dict[str, object]) -> None:
    """Add a module's entries as `Module.state_dict` does, without hooks of FSDP1 wrappers."""
    if not any(map(is_wrapper, module.modules())):
        module.state_dict(destination=entries, prefix=prefix, keep_vars=True)
        return
    runs_hooks = not is_wrapper(module)
    if runs_hooks:
        run_state_dict_pre_hooks(module, prefix)
    add_own_entries(module, entries, prefix)
    for name, child in children_of(module).items():
        if child is not None:
            _enter(child, f"{prefix}{name}.", entries)
    if runs_hooks:
        run_state_dict_hooks(module, entries, prefix)
