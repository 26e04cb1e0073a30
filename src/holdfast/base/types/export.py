"""The plan of an export: for every byte of every file, which tensor or literal it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.geometry.value_class import value_class
from holdfast.base.types.plan import LoadPlan
from holdfast.base.types.values import Group

SHARD_BYTES = 5_000_000_000
"""Default of Hugging Face for bytes in one file."""

EXPORT_NOTE = ".holdfast-export/plan.json"
"""Name of what is beside the objects of an export until the last one is stored; at one object it follows the key."""


@value_class
class ExportTensor:
    """A box of a stored tensor in a file to be written."""

    fqn: str
    """The stored tensor."""

    dtype: str
    """Dtype in the file; the stored dtype if nothing is cast."""

    box: Box
    """The box, in global coordinates. Its elements are in row-major order, without gaps."""

    offset: int
    """Bytes from the start of the file to the first element; of any alignment."""

    @property
    def bytes(self) -> int:
        """Bytes of the box in the file."""
        return self.box.numel * DTYPES[self.dtype].itemsize


@value_class
class Checksum:
    """A CRC-32 in a file, over a range of the same file."""

    start: int
    """First byte of the range."""

    stop: int
    """Byte past the range."""

    at: tuple[int, ...]
    """Offsets of the value, four little-endian bytes; outside all ranges, and zero until it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFile:
    """One file to write. Bytes that are neither literal nor tensor are zero."""

    name: str
    """Its path under the destination; empty if the destination is this file."""

    literals: tuple[tuple[int, bytes], ...] = ()
    """Constant bytes, by offset, ascending."""

    tensors: tuple[ExportTensor, ...] = ()
    """Tensors by offset, ascending; tensors and literals do not overlap."""

    checksums: tuple[Checksum, ...] = ()
    """Checksums of tensor bytes, by start, ascending; ranges do not overlap."""

    bytes: int
    """Its exact size."""

    completes: bool = False
    """Whether a reader looks for this file to find the others: it is written last, where files appear one by one."""


@dataclass(frozen=True, slots=True)
class ExportContent:
    """Content of a checkpoint, for the writer of another format."""

    tensors: Mapping[str, TensorSpec]
    """Every stored tensor, by FQN."""

    aliases: Mapping[str, str]
    """Tied names: alias to the FQN that is stored."""

    tree: Group
    """All values that are not tensors."""

    order: tuple[str, ...] = ()
    """Names in the order of the state: of tensors, and of items of dicts and modules. Others follow them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of the caller."""

    shard_bytes: int = SHARD_BYTES
    """Most bytes of tensors in one file, for formats with several; a larger tensor gets its own file."""

    dtype: str | None = None
    """Dtype for floating tensors of the model; None keeps the stored dtype."""

    model_only: bool = True
    """Whether to export the model only."""


@value_class
class ExportWindow:
    """A range of one file that is filled and written at once."""

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


@dataclass(frozen=True, slots=True)
class DoneWindow:
    """A window that was written."""

    window: ExportWindow
    """Its range of the file."""

    sums: tuple[tuple[int, int, int, int], ...] = ()
    """Number of a checksum, start and stop in the file, and the CRC-32 of that range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The state of a place, as an export found the place and may use it."""

    done: Sequence[DoneWindow] = ()
    """Windows that are durable."""

    journal: str = ""
    """Where durable windows are recorded; empty where no journal is kept."""

    begun_anew: bool = False
    """Whether unfinished work was discarded."""

    is_published: bool = False
    """Whether an earlier call has published the files, and only its records had to be removed."""


@value_class
class Fill:
    """A box of a stored tensor that goes into a window."""

    tensor: ExportTensor
    """The tensor and its dtype in the file."""

    box: Box
    """The box, in global coordinates."""

    at: int
    """Offset in the window of the first byte."""

    skipped: int
    """Bytes of the first element before the window; not 0 only if the box is one element."""

    bytes: int
    """Bytes in the window; fewer than the box has only if the window cuts a single element."""


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """All content of one window."""

    window: ExportWindow
    """Its range of the file."""

    literals: tuple[tuple[int, bytes], ...]
    """Constant bytes, by offset in the window."""

    fills: tuple[Fill, ...]
    """Boxes of tensors, in order; the wanted tensors of `reads`, by number."""

    reads: LoadPlan
    """The reads for them."""

    sums: tuple[tuple[int, int, int], ...]
    """Checksums of the file by number, and the bytes of the file, first and past the last, that the window adds."""
