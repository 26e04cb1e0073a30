"""Lists a tag folder of ZeRO-1, 2, 3 or BF16_Optimizer."""

from __future__ import annotations

from holdfast.backends.foreign.deepspeed.folder import Folder
from holdfast.backends.foreign.deepspeed.layout import Layouts
from holdfast.backends.foreign.deepspeed.module import Parameters, list_copies, list_frozen, list_module, list_ties
from holdfast.backends.foreign.deepspeed.optimizer import MASTER, ZeroOptimizer, list_buffers
from holdfast.backends.foreign.deepspeed.ranks import Models, read_models, read_optimizers
from holdfast.backends.foreign.deepspeed.saved import ModelState, ZeroState
from holdfast.backends.foreign.deepspeed.tensors import Tensors
from holdfast.backends.foreign.deepspeed.tree import Values
from holdfast.backends.foreign.pickles.tensors import StoredTensor
from holdfast.backends.foreign.torch.checksums import ArchiveChecksums
from holdfast.base.ports.readable import Readable
from holdfast.base.types.listing import ForeignListing
from holdfast.errors import CorruptError, MissingError


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
    parameters = parameters_of(files, folder, models, zero, has_atoms=False)
    list_module(parameters, weights=zero is None or zero.stage != 3)
    list_copies(parameters)
    state = list_buffers(parameters, optimizers) if optimizers else None
    return finish_listing(files, folder, parameters, zero, state)


def parameters_of(
    files: Readable, folder: Folder, models: Models, zero: ZeroState | None, *, has_atoms: bool
) -> Parameters:
    """Return the parameters. The caller's `universal_checkpoint_info` describes their layout, or else AutoTP's."""
    first: ModelState | ZeroState = models[0, 0]
    if not first.info and zero is not None:
        first = zero
    layouts = Layouts(first.info, f"{files.url}/{first.file}", folder.mp_degree)
    return Parameters(models, layouts, Tensors(files.url), has_atoms)


def finish_listing(
    files: Readable,
    folder: Folder,
    parameters: Parameters,
    zero: ZeroState | None,
    state: ZeroOptimizer | None,
    prefix: str = "",
) -> ForeignListing:
    """Add the tensors that depend on module and optimizer, check that none is missing, and return the listing.

    Args:
        files: The checkpoint.
        folder: Its tag folder.
        parameters: The parameters, with the tensors that are listed already.
        zero: Rank 0's optimizer states; None without ZeRO.
        state: Optimizer state besides tensors; None if there is none.
        prefix: Prefix of the optimizer's name in the name of the format.
    Raises:
        CorruptError: A parameter has no bytes.
    """
    tensors, first = parameters.tensors, parameters.states[0]
    # Weights before ties: a tied name is listed only if its stored name is.
    casts = _list_masters_as_weights(parameters)
    if zero is not None and zero.stage == 3:
        list_frozen(parameters, zero.ranks)
    _require_complete(parameters)
    list_ties(parameters)
    if state is None and parameters.trained:
        tensors.remark(
            f"{first.file}: ZeRO trained {len(parameters.trained)} parameters, and files of optimizer states are "
            "missing: only weights are listed. To load an optimizer, copy *_optim_states.pt of every rank"
        )
    elif state is None and first.has_optimizer:
        tensors.remark(
            f"{first.file}: the optimizer's state is left out: without ZeRO it is numbered, and no file states the "
            "parameter of each number"
        )
    elif first.has_optimizer:
        tensors.remark(f"{first.file}: optimizer is left out: separate files hold its states")
    tree = Values(files, parameters).tree(zero.rest if zero else {}, state)
    parameters.remark_unlisted()
    step = first.count("global_steps", -1)
    ranks = zero.ranks if zero is not None else max(first.count("dp_world_size", 1), 1)
    without_zero = "weights of ZeRO" if parameters.trained else "no ZeRO"
    kind = without_zero if zero is None else f"ZeRO-{zero.stage}" if zero.stage else "BF16_Optimizer"
    sizes = tensors.sizes(folder.sizes)
    return ForeignListing(
        format=f"deepspeed {first.version}, {prefix}{kind}",
        tensors=tensors.specs,
        pieces=tensors.pieces,
        files=sizes,
        tree=tree,
        aliases=tensors.aliases,
        replicas=tensors.replicas,
        checksums=ArchiveChecksums(files, {file: (0, size) for file, size in sizes.items()}),
        casts=casts,
        step=step if step >= 0 else None,
        world_size=ranks * folder.mp_degree,
        remarks=tensors.remarks,
    )


def _list_masters_as_weights(parameters: Parameters) -> dict[str, str]:
    """List master copies as weights too if no other file holds the weights, as with ZeRO-3.

    Returns:
        Names of weights by name of the master copy. Each weight is cast from its master copy, or shares its bytes.
    """
    specs, weights = parameters.tensors.specs, {}
    for name in sorted(parameters.trained):
        master, weight = f"optimizer.state.{name}.{MASTER}", f"model.{name}"
        if master in specs:
            weights[master] = weight
            if weight not in specs:
                parameters.tensors.add_again(weight, master)
    return weights


def _require_complete(parameters: Parameters) -> None:
    """Refuse a checkpoint that names a parameter and holds no bytes for it.

    Raises:
        CorruptError: The message names the parameter.
    """
    first, where = parameters.states[0], parameters.tensors.where
    for name in sorted(parameters.trained | first.module.keys()):
        is_tensor = isinstance(first.module.get(name), StoredTensor)
        if name in parameters.trained and not is_tensor:
            raise CorruptError(
                f"{where}/{first.file}: param_shapes names {name}, and the module has no such tensor; expected the "
                "parameters of the module. Was the file changed?"
            )
        known = f"model.{name}" in parameters.tensors.specs or name in parameters.ties
        if is_tensor and not known and not parameters.is_left_out(name):
            raise CorruptError(
                f"{where}/{first.file}: the module has {name}, and no file holds it; expected it in param_shapes, "
                "frozen_param_fragments or shared_params. Is the checkpoint complete?"
            )
