"""A universal folder, as DeepSpeed's ds_to_universal writes it: each state of each parameter whole, in its own file.

Weights, buffers and frozen parameters come from the files of model states beside them, in their own element types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from holdfast.errors import CorruptError, MissingError
from holdfast.foreign.deepspeed.folder import OPTIMIZER_OF_ATOMS, Folder
from holdfast.foreign.deepspeed.layout import TensorParallelLayout, whole_layout
from holdfast.foreign.deepspeed.listing import ListedValues, finished, parameters_of
from holdfast.foreign.deepspeed.module import Parameters, list_module
from holdfast.foreign.deepspeed.optimizer import MASTER, ZeroOptimizer
from holdfast.foreign.deepspeed.ranks import read_models
from holdfast.foreign.deepspeed.saved import (
    ModelState,
    ZeroState,
    group_of,
    param_groups_of,
    ranks_of,
    scaling_of,
    stage_of,
)
from holdfast.foreign.deepspeed.tensors import HeldTensor
from holdfast.foreign.layouts.pieces import runs_of
from holdfast.foreign.pickles.tensors import StoredTensor
from holdfast.foreign.torch.archive_reader import read_torch_file
from holdfast.foreign.wording import shown
from holdfast.ports.store import Readable
from holdfast.types.listing import ForeignListing

_MASTER_ATOM = "fp32"
_KEYS = {_MASTER_ATOM: MASTER}


def list_universal(files: Readable, folder: Folder) -> ForeignListing:
    """Return what a universal folder holds, of either dialect of atoms.

    Raises:
        CorruptError: A file is damaged, or does not fit the others.
        InvalidError: It holds what is not read.
        MissingError: A file is not there.
    """
    models = read_models(files, folder)
    saved = _Optimizer(files, folder.prefix + OPTIMIZER_OF_ATOMS, folder.sizes, models[0, 0])
    parameters = parameters_of(files, folder, models, saved.zero, has_atoms=True)
    extra_state = list_module(parameters, weights=saved.zero.stage != 3)
    state = _list_atoms(files, folder, parameters, saved)
    _remark_round_robin(parameters)
    return finished(files, folder, models, parameters, ListedValues(saved.zero, state, extra_state, "universal of "))


class _Optimizer:
    """What `optimizer_state.pt` holds: hyperparameters, and with ZeRO-3 the counters that have no atoms."""

    def __init__(self, files: Readable, key: str, sizes: Mapping[str, int], model: ModelState) -> None:
        where = f"{files.url}/{key}"
        if key not in sizes:
            raise MissingError(
                f"{where}: is not there, and zero/ beside it holds states of parameters; expected the file with their "
                "hyperparameters. Copy it, or convert again with ds_to_universal"
            )
        saved = read_torch_file(files, key).value
        if not isinstance(saved, dict):
            raise CorruptError(f"{where}: holds {shown(saved)}; expected a dict, as ds_to_universal writes")
        stage = stage_of(saved.get("zero_stage"), where)
        groups = param_groups_of(saved, where)
        inner = saved.get("optimizer_state_dict")
        states = inner.get("state") if isinstance(inner, dict) else None
        self._states = states if isinstance(states, dict) else {}
        self.zero = ZeroState(
            file=key,
            stage=stage,
            ranks=ranks_of(saved.get("partition_count"), where),
            shares=(),
            param_groups=groups,
            group_of=group_of(groups, len(model.groups), where),
            info={},
            rest=scaling_of(saved),
            version=model.version,
        )

    def traits_of(self, buffer: int) -> frozenset[str]:
        """Return the names of a buffer's hyperparameters: where they differ, so may what the optimizer keeps (Muon)."""
        groups = self.zero.param_groups
        return frozenset(groups[self.zero.group_of[buffer]] if groups else ())

    def numbers(self, buffer: int) -> dict[str, StoredTensor | int | float]:
        """Return the single numbers that the state of a flat buffer holds, by key."""
        state = self._states.get(buffer)
        found = state.items() if isinstance(state, dict) else ()
        return {
            key: value
            for key, value in found
            if isinstance(key, str) and (isinstance(value, int | float) or _is_number(value))
        }


def _list_atoms(files: Readable, folder: Folder, parameters: Parameters, saved: _Optimizer) -> ZeroOptimizer:
    """List the atoms of every trained parameter; those of buffers, frozen and tied ones are copies, made float32."""
    found = ZeroOptimizer()
    trained = parameters.trained
    for name, keys in folder.atoms.items():
        if name not in trained and set(keys) != {_MASTER_ATOM}:
            raise CorruptError(
                f"{files.url}/{folder.prefix}zero/{name}: holds {', '.join(keys)[:200]}, and param_shapes of "
                f"{parameters.states[0].file} does not name it; expected parameters that ZeRO trained"
            )
    _require_same_atoms(files, folder, parameters, saved)
    for number, shapes in enumerate(parameters.states[0].groups):
        flat = parameters.flat_shapes(number)
        for name in shapes:
            layout = parameters.layout(name, [each[name] for each in flat])
            found.groups[name] = saved.zero.group_of[number]
            for key in folder.atoms.get(name, ()):
                file = f"{folder.prefix}zero/{name}/{key}.pt"
                _list_atom(files, file, parameters, f"optimizer.state.{name}.{_KEYS.get(key, key)}", layout)
            for key, value in saved.numbers(number).items():
                if key in folder.atoms.get(name, ()):
                    continue
                if isinstance(value, StoredTensor):
                    parameters.tensors.add_copied(f"optimizer.state.{name}.{key}", [value])
                else:
                    found.values.setdefault(name, {})[key] = value
    return found


def _require_same_atoms(files: Readable, folder: Folder, parameters: Parameters, saved: _Optimizer) -> None:
    """Refuse a folder in which a parameter lacks a state that others have.

    Raises:
        MissingError: Names the file.
    """
    alike: dict[frozenset[str], list[str]] = {}
    for number, shapes in enumerate(parameters.states[0].groups):
        alike.setdefault(saved.traits_of(number), []).extend(shapes)
    for names in alike.values():
        expected = {_MASTER_ATOM}.union(*(folder.atoms.get(name, ()) for name in names))
        for name in names:
            lacking = sorted(expected.difference(folder.atoms.get(name, ())))
            if lacking:
                raise MissingError(
                    f"{files.url}/{folder.prefix}zero/{name}/{lacking[0]}.pt: is not there; expected "
                    f"{', '.join(sorted(expected))} of {name}, as of every parameter. Copy it, or convert again"
                )


def _list_atom(
    files: Readable, file: str, parameters: Parameters, fqn: str, layout: TensorParallelLayout | None
) -> None:
    """List one atom: a dict with the whole tensor as `param`, a flat tensor, or a single number."""
    where = f"{files.url}/{file}"
    value = read_torch_file(files, file).value
    if isinstance(value, dict):
        value = value.get("param")
    if not isinstance(value, StoredTensor):
        raise CorruptError(f"{where}: holds {shown(value)}; expected a tensor, or a dict with param")
    shape = value.shape
    if layout is not None and not _is_number(value):
        shape = layout.global_shape
        if value.shape not in (shape, (math.prod(shape),)):
            raise CorruptError(
                f"{where}: shape {list(value.shape)}; expected {list(shape)}, as param_shapes have it. Is it "
                "another model's?"
            )
    parameters.tensors.add(fqn, whole_layout([shape]), [HeldTensor(value.dtype, shape, runs_of(value, where))])


def _remark_round_robin(parameters: Parameters) -> None:
    """Warn of a defect of ds_to_universal, at least up to 0.19.8: it takes parameters by `param_slice_mappings`."""
    first = parameters.states[0]
    config = first.rest.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if isinstance(zero, dict) and zero.get("round_robin_gradients") is True and zero.get("stage") in (1, 2):
        parameters.tensors.remark(
            f"{parameters.tensors.where}/{first.file}: trained with round_robin_gradients, of which ds_to_universal "
            "mixes up parameters; read the checkpoint that was converted, or verify that master copies cast to weights"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, StoredTensor) and not value.shape
