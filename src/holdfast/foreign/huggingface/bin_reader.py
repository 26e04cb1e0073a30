"""Hugging Face weights of before safetensors: `pytorch_model*.bin`, with or without index, and `adapter_model.bin`.

Each file is one of `torch.save`: a module's state dict, whose names stand under `model.`.
"""

from __future__ import annotations

import re

from holdfast.errors import InvalidError, MissingError
from holdfast.foreign.huggingface.weight_map import names_in, one_index, require_all_there, weight_map
from holdfast.foreign.torch.archive_reader import read_torch_file
from holdfast.foreign.torch.reader import is_module_state, module_state
from holdfast.foreign.torch.tensors import TorchTensors
from holdfast.foreign.values import remark
from holdfast.ports.store import Readable
from holdfast.types.listing import ForeignListing
from holdfast.types.values import Group

SUFFIX = ".bin"
INDEX_SUFFIX = ".bin.index.json"
_NAMES = re.compile(r"(?:pytorch_model|adapter_model)[.\w-]*\.bin")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.bin")


class HuggingFaceBinFormat:
    """Lists such files where they lie."""

    @property
    def name(self) -> str:
        """What it is called."""
        return "huggingface-bin"

    def recognises(self, files: Readable, name: str) -> bool:
        """Return whether it is an index of such files, or a folder that holds any; one alone is read as torch.save."""
        if name:
            return name.endswith(INDEX_SUFFIX)
        return any(_NAMES.fullmatch(key) or key.endswith(INDEX_SUFFIX) for key in names_in(files))

    def listing(self, files: Readable, name: str) -> ForeignListing:
        """Return every tensor of the files that the index counts, or else their names."""
        index = name or one_index(files, INDEX_SUFFIX)
        weights = weight_map(files, index, SUFFIX) if index else None
        keys = _all_parts(files) if weights is None else sorted(set(weights.values()))
        remarks: list[str] = []
        tensors = TorchTensors(files.url)
        module: dict[str, object] = {}
        for key in keys:
            state = _state(files, key, tensors)
            if weights is not None:
                for each in [each for each in state if weights.get(each) != key]:
                    remark(remarks, f"{key}: {each} is left out; {index} does not say that it lies there")
                    del state[each]
            module |= module_state(state, "model", tensors, remarks).items
        if weights is not None:
            require_all_there(files, index, weights, tensors)
        return tensors.listing("huggingface bin", Group("dict", {"model": Group("module", module)}), remarks)


def _state(files: Readable, key: str, tensors: TorchTensors) -> dict[str, object]:
    found = read_torch_file(files, key)
    if not is_module_state(found.value):
        raise InvalidError(
            f"{files.url}/{key}: holds no dict of tensors by name; expected a model's state dict. "
            "Name the file itself to read any other state"
        )
    tensors.add_file(key, found.file_bytes)
    return found.value


def _all_parts(files: Readable) -> list[str]:
    """Return the files of the folder, every one of a set that is cut into several.

    Raises:
        MissingError: One is not there.
        InvalidError: There are several sets.
    """
    found = [key for key in names_in(files) if _NAMES.fullmatch(key)]
    sets: dict[str, list[str]] = {}
    for key in found:
        part = _PART.fullmatch(key)
        sets.setdefault(f"{part[1]}-*-of-{part[3]}{SUFFIX}" if part else key, []).append(key)
    if len(sets) > 1:
        raise InvalidError(
            f"{files.url}: {', '.join(list(sets)[:5])}; expected one of them. Name the file that is meant"
        )
    [(pattern, keys)] = sets.items()
    part = _PART.fullmatch(keys[0])
    if part and len(keys) != int(part[3]):
        raise MissingError(
            f"{files.url}: {len(keys)} files of {pattern}; expected all {int(part[3])}. Fetch them again"
        )
    return keys
