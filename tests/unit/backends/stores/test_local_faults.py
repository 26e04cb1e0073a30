"""The local store when the operating system fails it, at every single operation."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest

from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.base.ports.ranges import read_range
from holdfast.base.ports.store import Upload
from holdfast.errors import CheckpointError, ConflictError, InvalidError, UnavailableError
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.testing.store import aligned_buffer
from tests.doubles.faults import Faults, FaultySyscalls, fail_with, kill_process

ERRORS: dict[int, type[CheckpointError]] = {
    errno.ENOSPC: UnavailableError,
    errno.EDQUOT: UnavailableError,
    errno.EIO: UnavailableError,
    errno.EMFILE: UnavailableError,
    errno.EACCES: InvalidError,
    errno.EROFS: InvalidError,
}
EVERY_ERROR = pytest.mark.parametrize("code", ERRORS, ids=lambda code: errno.errorcode[code])
OLD = b"old" * 1000
NEW = bytes(range(256)) * 33 + b"tail"
TOTAL_BYTES = len(NEW)
PART_BYTES = PAGE_BYTES


class Uncached(Syscalls):
    """Nothing is ever in the page cache, so that a read always makes the same operations."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return super().preadv(fd, buffers, offset, flags)


def local(root: Path, faults: Faults | None = None) -> LocalStore:
    syscalls = Syscalls() if faults is None else cast(Syscalls, FaultySyscalls(Uncached(), faults))
    return LocalStore(root, settings=Settings(), syscalls=syscalls)


def write_parts(upload: Upload) -> None:
    for offset in range(0, TOTAL_BYTES, PART_BYTES):
        upload.write(offset, memoryview(NEW)[offset : offset + PART_BYTES])


def upload_whole(store: LocalStore) -> None:
    """Upload as the engine does: on any error, abort."""
    upload = store.upload("step/sub/new", TOTAL_BYTES, PART_BYTES)
    try:
        write_parts(upload)
        upload.complete()
    except CheckpointError:
        upload.abort()
        raise


def put_whole(store: LocalStore) -> None:
    store.put("step/sub/new", NEW)


def put_if_absent_whole(store: LocalStore) -> None:
    store.put_if_absent("step/sub/new", NEW)


def operations(root: Path, act: Callable[[LocalStore], None]) -> list[str]:
    """Return the names of the operations that `act` makes on a store like those of the tests."""
    prepared(root)
    recording = Faults()
    act(local(root, recording))
    return [operation.name for operation in recording.seen]


def prepared(root: Path) -> None:
    local(root).put("step/old", OLD)


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.rglob(".*")]


def open_files() -> int:
    """Return the open files and folders. Connections that other tests have left idle end when they like."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # That of the listing itself, or a connection that has just ended.
            count += not os.readlink(f"/proc/self/fd/{descriptor}").startswith(("socket:", "anon_inode:"))
    return count


WAYS = pytest.mark.parametrize("act", (put_whole, put_if_absent_whole, upload_whole))


def test_what_need_not_last_waits_for_no_disk(tmp_path: Path) -> None:
    lasting = operations(tmp_path / "a", put_whole)
    other = operations(tmp_path / "b", lambda store: store.put("step/sub/new", NEW, durable=False))
    assert "fsync" in lasting and "fsync" not in other
    assert local(tmp_path / "b").get("step/sub/new", len(NEW)) == NEW


@EVERY_ERROR
@WAYS
def test_error_at_every_operation_of_a_write(tmp_path: Path, code: int, act: Callable[[LocalStore], None]) -> None:
    names = operations(tmp_path / "recorded", act)
    assert {"open", "mkdir", "pwrite", "fsync", "close"} <= set(names)
    raised = set()
    for at, name in enumerate(names, start=1):
        root = tmp_path / str(at)
        prepared(root)
        before = open_files()
        faults = Faults(fail_with(code), at=at)
        error: CheckpointError | None = None
        try:
            act(local(root, faults))
        except CheckpointError as caught:
            error = caught
        assert faults.met == 1
        assert open_files() == before, f"{name} ({at}) leaked a descriptor"
        assert local(root).get("step/old", 1 << 20) == OLD
        found = {entry.key: entry.bytes for entry in local(root).list()}
        if error is None:
            assert name in {"close", "unlink", "open", "fstat", "fsync"}, f"{name} ({at}) failed unnoticed"
            assert local(root).get("step/sub/new", 1 << 20) == NEW
        else:
            raised.add(name)
            assert type(error) is ERRORS[code]
            assert str(root) in str(error)
            assert errno.errorcode[code] in str(error)
            assert isinstance(error.__cause__, OSError)
            if act is upload_whole:
                assert "step/sub/new" not in found
            elif "step/sub/new" in found:
                assert local(root).get("step/sub/new", 1 << 20) == NEW
                assert names[:at].count("link") + names[:at].count("rename") > 0
        if name != "unlink":
            assert leftovers(root) == []
        # Healed, the same work is done, or was done.
        try:
            act(local(root))
        except ConflictError:
            assert "step/sub/new" in found
        assert local(root).get("step/sub/new", 1 << 20) == NEW
    assert {"open", "mkdir", "pwrite", "fsync"} <= raised


@EVERY_ERROR
def test_lasting_error_from_every_operation_of_an_upload(tmp_path: Path, code: int) -> None:
    names = operations(tmp_path / "recorded", upload_whole)
    for at in range(1, len(names) + 1):
        root = tmp_path / str(at)
        prepared(root)
        before = open_files()
        faults = Faults(fail_with(code), at=at, lasting=True)
        store = local(root, faults)
        upload: Upload | None = None
        try:
            upload = store.upload("step/sub/new", TOTAL_BYTES, PART_BYTES)
            write_parts(upload)
            upload.complete()
        except CheckpointError as error:
            assert type(error) is ERRORS[code]
        finally:
            faults.heal()
            if upload is not None:
                upload.abort()
        # Only where even removing was refused may a leftover stay; it can be seen and deleted.
        assert open_files() == before
        if any(entry.key == "step/sub/new" for entry in store.list()):
            assert upload is None or store.get("step/sub/new", 1 << 20) == NEW
        store.delete(["step/sub/new"])
        assert [entry.key for entry in store.list()] == ["step/old"]
        assert store.get("step/old", 1 << 20) == OLD
        assert store.folders("step/") == []


@EVERY_ERROR
def test_error_at_every_operation_of_a_read(tmp_path: Path, code: int) -> None:
    upload_whole(local(tmp_path))
    bounds = (10, TOTAL_BYTES - 10)

    def read(store: LocalStore) -> bytes:
        return bytes(read_range(store, "step/sub/new", *bounds, aligned_buffer(TOTAL_BYTES)))

    recording = Faults()
    assert read(local(tmp_path, recording)) == NEW[slice(*bounds)]
    before = open_files()
    for at, operation in enumerate(recording.seen, start=1):
        faults = Faults(fail_with(code), at=at)
        if operation.name == "close":
            assert read(local(tmp_path, faults)) == NEW[slice(*bounds)], "nothing is lost by a close after reading"
            assert open_files() == before
            continue
        with pytest.raises(ERRORS[code], match=r"step/sub/new"):
            read(local(tmp_path, faults))
        assert faults.met == 1
        assert open_files() == before


def test_read_error_names_the_range(tmp_path: Path) -> None:
    upload_whole(local(tmp_path))
    store = local(tmp_path, Faults(fail_with(errno.EIO), names={"preadv"}))
    with pytest.raises(UnavailableError, match=r"step/sub/new bytes \[5, 50\): EIO"):
        read_range(store, "step/sub/new", 5, 50, aligned_buffer(100))


@pytest.mark.long
@pytest.mark.parametrize("act", (put_whole, put_if_absent_whole, upload_whole))
def test_sigkill_at_every_operation_of_a_write(tmp_path: Path, act: Callable[[LocalStore], None]) -> None:
    names = operations(tmp_path / "recorded", act)
    for at in range(1, len(names) + 1):
        root = tmp_path / str(at)
        prepared(root)
        status = in_child(act, local(root, Faults(kill_process(), at=at)))
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
        store = local(root)
        assert store.get("step/old", 1 << 20) == OLD
        found = [entry.key for entry in store.list()]
        if act is not upload_whole:
            if "step/sub/new" in found:
                assert store.get("step/sub/new", 1 << 20) == NEW
            else:
                store.put_if_absent("step/sub/new", NEW)
        # Deleting every key cleans up after the dead process.
        store.delete(["step/sub/new"])
        store.delete(["step/old"])
        assert os.listdir(root) == []


def in_child(act: Callable[[LocalStore], None], store: LocalStore) -> int:
    """Do something in a forked process and return its wait status."""
    child = os.fork()
    if child == 0:
        try:
            act(store)
        finally:
            os._exit(17)
    return os.waitpid(child, 0)[1]


def test_file_whose_fsync_failed_is_never_trusted_again(tmp_path: Path) -> None:
    faults = Faults(fail_with(errno.EIO), names={"fsync"})
    store = local(tmp_path, faults)
    upload = store.upload("step/new", TOTAL_BYTES, PART_BYTES)
    write_parts(upload)
    with pytest.raises(UnavailableError, match=r"step/new.*EIO"):
        upload.complete()
    with pytest.raises(UnavailableError, match="cannot be trusted"):
        upload.complete()
    assert faults.counted == 1, "a second fsync may report success for pages that were dropped"
    upload.abort()
    assert list(store.list()) == []
    assert faults.counted == 1


def test_everything_on_the_way_is_durable_before_a_name_is_given(tmp_path: Path) -> None:
    root = tmp_path / "made" / "now"
    recording = Faults()
    local(root, recording).put_if_absent("step/new", NEW)
    synced = [(number, seen.subject) for number, seen in enumerate(recording.seen) if seen.name == "fsync"]
    linked = [number for number, seen in enumerate(recording.seen) if seen.name == "link"]
    assert len(linked) == 1
    assert ".tmp-" in synced[0][1]
    assert synced[0][0] < linked[0] < synced[1][0]
    folders = [f"{root}/step", str(root), str(root.parent), str(root.parent.parent)]
    assert [subject for _, subject in synced[1:]][: len(folders)] == folders


def test_no_data_is_written_after_the_fsync_of_an_upload(tmp_path: Path) -> None:
    recording = Faults()
    upload_whole(local(tmp_path / "made", recording))
    names = [seen.name for seen in recording.seen]
    first_sync = names.index("fsync")
    assert not {"pwrite", "ftruncate", "fallocate"} & set(names[first_sync:])
    synced = [seen.subject for seen in recording.seen if seen.name == "fsync"]
    root = str(tmp_path / "made")
    assert synced[:5] == [f"{root}/step/sub/new", f"{root}/step/sub", f"{root}/step", root, str(tmp_path)]


def test_abort_during_a_write_closes_nothing_under_it(tmp_path: Path) -> None:
    class AbortingWrite(Syscalls):
        upload: Upload | None = None

        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            if self.upload is not None:
                self.upload.abort()
                os.fstat(fd)  # Raises if the descriptor was closed, and perhaps given to another file.
            return super().pwrite(fd, data, offset)

    syscalls = AbortingWrite()
    store = LocalStore(tmp_path, settings=Settings(), syscalls=syscalls)
    before = open_files()
    syscalls.upload = store.upload("new", TOTAL_BYTES, PART_BYTES)
    syscalls.upload.write(0, memoryview(NEW)[:PART_BYTES])
    assert open_files() == before
    assert list(store.list()) == []
