"""Lists a `torch.save` file: any nested state, its tensors read in place.

The names of a dict of tensors only, as `module.state_dict()` returns, begin with `model.`; those of an optimizer's
state dict begin with `optimizer.`. Other states keep their paths, joined by dots. An optimizer's state dict that
numbers its parameters yields numbers as names.
"""

from __future__ import annotations

from typing import TypeGuard

from holdfast.backends.foreign.pickles.objects import OpaqueObject
from holdfast.backends.foreign.pickles.tensors import StoredTensor
from holdfast.backends.foreign.read import read_bytes
from holdfast.backends.foreign.torch.archive_reader import LEGACY_HEAD, read_torch_file
from holdfast.backends.foreign.torch.tensors import TorchTensors
from holdfast.backends.foreign.values import below, require_short, tensor_holders, to_value
from holdfast.base.ports.readable import Readable
from holdfast.base.types.listing import ForeignListing
from holdfast.base.types.values import Group, Skipped, TensorRef, Value
from holdfast.errors import InvalidError

_ZIP_HEAD = b"PK\3\4"
_NAME_AT = 30
"""Offset of the name of the first entry of a zip archive."""

_SUFFIXES = (".pt", ".pth", ".ckpt")
"""Only torch writes files of these suffixes, so a damaged one is reported as such."""

_EXTRA_STATE = "_extra_state"
"""Suffix of the keys of a module's state dict whose values are not tensors."""

_OPTIMIZER_KEYS = {"state", "param_groups"}
"""Keys of an optimizer's state dict."""


class TorchSaveFormat:
    """Lists files of `torch.save` in place."""

    def recognises(self, files: Readable, name: str) -> bool:
        """Return whether a file of any version of torch was named. A folder is never recognised."""
        if not name:
            return False
        head = read_bytes(files, name, 0, min(files.size(name), 512), 512)
        is_archive = head.startswith(_ZIP_HEAD) and b"/data.pkl" in head[_NAME_AT:]
        return is_archive or head.startswith(LEGACY_HEAD) or name.endswith(_SUFFIXES)

    def listing(self, files: Readable, name: str) -> ForeignListing:
        """Return the tensors of the file, and its other values with their nesting."""
        value = read_torch_file(files, name)
        tensors = TorchTensors(files)
        tensors.files[name] = files.size(name)
        if is_module_state(value):
            tree = Group("dict", {"model": module_state(value, "model", tensors)})
        else:
            state = value if _has_text_keys(value) else {"value": value}
            if state.keys() == _OPTIMIZER_KEYS:
                state = {"optimizer": state}
            tree = _branch(state, "", tensors, tensor_holders(state))
        if not tensors.specs and isinstance(value, OpaqueObject):
            raise InvalidError(
                f"{files.url}/{name}: holds a {value.qualname} as an object; expected its state. "
                "Save it with torch.save(x.state_dict(), path)"
            )
        return tensors.listing("torch.save", tree)


def is_module_state(value: object) -> TypeGuard[dict[str, object]]:
    """Return whether a value is the state dict of a module: tensors by name, and extra state."""
    return (
        isinstance(value, dict)
        and any(isinstance(item, StoredTensor) for item in value.values())
        and all(
            type(key) is str and (isinstance(item, StoredTensor) or key.endswith(_EXTRA_STATE))
            for key, item in value.items()
        )
    )


def module_state(value: dict[str, object], path: str, tensors: TorchTensors) -> Group:
    """Add the tensors of a module's state dict under a path; return its extra state."""
    extra = {}
    tensors.order += [below(path, key) for key in value]
    for key, item in value.items():
        if isinstance(item, StoredTensor):
            tensors.add(below(path, key), item)
        else:
            extra[key] = _value(item, below(path, key), tensors)
    return Group("module", {key: item for key, item in extra.items() if not isinstance(item, Skipped)})


def _has_text_keys(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict) and all(type(key) is str for key in value)


def _branch(value: dict[str, object], path: str, tensors: TorchTensors, holders: set[int]) -> Group:
    """Add the tensors of a dict under its path; return all other values.

    Args:
        value: The dict.
        path: Its dotted name.
        tensors: Receives the tensors.
        holders: The `id` of every container that holds a tensor.
    """
    items: dict[str, Value] = {}
    require_short(path)
    tensors.order += [below(path, key) for key in value]
    for key, item in value.items():
        name = below(path, key)
        if isinstance(item, StoredTensor):
            tensors.add(name, item)
        elif is_module_state(item):
            items[key] = module_state(item, name, tensors)
        elif _has_text_keys(item) and id(item) in holders:
            items[key] = _branch(item, name, tensors, holders)
        else:
            items[key] = _value(item, name, tensors)
    return Group("dict", {key: item for key, item in items.items() if not isinstance(item, Skipped)})


def _value(value: object, path: str, tensors: TorchTensors) -> Value:
    """Return a value in which a `TensorRef` replaces each tensor, which is added to the listing."""

    def refer(fqn: str, tensor: StoredTensor) -> TensorRef:
        tensors.add(fqn, tensor)
        return TensorRef(fqn)

    return to_value(value, path, refer, tensors.remarks)
