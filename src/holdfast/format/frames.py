"""Several byte strings in one, for a single broadcast."""

from __future__ import annotations

from collections.abc import Sequence


def encode_frames(frames: Sequence[bytes]) -> bytes:
    """Return the frames one after the other, each led by its length."""
    return b"".join(len(frame).to_bytes(8, "little") + frame for frame in frames)


def decode_frames(data: bytes) -> list[bytes]:
    """Return the frames that `encode_frames` joined."""
    frames = []
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        frames.append(data[at + 8 : at + 8 + length])
        at += 8 + length
    return frames
