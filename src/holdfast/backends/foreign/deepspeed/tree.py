"""Builds the non-tensor state: hyperparameters by parameter, counters, schedulers, the caller's own values."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from holdfast.backends.foreign.deepspeed.module import Parameters
from holdfast.backends.foreign.deepspeed.optimizer import ZeroOptimizer
from holdfast.backends.foreign.deepspeed.saved import ModelState
from holdfast.backends.foreign.messages import shown
from holdfast.backends.foreign.optimizers import optimizer_group
from holdfast.backends.foreign.pickles.objects import OpaqueObject
from holdfast.backends.foreign.pickles.tensors import StoredTensor
from holdfast.backends.foreign.read import read_bytes
from holdfast.backends.foreign.values import to_value
from holdfast.base.ports.readable import Readable
from holdfast.base.types.values import FrameworkValue, Group, TensorRef, Value

_SMALL_BYTES_MAX = 4096
"""Largest tensor that is stored as a value, e.g. a learning rate."""

_OF_STATE = "optimizer.state."
_SCHEDULER = "lr_scheduler"

_STEP = "step"
"""torch's optimizers store it as a tensor for each parameter, FusedAdam as a number in the group, DeepSpeedCPUAdam as
a number for each parameter. It is listed as torch stores it."""

_FORMATS = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}
"""`struct` format of a step, by element type."""

_STEPS_MAX = 1 << 24
"""Integers below this limit are exact in float32."""


class Values:
    """Converts the values of files to the non-tensor state, and lists tensors inside them."""

    def __init__(self, files: Readable, parameters: Parameters) -> None:
        """Start without values.

        Args:
            files: The folder.
            parameters: The parameters, which receive tensors and remarks.
        """
        self._files, self._parameters = files, parameters
        self._tensors = parameters.tensors

    def tree(self, scaling: Mapping[str, object], optimizer: ZeroOptimizer | None) -> Group:
        """Return the non-tensor state.

        Args:
            scaling: Loss scaling and gradient clipping, by name.
            optimizer: The optimizer's state besides tensors; None without an optimizer.
        """
        first = self._parameters.states[0]
        if optimizer is not None:
            self._remark_other_steps(first, optimizer)
        extra = {
            name: self._value(value, f"model.{name}")
            for name, value in first.module.items()
            if not isinstance(value, StoredTensor)
        }
        items: dict[str, Value] = {"model": Group("module", extra)}
        if optimizer is not None and not optimizer.unread:
            items["optimizer"] = self._optimizer(optimizer)
        elif optimizer is not None:
            self._tensors.remark(f"the optimizer's state is left out, apart from master copies: {optimizer.unread}")
        for name, value in {**scaling, **first.rest}.items():
            if value is None and name == _SCHEDULER:
                continue  # No scheduler was saved. If a load asks for one, the load reports it as missing.
            if name in items:
                self._tensors.remark(f"{first.file}: {name} of client_state is left out: Holdfast uses the name")
                continue
            if isinstance(value, OpaqueObject) and isinstance(value.state, dict):
                value = value.state  # A loss scaler, whose attributes are its whole state.
            converted = self._value(value, name)
            is_scheduler = name == _SCHEDULER and isinstance(converted, dict)
            items[name] = Group("stateful", {"state": converted}) if is_scheduler else converted
        return Group("dict", items)

    def _remark_other_steps(self, first: ModelState, optimizer: ZeroOptimizer) -> None:
        """Add a remark if the optimizer counted other steps than the engine. Reads a few bytes.

        A job that is killed while it saves under an existing tag leaves states of two steps in one folder. A different
        count is no proof of that: it also follows from training with a new optimizer (`load_optimizer_states=False`).
        """
        engine = first.count("global_steps", -1) - first.count("skipped_steps", 0)
        counted = self._counted(optimizer)
        if counted is not None and engine >= 0 and counted != engine:
            self._tensors.remark(
                f"{first.file}: the engine counted {engine} steps (global_steps less skipped_steps), and the optimizer "
                f"counts {shown(counted)}. Unless training continued with a new optimizer, the files are of two saves "
                "under one tag. `verify` compares weights with master copies if both are stored"
            )

    def _counted(self, optimizer: ZeroOptimizer) -> object:
        """Return the step of the first parameter that has one; None if no parameter has."""
        for name, number in optimizer.groups.items():
            fqn = f"{_OF_STATE}{name}.{_STEP}"
            spec = self._tensors.specs.get(fqn)
            if spec is not None and spec.dtype in _FORMATS and spec.global_shape in ((), (1,)):
                piece, size = self._tensors.pieces[fqn][0], spec.global_bytes
                data = read_bytes(self._files, piece.file, piece.offset, piece.offset + size, size)
                return struct.unpack(_FORMATS[spec.dtype], data)[0]
            group = optimizer.param_groups[number] if optimizer.param_groups else {}
            step = optimizer.values.get(name, {}).get(_STEP, group.get(_STEP))
            if type(step) in (int, float):
                return step
        return None

    def _optimizer(self, state: ZeroOptimizer) -> Group:
        """Return the optimizer's group. Hyperparameters are stored by parameter; the order of groups has no effect."""
        if state.param_groups is None:
            self._tensors.remark(
                "no hyperparameters are stored, as in elastic checkpoints; a loaded optimizer keeps its own"
            )
        known = [
            {
                name: to_value(value, f"optimizer.param_groups.{number}.{name}", self._small, self._tensors.remarks)
                for name, value in group.items()
                if name != "params"
            }
            for number, group in enumerate(state.param_groups or [{}])
        ]
        aliases: dict[str, list[str]] = {}
        for alias, name in self._parameters.ties.items():
            aliases.setdefault(name, []).append(alias)
        hyperparameters, values = {}, {}
        for name, number in state.groups.items():
            if self._parameters.is_left_out(name):
                continue
            state_values = self._values_of(name, state, known[number])
            for fqn in (name, *aliases.get(name, ())):
                hyperparameters[fqn], values[fqn] = known[number], state_values
        for fqn in self._tensors.specs:
            if fqn.startswith(_OF_STATE):
                name, _, key = fqn.removeprefix(_OF_STATE).rpartition(".")
                for alias in aliases.get(name, ()):
                    self._tensors.aliases[f"{_OF_STATE}{alias}.{key}"] = fqn
        return optimizer_group(hyperparameters, values)

    def _values_of(self, name: str, state: ZeroOptimizer, group: Mapping[str, Value]) -> dict[str, Value]:
        """Return a parameter's state besides tensors, with the step that some optimizers store in the group."""
        path = f"{_OF_STATE}{name}"
        values = {
            key: to_value(value, f"{path}.{key}", self._small, self._tensors.remarks)
            for key, value in state.values.get(name, {}).items()
        }
        if _STEP not in values and f"{path}.{_STEP}" not in self._tensors.specs and _STEP in group:
            values[_STEP] = group[_STEP]
        step = values.get(_STEP)
        if isinstance(step, int | float) and 0 <= step < _STEPS_MAX:
            values[_STEP] = FrameworkValue(
                "torch.tensor", {"dtype": "float32", "shape": (), "data": struct.pack("<f", float(step))}
            )
        return values

    def _value(self, value: object, path: str) -> Value:
        return to_value(value, path, self._large, self._tensors.remarks)

    def _large(self, path: str, tensor: StoredTensor) -> Value:
        """List a tensor inside a value under its path."""
        self._tensors.add_whole(path, tensor)
        return TensorRef(path)

    def _small(self, path: str, tensor: StoredTensor) -> Value:
        """Read a small hyperparameter tensor as a value; list a larger one."""
        size = tensor.numel * tensor.itemsize
        if size > _SMALL_BYTES_MAX or not tensor.is_contiguous:
            return self._large(path, tensor)
        data = read_bytes(self._files, tensor.file, tensor.offset, tensor.offset + size, _SMALL_BYTES_MAX)
        return FrameworkValue("torch.tensor", {"dtype": tensor.dtype, "shape": tensor.shape, "data": data})
