"""Frames that a reader refuses before it decodes them, and the two ways to write one."""

from __future__ import annotations

import sys
import tracemalloc

import numpy as np
import pytest

from holdfast.backends.codecs import zstd
from holdfast.errors import CorruptError

if sys.version_info >= (3, 14):
    from compression.zstd import CompressionParameter, ZstdCompressor, ZstdDict, compress
else:
    from backports.zstd import CompressionParameter, ZstdCompressor, ZstdDict, compress

SKIPPABLE = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"junk"
WHOLE = bytes(range(250)) * 40
FRAME = compress(WHOLE, 3)


def decoded(frame: bytes, raw_bytes: int = len(WHOLE)) -> bytes:
    raw = bytearray(raw_bytes)
    zstd.decode_frame(memoryview(frame), memoryview(raw), "plane 7")
    return bytes(raw)


def header(descriptor: int, *fields: tuple[int, int]) -> bytes:
    """The header of a frame: a byte, then numbers of so many bytes."""
    return b"\x28\xb5\x2f\xfd" + bytes((descriptor,)) + b"".join(n.to_bytes(width, "little") for n, width in fields)


def test_a_frame_comes_back() -> None:
    assert decoded(FRAME) == WHOLE
    assert decoded(compress(WHOLE, options={CompressionParameter.checksum_flag: 1})) == WHOLE


@pytest.mark.parametrize(
    ("frame", "found"),
    [
        pytest.param(b"", "nothing", id="nothing"),
        pytest.param(FRAME[:5], "zstd frame", id="half a header"),
        pytest.param(b"\0" + FRAME[1:], "00b52ffd", id="no frame"),
        pytest.param(SKIPPABLE + FRAME, "502a4d18", id="skippable frame first"),
        pytest.param(FRAME + SKIPPABLE, "12 bytes after", id="skippable frame after"),
        pytest.param(FRAME + FRAME, f"{len(FRAME)} bytes after", id="two frames"),
        pytest.param(FRAME + b"\0", "1 bytes after", id="a byte more"),
        pytest.param(FRAME[:-1], "breaks off", id="a byte less"),
        pytest.param(compress(WHOLE[:-1]), "claims 9999 bytes; expected 10000", id="one too few"),
        pytest.param(compress(WHOLE + b"x"), "claims 10001 bytes; expected 10000", id="one too many"),
        pytest.param(header(0xC0, (0, 1), (1 << 60, 8)) + FRAME, f"claims {1 << 60}", id="an exabyte"),
        pytest.param(header(0xE0, (1 << 60, 8)) + FRAME, f"claims {1 << 60}", id="an exabyte in one segment"),
        pytest.param(header(0x80, (0xA8, 1), (len(WHOLE), 4)) + FRAME, f"window of {1 << 31}", id="window of 2 GiB"),
        pytest.param(header(0x80, (0x51, 1), (len(WHOLE), 4)), "window of 1179648", id="window just too large"),
        pytest.param(header(0x00, (0x38, 1)) + FRAME[9:], "does not say", id="size not stated"),
        pytest.param(header(0x61, (5, 1), (len(WHOLE) - 256, 2)) + FRAME[7:], "dictionary", id="dictionary"),
        pytest.param(header(0x60, (len(WHOLE) - 256, 2)) + b"\x07\0\0", "damaged", id="reserved block"),
        pytest.param(header(0x60, (len(WHOLE) - 256, 2)) + b"\x01\0\0", "damaged", id="empty last block"),
    ],
)
def test_a_frame_that_is_refused(frame: bytes, found: str) -> None:
    with pytest.raises(CorruptError, match=f"plane 7: .*{found}"):
        decoded(frame)


def test_a_frame_that_holds_more_than_it_says() -> None:
    run = (1 | 1 << 1 | 200_000 << 3).to_bytes(3, "little") + b"x"
    with pytest.raises(CorruptError):
        decoded(header(0x60, (len(WHOLE) - 256, 2)) + run)
    two = (
        (0 | 1 << 1 | 9_000 << 3).to_bytes(3, "little") + b"x" + (1 | 1 << 1 | 9_000 << 3).to_bytes(3, "little") + b"y"
    )
    with pytest.raises(CorruptError):
        decoded(header(0x60, (len(WHOLE) - 256, 2)) + two)


def test_a_frame_in_one_segment_larger_than_a_window() -> None:
    whole = bytes(2 << 20)
    with pytest.raises(CorruptError, match=f"window of {2 << 20} bytes; expected at most {1 << 20}"):
        decoded(compress(whole, options={CompressionParameter.window_log: 22}), len(whole))
    assert decoded(compress(whole, options={CompressionParameter.window_log: 20}), len(whole)) == whole


def test_a_frame_of_unknown_length_and_one_with_a_dictionary() -> None:
    streamed = ZstdCompressor()
    unknown = streamed.compress(WHOLE) + streamed.flush(ZstdCompressor.FLUSH_FRAME)
    with pytest.raises(CorruptError, match="does not say"):
        decoded(unknown)
    words = ZstdDict(WHOLE[:1000], is_raw=True)
    raw_dictionary = compress(WHOLE, zstd_dict=words)
    with pytest.raises(CorruptError):
        decoded(raw_dictionary)


def test_a_claim_takes_no_memory() -> None:
    claims = [header(0x80, (0xA8, 1), (len(WHOLE), 4)) + FRAME, header(0xE0, (1 << 60, 8)) + FRAME]
    tracemalloc.start()
    for frame in claims:
        with pytest.raises(CorruptError):
            decoded(frame)
    assert tracemalloc.get_traced_memory()[1] < 1 << 18
    tracemalloc.stop()


def test_exponents_shrink_by_either_way_of_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.random.default_rng(1).standard_normal(1 << 17).astype(np.float32)
    exponents = (numbers.view(np.uint32) >> 23).astype(np.uint8)
    lengths = {}
    for name, options in (("codes", zstd._NO_SEARCH), ("codes and matches", zstd._HUFFMAN)):
        frame = ZstdCompressor(options=options).compress(exponents.data, ZstdCompressor.FLUSH_FRAME)
        lengths[name] = len(frame)
        assert decoded(frame, len(exponents)) == exponents.tobytes()
    assert max(lengths.values()) < 0.5 * len(exponents)
    assert len(zstd.huffman_frame(exponents.data)) == lengths["codes"]
    # A zstd that does not know the parameter.
    monkeypatch.setitem(zstd._NO_SEARCH, 99_999, 1)
    assert (
        len(zstd._huffman_compressor().compress(exponents.data, ZstdCompressor.FLUSH_FRAME))
        == lengths["codes and matches"]
    )


def test_rows_of_zeros_are_found() -> None:
    numbers = np.random.default_rng(1).integers(0, 8, 1 << 17, dtype=np.uint8)
    numbers.reshape(-1, 512)[::3] = 0
    assert len(zstd.huffman_frame(numbers.data, has_runs=True)) < 0.95 * len(zstd.huffman_frame(numbers.data))
