"""Damage done to a checkpoint on a disk, of every kind that a resume must see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import holdfast


def flip(path: Path, offset: int) -> None:
    """Change one bit of the byte at an offset; negative ones count from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def manifest_of(step: Path) -> Path:
    return step / "manifest.json"


def index_of(step: Path) -> Path:
    (found,) = step.glob("*/index-00000.msgpack")
    return found


def largest_pack_of(step: Path) -> Path:
    return max(step.glob("*/*.safetensors"), key=lambda path: path.stat().st_size)


def damage_a_chunk(step: Path) -> None:
    """Flip a bit inside a tensor."""
    checkpoint = holdfast.open_checkpoint(step)
    pack = largest_pack_of(step)
    piece = next(
        piece
        for fqn in checkpoint.tensors
        for piece in checkpoint.pieces(fqn)
        if piece.pack == pack.name and piece.bytes
    )
    flip(pack, piece.offset)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "manifest-bit": lambda step: flip(manifest_of(step), 300),
    "manifest-cut": lambda step: truncate(manifest_of(step)),
    "manifest-empty": lambda step: manifest_of(step).write_bytes(b""),
    "index-bit": lambda step: flip(index_of(step), -20),
    "index-missing": lambda step: index_of(step).unlink(),
    "pack-missing": lambda step: largest_pack_of(step).unlink(),
    "pack-cut": lambda step: truncate(largest_pack_of(step)),
    "chunk-bit": damage_a_chunk,
}
