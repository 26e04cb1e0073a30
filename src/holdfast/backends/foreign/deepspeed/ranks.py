"""Reads the files of all ranks and checks that they form one complete checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.backends.foreign.deepspeed.folder import Folder, Place
from holdfast.backends.foreign.deepspeed.saved import ModelState, ZeroState, read_model_state, read_zero_state
from holdfast.backends.foreign.messages import shown
from holdfast.backends.foreign.pickles.tensors import StoredTensor
from holdfast.backends.foreign.read import read_bytes
from holdfast.base.ports.readable import Readable
from holdfast.errors import InvalidError, MissingError

Models = Mapping[Place, ModelState]

_SEPARATE = "expected files of one checkpoint. Separate the files of the two"


def read_models(files: Readable, folder: Folder) -> Models:
    """Return all model states.

    Raises:
        InvalidError: The files belong to several checkpoints, or to a pipeline.
        MissingError: The file of a tensor-parallel rank is missing.
    """
    where = files.url
    models = {place: read_model_state(files, key) for place, key in sorted(folder.models.items())}
    first = models[0, 0]
    dims = first.rest.get("checkpoint_parallel_dimensions")
    if isinstance(dims, dict) and dims.get("pp_degree", 1) != 1:
        raise InvalidError(f"{where}: saved by a pipeline of {shown(dims.get('pp_degree'))} stages; expected 1")
    stated = first.count("mp_world_size", 1)
    if stated > folder.mp_degree:
        raise MissingError(
            f"{where}: files of model states of {folder.mp_degree} model-parallel ranks; {first.file} states {stated}. "
            "Copy the missing files"
        )
    for tp in range(folder.mp_degree):
        if (tp, 0) not in models:
            raise MissingError(f"{where}: no model states of model-parallel rank {tp} of {folder.mp_degree}. Copy them")
    for state in models.values():
        for name in ("ds_version", "global_steps"):
            if state.rest.get(name) != first.rest.get(name) or len(state.groups) != len(first.groups):
                raise InvalidError(
                    f"{where}: {state.file} states {name} {shown(state.rest.get(name))} and {len(state.groups)} "
                    f"buffers, {first.file} {shown(first.rest.get(name))} and {len(first.groups)}; {_SEPARATE}"
                )
    return models


def read_optimizers(files: Readable, folder: Folder, model: ModelState) -> list[list[ZeroState]]:
    """Return all optimizer states by tensor-parallel and data-parallel rank; empty if there are none.

    Raises:
        InvalidError: The files belong to several checkpoints.
        MissingError: The file of a rank is missing.
    """
    keys, where = folder.optimizers, files.url
    if not keys:
        return []
    if (0, 0) not in keys:
        raise MissingError(f"{where}: no optimizer states of rank 0, but of {len(keys)} other ranks. Copy all files")
    first = read_zero_state(files, keys[0, 0])
    if len(keys) != first.ranks * folder.mp_degree or max(keys) != (folder.mp_degree - 1, first.ranks - 1):
        _refuse_ranks(keys, folder.mp_degree, first, where)
    states = [[read_zero_state(files, keys[tp, dp]) for dp in range(first.ranks)] for tp in range(folder.mp_degree)]
    for state in (state for of_rank in states for state in of_rank):
        _require_one_checkpoint(first, state, where)
        _require_same_numbers(files, first, state, where)
    if len(first.shares) != len(model.groups) or first.version != model.version:
        raise InvalidError(
            f"{where}: {first.file} holds {len(first.shares)} buffers of version {first.version}, {model.file} states "
            f"{len(model.groups)} of version {model.version}; {_SEPARATE}"
        )
    return states


def _refuse_ranks(keys: Mapping[Place, str], tp_degree: int, first: ZeroState, where: str) -> None:
    for dp in range(first.ranks):
        for tp in range(tp_degree):
            if (tp, dp) not in keys:
                raise MissingError(
                    f"{where}: no optimizer states of data-parallel rank {dp}, model-parallel rank {tp}; "
                    f"{first.file} states {first.ranks} ranks. Copy the missing files"
                )
    tp, dp = next(place for place in sorted(keys) if place[0] >= tp_degree or place[1] >= first.ranks)
    raise InvalidError(
        f"{where}: {keys[tp, dp]} is of data-parallel rank {dp}, model-parallel rank {tp}; {first.file} states "
        f"{first.ranks} and there are {tp_degree}. The folder holds two checkpoints: remove the files of one"
    )


def _require_one_checkpoint(first: ZeroState, other: ZeroState, where: str) -> None:
    """Refuse files of two runs or of two steps, as far as their content differs.

    Raises:
        InvalidError: The message names both files and the difference.
    """
    for what, one, two in (
        ("ZeRO stage", first.stage, other.stage),
        ("version", first.version, other.version),
        ("ranks", first.ranks, other.ranks),
        ("buffers", len(first.shares), len(other.shares)),
        ("groups of the buffers", list(first.group_of), list(other.group_of)),
        ("hyperparameters", _comparable(first), _comparable(other)),
    ):
        if one != two:
            raise InvalidError(
                f"{where}: {first.file} and {other.file} differ in {what}: {shown(one)} and {shown(two)}; {_SEPARATE}"
            )


def _comparable(state: ZeroState) -> list[dict[str, str]]:
    """Return the plain hyperparameters as text, so that NaN equals NaN."""
    return [
        {name: shown(value) for name, value in group.items() if isinstance(value, int | float | str | tuple)}
        for group in state.param_groups or []
    ]


def _require_same_numbers(files: Readable, first: ZeroState, other: ZeroState, where: str) -> None:
    """Refuse a rank whose optimizer counted other steps. Reads a few bytes of each file.

    Raises:
        InvalidError: The message names both files and both steps. It shows a step in a tensor as hexadecimal bytes.
    """
    # Steps are single numbers, as tensors or plain. Moments differ between ranks and are not compared.
    for key, one in first.shares[0].state.items() if first.shares else ():
        two = other.shares[0].state.get(key)
        if isinstance(one, StoredTensor) and isinstance(two, StoredTensor) and not one.shape and not two.shape:
            one, two = (
                read_bytes(files, number.file, number.offset, number.offset + number.itemsize, 16).hex()
                for number in (one, two)
            )
        elif type(one) is not int:
            continue
        if one != two:
            raise InvalidError(
                f"{where}: {key} is {shown(one)} in {first.file} and {shown(two)} in {other.file}; {_SEPARATE}"
            )
