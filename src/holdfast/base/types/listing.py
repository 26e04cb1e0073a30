"""Another system's checkpoint as a list of tensors, each with the file and offset of its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.base.geometry.region import Region
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.geometry.value_class import value_class
from holdfast.base.types.values import Group


@value_class
class ListedPiece:
    """A piece of a tensor in a file of another system."""

    region: Region
    """Its region: a box or a flat range. Its elements are in row-major order in the file, without gaps."""

    file: str
    """Key of the file."""

    offset: int
    """Bytes from the start of the file to the first element; of any alignment."""


@value_class
class StoredChecksum:
    """A CRC-32 that a file holds of a range of its own bytes."""

    file: str
    """Key of the file."""

    name: str
    """Name of the range in the file, for messages."""

    start: int
    """First byte."""

    stop: int
    """Byte past the range."""

    crc: int
    """The CRC-32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignListing:
    """A list of the content of another system's checkpoint. Nothing is converted or moved."""

    format: str
    """The system that wrote it, with its version if known, such as `deepspeed 0.19.8, ZeRO-1`; for people."""

    tensors: Mapping[str, TensorSpec]
    """Every tensor, by its FQN in Holdfast."""

    pieces: Mapping[str, Sequence[ListedPiece]]
    """Pieces by FQN; they cover the tensor exactly once. An empty tensor has none, or an empty one. Tensors may share
    bytes."""

    files: Mapping[str, int]
    """Bytes of every file with a piece, by key."""

    tree: Group
    """The non-tensor state, of kind `dict`, as Holdfast would save it. If the format distinguishes them, `model` is of
    kind `module` and `optimizer` of kind `optimizer`."""

    order: Sequence[str] = ()
    """Names in the order of the state, of tensors and of items of dicts; empty if the format keeps none."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied names: alias to listed FQN."""

    replicas: Mapping[str, Sequence[ListedPiece]] = field(default_factory=dict)
    """Further copies of listed tensors, by FQN. They should hold the same bytes; `verify` compares them."""

    checksums: Iterable[StoredChecksum] = ()
    """Checksums that the format stores. Each iteration reads them from the files, since they may take much memory."""

    casts: Mapping[str, str] = field(default_factory=dict)
    """FQN of a master copy to the FQN of the tensor that was cast from it, if both are listed. A load fills a target
    from the copy of its dtype."""

    step: int | None = None
    """Training iteration, if the format records it."""

    world_size: int = 1
    """Number of ranks that wrote it, as far as its files show."""

    remarks: Sequence[str] = ()
    """Parts that were left out or ignored. Each is one sentence with the place and the reason."""
