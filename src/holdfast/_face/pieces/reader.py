"""Reads boxes of the tensors of one checkpoint into memory of the caller, and its values, all checked by digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from holdfast._face import wiring
from holdfast._face.pieces.names import PieceNames, names_in
from holdfast._face.pieces.torch_bytes import torch_bytes
from holdfast.backends.foreign.dcp.metadata import Path
from holdfast.backends.foreign.file_layout import SmallTensor
from holdfast.backends.torch.dcp_pieces.planned import target_of
from holdfast.base.geometry.tensor_piece import TensorPiece
from holdfast.core.engine.read import execute
from holdfast.errors import InvalidError, MissingError
from holdfast.settings import Settings
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.tensor_info import TensorInfo


class BoxReader:
    """One checkpoint, as a caller that plans itself sees it. Each rank makes one; nothing is communicated."""

    def __init__(
        self,
        path: object,
        *,
        step: int | str | None = None,
        flat_optimizers: bool = False,
        settings: Settings = wiring.DEFAULT_SETTINGS,
    ) -> None:
        """Open the checkpoint.

        Args:
            path: The checkpoint, of any format that Holdfast reads; with `step` the root of a run.
            step: A step of the run: its number, a tag, or `"latest"`.
            flat_optimizers: Whether the state of optimizers has flat names (`state.<fqn>.<key>`), as torch makes them
                with `flatten_optimizer_state_dict=True`. A checkpoint that was written by pieces keeps its own names.
            settings: How to read.
        Raises:
            MissingError: There is no checkpoint, step or tag.
            InvalidError: The path is the root of a run and no step is given, or the reverse.
            CorruptError: The manifest is damaged.
        """
        self._checkpoint: Checkpoint = wiring.checkpoint_at(path, settings, step)
        self._flat_optimizers, self._settings = flat_optimizers, settings

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint itself."""
        return self._checkpoint

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Dtype and shape of every tensor, by name."""
        stored = self._checkpoint.tensors
        return {name: stored[fqn] for name, fqn in self._names.tensors.items()}

    @property
    def values(self) -> Sequence[str]:
        """Names of all that is not a tensor."""
        return list(self._names.values)

    @property
    def paths(self) -> Mapping[str, Path]:
        """How tensors and values nest in the state that was saved: their paths by name."""
        return self._names.paths

    def read(self, pieces: Sequence[TensorPiece]) -> None:
        """Fill memory with boxes of tensors; all of them are read together, and each chunk once.

        Args:
            pieces: The boxes, by name of the tensor.
        Raises:
            MissingError: No such tensor.
            InvalidError: The memory cannot take the box; no memory has changed.
            CorruptError: Stored bytes are not what was saved; some memory may be filled.
        """
        wanted = []
        for piece in pieces:
            info = self.tensors.get(piece.fqn)
            if info is None:
                raise MissingError(f"{self._checkpoint.url}: no tensor {piece.fqn!r}; `tensors` has all")
            if info.shape != piece.global_shape:
                raise InvalidError(
                    f"{piece.fqn}: {list(info.shape)} in the checkpoint and {list(piece.global_shape)} here; expected "
                    "one shape"
                )
            target = target_of(piece, info.dtype)
            wanted += [(self._names.tensors[piece.fqn], box, target) for box in target.boxes]
        with self._checkpoint.blaming_overwrite():
            plan, targets = self._checkpoint.reads_for(wanted, self._settings._tuning.read_window_bytes)
            execute(plan, self._checkpoint.packs, targets, self._settings, self._checkpoint.codecs)

    def torch_bytes(self, name: str) -> bytes:
        """Return a value as `torch.save` would write it: made now, of the stored value.

        Raises:
            MissingError: No such value.
            InvalidError: It holds a value that torch cannot load.
            CorruptError: It holds a small tensor whose fields are none.
        """
        values = self._names.values
        if name not in values:
            raise MissingError(f"{self._checkpoint.url}: no value {name!r}; `values` has all")
        return torch_bytes(values[name], name, self._with_elements)

    def _with_elements(self, fqn: str) -> SmallTensor:
        info = self._checkpoint.tensors[fqn]
        array = np.ascontiguousarray(self._checkpoint.read_all([fqn])[fqn])
        return SmallTensor(info.dtype, info.shape, array.tobytes())

    @cached_property
    def _names(self) -> PieceNames:
        return names_in(self._checkpoint.content, flat_optimizers=self._flat_optimizers)
