"""The files of all ranks, held against each other: one checkpoint, whole."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.errors import InvalidError, MissingError
from holdfast.foreign.deepspeed.folder import Folder, Place
from holdfast.foreign.deepspeed.saved import ModelState, ZeroState, read_model_state, read_zero_state
from holdfast.foreign.pickles.tensors import StoredTensor
from holdfast.foreign.read import read_bytes
from holdfast.foreign.wording import shown
from holdfast.ports.store import Readable

Models = Mapping[Place, ModelState]

_APART = "expected files of one checkpoint. Take them apart"


def read_models(files: Readable, folder: Folder) -> Models:
    """Return every file of model states.

    Raises:
        InvalidError: They are of several checkpoints, or of a pipeline.
        MissingError: That of a tensor-parallel rank is not there.
    """
    where = files.url
    models = {place: read_model_state(files, key) for place, key in sorted(folder.models.items())}
    first = models[0, 0]
    dims = first.rest.get("checkpoint_parallel_dimensions")
    if isinstance(dims, dict) and dims.get("pp_degree", 1) != 1:
        raise InvalidError(f"{where}: saved by a pipeline of {shown(dims.get('pp_degree'))} stages, which is not read")
    stated = first.count("mp_world_size", 1)
    if stated > folder.mp_degree:
        raise MissingError(
            f"{where}: files of model states of {folder.mp_degree} model-parallel ranks; {first.file} states {stated}. "
            "Copy the rest"
        )
    for tp in range(folder.mp_degree):
        if (tp, 0) not in models:
            raise MissingError(f"{where}: no model states of model-parallel rank {tp} of {folder.mp_degree}; copy them")
    for state in models.values():
        for name in ("ds_version", "global_steps"):
            if state.rest.get(name) != first.rest.get(name) or len(state.groups) != len(first.groups):
                raise InvalidError(
                    f"{where}: {state.file} states {name} {shown(state.rest.get(name))} and {len(state.groups)} "
                    f"buffers, {first.file} {shown(first.rest.get(name))} and {len(first.groups)}; {_APART}"
                )
    return models


def read_optimizers(files: Readable, folder: Folder, model: ModelState) -> list[list[ZeroState]]:
    """Return every rank's optimizer states, by tensor-parallel and data-parallel rank; nothing where there are none.

    Raises:
        InvalidError: They are of several checkpoints.
        MissingError: That of a rank is not there.
    """
    keys, where = folder.optimizers, files.url
    if not keys:
        return []
    if (0, 0) not in keys:
        raise MissingError(
            f"{where}: no optimizer states of rank 0; found those of {len(keys)} others. Copy all of them"
        )
    first = read_zero_state(files, keys[0, 0])
    if len(keys) != first.ranks * folder.mp_degree or max(keys) != (folder.mp_degree - 1, first.ranks - 1):
        _refuse_ranks(keys, folder.mp_degree, first, where)
    found = [[read_zero_state(files, keys[tp, dp]) for dp in range(first.ranks)] for tp in range(folder.mp_degree)]
    for each in (state for of_rank in found for state in of_rank):
        _require_one_checkpoint(first, each, where)
        _require_same_numbers(files, first, each, where)
    if len(first.shares) != len(model.groups) or first.version != model.version:
        raise InvalidError(
            f"{where}: {first.file} holds {len(first.shares)} buffers of version {first.version}, {model.file} tells "
            f"of {len(model.groups)} of version {model.version}; {_APART}"
        )
    return found


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
        f"{first.ranks} and there are {tp_degree}. Two checkpoints lie in one folder: remove the files of the other"
    )


def _require_one_checkpoint(first: ZeroState, other: ZeroState, where: str) -> None:
    """Refuse files of two runs or of two steps, as far as they tell.

    Raises:
        InvalidError: Names both, and what differs.
    """
    for what, one, two in (
        ("ZeRO stage", first.stage, other.stage),
        ("version", first.version, other.version),
        ("ranks", first.ranks, other.ranks),
        ("buffers", len(first.shares), len(other.shares)),
        ("groups of the buffers", list(first.group_of), list(other.group_of)),
        ("hyperparameters", _plain_ones(first), _plain_ones(other)),
    ):
        if one != two:
            raise InvalidError(
                f"{where}: {first.file} and {other.file} differ in {what}: {shown(one)} and {shown(two)}; {_APART}"
            )


def _plain_ones(state: ZeroState) -> list[dict[str, str]]:
    """Return what can be compared of hyperparameters: floats that are not numbers, too."""
    return [
        {name: shown(value) for name, value in group.items() if isinstance(value, int | float | str | tuple)}
        for group in state.param_groups or []
    ]


def _require_same_numbers(files: Readable, first: ZeroState, other: ZeroState, where: str) -> None:
    """Refuse a rank whose optimizer counts other steps; reads a few bytes of each file.

    Raises:
        InvalidError: Names both files.
    """
    for key, one in first.shares[0].state.items() if first.shares else ():
        two = other.shares[0].state.get(key)
        if not isinstance(one, StoredTensor) or not isinstance(two, StoredTensor) or one.shape or two.shape:
            if type(one) is int and one != two:
                raise _other_step(first, other, key, shown(one), shown(two), where)
            continue
        own, others = (
            read_bytes(files, each.file, each.offset, each.offset + each.itemsize, 16) for each in (one, two)
        )
        if own != others:
            raise _other_step(first, other, key, f"bytes {own.hex()}", f"bytes {others.hex()}", where)


def _other_step(first: ZeroState, other: ZeroState, key: str, one: str, two: str, where: str) -> InvalidError:
    return InvalidError(f"{where}: {key} is {one} in {first.file} and {two} in {other.file}; {_APART}")
