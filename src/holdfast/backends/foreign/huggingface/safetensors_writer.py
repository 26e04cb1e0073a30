"""Lays out safetensors files like Hugging Face: one file, or several with an index.

`transformers` writes and loads the same layout: a tied tensor is stored once, and the metadata of its file lists its
other names, as `safetensors.torch.save_model` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from holdfast.backends.foreign.file_layout import FileLayout, TensorLeaf
from holdfast.backends.foreign.huggingface.safetensors_reader import HEADER_BYTES_MAX, NAMES_KEPT
from holdfast.backends.foreign.model_names import PartNames, exported_dtype, model_names, part_names
from holdfast.base.geometry.dtype import DTYPES, as_safetensors
from holdfast.base.types.export import ExportContent, ExportFile, ExportOptions
from holdfast.errors import InvalidError

_METADATA = "__metadata__"
_METADATA_KEYS = ("format", NAMES_KEPT)

Tensors = Mapping[str, TensorLeaf]
"""Tensors by their names in the file."""


class SafetensorsWriter:
    """Lays out a model in safetensors files, and the rest of the state beside it on request."""

    name = "safetensors"
    """Name of the format on the command line."""

    def files(self, content: ExportContent, options: ExportOptions) -> Sequence[ExportFile]:
        """Return the model as one file, or as shards and their index; all other tensors as `optimizer.safetensors`."""
        model = model_names(content, required=options.model_only)
        shards, ties = _laid_out("model", content, model, options.shard_bytes, options.dtype)
        metadata = {"format": "pt"}
        alone = len(shards) == 1
        files = [_file(name, tensors, metadata, ties, completes=alone) for name, tensors in shards.items()]
        if len(shards) > 1:
            files.append(_index(shards))
        if not options.model_only:
            rest = part_names(content, lambda name: name if model.part(name) is None else None)
            metadata = {"format": "pt", NAMES_KEPT: "true"}
            shards, ties = _laid_out("optimizer", content, rest, options.shard_bytes, None)
            files += [_file(name, tensors, metadata, ties) for name, tensors in shards.items()]
        return files


def _laid_out(
    stem: str, content: ExportContent, part: PartNames, shard_bytes: int, dtype: str | None
) -> tuple[Mapping[str, Tensors], Mapping[str, str]]:
    """Return the tensors of each file, and their tied names."""
    # Metadata reserves some keys. A tied name that equals one cannot be listed there, so its tensor is written again.
    ties = {alias: name for alias, name in part.aliases.items() if alias not in _METADATA_KEYS}
    specs = {name: content.tensors[fqn] for fqn, name in part.names.items()}
    specs |= {alias: specs[name] for alias, name in part.aliases.items() if alias not in ties}
    tensors = {
        name: TensorLeaf(spec.fqn, exported_dtype(spec.dtype, dtype), spec.global_shape) for name, spec in specs.items()
    }
    return (_shards(stem, tensors, shard_bytes) if tensors else {}), ties


def _shards(stem: str, tensors: Tensors, shard_bytes: int) -> Mapping[str, Tensors]:
    """Return the tensors of each file, in order. A tensor larger than `shard_bytes` gets a file of its own."""
    shards: list[dict[str, TensorLeaf]] = [{}]
    filled = 0
    for name, leaf in tensors.items():
        if shards[-1] and filled + leaf.bytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = leaf
        filled += leaf.bytes
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


def _file(
    name: str, tensors: Tensors, metadata: Mapping[str, str], aliases: Mapping[str, str], *, completes: bool = False
) -> ExportFile:
    """Return one file: header and tensors, widest elements first so that every tensor is aligned to its elements."""
    header: dict[str, object] = {}
    at = 0
    ordered = sorted(tensors.items(), key=lambda named: (-DTYPES[named[1].dtype].itemsize, named[0]))
    for name_in_file, leaf in ordered:
        (dtype, shape), stop = as_safetensors(leaf.dtype, tuple(leaf.shape)), at + leaf.bytes
        if not dtype:
            raise InvalidError(
                f"{leaf.fqn}: dtype {leaf.dtype} of shape {list(leaf.shape)}; safetensors has no such type. Use torch, "
                "dcp or holdfast"
            )
        if name_in_file == _METADATA:
            raise InvalidError(f"{leaf.fqn}: safetensors reserves the name {_METADATA}; rename the tensor")
        header[name_in_file] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, stop]}
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
    for _, leaf in ordered:
        layout.put_tensor(leaf)
    return layout.file(name, completes=completes)


def _index(shards: Mapping[str, Tensors]) -> ExportFile:
    """Return the index: the file of each tensor."""
    weights = {name: file for file, tensors in shards.items() for name in tensors}
    total = sum(leaf.bytes for tensors in shards.values() for leaf in tensors.values())
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    text = (json.dumps(document, indent=2) + "\n").encode()
    return ExportFile(name="model.safetensors.index.json", bytes=len(text), literals=((0, text),), completes=True)
