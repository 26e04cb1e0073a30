"""What is read out of an archive because one like it was read before is what would be read out of itself."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.backends.foreign.dcp.archive_template import UNKNOWN, ArchiveTemplate
from holdfast.backends.foreign.dcp.metadata import Item
from holdfast.backends.foreign.dcp.prefetch import TailPrefetch, batches
from holdfast.backends.foreign.torch.archive_reader import read_torch_file
from holdfast.backends.stores.foreign import ForeignFiles
from holdfast.errors import InvalidError
from tests.unit.backends.foreign.dcp.test_saved_by_torch import saved

FILE = "__0_0.distcp"


def test_whatever_byte_differs(tmp_path: Path) -> None:
    """Each byte of the second of two archives is changed: it is then read as it is, or not taken for known."""
    path = saved(tmp_path / "ck", {"a": torch.arange(4.0), "b": torch.arange(4.0) + 9})
    data = (path / FILE).read_bytes()
    half = len(data) // 2
    first, second = Item(FILE, 0, half), Item(FILE, half, len(data))
    files = ForeignFiles(path)
    windows = TailPrefetch(files)
    windows.hold(FILE, [(0, len(data))])
    alike = ArchiveTemplate()
    assert alike.value(windows, first) is UNKNOWN
    alike.learn(windows, first, read_torch_file(files, FILE, start=0, stop=half))
    assert alike.value(windows, second) == read_torch_file(files, FILE, start=half, stop=len(data))
    taken = 0
    for at in range(half, len(data)):
        changed = bytes((data[at] ^ 0x55,))
        (path / FILE).write_bytes(data[:at] + changed + data[at + 1 :])
        windows.hold(FILE, [(0, len(data))])
        found = alike.value(windows, second)
        if found is not UNKNOWN:
            taken += 1
            assert found == read_torch_file(files, FILE, start=half, stop=len(data)), at
    assert 16 < taken < half // 2, "elements and check sums may differ, most other bytes may not"


def test_what_is_not_held_is_not_known(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", {"a": torch.arange(4.0), "b": torch.arange(4.0) + 9})
    size = (path / FILE).stat().st_size
    first, second = Item(FILE, 0, size // 2), Item(FILE, size // 2, size)
    windows = TailPrefetch(ForeignFiles(path))
    windows.hold(FILE, [(0, size // 2)])
    alike = ArchiveTemplate()
    alike.learn(windows, first, read_torch_file(windows, FILE, start=0, stop=size // 2))
    assert alike.value(windows, second) is UNKNOWN
    windows.hold(FILE, [(0, 16), (size - 64, size)])
    assert alike.value(windows, second) is UNKNOWN
    assert alike.value(windows, first) is UNKNOWN


def test_batches_hold_both_ends_of_every_item_once() -> None:
    lengths = [10, 1500, 1500, 90_000, 20_479, 20_481, 3, 50_000_000, 1500] * 400
    bounds, at = [], 5
    for number, length in enumerate(lengths):
        bounds.append((at, at + length))
        at += length + (number % 3 == 0) * 40_000
    covered: list[int] = []
    read_bytes = 0
    for run, ranges in batches(bounds):
        covered += range(run.start, run.stop)
        read_bytes += sum(stop - start for start, stop in ranges)
        assert all(one[1] < other[0] for one, other in pairwise(ranges))
        assert sum(stop - start for start, stop in ranges) < 24 << 20
        for start, stop in bounds[run]:
            for place in (start, min(start + 2048, stop) - 1, max(stop - 2048, start), stop - 1):
                assert any(first <= place < last for first, last in ranges)
    assert covered == list(range(len(bounds)))
    assert read_bytes < sum(min(length, 40_000) for length in lengths)


def test_an_error_is_no_less_an_error_in_the_thousandth(tmp_path: Path) -> None:
    tensors = {f"t{number:03}": torch.full((4,), float(number)) for number in range(200)}
    path = saved(tmp_path / "ck", tensors)
    data = (path / FILE).read_bytes()
    length = len(data) // 200
    at = data.index(b"FloatStorage", 190 * length)
    (path / FILE).write_bytes(data[:at] + b"BloatStorage" + data[at + 12 :])
    with pytest.raises(InvalidError, match="BloatStorage"):
        holdfast.open_checkpoint(path)
