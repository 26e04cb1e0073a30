"""Which bytes of a file come from where, against files put together whole."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.types.export import Checksum, ExportFile, ExportTensor, ExportWindow
from holdfast.errors import CorruptError, InvalidError
from holdfast.offline.export.crc32 import joined_crc32
from holdfast.offline.export.windows import FilePlan, share_of, windows_of

DTYPE_NAMES = ("uint8", "int16", "float32", "complex128")


def content_of(tensor: ExportTensor, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return bytes that tell tensor, element and place within it apart, of shape `shape` and one byte axis."""
    itemsize = DTYPES[tensor.dtype].itemsize
    count = int(np.prod(shape)) * itemsize
    seed = int.from_bytes(tensor.fqn.encode(), "little")
    return np.random.default_rng(seed).integers(1, 255, count, dtype=np.uint8).reshape(*shape, itemsize)


@st.composite
def files(draw: st.DrawFn) -> tuple[ExportFile, dict[str, tuple[int, ...]], bytes]:
    """Return a file of literals, tensors and gaps, the shapes of its tensors, and its content."""
    content = bytearray()
    literals, tensors, shapes = [], [], {}
    for number in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(("literal", "gap", "tensor", "tensor")))
        if kind == "gap":
            content += bytes(draw(st.integers(0, 40)))
        elif kind == "literal":
            data = draw(st.binary(max_size=40))
            literals.append((len(content), data))
            content += data
        else:
            shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
            edges = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
            box = Box(tuple(a for a, _ in edges), tuple(b for _, b in edges))
            tensor = ExportTensor(f"t{number}", draw(st.sampled_from(DTYPE_NAMES)), box, len(content))
            shapes[tensor.fqn] = shape
            content += content_of(tensor, shape)[box.relative_to((0,) * len(shape))].tobytes()
            tensors.append(tensor)
    content += bytes(draw(st.integers(0, 20)))
    cuts = sorted(draw(st.lists(st.integers(0, len(content)), max_size=6)))
    sums = tuple(Checksum(a, b, ()) for a, b in zip(cuts[::2], cuts[1::2], strict=False))
    file = ExportFile(name="f", bytes=len(content), literals=tuple(literals), tensors=tuple(tensors), checksums=sums)
    return file, shapes, bytes(content)


def made(plan: FilePlan, window: ExportWindow, shapes: dict[str, tuple[int, ...]]) -> bytes:
    """Return a window as the plan has it made; every byte that something goes into, exactly once."""
    found = np.zeros(window.bytes, dtype=np.uint8)
    times = np.zeros(window.bytes, dtype=int)
    for at, data in plan.literals(window.start, window.stop):
        found[at : at + len(data)] = np.frombuffer(data, np.uint8)
        times[at : at + len(data)] += 1
    for fill in plan.fills(window.start, window.stop):
        shape = shapes[fill.tensor.fqn]
        data = content_of(fill.tensor, shape)[fill.box.relative_to((0,) * len(shape))].reshape(-1)
        if fill.bytes != data.size:
            assert fill.box.numel == 1, "only elements are cut"
        data = data[fill.skipped : fill.skipped + fill.bytes]
        assert data.size == fill.bytes > 0
        found[fill.at : fill.at + fill.bytes] = data
        times[fill.at : fill.at + fill.bytes] += 1
    assert times.max(initial=0) <= 1
    return found.tobytes()


@settings(max_examples=300, deadline=None)
@given(case=files(), window_bytes=st.integers(1, 90), workers=st.integers(1, 3), done=st.data())
def test_windows_make_every_byte_of_every_file_exactly_once(
    case: tuple[ExportFile, dict[str, tuple[int, ...]], bytes], window_bytes: int, workers: int, done: st.DataObject
) -> None:
    file, shapes, content = case
    plan = FilePlan(file)
    # What an earlier try made, with windows of another length.
    earlier = windows_of([file, file], done.draw(st.integers(1, 90)))
    kept = [each for each in earlier if done.draw(st.booleans())]
    left = windows_of([file, file], window_bytes, [(each.file, each.start, each.stop) for each in kept])
    shares = [share_of(left, number, workers) for number in range(workers)]
    windows = [*kept, *(window for share in shares for window in share)]
    assert all(window.bytes <= window_bytes for window in left)
    times = np.zeros((2, file.bytes), dtype=int)
    found = np.zeros((2, file.bytes), dtype=np.uint8)
    sums: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for window in windows:
        data = made(plan, window, shapes)
        times[window.file, window.start : window.stop] += 1
        found[window.file, window.start : window.stop] = np.frombuffer(data, np.uint8)
        for number, start, stop in plan.sums(window.start, window.stop):
            crc = zlib.crc32(data[start - window.start : stop - window.start])
            sums.setdefault((window.file, number), []).append((start, stop, crc))
    assert (times == 1).all()
    assert [each.tobytes() for each in found] == [content, content]
    for file_number in range(2):
        for number, each in enumerate(file.checksums):
            crc = joined_crc32(sums.get((file_number, number), ()), each.start, each.stop)
            assert crc == zlib.crc32(content[each.start : each.stop])


@pytest.mark.parametrize(
    "file",
    [
        ExportFile(name="f", bytes=8, literals=((0, b"12345"), (4, b"1"))),
        ExportFile(name="f", bytes=8, literals=((4, b"12345"),)),
        ExportFile(name="f", bytes=8, literals=((4, b"1"), (0, b"1"))),
        ExportFile(
            name="f", bytes=8, literals=((0, b"12345"),), tensors=(ExportTensor("w", "uint8", Box((0,), (2,)), 4),)
        ),
        ExportFile(name="f", bytes=8, tensors=(ExportTensor("w", "float32", Box((0,), (3,)), 0),)),
        ExportFile(
            name="f",
            bytes=8,
            tensors=(ExportTensor("v", "uint8", Box((0,), (1,)), 4), ExportTensor("w", "uint8", Box((0,), (1,)), 0)),
        ),
        ExportFile(name="f", bytes=8, checksums=(Checksum(0, 4, (3,)),)),
        ExportFile(name="f", bytes=8, checksums=(Checksum(0, 4, ()), Checksum(3, 5, ()))),
    ],
)
def test_a_file_of_which_two_parts_share_a_byte_is_refused(file: ExportFile) -> None:
    with pytest.raises(InvalidError, match=r"^f: "):
        FilePlan(file)


def test_a_checksum_of_which_bytes_are_unknown_is_not_made_up() -> None:
    half = zlib.crc32(b"ab")
    assert joined_crc32([(4, 6, half), (2, 4, half)], 2, 6) == zlib.crc32(b"abab")
    for parts in ([(2, 4, half)], [(4, 6, half)], [(2, 4, half), (3, 5, half), (5, 6, 0)], []):
        with pytest.raises(CorruptError, match="checksums are known up to byte"):
            joined_crc32(parts, 2, 6)
