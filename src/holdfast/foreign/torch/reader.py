"""A file of `torch.save`: any nested state, its tensors read where they lie.

A dict of nothing but tensors, as `module.state_dict()` returns, has its names under `model.`, an optimizer's alone
under `optimizer.`; anything else keeps its own paths, joined by dots. Of an optimizer's state dict that goes by
numbers, the names are numbers too.
"""

from __future__ import annotations

from typing import TypeGuard

from holdfast.errors import InvalidError
from holdfast.foreign.pickles.objects import OpaqueObject
from holdfast.foreign.pickles.tensors import StoredTensor
from holdfast.foreign.read import read_bytes
from holdfast.foreign.torch.archive_reader import LEGACY_HEAD, read_torch_file
from holdfast.foreign.torch.tensors import TorchTensors
from holdfast.foreign.values import below, require_short, tensor_holders, to_value
from holdfast.ports.store import Readable
from holdfast.types.listing import ForeignListing
from holdfast.types.values import Group, Skipped, TensorRef, Value

_ZIP_HEAD = b"PK\3\4"
_NAME_AT = 30
"""Where the name of a zip archive's first entry stands."""

_SUFFIXES = (".pt", ".pth", ".ckpt")
"""Of files that nothing else writes, so that what is wrong with one can be said."""

_EXTRA_STATE = "_extra_state"
"""What `state_dict` calls a module's values that are no tensors."""


_OPTIMIZER_KEYS = {"state", "param_groups"}
"""What `state_dict` of an optimizer returns."""


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

    def listing(self, files: Readable, name: str) -> ForeignListing:
        """Return every tensor of the file, and the other values as they are nested."""
        found = read_torch_file(files, name)
        tensors = TorchTensors(files.url)
        tensors.add_file(name, found.file_bytes)
        remarks: list[str] = []
        if is_module_state(found.value):
            tree = Group("dict", {"model": module_state(found.value, "model", tensors, remarks)})
        else:
            state = found.value if _goes_by_name(found.value) else {"value": found.value}
            if state.keys() == _OPTIMIZER_KEYS:
                state = {"optimizer": state}
            tree = _Nesting(tensors, remarks, tensor_holders(state)).branch(state, "")
        if not len(tensors) and isinstance(found.value, OpaqueObject):
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


class _Nesting:
    """Puts down what a nested state holds."""

    def __init__(self, tensors: TorchTensors, remarks: list[str], holders: set[int]) -> None:
        self._tensors, self._remarks, self._holders = tensors, remarks, holders

    def branch(self, value: dict[str, object], path: str) -> Group:
        """Put down the tensors of a dict under its path; return everything else in it."""
        items: dict[str, Value] = {}
        require_short(path)
        for key, each in value.items():
            name = below(path, key)
            if isinstance(each, StoredTensor):
                self._tensors.add(name, each)
            elif is_module_state(each):
                items[key] = module_state(each, name, self._tensors, self._remarks)
            elif _goes_by_name(each) and id(each) in self._holders:
                items[key] = self.branch(each, name)
            else:
                items[key] = _value(each, name, self._tensors, self._remarks)
        return Group("dict", {key: each for key, each in items.items() if not isinstance(each, Skipped)})


def _value(value: object, path: str, tensors: TorchTensors, remarks: list[str]) -> Value:
    """Return a value of which no dict of names leads to a tensor; tensors in it are put down and referred to."""

    def refer(fqn: str, tensor: StoredTensor) -> TensorRef:
        tensors.add(fqn, tensor)
        return TensorRef(fqn)

    return to_value(value, path, refer, remarks)
