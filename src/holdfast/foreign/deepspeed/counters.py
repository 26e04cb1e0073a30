"""The steps that an optimizer has counted, held against those of the engine."""

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
    """Say where the optimizer has counted other steps than the engine; reads a few bytes.

    Where a job was killed while it saved under a tag that was there already, states of two steps lie side by side. That
    is no error: the counts differ as well where training went on with a new optimizer (`load_optimizer_states=False`).
    """
    first = parameters.states[0]
    engine = first.count("global_steps", -1) - first.count("skipped_steps", 0)
    counted = _counted(files, parameters, state, groups)
    if counted is None or engine < 0 or counted == engine:
        return
    parameters.tensors.remark(
        f"{parameters.tensors.where}/{first.file}: the engine has made {engine} steps (global_steps less "
        f"skipped_steps), and the optimizer counts {shown(counted)}. Unless training went on with a new optimizer, "
        "their files are of two saves under one tag; verify compares weights with master copies where both are kept"
    )


def _counted(
    files: Readable,
    parameters: Parameters,
    state: ZeroOptimizer,
    groups: Sequence[Mapping[str, object]] | None,
) -> int | float | None:
    """Return the steps of the first parameter that tells, None where none does."""
    tensors = parameters.tensors
    for name, number in state.groups.items():
        fqn = f"optimizer.state.{name}.{_STEP}"
        spec = tensors.specs.get(fqn)
        if spec is not None and spec.dtype in _LAYOUTS and spec.global_shape in ((), (1,)):
            piece, layout = tensors.pieces[fqn][0], _LAYOUTS[spec.dtype]
            size = struct.calcsize(layout)
            (found,) = struct.unpack(layout, read_bytes(files, piece.file, piece.offset, piece.offset + size, size))
            return found if isinstance(found, int | float) else None
        value = state.values.get(name, {}).get(_STEP, groups[number].get(_STEP) if groups else None)
        if type(value) in (int, float):
            assert isinstance(value, int | float)
            return value
    return None
