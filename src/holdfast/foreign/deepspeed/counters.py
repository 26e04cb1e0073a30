"""Compares the steps that the optimizer counted with those of the engine."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from holdfast.foreign.deepspeed.module import Parameters
from holdfast.foreign.deepspeed.optimizer import ZeroOptimizer
from holdfast.foreign.read import read_bytes
from holdfast.foreign.wording import shown
from holdfast.ports.store import Readable

_STEP = "step"
_LAYOUTS = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}


def remark_other_steps(
    files: Readable,
    parameters: Parameters,
    state: ZeroOptimizer,
    groups: Sequence[Mapping[str, object]] | None,
) -> None:
    """Add a remark if the optimizer counted other steps than the engine. Reads a few bytes.

    A job that is killed while it saves under an existing tag leaves states of two steps in one folder. A different
    count is no proof of that: it also follows from training with a new optimizer (`load_optimizer_states=False`).
    """
    first = parameters.states[0]
    engine = first.count("global_steps", -1) - first.count("skipped_steps", 0)
    counted = _counted(files, parameters, state, groups)
    if counted is None or engine < 0 or counted == engine:
        return
    parameters.tensors.remark(
        f"{parameters.tensors.where}/{first.file}: the engine counted {engine} steps (global_steps less "
        f"skipped_steps), and the optimizer counts {shown(counted)}. Unless training continued with a new optimizer, "
        "the files are of two saves under one tag. `verify` compares weights with master copies if both are stored"
    )


def _counted(
    files: Readable,
    parameters: Parameters,
    state: ZeroOptimizer,
    groups: Sequence[Mapping[str, object]] | None,
) -> int | float | None:
    """Return the step of the first parameter that has one; None if no parameter has."""
    tensors = parameters.tensors
    for name, number in state.groups.items():
        fqn = f"optimizer.state.{name}.{_STEP}"
        spec = tensors.specs.get(fqn)
        if spec is not None and spec.dtype in _LAYOUTS and spec.global_shape in ((), (1,)):
            piece, layout = tensors.pieces[fqn][0], _LAYOUTS[spec.dtype]
            size = struct.calcsize(layout)
            (step,) = struct.unpack(layout, read_bytes(files, piece.file, piece.offset, piece.offset + size, size))
            return step if isinstance(step, int | float) else None
        value = state.values.get(name, {}).get(_STEP, groups[number].get(_STEP) if groups else None)
        if type(value) in (int, float):
            assert isinstance(value, int | float)
            return value
    return None
