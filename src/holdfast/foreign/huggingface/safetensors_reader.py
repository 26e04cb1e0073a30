"""Files of safetensors: a Hugging Face model in one or several, whole or in shards, a PEFT adapter, any single file.

The format: https://github.com/huggingface/safetensors#format. Names of a model's state dict stand under `model.`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from holdfast.errors import CorruptError, InvalidError
from holdfast.foreign.huggingface.weight_map import json_object, names_in, one_index, require_all_there, weight_map
from holdfast.foreign.read import read_bytes
from holdfast.foreign.values import remark
from holdfast.geometry.box import Box
from holdfast.geometry.dtype import BY_SAFETENSORS
from holdfast.geometry.tensor import TensorSpec
from holdfast.ports.store import Readable
from holdfast.types.listing import ForeignListing, ListedPiece
from holdfast.types.values import Group

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
HEADER_BYTES_MAX = 100_000_000
"""What the reference implementation takes."""

NAMES_KEPT = "holdfast.names_kept"
"""In a file's metadata: its names are those of a whole training state, not of a model."""

_FORMAT = "format"
"""In a file's metadata: which framework wrote it, as `pt`; that is no tied name, even beside a tensor `pt`."""

_REST = "optimizer"
"""What the names of files begin with that hold what is not the model, beside a model with an index."""

_SHARDING = "DCP_SHARDING_INFO"
"""Where `torch.distributed.checkpoint.HuggingFaceStorageWriter` says which part of a tensor an entry is."""

_NDIM_MAX = 64


class SafetensorsFormat:
    """Lists safetensors files where they lie."""

    @property
    def name(self) -> str:
        """What it is called."""
        return "safetensors"

    def recognises(self, files: Readable, name: str) -> bool:
        """Return whether it is a file of this kind, an index of such files, or a folder that holds any."""
        if name:
            return name.endswith((SUFFIX, INDEX_SUFFIX))
        return any(key.endswith((SUFFIX, INDEX_SUFFIX)) for key in names_in(files))

    def listing(self, files: Readable, name: str) -> ForeignListing:
        """Return every tensor of the files that were named, or that the folder's index names."""
        remarks: list[str] = []
        index = name if name.endswith(INDEX_SUFFIX) else "" if name else one_index(files, INDEX_SUFFIX)
        weights = weight_map(files, index, SUFFIX) if index else None
        keys = sorted(set(weights.values())) if weights is not None else [name] if name else names_in(files, SUFFIX)
        beside = [] if name or weights is None else [key for key in names_in(files, SUFFIX) if key.startswith(_REST)]
        found: dict[str, list[tuple[str, SafetensorsEntry]]] = {}
        aliases: dict[str, str] = {}
        sizes: dict[str, int] = {}
        metadata: dict[str, str] = {}
        for key in [*keys, *(key for key in beside if key not in keys)]:
            size = files.size(key)
            header = read_header(files, key, 0, size)
            whole = NAMES_KEPT in header.metadata
            if key not in keys and not whole:
                continue
            sizes[key], prefix, ties = size, "" if whole else "model.", header.ties()
            aliases.update({prefix + alias: prefix + kept for alias, kept in ties.items()})
            apart = {_SHARDING, NAMES_KEPT, *ties}
            metadata.update({name: text for name, text in header.metadata.items() if name not in apart})
            for entry in header.entries:
                if weights is not None and not whole and weights.get(entry.name) != key:
                    remark(remarks, f"{key}: {entry.name} is left out; {index} does not say that it lies there")
                    continue
                found.setdefault(prefix + entry.name, []).append((key, entry))
        if weights is not None:
            require_all_there(files, index, weights, found)
        tensors = {fqn: _spec(files, fqn, entries) for fqn, entries in found.items()}
        pieces = {
            fqn: [ListedPiece(entry.box, key, entry.start) for key, entry in entries] for fqn, entries in found.items()
        }
        return ForeignListing(
            format="safetensors",
            tensors=tensors,
            pieces=pieces,
            files=sizes,
            aliases={alias: kept for alias, kept in aliases.items() if kept in tensors and alias not in tensors},
            tree=Group("dict", {"model": Group("module"), **({"metadata": metadata} if metadata else {})}),
            remarks=remarks,
        )


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """A tensor of a file, or a part of one."""

    name: str
    """As the file has it."""

    dtype: str
    """Element type, a key of `DTYPES`."""

    box: Box
    """Which part of the tensor it is."""

    is_shard: bool
    """Whether the file says which part of the tensor it is."""

    start: int
    """Byte of the file where its first element lies."""

    stop: int
    """Byte past its last."""


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """What a file says of itself."""

    entries: list[SafetensorsEntry]
    """Its tensors."""

    metadata: dict[str, str]
    """Text by name, of whoever wrote it."""

    def ties(self) -> dict[str, str]:
        """Return the tied names that the file speaks of, as `safetensors.torch.save_model` leaves them."""
        names = {entry.name for entry in self.entries}
        return {
            alias: kept
            for alias, kept in self.metadata.items()
            if kept in names and alias not in names and alias != _FORMAT
        }


def _spec(files: Readable, fqn: str, entries: list[tuple[str, SafetensorsEntry]]) -> TensorSpec:
    """Return the whole tensor that entries of several files are of.

    Raises:
        CorruptError: A tensor is there twice, or in parts that do not agree.
    """
    (key, first), *others = entries
    for other, entry in others:
        if not (first.is_shard and entry.is_shard):
            raise CorruptError(
                f"{files.url}/{key}: {entry.name} lies in {other} too; expected each tensor once. "
                "Name one of the files, or remove those that do not belong to this checkpoint"
            )
        if (entry.dtype, len(entry.box.stop)) != (first.dtype, len(first.box.stop)):
            raise CorruptError(
                f"{files.url}/{other}: {entry.name} is {entry.dtype} {list(entry.box.shape)}, and {first.dtype} "
                f"{list(first.box.shape)} in {key}; expected parts of one tensor"
            )
    lengths = zip(*(entry.box.stop for _, entry in entries), strict=True)
    return TensorSpec(fqn, first.dtype, tuple(map(max, lengths)))


def read_header(files: Readable, key: str, start: int, stop: int) -> SafetensorsHeader:
    """Return what a file says of itself, every number of it checked.

    Args:
        files: Where it lies.
        key: The file.
        start, stop: Which bytes of it are safetensors: all, or a part that another format has put there.
    Raises:
        CorruptError: It is cut short, or is no safetensors file.
        InvalidError: It holds an element type that Holdfast does not store.
    """
    where = f"{files.url}/{key}"
    if stop - start < 8:
        raise CorruptError(f"{where}: {stop - start} bytes; expected a safetensors file")
    length = int.from_bytes(read_bytes(files, key, start, start + 8, 8), "little")
    if length > min(HEADER_BYTES_MAX, stop - start - 8):
        raise CorruptError(
            f"{where}: bytes {start}–{start + 8} state a header of {length} bytes in {stop - start}; expected at most "
            f"{min(HEADER_BYTES_MAX, stop - start - 8)}. Is it cut short, or a pointer of Git LFS?"
        )
    document = json_object(read_bytes(files, key, start + 8, start + 8 + length, HEADER_BYTES_MAX), where)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(each, str) for each in metadata.values()):
        raise CorruptError(f"{where}: __metadata__ is {str(metadata)[:80]!r}; expected text by name")
    offsets = _offsets(metadata.get(_SHARDING), where)
    entries = list(_entries(document, offsets, start + 8 + length, stop, where))
    _require_gapless(entries, start + 8 + length, stop, where)
    return SafetensorsHeader(entries, metadata)


def _require_gapless(entries: list[SafetensorsEntry], first: int, stop: int, where: str) -> None:
    """Refuse entries that share bytes, and bytes that belong to none, as the format and its own library do.

    Raises:
        CorruptError: Names the entry.
    """
    at, before = first, "the header"
    for entry in sorted(entries, key=lambda each: (each.start, each.stop)):
        if entry.start != at:
            raise CorruptError(
                f"{where}: {entry.name[:200]} begins at byte {entry.start}; expected {at}, where {before[:200]} ends"
            )
        at, before = entry.stop, entry.name
    if at != stop:
        raise CorruptError(
            f"{where}: ends at byte {stop}; expected {at}, where {before[:200]} ends. Was it written twice?"
        )


def _offsets(text: str | None, where: str) -> dict[str, tuple[int, ...]]:
    """Return where each shard begins in its tensor, as DCP's Hugging Face writer and Holdfast's packs say it.

    Raises:
        CorruptError: It says something else.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, entry in json_object(text.encode(), f"{where}: {_SHARDING}").items() if text is not None else ():
        offsets = entry.get("saved_offsets") if isinstance(entry, dict) else None
        if not isinstance(offsets, list) or not _whole_numbers(offsets, _NDIM_MAX):
            raise CorruptError(f"{where}: {_SHARDING}: {name[:200]}: {str(entry)[:80]!r}; expected saved_offsets")
        found[name] = tuple(offsets)
    return found


def _entries(
    document: Mapping[str, object], offsets: Mapping[str, tuple[int, ...]], first: int, size: int, where: str
) -> Iterator[SafetensorsEntry]:
    for name, entry in document.items():
        dtype, shape, bounds = (
            (entry.get("dtype"), entry.get("shape"), entry.get("data_offsets"))
            if isinstance(entry, dict)
            else (None, None, None)
        )
        if not isinstance(dtype, str) or not _whole_numbers(shape, _NDIM_MAX) or not _whole_numbers(bounds, 2):
            raise CorruptError(f"{where}: {name[:200]}: {str(entry)[:80]!r}; expected dtype, shape and data_offsets")
        known = BY_SAFETENSORS.get(dtype)
        if known is None:
            raise InvalidError(
                f"{where}: {name[:200]}: dtype {dtype[:20]}; expected one of {', '.join(BY_SAFETENSORS)}. "
                "Holdfast stores no other"
            )
        assert isinstance(shape, list) and isinstance(bounds, list)
        if len(bounds) != 2 or bounds[1] - bounds[0] != math.prod(shape) * known.itemsize or first + bounds[1] > size:
            raise CorruptError(
                f"{where}: {name[:200]}: {dtype} of shape {shape[:8]} at bytes {bounds} of {size - first}; expected "
                "as many as the shape takes, inside the file. Was it cut short?"
            )
        at = offsets.get(name, (0,) * len(shape))
        if len(at) != len(shape):
            raise CorruptError(f"{where}: {name[:200]}: a shard of shape {shape[:8]} at {at[:8]}; expected as many")
        box = Box(at, tuple(start + length for start, length in zip(at, shape, strict=True)))
        yield SafetensorsEntry(name, known.name, box, name in offsets, first + bounds[0], first + bounds[1])


def _whole_numbers(found: object, count_max: int) -> bool:
    """Return whether this is a list of a few whole numbers that 63 bits hold."""
    return (
        isinstance(found, list)
        and len(found) <= count_max
        and all(type(each) is int and 0 <= each < 1 << 63 for each in found)
    )
