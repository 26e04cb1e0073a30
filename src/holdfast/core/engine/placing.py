"""Checks chunks that were read or received, and places what is wanted of them."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import TINY_BYTES_MAX
from holdfast.base.ports.framework import Target
from holdfast.base.ports.packs import Packs, Stored
from holdfast.base.types.plan import ChunkRead, Part, ReadRun
from holdfast.core.engine.decoding.decode import Decoder, stored_place
from holdfast.core.format.digest import digest_of
from holdfast.errors import CheckpointError, CorruptError, MissingError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placing:
    """Where chunks come from and go to, and what decodes them."""

    packs: Packs
    """Locates packs by name."""

    targets: Sequence[Target]
    """Where to place, by wanted number."""

    decoder: Decoder
    """Decodes on any thread."""

    _elsewhere: Counter[str] = field(default_factory=Counter)
    """Bytes that were read from another place than planned, by URL of the root; negative for the planned place."""

    _warned: set[str] = field(default_factory=set)
    """Packs with a warning."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Protects both."""

    def note_elsewhere(self, pack: str, stored: Stored, place: Stored, count: int, why: CheckpointError) -> None:
        """Count bytes that were read from another place of a pack; warn once a pack."""
        with self._lock:
            self._elsewhere.update({place.files.url: count, stored.files.url: -count})
            is_first = pack not in self._warned
            self._warned.add(pack)
        if is_first:
            logger.warning("%s: is not whole, and is read from %s where needed: %s", stored.url, place.url, why)

    def sources(self, runs: Iterable[ReadRun]) -> dict[str, int]:
        """Return the bytes that this rank read for runs, by URL of the root."""
        counts = self._elsewhere.copy()
        for run in runs:
            for part in (run, *run.bases):
                counts[self.packs(part.pack).files.url] += part.stop - part.start
        return dict(+counts)


@contextmanager
def pack_expected(run: ReadRun, stored: Stored) -> Iterator[None]:
    """Turn a missing pack into `CorruptError`: the manifest names it."""
    try:
        yield
    except MissingError as missing:
        fqn = run.chunks[0].piece.tensor.fqn
        raise CorruptError(
            f"{fqn}: {stored.url}: the pack is missing; the manifest names it. Read another copy"
        ) from missing


def verify_and_place_all(run: ReadRun, data: Sequence[memoryview], placing: Placing, sender: str = "") -> None:
    """Decode and check every chunk of a run and of its bases, and copy the wanted parts to the targets.

    Args:
        run: The run.
        data: Its bytes as stored, and those of each of its bases.
        placing: Where the chunks go.
        sender: Who sent the bytes, for messages; empty: this rank has read them.
    Raises:
        CorruptError: A chunk differs from what was saved; earlier chunks may be placed.
    """
    own, targets = data[0], placing.targets
    assert len(own) >= run.stop - run.start, "all of a run has been read"
    where = placing.packs(run.pack).url + sender
    coded = _CodedChunks(run, data[1:], placing, sender)
    tiny: list[tuple[Target, Box, tuple[int, int]]] = []
    for chunk in run.chunks:
        start = chunk.offset - run.start
        if chunk.piece.coding is not None:
            coded.place(chunk, own[start : start + chunk.stored_bytes], where)
            continue
        stop = start + chunk.bytes
        raw, part = own[start:stop], chunk.parts[0]
        if chunk.bytes <= TINY_BYTES_MAX and len(chunk.parts) == 1 and _is_all(chunk, part):
            require_digest(chunk, raw, where)
            tiny.append((targets[part.wanted_number], part.box, (start, stop)))
        else:
            verify_and_place(chunk, raw, where, targets)
    if tiny:
        tiny_targets, boxes, ranges = zip(*tiny, strict=True)
        tiny_targets[0].place_together(tiny_targets, boxes, own, ranges)


class _CodedChunks:
    """Decodes, checks and places the coded chunks of one run, in order, each base before what is coded against it."""

    def __init__(self, run: ReadRun, base_data: Sequence[memoryview], placing: Placing, sender: str) -> None:
        self._placing, self._sender = placing, sender
        self._bases = (
            (chunk, view[chunk.offset - base.start :][: chunk.stored_bytes])
            for base, view in zip(run.bases, base_data, strict=True)
            for chunk in base.chunks
        )
        self._base: ChunkRead | None = None
        self._raw_base: memoryview | None = None

    def place(self, chunk: ChunkRead, stored: memoryview, where: str) -> None:
        """Decode, check and place the next chunk."""
        placing, base = self._placing, chunk.base
        if base is not None and base is not self._base:
            self._base, base_stored = next(self._bases)
            assert self._base is base, "bases come in the order in which they are needed"
            base_where = placing.packs(base.piece.pack).url + self._sender
            try:
                self._raw_base = placing.decoder.raw_base(base, base_stored, base_where)
                verify_and_place(base, self._raw_base, base_where, placing.targets)
            except CorruptError as error:
                raise CorruptError(
                    f"{chunk.piece.tensor.fqn}: {where}: chunk {chunk.number} is coded against a damaged one: {error}"
                ) from error
        raw = placing.decoder.raw(chunk, stored, self._raw_base if base is not None else None, where)
        verify_and_place(chunk, raw, where, placing.targets)


def _is_all(chunk: ChunkRead, part: Part) -> bool:
    """Return whether a part is the whole of a piece with a single chunk, decided by identity alone: it is cheap."""
    return part.box is chunk.piece.region and part.box is part.source_box and chunk.bytes == chunk.piece.bytes


def verify_and_place(chunk: ChunkRead, raw: memoryview, where: str, targets: Sequence[Target]) -> None:
    """Check a chunk and copy its wanted parts to the targets."""
    require_digest(chunk, raw, where)
    itemsize = chunk.piece.tensor.itemsize
    for part in chunk.parts:
        source = raw[part.source_start : part.source_start + part.source_box.numel * itemsize]
        targets[part.wanted_number].place(part.box, source, part.source_box)


def require_digest(chunk: ChunkRead, raw: memoryview, where: str) -> None:
    """Require that the raw bytes of a chunk are those that were saved.

    Raises:
        CorruptError: They are not; the message names tensor, file, stored byte range, and the chunk of a coded piece.
    """
    expected = chunk.expected
    # A foreign checkpoint that is read in place has no digests.
    if expected and (actual := digest_of(raw)) != expected:
        raise CorruptError(
            f"{chunk.piece.tensor.fqn}: {where}: {stored_place(chunk)} hash to {actual.hex()}; expected "
            f"{expected.hex()}. Read another copy or another step"
        )
