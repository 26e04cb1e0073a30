"""The index of a large checkpoint, of which only those files are read that somebody needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from holdfast.repository.catalog import require_places
from holdfast.repository.index import Index, Merging
from holdfast.repository.index_file import decode_index
from holdfast.repository.overview import Overview
from holdfast.spec.box import Box
from holdfast.spec.manifest import FileRecord, Manifest
from holdfast.spec.plan import Piece
from holdfast.spec.tensor import TensorSpec

ReadFiles = Callable[[Sequence[FileRecord]], Iterable[bytes]]
"""Returns the content of index files, each proven by its digest."""


class SplitIndex:
    """Tensors, and pieces as far as they have been asked for."""

    def __init__(self, overview: Overview, manifest: Manifest, read_files: ReadFiles, where: str) -> None:
        """Read nothing yet.

        Args:
            overview: Every tensor, and what each index file covers.
            manifest: The commit record that names the files.
            read_files: Reads some of them.
            where: Folder of the checkpoint, for messages.
        """
        self._overview, self._manifest, self._read_files, self._where = overview, manifest, read_files, where
        self._files: dict[int, Index] = {}

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor by FQN, ascending."""
        return self._overview.table.specs

    @property
    def bytes_read(self) -> int:
        """Bytes of the index files that were read."""
        return sum(self._manifest.indexes[number].bytes for number in self._files)

    def pieces_of(self, fqn: str) -> Sequence[Piece]:
        """Return the stored pieces of a tensor."""
        if fqn not in self.tensors:
            return ()
        return self.read_for([(fqn, Box.whole(self.tensors[fqn].global_shape))]).pieces_of(fqn)

    def read_for(self, wanted: Iterable[tuple[str, Box]]) -> Index:
        """Return an index of every tensor, and of the pieces that boxes may meet; others may be missing.

        Raises:
            CorruptError: A file is not what the manifest and the overview say, or a piece lies outside its pack.
        """
        needed = sorted({number for fqn, box in wanted for number in self._overview.files_for(fqn, box)})
        absent = [number for number in needed if number not in self._files]
        records = self._manifest.indexes
        prefix = f"{self._where}{self._manifest.attempt}/"
        for number, data in zip(absent, self._read_files([records[number] for number in absent]), strict=True):
            index = decode_index(data, prefix + records[number].name)
            self._overview.require_within(number, index, prefix + records[number].name)
            self._files[number] = index
        merging = Merging(self._overview.chunk_bytes, self._overview.table)
        for number in needed:
            merging.add(self._files[number], prefix + records[number].name)
        merged = merging.merged()
        require_places(merged, self._manifest, self._where)
        return merged
