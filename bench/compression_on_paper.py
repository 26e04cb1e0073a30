"""How coded pieces of a simulated job are stored: codecs, lengths and pairs, without any bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

from holdfast.base.geometry.chunking import chunk_count, chunk_range
from holdfast.base.geometry.tensor import Shard
from holdfast.base.types.plan import Coding, PackItem, PackPlan
from holdfast.core.plan.coding.coded_pieces import CodingChoice
from holdfast.core.plan.coding.kinds import kinds_owned
from holdfast.core.plan.ownership import Owned
from holdfast.core.plan.pairs import pairs_of
from holdfast.settings import Settings

SHARES = {"bfloat16": 0.663, "residual": 0.501, "float32": 0.81}
"""Stored bytes ÷ raw bytes, as measured: of weights, of masters, and of moments."""

SPREAD = 0.02
"""How much the share of a piece differs from that, at most."""


class PaperCoding:
    """Invents how the chunks of a job are stored. Pairs are found as a save finds them."""

    def __init__(self, settings: Settings) -> None:
        """Code every piece that is large enough to be coded."""
        self._chunk_bytes, self._coded_bytes_min = settings.chunk_bytes, settings._tuning.coded_bytes_min
        self._chance = random.Random(11)
        self._weights: list[PackItem] = []

    def choice_of(self, shards: Sequence[Shard], owned: Sequence[Owned]) -> CodingChoice:
        """Return which pieces a rank codes."""
        kinds = kinds_owned(shards, owned, (), self._coded_bytes_min).kinds
        return CodingChoice(self._chunk_bytes, self._coded_bytes_min, kinds, frozenset(kinds.values()))

    def codings_of(self, pack: PackPlan) -> list[Coding]:
        """Return how the pieces of a coded pack are stored. The pack with the weights comes before their masters'."""
        if pack.items[0].tensor.itemsize == 2:
            self._weights = list(pack.items)
        pairs = pairs_of((item.tensor, item.region) for item in (*self._weights, *pack.items))
        return [self._coding(item, pairs.get((item.tensor.fqn, item.region), "")) for item in pack.items]

    def _coding(self, item: PackItem, pair_fqn: str) -> Coding:
        codec = "residual" if pair_fqn else item.codec
        share = SHARES["residual" if pair_fqn else item.tensor.dtype]
        share += self._chance.uniform(-SPREAD, SPREAD)
        count = chunk_count(item.bytes, self._chunk_bytes)
        lengths = [max(int(self._chunk_bytes * share), 1)] * (count - 1)
        start, stop = chunk_range(item.bytes, self._chunk_bytes, count - 1)
        starts = (0, *accumulate([*lengths, max(int((stop - start) * share), 1)]))
        return Coding((codec,), bytes([1]) * count, starts, pair_fqn)
