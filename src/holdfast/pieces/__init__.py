"""Saves and loads tensors piece by piece for a caller that has planned already, such as PyTorch's DCP.

The caller says which rank writes which box, carries tickets and parts between its ranks, and asks for boxes.
Read `writer.py` first.
It never plans or communicates: bytes, packs, digests and the commit are those of any save.
"""

from holdfast.geometry.tensor_piece import TensorPiece
from holdfast.pieces.reader import BoxReader
from holdfast.pieces.staging import stage
from holdfast.pieces.torch_bytes import PickledValue
from holdfast.pieces.writer import PieceWriter

__all__ = ["BoxReader", "PickledValue", "PieceWriter", "TensorPiece", "stage"]
