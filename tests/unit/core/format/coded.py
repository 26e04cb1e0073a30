"""Coded pieces to index and to name in headers: their numbers are drawn, no codec runs."""

from __future__ import annotations

import math
from itertools import accumulate

import hypothesis.strategies as st

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import chunk_count, chunk_range
from holdfast.base.geometry.region import FlatRange, Region
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.plan import Coding, PackItem, PackPlan
from holdfast.core.format.codec_names import CODEC_BASES, needs_pair, used_codecs

CHUNK = 4096
ATTEMPT = "0123456789abcdef"
PACK = "coded/r00003.safetensors"


def coding_of(raw_bytes: int, stored: list[int], codecs: list[str], pair: str = "") -> Coding:
    """Return the coding of a piece with one stored length and codec (empty: raw) for each chunk."""
    names = tuple(sorted({name for name in codecs if name}))
    numbers = bytes(names.index(name) + 1 if name else 0 for name in codecs)
    assert chunk_count(raw_bytes, CHUNK) == len(stored) == len(codecs)
    return Coding(names, numbers, (0, *accumulate(stored)), pair)


@st.composite
def codings(draw: st.DrawFn, raw_bytes: int, pair: str = "") -> Coding:
    """Draw the coding of a piece of so many raw bytes; residual only with a pair."""
    names = [name for name in CODEC_BASES if pair or not needs_pair(name)]
    stored, codecs = [], []
    for number in range(chunk_count(raw_bytes, CHUNK)):
        start, stop = chunk_range(raw_bytes, CHUNK, number)
        codec = draw(st.sampled_from(["", *names])) if stop - start > 1 else ""
        codecs.append(codec)
        stored.append(draw(st.integers(1, stop - start - 1)) if codec else stop - start)
    coding = coding_of(raw_bytes, stored, codecs, pair)
    return coding if any(map(needs_pair, coding.codecs)) else coding_of(raw_bytes, stored, codecs)


@st.composite
def coded_packs(draw: st.DrawFn) -> tuple[PackPlan, dict[str, str], list[Coding]]:
    """Draw a coded pack, the tensors that its pieces may be coded against, and the coding of each piece."""
    items, pairs, drawn, offset = [], {}, [], 0
    for number in range(draw(st.integers(0, 5))):
        fqn = f"{draw(st.text(st.characters(codec='utf-8'), max_size=8))}{number}"
        dtype = draw(st.sampled_from(["float32", "bfloat16", "complex128", "int8"]))
        shape = tuple(draw(st.lists(st.integers(1, 90), min_size=0, max_size=3)))
        region: Region = Box.whole(shape)
        if draw(st.booleans()):
            start, stop = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
            region = FlatRange(start, stop)
        if dtype == "float32" and draw(st.booleans()):
            pairs[fqn] = f'"{fqn}" of é'
        item = PackItem(TensorSpec(fqn, dtype, shape), region, offset, 0)
        items.append(item)
        drawn.append(draw(codings(item.bytes, pairs.get(fqn, ""))))
        offset += item.bytes
    return PackPlan(PACK, tuple(items)), pairs, drawn


def is_canonical(coding: Coding) -> bool:
    """Return whether a coding names its codecs as an index does."""
    return (coding.codecs, coding.numbers) == used_codecs(coding.codecs, coding.numbers)
