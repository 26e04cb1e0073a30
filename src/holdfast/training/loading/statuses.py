"""Gathers the status of every rank of a load, in a number of bytes that hardly grows with the job.

A rank first sends a record of 25 bytes: what kind of answer it has, and size and digest of its texts and of its offer.
Most ranks have no texts. If some have, one bitwise OR follows: the records give each digest a place, and every rank
puts its bytes there. So ranks with equal texts send them once, and nothing is padded.

Names that the checkpoint has and the state lacks travel as one bit a name: a rank of a pipeline lacks nearly all.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from holdfast.base.ports.comm import Comm
from holdfast.base.types.values import Group, Value
from holdfast.core.format.digest import short_digest_of
from holdfast.errors import CorruptError, UnavailableError
from holdfast.settings import MIB
from holdfast.training.loading.exchange import NO_OFFER, Offer
from holdfast.training.loading.messages import RankStatus, Unfit

_RECORD = struct.Struct("<BI8sI8s")
_LACKS, _FAILED, _CORRUPT, _ABSENT, _FORCES, _READS_ENOUGH, _FILLS, _UNFIT = 1, 2, 4, 8, 16, 32, 64, 128

_TEXTS_BYTES_MAX = MIB
"""Most bytes of the texts of all ranks together. Of more, those of the lowest ranks are kept."""

_OFFERS_BYTES_MAX = MIB // 2
"""Most bytes of the offers of all ranks together, unless rank 0 forces an exchange. Beyond it, no rank exchanges."""


@dataclass(frozen=True, slots=True)
class GatheredStatuses:
    """The statuses of all ranks."""

    by_rank: Sequence[RankStatus]
    """Status of each rank; names in `unexpected` only where the catalogue lacks them."""

    missing: frozenset[str]
    """Names that some rank has and the checkpoint lacks."""

    unexpected: frozenset[str]
    """Names that the checkpoint has and the state of every rank lacks."""

    is_whole: bool
    """Whether `missing` holds the names of every rank. Some may have been too many to send."""

    unfit: tuple[Unfit, ...] = ()
    """Names of some rank that cannot take what the checkpoint has, each once, in the order of ranks and states."""

    any_unfit: bool = False
    """Whether any rank has such a name. Its texts may have been too many to send."""

    any_fills: bool = True
    """Whether any rank fills anything, or says why not."""

    calls: Mapping[int, str] = field(default_factory=dict)
    """`call` of each rank whose texts are known, by rank."""


@dataclass(frozen=True, slots=True)
class _Record:
    """What each rank sends to every rank first."""

    flags: int
    text_bytes: int
    text_digest: bytes
    offer_bytes: int
    offer_digest: bytes

    @classmethod
    def of(cls, status: RankStatus, texts: bytes, offer: bytes, *, lacks: bool) -> _Record:
        offered = status.offer
        flags = _LACKS * lacks | _FORCES * (offered.share_reads == "always") | _READS_ENOUGH * offered.reads_enough
        flags |= _FILLS * status.fills | _UNFIT * bool(status.unfit)
        if status.error is not None:
            error = json.loads(status.error)
            flags |= _FAILED | _CORRUPT * (error["kind"] == CorruptError.__name__) | _ABSENT * error["absent"]
        return cls(flags, len(texts), short_digest_of(texts), len(offer), short_digest_of(offer))

    def encode(self) -> bytes:
        return _RECORD.pack(self.flags, self.text_bytes, self.text_digest, self.offer_bytes, self.offer_digest)

    def without_texts(self) -> RankStatus:
        """Return as much of the status as the record holds."""
        if not self.flags & _FAILED:
            return RankStatus()
        kind = CorruptError if self.flags & _CORRUPT else UnavailableError
        message = "failed too; its error is left out, because too many ranks failed. Look at its log"
        return RankStatus(json.dumps({"kind": kind.__name__, "message": message, "absent": bool(self.flags & _ABSENT)}))


def gather_statuses(comm: Comm, own: RankStatus, catalogue: Callable[[], Sequence[str]]) -> GatheredStatuses:
    """Return the status of every rank; a collective.

    Args:
        comm: The ranks.
        own: Status of this rank.
        catalogue: Returns the names of the checkpoint, ascending and the same on every rank.
    """
    # Most jobs have ranks that lack nothing. They need no catalogue.
    names = catalogue() if own.unexpected else ()
    numbers = {name: number for number, name in enumerate(names)}
    elsewhere = tuple(name for name in own.unexpected if name not in numbers)
    texts, offer = replace(own, unexpected=elsewhere).encode(), own.offer.encode()
    record = _Record.of(own, texts, offer, lacks=bool(own.unexpected))
    records = [_Record(*_RECORD.unpack(data)) for data in comm.all_gather(record.encode())]
    message = _SharedMessage(records, len(names))
    message.put(message.texts, record.text_digest, texts)
    message.put(message.offers, record.offer_digest, offer)
    if message.bits:
        expected = np.ones(len(names), dtype=np.uint8)
        expected[[numbers[name] for name in own.unexpected if name in numbers]] = 0
        message.put_bits(np.packbits(expected).tobytes())
    joined = comm.bitwise_or(bytes(message.data)) if message.data else b""
    by_rank = _statuses_in(joined, records, message)
    distinct = {id(status): status for status in by_rank}.values()
    missing = frozenset().union(*(status.missing for status in distinct))
    unexpected = _names_without_bit(joined[message.bits], names) if message.bits else set()
    has_texts = [not each.text_bytes or each.text_digest in message.texts for each in records]
    if message.bits:
        # Ranks whose texts were left out count as if they lacked every name: a load must not pass unchecked.
        listed = {id(status): status for status, is_known in zip(by_rank, has_texts, strict=True) if is_known}
        unexpected |= set.intersection(*({*status.unexpected} for status in listed.values())) if listed else set()
    is_whole = all(has_texts) and not any(status.unnamed for status in distinct)
    unfit = tuple(dict.fromkeys(each for status in distinct for each in status.unfit))
    any_unfit, any_fills = (any(record.flags & flag for record in records) for flag in (_UNFIT, _FILLS))
    calls = {rank: by_rank[rank].call for rank, is_known in enumerate(has_texts) if is_known}
    return GatheredStatuses(by_rank, missing, frozenset(unexpected), is_whole, unfit, any_unfit, any_fills, calls)


def gather_errors(comm: Comm, own: str | None) -> list[str | None]:
    """Return the `error_text` of every rank; a collective. While no rank has an error, one byte a rank travels."""
    if not any(comm.bitwise_or(bytes([own is not None]))):
        return [None] * comm.world_size
    return [status.error for status in gather_statuses(comm, RankStatus(own), tuple).by_rank]


class _SharedMessage:
    """The message that all ranks join by bitwise OR. The records decide where each part is, the same on every rank."""

    def __init__(self, records: Sequence[_Record], names: int) -> None:
        bytes_max = None if records[0].flags & _FORCES else _OFFERS_BYTES_MAX
        sizes = [(record.text_digest, record.text_bytes) for record in records]
        self.texts = _places(sizes, 0, _TEXTS_BYTES_MAX)
        """Place of the texts with each digest."""
        end = max((place.stop for place in self.texts.values()), default=0)
        self.offers: dict[bytes, slice] = {}
        """Place of the offers with each digest; empty unless they may pay off, every rank has one and all have room."""
        self.bits: slice | None = None
        """Place of the bits, one a name of the catalogue: whether some rank expects it. None: none is needed."""
        if not any(record.flags & _FAILED for record in records):
            is_wanted = any(record.flags & _READS_ENOUGH for record in records)
            if is_wanted and all(record.offer_bytes for record in records):
                sizes = [(record.offer_digest, record.offer_bytes) for record in records]
                offers = _places(sizes, end, bytes_max)
                if len(offers) == len({*sizes}):
                    self.offers = offers
                    end = max(place.stop for place in offers.values())
            if all(record.flags & _LACKS for record in records):
                self.bits = slice(end, end + (names + 7) // 8)
                end = self.bits.stop
        self.data = bytearray(end)

    def put(self, places: Mapping[bytes, slice], digest: bytes, part: bytes) -> None:
        """Put a part where it belongs, if it has a place."""
        if digest in places:
            self.data[places[digest]] = part

    def put_bits(self, bits: bytes) -> None:
        """Put the bits of this rank."""
        assert self.bits is not None, "every rank lacks a name"
        self.data[self.bits] = bits


def _places(sizes: Iterable[tuple[bytes, int]], start: int, bytes_max: int | None) -> dict[bytes, slice]:
    """Return places one after the other from `start`, for the first digest and each that still has room."""
    places: dict[bytes, slice] = {}
    end = start
    for digest, size in sizes:
        has_room = bytes_max is None or end == start or end + size <= start + bytes_max
        if size and digest not in places and has_room:
            places[digest] = slice(end, end + size)
            end += size
    return places


def _statuses_in(joined: bytes, records: Sequence[_Record], message: _SharedMessage) -> list[RankStatus]:
    """Return the status of every rank; equal ones are decoded once."""
    texts = {digest: RankStatus.decode(joined[place]) for digest, place in message.texts.items()}
    offers = {digest: Offer.decode(joined[place]) for digest, place in message.offers.items()}
    statuses: dict[tuple[bytes, bytes, int], RankStatus] = {}
    for record in records:
        key = record.text_digest, record.offer_digest, record.flags
        if key not in statuses:
            status = texts.get(record.text_digest) or record.without_texts()
            statuses[key] = replace(status, offer=offers.get(record.offer_digest, NO_OFFER))
    return [statuses[record.text_digest, record.offer_digest, record.flags] for record in records]


def _names_without_bit(bits: bytes, names: Sequence[str]) -> set[str]:
    expected = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=len(names))
    return {names[number] for number in np.flatnonzero(expected == 0).tolist()}


def names_of(tensors: Iterable[str], aliases: Iterable[str], tree: Group) -> list[str]:
    """Return the names that a checkpoint has: of tensors and of values, ascending."""
    return sorted({*tensors, *aliases, *_paths(tree, "")})


def _paths(value: Value, path: str) -> Iterator[str]:
    items = value.items if isinstance(value, Group) else value
    if not isinstance(items, dict):
        return
    for key, item in items.items():
        if isinstance(key, str):
            inner = f"{path}.{key}" if path else key
            yield inner
            yield from _paths(item, inner)
