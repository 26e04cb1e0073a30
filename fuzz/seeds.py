"""The first inputs of each target: golden files of every released version, and every tag of a value."""

from __future__ import annotations

import datetime
import io
import pathlib
import pickle  # noqa: TID251 - only writes seeds; the fuzzed reader does not use it
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from zipfile import ZipFile

import msgspec
import numpy as np
import torch

from fuzz import codec, layouts, plans, wire
from fuzz.coded import header_seed, index_seed
from fuzz.dcp import DATA, checkpoint
from fuzz.deepspeed import pickle_of
from holdfast.activations.profile.solved_plan import SolvedPlan
from holdfast.activations.profile.unit_profile import ModelProfile, UnitColumn, UnitOp
from holdfast.backends.foreign.dcp.reader import METADATA
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.core.format.codec_names import CODEC_BASES
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.index_builder import IndexBuilder
from holdfast.core.format.index.overview import encode_overview, split
from holdfast.core.format.values import values
from holdfast.core.format.values.values import _CODEC_OF_TAG, _CONTAINER_OF_TAG

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "format"

_VALUES = (
    b'{"a":[1,2.5,null,true,"x"]}', b'{"$tuple":[1,{"$tuple":[]}]}', b'{"$set":[1,2]}', b'{"$frozenset":["a"]}',
    b'{"$dict":[[1,2],[{"$tuple":[1,null]},3]]}', b'{"$ordered_dict":[["a",1]]}',
    b'{"$ordered_dict":{"items":[["a",1]],"metadata":{}}}', b'{"$counter":[["a",2]]}',
    b'{"$group":{"kind":"dict","items":{"a":1}}}', b'{"$framework":{"kind":"torch.dtype","value":"float32"}}',
    b'{"$framework":{"kind":"torch.size","value":{"$tuple":[1,2]}}}',
    b'{"$framework":{"kind":"torch.device","value":"cpu"}}',
    b'{"$framework":{"kind":"torch.tensor","value":{"dtype":"int8","shape":{"$tuple":[1]},"data":{"$bytes":"AA=="}}}}',
    b'{"$int":"0x10000000000000000"}', b'{"$float":"nan"}', b'{"$float":"nan:7ff8000000000001"}',
    b'{"$complex":[1.0,{"$float":"inf"}]}', b'{"$bytes":"YQ=="}', b'{"$bytearray":"YQ=="}', b'{"$str":"7aCA"}',
    b'{"$datetime":"2024-01-02T03:04:05+00:00"}', b'{"$datetime":["2024-01-02T03:04:05",1]}', b'{"$date":"2024-01-02"}',
    b'{"$time":"03:04:05"}', b'{"$timedelta":[1,2,3]}', b'{"$path":"/a/b"}', b'{"$pure_windows_path":"C:\\\\a"}',
    b'{"$ndarray":{"dtype":"<f4","shape":[2],"data":"AAAAAAAAAAA="}}',
    b'{"$ndarray":{"dtype":"<M8[s]","shape":[],"data":"AAAAAAAAAAA="}}',
    b'{"$ndarray":{"dtype":"<U1","shape":[1],"data":"YQAAAA=="}}', b'{"$scalar":{"dtype":"<f4","value":1.5}}',
    b'{"$scalar":{"dtype":"<c8","data":"AAAAAAAAAAA="}}', b'{"$scalar":{"dtype":"U","value":"a"}}',
    b'{"$tensor":"a.b"}', b'{"$skipped":"a"}', b'{"$per_rank":"a"}',
)  # fmt: skip


_PICKLED = (
    {"a": [1, 2.5, (None, True)], 3: {1, 2}, "b": b"bytes", "c": bytearray(b"x"), "long": 1 << 70},
    [OrderedDict(a=1), Counter("ab"), defaultdict(list, a=[1]), frozenset("a"), 1 + 2j, Namespace(lr=0.1)],
    [np.arange(3.0), np.float32(1.5), datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC), pathlib.PurePosixPath("a/b")],
)


def _torch_file(protocol: int) -> bytes:
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"w": weight, "t": weight.t(), "p": torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16)), "step": 3}
    file = io.BytesIO()
    torch.save({"model": state, "by_number": {0: torch.ones(2, dtype=torch.uint16)}}, file, pickle_protocol=protocol)  # noqa: TID251 - only writes seeds; the fuzzed reader does not use it
    return file.getvalue()


def _imported(manifest: bytes) -> bytes:
    """Return a manifest with the fields that an import adds."""
    inherited = b'"origin": "dcp",\n "masters": {"a": "b"},\n "state": '
    return manifest.replace(b'"r00000.safetensors"', b'"file:///models/a.bin"').replace(b'"state": ', inherited, 1)


def _referencing(index: bytes) -> bytes:
    """Return an index whose packs are files outside the run."""
    document = msgspec.msgpack.decode(index)
    document["packs"] = [["file", f"file:///models/{name}"] for _, name in document["packs"]]
    return msgspec.msgpack.encode(document)


def seeds_of(target: str) -> list[bytes]:
    """Return the seeds of a target."""
    if target == "manifest":
        whole = [_unsealed(path.read_bytes()) for path in sorted(GOLDEN.rglob("manifest.json"))]
        return [*whole, *map(_imported, whole)]
    if target == "index":
        whole = [path.read_bytes() for path in sorted(GOLDEN.rglob("index-*.msgpack"))]
        return [*whole, *map(_referencing, whole)]
    if target == "part":
        return [path.read_bytes() for path in sorted(GOLDEN.rglob("parts/*.msgpack"))]
    if target == "codec":
        return codec.seeds()
    if target.startswith("layout"):
        return layouts.seeds(target)
    if target == "overview":
        return [encode_overview(split(_by_rows(), 1)[1])]
    if target in ("pack", "pack-length"):
        headers = [_header(path.read_bytes()) for path in sorted(GOLDEN.rglob("*.safetensors"))]
        return [header[8:].rstrip() for header in headers] if target == "pack" else headers
    if target in ("value", "framework-value"):
        return [*_VALUES, *(values.dumps(values.encode(value, "")) for value in ({"a": [1, (2.5, None)]}, [{1: b"x"}]))]
    if target == "column":
        return [bytes((width, count)) + bytes(range(width * count)) for width in (1, 2, 4, 8) for count in (0, 1, 3)]
    if target == "name":
        names = ("coded/r00000.safetensors", "enc/r00003-1.safetensors", "parts/r00003.msgpack", "index-00000.msgpack")
        return [name.encode() for name in (*names, "step-000000001000", "../a", "a/./b", "file:///a/b")]
    if target == "shown":
        return [b"plain", "\x1b[31m\u202e\x9b".encode(), b"s\xed\xa0\x80"]
    if target == "safetensors-file":
        return [path.read_bytes() for path in sorted(GOLDEN.rglob("*.safetensors"))]
    if target == "foreign-pickle":
        return [pickle.dumps(value, protocol) for value in _PICKLED for protocol in range(6)]
    if target == "torch-file":
        return [_torch_file(protocol) for protocol in (2, 4)]
    if target == "torch-pickle":
        return [ZipFile(io.BytesIO(_torch_file(protocol))).read("archive/data.pkl") for protocol in (2, 4)]
    if target.startswith("deepspeed-"):
        return [pickle_of(target.removeprefix("deepspeed-"))]
    if target in ("coded-index", "coded-header"):
        return [index_seed() if target == "coded-index" else header_seed()]
    if target in ("plan", "plan-file"):
        return plans.seeds() if target == "plan" else plans.file_seeds()
    if target.startswith("wire-"):
        return wire.seeds(target)
    if target in ("dcp-metadata", "dcp-items"):
        return [checkpoint()[METADATA if target == "dcp-metadata" else DATA]]
    return [bytes(range(number, 200, number + 1)) for number in range(1, 9)]


def _by_rows() -> Index:
    """Return an index that splits into five files: four bands of one tensor, and a scalar."""
    listing = IndexBuilder(4096)
    for row in range(12):
        listing.add(TensorSpec("w", "int8", (12, 3)), Box((row, 0), (row + 1, 3)), "r00000.safetensors", 0, bytes(16))
    listing.add(TensorSpec("z", "float32", ()), Box.whole(()), "r00000.safetensors", 0, bytes(16))
    return listing.index()


def words_of(target: str) -> list[str]:
    """Return words that occur in the inputs of a target."""
    if target in ("manifest", "value", "framework-value"):
        return [
            *_CONTAINER_OF_TAG,
            *_CODEC_OF_TAG,
            "torch.tensor",
            "torch.dtype",
            "torch.size",
            "torch.device",
            "dtype",
        ]
    if target.startswith("plan"):
        return [
            *SolvedPlan.__slots__,
            *ModelProfile.__slots__,
            *UnitOp.__slots__,
            *UnitColumn.__slots__,
            "keep",
            "bits",
        ]
    if target.startswith("coded"):
        return [*CODEC_BASES, "codecs", "chunks", "lengths", "pair", "box", "flat", "chunk_codecs", "chunk_lengths"]
    if target.startswith(("pack", "safetensors")):
        return ["dtype", "shape", "data_offsets", "__metadata__", "BF16", "F32"]
    return []


def _unsealed(data: bytes) -> bytes:
    return data.rpartition(b',\n "digest"')[0]


def _header(data: bytes) -> bytes:
    return data[: 8 + int(struct.unpack("<Q", data[:8])[0])]
