"""What a checkpoint holds besides tensors: hyperparameters by parameter, counters, schedulers, the caller's own."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from holdfast.foreign.deepspeed.layout import whole_layout
from holdfast.foreign.deepspeed.module import Parameters
from holdfast.foreign.deepspeed.optimizer import ZeroOptimizer
from holdfast.foreign.deepspeed.tensors import HeldTensor
from holdfast.foreign.layouts.pieces import runs_of
from holdfast.foreign.optimizers import optimizer_group
from holdfast.foreign.pickles.objects import OpaqueObject
from holdfast.foreign.pickles.tensors import StoredTensor
from holdfast.foreign.read import read_bytes
from holdfast.foreign.values import to_value
from holdfast.ports.store import Readable
from holdfast.types.values import FrameworkValue, Group, TensorRef, Value

_SMALL_BYTES_MAX = 4096
"""Of a tensor that is kept as a value: a learning rate."""

_OF_STATE = "optimizer.state."
_SCHEDULER = "lr_scheduler"

_STEP = "step"
"""Kept by torch's optimizers as a tensor for each parameter; by FusedAdam as a number in the group, by
DeepSpeedCPUAdam as a number for each. Given as torch has it."""

_STEPS_MAX = 1 << 24
"""Above which float32 does not tell every whole number from the next."""


class Values:
    """Turns what files hold into the non-tensor state; tensors among it are listed too."""

    def __init__(self, files: Readable, parameters: Parameters) -> None:
        """Remember where what is found goes."""
        self._files, self._parameters = files, parameters
        self._tensors = parameters.tensors

    def tree(
        self,
        extra_state: Mapping[str, object],
        scaling: Mapping[str, object],
        optimizer: ZeroOptimizer | None,
        groups: Sequence[Mapping[str, object]] | None,
    ) -> Group:
        """Return the non-tensor state.

        Args:
            extra_state: What the module's state dict holds besides tensors.
            scaling: Loss scaling and clipping, by name.
            optimizer: What is known of the optimizer; None where there is none.
            groups: Hyperparameters by parameter group; None where nothing tells.
        """
        extra = {name: self._value(value, f"model.{name}") for name, value in extra_state.items()}
        items: dict[str, Value] = {"model": Group("module", extra)}
        if optimizer is not None and not optimizer.unread:
            items["optimizer"] = self._optimizer(optimizer, groups)
        elif optimizer is not None:
            self._tensors.remark(f"the optimizer's state is left out, but for master copies: {optimizer.unread}")
        for name, value in {**scaling, **self._parameters.states[0].rest}.items():
            if value is None and name == _SCHEDULER:
                continue  # There was none; a scheduler that asks for its state lacks it by name.
            if name in items:
                self._tensors.remark(
                    f"{self._parameters.states[0].file}: {name} of client_state is left out: the name stands for the "
                    f"{name} itself"
                )
                continue
            if isinstance(value, OpaqueObject) and isinstance(value.state, dict):
                value = value.state  # A loss scaler: its numbers are all there is to it.
            kept = self._value(value, name)
            items[name] = Group("stateful", {"state": kept}) if name == _SCHEDULER and isinstance(kept, dict) else kept
        return Group("dict", items)

    def _optimizer(self, state: ZeroOptimizer, groups: Sequence[Mapping[str, object]] | None) -> Group:
        """Return the optimizer's part; hyperparameters go by parameter, whatever the order of groups."""
        if groups is None:
            self._tensors.remark(
                "there are no hyperparameters, as in all elastic checkpoints; an optimizer that is loaded keeps its own"
            )
        known = [
            {
                name: to_value(value, f"optimizer.param_groups.{number}.{name}", self._small, self._tensors.remarks)
                for name, value in group.items()
                if name != "params"
            }
            for number, group in enumerate(groups or [])
        ]
        nothing: dict[str, Value] = {}
        hyperparameters = {}
        values = {}
        aliases: dict[str, list[str]] = {}
        for alias, kept in self._parameters.ties.items():
            aliases.setdefault(kept, []).append(alias)
        for name, number in state.groups.items():
            if self._parameters.is_left_out(name):
                continue
            own = self._values_of(name, state, known[number] if groups is not None else nothing)
            for each in (name, *aliases.get(name, ())):
                hyperparameters[each] = known[number] if groups is not None else nothing
                values[each] = own
        self._tie_state({name: found for name, found in aliases.items() if name in values})
        return optimizer_group(hyperparameters, values)

    def _values_of(self, name: str, state: ZeroOptimizer, group: Mapping[str, Value]) -> dict[str, Value]:
        """Return what a parameter's state holds besides tensors, and the step that some keep in the group."""
        path = f"{_OF_STATE}{name}"
        found = {
            key: to_value(value, f"{path}.{key}", self._small, self._tensors.remarks)
            for key, value in state.values.get(name, {}).items()
        }
        if _STEP not in found and f"{path}.{_STEP}" not in self._tensors.specs and _STEP in group:
            found[_STEP] = group[_STEP]
        step = found.get(_STEP)
        if isinstance(step, int | float) and 0 <= step < _STEPS_MAX:
            found[_STEP] = FrameworkValue(
                "torch.tensor", {"dtype": "float32", "shape": (), "data": struct.pack("<f", float(step))}
            )
        return found

    def _tie_state(self, aliases: Mapping[str, Sequence[str]]) -> None:
        """Give a trained parameter's optimizer state under its tied names too."""
        for fqn in [fqn for fqn in self._tensors.specs if fqn.startswith(_OF_STATE)]:
            name, _, key = fqn.removeprefix(_OF_STATE).rpartition(".")
            for alias in aliases.get(name, ()):
                self._tensors.aliases[f"{_OF_STATE}{alias}.{key}"] = fqn

    def _value(self, value: object, path: str) -> Value:
        return to_value(value, path, self._large, self._tensors.remarks)

    def _large(self, path: str, tensor: StoredTensor) -> Value:
        """List a tensor among the values under the path where it stands."""
        held = [HeldTensor(tensor.dtype, tensor.shape, runs_of(tensor, path))]
        self._tensors.add(path, whole_layout([tensor.shape]), held)
        return TensorRef(path)

    def _small(self, path: str, tensor: StoredTensor) -> Value:
        """Read a hyperparameter that is a tensor, as a value; larger ones are listed."""
        size = tensor.numel * tensor.itemsize
        if size > _SMALL_BYTES_MAX or not tensor.is_contiguous:
            return self._large(path, tensor)
        data = read_bytes(self._files, tensor.file, tensor.offset, tensor.offset + size, _SMALL_BYTES_MAX)
        return FrameworkValue("torch.tensor", {"dtype": tensor.dtype, "shape": tensor.shape, "data": data})
