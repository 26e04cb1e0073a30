"""The index of a large checkpoint. Its files are read on demand, only where a request needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import Region, corners
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.manifest import FileRecord, Manifest
from holdfast.base.types.plan import Piece
from holdfast.core.format.index.index import Index, IndexMerger
from holdfast.core.format.index.index_checks import require_pairs, require_places
from holdfast.core.format.index.index_file import decode_index
from holdfast.core.format.index.overview import Overview
from holdfast.errors import CorruptError

ReadFiles = Callable[[Sequence[FileRecord]], Iterable[bytes]]
"""Returns the content of index files, each proven by its digest."""


class SplitIndex:
    """All tensors, and the pieces of the index files that were read so far."""

    def __init__(self, overview: Overview, manifest: Manifest, read_files: ReadFiles, where: str) -> None:
        """Read nothing yet.

        Args:
            overview: Every tensor, and the span of each index file.
            manifest: The commit record that names the files.
            read_files: Reads index files.
            where: Folder of the checkpoint, for messages.
        """
        self._overview, self._manifest, self._read_files, self._where = overview, manifest, read_files, where
        self._files: dict[int, Index] = {}
        self._by_region: dict[str, dict[Region, Piece]] = {}
        """Pieces by region, of tensors that others are coded against."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor by FQN, ascending."""
        return self._overview.table.specs

    @property
    def bytes_read(self) -> int:
        """Bytes of the index files that were read."""
        return sum(self._manifest.indexes[number].bytes for number in self._files)

    def pieces_of(self, fqn: str) -> Sequence[Piece]:
        """Return the stored pieces of a tensor, in order of start."""
        pieces = [self._with_pair(piece) for index in self.files_of(fqn) for piece in index.pieces_of(fqn)]
        return sorted(pieces, key=lambda piece: corners(piece.region))

    def pairs_of(self, fqn: str) -> Sequence[str]:
        """Return the FQNs of the tensors that pieces of a tensor are coded against."""
        return sorted({pair for index in self.files_of(fqn) for pair in index.pairs_of(fqn)})

    def files_of(self, fqn: str) -> list[Index]:
        """Return the index files that list pieces of a tensor. Offsets in packs are not checked.

        Such a file may lack the pieces that others are coded against.
        """
        if fqn not in self.tensors:
            return []
        needed = self._overview.files_for(fqn, Box.whole(self.tensors[fqn].global_shape))
        self._read(needed)
        return [self._files[number] for number in needed]

    def read_for(self, wanted: Iterable[tuple[str, Box]]) -> Index:
        """Return an index of every tensor, and of all pieces that overlap the wanted boxes; others may be missing.

        It lists the pieces that these are coded against too.

        Raises:
            CorruptError: A file contradicts the manifest or the overview, or a piece is outside its pack.
        """
        boxes = list(wanted)
        needed = self._needed(boxes)
        self._read(needed)
        if any(self._files[number].pieces.coding is not None for number in needed):
            paired = self._needed(self._paired(boxes))
            self._read(paired)
            needed = sorted({*needed, *paired})
        merging = IndexMerger(self._overview.chunk_bytes, self._overview.table)
        for number in needed:
            merging.add(self._files[number], self._name_of(number))
        merged = merging.merged()
        require_places(merged, self._manifest, self._where)
        require_pairs(merged, self._where, whole=False)
        return merged

    def bytes_for(self, wanted: Iterable[tuple[str, Box]]) -> int:
        """Return the bytes of the index files that list the pieces of the wanted boxes, read already or not."""
        return sum(self._manifest.indexes[number].bytes for number in self._needed(wanted))

    def _paired(self, boxes: Sequence[tuple[str, Box]]) -> Iterator[tuple[str, Box]]:
        """Yield what the pieces that overlap boxes are coded against, which has the same regions.

        Raises:
            CorruptError: A pair is not listed, or has another shape.
        """
        for fqn, box in boxes:
            pairs = {
                pair for number in self._overview.files_for(fqn, box) for pair in self._files[number].pairs_of(fqn)
            }
            for pair in sorted(pairs):
                tensor, spec = self.tensors[fqn], self.tensors.get(pair)
                if spec is None or spec.global_shape != tensor.global_shape:
                    shape = "not listed" if spec is None else f"of shape {spec.global_shape}"
                    raise CorruptError(
                        f"{self._where}: {fqn} is coded against {pair[:200]}, which is {shape}; expected shape "
                        f"{tensor.global_shape}. Read another copy"
                    )
                yield pair, box

    def _with_pair(self, piece: Piece) -> Piece:
        """Return a piece with the piece that it is coded against, if one is listed."""
        coding = piece.coding
        if coding is None or not coding.pair_fqn:
            return piece
        known = self._by_region.get(coding.pair_fqn)
        if known is None:
            pairs = (pair for index in self.files_of(coding.pair_fqn) for pair in index.pieces_of(coding.pair_fqn))
            known = self._by_region[coding.pair_fqn] = {pair.region: pair for pair in pairs}
        return replace(piece, coding=replace(coding, pair=known.get(piece.region)))

    def _needed(self, wanted: Iterable[tuple[str, Box]]) -> list[int]:
        return sorted({number for fqn, box in wanted for number in self._overview.files_for(fqn, box)})

    def _read(self, numbers: Sequence[int]) -> None:
        """Read those of the index files that were not read yet."""
        absent = [number for number in numbers if number not in self._files]
        records = [self._manifest.indexes[number] for number in absent]
        for number, data in zip(absent, self._read_files(records), strict=True):
            index = decode_index(data, self._name_of(number))
            self._overview.require_within(number, index, self._name_of(number))
            self._files[number] = index

    def _name_of(self, number: int) -> str:
        return f"{self._where}{self._manifest.attempt}/{self._manifest.indexes[number].name}"
