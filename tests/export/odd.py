"""A format that nobody has: tensors at odd offsets, cut in boxes, with gaps, literals and checksums between them."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from holdfast.base.geometry.box import Box
from holdfast.base.types.export import Checksum, ExportContent, ExportFile, ExportOptions, ExportTensor

if TYPE_CHECKING:
    import torch


class OddWriter:
    """Puts every tensor, cut in two, at an odd place of one of two files, each half with a checksum before it."""

    def __init__(self, names: Sequence[str] = ("odd.bin", "deep/er/odd.bin")) -> None:
        self._names = names

    @property
    def name(self) -> str:
        return "odd"

    def files(self, content: ExportContent, options: ExportOptions) -> Sequence[ExportFile]:
        chance = random.Random(7)
        found = []
        for number, name in enumerate(self._names):
            at, literals, tensors, checksums = 0, [], [], []
            for fqn in sorted(content.tensors)[number :: len(self._names)]:
                spec = content.tensors[fqn]
                dtype = options.dtype if options.dtype and spec.dtype == "float32" else spec.dtype
                for box in _halves(Box.whole(spec.global_shape)):
                    literal = f"<{fqn}>".encode()
                    literals.append((at, literal))
                    at += len(literal) + chance.randrange(1, 9)
                    sum_at, at = at, at + 4 + chance.randrange(9)
                    tensor = ExportTensor(fqn, dtype, box, at)
                    tensors.append(tensor)
                    checksums.append(Checksum(at, at + tensor.bytes, (sum_at,)))
                    at += tensor.bytes + chance.randrange(9)
            found.append(
                ExportFile(
                    name=name,
                    bytes=at,
                    literals=tuple(literals),
                    tensors=tuple(tensors),
                    checksums=tuple(checksums),
                )
            )
        return found


def _halves(box: Box) -> list[Box]:
    if not box.stop or box.stop[-1] < 2:
        return [box]
    cut = box.stop[-1] // 2
    return [Box(box.start, (*box.stop[:-1], cut)), Box((*box.start[:-1], cut), box.stop)]


def content_of(file: ExportFile, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return what a file must be, put together whole."""
    import torch  # Not by the processes that are killed: they would spend their lives importing it.

    content = bytearray(file.bytes)
    for at, data in file.literals:
        content[at : at + len(data)] = data
    for each, checksum in zip(file.tensors, file.checksums, strict=True):
        part = tensors[each.fqn][each.box.relative_to((0,) * len(each.box.start))].to(getattr(torch, each.dtype))
        data = part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if part.numel() else b""
        content[each.offset : each.offset + each.bytes] = data
        for at in checksum.at:
            content[at : at + 4] = zlib.crc32(data).to_bytes(4, "little")
    return bytes(content)
