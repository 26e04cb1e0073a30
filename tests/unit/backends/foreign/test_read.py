"""Small byte ranges of a file, read into memory."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import cast

import pytest

from holdfast.backends.foreign.read import read_ranges
from holdfast.backends.stores.foreign import ForeignFiles
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.errors import CorruptError, UnavailableError
from tests.doubles.faults import Faults, FaultySyscalls, fail_with

DATA = random.Random(0).randbytes(30_000)


def test_ranges_of_any_alignment_come_with_one_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    ranges = [(0, 1), (5, 4097), (4096, 8192), (4095, 4097), (29_999, 30_000), (1, 30_000)]
    assert read_ranges(ForeignFiles(tmp_path), "file", ranges) == [DATA[start:stop] for start, stop in ranges]


@pytest.mark.parametrize("name", ("open", "fstat", "preadv"))
def test_a_disk_that_fails_is_the_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(DATA)
    faults = Faults(fail_with(errno.EIO), names={name})
    files = ForeignFiles(tmp_path, syscalls=cast(Syscalls, FaultySyscalls(Syscalls(), faults)))
    with pytest.raises(UnavailableError, match=r"file.*EIO"):
        read_ranges(files, "file", [(5, 50), (100, 200)])
    assert faults.met == 1


def test_a_file_that_ends_before_a_range_is_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    with pytest.raises(CorruptError, match="30000 bytes"):
        read_ranges(ForeignFiles(tmp_path), "file", [(0, 5), (29_000, 30_001)])
