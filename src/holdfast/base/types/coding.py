"""What is decided and measured about the codecs of a save, by kind of tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Compression = Literal["off", "auto", "on"]
"""A value of `Settings.compression`."""


class Kind(NamedTuple):
    """Tensors that codecs treat alike: one decision covers all of them."""

    dtype: str
    """Element type by name."""

    name: str
    """`parameter`, `master` (with a 16-bit pair), `buffer`, or the key of optimizer state, such as `exp_avg`."""

    def __str__(self) -> str:
        return f"{self.dtype} {self.name}"


@dataclass(frozen=True, slots=True)
class Rates:
    """What coding a kind costs and gains, as measured."""

    ratio: float
    """Raw bytes for each stored byte."""

    bytes_per_second: float
    """Raw bytes for each processor second of one thread."""


@dataclass(frozen=True, slots=True)
class KindDecision:
    """Whether the tensors of one kind are coded in a save."""

    is_coded: bool
    """Whether they are."""

    why: str
    """The reason, for people."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which parts of a kind that is written raw are coded to measure it."""

    count: int
    """How many samples."""

    first_bytes: int
    """Bytes of the kind before the first sample."""

    every_bytes: int
    """Bytes of the kind from one sample to the next."""

    bytes_min: int
    """Bytes of a sample at least: of less, speed and ratio are not those of a chunk."""

    bytes_max: int
    """Bytes of a sample at most: a chunk."""


@dataclass(frozen=True, slots=True)
class Coded:
    """What was coded of one kind in one save, in packs or to measure it."""

    raw_bytes: int
    """Bytes of the chunks before they were coded."""

    stored_bytes: int
    """Bytes of the chunks afterwards."""

    seconds: float
    """Processor seconds of the thread that coded them."""

    elapsed_seconds: float = 0.0
    """Seconds that passed meanwhile, with the waits of that thread for a processor."""

    codecs: Mapping[str, int] = field(default_factory=dict)
    """By codec, the raw bytes of its chunks; the empty name counts chunks that gained nothing, and are stored raw."""

    @property
    def codec(self) -> str:
        """The codec of most of the bytes; empty if none was coded."""
        return max(self.codecs, key=lambda name: (self.codecs[name], name), default="")


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank measured in one save."""

    seconds: float
    """Seconds from the first byte that was copied or written to the last that was durable."""

    written_bytes: int
    """Bytes that the store took."""

    write_seconds: float
    """Seconds in which at least one write was in flight."""

    processor_seconds: float
    """Processor seconds of the threads that hashed, coded and wrote."""

    coded: Mapping[Kind, Coded]
    """What packs hold, by kind."""

    probed: Mapping[Kind, Coded]
    """What was coded to measure it, and then discarded."""

    probe_seconds: float = 0.0
    """Processor seconds that the samples took in all: each is coded twice, and measured the second time."""


@dataclass(frozen=True, slots=True)
class KindCoding:
    """How a save stored the tensors of one kind on one rank, and why."""

    kind: str
    """Element type and name, such as `float32 exp_avg`; the names are those of `docs/compression.md`."""

    codec: str
    """The codec of most of its bytes in the packs; empty if all of them are stored raw."""

    raw_bytes: int
    """Bytes of its tensors in the packs that this rank wrote."""

    stored_bytes: int
    """Bytes that the packs hold for them."""

    ratio: float | None
    """Raw bytes for each stored byte, as last measured when coding: in these packs, or in a sample; None: never."""

    encode_bytes_per_second: float | None
    """Raw bytes for each processor second of coding, as last measured; None: never."""

    store_bytes_per_second: float | None
    """Bytes per second that the store took from this rank while a write was in flight; None: no byte was written."""

    predicted_seconds: float | None
    """How long this rank was expected to write the whole save; None if nothing had been measured before it."""

    found_seconds: float
    """How long it wrote."""

    why: str
    """Why the kind was coded or not."""
