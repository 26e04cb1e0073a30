"""Saves and loads tensors piece by piece for a caller that has planned already, such as PyTorch's DCP.

The caller assigns each box to a rank, carries tickets and parts between its ranks, and requests boxes to load.
Bytes, packs, digests and the commit are those of any save.
"""

from holdfast._face.pieces.reader import BoxReader
from holdfast._face.pieces.staging import stage
from holdfast._face.pieces.torch_bytes import PickledValue
from holdfast._face.pieces.writer import PieceWriter
from holdfast.base.geometry.tensor_piece import TensorPiece

__all__ = ["BoxReader", "PickledValue", "PieceWriter", "TensorPiece", "stage"]
