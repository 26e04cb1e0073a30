"""Lays out safetensors files like Hugging Face: one file, or several with an index.

`transformers` writes and loads the same layout: a tied tensor is stored once, and the metadata of its file lists its
other names, as `safetensors.torch.save_model` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from holdfast.errors import InvalidError
from holdfast.foreign.file_layout import FileLayout, TensorLeaf
from holdfast.foreign.huggingface.safetensors_reader import HEADER_BYTES_MAX, NAMES_KEPT
from holdfast.foreign.model_names import PartNames, exported_dtype, model_names, model_names_if_any, part_names
from holdfast.geometry.box import Box
from holdfast.geometry.dtype import DTYPES
from holdfast.geometry.tensor import TensorSpec
from holdfast.types.export import ExportContent, ExportFile, ExportOptions

_METADATA = "__metadata__"
_METADATA_KEYS = ("format", NAMES_KEPT)

_Named = tuple[str, TensorSpec, str]
"""Name in the file, stored tensor, element type in the file."""


class SafetensorsWriter:
    """Lays out a model in safetensors files, and the rest of the state beside it on request."""

    name = "safetensors"
    """Name of the format on the command line."""

    def files(self, content: ExportContent, options: ExportOptions) -> Sequence[ExportFile]:
        """Return the model as one file, or as shards and their index; all other tensors as `optimizer.safetensors`."""
        model = model_names(content) if options.model_only else model_names_if_any(content)
        shards, ties = _laid_out("model", content, model, options.shard_bytes, options.dtype) if model else ({}, {})
        metadata = {"format": "pt"}
        files = [_file(name, tensors, metadata, ties) for name, tensors in shards.items()]
        if len(shards) > 1:
            files.append(_index(shards))
        if not options.model_only:
            rest = part_names(content, lambda name: None if model and model.part(name) is not None else name)
            metadata = {"format": "pt", NAMES_KEPT: "true"}
            shards, ties = _laid_out("optimizer", content, rest, options.shard_bytes, None)
            files += [_file(name, tensors, metadata, ties) for name, tensors in shards.items()]
        return files


def _laid_out(
    stem: str, content: ExportContent, part: PartNames, shard_bytes: int, dtype: str | None
) -> tuple[dict[str, list[_Named]], Mapping[str, str]]:
    """Return the tensors of each file, and their tied names."""
    # Metadata reserves some keys. A tied name that equals one cannot be listed there, so its tensor is written again.
    ties = {alias: name for alias, name in part.aliases.items() if alias not in _METADATA_KEYS}
    again = {alias: name for alias, name in part.aliases.items() if alias not in ties}
    stored = {name: fqn for fqn, name in part.names.items()}
    stored |= {alias: stored[name] for alias, name in again.items()}
    specs = ((name, content.tensors[fqn]) for name, fqn in stored.items())
    tensors = [(name, spec, exported_dtype(spec.dtype, dtype)) for name, spec in specs]
    return (_shards(stem, tensors, shard_bytes) if tensors else {}), ties


def _shards(stem: str, tensors: Sequence[_Named], shard_bytes: int) -> dict[str, list[_Named]]:
    """Return the tensors of each file, in order. A tensor larger than `shard_bytes` gets a file of its own."""
    shards: list[list[_Named]] = [[]]
    filled = 0
    for tensor in tensors:
        count = _bytes(tensor)
        if shards[-1] and filled + count > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += count
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    total = len(shards)
    return {f"{stem}-{number:05d}-of-{total:05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


def _bytes(named: _Named) -> int:
    _, spec, dtype = named
    return Box.whole(spec.global_shape).numel * DTYPES[dtype].itemsize


def _file(name: str, tensors: Sequence[_Named], metadata: Mapping[str, str], aliases: Mapping[str, str]) -> ExportFile:
    """Return one file: header and tensors, widest elements first so that every tensor is aligned to its elements."""
    header: dict[str, object] = {}
    leaves: list[TensorLeaf] = []
    at = 0
    for tensor in sorted(tensors, key=lambda named: (-DTYPES[named[2]].itemsize, named[0])):
        name_in_file, spec, dtype = tensor
        if not DTYPES[dtype].safetensors:
            raise InvalidError(f"{spec.fqn}: dtype {dtype}; safetensors has no such type. Use torch, dcp or holdfast")
        if name_in_file == _METADATA:
            raise InvalidError(f"{spec.fqn}: safetensors reserves the name {_METADATA}; rename the tensor")
        stop = at + _bytes(tensor)
        entry = {"dtype": DTYPES[dtype].safetensors, "shape": list(spec.global_shape), "data_offsets": [at, stop]}
        header[name_in_file] = entry
        leaves.append(TensorLeaf(spec.fqn, dtype, spec.global_shape))
        at = stop
    ties = {alias: stored for alias, stored in aliases.items() if stored in header}
    text = json.dumps({_METADATA: {**metadata, **ties}, **header}, separators=(",", ":")).encode()
    # Readers map the file, so the data begins at a multiple of 8 bytes, as in the reference implementation.
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES_MAX:
        raise InvalidError(
            f"{name}: {len(tensors)} tensors need a header of {len(text)} bytes; safetensors takes {HEADER_BYTES_MAX}. "
            "Choose a smaller shard_bytes"
        )
    layout = FileLayout()
    layout.put(len(text).to_bytes(8, "little") + text)
    for leaf in leaves:
        layout.put_tensor(leaf)
    return layout.file(name)


def _index(shards: Mapping[str, Sequence[_Named]]) -> ExportFile:
    """Return the index: the file of each tensor."""
    weights = {named[0]: name for name, tensors in shards.items() for named in tensors}
    total = sum(_bytes(tensor) for tensors in shards.values() for tensor in tensors)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    text = (json.dumps(document, indent=2) + "\n").encode()
    return ExportFile(name="model.safetensors.index.json", bytes=len(text), literals=((0, text),))
