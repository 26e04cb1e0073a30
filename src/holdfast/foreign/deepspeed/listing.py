"""Lists a tag folder of ZeRO-1, 2, 3 or BF16_Optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.errors import CorruptError, MissingError, first_three
from holdfast.foreign.deepspeed.counters import remark_other_steps
from holdfast.foreign.deepspeed.folder import Folder
from holdfast.foreign.deepspeed.layout import Layouts
from holdfast.foreign.deepspeed.module import Parameters, list_copies, list_frozen, list_module, list_ties
from holdfast.foreign.deepspeed.optimizer import MASTER, ZeroOptimizer, list_buffers
from holdfast.foreign.deepspeed.ranks import Models, read_models, read_optimizers
from holdfast.foreign.deepspeed.saved import ZeroState
from holdfast.foreign.deepspeed.tensors import Tensors
from holdfast.foreign.deepspeed.tree import Values
from holdfast.foreign.pickles.tensors import StoredTensor
from holdfast.ports.store import Readable
from holdfast.types.listing import ForeignListing


def list_zero(files: Readable, folder: Folder) -> ForeignListing:
    """Return the content of a tag folder of any of ZeRO's optimizers.

    Raises:
        CorruptError: A file is damaged, or contradicts the others.
        InvalidError: A layout is not supported, or the folder holds files of two checkpoints.
        MissingError: The file of a rank is missing.
    """
    models = read_models(files, folder)
    if folder.is_cut and not folder.optimizers:
        raise MissingError(
            f"{files.url}/{folder.prefix}zero_pp_rank_0_mp_rank_00_optim_states.pt: is missing, like those of other "
            f"ranks; {folder.models[0, 0]} is of ZeRO-3, which stores parameters only there. Copy all of them"
        )
    optimizers = read_optimizers(files, folder, models[0, 0])
    zero = optimizers[0][0] if optimizers else None
    parameters = parameters_of(files, folder, models, zero)
    extra_state = list_module(parameters, weights=zero is None or zero.stage != 3)
    list_copies(parameters, models)
    state = list_buffers(parameters, optimizers) if optimizers else None
    return finish_listing(files, folder, models, parameters, ListedValues(zero, state, extra_state))


@dataclass(frozen=True, slots=True)
class ListedValues:
    """The values of a checkpoint besides tensors."""

    zero: ZeroState | None
    """Rank 0's optimizer states; None without ZeRO."""

    state: ZeroOptimizer | None
    """Optimizer state besides tensors; None if there is none."""

    extra_state: Mapping[str, object]
    """Entries of the module's state dict that are not tensors."""

    prefix: str = ""
    """Prefix of the optimizer's name in the name of the format."""


def parameters_of(
    files: Readable, folder: Folder, models: Models, zero: ZeroState | None, *, has_atoms: bool = False
) -> Parameters:
    """Return the parameters. The caller's `universal_checkpoint_info` describes their layout, or else AutoTP's."""
    states = [models[tp, 0] for tp in range(folder.mp_degree)]
    info, file = states[0].info, states[0].file
    if not info and zero is not None:
        info, file = zero.info, zero.file
    layouts = Layouts(info, f"{files.url}/{file}", folder.mp_degree)
    return Parameters(states, layouts, Tensors(files.url), has_atoms=has_atoms)


def finish_listing(
    files: Readable, folder: Folder, models: Models, parameters: Parameters, values: ListedValues
) -> ForeignListing:
    """Add the tensors that depend on module and optimizer, check that none is missing, and return the listing.

    Raises:
        CorruptError: A parameter has no bytes.
    """
    tensors, first, zero = parameters.tensors, parameters.states[0], values.zero
    # Weights before ties: a tied name is listed only if its stored name is.
    _list_masters_as_weights(parameters)
    if zero is not None and zero.stage == 3:
        list_frozen(parameters, models, zero.ranks)
    _require_complete(parameters)
    list_ties(parameters)
    if values.state is None and parameters.trained:
        tensors.remark(
            f"{tensors.where}/{first.file}: ZeRO trained {len(parameters.trained)} parameters, and files of optimizer "
            "states are missing: only weights are listed. To load an optimizer, copy *_optim_states.pt of every rank"
        )
    elif values.state is None and first.has_optimizer:
        tensors.remark(
            f"{tensors.where}/{first.file}: the optimizer's state is left out: without ZeRO it is numbered, and no "
            "file states the parameter of each number"
        )
    elif first.has_optimizer:
        tensors.remark(f"{tensors.where}/{first.file}: optimizer is left out: separate files hold its states")
    groups = zero.param_groups if zero is not None else None
    if values.state is not None:
        remark_other_steps(files, parameters, values.state, groups)
    tree = Values(files, parameters).tree(values.extra_state, zero.rest if zero else {}, values.state, groups)
    _remark_unlisted(parameters)
    step = first.count("global_steps", -1)
    ranks = zero.ranks if zero is not None else max(first.count("dp_world_size", 1), 1)
    without_zero = "weights of ZeRO" if parameters.trained else "no ZeRO"
    kind = without_zero if zero is None else f"ZeRO-{zero.stage}" if zero.stage else "BF16_Optimizer"
    return ForeignListing(
        format=f"deepspeed {first.version}, {values.prefix}{kind}",
        tensors=tensors.specs,
        pieces=tensors.pieces,
        files=tensors.sizes(folder.sizes),
        tree=tree,
        aliases=tensors.aliases,
        replicas=tensors.replicas,
        casts=_casts(parameters),
        step=step if step >= 0 else None,
        world_size=ranks * folder.mp_degree,
        remarks=tensors.remarks,
    )


def _list_masters_as_weights(parameters: Parameters) -> None:
    """List master copies as weights too if no other file holds the weights, as with ZeRO-3."""
    specs = parameters.tensors.specs
    for name in sorted(parameters.trained):
        master = f"optimizer.state.{name}.{MASTER}"
        if master in specs and f"model.{name}" not in specs:
            parameters.tensors.add_again(f"model.{name}", master)


def _casts(parameters: Parameters) -> dict[str, str]:
    """Return the weight of each master copy: cast from it, or the same bytes."""
    tensors, weights = parameters.tensors, {}
    for name in sorted(parameters.trained):
        master, weight = f"optimizer.state.{name}.{MASTER}", f"model.{name}"
        if master in tensors.specs and weight in tensors.specs:
            weights[master] = weight
    return weights


def _require_complete(parameters: Parameters) -> None:
    """Refuse a checkpoint that names a parameter and holds no bytes for it.

    Raises:
        CorruptError: The message names the parameter.
    """
    first = parameters.states[0]
    for name in sorted(parameters.trained | first.module.keys()):
        tensor = isinstance(first.module.get(name), StoredTensor)
        if name in parameters.trained and not tensor:
            raise CorruptError(
                f"{parameters.tensors.where}/{first.file}: param_shapes names {name}, and the module has no such "
                "tensor; expected the parameters of the module. Was the file changed?"
            )
        known = f"model.{name}" in parameters.tensors.specs or name in parameters.ties
        if tensor and not known and not parameters.is_left_out(name):
            raise CorruptError(
                f"{parameters.tensors.where}/{first.file}: the module has {name}, and no file holds it; expected it "
                "in param_shapes, frozen_param_fragments or shared_params. Is the checkpoint complete?"
            )


def _remark_unlisted(parameters: Parameters) -> None:
    """Add a remark about parameters that no pattern names, to which DeepSpeed's default layout applies."""
    names = parameters.unlisted()
    if names:
        parameters.tensors.remark(
            f"{parameters.layouts.where}: universal_checkpoint_info states no layout for {len(names)} parameters "
            f"({first_three(sorted(names))}); Holdfast assumes a cut along dimension 0, as DeepSpeed does"
        )
