"""Lists universal folders of DeepSpeed's ds_to_universal: one file for each state of each parameter, whole (an "atom").

Weights, buffers and frozen parameters come from the files of model states beside them, in their own element types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from holdfast.backends.foreign.deepspeed.folder import OPTIMIZER_OF_ATOMS, Folder
from holdfast.backends.foreign.deepspeed.layout import TensorParallelLayout
from holdfast.backends.foreign.deepspeed.listing import finish_listing, parameters_of
from holdfast.backends.foreign.deepspeed.module import Parameters, list_module
from holdfast.backends.foreign.deepspeed.optimizer import MASTER, ZeroOptimizer
from holdfast.backends.foreign.deepspeed.ranks import read_models
from holdfast.backends.foreign.deepspeed.saved import (
    ModelState,
    ZeroState,
    group_of,
    param_groups_of,
    ranks_of,
    scaling_of,
    stage_of,
)
from holdfast.backends.foreign.messages import shown
from holdfast.backends.foreign.pickles.tensors import StoredTensor
from holdfast.backends.foreign.torch.archive_reader import read_torch_file
from holdfast.backends.foreign.typed_values import typed
from holdfast.base.ports.readable import Readable
from holdfast.base.types.listing import ForeignListing
from holdfast.errors import CorruptError, MissingError, first_three

_MASTER_ATOM = "fp32"
_KEYS = {_MASTER_ATOM: MASTER}


def list_universal(files: Readable, folder: Folder) -> ForeignListing:
    """Return the content of a universal folder, with atoms of either version.

    Raises:
        CorruptError: A file is damaged, or contradicts the others.
        InvalidError: A layout is not supported.
        MissingError: A file is missing.
    """
    models = read_models(files, folder)
    zero, states = _read_optimizer(files, folder, models[0, 0])
    parameters = parameters_of(files, folder, models, zero, has_atoms=True)
    list_module(parameters, weights=zero.stage != 3)
    _require_same_atoms(files, folder, parameters, zero)
    state = _list_atoms(files, folder, parameters, zero, states)
    _remark_round_robin(parameters)
    return finish_listing(files, folder, parameters, zero, state, "universal of ")


def _read_optimizer(files: Readable, folder: Folder, model: ModelState) -> tuple[ZeroState, Mapping[object, object]]:
    """Return the content of `optimizer_state.pt`: hyperparameters, and with ZeRO-3 state by flat buffer.

    That state holds the counters, which have no atoms.
    """
    key = folder.prefix + OPTIMIZER_OF_ATOMS
    where = f"{files.url}/{key}"
    if key not in folder.sizes:
        raise MissingError(
            f"{where}: is missing, and zero/ beside it holds states of parameters; expected the file with their "
            "hyperparameters. Copy it, or convert again with ds_to_universal"
        )
    saved = typed(read_torch_file(files, key), dict[str, object], where)
    inner = saved.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, dict) else None
    groups = param_groups_of(saved, where)
    zero = ZeroState(
        file=key,
        stage=stage_of(saved.get("zero_stage"), where),
        ranks=ranks_of(saved.get("partition_count"), where),
        shares=(),
        param_groups=groups,
        group_of=group_of(groups, len(model.groups), where),
        rest=scaling_of(saved),
        version=model.version,
        info={},
    )
    return zero, states if isinstance(states, dict) else {}


def _require_same_atoms(files: Readable, folder: Folder, parameters: Parameters, zero: ZeroState) -> None:
    """Refuse a folder in which a parameter lacks a state that others of its kind have.

    Raises:
        CorruptError: A folder holds state of a tensor that ZeRO did not train.
        MissingError: The message names the file.
    """
    for name, keys in folder.atoms.items():
        if name not in parameters.trained and set(keys) != {_MASTER_ATOM}:
            raise CorruptError(
                f"{files.url}/{folder.prefix}zero/{name}: holds {first_three(keys)}, and param_shapes of "
                f"{parameters.states[0].file} does not name it; expected parameters that ZeRO trained"
            )
    # Parameters with other names of hyperparameters may have other state, as with Muon.
    by_traits: dict[frozenset[str], list[str]] = {}
    for shapes, group in zip(parameters.states[0].groups, zero.group_of, strict=True):
        traits = frozenset(zero.param_groups[group] if zero.param_groups else ())
        by_traits.setdefault(traits, []).extend(shapes)
    for names in by_traits.values():
        expected = {_MASTER_ATOM}.union(*(folder.atoms.get(name, ()) for name in names))
        for name in names:
            missing = sorted(expected.difference(folder.atoms.get(name, ())))
            if missing:
                raise MissingError(
                    f"{files.url}/{folder.prefix}zero/{name}/{missing[0]}.pt: is missing; expected "
                    f"{first_three(sorted(expected))} of {name}, like of every parameter. Copy it, or convert again"
                )


def _list_atoms(
    files: Readable, folder: Folder, parameters: Parameters, zero: ZeroState, states: Mapping[object, object]
) -> ZeroOptimizer:
    """List the atoms of every trained parameter. Atoms of other tensors are float32 copies and are not listed."""
    optimizer = ZeroOptimizer(zero.param_groups)
    for number, by_rank in enumerate(parameters.flat_shapes):
        state = states.get(number)
        counters = state if isinstance(state, dict) else {}
        for name in by_rank[0]:
            layout = parameters.layout(name, [shapes[name] for shapes in by_rank])
            optimizer.groups[name] = zero.group_of[number]
            atoms = folder.atoms.get(name, ())
            for key in atoms:
                file = f"{folder.prefix}zero/{name}/{key}.pt"
                _list_atom(files, file, parameters, f"optimizer.state.{name}.{_KEYS.get(key, key)}", layout)
            for key, value in counters.items():
                if not isinstance(key, str) or key in atoms:
                    continue
                if isinstance(value, StoredTensor) and not value.shape:
                    parameters.tensors.add_whole(f"optimizer.state.{name}.{key}", value)
                elif isinstance(value, int | float):
                    optimizer.values.setdefault(name, {})[key] = value
    return optimizer


def _list_atom(
    files: Readable, file: str, parameters: Parameters, fqn: str, layout: TensorParallelLayout | None
) -> None:
    """List one atom: a dict with the whole tensor as `param`, a flat tensor, or a single number."""
    where = f"{files.url}/{file}"
    value = read_torch_file(files, file)
    if isinstance(value, dict):
        value = value.get("param")
    if not isinstance(value, StoredTensor):
        raise CorruptError(f"{where}: holds {shown(value)}; expected a tensor, or a dict with param. Read another copy")
    shape = None
    if layout is not None and value.shape:
        shape = layout.global_shape
        if value.shape not in (shape, (math.prod(shape),)):
            raise CorruptError(
                f"{where}: shape {list(value.shape)}; expected {list(shape)} as in param_shapes. Is it "
                "a file of another model?"
            )
    parameters.tensors.add_whole(fqn, value, shape)


def _remark_round_robin(parameters: Parameters) -> None:
    """Warn of a defect of ds_to_universal, at least up to 0.19.8: it locates parameters by `param_slice_mappings`."""
    first = parameters.states[0]
    config = first.rest.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if isinstance(zero, dict) and zero.get("round_robin_gradients") is True and zero.get("stage") in (1, 2):
        parameters.tensors.remark(
            f"{first.file}: trained with round_robin_gradients, for which ds_to_universal "
            "mixes up parameters. Read the original checkpoint, or verify that master copies cast to weights"
        )
