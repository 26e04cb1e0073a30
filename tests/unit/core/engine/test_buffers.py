"""Memory that is read and written directly lies in huge pages from its first byte to its last."""

from __future__ import annotations

import ctypes
import mmap
import random
from pathlib import Path

import pytest

from holdfast.core.engine.buffers import BufferPool, across, allocate_aligned, copy_bytes
from holdfast.settings import MIB, PAGE_BYTES

_HUGE = 2 * MIB
_CHOICE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@pytest.mark.parametrize("buffer_bytes", [2 * MIB, 3 * MIB, 5 * MIB, 9 * MIB + 1, 16 * MIB + 2 * PAGE_BYTES])
def test_whole_huge_pages_hold_a_slab_and_nothing_else(buffer_bytes: int) -> None:
    # Others' memory between two buffers moves the next one off whatever the kernel aligned the first to.
    keep = [allocate_aligned(count * PAGE_BYTES) for count in (1, 3, 7)]
    buffer = allocate_aligned(buffer_bytes)
    assert buffer_bytes <= buffer.nbytes < buffer_bytes + PAGE_BYTES
    assert address(buffer) % _HUGE == 0
    mapped_to = address(memoryview(buffer.obj)) + memoryview(buffer.obj).nbytes
    assert mapped_to >= address(buffer) + -(-buffer_bytes // _HUGE) * _HUGE, (
        "its last page would be cut into small ones"
    )
    assert len(keep) == 3


@pytest.mark.skipif(
    not _CHOICE.exists() or "[never]" in _CHOICE.read_text(), reason="this kernel has no transparent huge pages"
)
def test_the_kernel_puts_huge_pages_there() -> None:
    plain = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    plain.madvise(mmap.MADV_HUGEPAGE)
    ctypes.memset(address(memoryview(plain)), 1, len(plain))
    if huge_bytes_at(address(memoryview(plain))) < 48 * MIB:
        pytest.skip("the kernel gives this process no huge pages, or has none left")
    buffer = allocate_aligned(9 * MIB)
    ctypes.memset(address(buffer), 1, buffer.nbytes)
    assert huge_bytes_at(address(buffer)) >= 8 * MIB


def test_small_slabs_take_no_more_than_their_pages() -> None:
    buffer = allocate_aligned(PAGE_BYTES + 1)
    assert buffer.nbytes == 2 * PAGE_BYTES and address(buffer) % PAGE_BYTES == 0
    assert memoryview(buffer.obj).nbytes == 2 * PAGE_BYTES


def test_slabs_are_cut_from_one_piece() -> None:
    buffers = BufferPool(5, 1 * MIB)
    lent = [buffers.take() for _ in range(5)]
    assert sorted(address(buffer) - min(map(address, lent)) for buffer in lent) == [n * MIB for n in range(5)]
    assert min(map(address, lent)) % _HUGE == 0


def huge_bytes_at(where: int) -> int:
    """Return what of the mapping around an address lies in huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        start, dash, stop = first.partition("-")
        if dash and ":" not in first:
            inside = int(start, 16) <= where < int(stop, 16)
        elif inside and first == "AnonHugePages:":
            return int(rest.split()[0]) * 1024
    raise AssertionError("no such mapping")


@pytest.mark.parametrize("count", [0, 1, 32 << 10, (32 << 10) + 1, 1 << 20])
def test_all_bytes_are_copied_and_no_others(count: int) -> None:
    source, memory = random.Random(count).randbytes(count), bytearray(b"?" * (count + 2))
    copy_bytes(memoryview(source), memoryview(memory)[1 : 1 + count])
    assert memory == b"?" + source + b"?"


@pytest.mark.parametrize("count", [1, 40 << 10])
@pytest.mark.parametrize("target", [2, 50 << 10])
def test_a_copy_of_another_length_is_refused(count: int, target: int) -> None:
    memory = bytearray(target)
    with pytest.raises(ValueError):
        copy_bytes(memoryview(b"1" * count), memoryview(memory))
    assert not any(memory)


def test_consecutive_buffers_of_one_allocation_are_one() -> None:
    memory = allocate_aligned(4 * PAGE_BYTES)
    memory[:] = bytes(number // PAGE_BYTES for number in range(4 * PAGE_BYTES))
    one, two, three, four = (memory[at : at + PAGE_BYTES] for at in range(0, 4 * PAGE_BYTES, PAGE_BYTES))
    assert across([two]) is two
    whole = across([two, three, four])
    assert whole is not None and whole == memory[PAGE_BYTES:]
    whole[0] = 77
    assert two[0] == 77, "nothing is copied"
    assert across([one, three]) is None and across([two, one]) is None and across([one, two, four]) is None


def test_buffers_of_other_allocations_are_never_one() -> None:
    apart = [allocate_aligned(PAGE_BYTES) for _ in range(20)]
    assert all(across([first, second]) is None for first in apart for second in apart)
