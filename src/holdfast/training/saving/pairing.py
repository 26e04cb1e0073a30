"""Finds the pairs among the pieces that a rank writes: masters whose first page, rounded, equals that of a weight.

A found pair is a guess that is kept with the plan. The encoder proves the guess for each chunk before use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast.base.geometry.dtype import MASTER_TYPE, WEIGHT_TYPES
from holdfast.base.ports.framework import Source
from holdfast.base.types.plan import PackItem, Piece, PieceKey
from holdfast.core.engine.encoding.chunk_encoder import rounded
from holdfast.core.engine.encoding.encode import KnownWeights
from holdfast.core.engine.writing.write import PackWriter
from holdfast.core.format.digest import digest_of
from holdfast.core.plan.pairs import Pairs, is_moment, pairs_of
from holdfast.core.plan.plan_cache import SavePlan
from holdfast.settings import PAGE_BYTES
from holdfast.training.saving.deduplication import first_pages


def pairs_of_plan(plan: SavePlan, sources: Sequence[Source], writer: PackWriter) -> Pairs:
    """Return the pairs among the pieces of a plan. Pages are read at the first save by the plan only.

    Args:
        plan: All pieces that this rank owns.
        sources: Bytes by shard number.
        writer: Lends a buffer for copies.
    """
    pairing = plan.pairing
    if not any(pack.is_coded for pack, _ in plan.packs):
        return {}
    if pairing.pairs is None:
        weights, masters = _alike(plan)
        pairing.pairs = _found(weights, masters, sources, writer) if masters else {}
    return pairing.pairs


def known_weights(pairs: Pairs, unchanged: Iterable[Piece]) -> KnownWeights:
    """Return the weights of pairs, with the digests of weights that are left in earlier packs.

    A master that is left in an earlier pack keeps its weight: no other piece is coded against that weight.
    """
    pieces = list(unchanged)
    taken = {(piece.coding.pair_fqn, piece.region) for piece in pieces if piece.coding is not None}
    weights = KnownWeights({key: weight for key, weight in pairs.items() if (weight, key[1]) not in taken})
    for piece in pieces:
        weights.record(piece.tensor, piece.region, piece.digests)
    return weights


def _alike(plan: SavePlan) -> tuple[list[PackItem], list[PackItem]]:
    """Return weights, and masters in coded packs, that match a piece of the other kind in shape and region."""
    weights: dict[object, list[PackItem]] = {}
    masters: dict[object, list[PackItem]] = {}
    for pack, _ in plan.packs:
        for item in pack.items:
            place = item.tensor.global_shape, item.region
            if not item.bytes or is_moment(item.tensor.fqn):
                continue
            if item.tensor.dtype in WEIGHT_TYPES:
                weights.setdefault(place, []).append(item)
            elif pack.is_coded and item.tensor.dtype == MASTER_TYPE:
                masters.setdefault(place, []).append(item)
    both = weights.keys() & masters.keys()
    return (
        [item for place, items in weights.items() if place in both for item in items],
        [item for place, items in masters.items() if place in both for item in items],
    )


def _found(
    weights: Sequence[PackItem], masters: Sequence[PackItem], sources: Sequence[Source], writer: PackWriter
) -> Pairs:
    with writer.lent() as buffer:
        # Half a page of a weight has as many elements as a page of its master.
        pages = zip(weights, first_pages(weights, sources, buffer), strict=True)
        by_page: dict[object, list[str]] = {}
        for item, page in pages:
            by_page.setdefault(_page_key(item, item.tensor.dtype, page[: PAGE_BYTES // 2]), []).append(item.tensor.fqn)
        fitting: dict[PieceKey, list[str]] = {}
        for item, page in zip(masters, first_pages(masters, sources, buffer), strict=True):
            for dtype in WEIGHT_TYPES:
                found = by_page.get(_page_key(item, dtype, rounded(page, dtype)), [])
                fitting.setdefault((item.tensor.fqn, item.region), []).extend(found)
    named = pairs_of((item.tensor, item.region) for item in (*weights, *masters))
    return chosen(named, fitting)


def _page_key(item: PackItem, dtype: str, page: memoryview) -> object:
    return item.tensor.global_shape, item.region, dtype, digest_of(page)


def chosen(named: Pairs, fitting: Mapping[PieceKey, Sequence[str]]) -> Pairs:
    """Return one master for each weight, and one weight for each master: first the pairs by name that fit.

    Args:
        named: The pairs by name.
        fitting: By master piece, the weights whose first page fits.
    """
    pairs = {key: weight for key, weight in named.items() if weight in fitting.get(key, ())}
    taken = {(weight, region) for (_, region), weight in pairs.items()}
    for key, weights in sorted(fitting.items(), key=lambda entry: entry[0][0]):
        if key not in pairs and len(weights) == 1 and (weights[0], key[1]) not in taken:
            pairs[key] = weights[0]
            taken.add((weights[0], key[1]))
    return pairs
