"""zstd: the one file that imports it, the bounds of its frames, and the codec that uses nothing else."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass

from holdfast.backends.codecs.sections import element_count, require_taken, sections_of, stored_form
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.ports.codec import Base, Coder, StoredPart
from holdfast.errors import CorruptError

if sys.version_info >= (3, 14):
    from compression.zstd import (
        CompressionParameter,
        DecompressionParameter,
        Strategy,
        ZstdCompressor,
        ZstdDecompressor,
        ZstdError,
    )
else:
    from backports.zstd import (
        CompressionParameter,
        DecompressionParameter,
        Strategy,
        ZstdCompressor,
        ZstdDecompressor,
        ZstdError,
    )

WINDOW_LOG_MAX = 20
"""A frame whose window is larger is refused: it would make a reader set memory aside."""

_HUFFMAN: dict[int, int] = {
    CompressionParameter.strategy: Strategy.fast,
    # 1 would store literals as they are, so nothing would shrink.
    CompressionParameter.target_length: 0,
    CompressionParameter.window_log: 17,
    CompressionParameter.hash_log: 6,
    CompressionParameter.min_match: 7,
}
"""Finds long matches only, so that most is Huffman codes: shorter and faster than level 1 for bytes of numbers."""

_LITERAL_COMPRESSION, _LITERALS_CODED = 1002, 1
"""A parameter of zstd that Python does not name: codes literals whatever the target length is."""

_NO_SEARCH: dict[int, int] = {
    **_HUFFMAN,
    # The search for matches leaps over a whole block at once.
    CompressionParameter.target_length: 128 << 10,
    _LITERAL_COMPRESSION: _LITERALS_CODED,
}
"""Huffman codes alone: takes two thirds of the time."""

_SKEWED = bytes(number % 7 * (number % 5) for number in range(2048)) * 2
"""Less than 4 bits a byte."""

_LEVEL_1: dict[int, int] = {CompressionParameter.compression_level: 1, CompressionParameter.window_log: 19}

_MAGIC = b"\x28\xb5\x2f\xfd"

_PIECE_BYTES = 64 << 10
"""Bytes decoded by one call."""

_SAMPLE_BYTES = 64 << 10
"""Bytes on which the two ways are tried."""


class _Contexts(threading.local):
    """The compressors of a thread: to make one takes as long as to compress 16 KiB."""

    def __init__(self) -> None:
        self.huffman = _huffman_compressor()
        self.runs = ZstdCompressor(options=_HUFFMAN)
        self.level_1 = ZstdCompressor(options=_LEVEL_1)


def _huffman_compressor() -> ZstdCompressor:
    """Return a compressor that only codes literals; where this zstd does not offer that, one that searches a little."""
    try:
        compressor = ZstdCompressor(options=_NO_SEARCH)
        if len(compressor.compress(_SKEWED, ZstdCompressor.FLUSH_FRAME)) < 0.6 * len(_SKEWED):
            return compressor
    except (ValueError, ZstdError):
        pass
    return ZstdCompressor(options=_HUFFMAN)


_contexts = _Contexts()


def huffman_frame(data: memoryview, *, has_runs: bool = False) -> memoryview:
    """Return a frame of data whose bytes are unevenly frequent, but hardly repeat in sequence.

    Args:
        data: What is compressed.
        has_runs: Whether there are runs of one byte, such as zeros, to be found.
    """
    compressor = _contexts.runs if has_runs else _contexts.huffman
    return memoryview(compressor.compress(data, ZstdCompressor.FLUSH_FRAME))


def repeats_frame(data: memoryview) -> memoryview:
    """Return a frame of data whose sequences repeat."""
    return memoryview(_contexts.level_1.compress(data, ZstdCompressor.FLUSH_FRAME))


def decode_frame(frame: memoryview, raw: memoryview, what: str) -> None:
    """Fill `raw` with what is in a frame.

    Args:
        frame: One frame and nothing else.
        raw: As many bytes as must be in it.
        what: Names it in a message.
    Raises:
        CorruptError: It is not one sound frame of so many bytes, or asks for more memory than a reader grants.
    """
    _require_bounded(frame, len(raw), what)
    decompressor = ZstdDecompressor(options={DecompressionParameter.window_log_max: WINDOW_LOG_MAX})
    data: memoryview | bytes = frame
    filled = 0
    try:
        # Piece by piece: memory for pieces is used again, where a whole chunk would be fresh memory each time.
        while filled < len(raw):
            piece = decompressor.decompress(data, min(_PIECE_BYTES, len(raw) - filled))
            if not piece:
                break
            raw[filled : filled + len(piece)] = piece
            filled += len(piece)
            data = b""
            if decompressor.eof:
                break
        beyond = b"" if decompressor.eof else decompressor.decompress(b"", 1)
    except ZstdError as error:
        raise CorruptError(f"{what}: damaged zstd frame of {len(frame)} bytes: {error}") from error
    if filled != len(raw) or beyond or not decompressor.eof:
        raise CorruptError(
            f"{what}: {filled + len(beyond)} bytes in its zstd frame, or it breaks off; expected {len(raw)}"
        )
    if decompressor.unused_data:
        raise CorruptError(f"{what}: {len(decompressor.unused_data)} bytes after its zstd frame; expected none")


def _require_bounded(frame: memoryview, raw_bytes: int, what: str) -> None:
    """Require a frame without a dictionary that states the size of its content, and a small window (RFC 8878, 3.1.1).

    Raises:
        CorruptError: Something else is stated.
    """
    head = bytes(frame[:14])
    if head[:4] != _MAGIC or len(head) < 6:
        raise CorruptError(f"{what}: begins with {head[:4].hex() or 'nothing'}; expected a zstd frame: {_MAGIC.hex()}")
    descriptor = head[4]
    is_single = bool(descriptor & 0x20)
    if descriptor & 0x03:
        raise CorruptError(f"{what}: its zstd frame names a dictionary; expected none")
    size_bytes = (1 if is_single else 0, 2, 4, 8)[descriptor >> 6]
    start = 5 if is_single else 6
    if not size_bytes or len(head) < start + size_bytes:
        raise CorruptError(f"{what}: its zstd frame does not say how much it holds; expected {raw_bytes} bytes")
    content_bytes = int.from_bytes(head[start : start + size_bytes], "little") + (256 if size_bytes == 2 else 0)
    if content_bytes != raw_bytes:
        raise CorruptError(f"{what}: its zstd frame claims {content_bytes} bytes; expected {raw_bytes}")
    window_base = 1 << (10 + (head[5] >> 3))
    window_bytes = content_bytes if is_single else window_base + (window_base >> 3) * (head[5] & 7)
    if window_bytes > 1 << WINDOW_LOG_MAX:
        raise CorruptError(f"{what}: window of {window_bytes} bytes; expected at most {1 << WINDOW_LOG_MAX}")


@dataclass(frozen=True, slots=True)
class _ZstdCoder:
    """The whole chunk in one frame."""

    itemsize: int

    def encode(self, raw: memoryview, base: memoryview | None = None) -> list[StoredPart] | None:
        """Return the stored form, or None."""
        if not element_count(raw, self.itemsize):
            return None
        start = max((len(raw) - _SAMPLE_BYTES) // 2, 0)
        sample = raw[start : start + _SAMPLE_BYTES]
        by_huffman, by_repeats = huffman_frame(sample), repeats_frame(sample)
        if len(sample) == len(raw):
            frame = min(by_huffman, by_repeats, key=len)
        else:
            frame = huffman_frame(raw) if len(by_huffman) < len(by_repeats) else repeats_frame(raw)
        return stored_form([frame], len(raw))

    def decode(self, stored: memoryview, base: memoryview | None, raw: memoryview) -> None:
        """Fill `raw`."""
        (frame,) = sections_of(stored, 1, len(raw), self.itemsize)
        decode_frame(frame, raw, "chunk")


class ZstdCodec:
    """Any element type, for what no other codec takes: whole numbers, 8-bit floats, booleans."""

    name = "zstd"
    base: Base = "none"

    def takes(self, dtype: str, base_dtype: str = "") -> bool:
        """Return whether it codes elements of a type."""
        return dtype in DTYPES and not base_dtype

    def coder(self, dtype: str, base_dtype: str = "") -> Coder:
        """Return the coder for elements of a type."""
        require_taken(self, dtype, base_dtype)
        return _ZstdCoder(DTYPES[dtype].itemsize)
