"""Permissions of the files and folders that the local store makes, and the destination of an export."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.local_place import LocalPlace
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.base.clock import SystemClock
from holdfast.base.types.export import ExportFile
from holdfast.errors import InvalidError
from holdfast.settings import Settings
from holdfast.testing.store import fill
from tests.support.file_modes import (
    GROUP,
    OTHER_USER,
    allowed_by_acl,
    as_root,
    as_user,
    modes_in,
    open_folder,
    require_modes,
    set_default_acl,
    umask,
)

UMASKS = pytest.mark.parametrize(
    ("mask", "file_mode", "folder_mode"),
    ((0o022, 0o644, 0o755), (0o027, 0o640, 0o750), (0o002, 0o664, 0o775), (0o077, 0o600, 0o700), (0, 0o666, 0o777)),
)


def local(root: Path, syscalls: Syscalls | None = None, *, file_mode: int | None = None) -> LocalStore:
    settings = Settings(file_mode=file_mode)
    return LocalStore(root, settings=settings, mode_from=("run.json", "one.json"), syscalls=syscalls)


def write_all_ways(store: LocalStore, folder: str = "step") -> None:
    store.put(f"{folder}/put", b"1")
    store.replace(f"{folder}/put", b"2", b"1")
    store.put_if_absent(f"{folder}/deep/er/absent", b"1")
    fill(store, f"{folder}/parts/upload", b"1")
    store.put(f"{folder}/other", b"1")
    store.move(f"{folder}/other", f"{folder}/moved/there")
    assert store.link(f"{folder}/put", f"{folder}/linked/there")


@UMASKS
def test_new_files_have_all_permissions_that_the_umask_leaves(
    tmp_path: Path, mask: int, file_mode: int, folder_mode: int
) -> None:
    with umask(mask):
        write_all_ways(local(tmp_path / "above" / "root"))
    require_modes(tmp_path / "above", file_mode, folder_mode)


@UMASKS
def test_a_chosen_mode_narrows_and_never_widens(tmp_path: Path, mask: int, file_mode: int, folder_mode: int) -> None:
    with umask(mask):
        write_all_ways(local(tmp_path / "root", file_mode=0o640))
    require_modes(tmp_path / "root", file_mode & 0o640, folder_mode & 0o750)


@UMASKS
@pytest.mark.parametrize("later", (0o077, 0o022, 0))
def test_a_later_process_writes_as_the_first_whatever_its_umask(
    tmp_path: Path, mask: int, file_mode: int, folder_mode: int, later: int
) -> None:
    with umask(mask):
        local(tmp_path / "root").put("run.json", b"{}")
    with umask(later):
        store = local(tmp_path / "root")
        assert store.found_mode() == file_mode
        write_all_ways(store)
    require_modes(tmp_path / "root", file_mode, folder_mode)


def test_the_first_file_that_exists_gives_the_mode(tmp_path: Path) -> None:
    with umask(0o022):
        local(tmp_path / "root", file_mode=0o640).put("one.json", b"{}")
        assert local(tmp_path / "root").found_mode() == 0o640
        local(tmp_path / "root", file_mode=0o600).put("run.json", b"{}")
        assert local(tmp_path / "root").found_mode() == 0o600
        assert local(tmp_path / "root", file_mode=0o644).found_mode() is None, "a chosen mode counts more"
    assert local(tmp_path / "nothing").found_mode() is None
    assert local(tmp_path / "root" / "run.json").found_mode() is None


@pytest.mark.parametrize("in_place", ("folder", "link"))
def test_what_is_no_file_gives_no_mode(tmp_path: Path, in_place: str) -> None:
    (tmp_path / "private").touch(0o600)
    (tmp_path / "root").mkdir()
    if in_place == "folder":
        (tmp_path / "root" / "run.json").mkdir(0o700)
    else:
        (tmp_path / "root" / "run.json").symlink_to(tmp_path / "private")
    with umask(0o022):
        local(tmp_path / "root").put("step/new", b"1")
    require_modes(tmp_path / "root" / "step", 0o644, 0o755)


def test_a_file_that_its_owner_may_not_write_gives_its_readers_alone(tmp_path: Path) -> None:
    local(tmp_path).put("run.json", b"{}")
    (tmp_path / "run.json").chmod(0o444)
    with umask(0o077):
        write_all_ways(local(tmp_path))
    require_modes(tmp_path / "step", 0o644, 0o755)


@as_root
@pytest.mark.parametrize("later", (0o002, 0o027, 0o077))
def test_a_folder_that_gives_its_group_gives_it_at_every_depth(tmp_path: Path, later: int) -> None:
    root = tmp_path / "root"
    root.mkdir()
    os.chown(root, 0, GROUP)
    root.chmod(0o2775)
    with umask(0o002):
        local(root).put("run.json", b"{}")
    with umask(later):
        write_all_ways(local(root))
    require_modes(root, 0o664, 0o2775)
    assert {path.stat().st_gid for path in root.rglob("*")} == {GROUP}


def test_the_default_list_of_a_folder_counts_and_the_umask_does_not(tmp_path: Path) -> None:
    set_default_acl(tmp_path, named_user=OTHER_USER, others=0)
    with umask(0o077):
        write_all_ways(local(tmp_path / "root"))
    require_modes(tmp_path / "root", 0o660, 0o770)
    for path in (tmp_path / "root").rglob("*"):
        assert allowed_by_acl(path, OTHER_USER) == (5 if path.is_dir() else 4), path


def test_a_private_mode_is_private_under_a_default_list_too(tmp_path: Path) -> None:
    set_default_acl(tmp_path, named_user=OTHER_USER, others=5)
    write_all_ways(local(tmp_path / "root", file_mode=0o600))
    require_modes(tmp_path / "root", 0o600, 0o700)
    for path in (tmp_path / "root").rglob("*"):
        assert allowed_by_acl(path, OTHER_USER) == 0, path


def test_a_later_process_gives_nothing_that_a_default_list_denies(tmp_path: Path) -> None:
    with umask(0o022):
        local(tmp_path).put("run.json", b"{}")
    set_default_acl(tmp_path, named_user=OTHER_USER, others=0)
    write_all_ways(local(tmp_path))
    require_modes(tmp_path / "step", 0o640, 0o750)


def test_a_file_system_that_keeps_its_permissions_is_written_to(tmp_path: Path) -> None:
    class Keeps(Syscalls):
        refused = 0

        def fchmod(self, fd: int, mode: int) -> None:
            self.refused += 1
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with umask(0o022):
        local(tmp_path).put("run.json", b"{}")
    syscalls = Keeps()
    with umask(0o077):
        store = local(tmp_path, syscalls)
        store.put("step/key", b"1")
    assert store.get("step/key", 1) == b"1" and syscalls.refused
    require_modes(tmp_path / "step", 0o600, 0o700)


@as_root
def test_another_user_may_add_to_a_run_of_a_group(tmp_path: Path) -> None:
    with open_folder() as top:
        root = top / "root"
        root.mkdir()
        os.chown(root, 0, GROUP)
        root.chmod(0o2775)
        with umask(0o002):
            local(root).put("run.json", b"{}")
            local(root).put("step/first", b"1")
        with umask(0o077), as_user(OTHER_USER, GROUP):
            write_all_ways(local(root))
            write_all_ways(local(root), "next")
        require_modes(root, 0o664, 0o2775)


@pytest.mark.parametrize(("file_mode", "file_bits", "folder_bits"), ((None, 0o640, 0o750), (0o600, 0o600, 0o700)))
def test_an_export_has_one_mode(tmp_path: Path, file_mode: int | None, file_bits: int, folder_bits: int) -> None:
    with umask(0o027):
        destination = LocalPlace(tmp_path / "out", file_mode=file_mode)
        files = [ExportFile(name="a", bytes=10), ExportFile(name="b", bytes=0)]
        with destination.claimed("fingerprint", files, SystemClock()) as claim:
            destination.record(claim.journal, [])
            require_modes(tmp_path / ".out.holdfast-export", file_bits, folder_bits)
            destination.publish()
        single = LocalPlace(tmp_path / "file.pt", file_mode=file_mode)
        with single.claimed("fingerprint", [ExportFile(name="", bytes=10)], SystemClock()):
            single.publish()
    require_modes(tmp_path / "out", file_bits, folder_bits)
    assert stat.S_IMODE((tmp_path / "file.pt").stat().st_mode) == file_bits


@pytest.mark.parametrize("mode", (640, -1, 0o1640, 0o044, 0o10644))
def test_a_mode_that_no_file_can_have_is_refused(mode: int) -> None:
    with pytest.raises(InvalidError, match=r"file_mode=.*expected permission bits such as 0o640"):
        Settings(file_mode=mode)


@pytest.mark.parametrize("mode", (None, 0o400, 0o444, 0o600, 0o666, 0o777))
def test_a_mode_with_which_the_owner_reads_is_taken(tmp_path: Path, mode: int | None) -> None:
    with umask(0):
        local(tmp_path / "root", file_mode=mode).put("key", b"1")
    assert modes_in(tmp_path / "root")["key"] == (0o666 if mode is None else mode)
