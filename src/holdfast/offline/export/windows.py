"""Which bytes of another system's files are made at once, and from which parts of which tensors."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Generic, TypeVar

from holdfast.errors import InvalidError
from holdfast.geometry.dtype import DTYPES
from holdfast.geometry.region import run_boxes
from holdfast.types.export import Checksum, ExportFile, ExportTensor, ExportWindow, Fill

_Part = TypeVar("_Part")


def windows_of(
    files: Sequence[ExportFile], window_bytes: int, done: Iterable[tuple[int, int, int]] = ()
) -> list[ExportWindow]:
    """Return windows that cover every byte of every file exactly once, without what is done already.

    Args:
        files: The files.
        window_bytes: What a window is at most; they begin and end at multiples of it, and where something was done.
        done: File number, first byte and byte past the last of what need not be made again.
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
    """Return what one of several who work beside each other makes; all shares together are all windows, each once."""
    return windows[number::count]


@dataclass(frozen=True)
class FilePlan:
    """Where the bytes of one file come from, to be asked window by window.

    Raises:
        InvalidError: Two parts of the file share a byte, or one lies outside it: whoever laid it out is wrong.
    """

    file: ExportFile
    """The file."""

    def __post_init__(self) -> None:
        parts = [(offset, offset + len(data), "a literal") for offset, data in self.file.literals]
        parts += [(each.offset, each.offset + each.bytes, each.fqn) for each in self.file.tensors]
        _require_apart(sorted(parts, key=itemgetter(0, 1)), self.file)
        if any(a.offset > b.offset for a, b in zip(self.file.tensors, self.file.tensors[1:], strict=False)):
            raise InvalidError(f"{self.file.name}: tensors are not in the order of their offsets")
        if any(a[0] > b[0] for a, b in zip(self.file.literals, self.file.literals[1:], strict=False)):
            raise InvalidError(f"{self.file.name}: literals are not in the order of their offsets")
        sums = [(each.start, each.stop, "a checksum's range") for each in self.file.checksums]
        ranges = sums + [(at, at + 4, "a checksum") for each in self.file.checksums for at in each.at]
        _require_apart(sorted(ranges, key=itemgetter(0, 1)), self.file)

    def literals(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Yield the known bytes of a run, each with its place in the run."""
        for offset, data in self._literals.meeting(start, stop):
            part = data[max(start - offset, 0) : stop - offset]
            if part:
                yield max(offset - start, 0), part

    def fills(self, start: int, stop: int) -> Iterator[Fill]:
        """Yield what goes into a run, in its order: every byte of it that belongs to a tensor, exactly once."""
        for tensor in self._tensors.meeting(start, stop):
            low, high = max(start - tensor.offset, 0), min(stop - tensor.offset, tensor.bytes)
            if low < high:
                yield from _fills(tensor, low, high, tensor.offset - start)

    def sums(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield number, first byte and byte past the last of what a run has of each checksum's range."""
        for number, each in self._sums.meeting(start, stop):
            low, high = max(each.start, start), min(each.stop, stop)
            if low < high:
                yield number, low, high

    @cached_property
    def _tensors(self) -> _Sorted[ExportTensor]:
        return _Sorted([(each.offset, each) for each in self.file.tensors if each.bytes])

    @cached_property
    def _literals(self) -> _Sorted[tuple[int, bytes]]:
        return _Sorted([(each[0], each) for each in self.file.literals if each[1]])

    @cached_property
    def _sums(self) -> _Sorted[tuple[int, Checksum]]:
        return _Sorted([(each.start, (number, each)) for number, each in enumerate(self.file.checksums)])


class _Sorted(Generic[_Part]):
    """Parts of a file that share no byte, found by where they begin."""

    def __init__(self, parts: Sequence[tuple[int, _Part]]) -> None:
        self._starts = [start for start, _ in parts]
        self._parts = [part for _, part in parts]

    def meeting(self, start: int, stop: int) -> Sequence[_Part]:
        """Return the parts that may share a byte with a run, in order: at most one too many."""
        return self._parts[max(bisect_right(self._starts, start) - 1, 0) : bisect_left(self._starts, stop)]


def _fills(tensor: ExportTensor, low: int, high: int, origin: int) -> Iterator[Fill]:
    """Yield what bytes `[low, high)` of a tensor's run in the file are made of; the run begins at `origin`."""
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
                "the file share a byte, or it is too short"
            )
        if end > start:
            stop, before = end, name
