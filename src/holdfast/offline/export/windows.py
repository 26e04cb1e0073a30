"""Cuts another system's files into windows, and plans which parts of which tensors fill each."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Generic, TypeVar

from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.region import run_boxes
from holdfast.base.types.export import ExportFile, ExportTensor, ExportWindow, Fill
from holdfast.errors import InvalidError

_Part = TypeVar("_Part")


def windows_of(
    files: Sequence[ExportFile], window_bytes: int, done: Iterable[tuple[int, int, int]] = ()
) -> list[ExportWindow]:
    """Return windows that cover every byte of every file exactly once, except the ranges already done.

    Args:
        files: The files.
        window_bytes: Bytes of a window, at most. Windows start and stop at its multiples and at done ranges.
        done: File number, start and stop of each range that needs no window.
    """
    by_file: dict[int, list[tuple[int, int]]] = {}
    for number, start, stop in done:
        by_file.setdefault(number, []).append((start, stop))
    windows = []
    for number, file in enumerate(files):
        at = 0
        for start, stop in [*sorted(by_file.get(number, ())), (file.bytes, file.bytes)]:
            while at < start:
                end = min((at // window_bytes + 1) * window_bytes, start)
                windows.append(ExportWindow(number, at, end))
                at = end
            at = max(at, stop)
    return windows


def share_of(windows: Sequence[ExportWindow], number: int, count: int) -> Sequence[ExportWindow]:
    """Return the windows of one worker out of `count`; all shares together are all windows, each once."""
    return windows[number::count]


class FilePlan:
    """Where the bytes of one file come from, window by window."""

    def __init__(self, file: ExportFile) -> None:
        """Check the parts of the file.

        Raises:
            InvalidError: Two parts of the file overlap, one is outside it, or they are out of order: the format laid
                the file out wrongly.
        """
        parts = [(offset, offset + len(data), "a literal") for offset, data in file.literals]
        parts += [(tensor.offset, tensor.offset + tensor.bytes, tensor.fqn) for tensor in file.tensors]
        _require_apart(sorted(parts, key=itemgetter(0, 1)), file)
        if any(a.offset > b.offset for a, b in pairwise(file.tensors)):
            raise InvalidError(f"{file.name}: tensors are not in the order of their offsets")
        if any(a[0] > b[0] for a, b in pairwise(file.literals)):
            raise InvalidError(f"{file.name}: literals are not in the order of their offsets")
        ranges = [(checksum.start, checksum.stop, "a checksum's range") for checksum in file.checksums]
        ranges += [(at, at + 4, "a checksum") for checksum in file.checksums for at in checksum.at]
        _require_apart(sorted(ranges, key=itemgetter(0, 1)), file)
        self._tensors = _Sorted([(tensor.offset, tensor) for tensor in file.tensors if tensor.bytes])
        self._literals = _Sorted([(literal[0], literal) for literal in file.literals if literal[1]])
        self._sums = _Sorted([(checksum.start, (number, checksum)) for number, checksum in enumerate(file.checksums)])

    def literals(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Yield the literal bytes in a run, each with its offset in the run."""
        for offset, data in self._literals.meeting(start, stop):
            part = data[max(start - offset, 0) : stop - offset]
            if part:
                yield max(offset - start, 0), part

    def fills(self, start: int, stop: int) -> Iterator[Fill]:
        """Yield the parts of tensors in a run, by offset: every byte that belongs to a tensor, exactly once."""
        for tensor in self._tensors.meeting(start, stop):
            low, high = max(start - tensor.offset, 0), min(stop - tensor.offset, tensor.bytes)
            if low < high:
                yield from _fills(tensor, low, high, tensor.offset - start)

    def sums(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the number of each checksum, and the start and stop of its part in a run."""
        for number, checksum in self._sums.meeting(start, stop):
            low, high = max(checksum.start, start), min(checksum.stop, stop)
            if low < high:
                yield number, low, high


class _Sorted(Generic[_Part]):
    """Parts of a file that do not overlap, looked up by their start."""

    def __init__(self, parts: Sequence[tuple[int, _Part]]) -> None:
        self._starts = [start for start, _ in parts]
        self._parts = [part for _, part in parts]

    def meeting(self, start: int, stop: int) -> Sequence[_Part]:
        """Return the parts that may overlap a run, by start: at most one more than do."""
        return self._parts[max(bisect_right(self._starts, start) - 1, 0) : bisect_left(self._starts, stop)]


def _fills(tensor: ExportTensor, low: int, high: int, origin: int) -> Iterator[Fill]:
    """Yield the parts that fill bytes `[low, high)` of a tensor in the file; the tensor starts at `origin`."""
    itemsize, at = DTYPES[tensor.dtype].itemsize, low
    while at < high:
        element, skipped = divmod(at, itemsize)
        whole = high // itemsize
        last = whole if not skipped and element < whole else element + 1
        for box in run_boxes(tensor.box, (), element, last):
            count = min(box.numel * itemsize - skipped, high - at)
            yield Fill(tensor, box, origin + at, skipped, count)
            at += count


def _require_apart(parts: Sequence[tuple[int, int, str]], file: ExportFile) -> None:
    stop, before = 0, "the start of the file"
    for start, end, name in parts:
        if start < stop or end > file.bytes:
            raise InvalidError(
                f"{file.name}: {name} at bytes {start}–{end} of {file.bytes}; {before} ends at {stop}. Two parts of "
                "the file overlap, or it is too short"
            )
        if end > start:
            stop, before = end, name
