"""What DeepSpeed's files hold, under one shape for all its optimizers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from holdfast.errors import CorruptError, InvalidError
from holdfast.foreign.layouts.flat_partition import Shapes
from holdfast.foreign.pickles.objects import OpaqueObject
from holdfast.foreign.pickles.tensors import DIMENSIONS_MAX, StoredTensor
from holdfast.foreign.torch.archive_reader import read_torch_file
from holdfast.foreign.wording import shown
from holdfast.ports.store import Readable
from holdfast.types.values import FrameworkValue

_GROUPS_MAX = 1 << 20
_NUMBER_MAX = 1 << 62
_INFO = "universal_checkpoint_info"
_EXPERTS = ("ds_autoep_layers", "autoep_layers")
_OF_MODEL = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", _INFO,
}  # fmt: skip
_SCALERS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


@dataclass(frozen=True, slots=True)
class ModelState:
    """What a file of model states holds."""

    file: str
    """Its key."""

    module: Mapping[str, object]
    """What `state_dict()` of the module returned; of ZeRO-3 with empty tensors for parameters."""

    buffers: frozenset[str]
    """Names of buffers in it."""

    groups: Sequence[Shapes]
    """Shapes of parameters by flat buffer, in the order in which they lie there."""

    shared: Mapping[str, str]
    """Tied names: alias to the name that is kept."""

    frozen: Shapes
    """Shapes of parameters that no optimizer has, where the file tells."""

    fragments: Mapping[str, StoredTensor]
    """What this rank holds of them."""

    info: Mapping[str, object]
    """`universal_checkpoint_info`."""

    rest: Mapping[str, object]
    """All else at the top: counters, schedulers, what the caller added."""

    has_optimizer: bool
    """Whether it holds optimizer state itself, as it does without ZeRO."""

    def count(self, name: str, otherwise: int) -> int:
        """Return a counter that stands at the top."""
        value = self.rest.get(name)
        return value if type(value) is int and 0 <= value < _NUMBER_MAX else otherwise

    @property
    def version(self) -> str:
        """Return the version of DeepSpeed that wrote it."""
        return str(self.rest.get("ds_version", "of unknown version"))


@dataclass(frozen=True, slots=True)
class FlatShare:
    """One rank's share of one flat buffer."""

    master: StoredTensor
    """The master copy."""

    state: Mapping[str, object]
    """What the optimizer keeps for it, by key: tensors and plain values; empty before its first step."""

    padding: int
    """Elements at its end that are said to be padding."""

    gaps: Sequence[int] | None
    """Padding behind each parameter, where there is any."""

    addresses: Mapping[str, tuple[int, int]] | None
    """`param_slice_mappings`: by parameter, start and length in the share."""


@dataclass(frozen=True, slots=True)
class ZeroState:
    """What a file of optimizer states holds."""

    file: str
    """Its key."""

    stage: int
    """ZeRO's stage; 0 for BF16_Optimizer, which states none."""

    ranks: int
    """Data-parallel ranks that share the buffers."""

    shares: Sequence[FlatShare]
    """This rank's share of each flat buffer."""

    param_groups: Sequence[Mapping[str, object]] | None
    """Hyperparameters; None where the file holds none (elastic checkpoints)."""

    group_of: Sequence[int]
    """By flat buffer, the number of its parameter group."""

    info: Mapping[str, object]
    """`universal_checkpoint_info`, where it is kept here."""

    rest: Mapping[str, object]
    """Loss scaling and clipping."""

    version: str
    """Version of DeepSpeed that wrote it."""


def read_model_state(files: Readable, key: str) -> ModelState:
    """Return what a file of model states holds.

    Raises:
        CorruptError: It is damaged, or no such file.
        InvalidError: It belongs to a pipeline or to experts.
    """
    where = f"{files.url}/{key}"
    saved = _dict(read_torch_file(files, key).value, where, "the file")
    if any(saved.get(name) for name in _EXPERTS):
        raise InvalidError(
            f"{where}: holds layers of AutoEP, which are not read; expected parameters that are no experts"
        )
    if saved.get("module") is None:
        raise InvalidError(
            f"{where}: holds no module, as where a pipeline keeps each layer in a file of its own, which is not read; "
            "expected ZeRO states of data and tensor parallelism"
        )
    groups = saved.get("param_shapes")
    if groups is None:
        groups = []
    elif isinstance(groups, dict):
        groups = [groups]
    if not isinstance(groups, list | tuple) or len(groups) > _GROUPS_MAX:
        _mistaken(where, "param_shapes", groups)
    fragments = _dict(saved.get("frozen_param_fragments") or {}, where, "frozen_param_fragments")
    return ModelState(
        file=key,
        module=_dict(saved["module"], where, "module"),
        buffers=frozenset(_texts(saved.get("buffer_names"), where, "buffer_names")),
        groups=[_shapes(each, where, f"param_shapes[{number}]") for number, each in enumerate(groups)],
        shared=_names(saved.get("shared_params"), where, "shared_params"),
        frozen=_shapes(saved.get("frozen_param_shapes") or {}, where, "frozen_param_shapes"),
        fragments={name: _tensor(each, where, f"frozen_param_fragments.{name}") for name, each in fragments.items()},
        info=_dict(saved.get(_INFO) or {}, where, _INFO),
        rest={name: value for name, value in saved.items() if name not in _OF_MODEL},
        has_optimizer=saved.get("optimizer") is not None,
    )


def read_zero_state(files: Readable, key: str) -> ZeroState:
    """Return what a file of optimizer states holds.

    Raises:
        CorruptError: It is damaged, or no such file.
        InvalidError: Its buffers are shared by groups of ranks of their own (experts).
    """
    where = f"{files.url}/{key}"
    outer = _dict(read_torch_file(files, key).value, where, "the file")
    saved = _dict(outer.get("optimizer_state_dict"), where, "optimizer_state_dict")
    if saved.get("ds_zero_partition_groups"):
        raise InvalidError(f"{where}: experts have partitions of their own, which are not read; expected one for all")
    stage = stage_of(saved.get("zero_stage"), where)
    optimizer = saved.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    masters = saved.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if not isinstance(masters, list | tuple):
        _mistaken(where, "its master copies", masters)
    paddings = _list_of(saved, "group_paddings", len(masters), where)
    gaps = _list_of(saved, "param_alignment_paddings", len(masters), where)
    addresses = _list_of(saved, "param_slice_mappings", len(masters), where)
    states = _states(optimizer, len(masters), where)
    if "base_optimizer_state_step" in saved:  # Elastic checkpoints keep apart what stands in param_groups.
        states = [{"step": saved["base_optimizer_state_step"], **state} for state in states]
    shares = []
    for number, master in enumerate(masters):
        shares.append(
            FlatShare(
                master=_flat(master, where, f"master copy {number}"),
                state=states[number],
                padding=_count(paddings[number] or 0, where, "group_paddings"),
                gaps=None if gaps[number] is None else _counts(gaps[number], where, "param_alignment_paddings"),
                addresses=None if addresses[number] is None else _addresses(addresses[number], where),
            )
        )
    known = param_groups_of(optimizer, where) if isinstance(optimizer, dict) else None
    return ZeroState(
        file=key,
        stage=stage,
        ranks=ranks_of(saved.get("partition_count"), where),
        shares=shares,
        param_groups=known,
        group_of=group_of(known, len(masters), where),
        info=_dict(saved.get(_INFO) or {}, where, _INFO),
        rest=scaling_of(saved),
        version=str(outer.get("ds_version", saved.get("ds_version", "of unknown version"))),
    )


def scaling_of(saved: Mapping[str, object]) -> dict[str, object]:
    """Return what a dict holds of loss scaling and clipping."""
    return {name: saved[name] for name in _SCALERS if name in saved}


def param_groups_of(saved: Mapping[str, object], where: str) -> Sequence[Mapping[str, object]] | None:
    """Return the hyperparameters that a dict holds by parameter group, None where it holds none."""
    groups = saved.get("param_groups")
    return None if groups is None else [_dict(each, where, "param_groups") for each in _items(groups, where)]


def stage_of(value: object, where: str) -> int:
    """Return ZeRO's stage, an int or a member of DeepSpeed's enum; 0 where none is stated."""
    if isinstance(value, OpaqueObject) and len(value.args) == 1:
        (value,) = value.args
    if value is None:
        return 0
    if type(value) is not int or value not in (1, 2, 3):
        _mistaken(where, "zero_stage", value)
    return value


def _states(optimizer: object, count: int, where: str) -> list[dict[str, object]]:
    """Return the optimizer's state by flat buffer; elastic checkpoints list it, others number it."""
    if isinstance(optimizer, list | tuple):
        found = dict(enumerate(optimizer))
    else:
        stated = _dict(optimizer, where, "the optimizer's state").get("state")
        if not isinstance(stated, dict):
            _mistaken(where, "the optimizer's state", stated)
        found = stated
    if any(type(number) is not int or number not in range(count) for number in found):
        raise CorruptError(f"{where}: state of {len(found)} buffers; expected the numbers of its {count} master copies")
    return [_dict(found.get(number, {}), where, f"state[{number}]") for number in range(count)]


def group_of(groups: Sequence[Mapping[str, object]] | None, count: int, where: str) -> list[int]:
    """Return the number of the parameter group of each flat buffer, from the numbers that each group lists."""
    if groups is None:
        return [0] * count
    found: dict[int, int] = {}
    for number, group in enumerate(groups):
        for each in _items(group.get("params"), where):
            if type(each) is not int or each in found:
                _mistaken(where, "params of its param_groups", each)
            found[each] = number
    if sorted(found) != list(range(count)):
        raise CorruptError(f"{where}: param_groups list {len(found)} buffers; expected each of its {count} once")
    return [found[number] for number in range(count)]


def ranks_of(value: object, where: str) -> int:
    """Return the data-parallel ranks that share buffers, a number or one for each buffer.

    Raises:
        InvalidError: Buffers are shared by different ranks.
    """
    if isinstance(value, list | tuple):
        counts = set(_counts(value, where, "partition_count"))
        if len(counts) > 1:
            raise InvalidError(
                f"{where}: partition_count {list(value)[:20]}: groups are cut over different ranks, as experts are, "
                "which is not read; expected one number for all"
            )
        value = counts.pop() if counts else 0
    ranks = _count(value, where, "partition_count")
    if not ranks:
        _mistaken(where, "partition_count", value)
    return ranks


def _list_of(saved: Mapping[str, object], name: str, count: int, where: str) -> Sequence[object]:
    found = saved.get(name)
    if found is None:
        return [None] * count
    if not isinstance(found, list | tuple) or len(found) != count:
        raise CorruptError(f"{where}: {name} is {shown(found)}; expected one for each of its {count} master copies")
    return found


def _addresses(value: object, where: str) -> dict[str, tuple[int, int]]:
    found = {}
    for name, each in _dict(value, where, "param_slice_mappings").items():
        if not isinstance(each, OpaqueObject):
            _mistaken(where, f"the address of {name}", each)
        start, numel = (_count(each.attribute(field), where, f"the address of {name}") for field in ("start", "numel"))
        found[name] = (start, numel)
    return found


def _shapes(value: object, where: str, what: str) -> dict[str, tuple[int, ...]]:
    return {name: _shape(each, where, f"{what}.{name}") for name, each in _dict(value, where, what).items()}


def _shape(value: object, where: str, what: str) -> tuple[int, ...]:
    if isinstance(value, FrameworkValue) and value.kind == "torch.size":
        value = value.value
    shape = tuple(_counts(value, where, what))
    if len(shape) > DIMENSIONS_MAX or math.prod(shape) >= _NUMBER_MAX:
        _mistaken(where, what, value)
    return shape


def _flat(value: object, where: str, what: str) -> StoredTensor:
    tensor = _tensor(value, where, what)
    if len(tensor.shape) != 1 or not tensor.is_contiguous:
        raise CorruptError(f"{where}: {what} has shape {list(tensor.shape)}; expected one dimension, without gaps")
    return tensor


def _tensor(value: object, where: str, what: str) -> StoredTensor:
    if not isinstance(value, StoredTensor):
        _mistaken(where, what, value)
    return value


def _dict(value: object, where: str, what: str) -> dict[str, object]:
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        _mistaken(where, what, value)
    return value


def _names(value: object, where: str, what: str) -> dict[str, str]:
    found = _dict(value or {}, where, what)
    _texts(list(found.values()), where, what)
    return {name: str(each) for name, each in found.items()}


def _texts(value: object, where: str, what: str) -> list[str]:
    found = _items(value or [], where)
    if not all(type(each) is str for each in found):
        _mistaken(where, what, value)
    return [str(each) for each in found]


def _items(value: object, where: str) -> Sequence[object]:
    if not isinstance(value, list | tuple | set):
        _mistaken(where, "a list", value)
    return list(value)


def _counts(value: object, where: str, what: str) -> Sequence[int]:
    if not isinstance(value, list | tuple):
        _mistaken(where, what, value)
    return [_count(each, where, what) for each in value]


def _count(value: object, where: str, what: str) -> int:
    if type(value) is not int or not 0 <= value < _NUMBER_MAX:
        _mistaken(where, what, value)
    return value


def _mistaken(where: str, what: str, found: object) -> NoReturn:
    raise CorruptError(
        f"{where}: {what} is {shown(found)}; expected what DeepSpeed writes there. Is it one of its files, and whole?"
    )
