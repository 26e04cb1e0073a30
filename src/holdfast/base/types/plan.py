"""Frozen plans of writes, reads and exchanges. They are made before any byte moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import chunk_range
from holdfast.base.geometry.region import Region
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.geometry.value_class import value_class
from holdfast.settings import PAGE_BYTES

OPAQUE_FOLDER = "enc/"
"""Folder in an attempt's folder. Stock readers see the entries of its packs as bytes (U8): flat ranges, foreign dtypes.
"""

CODED_FOLDER = "coded/"
"""Folder in an attempt's folder for packs of coded pieces. Stock readers see the entries of its packs as bytes (U8)."""

Digest = bytes
"""Bytes of the xxh3-128 of a chunk's raw bytes."""


PieceKey = tuple[str, Region]
"""A piece of a tensor: FQN and region."""


@value_class
class PackItem:
    """One piece in a pack."""

    tensor: TensorSpec
    """The tensor of the piece."""

    region: Region
    """Its region of the tensor."""

    data_offset: int
    """Bytes from the end of the pack's header to the piece."""

    shard_number: int
    """Number of the rank's shard that has its bytes."""

    codec: str = ""
    """In a coded pack, the codec that is tried first for each of its chunks. Empty: they are stored raw."""

    bytes: int = field(init=False, repr=False, compare=False)
    """Bytes of the piece."""

    def __post_init__(self) -> None:
        # Asked for many times a piece, and there may be a hundred thousand of them.
        object.__setattr__(self, "bytes", self.region.numel * self.tensor.itemsize)


@dataclass(frozen=True, slots=True)
class PackPlan:
    """The plan of one pack."""

    name: str
    """File name inside the attempt's folder."""

    items: tuple[PackItem, ...]
    """Pieces in file order. Each FQN occurs once."""

    @property
    def apart(self) -> bool:
        """Whether its entries declare bytes, not elements of a dtype."""
        return self.name.startswith((OPAQUE_FOLDER, CODED_FOLDER))

    @property
    def is_coded(self) -> bool:
        """Whether its chunks go through codecs."""
        return self.name.startswith(CODED_FOLDER)

    @property
    def data_bytes(self) -> int:
        """Raw bytes of all pieces; a coded pack stores fewer."""
        return self.items[-1].data_offset + self.items[-1].bytes if self.items else 0


@dataclass(frozen=True, slots=True)
class PlannedPack:
    """One pack to write: its plan, key and header."""

    key: str
    """Key of its file."""

    header: bytes
    """Its header: the first bytes of the file. Empty in a coded pack, whose header is made once all data is written."""

    plan: PackPlan
    """Its pieces."""

    coded_header_bytes: int = 0
    """In a coded pack, the bytes before the data; else 0."""

    coded_header: Callable[[Sequence[Coding], Sequence[bytes]], bytes] | None = None
    """In a coded pack, returns the header, by the codings and the chunk digests of its pieces."""

    @property
    def bytes(self) -> int:
        """Bytes of the file; a coded one has fewer."""
        return self.header_bytes + self.plan.data_bytes

    @property
    def header_bytes(self) -> int:
        """Bytes before the data."""
        return self.coded_header_bytes or len(self.header)


@value_class
class Coding:
    """How the chunks of a coded piece are stored: one after the other, without gaps."""

    codecs: tuple[str, ...]
    """Names of the codecs of its chunks."""

    numbers: bytes
    """For each chunk 0 if it is stored raw, else the number of its codec in `codecs`, from 1 on."""

    starts: tuple[int, ...]
    """Bytes from the start of the piece to each stored chunk, and to the end of the last."""

    pair_fqn: str = ""
    """The tensor against which chunks are coded; empty if none is."""

    pair: Piece | None = None
    """Its stored piece of the same region; None if no chunk needs it, or if the index at hand does not list it."""


@value_class
class Piece:
    """One stored piece, as in an index."""

    tensor: TensorSpec
    """Its tensor."""

    region: Region
    """Its region of the tensor."""

    pack: str
    """Name of the pack that holds its bytes."""

    offset: int
    """Bytes from the start of the pack to the piece."""

    digests: bytes
    """xxh3-128 of each chunk's raw bytes, 16 bytes each, in order."""

    chunk_bytes: int
    """Raw bytes of each chunk but the last."""

    coding: Coding | None = None
    """How its chunks are stored; None: as they are."""

    bytes: int = field(init=False, repr=False, compare=False)
    """Raw bytes of the piece."""

    def __post_init__(self) -> None:
        # Asked for many times a piece, and there may be a hundred thousand of them.
        object.__setattr__(self, "bytes", self.region.numel * self.tensor.itemsize)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the piece in its pack."""
        return self.bytes if self.coding is None else self.coding.starts[-1]

    def stored_range(self, number: int) -> tuple[int, int]:
        """Return the half-open byte range of a stored chunk in the pack."""
        if self.coding is None:
            start, stop = chunk_range(self.bytes, self.chunk_bytes, number)
        else:
            start, stop = self.coding.starts[number], self.coding.starts[number + 1]
        return self.offset + start, self.offset + stop

    def codec_of(self, number: int) -> str:
        """Return the codec of a chunk; empty if it is stored raw."""
        coded_by = 0 if self.coding is None else self.coding.numbers[number]
        return self.coding.codecs[coded_by - 1] if self.coding is not None and coded_by else ""


@value_class
class WantedBoxes:
    """The part of one stored tensor that a rank needs."""

    stored_fqn: str
    """Name in the checkpoint."""

    boxes: tuple[Box, ...]
    """Regions, in global coordinates."""


@value_class
class Part:
    """A box of a chunk that goes to a target."""

    wanted_number: int
    """Number of the wanted tensor that it fills."""

    box: Box
    """The box to copy, in global coordinates."""

    source_box: Box
    """The box of the chunk that contains it, in global coordinates."""

    source_start: int
    """Bytes from the start of the chunk to the row-major bytes of `source_box`."""


@value_class
class ChunkRead:
    """One chunk to read, check and place."""

    piece: Piece
    """The piece of the chunk."""

    number: int
    """Number of the chunk in the piece."""

    offset: int
    """Bytes from the start of the pack to the stored chunk."""

    bytes: int
    """Its raw size."""

    parts: tuple[Part, ...]
    """Its boxes and their targets; empty only if it is read for the sake of another chunk."""

    base: ChunkRead | None = None
    """The chunk of the pair against which this one is coded. The chunks of a pair that share a base share this object.
    """

    @property
    def expected(self) -> Digest:
        """The expected digest of its raw bytes."""
        return self.piece.digests[16 * self.number : 16 * self.number + 16]

    @property
    def stored_bytes(self) -> int:
        """Its bytes in the pack."""
        coding = self.piece.coding
        return self.bytes if coding is None else coding.starts[self.number + 1] - coding.starts[self.number]

    @property
    def codec(self) -> str:
        """Its codec; empty if it is stored raw."""
        return self.piece.codec_of(self.number)


@dataclass(frozen=True, slots=True)
class ReadRun:
    """Neighbouring chunks of one pack, which are read with one call."""

    pack: str
    """The pack."""

    start: int
    """First byte."""

    stop: int
    """Byte past the last."""

    chunks: tuple[ChunkRead, ...]
    """The chunks, in file order, without gaps."""

    bases: tuple[ReadRun, ...] = ()
    """The chunks of pairs that its chunks are coded against, read with it. A run and its bases are one unit: they are
    read by one rank, and sent together."""

    @property
    def bytes(self) -> int:
        """Stored bytes of the run and of its bases."""
        return sum(part.stop - part.start for part in (self, *self.bases))

    @staticmethod
    def of(pack: str, chunks: tuple[ChunkRead, ...]) -> ReadRun:
        """Return consecutive chunks of a pack as one run, with the runs of their bases."""
        bases = [chunk.base for chunk in chunks if chunk.base is not None]
        return ReadRun(
            pack, chunks[0].offset, chunks[-1].offset + chunks[-1].stored_bytes, chunks, tuple(_base_runs(bases))
        )


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All reads of one rank in one load."""

    runs: tuple[ReadRun, ...]
    """Reads, by pack and offset."""

    @property
    def bytes(self) -> int:
        """Bytes read."""
        return sum(run.bytes for run in self.runs)


def _base_runs(bases: Iterable[ChunkRead]) -> Iterator[ReadRun]:
    """Yield distinct chunks of pairs, in the order in which they are needed, neighbours joined."""
    current: list[ChunkRead] = []
    for base in bases:
        last = current[-1] if current else None
        if base is last:  # Two chunks share it.
            continue
        if last is not None and (base.piece.pack != last.piece.pack or base.offset != last.offset + last.stored_bytes):
            yield ReadRun.of(last.piece.pack, tuple(current))
            current = []
        current.append(base)
    if current:
        yield ReadRun.of(current[-1].piece.pack, tuple(current))


def take_slot_bytes(count: int) -> int:
    """Return the memory for a received run of that many bytes: whole pages."""
    return -(-count // PAGE_BYTES) * PAGE_BYTES


def give_slot_bytes(count: int) -> int:
    """Return the memory for a read of that many bytes: whole pages, and one more for the alignment of the store."""
    return take_slot_bytes(count) + PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Give:
    """A run that this rank reads and sends to other ranks."""

    run: ReadRun
    """The run. This rank needs all of it too."""

    receivers: tuple[int, ...]
    """The other ranks that need it, ascending."""


@dataclass(frozen=True, slots=True)
class Take:
    """A run that another rank reads and sends to this rank."""

    run: ReadRun
    """The run, with the parts that this rank needs."""

    reader: int
    """The rank that reads it."""


@dataclass(frozen=True, slots=True)
class ExchangeRound:
    """The runs that one rank sends and receives in one collective, each in the order of packs and offsets."""

    gives: tuple[Give, ...]
    """Runs that it reads and sends."""

    takes: tuple[Take, ...]
    """Runs that it receives."""


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """All work of one rank in a load in which the ranks exchange bytes."""

    rounds: tuple[ExchangeRound, ...]
    """Rounds, as many on every rank. A round may be empty on this rank."""

    alone: LoadPlan
    """Reads of bytes that no other rank needs."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """The best measured round of one rank."""

    read_bytes: int
    """Bytes that it read from storage."""

    read_seconds: float
    """Seconds of these reads, with every chunk checked and placed."""

    moved_bytes: int
    """Bytes that it sent or received, whichever is more."""

    moved_seconds: float
    """Seconds of this exchange, with every received chunk checked again and placed."""
