"""Builds an index from pieces that are added as they are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from holdfast.base.geometry.chunking import DIGEST_BYTES
from holdfast.base.geometry.region import FlatRange, Region, corners
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.plan import Coding, PackPlan
from holdfast.core.format.index.coding_columns import CodingJoiner
from holdfast.core.format.index.columns import Ints
from holdfast.core.format.index.index import Index, register_tensor
from holdfast.core.format.index.piece_columns import in_order
from holdfast.core.format.index.tensor_table import TensorTable


class IndexBuilder:
    """Collects the pieces that a rank wrote."""

    def __init__(self, chunk_bytes: int, tensors: Iterable[TensorSpec] = ()) -> None:
        """Begin with no pieces.

        Args:
            chunk_bytes: Bytes of every chunk but the last of a piece.
            tensors: Tensors to list even without a piece.
        """
        self._chunk_bytes = chunk_bytes
        self._tensors = {tensor.fqn: tensor for tensor in tensors}
        self._packs: dict[str, int] = {}
        self._fqns: list[str] = []
        self._numbers: list[int] = []
        self._offsets: list[int] = []
        self._regions: list[Region] = []
        self._bytes: list[int] = []
        self._digests: list[bytes] = []
        self._coding = CodingJoiner()

    def add(
        self,
        tensor: TensorSpec,
        region: Region,
        pack: str,
        offset: int,
        digests: bytes,
        coding: Coding | None = None,
    ) -> None:
        """Add one piece.

        Args:
            tensor: Its tensor.
            region: Its region of the tensor.
            pack: Name of the pack that holds it.
            offset: Bytes from the start of the pack to the piece.
            digests: The digests of its chunks, 16 bytes each.
            coding: How its chunks are stored, in a coded pack.
        Raises:
            InvalidError: The tensor was added with another dtype or shape.
        """
        register_tensor(self._tensors, tensor, pack)
        self._fqns.append(tensor.fqn)
        self._numbers.append(self._packs.setdefault(pack, len(self._packs)))
        self._offsets.append(offset)
        self._regions.append(region)
        self._bytes.append(region.numel * tensor.itemsize)
        self._digests.append(digests)
        self._coding.add_piece(coding)

    def add_pack(
        self, pack: PackPlan, header_bytes: int, digests: Sequence[bytes], codings: Sequence[Coding] = ()
    ) -> None:
        """Add every piece of a written pack.

        Args:
            pack: The pack.
            header_bytes: Bytes before its data.
            digests: For each piece, the digests of its chunks, 16 bytes each.
            codings: For each piece of a coded pack, how its chunks are stored.
        """
        items = pack.items
        assert len(items) == len(digests), f"{len(digests)} digests of {len(items)} pieces"
        if pack.is_coded:
            offset = header_bytes
            for item, piece_digests, coding in zip(items, digests, codings, strict=True):
                self.add(item.tensor, item.region, pack.name, offset, piece_digests, coding)
                offset += coding.starts[-1]
            return
        for item in items:
            register_tensor(self._tensors, item.tensor, pack.name)
        number = self._packs.setdefault(pack.name, len(self._packs))
        self._fqns += [item.tensor.fqn for item in items]
        self._numbers += [number] * len(items)
        self._offsets += [header_bytes + item.data_offset for item in items]
        self._regions += [item.region for item in items]
        self._bytes += [item.bytes for item in items]
        self._digests += digests
        self._coding.add(len(items), None)

    def index(self) -> Index:
        """Return the index of all pieces added so far."""
        table = TensorTable.of(self._tensors.values())
        flat = [isinstance(region, FlatRange) for region in self._regions]
        starts, stops = zip(*map(corners, self._regions), strict=True) if self._regions else ((), ())
        columns = {
            "tensors": _column(map(table.numbers.__getitem__, self._fqns)),
            "packs": _column(self._numbers),
            "offsets": _column(self._offsets),
            "flat": np.array(flat, dtype=bool),
            "widths": _column(map(len, starts)),
            "starts": _column(chain.from_iterable(starts)),
            "stops": _column(chain.from_iterable(stops)),
            "bytes": _column(self._bytes),
            "chunks": _column(map(len, self._digests)) // DIGEST_BYTES,
            "digests": memoryview(b"".join(self._digests)),
            "coding": self._coding.columns(),
        }
        return Index(self._chunk_bytes, table, list(self._packs), in_order(columns))


def _column(numbers: Iterable[int]) -> Ints:
    return np.fromiter(numbers, np.int64)
