"""What only a file system can do to a store: links, odd files, refused calls, leftovers."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError, UnavailableError
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.testing.store import fill, keys, read

DATA = bytes(range(256)) * 100 + b"tail"
PART_BYTES = 2 * PAGE_BYTES


def local(root: Path, syscalls: Syscalls | None = None, *, file_mode: int = 0o600) -> LocalStore:
    return LocalStore(root, settings=Settings(file_mode=file_mode), syscalls=syscalls)


def refuse(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def every_call(store: LocalStore, key: str) -> dict[str, Callable[[], object]]:
    return {
        "put": lambda: store.put(key, DATA),
        "put_if_absent": lambda: store.put_if_absent(key, DATA),
        "upload": lambda: store.upload(key, 10, PART_BYTES),
        "size": lambda: store.size(key),
        "get": lambda: store.get(key, 1 << 20),
        "read_into": lambda: read(store, key, [(0, 1)]),
        "delete": lambda: store.delete([key]),
    }


class TestLinks:
    def test_link_on_the_way_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside" / "key").write_bytes(b"precious")
        (tmp_path / "root").mkdir()
        (tmp_path / "root" / "step").symlink_to(tmp_path / "outside")
        store = local(tmp_path / "root")
        for call in every_call(store, "step/key").values():
            with pytest.raises(InvalidError, match="link"):
                call()
        with pytest.raises(InvalidError, match="link"):
            list(store.list("step/"))
        assert keys(store) == []
        assert store.folders() == []
        assert os.listdir(tmp_path / "outside") == ["key"]
        assert (tmp_path / "outside" / "key").read_bytes() == b"precious"

    @pytest.mark.parametrize("target", ("there", "nowhere"))
    def test_link_at_the_key_is_refused(self, tmp_path: Path, target: str) -> None:
        (tmp_path / "there").write_bytes(b"precious")
        (tmp_path / "root").mkdir()
        (tmp_path / "root" / "key").symlink_to(tmp_path / target)
        store = local(tmp_path / "root")
        expected = {"upload": ConflictError}
        calls = every_call(store, "key")
        delete = calls.pop("delete")
        for name, call in calls.items():
            with pytest.raises(expected.get(name, InvalidError)):
                call()
        assert keys(store) == []
        delete()
        assert os.listdir(tmp_path / "root") == []
        assert (tmp_path / "there").read_bytes() == b"precious"

    @pytest.mark.parametrize("root", ["root", "root/run"])
    def test_a_root_that_is_or_is_below_a_link_to_nothing_is_refused_by_name(self, tmp_path: Path, root: str) -> None:
        (tmp_path / "root").symlink_to("not-mounted")
        store = local(tmp_path / root)
        # A reader must not take it for an empty root: training would begin anew.
        calls = every_call(store, "key") | {"folders": store.folders, "list": lambda: list(store.list())}
        for call in calls.values():
            with pytest.raises(InvalidError, match=r"/root is a symbolic link to not-mounted, which does not exist"):
                call()
        (tmp_path / "not-mounted").mkdir()
        store.put("key", DATA)
        assert store.get("key", len(DATA)) == DATA

    def test_root_may_be_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        (tmp_path / "root").symlink_to(tmp_path / "disk")
        local(tmp_path / "root").put_if_absent("step/key", DATA)
        assert (tmp_path / "disk" / "step" / "key").read_bytes() == DATA


class TestOddFiles:
    @pytest.mark.timeout(20)
    def test_fifo_is_refused_without_waiting(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "key")
        store = local(tmp_path)
        for name in ("put", "put_if_absent", "size", "get", "read_into"):
            with pytest.raises(InvalidError, match="not a regular file"):
                every_call(store, "key")[name]()
        with pytest.raises(ConflictError):
            every_call(store, "key")["upload"]()
        assert keys(store) == []

    def test_file_on_the_way_is_refused_for_writing_and_empty_for_reading(self, tmp_path: Path) -> None:
        store = local(tmp_path)
        store.put("key", DATA)
        for name in ("put", "put_if_absent", "upload"):
            with pytest.raises(InvalidError, match="ENOTDIR"):
                every_call(store, "key/below")[name]()
        with pytest.raises(MissingError):
            store.get("key/below", 1)

    def test_folder_at_the_key(self, tmp_path: Path) -> None:
        store = local(tmp_path)
        store.put("key/below", DATA)
        with pytest.raises(InvalidError, match="EISDIR"):
            store.put("key", b"")
        for name in ("put_if_absent", "upload"):
            with pytest.raises(ConflictError):
                every_call(store, "key")[name]()
        assert keys(store) == ["key/below"]

    def test_names_that_no_key_has_are_left_alone(self, tmp_path: Path) -> None:
        store = local(tmp_path)
        store.put("step/key", DATA)
        (tmp_path / "step" / "a b").write_bytes(b"not ours")
        (tmp_path / "step" / ".nfs001").write_bytes(b"not ours")
        assert keys(store) == ["step/key"]
        store.delete(["step/key"])
        assert sorted(os.listdir(tmp_path / "step")) == [".nfs001", "a b"]

    def test_root_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "root").write_bytes(b"")
        with pytest.raises(InvalidError, match="ENOTDIR"):
            local(tmp_path / "root").put("key", b"")

    def test_truncated_while_read(self, tmp_path: Path) -> None:
        class Truncating(Uncached):
            def set_direct(self, fd: int, direct: bool) -> None:
                os.truncate(tmp_path / "key", 100)
                super().set_direct(fd, direct)

        local(tmp_path).put("key", DATA)
        with pytest.raises(CorruptError, match="ended at 100"):
            read(local(tmp_path, Truncating()), "key", [(0, len(DATA))])


class Uncached(Syscalls):
    """Nothing is ever in the page cache."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise refuse(errno.EAGAIN)
        return super().preadv(fd, buffers, offset, flags)


class NoDirectAtAll(Uncached):
    def set_direct(self, fd: int, direct: bool) -> None:
        assert direct, "turned off what was never on"
        raise refuse(errno.EINVAL)


class NoDirectWhenUsed(Uncached):
    """Accepts the flag and then refuses the work, as some network file systems do."""

    def set_direct(self, fd: int, direct: bool) -> None:
        super().set_direct(fd, direct)
        self.direct = direct

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if self.direct:
            raise refuse(errno.EINVAL)
        return super().pwrite(fd, data, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if self.direct:
            raise refuse(errno.ENOTSUP)
        return super().preadv(fd, buffers, offset, flags)


class NoReserving(Uncached):
    def fallocate(self, fd: int, total_bytes: int) -> None:
        raise refuse(errno.ENOTSUP)


class ShortAndInterrupted(Uncached):
    """Does a little at a time, page-aligned or not, and is interrupted in between."""

    calls = 0

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self.calls += 1
        if self.calls % 2:
            raise InterruptedError(errno.EINTR, "interrupted")
        count = super().pwrite(fd, data[: PAGE_BYTES + (0 if is_direct(fd) else 100)], offset)
        return max(count - 1, 1) if self.calls == 4 else count

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        return super().preadv(fd, [buffers[0][:PAGE_BYTES]], offset, flags)


class SlowDirectShort(ShortAndInterrupted):
    def set_direct(self, fd: int, direct: bool) -> None:
        raise refuse(errno.ENOTSUP)


def require_direct(folder: Path) -> None:
    probe = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT)
    try:
        Syscalls().set_direct(probe, True)
    except OSError:
        pytest.skip("the file system of the temporary folder has no direct I/O")
    finally:
        os.close(probe)
        os.unlink(folder / "probe")


class TestDirect:
    @pytest.mark.parametrize(
        "syscalls", (Uncached, NoDirectAtAll, NoDirectWhenUsed, NoReserving, ShortAndInterrupted, SlowDirectShort)
    )
    def test_same_bytes_whatever_the_file_system_refuses(self, tmp_path: Path, syscalls: type[Syscalls]) -> None:
        store = local(tmp_path, syscalls())
        fill(store, "key", DATA, part_bytes=PART_BYTES)
        assert (tmp_path / "key").read_bytes() == DATA
        ranges = [(0, len(DATA)), (1, 2), (4095, 4097), (len(DATA) - 1, len(DATA)), (5000, 20000)]
        assert read(store, "key", ranges) == [DATA[start:stop] for start, stop in ranges]

    def test_direct_is_used_where_it_works(self, tmp_path: Path) -> None:
        modes: list[tuple[str, bool]] = []

        class Watched(Uncached):
            def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
                modes.append(("write", is_direct(fd)))
                return super().pwrite(fd, data, offset)

            def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
                if not flags:
                    modes.append(("read", is_direct(fd)))
                return super().preadv(fd, buffers, offset, flags)

        require_direct(tmp_path)
        store = local(tmp_path, Watched())
        fill(store, "key", DATA, part_bytes=PART_BYTES)
        assert read(store, "key", [(5, 9000)]) == [DATA[5:9000]]
        assert {name for name, _ in modes} == {"write", "read"}
        assert all(direct for _, direct in modes)

    def test_direct_write_that_stopped_within_a_page_begins_that_page_again(self, tmp_path: Path) -> None:
        offsets: list[int] = []

        class StopsWithinPage(Syscalls):
            def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
                assert is_direct(fd)
                offsets.append(offset)
                count = super().pwrite(fd, data, offset)
                return count - 1 if len(offsets) == 1 else count

        require_direct(tmp_path)
        fill(local(tmp_path, StopsWithinPage()), "key", DATA[:PART_BYTES], part_bytes=PART_BYTES)
        assert offsets == [0, PAGE_BYTES]
        assert (tmp_path / "key").read_bytes() == DATA[:PART_BYTES]

    def test_cached_bytes_are_not_read_from_the_disk(self, tmp_path: Path) -> None:
        class CachedOnly(Syscalls):
            def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
                assert not is_direct(fd)
                return super().preadv(fd, buffers, offset, 0)  # As if all of it were cached.

            def set_direct(self, fd: int, direct: bool) -> None:
                raise AssertionError("went to the disk")

        local(tmp_path).put("key", DATA)
        assert read(local(tmp_path, CachedOnly()), "key", [(5, 9000)]) == [DATA[5:9000]]

    def test_the_kernel_is_not_asked_for_more_than_a_page_that_is_not_cached(self, tmp_path: Path) -> None:
        questions: list[int] = []

        class Asked(Uncached):
            def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
                if flags:
                    questions.append(buffers[0].nbytes)
                return super().preadv(fd, buffers, offset, flags)

        local(tmp_path).put("key", DATA)
        assert read(local(tmp_path, Asked()), "key", [(5, 20000), (0, 20000)]) == [DATA[5:20000], DATA[:20000]]
        assert questions == [PAGE_BYTES - 5, PAGE_BYTES], "more would be read ahead beside the direct read"

    def test_partly_cached_range(self, tmp_path: Path) -> None:
        class FirstBytesCached(Syscalls):
            def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
                if flags:
                    if offset > 5:
                        raise refuse(errno.EAGAIN)
                    return super().preadv(fd, [buffers[0][:4999]], offset, 0)
                assert offset == PAGE_BYTES, "read from the disk what was cached"
                return super().preadv(fd, buffers, offset, 0)

        local(tmp_path).put("key", DATA)
        assert read(local(tmp_path, FirstBytesCached()), "key", [(5, 20000)]) == [DATA[5:20000]]

    def test_a_disk_that_takes_nothing_is_an_error_not_a_loop(self, tmp_path: Path) -> None:
        class TakesNothing(Syscalls):
            def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
                return 0

        upload = local(tmp_path, TakesNothing()).upload("key", 10, PART_BYTES)
        with pytest.raises(UnavailableError, match="EIO"):
            upload.write(0, memoryview(bytes(10)))
        upload.abort()


class TestLinking:
    @pytest.mark.parametrize(
        "code", [errno.EMLINK, errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES, errno.ENOSYS]
    )
    def test_a_file_system_that_refuses_is_asked_once_and_nothing_is_stored(self, tmp_path: Path, code: int) -> None:
        calls = []

        class Refuses(Syscalls):
            def link(self, name: str, new_name: str, *, dir_fd: int, new_dir_fd: int | None = None) -> None:
                if new_dir_fd is not None:
                    calls.append(name)
                    raise refuse(code)
                super().link(name, new_name, dir_fd=dir_fd)

        store = local(tmp_path, Refuses())
        store.put_if_absent("old/pack", b"1")
        assert not store.link("old/pack", "new/link")
        assert calls == ["pack"]
        assert [entry.key for entry in store.list()] == ["old/pack"]

    def test_a_full_disk_is_said(self, tmp_path: Path) -> None:
        class Full(Syscalls):
            def link(self, name: str, new_name: str, *, dir_fd: int, new_dir_fd: int | None = None) -> None:
                raise refuse(errno.ENOSPC)

        (tmp_path / "pack").write_bytes(b"1")
        with pytest.raises(UnavailableError, match=r"could not link .*pack: ENOSPC"):
            local(tmp_path, Full()).link("pack", "link")

    def test_an_object_that_vanishes_before_the_call_is_missing(self, tmp_path: Path) -> None:
        class Vanishes(Syscalls):
            def link(self, name: str, new_name: str, *, dir_fd: int, new_dir_fd: int | None = None) -> None:
                self.unlink(name, dir_fd=dir_fd)
                super().link(name, new_name, dir_fd=dir_fd, new_dir_fd=new_dir_fd)

        (tmp_path / "pack").write_bytes(b"1")
        with pytest.raises(MissingError, match="pack"):
            local(tmp_path, Vanishes()).link("pack", "new/link")

    def test_a_folder_that_vanishes_before_the_call_is_made_again(self, tmp_path: Path) -> None:
        class SweptOnce(Syscalls):
            swept = False

            def link(self, name: str, new_name: str, *, dir_fd: int, new_dir_fd: int | None = None) -> None:
                if not self.swept:
                    self.swept = True
                    os.rmdir(tmp_path / "new")
                super().link(name, new_name, dir_fd=dir_fd, new_dir_fd=new_dir_fd)

        (tmp_path / "pack").write_bytes(b"1")
        assert local(tmp_path, SweptOnce()).link("pack", "new/link")
        assert (tmp_path / "new/link").samefile(tmp_path / "pack")

    def test_a_symbolic_link_is_not_linked(self, tmp_path: Path) -> None:
        (tmp_path / "pack").symlink_to("/etc/passwd")
        with pytest.raises(InvalidError, match="symbolic link"):
            local(tmp_path).link("pack", "link")


class TestPublishing:
    def test_no_links_falls_back_to_renaming_without_replacing(self, tmp_path: Path) -> None:
        class NoLinks(Syscalls):
            def link(self, name: str, new_name: str, *, dir_fd: int) -> None:
                raise refuse(errno.EPERM)

        store = local(tmp_path, NoLinks())
        store.put_if_absent("key", b"first")
        with pytest.raises(ConflictError):
            store.put_if_absent("key", b"second")
        assert os.listdir(tmp_path) == ["key"]
        assert (tmp_path / "key").read_bytes() == b"first"

    def test_neither_link_nor_rename_is_said(self, tmp_path: Path) -> None:
        class Neither(Syscalls):
            def link(self, name: str, new_name: str, *, dir_fd: int) -> None:
                raise refuse(errno.ENOTSUP)

            def rename_noreplace(self, name: str, new_name: str, *, dir_fd: int) -> None:
                raise refuse(errno.EINVAL)

        with pytest.raises(UnavailableError, match="neither link nor rename"):
            local(tmp_path, Neither()).put_if_absent("key", b"1")
        assert os.listdir(tmp_path) == []

    def test_link_repeated_after_a_lost_reply_is_a_success(self, tmp_path: Path) -> None:
        class LostReply(Syscalls):
            def link(self, name: str, new_name: str, *, dir_fd: int) -> None:
                super().link(name, new_name, dir_fd=dir_fd)
                raise refuse(errno.EEXIST)

        local(tmp_path, LostReply()).put_if_absent("key", b"1")
        assert os.listdir(tmp_path) == ["key"]

    def test_temporary_file_removed_by_another_process_is_written_anew(self, tmp_path: Path) -> None:
        class SweptOnce(Syscalls):
            swept = False

            def link(self, name: str, new_name: str, *, dir_fd: int) -> None:
                if not self.swept:
                    self.swept = True
                    local(tmp_path).delete(["step/none"])
                    assert not (tmp_path / "step").exists()
                super().link(name, new_name, dir_fd=dir_fd)

        syscalls = SweptOnce()
        local(tmp_path, syscalls).put_if_absent("step/key", b"1")
        assert syscalls.swept
        assert local(tmp_path).get("step/key", 1) == b"1"
        assert os.listdir(tmp_path / "step") == ["key"]

    def test_temporary_files_are_hidden_and_go_with_the_last_object(self, tmp_path: Path) -> None:
        store = local(tmp_path)
        for key in ("step/a", "step/sub/b"):
            store.put(key, b"1")
        (tmp_path / "step" / ".tmp-dead").write_bytes(b"1")
        (tmp_path / "step" / "sub" / ".tmp-dead").write_bytes(b"1")
        (tmp_path / "step" / "empty" / "folder").mkdir(parents=True)
        assert keys(store) == ["step/a", "step/sub/b"]
        store.delete(["step/a"])
        assert sorted(os.listdir(tmp_path / "step")) == ["empty", "sub"], "an object is left below"
        store.delete(["step/sub/b"])
        assert os.listdir(tmp_path) == []

    def test_upload_deleted_by_another_process_is_not_a_success(self, tmp_path: Path) -> None:
        store = local(tmp_path)
        upload = store.upload("step/key", 1, PART_BYTES)
        upload.write(0, memoryview(b"1"))
        local(tmp_path).delete(["step/key"])
        local(tmp_path).put("step/key", b"theirs")
        with pytest.raises(UnavailableError, match="another process removed it"):
            upload.complete()
        upload.abort()
        assert store.get("step/key", 10) == b"theirs"


class TestModes:
    @pytest.mark.parametrize(("file_mode", "folder_mode"), ((0o600, 0o700), (0o640, 0o750), (0o644, 0o755)))
    def test_modes(self, tmp_path: Path, file_mode: int, folder_mode: int) -> None:
        umask = os.umask(0o022)
        try:
            store = local(tmp_path / "root", file_mode=file_mode)
            store.put("step/put", b"1")
            store.put_if_absent("step/absent", b"1")
            fill(store, "step/upload", b"1")
        finally:
            os.umask(umask)
        assert stat.S_IMODE((tmp_path / "root").stat().st_mode) == folder_mode
        assert stat.S_IMODE((tmp_path / "root" / "step").stat().st_mode) == folder_mode
        for name in ("put", "absent", "upload"):
            assert stat.S_IMODE((tmp_path / "root" / "step" / name).stat().st_mode) == file_mode

    def test_reading_makes_nothing(self, tmp_path: Path) -> None:
        store = local(tmp_path / "root")
        assert keys(store) == store.folders() == keys(store, "step/") == []
        for name in ("size", "get", "read_into"):
            with pytest.raises(MissingError):
                every_call(store, "step/key")[name]()
        store.delete(["step/key"])
        assert os.listdir(tmp_path) == []

    def test_slab_with_other_element_type(self, tmp_path: Path) -> None:
        store = local(tmp_path)
        store.put("key", b"12345678")
        buffer = memoryview(bytearray(8)).cast("q")
        store.read_into("key", [(0, 8)], [buffer])
        assert bytes(buffer) == b"12345678"
