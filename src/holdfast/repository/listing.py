"""Pieces listed one by one, as they are written, until they make an index."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from holdfast.repository.index import Index, in_order, know
from holdfast.repository.pieces import PieceColumns
from holdfast.repository.tensors import TensorTable
from holdfast.spec.chunking import DIGEST_BYTES
from holdfast.spec.plan import PackPlan
from holdfast.spec.region import FlatRange, Region
from holdfast.spec.tensor import TensorSpec


class Listing:
    """What a rank wrote."""

    def __init__(self, chunk_bytes: int, tensors: Iterable[TensorSpec] = ()) -> None:
        """Begin with no piece.

        Args:
            chunk_bytes: Bytes of every chunk but the last of a piece.
            tensors: Tensors to be listed whether or not a piece of them is.
        """
        self._chunk_bytes = chunk_bytes
        self._tensors = {tensor.fqn: tensor for tensor in tensors}
        self._packs: dict[str, int] = {}
        self._fqns: list[str] = []
        self._rows: list[tuple[int, int, bool, int, int, int]] = []
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._digests: list[bytes] = []

    def add(self, tensor: TensorSpec, region: Region, pack: str, offset: int, digests: bytes) -> None:
        """Add one piece.

        Raises:
            InvalidError: The tensor is known with another dtype or shape.
        """
        know(self._tensors, tensor, pack)
        number = self._packs.setdefault(pack, len(self._packs))
        flat = isinstance(region, FlatRange)
        if isinstance(region, FlatRange):
            width = 1
            self._starts.append(region.start)
            self._stops.append(region.stop)
        else:
            width = len(region.start)
            self._starts += region.start
            self._stops += region.stop
        self._fqns.append(tensor.fqn)
        self._rows.append((number, offset, flat, width, region.numel * tensor.itemsize, len(digests) // DIGEST_BYTES))
        self._digests.append(digests)

    def add_pack(self, pack: PackPlan, header_bytes: int, digests: Iterable[bytes]) -> None:
        """Add every piece of a pack that was written.

        Args:
            pack: The pack.
            header_bytes: Bytes before its data.
            digests: Of each piece, those of its chunks.
        """
        for item, each in zip(pack.items, digests, strict=True):
            self.add(item.tensor, item.region, pack.name, header_bytes + item.data_offset, each)

    def index(self) -> Index:
        """Return what is listed by now."""
        table = TensorTable.of(self._tensors.values())
        rows = np.array(self._rows, dtype=np.int64).reshape(len(self._rows), 6)
        pieces = PieceColumns(
            tensors=np.fromiter(map(table.numbers.__getitem__, self._fqns), np.int64, len(self._fqns)),
            packs=rows[:, 0],
            offsets=rows[:, 1],
            flat=rows[:, 2].astype(bool),
            widths=rows[:, 3],
            starts=np.array(self._starts, dtype=np.int64),
            stops=np.array(self._stops, dtype=np.int64),
            bytes=rows[:, 4],
            chunks=rows[:, 5],
            digests=memoryview(b"".join(self._digests)),
        )
        return Index(self._chunk_bytes, table, list(self._packs), in_order(pieces))
