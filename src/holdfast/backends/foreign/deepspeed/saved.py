"""Decodes DeepSpeed's files of model states and of optimizer states into one shape for all its optimizers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from holdfast.backends.foreign.messages import shown
from holdfast.backends.foreign.pickles.objects import OpaqueObject
from holdfast.backends.foreign.pickles.tensors import StoredTensor
from holdfast.backends.foreign.slices.flat_partition import Shapes
from holdfast.backends.foreign.torch.archive_reader import read_torch_file
from holdfast.backends.foreign.typed_values import COUNT_MAX, Count, Shape, typed
from holdfast.base.ports.readable import Readable
from holdfast.errors import CorruptError, InvalidError, first_three

_INFO = "universal_checkpoint_info"
_EXPERTS = ("ds_autoep_layers", "autoep_layers")
_MODEL_KEYS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", _INFO,
}  # fmt: skip
_SCALER_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
_UNKNOWN_VERSION = "of unknown version"


@dataclass(frozen=True, slots=True)
class ModelState:
    """The content of a file of model states."""

    file: str
    """Key of the file."""

    module: Mapping[str, object]
    """The module's state dict. ZeRO-3 stores empty tensors for its parameters."""

    buffers: frozenset[str]
    """Names of the buffers in `module`."""

    groups: Sequence[Shapes]
    """Shapes of the parameters by flat buffer, in the order of the buffer."""

    shared: Mapping[str, str]
    """Tied names: alias to the stored name."""

    frozen: Shapes
    """Shapes of parameters without an optimizer, if the file states them."""

    fragments: Mapping[str, StoredTensor]
    """This rank's part of each frozen parameter."""

    info: Mapping[str, object]
    """`universal_checkpoint_info`."""

    rest: Mapping[str, object]
    """All other keys of the file: counters, schedulers, the caller's own values."""

    has_optimizer: bool
    """Whether the file holds optimizer state itself, as without ZeRO."""

    def count(self, name: str, otherwise: int) -> int:
        """Return a counter from the top level of the file."""
        value = self.rest.get(name)
        return value if type(value) is int and 0 <= value < COUNT_MAX else otherwise

    @property
    def version(self) -> str:
        """Return the version of DeepSpeed that wrote the file."""
        return str(self.rest.get("ds_version", _UNKNOWN_VERSION))


@dataclass(frozen=True, slots=True)
class FlatShare:
    """One rank's share of one flat buffer."""

    master: StoredTensor
    """The master copy."""

    state: Mapping[str, object]
    """Optimizer state of the share by key: tensors and plain values. Empty before the first step."""

    padding: int
    """Stated number of padding elements at the end."""

    gaps: Sequence[int] | None
    """Elements of padding after each parameter, if stated."""

    addresses: Mapping[str, tuple[int, int]] | None
    """`param_slice_mappings`: start and length in the share, by parameter."""


@dataclass(frozen=True, slots=True)
class ZeroState:
    """The content of a file of optimizer states."""

    file: str
    """Key of the file."""

    stage: int
    """ZeRO stage; 0 for BF16_Optimizer, which states none."""

    ranks: int
    """Data-parallel ranks that share each buffer."""

    shares: Sequence[FlatShare]
    """This rank's share of each flat buffer."""

    param_groups: Sequence[Mapping[str, object]] | None
    """Hyperparameters by parameter group; None if the file holds none (elastic checkpoints)."""

    group_of: Sequence[int]
    """Number of the parameter group, by flat buffer."""

    rest: Mapping[str, object]
    """Loss scaling and gradient clipping."""

    version: str
    """Version of DeepSpeed that wrote the file."""

    info: Mapping[str, object]
    """`universal_checkpoint_info`, if it is stored here."""


def read_model_state(files: Readable, key: str) -> ModelState:
    """Return the content of a file of model states.

    Raises:
        CorruptError: The file is damaged, or not one of model states.
        InvalidError: It belongs to a pipeline or holds experts.
    """
    where = f"{files.url}/{key}"
    saved = typed(read_torch_file(files, key), dict[str, object], where)
    if any(saved.get(name) for name in _EXPERTS):
        raise InvalidError(f"{where}: holds AutoEP layers; expected parameters without experts. Holdfast reads no MoE")
    if saved.get("module") is None:
        raise InvalidError(
            f"{where}: holds no module, as in a pipeline, which stores each layer in its own file; "
            "expected ZeRO states of data and tensor parallelism"
        )
    groups = saved.get("param_shapes") or []
    shapes = [groups] if isinstance(groups, dict) else typed(groups, list[object], f"{where}: param_shapes")
    fragments = _dict(saved, "frozen_param_fragments", where)
    return ModelState(
        file=key,
        module=_dict(saved, "module", where),
        buffers=frozenset(typed(saved.get("buffer_names") or [], list[str], f"{where}: buffer_names")),
        groups=[_shapes(group, f"{where}: param_shapes[{number}]") for number, group in enumerate(shapes)],
        shared=typed(saved.get("shared_params") or {}, dict[str, str], f"{where}: shared_params"),
        frozen=_shapes(saved.get("frozen_param_shapes") or {}, f"{where}: frozen_param_shapes"),
        fragments={name: _tensor(part, where, f"frozen_param_fragments.{name}") for name, part in fragments.items()},
        info=_dict(saved, _INFO, where),
        rest={name: value for name, value in saved.items() if name not in _MODEL_KEYS},
        has_optimizer=saved.get("optimizer") is not None,
    )


def read_zero_state(files: Readable, key: str) -> ZeroState:
    """Return the content of a file of optimizer states.

    Raises:
        CorruptError: The file is damaged, or not one of optimizer states.
        InvalidError: Groups of ranks share its buffers, as with experts.
    """
    where = f"{files.url}/{key}"
    outer = typed(read_torch_file(files, key), dict[str, object], where)
    saved = typed(outer.get("optimizer_state_dict"), dict[str, object], f"{where}: optimizer_state_dict")
    if saved.get("ds_zero_partition_groups"):
        raise InvalidError(
            f"{where}: experts have partitions of their own; expected one for all parameters. Holdfast reads no MoE"
        )
    stage = stage_of(saved.get("zero_stage"), where)
    optimizer = saved.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    masters = saved.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    known = param_groups_of(optimizer, where) if isinstance(optimizer, dict) else None
    shares = _shares(saved, typed(masters, list[object], f"{where}: its master copies"), optimizer, where)
    return ZeroState(
        file=key,
        stage=stage,
        ranks=ranks_of(saved.get("partition_count"), where),
        shares=shares,
        param_groups=known,
        group_of=group_of(known, len(shares), where),
        info=_dict(saved, _INFO, where),
        rest=scaling_of(saved),
        version=str(outer.get("ds_version", saved.get("ds_version", _UNKNOWN_VERSION))),
    )


def _shares(saved: Mapping[str, object], masters: Sequence[object], optimizer: object, where: str) -> list[FlatShare]:
    count = len(masters)
    paddings = typed(_list_of(saved, "group_paddings", count, where), list[Count | None], f"{where}: group_paddings")
    stated_gaps = _list_of(saved, "param_alignment_paddings", count, where)
    gaps = typed(stated_gaps, list[list[Count] | None], f"{where}: param_alignment_paddings")
    addresses = _list_of(saved, "param_slice_mappings", count, where)
    states = _states(optimizer, count, where)
    if "base_optimizer_state_step" in saved:  # Elastic checkpoints store the step outside the state.
        states = [{"step": saved["base_optimizer_state_step"], **state} for state in states]
    return [
        FlatShare(
            master=_flat(master, where, f"master copy {number}"),
            state=states[number],
            padding=paddings[number] or 0,
            gaps=gaps[number],
            addresses=None if addresses[number] is None else _addresses(addresses[number], where),
        )
        for number, master in enumerate(masters)
    ]


def scaling_of(saved: Mapping[str, object]) -> dict[str, object]:
    """Return the loss scaling and gradient clipping of a file."""
    return {name: saved[name] for name in _SCALER_KEYS if name in saved}


def param_groups_of(saved: Mapping[str, object], where: str) -> Sequence[Mapping[str, object]] | None:
    """Return the hyperparameters by parameter group; None if there are none."""
    groups = saved.get("param_groups")
    return None if groups is None else typed(groups, list[dict[str, object]], f"{where}: param_groups")


def stage_of(value: object, where: str) -> int:
    """Return the ZeRO stage, stored as an int or a member of DeepSpeed's enum; 0 if none is stored."""
    if isinstance(value, OpaqueObject) and len(value.args) == 1:
        (value,) = value.args
    if value is None:
        return 0
    if type(value) is not int or value not in (1, 2, 3):
        _refuse(where, "zero_stage", value)
    return value


def _states(optimizer: object, count: int, where: str) -> list[dict[str, object]]:
    """Return the optimizer's state by flat buffer. Elastic checkpoints list it, others number it."""
    if isinstance(optimizer, list | tuple):
        states: object = dict(enumerate(optimizer))
    else:
        states = typed(optimizer, dict[str, object], f"{where}: the optimizer's state").get("state")
    by_number = typed(states, dict[int, dict[str, object]], f"{where}: the optimizer's state")
    if any(number not in range(count) for number in by_number):
        raise CorruptError(f"{where}: state of {len(by_number)} buffers; expected numbers of its {count} master copies")
    return [by_number.get(number, {}) for number in range(count)]


def group_of(groups: Sequence[Mapping[str, object]] | None, count: int, where: str) -> list[int]:
    """Return the parameter group of each flat buffer, from the buffer numbers that each group lists."""
    if groups is None:
        return [0] * count
    group_by_buffer: dict[int, int] = {}
    for number, group in enumerate(groups):
        for buffer in typed(group.get("params"), list[int], f"{where}: params of its param_groups"):
            if buffer in group_by_buffer:
                _refuse(where, "params of its param_groups", buffer)
            group_by_buffer[buffer] = number
    if sorted(group_by_buffer) != list(range(count)):
        raise CorruptError(f"{where}: param_groups list {len(group_by_buffer)} buffers; expected each of {count} once")
    return [group_by_buffer[number] for number in range(count)]


def ranks_of(value: object, where: str) -> int:
    """Return the data-parallel ranks that share buffers, stored as one number or as one for each buffer.

    Raises:
        InvalidError: Buffers are shared by different numbers of ranks.
    """
    counts = set(typed(value if isinstance(value, list | tuple) else [value], list[Count], f"{where}: partition_count"))
    if len(counts) > 1:
        raise InvalidError(
            f"{where}: partition_count {first_three(sorted(counts))}: parameter groups are cut over different ranks, "
            "as with experts; expected one number for all. Holdfast reads no MoE"
        )
    if counts <= {0}:
        _refuse(where, "partition_count", value)
    return counts.pop()


def _list_of(saved: Mapping[str, object], name: str, count: int, where: str) -> Sequence[object]:
    """Return an optional list with one entry for each master copy; all None if it is missing."""
    entries = saved.get(name)
    if entries is None:
        return [None] * count
    if not isinstance(entries, list | tuple) or len(entries) != count:
        raise CorruptError(f"{where}: {name} is {shown(entries)}; expected one for each of its {count} master copies")
    return entries


def _addresses(value: object, where: str) -> dict[str, tuple[int, int]]:
    addresses = {}
    for name, address in typed(value, dict[str, object], f"{where}: param_slice_mappings").items():
        if not isinstance(address, OpaqueObject):
            _refuse(where, f"the address of {name}", address)
        bounds = (address.attribute("start"), address.attribute("numel"))
        addresses[name] = typed(bounds, tuple[Count, Count], f"{where}: the address of {name}")
    return addresses


def _dict(saved: Mapping[str, object], name: str, where: str) -> dict[str, object]:
    """Return an optional dict of a file; empty if it is missing."""
    return typed(saved.get(name) or {}, dict[str, object], f"{where}: {name}")


def _shapes(value: object, where: str) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for name, stated in typed(value, dict[str, object], where).items():
        shape = shapes[name] = typed(stated, Shape, f"{where}.{name}")
        if math.prod(shape) >= COUNT_MAX:
            raise CorruptError(f"{where}.{name}: shape {list(shape)}; expected fewer elements. Read another copy")
    return shapes


def _flat(value: object, where: str, what: str) -> StoredTensor:
    tensor = _tensor(value, where, what)
    if len(tensor.shape) != 1 or not tensor.is_contiguous:
        raise CorruptError(f"{where}: {what} has shape {list(tensor.shape)}; expected one dimension, without gaps")
    return tensor


def _tensor(value: object, where: str, what: str) -> StoredTensor:
    if not isinstance(value, StoredTensor):
        _refuse(where, what, value)
    return value


def _refuse(where: str, what: str, value: object) -> NoReturn:
    raise CorruptError(f"{where}: {what} is {shown(value)}; expected a value that DeepSpeed writes. Read another copy")
