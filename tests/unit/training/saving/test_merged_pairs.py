"""What is committed can be decoded: a save whose parts lack a pair is refused before its manifest exists."""

from __future__ import annotations

import itertools

import pytest

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.index.index_builder import IndexBuilder
from holdfast.core.format.names import part_name
from holdfast.core.format.part import RankPart, encode_part
from holdfast.errors import CorruptError
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.training.coordination.commit_vote import Vote
from holdfast.training.saving.merge import merge_parts
from tests.unit.core.format.coded import ATTEMPT, CHUNK, coding_of

WEIGHT, MASTER = TensorSpec("w", "bfloat16", (2048,)), TensorSpec("m", "float32", (2048,))


@pytest.mark.parametrize("cuts", [(0, 2048), (0, 1024, 2048)])
def test_a_weight_that_is_cut_otherwise_than_its_master_is_no_pair(cuts: tuple[int, ...]) -> None:
    builder = IndexBuilder(CHUNK)
    for start, stop in itertools.pairwise(cuts):
        digests = bytes(16)
        builder.add(WEIGHT, Box((start,), (stop,)), "r00000.safetensors", 4096 + 2 * start, digests)
    coding = coding_of(8192, [100, 200], ["residual", "planes"], "w")
    builder.add(MASTER, Box((0,), (2048,)), "coded/r00000.safetensors", 4096, bytes(32), coding)
    data = encode_part(RankPart(0, ATTEMPT, builder.index(), (), None, {}, ()))
    store = MemoryStore(f"merged-pairs-{len(cuts)}")
    store.put(f"{ATTEMPT}/{part_name(0)}", data)
    location = CheckpointLocation(store, "", None)
    votes = [Vote(len(data), hex_digest_of(data))]
    if len(cuts) == 2:
        assert merge_parts(location, ATTEMPT, votes, CHUNK).index.pieces.count == 2
    else:
        with pytest.raises(CorruptError, match="m is coded against w"):
            merge_parts(location, ATTEMPT, votes, CHUNK)
