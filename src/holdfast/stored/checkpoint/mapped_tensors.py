"""Whole tensors of a checkpoint over private maps of its packs. Each is checked when it is first asked for.

A tensor is mapped if one piece holds all of it as it is, its elements are aligned in the file, and the store can map
files. Any other tensor (pieces of several ranks, coded, empty, in a store in memory) is read into new memory when it is
asked for.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import chunk_count
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.region import FlatRange
from holdfast.base.types.plan import Piece
from holdfast.core.engine.decoding.chunk_reader import chunk_of
from holdfast.core.engine.placing import require_digest
from holdfast.errors import CorruptError, MissingError
from holdfast.stored.checkpoint.checkpoint import Checkpoint


class MappedTensors:
    """The tensors of a checkpoint, by stored FQN. Thread-safe."""

    def __init__(self, checkpoint: Checkpoint, fqns: Iterable[str], framework: str) -> None:
        """Map the packs, and touch none of their bytes. From then on the files may be deleted, but not cut short.

        Args:
            checkpoint: The checkpoint.
            fqns: Stored names.
            framework: `numpy` or `torch`.
        Raises:
            UnavailableError: A pack cannot be mapped.
        """
        self._checkpoint, self._framework = checkpoint, framework
        self._lock = threading.Lock()
        self._made: dict[str, object] = {}
        self._maps: dict[str, mmap.mmap | None] = {}
        """By pack; None for a file that is missing or empty."""
        self._pieces: dict[str, Piece] = {}
        for fqn in fqns:
            piece = self._whole_piece(fqn)
            if piece is not None and self._is_mapped(piece.pack):
                self._pieces[fqn] = piece

    def __getitem__(self, fqn: str) -> object:
        """Return a tensor; the same one each time.

        Raises:
            CorruptError: Stored bytes differ from what was saved; the message names tensor, file and byte range.
            UnavailableError: Storage failed.
        """
        made = self._made.get(fqn)
        if made is None:
            made = self._mapped(self._pieces[fqn]) if fqn in self._pieces else self._read(fqn)
            with self._lock:
                # Two threads may have made it. Both must get the same one: a write to it stays.
                made = self._made.setdefault(fqn, made)
        return made

    @property
    def lacks_files(self) -> bool:
        """Whether a pack could not be mapped because it is missing or empty."""
        return None in self._maps.values()

    def _read(self, fqn: str) -> object:
        return self._checkpoint.read_all([fqn], self._framework)[fqn]

    def _whole_piece(self, fqn: str) -> Piece | None:
        """Return the piece that holds all of a tensor; None if there is none, or it is empty, not aligned or coded."""
        pieces = self._checkpoint.index.pieces_of(fqn)
        if len(pieces) != 1 or not pieces[0].bytes or pieces[0].offset % pieces[0].tensor.itemsize:
            return None
        if pieces[0].coding is not None:
            return None  # The mapped bytes would not be its elements.
        region, tensor = pieces[0].region, pieces[0].tensor
        whole = Box.whole(tensor.global_shape)
        is_whole = region == whole or (isinstance(region, FlatRange) and region.numel == whole.numel)
        return pieces[0] if is_whole else None

    def _is_mapped(self, pack: str) -> bool:
        if pack not in self._maps:
            stored = self._checkpoint.packs(pack)
            if not stored.files.traits.maps_files:
                return False
            self._maps[pack] = None
            with suppress(MissingError):  # An error once a tensor of it is asked for.
                self._maps[pack] = stored.files.mapped(stored.key)
        return True

    def _mapped(self, piece: Piece) -> object:
        where, spec, file = self._checkpoint.packs(piece.pack).url, piece.tensor, self._maps[piece.pack]
        stop = piece.offset + piece.bytes
        # The size now: touching bytes of a file that was cut short since would end the process.
        if file is None or min(len(file), file.size()) < stop:
            found = (
                "the file is missing or empty" if file is None else f"the file ends at {min(len(file), file.size())}"
            )
            raise CorruptError(
                f"{spec.fqn}: {where}: bytes {piece.offset}–{stop}: {found}. Read another copy or another step"
            )
        data = memoryview(file)[piece.offset : stop]
        for number in range(chunk_count(piece.bytes, piece.chunk_bytes)):
            chunk = chunk_of(piece, number)
            require_digest(chunk, data[chunk.offset - piece.offset :][: chunk.bytes], where)
        array = np.frombuffer(data, np.dtype(DTYPES[spec.dtype].numpy)).reshape(spec.global_shape)
        return self._checkpoint.as_framework(array, spec.dtype, self._framework)
