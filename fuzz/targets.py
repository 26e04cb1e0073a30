"""The fuzz targets. Each takes any bytes; an exception from a target is an error in Holdfast.

Targets compute digests that match, so that the code behind the check of the digest is reached.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from fuzz import codec, coded, dcp, deepspeed, layouts, plans, wire
from holdfast._face.value_words import value_lines
from holdfast.backends.foreign.huggingface.safetensors_reader import SafetensorsFormat
from holdfast.backends.foreign.pickles.reader import unpickled
from holdfast.backends.foreign.torch.reader import TorchSaveFormat
from holdfast.backends.foreign.values import to_value
from holdfast.backends.stores.memory import MemoryStore
from holdfast.backends.torch.containers import put_together
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.region import region_boxes
from holdfast.base.ports.keys import split_key
from holdfast.base.types.plan import WantedBoxes
from holdfast.base.types.values import TensorRef
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.index.columns import decode_column, encode_column
from holdfast.core.format.index.foreign_index import index_foreign
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.index_file import IndexDocument, decode_index, encode_index, index_of
from holdfast.core.format.index.overview import decode_overview, encode_overview
from holdfast.core.format.manifest import decode_manifest, encode_manifest
from holdfast.core.format.names import (
    is_file_url,
    is_index_name,
    is_pack_name,
    is_part_name,
    step_folder,
    step_of_folder,
)
from holdfast.core.format.pack import entries_of
from holdfast.core.format.part import decode_part, encode_part
from holdfast.core.format.values import values
from holdfast.core.format.values.values import _CODEC_OF_TAG, _CONTAINER_OF_TAG
from holdfast.core.plan.reads import load_plan
from holdfast.errors import CheckpointError, CorruptError, InvalidError, printable
from holdfast.stored.checkpoint.coverage import uncovered_names

OVERVIEW_FILES = 5
"""Index files of each fuzzed overview."""

ELEMENTS_COUNTED_MAX = 5000
"""Largest tensor that is compared with a count of every element."""


def manifest(data: bytes) -> None:
    """A sealed manifest: decoding, encoding and decoding it again yields the same."""
    sealed = data + b',\n "digest": "' + hex_digest_of(data).encode() + b'"\n}\n'
    try:
        decoded = decode_manifest(sealed, "here")
    except CheckpointError:
        return
    again = encode_manifest(decoded)
    assert encode_manifest(decode_manifest(again, "here")) == again


def index(data: bytes) -> None:
    """An index file."""
    try:
        decoded = decode_index(data, "here")
    except CheckpointError:
        return
    again = encode_index(decoded)
    assert encode_index(decode_index(again, "here")) == again
    _prove(decoded)


def index_document(data: bytes) -> None:
    """An index whose numbers are fuzzed rather than bytes, so that holes and overlaps are frequent."""
    try:
        decoded = index_of(_document(data), "here")
    except CorruptError:
        return
    assert encode_index(decode_index(encode_index(decoded), "here")) == encode_index(decoded)
    _prove(decoded)


def part(data: bytes) -> None:
    """The part of one rank."""
    try:
        decoded = decode_part(data, "here")
    except CheckpointError:
        return
    again = encode_part(decoded)
    assert encode_part(decode_part(again, "here")) == again


def overview(data: bytes) -> None:
    """The overview of a split index, with as many files as the seed has."""
    try:
        decoded = decode_overview(data, OVERVIEW_FILES, "here")
    except CorruptError:
        return
    again = encode_overview(decoded)
    assert encode_overview(decode_overview(again, OVERVIEW_FILES, "here")) == again
    for tensor in list(decoded.table.specs.values())[:8]:
        files = decoded.files_for(tensor.fqn, Box.whole(tensor.global_shape))
        assert files == sorted(set(files))
        assert set(files) <= set(range(OVERVIEW_FILES))


def pack(data: bytes) -> None:
    """The header of a pack, with its true length."""
    try:
        entries = entries_of(struct.pack("<Q", len(data)) + data, "here")
    except CorruptError:
        return
    for entry in entries:
        assert type(entry.fqn) is str
        assert all(type(number) is int for number in (*entry.shape, entry.start, entry.stop))
        hash(entry)


def pack_length(data: bytes) -> None:
    """The header of a pack, with any length."""
    try:
        entries_of(data, "here")
    except CorruptError:
        return
    assert struct.unpack("<Q", data[:8])[0] == len(data) - 8


def value(data: bytes) -> None:
    """The JSON text of a value: decoding and encoding it again yields the same, and it can be displayed."""
    try:
        decoded = values.decode(values.loads(data), "")
    except CorruptError:
        return
    again = values.dumps(values.encode(decoded, ""))
    assert values.dumps(values.encode(values.decode(values.loads(again), ""), "")) == again
    for line in value_lines({"value": decoded}, whole_names=True):
        assert line.isprintable(), line


def framework_value(data: bytes) -> None:
    """The JSON text of a value, converted by a framework as on load."""
    try:
        put_together(values.decode(values.loads(data), ""), lambda leaf: leaf)
    except (CorruptError, InvalidError):
        return


def value_document(data: bytes) -> None:
    """A document whose structure is fuzzed rather than its text, so that nearly valid contents are frequent."""
    text = values.dumps(_value(_drawn(data), 0))
    value(text)
    framework_value(text)


def column(data: bytes) -> None:
    """A column of numbers."""
    if len(data) < 2:
        return
    try:
        numbers = decode_column((data[0], data[2:]), "here", data[1] if data[1] < 128 else None)
    except CorruptError:
        return
    assert np.array_equal(decode_column(encode_column(numbers), "here", len(numbers)), numbers)


def name(data: bytes) -> None:
    """Names of files and folders: an accepted name cannot lead out of its folder."""
    text = data.decode("utf-8", "surrogateescape")
    if is_pack_name(text) or is_part_name(text) or is_index_name(text):
        assert text.isascii()
        assert ".." not in text
        assert split_key(text) == tuple(text.split("/"))
    if is_file_url(text):
        assert not is_pack_name(text)
        path = text.removeprefix("file://")
        assert os.path.isabs(path) and os.path.normpath(path) == path
    step = step_of_folder(text)
    if step is not None:
        assert step_folder(step) == text + "/"
    try:
        parts = split_key(text)
    except InvalidError:
        return
    assert not any(part in ("", ".", "..") or "\0" in part for part in parts)


def shown(data: bytes) -> None:
    """Text for a terminal."""
    text = printable(data.decode("utf-8", "surrogatepass" if data[:1] == b"s" else "surrogateescape"))
    assert text.isprintable()
    text.encode("utf-8")
    assert printable(text) == text


def _shown(data: bytes) -> None:
    try:
        shown(data)
    except UnicodeDecodeError:
        return


def _document(data: bytes) -> IndexDocument:
    """Return an index of few, small numbers drawn from bytes."""
    draw = _drawn(data)
    tensors = next(draw) % 4
    ndims = [next(draw) % 4 for _ in range(tensors)]
    shapes = [next(draw) % 12 for ndim in ndims for _ in range(ndim)]
    dtypes = sorted(DTYPES)[next(draw) % 8 : 12]
    numbers = sorted(next(draw) % (tensors + 1) for _ in range(next(draw) % 10))
    kinds = [next(draw) % 8 == 7 for _ in numbers]
    widths = [1 if kind else (ndims[at] if at < tensors else 0) for kind, at in zip(kinds, numbers, strict=True)]
    starts = [next(draw) % 12 for width in widths for _ in range(width)]
    stops = [next(draw) % 13 if next(draw) % 2 else 12 for width in widths for _ in range(width)]
    first = [sum(ndims[:number]) for number in range(tensors)]
    bounds = [
        bound
        for number, kind in zip(numbers, kinds, strict=True)
        if number < tensors
        for bound in _bounds(shapes[first[number] : first[number] + ndims[number]], kind)
    ]
    if len(bounds) == len(stops) and next(draw) % 8:
        stops = [min(stop, bound) if stop != 12 else bound for stop, bound in zip(stops, bounds, strict=True)]
        starts = [min(start, stop) for start, stop in zip(starts, stops, strict=True)]
    dtype_numbers = [next(draw) % len(dtypes) for _ in range(tensors)]
    counts = 0
    at = 0
    for number, width, kind in zip(numbers, widths, kinds, strict=True):
        lengths = [
            max(stop - start, 0) for start, stop in zip(starts[at : at + width], stops[at : at + width], strict=True)
        ]
        at += width
        counts += bool(math.prod(lengths)) and (number < tensors or kind)
    return IndexDocument(
        chunk_bytes=1 << 16,
        fqns=[f"t{number}" for number in range(tensors)],
        dtypes=dtypes,
        dtype_numbers=encode_column(dtype_numbers),
        ndims=encode_column(ndims),
        shapes=encode_column(shapes),
        packs=[("own", "r00000.safetensors")],
        piece_tensors=encode_column(numbers),
        piece_packs=encode_column([0] * len(numbers)),
        piece_offsets=encode_column([next(draw) for _ in numbers]),
        piece_starts=encode_column(starts),
        piece_stops=encode_column(stops),
        digests=bytes(16 * counts),
        piece_kinds=encode_column([int(kind) for kind in kinds]) if any(kinds) else None,
    )


_TAGS = sorted({*_CONTAINER_OF_TAG, *_CODEC_OF_TAG})
_WORDS = (
    "", "a", "items", "metadata", "kind", "value", "dtype", "shape", "data", "dict", "optimizer", "stateful", "float32",
    "int8", "<f4", "<U1", "|b1", "<M8[s]", "U", "S", "AA==", "AAAAAAAAAAA=", "7aCA", "0x10000000000000000",
    "nan", "-inf", "nan:7ff8000000000001", "2024-01-02", "03:04:05", "2024-01-02T03:04:05+00:00", "cpu",
    "torch.dtype", "torch.size", "torch.device", "torch.tensor", "load", "__class__", "\x1b[31m", "0x" + "f" * 5000,
)  # fmt: skip
_PLAIN = (None, True, False, 0, 1, -1, 2, 64, 255, 1 << 62, -(1 << 63), 0.0, -0.0, 1.5, 1e308, 5e-324)
_WIDE = ("0x10000000000000000", "-0xffffffffffffffffff", "0x" + "f" * 5000)
_FRAMEWORK_KINDS = ("torch.dtype", "torch.size", "torch.device", "torch.tensor")
_FIELDS = (("dtype", "shape", "data"), ("dtype", "value"), ("dtype", "data"), ("kind", "value"), ("kind", "items"),
           ("items", "metadata"))  # fmt: skip


def _value(draw: Iterator[int], depth: int) -> object:
    """Return a document drawn from bytes."""
    choice = next(draw) % 12 if depth < 6 else 0
    if choice < 2:
        return _PLAIN[next(draw) % len(_PLAIN)]
    if choice < 5:
        return _WORDS[next(draw) % len(_WORDS)]
    if choice < 7:
        return [_value(draw, depth + 1) for _ in range(next(draw) % 4)]
    if choice < 8:
        return [[_value(draw, depth + 1), _value(draw, depth + 1)] for _ in range(next(draw) % 3)]
    if choice < 9:
        return {name: _value(draw, depth + 1) for name in _FIELDS[next(draw) % len(_FIELDS)]}
    if choice < 10:
        return {_WORDS[next(draw) % len(_WORDS)]: _value(draw, depth + 1) for _ in range(next(draw) % 3)}
    tag = _TAGS[next(draw) % len(_TAGS)]
    if tag == "$framework" and next(draw) % 2:
        return {tag: {"kind": _FRAMEWORK_KINDS[next(draw) % 4], "value": _value(draw, depth + 1)}}
    if tag == "$int" and next(draw) % 4:
        return {tag: _WIDE[next(draw) % len(_WIDE)]}
    if tag in ("$dict", "$counter", "$ordered_dict") and next(draw) % 4:
        return {tag: [[_value(draw, depth + 1), _value(draw, depth + 1)] for _ in range(next(draw) % 3 + 1)]}
    return {tag: _value(draw, depth + 1)}


def _bounds(shape: list[int], flat: bool) -> list[int]:
    return [math.prod(shape)] if flat else shape


def _drawn(data: bytes) -> Iterator[int]:
    yield from data
    while True:
        yield 0


def _prove(decoded: Index) -> None:
    """Compare the proof of exact cover, and the elements that a load would place, with a count of every element."""
    if decoded.pieces.coding is not None:
        return  # Its pairs may be missing; `coded` looks at these.
    small = [spec for spec in decoded.tensors.values() if math.prod(spec.global_shape) <= ELEMENTS_COUNTED_MAX]
    if sum(len(decoded.pieces_of(spec.fqn)) for spec in small) > 200:
        return
    wrong = set(uncovered_names(decoded, 12345))
    for tensor in small:
        counts = np.zeros(tensor.global_shape, dtype=np.int64)
        for piece in decoded.pieces_of(tensor.fqn):
            for box in region_boxes(piece.region, tensor.global_shape):
                counts[box.relative_to((0,) * counts.ndim)] += 1
        exact = bool((counts == 1).all())
        assert exact == (tensor.fqn not in wrong), (tensor, counts)
        whole = Box.whole(tensor.global_shape)
        spans = sorted(
            (piece.offset, piece.offset + piece.bytes) for piece in decoded.pieces_of(tensor.fqn) if piece.bytes
        )
        apart = all(later[0] >= earlier[1] for earlier, later in pairwise(spans))
        if exact and apart and len({piece.pack for piece in decoded.pieces_of(tensor.fqn)}) <= 1:
            plan = load_plan([WantedBoxes(tensor.fqn, (whole,))], decoded.pieces_near, 1 << 22)
            placed = sum(part.box.numel for run in plan.runs for chunk in run.chunks for part in chunk.parts)
            assert placed == math.prod(tensor.global_shape), tensor


def safetensors_file(data: bytes) -> None:
    """A safetensors file of another system: its pieces share no byte, and are inside the file."""
    store = MemoryStore("fuzz-safetensors-file")
    store.put("model.safetensors", data)
    try:
        listing = SafetensorsFormat().listing(store, "model.safetensors")
        index_foreign(listing, "here")
    except CheckpointError as error:
        assert str(error).startswith(("here", store.url))
        return
    listed_bytes = 0
    for fqn, (piece,) in listing.pieces.items():
        listed_bytes += (nbytes := piece.region.numel * listing.tensors[fqn].itemsize)
        assert 8 <= piece.offset <= piece.offset + nbytes <= len(data)
    assert listed_bytes <= len(data)


def foreign_pickle(data: bytes) -> None:
    """A pickle of another system, and the values that a checkpoint would store."""
    try:
        decoded = unpickled(data, "here")
    except CheckpointError as error:
        assert str(error).startswith("here")
        return
    kept = to_value(decoded, "value", lambda fqn, tensor: TensorRef(fqn), [])
    try:
        assert values.encode(kept, "value") is not kept or values.is_json_scalar(kept)
    except InvalidError:
        return  # A value of a known type, but larger or deeper than a checkpoint stores.


def torch_file(data: bytes) -> None:
    """A file of torch.save: every piece is inside the file."""
    store = MemoryStore("fuzz-torch-file")
    store.put("state.pt", data)
    try:
        listing = TorchSaveFormat().listing(store, "state.pt")
    except CheckpointError as error:
        assert "state.pt" in str(error)
        return
    for fqn, pieces in listing.pieces.items():
        itemsize = listing.tensors[fqn].itemsize
        for piece in pieces:
            assert 0 <= piece.offset <= piece.offset + piece.region.numel * itemsize <= len(data)
    index_foreign(listing, "here")


def torch_pickle(data: bytes) -> None:
    """The pickle in a file of torch.save, beside storages for its tensors."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        for number in range(4):
            archive.writestr(f"archive/data/{number}", bytes(24))
    torch_file(file.getvalue())


TARGETS: dict[str, Callable[[bytes], None]] = {
    "manifest": manifest,
    "index": index,
    "index-document": index_document,
    "part": part,
    "overview": overview,
    "pack": pack,
    "pack-length": pack_length,
    "value": value,
    "framework-value": framework_value,
    "value-document": value_document,
    "column": column,
    "name": name,
    "shown": _shown,
    "safetensors-file": safetensors_file,
    "foreign-pickle": foreign_pickle,
    "torch-file": torch_file,
    "torch-pickle": torch_pickle,
    "deepspeed-model": deepspeed.listed("model"),
    "deepspeed-optimizer": deepspeed.listed("optimizer"),
    "coded-index": coded.index,
    "coded-document": coded.document,
    "coded-header": coded.header,
    "dcp-metadata": dcp.metadata,
    "dcp-items": dcp.items,
    "dcp-document": dcp.document,
    "codec": codec.codec,
    "layout": layouts.file,
    "layout-template": layouts.template,
    "layout-expression": layouts.expression,
    "plan-file": plans.file,
    "plan": plans.plan,
    "wire-header": wire.header,
    "wire-target": wire.target,
    "wire-page": wire.page,
    "wire-task": wire.task,
}
"""Every target by name."""
