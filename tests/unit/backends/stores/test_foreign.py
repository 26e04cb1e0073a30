"""Files of another system: any names, links that stay inside, what is no file, and folders of any size."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.backends.stores import foreign
from holdfast.backends.stores.foreign import ForeignFiles
from holdfast.base.ports.ranges import view_for_range
from holdfast.errors import CorruptError, InvalidError, MissingError
from holdfast.settings import PAGE_BYTES
from holdfast.testing.store import aligned_buffer

DATA = bytes(range(256)) * 100 + b"tail"
NAMES = ("plain", "with space", ".hidden", "ünïcödé-文", "a+b=c@1%20", "x" * 200, "back\\slash", "line\nbreak", "-rf")


def every_call(files: ForeignFiles, key: str) -> dict[str, Callable[[], object]]:
    return {
        "size": lambda: files.size(key),
        "get": lambda: files.get(key, 1 << 20),
        "read_into": lambda: files.read_into(key, [(0, 1)], [memoryview(bytearray(1))]),
        "get_cached": lambda: files.get_cached(key, 0, [memoryview(bytearray(1))]),
    }


def refused(files: ForeignFiles, key: str, error: type[Exception], text: str) -> None:
    for call in every_call(files, key).values():
        with pytest.raises(error, match=text):
            call()


def names(files: ForeignFiles, prefix: str = "") -> list[str]:
    return sorted(entry.key for entry in files.list(prefix))


class TestNames:
    @pytest.mark.parametrize("name", NAMES)
    def test_any_name_is_read(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_bytes(DATA)
        files, key = ForeignFiles(tmp_path), f"{name}/{name}"
        assert files.size(key) == len(DATA)
        assert files.get(key, len(DATA)) == DATA
        assert names(files) == names(files, f"{name}/") == [key]
        assert files.folders() == [name]

    @pytest.mark.parametrize(
        "key", ["", "/", "..", "../outside", "a/../../outside", "./a", "a//b", "/etc/passwd", "a\0", "a/"]
    )
    def test_what_leaves_the_folder_is_refused(self, tmp_path: Path, key: str) -> None:
        (tmp_path / "outside").write_bytes(DATA)
        (tmp_path / "root" / "a").mkdir(parents=True)
        for call in every_call(ForeignFiles(tmp_path / "root"), key).values():
            with pytest.raises(
                (InvalidError, MissingError), match=r"a path that stays in the folder|a folder of that name"
            ):
                call()

    def test_what_is_absent_is_missing(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(DATA)
        (tmp_path / "folder").mkdir()
        files = ForeignFiles(tmp_path)
        refused(files, "nothing", MissingError, "nothing")
        refused(files, "folder", MissingError, "a folder of that name")
        assert names(files, "nothing/") == []
        assert names(files, "file/") == []
        assert files.folders("nothing/") == []
        assert names(ForeignFiles(tmp_path / "gone")) == []


class TestLinks:
    def test_links_inside_the_folder_are_followed(self, tmp_path: Path) -> None:
        (tmp_path / "deep").mkdir()
        (tmp_path / "deep" / "file").write_bytes(DATA)
        (tmp_path / "link").symlink_to("deep/file")
        (tmp_path / "absolute").symlink_to(tmp_path / "link")
        files = ForeignFiles(tmp_path)
        for key in ("link", "absolute"):
            assert files.get(key, len(DATA)) == DATA
        assert names(files) == ["absolute", "deep/file", "link"]

    def test_the_folder_itself_may_be_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "real" / "file").write_bytes(DATA)
        (tmp_path / "real" / "link").symlink_to(tmp_path / "real" / "file")
        (tmp_path / "root").symlink_to("real")
        files = ForeignFiles(tmp_path / "root")
        assert files.get("file", len(DATA)) == files.get("link", len(DATA)) == DATA

    def test_links_that_lead_out_are_refused_by_where_they_lead(self, tmp_path: Path) -> None:
        (tmp_path / "root").mkdir()
        (tmp_path / "root-beside").mkdir()
        (tmp_path / "root-beside" / "file").write_bytes(DATA)
        (tmp_path / "root" / "link").symlink_to(tmp_path / "root-beside" / "file")
        (tmp_path / "root" / "chain").symlink_to("link")
        (tmp_path / "root" / "folder").symlink_to(tmp_path / "root-beside")
        files = ForeignFiles(tmp_path / "root")
        for key in ("link", "chain", "folder/file"):
            refused(files, key, InvalidError, f"leads out of the folder, to {tmp_path}/root-beside/file")

    def test_folders_that_are_links_are_not_entered(self, tmp_path: Path) -> None:
        (tmp_path / "deep").mkdir()
        (tmp_path / "deep" / "round").symlink_to(tmp_path)
        (tmp_path / "deep" / "file").write_bytes(DATA)
        files = ForeignFiles(tmp_path)
        assert names(files) == ["deep/file"]
        assert files.folders() == ["deep"]
        assert files.folders("deep/") == []

    def test_links_that_lead_nowhere_or_round_are_left_out(self, tmp_path: Path) -> None:
        (tmp_path / "nowhere").symlink_to("gone")
        (tmp_path / "round").symlink_to("round")
        files = ForeignFiles(tmp_path)
        assert names(files) == []
        refused(files, "nowhere", MissingError, "nowhere")
        refused(files, "round", InvalidError, "round")

    @pytest.mark.parametrize("below", ["", "unet"])
    def test_a_hugging_face_cache_keeps_its_files_among_the_blobs(self, tmp_path: Path, below: str) -> None:
        repository = tmp_path / "models--a--b"
        revision = repository / "snapshots" / "0123" / below
        revision.mkdir(parents=True)
        (repository / "blobs" / "deep").mkdir(parents=True)
        for name in ("sha", "deep/sha"):
            (repository / "blobs" / name).write_bytes(DATA)
        (repository / "secret").write_bytes(b"secret")
        (tmp_path / "models--c--d" / "blobs").mkdir(parents=True)
        (tmp_path / "models--c--d" / "blobs" / "sha").write_bytes(b"another's")
        up = "../" * (2 + bool(below))
        (revision / "model").symlink_to(f"{up}blobs/sha")
        (revision / "deeper").symlink_to(f"{up}blobs/deep/sha")
        (revision / "secret").symlink_to(f"{up}secret")
        (revision / "other").symlink_to(tmp_path / "models--c--d" / "blobs" / "sha")
        files = ForeignFiles(revision)
        assert files.get("model", len(DATA)) == DATA
        for key in ("deeper", "secret", "other"):
            refused(files, key, InvalidError, "leads out of the folder")


class TestOddFiles:
    def test_a_pipe_is_refused_and_nobody_waits_for_it(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        files = ForeignFiles(tmp_path)
        refused(files, "pipe", InvalidError, "not a regular file")
        assert names(files) == []

    def test_sockets_and_devices_are_refused(self, tmp_path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(tmp_path / "socket"))
            files = ForeignFiles(tmp_path)
            refused(files, "socket", InvalidError, "not a regular file")
            assert names(files) == []
        refused(ForeignFiles("/dev"), "null", InvalidError, "not a regular file")

    def test_a_folder_that_may_not_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(DATA)
        (tmp_path / "file").chmod(0)
        if os.geteuid() == 0:
            pytest.skip("root may read everything")
        refused(ForeignFiles(tmp_path), "file", InvalidError, "allow this user")


class TestReading:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, len(DATA)), st.integers(0, len(DATA))).map(sorted), max_size=5))
    def test_ranges_of_any_alignment(self, tmp_path_factory: pytest.TempPathFactory, ranges: list[list[int]]) -> None:
        folder = tmp_path_factory.getbasetemp() / "ranges"
        folder.mkdir(exist_ok=True)
        (folder / "file").write_bytes(DATA)
        wanted = [(start, stop) for start, stop in ranges]
        buffers = [view_for_range(aligned_buffer(stop - start), start, stop, PAGE_BYTES) for start, stop in wanted]
        ForeignFiles(folder).read_into("file", wanted, buffers)
        assert [bytes(view) for view in buffers] == [DATA[start:stop] for start, stop in wanted]

    def test_what_ends_before_a_range_does_is_damage(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(DATA)
        files = ForeignFiles(tmp_path)
        with pytest.raises(CorruptError, match="file"):
            files.read_into("file", [(0, len(DATA) + 1)], [memoryview(bytearray(len(DATA) + 1))])
        with pytest.raises(CorruptError, match="file"):
            files.get_cached("file", len(DATA) - 1, [memoryview(bytearray(2))])
        with pytest.raises(CorruptError, match=f"{len(DATA)} bytes; expected at most 10"):
            files.get("file", 10)

    def test_what_is_cached_comes_in_order(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(DATA)
        buffers = [memoryview(bytearray(count)) for count in (1, PAGE_BYTES, 77)]
        came: list[bytes] = []
        count = ForeignFiles(tmp_path).get_cached("file", 3, buffers, lambda piece: came.append(bytes(piece)))
        assert b"".join(came) == b"".join(buffers)[:count] == DATA[3 : 3 + count]


class TestSize:
    def test_a_hundred_thousand_files_take_seconds_and_little_memory(self, tmp_path: Path) -> None:
        for folder in range(10):
            (tmp_path / str(folder)).mkdir()
            for number in range(10_000):
                os.mknod(tmp_path / str(folder) / str(number))
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        assert sum(1 for _ in ForeignFiles(tmp_path).list("")) == 100_000
        assert time.process_time() - began < 30
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB"

    def test_more_files_than_a_checkpoint_can_have_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(foreign, "FILES_MAX", 10)
        for number in range(11):
            (tmp_path / str(number)).touch()
        with pytest.raises(InvalidError, match="over 10 files; expected one checkpoint"):
            names(ForeignFiles(tmp_path))

    def test_folders_in_hundreds_of_folders(self, tmp_path: Path) -> None:
        here = os.open(tmp_path, os.O_RDONLY)
        for _ in range(300):
            os.mkdir("d", dir_fd=here)
            below = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(here)
        assert names(ForeignFiles(tmp_path)) == []
