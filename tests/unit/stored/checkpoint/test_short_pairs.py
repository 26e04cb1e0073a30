"""A pack that is too short damages what it stores, and what is coded against that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.manifest import FileRecord
from holdfast.core.format.index.index_builder import IndexBuilder
from holdfast.core.format.index.index_file import encode_index
from holdfast.core.format.index.overview import split
from holdfast.core.format.index.split_index import SplitIndex
from holdfast.errors import CorruptError
from holdfast.stored.checkpoint.coverage import stored_by
from tests.unit.core.format.coded import CHUNK, coding_of
from tests.unit.core.format.documents import manifest


@pytest.mark.parametrize("is_split", [False, True])
def test_a_short_pack_damages_what_is_coded_against_its_pieces(is_split: bool) -> None:
    region, builder = Box((0,), (2048,)), IndexBuilder(CHUNK)
    for name, pack in (("a", "r00000"), ("b", "r00001")):
        weight, master = TensorSpec(f"w{name}", "bfloat16", (2048,)), TensorSpec(f"m{name}", "float32", (2048,))
        builder.add(weight, region, f"{pack}.safetensors", 4096, bytes(16))
        coding = coding_of(8192, [100, 200], ["residual", "planes"], weight.fqn)
        builder.add(master, region, f"coded/{pack}.safetensors", 4096, bytes(32), coding)
    index = builder.index()
    parts, overview = split(index, 1)
    files = [encode_index(part) for part in parts]
    assert len(files) == 4
    records = tuple(FileRecord(f"index-{number:05d}.msgpack", len(data), "") for number, data in enumerate(files))

    def read(wanted: Sequence[FileRecord]) -> list[bytes]:
        return [files[records.index(record)] for record in wanted]

    whole = SplitIndex(overview, replace(manifest(), indexes=records), read, "here/") if is_split else index
    require = stored_by(whole, {"r00000.safetensors": (8000, CorruptError("too short"))})
    for damaged in ("wa", "ma"):
        with pytest.raises(CorruptError, match=f"{damaged}: too short"):
            require(damaged)
    for sound in ("wb", "mb"):
        require(sound)
    require = stored_by(whole, {"coded/r00000.safetensors": (4395, CorruptError("too short"))})
    for sound in ("wa", "wb", "mb"):
        require(sound)
    with pytest.raises(CorruptError, match="ma"):
        require("ma")
    stored_by(whole, {"coded/r00000.safetensors": (4396, CorruptError("too short"))})("ma")
