"""The limit of the disk moves every byte, whatever the shape of its windows."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from bench.limits import NAMES, SHAPES, Limit

MIB = 1 << 20


@pytest.mark.parametrize("huge_pages", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_every_window_is_written(tmp_path: Path, shape: tuple[int, int], huge_pages: bool) -> None:
    count = 37 * MIB + 4096
    limit = Limit(huge_pages=huge_pages)
    try:
        limit.write(tmp_path / "raw", count, *shape)
    except OSError as error:
        if error.errno == errno.EINVAL:
            pytest.skip("the file system of the tests refuses direct I/O")
        raise
    written = (tmp_path / "raw").read_bytes()
    assert len(written) == count
    assert not any(written[at : at + 4096] == bytes(4096) for at in range(0, count, 4096))
    limit.read(tmp_path / "raw", *shape)
    limit.close()


def test_a_window_that_moves_less_than_asked_is_no_limit() -> None:
    limit = Limit()
    moved: list[int] = []
    limit._move(lambda fd, memory, at: moved.append(at) or len(memory), -1, 9 * MIB, 4, MIB)
    assert sorted(moved) == [n * MIB for n in range(9)]
    with pytest.raises(AssertionError, match="0 of 1048576 bytes at 0"):
        limit._move(lambda fd, memory, at: 0, -1, MIB, 1, MIB)
    limit.close()
