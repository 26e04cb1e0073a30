"""The shelf: memory of deleted files is used again, and no byte changes that others read."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.shelf import ShelfStore
from holdfast.backends.stores.spares import PREFIX
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.errors import ConflictError, UnavailableError
from holdfast.settings import MIB, Settings

COUNT = 3 * MIB
PART = MIB

ROUNDS = int(os.environ.get("SHELF_ROUNDS", "1"))
"""How often bytes that others read are put at risk, in each way."""
each_round = pytest.mark.parametrize("seed", range(0, 100 * ROUNDS, 100))

pytestmark = pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to write to")


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def shelf(folder: Path, syscalls: Syscalls | None = None) -> ShelfStore:
    return ShelfStore(folder, settings=Settings(), syscalls=syscalls)


def content(seed: int, count: int = COUNT) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8).tobytes()


def store(place: LocalStore, key: str, data: bytes) -> bool:
    """Store an object by parts; return whether the store has lent its memory."""
    upload, lent = place.upload(key, len(data), PART), False
    for start in range(0, len(data), PART):
        part = memoryview(data)[start : start + PART]
        room = upload.room(start, len(part))
        if room is not None:
            room[:] = part
            part, lent = room, True
        upload.write(start, part)
    upload.complete()
    return lent


def retire(place: ShelfStore, key: str) -> None:
    """Delete an object of which one other of the same size stays."""
    store(place, f"stays/{key}", content(0))
    place.delete([key])


def spares_in(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(PREFIX)]


def test_an_upload_writes_into_the_pages_of_a_deleted_file(folder: Path) -> None:
    place = shelf(folder)
    assert not store(place, "a/1", content(1))
    before = place.identity("a/1")
    retire(place, "a/1")
    assert len(spares_in(folder)) == 1 and [entry.key for entry in place.list()] == ["stays/a/1"]
    for number in range(2, 6):
        key = f"a/{number}"
        assert store(place, key, content(number)), "the memory is lent"
        assert place.identity(key) == before and spares_in(folder) == []
        assert place.get(key, COUNT) == content(number)
        place.delete([key])


def test_a_smaller_object_takes_a_larger_spare_and_no_smaller_one(folder: Path) -> None:
    place = shelf(folder)
    store(place, "1", content(1))
    retire(place, "1")
    assert not store(place, "larger", content(2, COUNT + 1))
    assert store(place, "smaller", content(3, 2 * MIB + 5)) and place.size("smaller") == 2 * MIB + 5
    assert place.get("smaller", COUNT) == content(3, 2 * MIB + 5)


def test_spares_have_no_more_bytes_than_what_stays_and_go_with_the_last_object(folder: Path) -> None:
    place = shelf(folder)
    for number in range(4):
        store(place, f"{number}", content(number))
    place.delete(["0", "1", "2"])
    assert len(spares_in(folder)) == 1
    place.delete(["3"])
    assert os.listdir(folder) == []


def test_an_upload_beside_a_deletion_takes_the_spare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, lent = shelf(folder), []
    store(place, "1", content(1))
    store(place, "stays", content(0))
    delete = LocalStore.delete

    def delete_later(self: LocalStore, keys: Iterable[str]) -> None:
        lent.append(store(place, "2", content(2)))
        delete(self, keys)

    monkeypatch.setattr(LocalStore, "delete", delete_later)
    place.delete(["1"])
    assert lent == [True] and place.get("2", COUNT) == content(2) and not (folder / "1").exists()


READERS = ("open", "mapped", "mapped and closed", "hard link")


@each_round
@pytest.mark.parametrize("how", READERS)
def test_bytes_that_others_read_never_change(folder: Path, how: str, seed: int) -> None:
    place = shelf(folder)
    store(place, "1", content(seed + 1))
    if how == "hard link":
        os.link(folder / "1", folder / "copy")
        held: object = None
    elif how == "open":
        held = open(folder / "1", "rb")  # noqa: SIM115 - it stays open
    elif how == "mapped":
        held = LocalStore(folder, settings=Settings()).mapped("1")
    else:
        held = np.memmap(folder / "1", np.uint8, "r")  # numpy closes the descriptor.
    retire(place, "1")
    for number in range(2, 5):
        assert not store(place, f"{number}", content(seed + number)), "the spare is in use"
    if how == "hard link":
        assert (folder / "copy").read_bytes() == content(seed + 1)
    elif how == "open":
        assert held.read() == content(seed + 1)  # type: ignore[attr-defined]
        held.close()  # type: ignore[attr-defined]
    else:
        assert bytes(held) == content(seed + 1)  # type: ignore[call-overload]
    del held
    if how != "hard link":
        assert store(place, "5", content(seed + 5)), "the reader is gone"


@each_round
def test_a_mapping_of_another_process_keeps_its_bytes(folder: Path, seed: int) -> None:
    place = shelf(folder)
    store(place, "1", content(seed + 1))
    code = (
        "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); f.close()\n"
        "print('held', flush=True); sys.stdin.readline(); import hashlib; print(hashlib.sha256(m).hexdigest())"
    )
    import hashlib

    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder / "1")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None and reader.stdin is not None and reader.stdout.readline() == "held\n"
        retire(place, "1")
        assert not store(place, "2", content(seed + 2))
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline().strip() == hashlib.sha256(content(seed + 1)).hexdigest()
    assert store(place, "3", content(seed + 3))


@each_round
def test_a_stopped_writer_never_writes_into_the_file_of_another(folder: Path, seed: int) -> None:
    stopped, place = shelf(folder), shelf(folder)
    store(place, "1", content(seed + 1))
    retire(place, "1")
    upload = stopped.upload("2", COUNT, PART)
    room = upload.room(0, PART)
    assert room is not None, "it has the spare, and stops in the middle of its copy"
    place.delete(["2"])  # Another job takes over, and removes the unfinished attempt.
    for number in range(3, 5):
        assert not store(place, f"{number}", content(seed + number)), "the stopped writer has the memory"
    room[:] = bytes(PART)
    assert [place.get(f"{number}", COUNT) == content(seed + number) for number in range(3, 5)] == [True, True]
    with pytest.raises(UnavailableError, match="another process removed it"):
        for start in range(0, COUNT, PART):
            upload.write(start, memoryview(bytes(PART)))
        upload.complete()
    upload.abort()


@each_round
def test_two_stores_never_take_one_spare(folder: Path, seed: int) -> None:
    first, second = shelf(folder), shelf(folder)
    store(first, "1", content(seed + 1))
    retire(first, "1")
    upload = first.upload("2", COUNT, PART)
    assert upload.room(0, PART) is not None
    assert not store(second, "3", content(seed + 3))
    upload.abort()
    assert spares_in(folder) == [] and not (folder / "2").exists()


def test_a_name_that_is_taken_costs_no_spare_and_no_descriptor(folder: Path) -> None:
    place = shelf(folder)
    store(place, "1", content(1))
    retire(place, "1")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConflictError):
        place.upload("stays/1", COUNT, PART)
    assert place.get("stays/1", COUNT) == content(0)
    assert len(spares_in(folder)) == 1 and len(os.listdir("/proc/self/fd")) <= before


class NoLeases(Syscalls):
    """A kernel that grants no leases."""

    def lease(self, fd: int, kind: int) -> None:
        assert kind in (fcntl.F_WRLCK, fcntl.F_UNLCK)
        raise OSError(errno.EINVAL, "Invalid argument")


@each_round
def test_without_leases_nothing_is_used_again_and_it_is_said_once(
    folder: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    place = shelf(folder, NoLeases())
    with caplog.at_level(logging.WARNING):
        for number in range(1, 5):
            assert not store(place, f"{number}", content(seed + number))
            retire(place, f"{number}")
    assert caplog.text.count("the kernel grants no leases") == 1
    assert len(spares_in(folder)) <= 1, "one was made before the kernel was asked"


class Full(Syscalls):
    """A full file system."""

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_file_system_is_an_error_and_leaves_nothing(folder: Path) -> None:
    place = shelf(folder, Full())
    upload = place.upload("a/1", COUNT, PART)
    with pytest.raises(UnavailableError, match="No space left"):
        upload.write(0, memoryview(bytes(PART)))
    upload.abort()
    assert list(folder.rglob("*")) == []


def test_a_part_of_the_file_system_stays_free(folder: Path) -> None:
    place, found = shelf(folder), os.statvfs(folder)
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    stays = max(size // 10, 64 * MIB)
    assert place.free_bytes() == pytest.approx(free - stays, abs=256 * MIB)
    assert ShelfStore(folder / "absent", settings=Settings()).free_bytes() is None


def test_all_bytes_count_as_cached(folder: Path) -> None:
    place = shelf(folder)
    store(place, "1", content(1))
    targets = [memoryview(bytearray(1000)), memoryview(bytearray(COUNT - 1500))]
    assert place.get_cached("1", 500, targets) == COUNT - 500
    assert b"".join(map(bytes, targets)) == content(1)[500:]


def test_the_memory_of_a_spare_with_holes_is_not_lent(folder: Path) -> None:
    class Unfilled(Syscalls):
        def map_shared(self, fd: int, total_bytes: int) -> mmap.mmap:
            return mmap.mmap(fd, total_bytes)  # As a kernel without space to fill the holes.

    place = shelf(folder, Unfilled())
    (folder / "1").touch()
    os.truncate(folder / "1", COUNT)  # As a killed writer leaves a file that it has not written.
    retire(place, "1")
    upload = place.upload("2", COUNT, PART)
    assert upload.room(0, PART) is None and spares_in(folder) == []
    upload.abort()
    assert store(place, "3", content(3)) is False and place.get("3", COUNT) == content(3)


def test_spares_that_do_not_fit_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = shelf(folder)
    for number in range(4):
        store(place, f"{number}", content(number))
    place.delete(["0", "1"])
    assert len(spares_in(folder)) == 2
    store(place, "larger", content(5, 2 * COUNT))
    assert len(spares_in(folder)) == 2, "there is room for both"
    place.delete(["larger"])
    assert len(spares_in(folder)) == 1, "the oldest go first"
    assert (folder / spares_in(folder)[0]).stat().st_size == 2 * COUNT
    monkeypatch.setattr("holdfast.backends.stores.shelf._free_bytes", lambda folder: 0)
    place.upload("largest", 3 * COUNT, PART).abort()
    assert spares_in(folder) == []


def test_a_spare_that_is_trimmed_while_it_is_taken_is_taken(folder: Path) -> None:
    class Trimmed(Syscalls):
        def link(self, name: str, new_name: str, *, dir_fd: int, new_dir_fd: int | None = None) -> None:
            super().link(name, new_name, dir_fd=dir_fd, new_dir_fd=new_dir_fd)
            if name.startswith(PREFIX):
                os.unlink(name, dir_fd=dir_fd)

    first = shelf(folder)
    store(first, "1", content(1))
    retire(first, "1")
    assert store(shelf(folder, Trimmed()), "2", content(2)) and first.get("2", COUNT) == content(2)


def test_an_upload_that_fails_after_its_name_leaves_none(folder: Path) -> None:
    class NoSizes(Syscalls):
        def ftruncate(self, fd: int, total_bytes: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

    place = shelf(folder)
    store(place, "1", content(1))
    retire(place, "1")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UnavailableError):
        shelf(folder, NoSizes()).upload("2", COUNT, PART)
    assert not (folder / "2").exists() and len(os.listdir("/proc/self/fd")) <= before


def test_processes_that_take_spares_at_the_same_time_all_live(folder: Path) -> None:
    place = shelf(folder)
    for number in range(4):
        store(place, f"first/{number}", content(number))
        store(place, f"stays/{number}", content(number))
    place.delete([f"first/{number}" for number in range(4)])
    children = []
    for rank in range(4):
        pid = os.fork()
        if not pid:
            until, number = time.monotonic() + 2.0, 0
            try:
                while time.monotonic() < until:
                    own = shelf(folder)  # As a new process: no mapping is kept.
                    store(own, f"{rank}/{number}", content(rank))
                    own.delete([f"{rank}/{number}"])
                    number += 1
            finally:
                os._exit(0 if number > 3 and time.monotonic() >= until else 1)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4, "a signal of a lease ended a process"


def test_files_without_a_name_hold_no_memory(folder: Path) -> None:
    place = shelf(folder)
    store(place, "1", content(1))
    retire(place, "1")
    store(place, "2", content(2))
    assert len(place._spares._kept) == 1
    place.delete(["2", "stays/1"])
    assert place._spares._kept == {} and os.listdir(folder) == []
