"""The suite that every codec must pass."""

from __future__ import annotations

import dataclasses
import random
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.ports.codec import GAIN_PARTS, RAW_PER_STORED_MAX, Codec, Coder, PairCodec, StoredPart
from holdfast.errors import CorruptError, InvalidError

Bytes = NDArray[np.uint8]

GUARD_BYTES = 64
"""Bytes before and after a chunk that no decoder may write."""

_MEMORY_PER_RAW = 8
"""Most memory of a decoder for a raw byte, and the memory that it may keep besides."""
_MEMORY_BESIDES = 4 << 20


@dataclass(frozen=True)
class Chunk:
    """What is coded."""

    kind: str
    """Names the content in a message."""
    dtype: str
    """The type of the elements."""
    base_dtype: str
    """The type of the base; empty without a base."""
    raw: bytes
    """The bytes of the chunk."""
    base: bytes | None
    """The bytes of the base."""

    def parts(self, coder: Coder) -> Sequence[StoredPart] | None:
        """Return the stored form in parts."""
        return coder.encode(memoryview(self.raw), None if self.base is None else memoryview(self.base))

    def encoded(self, coder: Coder) -> bytes | None:
        """Return the stored form."""
        form = self.parts(coder)
        return None if form is None else joined_parts(form)

    def decoded(self, coder: Coder, stored: bytes, raw_bytes: int | None = None) -> bytes:
        """Return the chunk of a stored form; what lies around its memory must stay as it is."""
        raw_bytes = len(self.raw) if raw_bytes is None else raw_bytes
        around = bytearray(b"\xa5" * (raw_bytes + 2 * GUARD_BYTES))
        view = memoryview(around)[GUARD_BYTES : GUARD_BYTES + raw_bytes]
        try:
            coder.decode(memoryview(stored), None if self.base is None else memoryview(self.base), view)
        finally:
            assert around[:GUARD_BYTES] + around[GUARD_BYTES + raw_bytes :] == b"\xa5" * 2 * GUARD_BYTES, (
                "wrote beyond the chunk"
            )
        return bytes(view)


def joined_parts(form: Sequence[StoredPart]) -> bytes:
    """Return a stored form whole."""
    whole = memoryview(bytearray(sum(map(len, form))))
    at = 0
    for part in form:
        room = whole[at : at + len(part)]
        if isinstance(part, memoryview):
            room[:] = part
        else:
            part.write(0, room)
        at += len(part)
    return bytes(whole)


def _random_bits(generator: np.random.Generator, total: int, itemsize: int) -> Bytes:
    return generator.integers(0, 256, total, dtype=np.uint8)


def _zeros(generator: np.random.Generator, total: int, itemsize: int) -> Bytes:
    return np.zeros(total, np.uint8)


def _all_equal(generator: np.random.Generator, total: int, itemsize: int) -> Bytes:
    return np.resize(generator.integers(0, 256, itemsize, dtype=np.uint8), total)


def _one_of_a_hundred(generator: np.random.Generator, total: int, itemsize: int) -> Bytes:
    elements = _random_bits(generator, total, itemsize).reshape(-1, itemsize)
    elements[generator.random(len(elements)) > 0.01] = 0
    return elements.reshape(-1)


def _numbers(generator: np.random.Generator, total: int, itemsize: int) -> Bytes:
    """Weights as after training, with NaNs of any payload, infinities, both zeros and subnormals among them."""
    numbers = (generator.standard_normal(total // itemsize) * 0.02).astype(_FLOATS[itemsize])
    bits = numbers.view(f"u{itemsize}")
    places = generator.integers(0, max(len(bits), 1), len(bits) // 500)
    ones = (1 << 8 * itemsize) - 1
    exponent = {2: 0x7F80, 4: 0x7F800000, 8: 0x7FF0000000000000}[itemsize]
    special = [0, 1, exponent, exponent | 1, ones, exponent - 1, 1 << (8 * itemsize - 1), ones >> 1]
    bits[places] = generator.choice(np.array(special, bits.dtype), len(places))
    return bits.view(np.uint8)


def _few_mantissas(generator: np.random.Generator, total: int, itemsize: int) -> Bytes:
    """Gradients of 16 bits that were clipped, as float32."""
    numbers = (generator.standard_normal(total // 4) * 0.02).astype(np.float32)
    bits = numbers.view(np.uint32)
    bits &= 0xFFFF0000
    return (numbers * np.float32(0.37)).view(np.uint8)


def _few_values(generator: np.random.Generator, total: int, itemsize: int) -> Bytes:
    return generator.integers(0, 11, total, dtype=np.uint8)


_FLOATS = {2: np.float16, 4: np.float32, 8: np.float64}

_KINDS: dict[str, Callable[[np.random.Generator, int, int], Bytes]] = {
    "random bits": _random_bits,
    "zeros": _zeros,
    "all equal": _all_equal,
    "one of a hundred": _one_of_a_hundred,
    "numbers": _numbers,
    "few mantissas": _few_mantissas,
    "few values": _few_values,
}


def chunk_of(kind: str, dtype: str, base_dtype: str, total: int, seed: int) -> Chunk:
    """Return a chunk of a kind of content.

    Args:
        kind: A key of the table above.
        dtype, base_dtype: The types of the elements and of the base.
        total: Its bytes: whole elements.
        seed: Of the numbers drawn.
    """
    generator = np.random.default_rng([seed, total])
    itemsize = DTYPES[dtype].itemsize
    if (kind == "numbers" and itemsize not in _FLOATS) or (kind == "few mantissas" and total % 4):
        kind = "few values"
    raw = _KINDS[kind](generator, total, itemsize).tobytes()
    return Chunk(kind, dtype, base_dtype, raw, rounded(raw, base_dtype) if base_dtype else None)


def rounded(raw: bytes, base_dtype: str) -> bytes:
    """Return float32 numbers rounded to 16 bits, as training rounds its masters to weights."""
    bits = np.frombuffer(raw, np.uint32)
    if base_dtype == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            return bits.view(np.float32).astype(np.float16).tobytes()
    carried = bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)
    return (carried >> 16).astype(np.uint16).tobytes()


class CodecSuite:
    """Every promise of `Codec` and `Coder`. Subclass it in a test module and override the fixture `codec`."""

    @pytest.fixture
    def codec(self) -> Codec:
        """Return the codec; override."""
        raise NotImplementedError("override the fixture `codec` with one that returns the codec")

    @staticmethod
    def types_of(codec: Codec) -> list[tuple[str, str]]:
        """Return the element types that a codec takes, each with one of its base."""
        bases = [""] if codec.base == "none" else list(DTYPES)
        return [(dtype, base) for dtype in DTYPES for base in bases if codec.takes(dtype, base)]

    def gainful(self, codec: Codec, total: int = 1 << 16) -> Iterator[tuple[Chunk, Coder, bytes]]:
        """Return chunks that become shorter, at least one of each element type."""
        for dtype, base_dtype in self.types_of(codec):
            coder = codec.coder(dtype, base_dtype)
            chunks = [chunk_of(kind, dtype, base_dtype, total, seed=1) for kind in _KINDS]
            forms = [(chunk, coder, form) for chunk in chunks if (form := chunk.encoded(coder)) is not None]
            assert forms, f"{codec.name} shortens no chunk of {dtype}"
            yield from forms

    def test_it_takes_some_element_types_and_refuses_the_rest(self, codec: Codec) -> None:
        taken = self.types_of(codec)
        assert taken
        assert codec.name.isidentifier()
        for dtype in (*DTYPES, "float7", ""):
            for base_dtype in ("", "bfloat16", "int64", "float7"):
                if (dtype, base_dtype) not in taken:
                    assert not codec.takes(dtype, base_dtype)
                    with pytest.raises(InvalidError, match=codec.name):
                        codec.coder(dtype, base_dtype)

    @pytest.mark.parametrize("kind", _KINDS)
    def test_any_bits_come_back(self, codec: Codec, kind: str) -> None:
        for dtype, base_dtype in self.types_of(codec):
            coder = codec.coder(dtype, base_dtype)
            itemsize = DTYPES[dtype].itemsize
            for total in (0, itemsize, 3 * itemsize, 4096, 4096 + 16 * itemsize, 99_984):
                chunk = chunk_of(kind, dtype, base_dtype, total, seed=2)
                self._require_sound(chunk, coder, chunk.encoded(coder))

    @pytest.mark.parametrize("total", [(1 << 20) + 48, 4 << 20])
    def test_large_chunks_come_back(self, codec: Codec, total: int) -> None:
        dtype, base_dtype = self.types_of(codec)[-1]
        coder = codec.coder(dtype, base_dtype)
        forms = []
        for kind in ("zeros", "one of a hundred", "numbers", "few mantissas", "few values"):
            chunk = chunk_of(kind, dtype, base_dtype, total, seed=3)
            forms.append(chunk.encoded(coder))
            self._require_sound(chunk, coder, forms[-1])
        assert any(forms)

    @staticmethod
    def _require_sound(chunk: Chunk, coder: Coder, form: bytes | None) -> None:
        if form is None:
            return
        assert (len(chunk.raw) - len(form)) * GAIN_PARTS >= len(chunk.raw), f"{chunk.kind}: gains too little"
        assert len(form) * RAW_PER_STORED_MAX >= len(chunk.raw), f"{chunk.kind}: shorter than a reader accepts"
        assert chunk.decoded(coder, form) == chunk.raw, f"{chunk.kind} of {chunk.dtype} {chunk.base_dtype}"

    def test_memory_at_any_address(self, codec: Codec) -> None:
        for chunk, coder, form in self.gainful(codec, 1 << 14):
            moved = memoryview(b"x" + chunk.raw)[1:]
            base = None if chunk.base is None else memoryview(b"x" + chunk.base)[1:]
            again = coder.encode(moved, base)
            assert again is not None
            assert joined_parts(again) == form
            raw = memoryview(bytearray(1 + len(chunk.raw)))[1:]
            coder.decode(memoryview(b"x" + form)[1:], base, raw)
            assert raw == chunk.raw

    def test_memory_in_a_stored_form_is_its_own_and_other_parts_read_the_chunk(self, codec: Codec) -> None:
        for dtype, base_dtype in self.types_of(codec):
            coder = codec.coder(dtype, base_dtype)
            kept = []
            for kind in _KINDS:
                chunk = chunk_of(kind, dtype, base_dtype, 1 << 14, seed=4)
                raw = bytearray(chunk.raw)
                base = None if chunk.base is None else memoryview(bytearray(chunk.base))
                form = coder.encode(memoryview(raw), base)
                assert raw == chunk.raw
                raw[:] = bytes(len(raw))
                if form is not None:
                    kept.append((chunk, raw, form))
            for chunk, raw, form in kept:
                found = [memoryview(bytes(part)) if isinstance(part, memoryview) else part for part in form]
                raw[:] = chunk.raw
                assert chunk.decoded(coder, joined_parts(found)) == chunk.raw, chunk.kind
                raw[:] = bytes(len(raw))

    def test_parts_that_read_the_chunk_may_be_written_in_pieces(self, codec: Codec) -> None:
        cuts = random.Random(6)
        for chunk, coder, _ in self.gainful(codec, 1 << 14):
            for part in chunk.parts(coder) or ():
                if isinstance(part, memoryview):
                    continue
                whole, pieces, start = joined_parts([part]), b"", 0
                while start < len(whole):
                    piece = memoryview(bytearray(min(cuts.choice((1, 2, 3, 4096, 4097)), len(whole) - start)))
                    part.write(start, piece)
                    pieces, start = pieces + piece, start + len(piece)
                assert pieces == whole

    def test_a_chunk_apart_has_the_same_form(self, codec: Codec) -> None:
        if codec.base == "none":
            return
        for dtype, base_dtype in self.types_of(codec):
            coder = cast(PairCodec, codec).coder(dtype, base_dtype)
            for kind in _KINDS:
                for total in (0, 4, 1 << 12, (1 << 19) + 12, 1 << 20):
                    chunk = chunk_of(kind, dtype, base_dtype, total, seed=5)
                    apart = coder.rounded(memoryview(b"x" + chunk.raw)[1:])
                    again = dataclasses.replace(chunk, base=bytes(apart.base))
                    form = apart.encode()
                    assert (None if form is None else joined_parts(form)) == again.encoded(coder), kind
                    self._require_sound(again, coder, None if form is None else joined_parts(form))
                    numbers = ~np.isnan(np.frombuffer(chunk.raw, np.float32))
                    assert again.base is not None
                    assert chunk.base is not None
                    found, expected = (np.frombuffer(base, np.uint16)[numbers] for base in (again.base, chunk.base))
                    assert np.array_equal(found, expected), kind

    def test_threads_do_not_disturb_each_other(self, codec: Codec) -> None:
        found = list(self.gainful(codec, 1 << 15))

        def once_more(number: int) -> bool:
            chunk, coder, form = found[number % len(found)]
            return chunk.encoded(coder) == form and chunk.decoded(coder, form) == chunk.raw

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(once_more, range(max(24, 2 * len(found)))))

    def test_a_chunk_of_part_of_an_element(self, codec: Codec) -> None:
        for chunk, coder, form in self.gainful(codec, 1 << 12):
            if DTYPES[chunk.dtype].itemsize > 1:
                if chunk.base is None:
                    assert coder.encode(memoryview(chunk.raw)[:-1]) is None
                with pytest.raises(CorruptError):
                    chunk.decoded(coder, form, len(chunk.raw) - 1)

    def test_a_chunk_of_another_length(self, codec: Codec) -> None:
        for chunk, coder, form in self.gainful(codec, 1 << 13):
            for raw_bytes in (0, 16, len(chunk.raw) - 16, len(chunk.raw) + 16, 2 * len(chunk.raw)):
                with suppress(CorruptError):
                    chunk.decoded(coder, form, raw_bytes)
            too_much = np.empty(RAW_PER_STORED_MAX * len(form) + 16, np.uint8)
            with pytest.raises(CorruptError, match=str(len(too_much))):
                coder.decode(memoryview(form), None, too_much.data)

    def test_a_base_of_another_length(self, codec: Codec) -> None:
        if codec.base == "none":
            return
        for chunk, coder, form in self.gainful(codec, 1 << 13):
            assert chunk.base is not None
            for base in (None, memoryview(b""), memoryview(chunk.base)[2:], memoryview(chunk.base + b"12")):
                with pytest.raises(CorruptError):
                    coder.decode(memoryview(form), base, memoryview(bytearray(len(chunk.raw))))

    def test_truncated_and_extended_forms(self, codec: Codec) -> None:
        for chunk, coder, form in self.gainful(codec, 1 << 13):
            for length in {*range(min(len(form), 40)), len(form) // 2, len(form) - 1}:
                with pytest.raises(CorruptError):
                    chunk.decoded(coder, form[:length])
            for more in (b"\0", b"\1", bytes(5000), form):
                with pytest.raises(CorruptError):
                    chunk.decoded(coder, form + more)

    def test_damage_is_corrupt_or_gives_other_bytes(self, codec: Codec) -> None:
        seed = random.randrange(1 << 32)
        chance = random.Random(seed)
        for chunk, coder, form in self.gainful(codec, 1 << 12):
            for _ in range(60):
                changed = bytearray(form)
                place = chance.choice((chance.randrange(len(form)), chance.randrange(min(len(form), 48))))
                changed[place] ^= 1 << chance.randrange(8)
                try:
                    chunk.decoded(coder, bytes(changed))
                except CorruptError as error:
                    assert str(error)
                except Exception as error:
                    raise AssertionError(f"seed {seed}, byte {place} of {chunk.kind}, {chunk.dtype}") from error

    def test_hostile_lengths_take_no_memory(self, codec: Codec) -> None:
        for chunk, coder, form in self.gainful(codec, 1 << 12):
            hostile = [bytes((value,)) * len(form) for value in (0, 1, 0x7F, 0xFF)]
            hostile += [
                form[:at] + claim.to_bytes(width, "little") + form[at + width :]
                for width, claim, step in ((4, 0xFFFFFFFF, 4), (4, len(form), 4), (8, 1 << 60, 4), (1, 0xA8, 1))
                for at in range(0, min(len(form) - 8, 32), step)
            ]
            chunk.decoded(coder, form)
            tracemalloc.start()
            for stored in hostile:
                with suppress(CorruptError):
                    chunk.decoded(coder, stored)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak <= _MEMORY_PER_RAW * len(chunk.raw) + _MEMORY_BESIDES
