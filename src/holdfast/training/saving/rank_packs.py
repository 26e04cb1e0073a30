"""Decides which packs one rank writes: the plan of its bytes, less the pieces that the base step holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from holdfast.base.ports.framework import Collected
from holdfast.base.ports.readable import StoreTraits
from holdfast.base.types.plan import PlannedPack
from holdfast.core.engine.encoding.encode import KnownWeights
from holdfast.core.format.pack import HeaderBody
from holdfast.core.plan.coding.kinds import OwnedKinds, kinds_owned
from holdfast.core.plan.grid import cut_at_grid
from holdfast.core.plan.ownership import Owned, owned_by
from holdfast.core.plan.packing import PackSizes, cell_elements_max, packs_of
from holdfast.core.plan.plan_cache import SavePlan, save_plan, with_header
from holdfast.settings import Settings
from holdfast.training.coordination.agreement.records import Agreement
from holdfast.training.coordination.job import Job
from holdfast.training.coordination.save_context import SaveContext
from holdfast.training.saving.coding import SaveCoding
from holdfast.training.saving.deduplication import LinkPack
from holdfast.training.saving.pairing import known_weights, pairs_of_plan
from holdfast.training.saving.target import SaveTarget


@dataclass(frozen=True, slots=True)
class Owners:
    """The ranks among which the bytes of this rank are divided."""

    holders: Mapping[str, tuple[int, ...]]
    """By FQN of each plain tensor, and of each DTensor on sibling meshes: the ranks that hold the tensor, ascending."""

    lowest_only: bool = False
    """Whether the lowest holder writes all of a tensor: if replicas differ, parameters and moments must come from one
    rank."""

    @classmethod
    def agreed(cls, agreement: Agreement, collected: Collected) -> Owners:
        """Return the owners on which the ranks have agreed."""
        fqns = [local.shard.tensor.fqn for local in collected.shards if local.shard.holders is None]
        holders = agreement.holders_of_each(fqns)
        holders.update(agreement.sibling_writers)
        return cls(holders, lowest_only=agreement.drift is not None)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The bytes that this rank owns."""

    save: SavePlan
    """The packs, without the names of this attempt."""

    is_new: bool
    """Whether this save made the plan; otherwise an earlier save made the plan."""

    coding: SaveCoding | None
    """Which pieces are coded, and the measurements; None without compression."""


def plan(job: Job, target: SaveTarget, collected: Collected, owners: Owners, layout: bytes) -> RankPlan:
    """Decide which bytes this rank writes and in which packs, or find the decision of an earlier save.

    Args:
        job: Remembers the plans of earlier saves.
        target: Where the packs go.
        collected: The state of this rank.
        owners: The ranks that share the bytes of this rank.
        layout: Fingerprint of the layout and of the pieces that this rank holds.
    """
    rank, settings, tuning = job.comm.rank, job.settings, job.settings._tuning
    shards = [local.shard for local in collected.shards]
    sizes = sizes_of_packs(target.location.store.traits, settings)
    compresses = settings.compression != "off"

    def own() -> list[Owned]:
        owned = owned_by(
            rank,
            shards,
            owners.holders,
            settings.chunk_bytes,
            lowest_only=owners.lowest_only,
            keeps_pairs=compresses,
        )
        return owned if sizes is None else cut_at_grid(shards, owned, sizes.cell_elements)

    def own_by_kind() -> OwnedKinds:
        return kinds_owned(shards, own(), settings.compression_skip, tuning.coded_bytes_min)

    key = layout + f"{owners.lowest_only} {sizes}".encode()
    coding = None
    if compresses:
        by_kind, _ = job.coding.owned_kinds.of(key, owners.holders, own_by_kind)
        coding = SaveCoding(job, target.location, by_kind, target.writer)
        key += f" {coding.key}".encode()

    def pack() -> SavePlan:
        owned, pieces = (own(), None) if coding is None else (by_kind.owned, coding.pieces)
        packs = packs_of(rank, shards, owned, tuning.pack_header_bytes_max, sizes, pieces)
        headed = [with_header(pack, settings.chunk_bytes) for pack in packs]
        return save_plan(headed, settings.chunk_bytes, tuning.unchanged_bytes_min)

    chosen, is_new = job.plan_cache.of(key, owners.holders, pack)
    return RankPlan(chosen, is_new, coding)


def sizes_of_packs(traits: StoreTraits, settings: Settings) -> PackSizes | None:
    """Return the sizes of packs in a store with a largest object; None in a store of files."""
    if traits.object_bytes_max is None and not traits.appears_whole:
        return None
    tuning, in_flight_max = settings._tuning, settings.object_store.bytes_in_flight_max
    # A cap is exact to a tenth over ten objects, so objects must be small.
    share = 1 if settings.max_bytes_per_second is None else tuning.capped_pack_share
    # A pack that appears whole stays in memory until its write ends.
    limits = (traits.object_bytes_max, in_flight_max if traits.appears_whole else None)
    bytes_max = min(limit for limit in limits if limit is not None)
    return PackSizes(
        full_bytes=min(tuning.full_pack_bytes // share, in_flight_max // 8),
        bytes_max=bytes_max,
        cell_elements=min(tuning.cell_elements // share, cell_elements_max(bytes_max)),
    )


@dataclass(frozen=True, slots=True)
class RankPacks:
    """The packs that this rank writes."""

    planned: RankPlan
    """The plan of all pieces that this rank owns."""

    rest: SavePlan
    """The plan without the pieces that an earlier step holds."""

    packs: list[PlannedPack]
    """The packs of `rest`, with the keys and headers of this attempt."""

    weights: KnownWeights
    """The weights that may be rounded masters of coded packs."""


def deduplicate(
    target: SaveTarget, planned: SavePlan, collected: Collected, context: SaveContext, link: LinkPack
) -> tuple[SavePlan, KnownWeights]:
    """Leave out the pieces that the base step holds.

    Args:
        target: The deduplicator of the target knows the base step.
        planned: The packs of all pieces that this rank owns.
        collected: The state of this rank.
        context: The base step and the suspect steps.
        link: Gives a pack of an earlier step a name in the folder of this attempt.
    Returns:
        The plan of the other pieces, and the weights that may be rounded masters of coded packs.
    """
    sources = [local.source for local in collected.shards]
    pairs = pairs_of_plan(planned, sources, target.writer)
    rest = target.deduplicator.without_unchanged(planned, sources, context, link)
    return rest, known_weights(pairs, target.deduplicator.unchanged_pieces)


def name_packs(
    planned: RankPlan, rest: SavePlan, weights: KnownWeights, folder: str, provenance: Mapping[str, str]
) -> RankPacks:
    """Return the packs with their keys and headers.

    Args:
        planned, rest, weights: As in `RankPacks`.
        folder: Key of the folder of the packs, with a slash at the end.
        provenance: The metadata of each header: step, attempt and rank.
    """
    packs = []
    for pack, body in rest.packs:
        key = folder + pack.name
        if isinstance(body, HeaderBody):
            packs.append(PlannedPack(key, body.header(provenance), pack))
            continue
        rounded_from = (weights.pairs.get((item.tensor.fqn, item.region), "") for item in pack.items)
        coded = body.with_pairs(filter(None, rounded_from))
        header = partial(coded.header, provenance)
        packs.append(PlannedPack(key, b"", pack, coded.header_bytes(provenance), header))
    return RankPacks(planned, rest, packs, weights)
