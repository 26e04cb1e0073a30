"""A small good run, and tools to rewrite any file of it so that every digest still fits.

Digests find damage; whoever can write the files can compute them too. What is crafted here therefore gets past them.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

import holdfast

STEP = 7
Document = dict[str, Any]


class Counter:
    """Something with a state of its own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, object]:
        return {"count": self.count, "history": [1, 2, 3]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        if type(state.get("count")) is not int:
            raise TypeError("count is no integer")
        self.count = int(str(state["count"]))


class Scaled(torch.nn.Linear):
    """A module that keeps a number besides its tensors."""

    scale = 1

    def get_extra_state(self) -> object:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.scale = state["scale"] + 0


def state_of(seed: int) -> dict[str, object]:
    """A training state whose every tensor and value depends on the seed."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 40), Scaled(40, 6))
    model[1].scale = seed
    model.register_parameter("tied", model[0].weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=seed * 1e-3)
    model[1](model[0](torch.ones(2, 6))).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "counter": Counter(seed),
        "box": {"queue": [torch.full((3,), float(seed)), {"inner": torch.tensor(seed)}]},
        "half": torch.full((2, 3), seed, dtype=torch.bfloat16),
        "big": torch.arange(8192, dtype=torch.int32).reshape(64, 128) + seed,
        "note": f"seed {seed}",
        "values": {"dtype": torch.float16, "size": torch.Size((1, 2)), "device": torch.device("cpu"), "n": [seed]},
        "own": holdfast.PerRank({"index": seed}),
        "rng": holdfast.RngState(),
    }


def content_of(state: dict[str, Any]) -> dict[str, object]:
    """What of a state a load must bring back, in a form that `==` compares bit by bit."""
    tensors = {f"model.{name}": each for name, each in state["model"].named_parameters()}
    for number, each in enumerate(state["optimizer"].state_dict()["state"].values()):
        tensors |= {f"optimizer.{number}.{key}": value for key, value in each.items()}
    tensors |= {"queue": state["box"]["queue"][0], "inner": state["box"]["queue"][1]["inner"]}
    tensors |= {"half": state["half"], "big": state["big"]}
    return {name: each.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for name, each in tensors.items()} | {
        "scale": state["model"][1].scale,
        "lr": state["optimizer"].param_groups[0]["lr"],
        "count": state["counter"].count,
        "note": state["note"],
        "values": state["values"],
        "own": state["own"].value,
    }


def make_template(root: Path) -> None:
    """Save the good run that every case starts from."""
    settings = holdfast.Settings(chunk_bytes=4096)
    with holdfast.CheckpointManager(root, process_group=False, settings=settings) as manager:
        manager.save(STEP, state_of(3)).wait()


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def column(numbers: list[int], width: int = 8) -> list[object]:
    """A column of the index, as msgpack holds it."""
    return [width, b"".join((number & (1 << 8 * width) - 1).to_bytes(width, "little") for number in numbers)]


def numbers_of(packed: Any) -> list[int]:
    width, data = packed
    return [int(each) for each in np.frombuffer(data, f"<u{width}")]


def seal(body: bytes) -> bytes:
    """Close a JSON object, given without its last newline and brace, by its digest."""
    return body + b',\n "digest": "' + digest(body).encode() + b'"\n}\n'


def sealed(document: Document) -> bytes:
    """A document as text that may hold what our own writer refuses: NaN, surrogates."""
    text = json.dumps(document, indent=1, ensure_ascii=True)
    return seal(text.encode()[:-2])


@dataclass(frozen=True)
class Crafted:
    """One copy of the good run, to be rewritten."""

    root: Path

    @property
    def folder(self) -> Path:
        return self.root / f"step-{STEP:012d}"

    @property
    def manifest_path(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def attempt(self) -> Path:
        (found,) = (
            path for path in self.folder.iterdir() if path.is_dir() and not path.is_symlink() and path.name != "reports"
        )
        return found

    def manifest(self) -> Document:
        document: Document = json.loads(self.manifest_path.read_bytes())
        del document["digest"]
        return document

    def write_manifest(self, document: Document) -> None:
        self.manifest_path.write_bytes(sealed(document))

    def edit_manifest(self, change: Callable[[Document], object]) -> None:
        document = self.manifest()
        change(document)
        self.write_manifest(document)

    def edit_state(self, change: Callable[[Document], object]) -> None:
        """Change the items of the root of the non-tensor state."""
        self.edit_manifest(lambda document: change(document["state"]["$group"]["items"]))

    def index(self) -> Document:
        document: Document = msgspec.msgpack.decode((self.attempt / "index-00000.msgpack").read_bytes())
        return document

    def write_file(self, name: str, data: bytes) -> None:
        """Put a file in the attempt and make the manifest's record of it fit."""
        (self.attempt / name).write_bytes(data)
        self.record(name, len(data), digest(data))

    def record(self, name: str, count: object, content_digest: object) -> None:
        def change(document: Document) -> None:
            for records in (document["packs"], document["parts"], document["indexes"]):
                for each in records:
                    if each[0] == name:
                        each[1:] = [count, content_digest]

        self.edit_manifest(change)

    def edit_index(self, change: Callable[[Document], object], *, totals: bool = True) -> None:
        """Change the index; the manifest's totals follow it unless they are what is wrong."""
        document = self.index()
        change(document)
        self.write_file("index-00000.msgpack", msgspec.msgpack.encode(document))
        if totals:
            self.edit_manifest(lambda manifest: manifest.update(_totals(document)))

    def edit_part(self, change: Callable[[Document], object]) -> None:
        name = "parts/r00000.msgpack"
        document = msgspec.msgpack.decode((self.attempt / name).read_bytes())
        change(document)
        self.write_file(name, msgspec.msgpack.encode(document))

    @property
    def pack(self) -> Path:
        return self.attempt / "r00000.safetensors"

    def header(self) -> Document:
        data = self.pack.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        document: Document = json.loads(data[8 : 8 + length])
        return document

    def write_header(self, text: bytes, *, length: int | None = None) -> None:
        """Replace the header in its place, as far as it has room, and make the pack's digest fit."""
        data = self.pack.read_bytes()
        (room,) = struct.unpack("<Q", data[:8])
        assert len(text) <= room, "the crafted header must fit into the room of the good one"
        header = struct.pack("<Q", room if length is None else length) + text.ljust(room)
        self.pack.write_bytes(header + data[len(header) :])
        self.record(self.pack.name, len(data), self.pack_digest(header))

    def pack_digest(self, header: bytes) -> str:
        """The digest of the pack: header, then the digests of its chunks in file order."""
        index = self.index()
        pieces = _pieces(index)
        return digest(header + b"".join(digests for _, digests in sorted(pieces, key=lambda piece: piece[0])))

    def edit_header(self, change: Callable[[Document], object]) -> None:
        document = self.header()
        change(document)
        self.write_header(json.dumps(document, separators=(",", ":")).encode())

    def become(self, path: Path, make: Callable[[Path], object]) -> None:
        """Remove a file and make something else under its name."""
        path.unlink()
        make(path)

    def sparse(self, path: Path, count: int) -> None:
        """Make a file of many bytes that takes no room."""
        path.unlink(missing_ok=True)
        path.touch()
        os.truncate(path, count)


ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "int64": 8, "float64": 8, "bool": 1, "uint8": 1}


def _totals(index: Document) -> Document:
    try:
        dtypes = [ITEMSIZE[index["dtypes"][number]] for number in numbers_of(index["dtype_numbers"])]
        total, lengths = 0, numbers_of(index["shapes"])
        for itemsize, ndim in zip(dtypes, numbers_of(index["ndims"]), strict=True):
            size = itemsize
            for length in lengths[:ndim]:
                size *= length
            lengths, total = lengths[ndim:], total + size
        return {"tensors": len(index["fqns"]), "tensor_bytes": min(total, (1 << 63) - 1)}
    except (KeyError, ValueError, TypeError, IndexError):
        return {}


def _pieces(index: Document) -> list[tuple[int, bytes]]:
    """Offset and digests of every piece."""
    numbers, ndims = numbers_of(index["piece_tensors"]), numbers_of(index["ndims"])
    dtypes = [ITEMSIZE[index["dtypes"][number]] for number in numbers_of(index["dtype_numbers"])]
    starts, stops = numbers_of(index["piece_starts"]), numbers_of(index["piece_stops"])
    pieces, at, taken = [], 0, 0
    for number, offset in zip(numbers, numbers_of(index["piece_offsets"]), strict=True):
        size = dtypes[number]
        for axis in range(at, at + ndims[number]):
            size *= stops[axis] - starts[axis]
        at += ndims[number]
        count = 16 * -(-size // index["chunk_bytes"])
        pieces.append((offset, index["digests"][taken : taken + count]))
        taken += count
    return pieces
