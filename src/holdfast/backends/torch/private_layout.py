"""What Holdfast reads of torch that torch does not promise to keep: names that begin with an underscore.

No other file reads them (`tests/house/test_private_names.py`). Each function says what it reads, and since which
version of torch; "since 2.6" means 2.6 or before. Where versions differ, it has a branch for each.
`tests/unit/backends/torch/test_private_layout.py` reads every field off a real object and names one that moved.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

if TYPE_CHECKING:
    # `torch.distributed` has these three, but its annotations do not export them.
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore

    # Imported for their types only: importing them is slow.
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.fsdp._flat_param import FlatParamHandle
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
else:
    from torch.distributed import PrefixStore, Store, TCPStore  # noqa: F401 - other modules import them from here

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------------- versions

TESTED_FROM, TESTED_BELOW = (2, 10), (2, 16)
"""The range of torch versions that the tests ran against: `docs/torch-versions.md`. pyproject.toml, README.md and the
Makefile state the same."""

_warned: set[str] = set()


def warn_of_untested_version(version: str) -> None:
    """Log once that a version of torch is outside the tested range; saves and loads go on.

    Args:
        version: `torch.__version__`.
    """
    text = untested(version)
    if text is not None and version not in _warned:
        _warned.add(version)
        logger.warning("%s", text)


def untested(version: str) -> str | None:
    """Return what to know of a version of torch outside the tested range, as a text; None for a tested one."""
    major, minor = (int(number) if number.isdecimal() else 0 for number in f"{version}.0".split(".")[:2])
    if TESTED_FROM <= (major, minor) < TESTED_BELOW:
        return None
    (first, low), (last, high) = TESTED_FROM, TESTED_BELOW
    return (
        f"torch {version} is outside the tested range; expected torch>={first}.{low},<{last}.{high}. Holdfast reads "
        "private fields of torch: if one has moved, a save or a load raises and names it. Try one of each before a "
        f"long run, or install torch>={first}.{low},<{last}.{high}"
    )


# -------------------------------------------------------------------------------------------------- tensors

StridedShard = _StridedShard
"""The placement of a dimension that FSDP2 splits again after tensor parallelism. `_StridedShard`, since 2.6."""


def split_factor_of(placement: StridedShard) -> int:
    """Return into how many parts tensor parallelism splits the dimension. `_StridedShard.split_factor`, since 2.6."""
    return int(placement.split_factor)


local_tensor: Callable[[DTensor], torch.Tensor] = attrgetter("_local_tensor")
"""Returns this rank's part of a DTensor. `DTensor._local_tensor`, since 2.6.

Not `to_local`, which returns a view with a gradient history where gradients are on. Asked several times for each tensor
of each save and load; this takes half the time of a function.
"""


def dtensor_on_host(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return a DTensor with the mesh and placements of another one and a local tensor in host memory.

    `DTensor.from_local` would move the tensor to the device of the mesh. `DTensor._spec`, since 2.6.
    """
    return DTensor(local, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def local_shards_of(tensor: torch.Tensor) -> list[tuple[torch.Tensor, tuple[int, ...]]] | None:
    """Return tensor and start of each local shard of a `ShardedTensor`; None for any other tensor.

    By name, without importing that class. `ShardedTensor.local_shards` of `torch.distributed._shard`, with `tensor` and
    `metadata.shard_offsets` of each `Shard`, since 2.6.
    """
    if type(tensor).__name__ != "ShardedTensor" or not hasattr(tensor, "local_shards"):
        return None
    return [(shard.tensor, tuple(shard.metadata.shard_offsets)) for shard in tensor.local_shards()]


def version_counter(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; -1 for inference tensors, which have no count.

    `Tensor._version`, since 2.6.
    """
    return -1 if tensor.is_inference() else tensor._version


version_counter_of_trained: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Returns `version_counter` of a tensor that is no inference tensor, in a third of the time. `Tensor._version`."""


def set_version_counter(tensor: torch.Tensor, version: int) -> None:
    """Set the count of `version_counter`, after an op in place that changed nothing.

    `torch._C._autograd._unsafe_set_version_counter`, of tuples since 2.10.
    """
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def storage_identity(tensor: torch.Tensor) -> int:
    """Return a number that two tensors share exactly if they share a storage, even an empty one.

    `UntypedStorage._cdata`, since 2.6.
    """
    identity: int = tensor.untyped_storage()._cdata
    return identity


class WeakStorage:
    """A weak reference to a storage: as long as it exists, no other storage has the same identity.

    `UntypedStorage._weak_ref`, `_expired` and `_free_weak_ref`, since 2.6; `StorageWeakRef` of torch has no types.
    """

    __slots__ = ("bytes", "free", "identity")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.bytes = storage.nbytes()
        self.identity = cast("int", storage._weak_ref())
        # The module may be gone at the end of the interpreter.
        self.free = torch.UntypedStorage._free_weak_ref

    def is_expired(self) -> bool:
        """Return whether the storage's memory was released."""
        return bool(torch.UntypedStorage._expired(self.identity))

    def __del__(self) -> None:
        """Give the identity back."""
        self.free(self.identity)  # type: ignore[no-untyped-call]


def has_backward_hooks(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has hooks that run once its gradient is accumulated.

    `Tensor._post_accumulate_grad_hooks`, since 2.6: None, or a dict.
    """
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def is_flat_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is the flat parameter of an FSDP1 wrapper. `FlatParameter._is_flat_param`, since 2.6."""
    return bool(getattr(tensor, "_is_flat_param", False))


# ------------------------------------------------------------------------------------------- ops, saved tensors


CAST = torch.ops.aten._to_copy.default
"""The op of a cast. `aten._to_copy`, since 2.6."""


def top_saved_tensors_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """Return pack and unpack of the innermost `saved_tensors_hooks` that are active; None without any.

    `torch._C._autograd._top_saved_tensors_default_hooks`, since 2.6. The argument leaves hooks of a compiler out.
    """
    hooks: tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


def arguments_of(op: Any) -> list[tuple[str, bool]]:
    """Return of each argument of an op its name, and whether the op writes to the argument.

    `OpOverload._schema`, since 2.6; `arguments` of a schema, each with `alias_info`.
    """
    return [
        (argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for argument in op._schema.arguments
    ]


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether hooks run before or after a module's forward.

    `Module._forward_hooks` and `Module._forward_pre_hooks`, since 2.6.
    """
    return bool(module._forward_hooks or module._forward_pre_hooks)


def registered(module: nn.Module) -> list[dict[str, torch.Tensor | None]]:
    """Return the dicts in which a module holds its own parameters and buffers.

    `Module._parameters` and `Module._buffers`, since 2.6. FSDP2 exchanges the parameters in them.
    """
    return [cast("dict[str, torch.Tensor | None]", module._parameters), module._buffers]


# -------------------------------------------------------------------------------------------------- modules

COMPILED = "_orig_mod"
"""Attribute under which a compiled module holds the original, and its segment in names. Since 2.6."""

WRAPPER_SEGMENTS = frozenset({COMPILED, "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Segments that torch.compile, activation checkpointing and FSDP1 add to names. Since 2.6."""

EXTRA_STATE = "_extra_state"
"""Last segment of the key under which a state dict holds what `get_extra_state` returns. Since 2.6."""


def original_of(module: nn.Module) -> nn.Module | None:
    """Return the module inside a compiled one; None for any other. `OptimizedModule._orig_mod`, since 2.6."""
    inner = getattr(module, COMPILED, None)
    return inner if isinstance(inner, nn.Module) else None


def has_entry(module: nn.Module, name: str) -> bool:
    """Return whether a module has a parameter or buffer of its own under a name.

    `Module._parameters` and `Module._buffers`, since 2.6. `named_parameters` leaves out a second name.
    """
    return name in module._parameters or name in module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the modules directly inside a module. `Module._modules`, since 2.6.

    `named_children` leaves out a second name of a module.
    """
    return module._modules


def add_own_entries(module: nn.Module, entries: dict[str, object], prefix: str) -> None:
    """Add the parameters, buffers and extra state of a module itself to the entries of a state dict.

    `Module._save_to_state_dict`, since 2.6.
    """
    module._save_to_state_dict(entries, prefix, True)


def run_state_dict_pre_hooks(module: nn.Module, prefix: str) -> None:
    """Run the hooks that precede a module's part of a state dict. `Module._state_dict_pre_hooks`, since 2.6."""
    for before in module._state_dict_pre_hooks.values():
        before(module, prefix, True)


def run_state_dict_hooks(module: nn.Module, entries: dict[str, object], prefix: str) -> None:
    """Run the hooks that follow a module's part of a state dict. `Module._state_dict_hooks`, since 2.6."""
    for after in module._state_dict_hooks.values():
        result = after(module, entries, prefix, {})
        if isinstance(result, dict) and result is not entries:
            entries.clear()
            entries.update(result)


def hooks_before_loading(fenced: nn.Module | torch.optim.Optimizer) -> list[object] | None:
    """Return the hooks that run before `load_state_dict`; None for an optimizer that has no place for them.

    `Module._load_state_dict_pre_hooks`, whose values are `_WrappedHook`, with the function as `hook`;
    `Optimizer._optimizer_load_state_dict_pre_hooks`, whose values are the functions. Since 2.6.
    """
    if isinstance(fenced, torch.optim.Optimizer):
        # An optimizer that wraps another need not call the constructor of the base class.
        hooks = getattr(fenced, "_optimizer_load_state_dict_pre_hooks", None)
        return None if hooks is None else list(hooks.values())
    return [getattr(hook, "hook", hook) for hook in fenced._load_state_dict_pre_hooks.values()]


def loads_in_code(module: nn.Module) -> bool:
    """Return whether a module loads entries in code of its own: a method, or a hook after `load_state_dict`.

    `Module._load_from_state_dict` and `Module._load_state_dict_post_hooks`, since 2.6.
    """
    own = "_load_from_state_dict" in vars(module)
    inherited = type(module)._load_from_state_dict is nn.Module._load_from_state_dict
    return own or not inherited or bool(module._load_state_dict_post_hooks)


def copy_versions(source: OrderedDict[Any, object], copy: OrderedDict[Any, object]) -> None:
    """Give a copy of a module's state dict the versions of its modules. `_metadata` of a state dict, since 2.6."""
    if hasattr(source, "_metadata"):
        copy._metadata = source._metadata  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------------- FSDP1


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module is a `FullyShardedDataParallel`; by name, to avoid its slow import."""
    return any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__)


def flat_parameter_of(module: nn.Module) -> FlatParameterView | None:
    """Return the flat parameter of an FSDP1 wrapper; None for any other module, or one without parameters.

    `FullyShardedDataParallel._handle`, since 2.6.
    """
    if not is_wrapper(module):
        return None
    wrapper = cast("FullyShardedDataParallel", module)
    return None if wrapper._handle is None else FlatParameterView(wrapper, wrapper._handle)


def is_without_reduction(module: nn.Module) -> bool:
    """Return whether an FSDP1 wrapper is inside `no_sync`. `FullyShardedDataParallel._sync_gradients`, since 2.6."""
    return is_wrapper(module) and getattr(module, "_sync_gradients", True) is False


class FlatParameterView:
    """The flat parameter of one FSDP1 wrapper: the parameters of its module one after the other, cut over ranks.

    Reads `FlatParamHandle` and `FlatParameter` of `torch.distributed.fsdp._flat_param`. Every field since 2.6.
    """

    def __init__(self, wrapper: FullyShardedDataParallel, handle: FlatParamHandle) -> None:
        self._wrapper, self._handle = wrapper, handle
        self.keeps_parameters: bool = handle._use_orig_params
        """Whether the module keeps its parameters beside the flat one. `FlatParamHandle._use_orig_params`."""
        self.is_sharded: bool = handle.uses_sharded_strategy
        """Whether ranks hold parts. `FlatParamHandle.uses_sharded_strategy`."""
        self.activity: str = wrapper.training_state.name
        """What the wrapper does now; "IDLE" between steps. `FullyShardedDataParallel.training_state`."""

    def cuts(self) -> Iterator[tuple[str, bool, bool]]:
        """Yield of each parameter the name, whether it is row-major, and whether another parallelism cuts it too.

        `FlatParameter._fqns`, `_contiguities` and `_param_extensions`.
        """
        flat = self._handle.flat_param
        for fqn, contiguous, extension in zip(flat._fqns, flat._contiguities, flat._param_extensions, strict=True):
            yield fqn, contiguous, extension is not None

    def parts(self) -> Iterator[tuple[nn.Parameter, int, tuple[int, ...]]]:
        """Yield each parameter, the first of its elements that this rank holds, and its shape.

        `FlatParameter._params`, `_shard_param_infos` with `intra_param_start_idx`, and `_shapes`.
        """
        flat = self._handle.flat_param
        assert flat._params is not None, "use_orig_params=True keeps the parameters"
        for parameter, info, shape in zip(flat._params, flat._shard_param_infos, flat._shapes, strict=True):
            yield parameter, info.intra_param_start_idx or 0, tuple(shape)

    def ranks(self) -> list[int]:
        """Return the global ranks over which it is cut. `FlatParamHandle.process_group`."""
        return dist.get_process_group_ranks(self._handle.process_group)

    def replica_ranks(self) -> list[int] | None:
        """Return the global ranks that hold the same shard (HYBRID_SHARD); None if this rank alone does.

        `FullyShardedDataParallel.sharding_strategy` and `_inter_node_pg`.
        """
        if "HYBRID" not in self._wrapper.sharding_strategy.name:
            return None
        return dist.get_process_group_ranks(self._wrapper._inter_node_pg)

    def drop_gathered(self) -> None:
        """Drop gathered copies of the parameters; local, without a collective.

        `_reshard` of `torch.distributed.fsdp._runtime_utils`; `FlatParameter._local_shard`, set by the first forward.
        """
        if not hasattr(self._handle.flat_param, "_local_shard"):
            # No forward has run yet, so only the shard exists.
            return
        from torch.distributed.fsdp._runtime_utils import _reshard

        _reshard(self._wrapper, self._handle, True)


# ---------------------------------------------------------------------------------------------------- FSDP2


def unreduced_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters with a gradient that FSDP2 has not reduced over ranks yet.

    `FSDPParam.unsharded_accumulated_grad`, `_unsharded_param` (set by the first forward) and `sharded_param`;
    `FSDPParamGroup._partial_reduce_output`. Since 2.6. From 2.15 on, the first is the gradient of the second.
    """
    for group, held in _held_by_fsdp2(module):
        unsharded = getattr(held, "_unsharded_param", None)
        is_accumulated = held.unsharded_accumulated_grad is not None
        if is_accumulated or group._partial_reduce_output is not None or getattr(unsharded, "grad", None) is not None:
            yield held.sharded_param


def forget_unreduced(module: nn.Module) -> None:
    """Drop the gradients that FSDP2 has not reduced yet; the next backward would add them.

    Sets the fields that `unreduced_parameters` reads.
    """
    for group, held in _held_by_fsdp2(module):
        group._partial_reduce_output = None
        if (unsharded := getattr(held, "_unsharded_param", None)) is not None:
            unsharded.grad = None
        # From 2.15 on it has gone with the gradient, and cannot be set.
        if held.unsharded_accumulated_grad is not None:
            held.unsharded_accumulated_grad = None


def _held_by_fsdp2(module: nn.Module) -> Iterator[tuple[FSDPParamGroup, FSDPParam]]:
    for child in module.modules():
        # By name: importing FSDP takes time that most runs need not spend.
        if any(kind.__name__ == "FSDPModule" for kind in type(child).__mro__):
            for group in _groups_of(cast("FSDPModule", child)):
                for held in group.fsdp_params:
                    yield group, held


def _groups_of(module: FSDPModule) -> list[FSDPParamGroup]:
    """Return the groups of parameters that one `fully_shard` gathers together.

    `FSDPModule._get_fsdp_state`, since 2.6, and `FSDPState._fsdp_param_groups`, since 2.12. Before a mesh for each
    parameter (pull request 173509 of torch): `FSDPState._fsdp_param_group`, a group or None.
    """
    state = module._get_fsdp_state()
    # By the field: builds between two releases bear the number of either.
    if hasattr(state, "_fsdp_param_groups"):
        groups: list[FSDPParamGroup] = state._fsdp_param_groups
        return groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


# ------------------------------------------------------------------------------------ process groups, stores


def default_store() -> Store:
    """Return the key-value store of the default group. `distributed_c10d._get_default_store`, since 2.6."""
    return dist.distributed_c10d._get_default_store()


def store_without_prefix(store: Store) -> Store:
    """Return the store below all prefixes. `PrefixStore._underlying_non_prefix_store`, since 2.6."""
    return store._underlying_non_prefix_store if isinstance(store, PrefixStore) else store  # type: ignore[attr-defined]


def devices_of(group: dist.ProcessGroup) -> list[torch.device]:
    """Return the kinds of devices that a group has a backend for. `ProcessGroup._device_types`, since 2.6."""
    return group._device_types


def timeouts_of(group: dist.ProcessGroup) -> list[float]:
    """Return the timeouts of a group's collectives in seconds, one for each backend.

    `ProcessGroup._get_backend` and `Backend.Options._timeout`, since 2.6.

    Raises:
        AttributeError, RuntimeError: A backend states no options.
    """
    backends = [group._get_backend(device) for device in group._device_types]
    return [backend.options._timeout.total_seconds() for backend in backends]
