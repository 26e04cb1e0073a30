"""How ranks come to an exchange: each offers what it would read, and all draw the same conclusion."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from holdfast.clock import Clock
from holdfast.engine.exchange import ExchangeProbe, PlannedExchange, TransferStats, execute_exchange
from holdfast.engine.gc_pause import GcPause
from holdfast.engine.read import execute
from holdfast.plan.exchange import (
    PROBE_ROUNDS,
    JobExchange,
    description_of,
    exchanging_beats_reading,
    job_exchange,
)
from holdfast.ports.comm import Comm
from holdfast.ports.framework import Target
from holdfast.ports.store import Packs
from holdfast.settings import Settings
from holdfast.types.exchange import ExchangePlan
from holdfast.types.manifest import Manifest
from holdfast.types.plan import LoadPlan


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank says of its reads."""

    exchange: str = "never"
    """Its setting."""

    round_bytes: int = 0
    """What it would read, and be given, in one round."""

    description: bytes = b""
    """What it reads, by `description_of`; empty where it cannot or will not say."""

    def encoded(self) -> bytes:
        """Return the offer for other ranks."""
        return msgspec.msgpack.encode([json.dumps([self.exchange, self.round_bytes]).encode(), self.description])

    @staticmethod
    def decoded(data: bytes) -> Offer:
        """Return the offer that `encoded` wrote down."""
        head, description = msgspec.msgpack.decode(data, type=list[bytes])
        exchange, round_bytes = json.loads(head)
        return Offer(exchange, round_bytes, description)


@dataclass(frozen=True, slots=True)
class Agreed:
    """An exchange that every rank takes part in."""

    job: JobExchange
    """Who reads what, and who is given it."""

    forced: bool
    """Whether it goes on whatever is measured."""


def offer_of(plan: LoadPlan, manifest: Manifest, settings: Settings, world_size: int) -> Offer:
    """Return what this rank says of its reads."""
    if settings.share_reads == "never" or world_size == 1:
        return Offer()
    round_bytes, forced = settings._tuning.exchange_bytes_max // 4, settings.share_reads == "always"
    described = description_of(plan, _numbers(manifest), round_bytes, world_size, forced=forced)
    return Offer(settings.share_reads, round_bytes, described)


def agreed_on(offers: Sequence[Offer]) -> Agreed | None:
    """Return the exchange that all ranks' offers come to, the same on each of them; None: everybody reads his own."""
    if any(offer.exchange == "never" or not offer.description for offer in offers):
        return None
    forced = offers[0].exchange == "always"
    job = job_exchange([offer.description for offer in offers], offers[0].round_bytes, forced=forced)
    return Agreed(job, forced) if job is not None else None


def carried_out(
    plan: LoadPlan,
    agreed: Agreed | None,
    manifest: Manifest,
    comm: Comm,
    clock: Clock,
    packs: Packs,
    targets: Sequence[Target],
    settings: Settings,
    moved: Callable[[int], None] | None = None,
) -> TransferStats:
    """Read, check and place everything a plan lists, each byte once in the job where that was agreed on.

    `moved` is told how many bytes were read or received, on any thread.

    Raises:
        CorruptError: A chunk is not what was saved.
        UnavailableError: The store failed.
    """
    if agreed is None:
        execute(plan, packs, targets, settings, moved=moved)
        return TransferStats(plan.bytes, 0)
    job = agreed.job
    probe = None if agreed.forced else ExchangeProbe(PROBE_ROUNDS, partial(exchanging_beats_reading, job.left))
    planned = partial(_planned, job, comm.rank, plan, _numbers(manifest))
    exchange = PlannedExchange(planned, job.round_count, probe)
    return execute_exchange(exchange, comm, clock, packs, targets, settings, moved)


def _planned(job: JobExchange, rank: int, plan: LoadPlan, pack_numbers: Mapping[str, int]) -> ExchangePlan:
    with GcPause():
        return job.plan_of(rank, plan, pack_numbers)


def _numbers(manifest: Manifest) -> dict[str, int]:
    return {record.name: number for number, record in enumerate(manifest.packs)}
