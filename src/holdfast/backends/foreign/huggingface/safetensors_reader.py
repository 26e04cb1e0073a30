"""Lists safetensors files: a Hugging Face model, whole or in shards, a PEFT adapter, or any single file.

The format: https://github.com/huggingface/safetensors#format. Holdfast puts `model.` before the names of a state dict.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from holdfast.backends.foreign.huggingface.weight_map import (
    json_object,
    names_in,
    one_index,
    require_all_there,
    weight_map,
)
from holdfast.backends.foreign.read import read_bytes
from holdfast.backends.foreign.typed_values import Count, Shape, typed
from holdfast.backends.foreign.values import remark
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.dtype import BY_SAFETENSORS, of_safetensors
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.readable import Readable
from holdfast.base.types.export import EXPORT_NOTE
from holdfast.base.types.listing import ForeignListing, ListedPiece
from holdfast.base.types.values import Group
from holdfast.errors import CorruptError, InvalidError, MissingError

SUFFIX = ".safetensors"
_PART = re.compile(r"(?!shard-)(.+)-\d{5}-of-(\d{5})\.safetensors", re.ASCII)
"""A part of a model. DCP's writer puts `shard-<rank>-` before it, and then each rank has some of the numbers."""

INDEX_SUFFIX = ".safetensors.index.json"
HEADER_BYTES_MAX = 100_000_000
"""Limit of the reference implementation."""

_LAST = "model.safetensors"
"""What an export of a small model writes last; that of a larger one ends with the index."""

_NOTE_FOLDER = EXPORT_NOTE.rpartition("/")[0] + "/"
_HEADERS_AT_ONCE = 8

NAMES_KEPT = "holdfast.names_kept"
"""Metadata key: the names of the file are those of a whole training state, not of a model."""

_FORMAT = "format"
"""Metadata key of the framework that wrote the file, e.g. `pt`. It is never a tied name, even of a tensor `pt`."""

_REST = "optimizer"
"""Prefix of files beside an indexed model that hold the rest of the state."""

_SHARDING = "DCP_SHARDING_INFO"
"""Metadata key at which DCP's `HuggingFaceStorageWriter` stores the place of each shard in its tensor."""


class SafetensorsFormat:
    """Lists safetensors files in place."""

    def recognises(self, files: Readable, name: str) -> bool:
        """Return whether a safetensors file, an index, or a folder that holds either was named."""
        return any(key.endswith((SUFFIX, INDEX_SUFFIX)) for key in ([name] if name else names_in(files)))

    def listing(self, files: Readable, name: str) -> ForeignListing:
        """Return every tensor of the named file, or of the files that the index of the folder names."""
        remarks: list[str] = []
        index = name if name.endswith(INDEX_SUFFIX) else "" if name else one_index(files, INDEX_SUFFIX)
        weights = weight_map(files, index, SUFFIX) if index else None
        keys = sorted(set(weights.values())) if weights is not None else [name] if name else _all_parts(files)
        beside = [] if name or weights is None else [key for key in names_in(files, SUFFIX) if key.startswith(_REST)]
        entries: dict[str, list[tuple[str, SafetensorsEntry]]] = {}
        aliases: dict[str, str] = {}
        sizes: dict[str, int] = {}
        metadata: dict[str, str] = {}
        for key, size, stated, file_metadata in _headers(files, [*keys, *(key for key in beside if key not in keys)]):
            whole = NAMES_KEPT in file_metadata
            # A file beside an indexed model counts only if Holdfast exported it as the rest of a state.
            if key not in keys and not whole:
                continue
            sizes[key], prefix, ties = size, "" if whole else "model.", _ties(stated, file_metadata)
            aliases.update({prefix + alias: prefix + stored for alias, stored in ties.items()})
            reserved = {_SHARDING, NAMES_KEPT, *ties}
            metadata.update({name: text for name, text in file_metadata.items() if name not in reserved})
            for entry in stated:
                if weights is not None and not whole and weights.get(entry.name) != key:
                    remark(remarks, f"{key}: {entry.name} is left out; {index} does not assign it to this file")
                else:
                    entries.setdefault(prefix + entry.name, []).append((key, entry))
        if weights is not None:
            require_all_there(files, index, weights, entries)
        tensors = {fqn: _spec(files, fqn, parts) for fqn, parts in entries.items()}
        return ForeignListing(
            format="safetensors",
            tensors=tensors,
            pieces={
                fqn: [ListedPiece(part.box, key, part.start) for key, part in parts] for fqn, parts in entries.items()
            },
            files=sizes,
            aliases={alias: fqn for alias, fqn in aliases.items() if fqn in tensors and alias not in tensors},
            tree=Group("dict", {"model": Group("module"), **({"metadata": metadata} if metadata else {})}),
            remarks=remarks,
        )


def _all_parts(files: Readable) -> list[str]:
    """Return the files of a folder without an index.

    Raises:
        MissingError: Some are parts of a model, and others of its parts are missing, or an export there has not ended.
    """
    names = names_in(files, SUFFIX)
    parts = Counter((match[1], match[2]) for match in map(_PART.fullmatch, names) if match)
    for (stem, count), found in parts.items():
        if found < int(count):
            raise MissingError(
                f"{files.url}: {found} files of {stem}-*-of-{count}{SUFFIX} and no index, which is written last; "
                f"expected all {int(count)}. Was it copied or exported in part? Do it again, or name one file"
            )
    if names and _LAST not in names and any(entry.key == EXPORT_NOTE for entry in files.list(_NOTE_FOLDER)):
        raise MissingError(
            f"{files.url}: an export to here has not ended ({EXPORT_NOTE} is there, and neither an index nor {_LAST}, "
            "one of which is written last). Run its command again, or name one file"
        )
    return names


def _headers(
    files: Readable, keys: Sequence[str]
) -> Iterator[tuple[str, int, Sequence[SafetensorsEntry], Mapping[str, str]]]:
    """Yield key, size, tensors and metadata of each file, in order.

    Several are read side by side: a store over a network takes its time for each.
    """

    def read(key: str) -> tuple[str, int, Sequence[SafetensorsEntry], Mapping[str, str]]:
        size = files.size(key)
        return (key, size, *read_header(files, key, 0, size))

    if len(keys) == 1:
        yield read(keys[0])
        return
    with ThreadPoolExecutor(_HEADERS_AT_ONCE, thread_name_prefix="holdfast-headers") as threads:
        for first in range(0, len(keys), _HEADERS_AT_ONCE):
            yield from threads.map(read, keys[first : first + _HEADERS_AT_ONCE])


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """A tensor of a file, or a shard of one."""

    name: str
    """Name in the file."""

    dtype: str
    """Element type, a key of `DTYPES`."""

    box: Box
    """The part of the tensor."""

    is_shard: bool
    """Whether the file states the place of this part in the tensor."""

    start: int
    """First byte of its elements in the file."""

    stop: int
    """Byte past its last element."""


def _ties(entries: Sequence[SafetensorsEntry], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return tied names and their stored names, as `safetensors.torch.save_model` writes them."""
    names = {entry.name for entry in entries}
    return {
        alias: stored
        for alias, stored in metadata.items()
        if stored in names and alias not in names and alias != _FORMAT
    }


def _spec(files: Readable, fqn: str, entries: list[tuple[str, SafetensorsEntry]]) -> TensorSpec:
    """Return the whole tensor whose shards are entries of one or several files.

    Raises:
        CorruptError: A tensor is stored twice, or its shards contradict each other.
    """
    (key, first), *others = entries
    for other, entry in others:
        if not (first.is_shard and entry.is_shard):
            raise CorruptError(
                f"{files.url}/{key}: {entry.name} is stored in {other} too; expected each tensor once. "
                "Name one of the files, or remove files that do not belong to this checkpoint"
            )
        if (entry.dtype, len(entry.box.stop)) != (first.dtype, len(first.box.stop)):
            raise CorruptError(
                f"{files.url}/{other}: {entry.name} is {entry.dtype} {list(entry.box.shape)}, and {first.dtype} "
                f"{list(first.box.shape)} in {key}; expected shards of one tensor. Read another copy"
            )
    # No shard states the shape of the whole tensor; it ends where the last shard ends.
    lengths = zip(*(entry.box.stop for _, entry in entries), strict=True)
    return TensorSpec(fqn, first.dtype, tuple(map(max, lengths)))


def read_header(
    files: Readable, key: str, start: int, stop: int
) -> tuple[Sequence[SafetensorsEntry], Mapping[str, str]]:
    """Return the tensors and the metadata of a safetensors file, with every number checked against the file.

    Args:
        files: The folder.
        key: The file.
        start, stop: Byte range of the safetensors data: the whole file, or a part of a file of another format.
    Raises:
        CorruptError: The file is cut short, or not a safetensors file.
        InvalidError: A tensor has an element type that Holdfast does not store.
    """
    where = f"{files.url}/{key}"
    if stop - start < 8:
        raise CorruptError(f"{where}: {stop - start} bytes; expected a safetensors file. Read another copy")
    length = int.from_bytes(read_bytes(files, key, start, start + 8, 8), "little")
    # Compare with the file before reading: a hostile length must not allocate memory.
    if length > min(HEADER_BYTES_MAX, stop - start - 8):
        raise CorruptError(
            f"{where}: bytes {start}–{start + 8} state a header of {length} bytes in {stop - start}; expected at most "
            f"{min(HEADER_BYTES_MAX, stop - start - 8)}. Is it cut short, or a pointer of Git LFS?"
        )
    document = json_object(read_bytes(files, key, start + 8, start + 8 + length, HEADER_BYTES_MAX), where)
    metadata = typed(document.pop("__metadata__", {}), dict[str, str], f"{where}: __metadata__")
    sharding = json_object(metadata.get(_SHARDING, "{}").encode("utf-8", "surrogatepass"), f"{where}: {_SHARDING}")
    shards = typed(sharding, dict[str, _ShardInfo], f"{where}: {_SHARDING}")
    entries = list(_entries(document, shards, start + 8 + length, stop, where))
    _require_gapless(entries, start + 8 + length, stop, where)
    return entries, metadata


def _require_gapless(entries: list[SafetensorsEntry], first: int, stop: int, where: str) -> None:
    """Refuse entries that share bytes, and bytes without an entry, as the format and its own library do.

    Raises:
        CorruptError: The message names the entry.
    """
    at, before = first, "the header"
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start != at:
            raise CorruptError(
                f"{where}: {entry.name[:200]} begins at byte {entry.start}; expected {at}, where {before[:200]} ends. "
                "Read another copy"
            )
        at, before = entry.stop, entry.name
    if at != stop:
        raise CorruptError(f"{where}: ends at byte {stop}; expected {at}, where {before[:200]} ends. Read another copy")


class _ShardInfo(msgspec.Struct):
    """Where a shard begins in its tensor, as DCP's Hugging Face writer and Holdfast's packs state it."""

    saved_offsets: Shape
    """Coordinates of its first element."""


class _Entry(msgspec.Struct):
    """A tensor as the header states it."""

    dtype: str
    """Element type, by its name in safetensors."""

    shape: Shape
    """Elements along each dimension."""

    data_offsets: tuple[Count, Count]
    """Half-open byte range in the data behind the header."""


def _entries(
    document: Mapping[str, object], shards: Mapping[str, _ShardInfo], first: int, size: int, where: str
) -> Iterator[SafetensorsEntry]:
    for name, stated in document.items():
        entry = typed(stated, _Entry, f"{where}: {name[:200]}")
        dtype, bounds, found = entry.dtype, entry.data_offsets, of_safetensors(entry.dtype, entry.shape)
        if found is None:
            raise InvalidError(
                f"{where}: {name[:200]}: dtype {dtype[:20]} of shape {list(entry.shape[:8])}; expected one of "
                f"{', '.join(BY_SAFETENSORS)}, or F4 with an even last dimension. Convert the tensor"
            )
        known, shape = found
        if bounds[1] - bounds[0] != math.prod(shape) * known.itemsize or first + bounds[1] > size:
            raise CorruptError(
                f"{where}: {name[:200]}: {dtype} of shape {list(shape[:8])} at bytes {list(bounds)} of "
                f"{size - first}; expected the bytes of that shape, inside the file. Was it cut short?"
            )
        at = shards[name].saved_offsets if name in shards else (0,) * len(shape)
        if len(at) != len(shape):
            raise CorruptError(
                f"{where}: {name[:200]}: a shard of shape {list(shape[:8])} at {list(at[:8])}; expected one coordinate "
                "a dimension. Read another copy"
            )
        box = Box(at, tuple(start + length for start, length in zip(at, shape, strict=True)))
        yield SafetensorsEntry(name, known.name, box, name in shards, first + bounds[0], first + bounds[1])
