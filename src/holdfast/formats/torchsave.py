"""A file of `torch.save`: any nested state, its tensors read where they lie.

A dict of nothing but tensors, as `module.state_dict()` returns, has its names under `model.`; anything else keeps its
own paths, joined by dots. Of an optimizer's state dict that goes by numbers, the names are numbers too; one that goes
by names, as `torch.distributed.checkpoint.state_dict` has it, is an optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

from holdfast.errors import InvalidError
from holdfast.formats.dcp.optimizers import OptimizerState, nested_optimizer
from holdfast.formats.inert import Instance
from holdfast.formats.optimizers import optimizer_group
from holdfast.formats.reading import read_bytes
from holdfast.formats.stored_tensor import StoredTensor
from holdfast.formats.torch_tensors import TorchTensors
from holdfast.formats.torch_zip import LEGACY_HEAD, read_torch_file
from holdfast.formats.values_in import below, holds_tensor, plain
from holdfast.ports.store import Readable
from holdfast.spec.listing import Listing
from holdfast.spec.values import Group, Skipped, TensorRef, Value

_ZIP_HEAD = b"PK\3\4"
_NAME_AT = 30
"""Where the name of a zip archive's first entry stands."""

_SUFFIXES = (".pt", ".pth", ".ckpt")
"""Of files that nothing else writes, so that what is wrong with one can be said."""

_EXTRA_STATE = "_extra_state"
"""What `state_dict` calls a module's values that are no tensors."""


class TorchSaveFormat:
    """Lists files of `torch.save` where they lie."""

    @property
    def name(self) -> str:
        """What it is called."""
        return "torch"

    def recognises(self, files: Readable, name: str) -> bool:
        """Return whether a file was named that torch saved, in whatever version; a folder may hold anything."""
        if not name:
            return False
        head = read_bytes(files, name, 0, min(files.size(name), 512), 512)
        is_archive = head.startswith(_ZIP_HEAD) and b"/data.pkl" in head[_NAME_AT:]
        return is_archive or head.startswith(LEGACY_HEAD) or name.endswith(_SUFFIXES)

    def listing(self, files: Readable, name: str) -> Listing:
        """Return every tensor of the file, and the other values as they are nested."""
        found = read_torch_file(files, name)
        tensors = TorchTensors(files.url)
        tensors.add_file(name, found.file_bytes)
        remarks: list[str] = []
        if is_module_state(found.value):
            tree = Group("dict", {"model": module_state(found.value, "model", tensors, remarks)})
        else:
            tree = _branch(found.value if _goes_by_name(found.value) else {"value": found.value}, "", tensors, remarks)
        if not len(tensors) and isinstance(found.value, Instance):
            raise InvalidError(
                f"{files.url}/{name}: holds a {found.value.qualname} as a whole; expected its state: "
                "torch.save(x.state_dict(), path)"
            )
        return tensors.listing("torch.save", tree, remarks)


def is_module_state(value: object) -> TypeGuard[dict[str, object]]:
    """Return whether a value is what `state_dict()` of a module returns: tensors by name, and extra state."""
    return (
        isinstance(value, dict)
        and any(isinstance(each, StoredTensor) for each in value.values())
        and all(
            type(key) is str and (isinstance(each, StoredTensor) or key.endswith(_EXTRA_STATE))
            for key, each in value.items()
        )
    )


def module_state(value: dict[str, object], path: str, tensors: TorchTensors, remarks: list[str]) -> Group:
    """Put down the tensors of a module's state dict under a path; return its extra state."""
    extra = {}
    for key, each in value.items():
        if isinstance(each, StoredTensor):
            tensors.add(below(path, key), each)
        else:
            extra[key] = _value(each, below(path, key), tensors, remarks)
    return Group("module", {key: each for key, each in extra.items() if not isinstance(each, Skipped)})


def _goes_by_name(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict) and all(type(key) is str for key in value)


def _is_branch(value: object) -> TypeGuard[dict[str, object]]:
    """Return whether a value is a dict that holds tensors under names."""
    return _goes_by_name(value) and holds_tensor(value)


def _branch(value: dict[str, object], path: str, tensors: TorchTensors, remarks: list[str]) -> Group:
    """Put down the tensors of a dict under its path; return everything else in it."""
    items: dict[str, Value] = {}
    for key, each in value.items():
        name = below(path, key)
        if isinstance(each, StoredTensor):
            tensors.add(name, each)
        elif is_module_state(each):
            items[key] = module_state(each, name, tensors, remarks)
        elif isinstance(each, dict) and (optimizer := _by_name(each)):
            items[key] = _optimizer(optimizer, name, tensors, remarks)
        elif _is_branch(each):
            items[key] = _branch(each, name, tensors, remarks)
        else:
            items[key] = _value(each, name, tensors, remarks)
    return Group("dict", {key: each for key, each in items.items() if not isinstance(each, Skipped)})


def _by_name(value: dict[object, object]) -> OptimizerState | None:
    """Return an optimizer whose state goes by names of parameters; None for anything else."""
    return None if holds_tensor(value.get("param_groups")) else nested_optimizer(value)


def _optimizer(found: OptimizerState, path: str, tensors: TorchTensors, remarks: list[str]) -> Group:
    """Put down the state of an optimizer that goes by names; return its hyperparameters and what else is in it."""
    groups = {id(shared): shared for shared in found.hyperparameters.values()}
    known = {each: _kept(shared, f"{path}.param_groups", tensors, remarks) for each, shared in groups.items()}
    hyperparameters = {fqn: known[id(shared)] for fqn, shared in found.hyperparameters.items()}
    values = {fqn: _kept(entries, f"{path}.state.{fqn}", tensors, remarks) for fqn, entries in found.values.items()}
    return optimizer_group(hyperparameters, values)


def _kept(entries: Mapping[str, object], path: str, tensors: TorchTensors, remarks: list[str]) -> dict[str, Value]:
    """Put down the tensors among named values; return the others."""
    kept: dict[str, Value] = {}
    for key, each in entries.items():
        if isinstance(each, StoredTensor):
            tensors.add(below(path, key), each)
        elif not isinstance(value := _value(each, below(path, key), tensors, remarks), Skipped):
            kept[key] = value
    return kept


def _value(value: object, path: str, tensors: TorchTensors, remarks: list[str]) -> Value:
    """Return a value of which no dict of names leads to a tensor; tensors in it are put down and referred to."""

    def refer(fqn: str, tensor: StoredTensor) -> TensorRef:
        tensors.add(fqn, tensor)
        return TensorRef(fqn)

    return plain(value, path, refer, remarks)
