"""Frozen plans: what will be written, read and exchanged, before a byte moves."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.geometry.box import Box
from holdfast.geometry.region import Region
from holdfast.geometry.tensor import TensorSpec
from holdfast.geometry.value_class import value_class
from holdfast.settings import PAGE_BYTES

OPAQUE_FOLDER = "enc/"
"""Folder, inside an attempt's, of packs whose entries are bytes to stock readers (U8): flat ranges, foreign dtypes."""

Digest = bytes
"""16 bytes, the xxh3-128 of a chunk's raw bytes."""


@value_class
class PackItem:
    """One piece in a pack."""

    tensor: TensorSpec
    """The tensor the piece belongs to."""

    region: Region
    """Which part of it."""

    data_offset: int
    """Bytes from the end of the pack's header to the piece."""

    shard_number: int
    """Which of the rank's shards its bytes come from."""

    bytes: int = field(init=False, repr=False, compare=False)
    """Bytes of the piece."""

    def __post_init__(self) -> None:
        # Asked for many times a piece, and there may be a hundred thousand of them.
        object.__setattr__(self, "bytes", self.region.numel * self.tensor.itemsize)


@dataclass(frozen=True, slots=True)
class PackPlan:
    """One pack to be written."""

    name: str
    """File name inside the attempt's folder."""

    items: tuple[PackItem, ...]
    """Pieces in file order; no FQN twice."""

    @property
    def apart(self) -> bool:
        """Whether entries are stated as bytes rather than as pieces of a dtype."""
        return self.name.startswith(OPAQUE_FOLDER)

    @property
    def data_bytes(self) -> int:
        """Bytes of all pieces."""
        return self.items[-1].data_offset + self.items[-1].bytes if self.items else 0


@dataclass(frozen=True, slots=True)
class PlannedPack:
    """One pack to be written."""

    key: str
    """Where it goes."""

    header: bytes
    """Its first bytes."""

    plan: PackPlan
    """Its pieces."""

    @property
    def bytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + self.plan.data_bytes


@value_class
class Piece:
    """One stored piece, as an index knows it."""

    tensor: TensorSpec
    """The tensor it belongs to."""

    region: Region
    """Which part of it."""

    pack: str
    """Name of the pack that holds its bytes."""

    offset: int
    """Bytes from the start of the pack to the piece."""

    digests: bytes
    """xxh3-128 of each chunk's raw bytes, 16 bytes each, in order."""

    chunk_bytes: int
    """Bytes of each chunk but the last."""

    bytes: int = field(init=False, repr=False, compare=False)
    """Bytes of the piece."""

    def __post_init__(self) -> None:
        # Asked for many times a piece, and there may be a hundred thousand of them.
        object.__setattr__(self, "bytes", self.region.numel * self.tensor.itemsize)


@value_class
class WantedBoxes:
    """What a rank wants of one stored tensor."""

    stored_fqn: str
    """Name in the checkpoint."""

    boxes: tuple[Box, ...]
    """Regions, global coordinates."""


@value_class
class Part:
    """A box of a chunk that goes to a target."""

    wanted_number: int
    """Which of the plan's wanted tensors it fills."""

    box: Box
    """What is copied, global coordinates."""

    source_box: Box
    """The box of the chunk that it is cut from, global coordinates."""

    source_start: int
    """Bytes from the start of the chunk to the row-major bytes of `source_box`."""


@value_class
class ChunkRead:
    """One chunk to be read, checked and placed."""

    piece: Piece
    """The piece it is a run of."""

    number: int
    """Which chunk of the piece."""

    offset: int
    """Bytes from the start of the pack to the chunk."""

    bytes: int
    """Its size."""

    parts: tuple[Part, ...]
    """What of it goes where; never empty."""

    @property
    def expected(self) -> Digest:
        """What its bytes must hash to."""
        return self.piece.digests[16 * self.number : 16 * self.number + 16]


@dataclass(frozen=True, slots=True)
class ReadRun:
    """Neighbouring chunks of one pack, read at once."""

    pack: str
    """The pack."""

    start: int
    """First byte."""

    stop: int
    """Byte past the last."""

    chunks: tuple[ChunkRead, ...]
    """The chunks, in file order, without gaps."""

    @staticmethod
    def of(pack: str, chunks: tuple[ChunkRead, ...]) -> ReadRun:
        """Return chunks of a pack that follow one another as one run."""
        return ReadRun(pack, chunks[0].offset, chunks[-1].offset + chunks[-1].bytes, chunks)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Everything one rank reads in one load."""

    runs: tuple[ReadRun, ...]
    """Reads, by pack and offset."""

    @property
    def bytes(self) -> int:
        """Bytes read."""
        return sum(run.stop - run.start for run in self.runs)


def take_slot_bytes(count: int) -> int:
    """Return the memory that so many bytes are taken into: whole pages."""
    return -(-count // PAGE_BYTES) * PAGE_BYTES


def give_slot_bytes(count: int) -> int:
    """Return the memory that so many bytes are read into: whole pages, and one more at either end, as stores need."""
    return take_slot_bytes(count) + 2 * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Give:
    """A run that this rank reads and passes on."""

    run: ReadRun
    """What is read; this rank wants all of it too."""

    receivers: tuple[int, ...]
    """The other ranks that want it, ascending."""


@dataclass(frozen=True, slots=True)
class Take:
    """A run that another rank reads and passes to this one."""

    run: ReadRun
    """What comes, with what this rank wants of it."""

    reader: int
    """Who reads it."""


@dataclass(frozen=True, slots=True)
class ExchangeRound:
    """What one rank gives and takes in one collective, both in the order of the checkpoint's packs and offsets."""

    gives: tuple[Give, ...]
    """Runs it reads."""

    takes: tuple[Take, ...]
    """Runs it is given."""


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Everything one rank does in a load in which ranks pass bytes to each other."""

    rounds: tuple[ExchangeRound, ...]
    """As many on every rank; a round may be empty here."""

    alone: LoadPlan
    """What nobody else wants: read as in any load."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """How fast one rank was in the best of the rounds that were measured."""

    read_bytes: int
    """Bytes it read from storage."""

    read_seconds: float
    """How long that took, every chunk checked and placed."""

    moved_bytes: int
    """Bytes it sent or received, whichever is more."""

    moved_seconds: float
    """How long that took, every chunk that came checked again and placed."""
