"""Lists Hugging Face weights older than safetensors: `pytorch_model*.bin`, with or without index, `adapter_model.bin`.

Each is a `torch.save` file of a module's state dict. Holdfast puts `model.` before its names.
"""

from __future__ import annotations

import re

from holdfast.backends.foreign.huggingface.weight_map import names_in, one_index, require_all_there, weight_map
from holdfast.backends.foreign.torch.archive_reader import read_torch_file
from holdfast.backends.foreign.torch.reader import is_module_state, module_state
from holdfast.backends.foreign.torch.tensors import TorchTensors
from holdfast.backends.foreign.values import remark
from holdfast.base.ports.readable import Readable
from holdfast.base.types.listing import ForeignListing
from holdfast.base.types.values import Group
from holdfast.errors import InvalidError, MissingError, first_three

SUFFIX = ".bin"
INDEX_SUFFIX = ".bin.index.json"
_NAMES = re.compile(r"(?:pytorch_model|adapter_model)[.\w-]*\.bin")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.bin")


class HuggingFaceBinFormat:
    """Lists these files in place."""

    def recognises(self, files: Readable, name: str) -> bool:
        """Return whether an index or a folder of such files was named. A single file is left to `TorchSaveFormat`."""
        if name:
            return name.endswith(INDEX_SUFFIX)
        return any(_NAMES.fullmatch(key) or key.endswith(INDEX_SUFFIX) for key in names_in(files))

    def listing(self, files: Readable, name: str) -> ForeignListing:
        """Return the tensors of all files that the index names, or of all parts of the only model in the folder."""
        index = name or one_index(files, INDEX_SUFFIX)
        weights = weight_map(files, index, SUFFIX) if index else None
        keys = _all_parts(files) if weights is None else sorted(set(weights.values()))
        tensors = TorchTensors(files)
        module: dict[str, object] = {}
        for key in keys:
            state = _state(files, key, tensors)
            if weights is not None:
                for unlisted in [fqn for fqn in state if weights.get(fqn) != key]:
                    remark(tensors.remarks, f"{key}: {unlisted} is left out; {index} does not assign it to this file")
                    del state[unlisted]
            module |= module_state(state, "model", tensors).items
        if weights is not None:
            require_all_there(files, index, weights, tensors)
        return tensors.listing("huggingface bin", Group("dict", {"model": Group("module", module)}))


def _state(files: Readable, key: str, tensors: TorchTensors) -> dict[str, object]:
    state = read_torch_file(files, key)
    if not is_module_state(state):
        raise InvalidError(
            f"{files.url}/{key}: holds no dict of tensors by name; expected a model's state dict. "
            "To read another state, name the file itself"
        )
    tensors.files[key] = files.size(key)
    return state


def _all_parts(files: Readable) -> list[str]:
    """Return the files of the only model in the folder.

    Raises:
        MissingError: One of its files is missing.
        InvalidError: There are several models.
    """
    sets: dict[str, list[str]] = {}
    for key in filter(_NAMES.fullmatch, names_in(files)):
        part = _PART.fullmatch(key)
        sets.setdefault(f"{part[1]}-*-of-{part[3]}{SUFFIX}" if part else key, []).append(key)
    if len(sets) > 1:
        raise InvalidError(f"{files.url}: found {first_three(sets)}; expected one of them. Name one file in the path")
    [(pattern, keys)] = sets.items()
    part = _PART.fullmatch(keys[0])
    if part and len(keys) != int(part[3]):
        raise MissingError(
            f"{files.url}: {len(keys)} files of {pattern}; expected all {int(part[3])}. Download the missing files"
        )
    return keys
