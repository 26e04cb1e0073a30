"""How ranks agree to exchange bytes: each offers its reads, and all compute the same exchange from all offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from holdfast.base.ports.framework import Target
from holdfast.base.ports.packs import Packs
from holdfast.base.types.inspected import inspected
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.plan import ExchangePlan, LoadPlan, WantedBoxes
from holdfast.core.engine.exchange import ExchangeProbe, PlannedExchange, TransferStats, execute_exchange
from holdfast.core.engine.gc_pause import GcPause
from holdfast.core.engine.read import execute
from holdfast.core.format.index.index import Index
from holdfast.core.format.names import is_file_url
from holdfast.core.plan.exchange import (
    PROBE_ROUNDS,
    JobExchange,
    description_of,
    exchanging_beats_reading,
    job_exchange,
    reads_enough,
)
from holdfast.core.plan.reads import load_plan
from holdfast.settings import Settings
from holdfast.training.coordination.job import Job


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank would read, for every other rank."""

    share_reads: str = "never"
    """The rank's setting of that name."""

    round_bytes: int = 0
    """Bytes that it would read in one round, and receive in one."""

    description: bytes = b""
    """Its reads, by `description_of`; empty if it takes part in no exchange, or its reads are too many to describe."""

    reads_enough: bool = False
    """Whether this rank alone reads so much that an exchange may pay, or forces it."""

    def encode(self) -> bytes:
        """Return the offer for other ranks; empty if it holds no description."""
        return msgspec.msgpack.encode(self) if self.description else b""

    @staticmethod
    def decode(data: bytes) -> Offer:
        """Return the value that `encode` wrote."""
        return msgspec.msgpack.decode(data, type=inspected(Offer, msgspec.msgpack.Decoder))


NO_OFFER = Offer()
"""The offer of a rank that takes part in no exchange."""


@dataclass(frozen=True, slots=True)
class AgreedExchange:
    """An exchange in which every rank takes part."""

    job: JobExchange
    """Which rank reads which bytes, and which ranks receive them."""

    forced: bool
    """Whether the ranks exchange everything, without measuring if that is faster than reading."""


def planned_reads(wanted: Sequence[WantedBoxes], index: Index, job: Job) -> LoadPlan:
    """Return this rank's reads: of whole units if it may exchange bytes, so that all ranks cut at the same places."""
    may_exchange = job.settings.share_reads != "never" and job.comm.world_size > 1
    return load_plan(wanted, index.pieces_near, job.settings._tuning.read_window_bytes, whole_units=may_exchange)


def offer_of(plan: LoadPlan, manifest: Manifest, settings: Settings, world_size: int) -> Offer:
    """Return this rank's offer."""
    if settings.share_reads == "never" or world_size == 1:
        return Offer()
    round_bytes, forced = settings._tuning.exchange_bytes_max // 4, settings.share_reads == "always"
    description = description_of(plan, _pack_numbers(manifest), round_bytes, forced=forced)
    return Offer(settings.share_reads, round_bytes, description, forced or reads_enough(plan))


def agree_on_exchange(offers: Sequence[Offer]) -> AgreedExchange | None:
    """Return the exchange that follows from the offers of all ranks, the same on each; None: every rank reads its own.

    If settings differ, rank 0's count, except that one rank with "never" ends it for all.
    """
    if any(offer.share_reads == "never" or not offer.description for offer in offers):
        return None
    forced = offers[0].share_reads == "always"
    job = job_exchange([offer.description for offer in offers], offers[0].round_bytes, forced=forced)
    return AgreedExchange(job, forced) if job is not None else None


def has_files_elsewhere(manifest: Manifest) -> bool:
    """Return whether a checkpoint has files of another system. Pieces may share bytes in those."""
    return not manifest.attempt or any(is_file_url(pack.name) for pack in manifest.packs)


def divides_chunks(exchange: AgreedExchange, plan: LoadPlan, manifest: Manifest) -> bool:
    """Return whether pieces that share bytes of another system's file keep this rank from exchanging its reads."""
    runs = [run for run in plan.runs if not manifest.attempt or is_file_url(run.pack)]
    return exchange.job.divides(runs, _pack_numbers(manifest))


def read_or_exchange(
    job: Job,
    plan: LoadPlan,
    exchange: AgreedExchange | None,
    manifest: Manifest,
    packs: Packs,
    targets: Sequence[Target],
    on_bytes: Callable[[int], None] | None = None,
) -> TransferStats:
    """Read, check and place everything in a plan; with an exchange, the job reads each byte once.

    A collective if there is an exchange.

    Args:
        job: The ranks that load together.
        plan: This rank's reads.
        exchange: What the ranks agreed on.
        manifest: The checkpoint's.
        packs: Locates its packs by name.
        targets: By wanted number of the plan.
        on_bytes: Called with each count of bytes that arrived, from storage or a rank; on any thread.
    Raises:
        CorruptError: A chunk differs from what was saved.
        UnavailableError: The store failed.
    """
    settings = job.settings
    if exchange is None:
        sources = execute(plan, packs, targets, settings, job.codecs, moved=on_bytes)
        return TransferStats(plan.bytes, 0, sources=sources)
    rounds = exchange.job
    probe = None if exchange.forced else ExchangeProbe(PROBE_ROUNDS, partial(exchanging_beats_reading, rounds.left))
    planned = partial(_own_part, rounds, job.comm.rank, plan, _pack_numbers(manifest))
    rank_exchange = PlannedExchange(planned, rounds.round_count, probe)
    return execute_exchange(rank_exchange, job.comm, job.clock, packs, targets, settings, job.codecs, on_bytes)


def _own_part(rounds: JobExchange, rank: int, plan: LoadPlan, pack_numbers: Mapping[str, int]) -> ExchangePlan:
    with GcPause():
        return rounds.plan_of(rank, plan, pack_numbers)


def _pack_numbers(manifest: Manifest) -> dict[str, int]:
    return {record.name: number for number, record in enumerate(manifest.packs)}
