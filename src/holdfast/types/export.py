"""Another system's files, before a byte of them is written: what lies where, and which tensor it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.geometry.box import Box
from holdfast.geometry.dtype import DTYPES
from holdfast.geometry.tensor import TensorSpec
from holdfast.geometry.value_class import value_class
from holdfast.types.plan import LoadPlan
from holdfast.types.values import Group

SHARD_BYTES = 5_000_000_000
"""What Hugging Face puts in one file by default."""


@value_class
class ExportTensor:
    """A box of a stored tensor in a file to be written."""

    fqn: str
    """The stored tensor."""

    dtype: str
    """What its elements are cast to; the stored dtype for none."""

    box: Box
    """What of it, global coordinates; its elements lie in row-major order, without gaps."""

    offset: int
    """Bytes from the start of the file to the first element; of any alignment."""

    @property
    def bytes(self) -> int:
        """Bytes it takes in the file."""
        return self.box.numel * DTYPES[self.dtype].itemsize


@value_class
class Checksum:
    """A CRC-32 that a file holds of some of its own bytes."""

    start: int
    """First byte it is of."""

    stop: int
    """Byte past the last."""

    at: tuple[int, ...]
    """Where it stands, as four little-endian bytes; in no checksum's range, and zero until it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFile:
    """One file to be written. What is neither literal nor tensor is zero."""

    name: str
    """Its path under the destination; empty where the destination is this one file."""

    literals: tuple[tuple[int, bytes], ...] = ()
    """Bytes that are known already, by offset, ascending."""

    tensors: tuple[ExportTensor, ...] = ()
    """Everything else, by offset, ascending; no two share a byte, nor does one with a literal."""

    checksums: tuple[Checksum, ...] = ()
    """What is known only once the tensors are, by start, ascending; ranges do not overlap."""

    bytes: int
    """Its exact size."""


@dataclass(frozen=True, slots=True)
class ExportContent:
    """What a checkpoint holds, to whoever writes it as another system would."""

    tensors: Mapping[str, TensorSpec]
    """Every stored tensor, by FQN."""

    aliases: Mapping[str, str]
    """Tied names: alias to the FQN that is stored."""

    tree: Group
    """What is not a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What the caller chose."""

    shard_bytes: int = SHARD_BYTES
    """Bytes of tensors in one file, at most, where the format has several; a larger tensor has one to itself."""

    dtype: str | None = None
    """What floating tensors of the model are cast to; None for what they are."""

    model_only: bool = True
    """Whether to leave out what is not the model."""


@value_class
class ExportWindow:
    """A run of one file that is filled and written at once; who does it is nobody's business here."""

    file: int
    """Number of the file."""

    start: int
    """First byte."""

    stop: int
    """Byte past the last."""

    @property
    def bytes(self) -> int:
        """Its length."""
        return self.stop - self.start


@value_class
class Fill:
    """A box of a stored tensor that goes into a window."""

    tensor: ExportTensor
    """Where it comes from, and what its elements are cast to."""

    box: Box
    """What of it, global coordinates."""

    at: int
    """Bytes from the start of the window to the first byte that goes there."""

    skipped: int
    """Bytes of the first element that lie before the window; not 0 only where the box is one element."""

    bytes: int
    """Bytes that go there; fewer than the box has only where it is one element that the window cuts."""


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Everything that makes up one window."""

    window: ExportWindow
    """Where it lies."""

    literals: tuple[tuple[int, bytes], ...]
    """Bytes that are known already, by their place in the window."""

    fills: tuple[Fill, ...]
    """What comes from tensors, in order; the wanted tensors of `reads`, by number."""

    reads: LoadPlan
    """What is read for them."""

    sums: tuple[tuple[int, int, int], ...]
    """Checksums of the file by number, and the bytes of the file, first and past the last, that the window adds."""
