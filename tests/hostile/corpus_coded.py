"""Crafted checkpoints with coded pieces: headers, indexes and stored chunks that no writer makes."""

from __future__ import annotations

import atexit
import json
import shutil
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

import holdfast
from tests.hostile.cases import HARMLESS, Case
from tests.hostile.crafting import STEP, Crafted, Document, column, digest, numbers_of, state_of
from tests.support.tuning import tuned


@cache
def _template() -> Path:
    """Save the good run with compression, and a weight with its master beside it."""
    folder = tempfile.mkdtemp(prefix="holdfast-coded-")
    atexit.register(shutil.rmtree, folder)
    root = Path(folder) / "run"
    master = torch.sin(torch.arange(4096, dtype=torch.float32)).reshape(64, 64)
    state = {**state_of(3), "pair": {"weight": master.bfloat16(), "master": master}}
    settings = tuned(holdfast.Settings(chunk_bytes=4096, compression="on"), coded_bytes_min=4096)
    with holdfast.CheckpointManager(root, process_group=False, settings=settings) as manager:
        manager.save(STEP, state).wait()
    return root


def _coded(change: Callable[[Crafted], object]) -> Callable[[Crafted], object]:
    """Craft a run with compression instead of the one that is given."""

    def craft(crafted: Crafted) -> None:
        shutil.rmtree(crafted.root)
        shutil.copytree(_template(), crafted.root)
        change(crafted)

    return craft


def _index(change: Callable[[Document], object]) -> Callable[[Crafted], object]:
    return _coded(lambda crafted: crafted.edit_index(change))


def _coding(**fields: object) -> Callable[[Crafted], object]:
    return _index(lambda document: document["coding"].update(fields))


def _chunks_of(document: Document, fqn: str) -> slice:
    """Return where the chunks of a coded tensor are in the columns by chunk; every tensor has one piece."""
    first = 0
    for number, pack, count in zip(
        numbers_of(document["piece_tensors"]), numbers_of(document["piece_packs"]), _chunk_counts(document), strict=True
    ):
        if not document["packs"][pack][1].startswith("coded/"):
            continue
        if document["fqns"][number] == fqn:
            return slice(first, first + count)
        first += count
    raise AssertionError(fqn)


def _chunk_counts(document: Document) -> list[int]:
    from tests.hostile.crafting import _pieces

    return [len(digests) // 16 for _, digests in _pieces(document)]


def _lengths(fqn: str, lengths: list[int]) -> Callable[[Crafted], object]:
    """Replace the first stored lengths of a tensor."""

    def change(document: Document) -> None:
        numbers, at = numbers_of(document["coding"]["chunk_lengths"]), _chunks_of(document, fqn).start
        numbers[at : at + len(lengths)] = lengths
        document["coding"]["chunk_lengths"] = column(numbers)

    return _index(change)


def _moved(fqn: str, by: int) -> Callable[[Crafted], object]:
    """Move a piece in its pack."""

    def change(document: Document) -> None:
        offsets = numbers_of(document["piece_offsets"])
        offsets[document["fqns"].index(fqn)] += by
        document["piece_offsets"] = column(offsets)

    return _index(change)


def _pair(name: str) -> Callable[[Crafted], object]:
    """Name another pair."""
    return _coding(pairs=[name])


def _everything_paired(document: Document) -> None:
    """Let weight and master be coded against each other."""
    coding = document["coding"]
    residual = coding["codecs"].index("residual") + 1
    codecs = bytearray(coding["chunk_codecs"])
    chunks = _chunks_of(document, "pair.weight")
    codecs[chunks] = bytes([residual]) * (chunks.stop - chunks.start)
    names = [document["fqns"][number] for number, pack in
             zip(numbers_of(document["piece_tensors"]), numbers_of(document["piece_packs"]), strict=True)
             if document["packs"][pack][1].startswith("coded/")]  # fmt: skip
    pairs = {"pair.weight": 1, "pair.master": 2}
    coding |= {
        "chunk_codecs": bytes(codecs),
        "pairs": ["pair.master", "pair.weight"],
        "piece_pairs": column([pairs.get(name, 0) for name in names]),
    }


def _stored(fqn: str, make: Callable[[bytes], bytes]) -> Callable[[Crafted], object]:
    """Replace the stored bytes of the first chunk of a tensor by as many others."""

    def craft(crafted: Crafted) -> None:
        index = crafted.index()
        number = index["fqns"].index(fqn)
        path = crafted.attempt / index["packs"][numbers_of(index["piece_packs"])[number]][1]
        offset = numbers_of(index["piece_offsets"])[number]
        length = numbers_of(index["coding"]["chunk_lengths"])[_chunks_of(index, fqn).start]
        data = bytearray(path.read_bytes())
        stored = make(bytes(data[offset : offset + length]))
        assert len(stored) <= length
        data[offset : offset + length] = stored.ljust(length, b"\0")
        path.write_bytes(data)

    return _coded(craft)


def _frame(window_power: int, content_bytes: int) -> Callable[[bytes], bytes]:
    """Return a function that makes a stored form of `zstd` whose frame claims a window and a content of these sizes."""
    header = struct.pack("<IBBQ", 0xFD2FB528, 0xC0, (window_power - 10) << 3, content_bytes)
    return lambda stored: _sections((header + b"\x01\0\0").ljust(len(stored) - 4, b"\0"))


def _sections(*sections: bytes) -> bytes:
    return struct.pack(f"<{len(sections)}I", *map(len, sections)) + b"".join(sections)


def _exception_beyond(stored: bytes) -> bytes:
    """Return a stored form of `residual` whose one exception is none of its elements."""
    low, places, uppers = struct.unpack("<3I", stored[:12])
    assert places == uppers == 0
    return _sections(stored[12 : 12 + low - 8], b"\xff" * 4, bytes(4))


def _header(change: Callable[[Document, Document], object]) -> Callable[[Crafted], object]:
    """Change notes and metadata in the header of the pack with the master, its digest with it."""

    def craft(crafted: Crafted) -> None:
        (path,) = (path for path in (crafted.attempt / "coded").iterdir() if b"pair.master" in path.read_bytes()[:4096])
        data = path.read_bytes()
        (room,) = struct.unpack("<Q", data[:8])
        document = json.loads(data[8 : 8 + room])
        notes = json.loads(document["__metadata__"]["holdfast.pieces"])
        change(document["__metadata__"], notes)
        document["__metadata__"]["holdfast.pieces"] = json.dumps(notes, separators=(",", ":"))
        text = json.dumps(document, separators=(",", ":")).encode()
        header = data[:8] + text.ljust(room)
        assert len(header) == 8 + room
        path.write_bytes(header + data[8 + room :])
        index = crafted.index()
        from tests.hostile.crafting import _pieces

        found = [
            piece
            for piece, pack in zip(_pieces(index), numbers_of(index["piece_packs"]), strict=True)
            if index["packs"][pack][1] == f"coded/{path.name}"
        ]
        of_chunks = b"".join(digests for _, digests in sorted(found, key=lambda piece: piece[0]))
        crafted.record(f"coded/{path.name}", len(data), digest(header + of_chunks))

    return _coded(craft)


def _manifest(change: Callable[[Document], object]) -> Callable[[Crafted], object]:
    return _coded(lambda crafted: crafted.edit_manifest(change))


def _minor_three(document: Document) -> None:
    document["holdfast"]["format"] = [1, 3]


CASES = [
    Case("a run with compression, unchanged", HARMLESS, _coded(lambda crafted: crafted.edit_index(lambda _: None))),
    Case("coding absent", "tensors", _index(lambda document: document.pop("coding"))),
    Case("coding of a newer codec", "tensors", _coding(codecs=["p", "q", "r", "s", "t"])),
    Case("codecs of too few chunks", "tensors", _coding(chunk_codecs=b"\1")),
    Case("lengths of too few chunks", "tensors", _coding(chunk_lengths=column([1]))),
    Case("a chunk of no bytes", "tensors", _lengths("big", [0])),
    Case("a chunk of exabytes", "tensors", _lengths("big", [1 << 60])),
    Case("a chunk that wraps around", "tensors", _lengths("big", [(1 << 32) + 5])),
    Case("a chunk one byte shorter", "read", _lengths("pair.weight", [1000])),
    Case("a piece one byte later", "tensors", _moved("pair.weight", 1)),
    Case("a piece beyond its pack", "tensors", _moved("big", 1 << 40)),
    Case("a piece in the header", "read", _moved("big", -4096)),
    Case("a pair that is missing", "tensors", _pair("nothing")),
    Case("a pair of another shape", "tensors", _pair("big")),
    Case("a pair that is itself", "tensors", _pair("pair.master")),
    Case("a pair without a name", "tensors", _pair("")),
    Case("pairs in a circle", "tensors", _index(_everything_paired)),
    Case("a frame that claims exabytes", "read", _stored("big", _frame(10, 1 << 60))),
    Case("a frame that claims a window of gigabytes", "read", _stored("big", _frame(31, 4096))),
    Case("a frame of zeros", "read", _stored("big", lambda stored: bytes(len(stored)))),
    Case("sections of too much", "read", _stored("pair.weight", lambda _: struct.pack("<3I", *[1 << 31] * 3))),
    Case("sections of too little", "read", _stored("pair.weight", lambda stored: _sections(b"", stored[12:], b""))),
    Case("an exception beyond the chunk", "read", _stored("pair.master", _exception_beyond)),
    Case("other stored bytes", "read", _stored("pair.weight", lambda stored: stored[:-1] + bytes([stored[-1] ^ 1]))),
    Case("tensors of more than 4096 times their packs", "tensors",
         _manifest(lambda document: document.update(tensor_bytes=1 << 50))),
    Case("a coded pack in a manifest of 1.3", HARMLESS, _manifest(_minor_three)),
    Case("a coded header without chunk size", "verify",
         _header(lambda metadata, _: metadata.pop("holdfast.chunk_bytes"))),
    Case("a coded header of other lengths", "verify",
         _header(lambda _, notes: notes["pair.master"].update(lengths=[1, 2, 3, 4]))),
    Case("a coded header of another pair", "verify", _header(lambda _, notes: notes["pair.master"].update(pair="big"))),
]  # fmt: skip
