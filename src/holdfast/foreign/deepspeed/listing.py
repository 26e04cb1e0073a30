"""A tag folder of ZeRO-1, 2 or 3 or BF16_Optimizer, listed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.errors import CorruptError, MissingError
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
    """Return what the files of a tag hold, whichever of ZeRO's optimizers wrote them.

    Raises:
        CorruptError: A file is damaged, or does not fit the others.
        InvalidError: It holds what is not read, or files of two checkpoints.
        MissingError: The file of a rank is not there.
    """
    models = read_models(files, folder)
    if folder.is_cut and not folder.optimizers:
        raise MissingError(
            f"{files.url}/{folder.prefix}zero_pp_rank_0_mp_rank_00_optim_states.pt: is not there, nor those of other "
            f"ranks; {folder.models[0, 0]} is of ZeRO-3, whose parameters lie there alone. Copy all of them"
        )
    optimizers = read_optimizers(files, folder, models[0, 0])
    zero = optimizers[0][0] if optimizers else None
    parameters = parameters_of(files, folder, models, zero)
    extra_state = list_module(parameters, weights=zero is None or zero.stage != 3)
    list_copies(parameters, models)
    state = list_buffers(parameters, optimizers) if optimizers else None
    return finished(files, folder, models, parameters, ListedValues(zero, state, extra_state))


@dataclass(frozen=True, slots=True)
class ListedValues:
    """What was found besides tensors."""

    zero: ZeroState | None
    """What rank 0 says of the optimizer; None where there is none."""

    state: ZeroOptimizer | None
    """What is known of its state."""

    extra_state: Mapping[str, object]
    """What the module's state dict holds besides tensors."""

    prefix: str = ""
    """What leads the name of the optimizer in the name of the format."""


def parameters_of(
    files: Readable, folder: Folder, models: Models, zero: ZeroState | None, *, has_atoms: bool = False
) -> Parameters:
    """Return what is known of the parameters; their layout is the caller's word, or that of AutoTP."""
    states = [models[tp, 0] for tp in range(folder.mp_degree)]
    info, file = states[0].info, states[0].file
    if not info and zero is not None:
        info, file = zero.info, zero.file
    layouts = Layouts(info, f"{files.url}/{file}", folder.mp_degree)
    return Parameters(states, layouts, Tensors(files.url), has_atoms=has_atoms)


def finished(
    files: Readable, folder: Folder, models: Models, parameters: Parameters, found: ListedValues
) -> ForeignListing:
    """List what the module and the optimizer share, make sure that all is there, and return the listing.

    Raises:
        CorruptError: A parameter has no bytes.
    """
    tensors, first, zero = parameters.tensors, parameters.states[0], found.zero
    _list_masters_as_weights(parameters)
    if zero is not None and zero.stage == 3:
        list_frozen(parameters, models, zero.ranks)
    _require_complete(parameters)
    list_ties(parameters)
    if found.state is None and parameters.trained:
        tensors.remark(
            f"{tensors.where}/{first.file}: ZeRO trained {len(parameters.trained)} parameters, and there are no files "
            "of optimizer states: these are weights alone. To load an optimizer, copy *_optim_states.pt of every rank"
        )
    elif found.state is None and first.has_optimizer:
        tensors.remark(
            f"{tensors.where}/{first.file}: the optimizer's state is left out: without ZeRO it goes by numbers, and "
            "nothing tells which parameter each is of"
        )
    elif first.has_optimizer:
        tensors.remark(f"{tensors.where}/{first.file}: optimizer is left out: files of their own hold its states")
    groups = zero.param_groups if zero is not None else None
    if found.state is not None:
        remark_other_steps(files, parameters, found.state, groups)
    tree = Values(files, parameters).tree(found.extra_state, zero.rest if zero else {}, found.state, groups)
    _remark_unlisted(parameters)
    step = first.count("global_steps", -1)
    ranks = zero.ranks if zero is not None else max(first.count("dp_world_size", 1), 1)
    without = "weights of ZeRO" if parameters.trained else "no ZeRO"
    kind = without if zero is None else f"ZeRO-{zero.stage}" if zero.stage else "BF16_Optimizer"
    return ForeignListing(
        format=f"deepspeed {first.version}, {found.prefix}{kind}",
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
    """List master copies as the weights too where nothing else holds them, as with ZeRO-3."""
    specs = parameters.tensors.specs
    for name in sorted(parameters.trained):
        master = f"optimizer.state.{name}.{MASTER}"
        if master in specs and f"model.{name}" not in specs:
            parameters.tensors.add_again(f"model.{name}", master)


def _casts(parameters: Parameters) -> dict[str, str]:
    """Return the weight of each master copy: cast from it, or the very same bytes."""
    tensors, found = parameters.tensors, {}
    for name in sorted(parameters.trained):
        master, weight = f"optimizer.state.{name}.{MASTER}", f"model.{name}"
        if master in tensors.specs and weight in tensors.specs:
            found[master] = weight
    return found


def _require_complete(parameters: Parameters) -> None:
    """Refuse a checkpoint that names parameters and has no bytes for them.

    Raises:
        CorruptError: Names one.
    """
    first = parameters.states[0]
    for name in sorted(parameters.trained | first.module.keys()):
        tensor = isinstance(first.module.get(name), StoredTensor)
        if name in parameters.trained and not tensor:
            raise CorruptError(
                f"{parameters.tensors.where}/{first.file}: param_shapes name {name}, and the module has no such "
                "tensor; expected the parameters of the module. Was the file changed?"
            )
        known = f"model.{name}" in parameters.tensors.specs or name in parameters.ties
        if tensor and not known and not parameters.is_left_out(name):
            raise CorruptError(
                f"{parameters.tensors.where}/{first.file}: the module has {name}, and no file holds it; expected it "
                "among param_shapes, frozen_param_fragments or shared_params. Was the checkpoint saved whole?"
            )


def _remark_unlisted(parameters: Parameters) -> None:
    """Say which parameters no pattern names, so that DeepSpeed's rule for the rest holds of them."""
    names = parameters.unlisted()
    if names:
        parameters.tensors.remark(
            f"{parameters.layouts.where}: universal_checkpoint_info names no layout for {len(names)} parameters "
            f"({', '.join(sorted(names)[:5])}{', …' if len(names) > 5 else ''}); they are taken as cut along "
            "dimension 0 over tensor-parallel ranks, as DeepSpeed does"
        )
