"""Stores over file systems of fsspec: what is tried, what is left, what happens when calls fail or hang."""

from __future__ import annotations

import errno
import os
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from holdfast.backends.stores.fsspec.abilities import Abilities, abilities
from holdfast.backends.stores.fsspec.placing import Way
from holdfast.backends.stores.fsspec.store import FileSystemStore
from holdfast.backends.stores.wrappers import retries
from holdfast.backends.stores.wrappers.retrying import RetryingStore
from holdfast.backends.stores.wrappers.time_limits import TimeLimits
from holdfast.base.ports.store import Store
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import ConflictError, InvalidError, MissingError, UnavailableError
from holdfast.settings import MIB, PAGE_BYTES, ObjectSettings, Settings
from tests.support.fsspec_file_systems import CARELESS, IN_MEMORY, QUIET, READABLE, QuietFileSystem


class OddFileSystem(LocalFileSystem):
    """A local file system that does something odd once, where a test asks for it."""

    protocol = "odd"
    oddity: ClassVar[str] = ""
    go_on: ClassVar[threading.Event] = threading.Event()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.process = os.getpid()
        self.is_broken = False

    def _has_turn(self, oddity: str) -> bool:
        # Like a file system with a loop of its own, it is of no use to a child; like a connection, it breaks for good.
        assert self.process == os.getpid(), "it was made by another process"
        if self.is_broken:
            raise OSError("Socket is closed")
        is_turn = OddFileSystem.oddity == oddity
        if is_turn:
            OddFileSystem.oddity = ""
        return is_turn

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **more: Any) -> Any:
        if self._has_turn(f"hangs at {mode}"):
            self.go_on.wait(60)
        if self._has_turn(f"breaks at {mode}"):
            self.is_broken = True
            raise OSError("Socket is closed")
        return super()._open(path, mode, block_size, **more)

    def link(self, src: str, dst: str, **more: Any) -> None:
        if self._has_turn("loses the hidden file"):
            os.unlink(src)
        super().link(src, dst, **more)
        if self._has_turn("loses the reply to a link"):
            raise ConnectionResetError("connection cut")

    def info(self, path: Any, **more: Any) -> Any:
        if self._has_turn("hangs at info"):
            self.go_on.wait(60)
        return super().info(path, **more)


class ListingsFileSystem(MemoryFileSystem):
    """Keeps its listings, as those for FTP and for Hugging Face do."""

    protocol = "listings"
    keeps_a_dictionary: ClassVar[bool] = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.keeps_a_dictionary:
            self.dircache = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix(f"{cls.protocol}://"))

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:
        found = self.dircache.get(path)
        if found is None:
            found = self.dircache[path] = super().ls(path, True)
            found = self.dircache.get(path, super().ls(path, True))
        return found if detail else [each["name"] for each in found]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()


class TakingFileSystem(ListingsFileSystem):
    """While a file is copied, another process moves it away."""

    protocol = "taking"

    def cp_file(self, path1: str, path2: str, **more: Any) -> None:
        super().cp_file(path1, path2, **more)
        self.rm_file(path1)


class FullFileSystem(LocalFileSystem):
    """A local file system without space, once it is full."""

    protocol = "full"
    is_full: ClassVar[bool] = False

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **more: Any) -> Any:
        if mode != "rb" and FullFileSystem.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return super()._open(path, mode, block_size, **more)


class OvertakenFileSystem(QuietFileSystem):
    """Before a rename another process sweeps the hidden file, and stores its own object of the same size."""

    protocol = "overtaken"
    is_overtaken: ClassVar[bool] = False

    def mv(self, path1: str, path2: str, **more: Any) -> None:  # type: ignore[override]
        if OvertakenFileSystem.is_overtaken:
            OvertakenFileSystem.is_overtaken = False
            source, target = Path(self._strip_protocol(path1)), Path(self._strip_protocol(path2))
            target.write_bytes(b"2" * source.stat().st_size)
            source.unlink()
            return
        super().mv(path1, path2, **more)


fsspec.register_implementation("overtaken", OvertakenFileSystem, clobber=True)
fsspec.register_implementation("taking", TakingFileSystem, clobber=True)
fsspec.register_implementation("full", FullFileSystem, clobber=True)
fsspec.register_implementation("odd", OddFileSystem, clobber=True)
fsspec.register_implementation("listings", ListingsFileSystem, clobber=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(retries, "FIRST_SECONDS", 0.001)
    OddFileSystem.oddity, OddFileSystem.go_on = "", threading.Event()
    yield
    OddFileSystem.go_on.set()


def store_at(url: str, **changes: Any) -> FileSystemStore:
    return FileSystemStore(url, settings=Settings(**changes))


def retrying(store: FileSystemStore) -> Store:
    return RetryingStore(store, Settings())


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def seen(store: FileSystemStore) -> Abilities:
    return abilities(store.url, store.systems, store._clock)


class TestAbilities:
    @pytest.mark.parametrize(
        ("protocol", "found"),
        (
            ("local", Abilities(Way.LINK, replaces_at_once=True, spares_full_folders=True)),
            (IN_MEMORY, Abilities(Way.CREATE, replaces_at_once=True, spares_full_folders=True)),
            (QUIET, Abilities(Way.QUIET_RENAME, replaces_at_once=False, spares_full_folders=False)),
            (CARELESS, Abilities(Way.LOOK, replaces_at_once=True, spares_full_folders=True)),
        ),
    )
    def test_are_found_by_trying(self, protocol: str, found: Abilities, tmp_path: Path) -> None:
        store = store_at(f"{protocol}://{tmp_path}/run")
        assert seen(store) == found
        assert files(tmp_path) == []

    def test_nothing_is_tried_where_nothing_is_written(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "key").write_bytes(b"1")
        store = store_at(f"{READABLE}://{tmp_path}/run")
        assert store.get("key", 1) == b"1"
        assert [entry.key for entry in store.list()] == ["key"]
        for call in (
            lambda: store.put("other", b"1"),
            lambda: store.put_if_absent("other", b"1"),
            lambda: store.delete(["key"]),
            lambda: store.move("key", "other"),
        ):
            with pytest.raises(InvalidError):
                call()
        assert files(tmp_path) == ["run/key"]

    def test_one_writer_may_use_what_takes_every_create(self, tmp_path: Path) -> None:
        url = f"{CARELESS}://{tmp_path}/run"
        with pytest.raises(InvalidError, match="single_writer=True"):
            store_at(url).put_if_absent("key", b"1")
        with pytest.raises(InvalidError, match="single_writer=True"):
            upload = store_at(url).upload("key", 1, PAGE_BYTES)
            upload.write(0, memoryview(b"1"))
            upload.complete()
        alone = store_at(url, object_store=ObjectSettings(single_writer=True))
        alone.put_if_absent("key", b"1")
        alone.put_if_absent("key", b"1")
        with pytest.raises(ConflictError):
            alone.put_if_absent("key", b"2")
        assert files(tmp_path) == ["run/key"]

    def test_a_move_over_a_file_is_refused_where_it_is_not_made_at_once(self, tmp_path: Path) -> None:
        store = store_at(f"{QUIET}://{tmp_path}/run")
        store.put("old", b"old")
        store.put("new", b"new")
        with pytest.raises(InvalidError, match="cannot rename over a file at once"):
            store.move("new", "old")
        with pytest.raises(InvalidError, match="overwrite=False"):
            store.require_replacing_moves()
        assert (store.get("old", 3), store.get("new", 3)) == (b"old", b"new")


class TestLeftovers:
    @pytest.mark.parametrize(("protocol", "folders"), (("local", False), (QUIET, True)))
    def test_hidden_files_go_with_the_objects_beside_them(self, protocol: str, folders: bool, tmp_path: Path) -> None:
        store = store_at(f"{protocol}://{tmp_path}/run")
        store.put("a/b/key", b"1")
        store.put("a/kept", b"1")
        root = tmp_path / "run"
        (root / "a/b/c").mkdir()
        for place in ("a/.tmp-0", "a/b/.tmp-1", "a/b/c/.tmp-2"):
            (root / place).write_bytes(b"left")
        assert [entry.key for entry in store.list()] == ["a/b/key", "a/kept"]
        store.delete(["a/b/key", "a/b/nothing"])
        assert files(root) == ["a/kept"]
        # Where the removal of a folder takes what is in it along, folders stay.
        assert (root / "a/b").exists() is folders

    def test_a_folder_with_hidden_files_alone_goes_with_any_key(self, tmp_path: Path) -> None:
        store = store_at(f"local://{tmp_path}/run")
        folder = tmp_path / "run" / "step" / "attempt"
        folder.mkdir(parents=True)
        (folder / ".tmp-1").write_bytes(b"left")
        assert store.folders() == ["step"]
        store.delete(["step/nothing"])
        assert store.folders() == []

    def test_what_is_not_ours_stays(self, tmp_path: Path) -> None:
        store = store_at(f"local://{tmp_path}/run")
        (tmp_path / "run" / "a").mkdir(parents=True)
        for name in (".hidden", "ä"):
            (tmp_path / "run" / "a" / name).write_bytes(b"1")
        store.delete(["a/nothing"])
        assert files(tmp_path / "run") == ["a/.hidden", "a/ä"]


class TestFailures:
    def test_its_own_object_is_a_success(self, tmp_path: Path) -> None:
        store = store_at(f"odd://{tmp_path}/run")
        store.put_if_absent("first", b"1")
        OddFileSystem.oddity = "loses the reply to a link"
        retrying(store).put_if_absent("a/key", b"ours")
        assert OddFileSystem.oddity == ""
        assert store.get("a/key", 4) == b"ours"

    def test_a_hidden_file_that_was_swept_is_written_again(self, tmp_path: Path) -> None:
        store = store_at(f"odd://{tmp_path}/run")
        store.put_if_absent("first", b"1")
        OddFileSystem.oddity = "loses the hidden file"
        store.put_if_absent("a/key", b"ours")
        assert OddFileSystem.oddity == ""
        assert store.get("a/key", 4) == b"ours"

    @pytest.mark.parametrize("size", (5, 3 * MIB))
    def test_an_object_of_the_same_size_is_not_ours(self, size: int, tmp_path: Path) -> None:
        """Manifests of two writers often have one size, and a large run has large ones."""
        store = store_at(f"overtaken://{tmp_path}/run")
        store.put_if_absent("other", b"1")
        OvertakenFileSystem.is_overtaken = True
        with pytest.raises(ConflictError, match="another writer stored it"):
            store.put_if_absent("a/key", b"1" * size)
        assert store.get("a/key", size) == b"2" * size
        store.put_if_absent("large", b"1" * size)

    def test_a_connection_that_broke_is_made_anew(self, tmp_path: Path) -> None:
        store = store_at(f"odd://{tmp_path}/run")
        store.put("key", b"1")
        for mode in ("rb", "wb"):
            OddFileSystem.oddity = f"breaks at {mode}"
            retrying(store).put("key", b"2")
            assert retrying(store).get("key", 1) == b"2"
            assert OddFileSystem.oddity == ""

    @pytest.mark.parametrize("mode", ("rb", "wb"))
    def test_a_call_that_hangs_is_given_up(self, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Reads and uploads touch memory of their caller, so they end by themselves."""
        store = store_at(f"odd://{tmp_path}/run")
        store.put_if_absent("key", b"12345")
        buffer = memoryview(bytearray(5))
        upload = store.upload("other", 5, PAGE_BYTES)
        upload.write(0, memoryview(b"67890"))
        OddFileSystem.oddity = f"hangs at {mode}"
        with monkeypatch.context() as during, pytest.raises(TemporaryError, match="no answer within") as caught:
            # Only this call has little time: the others may take what a busy machine needs.
            during.setattr(store.systems, "_limits", TimeLimits(0.2, 1 << 40))
            store.read_into("key", [(0, 5)], [buffer]) if mode == "rb" else upload.complete()
        assert caught.value.may_take_effect
        assert OddFileSystem.oddity == ""
        # The next call has another file system, and the one that hangs touches nothing of ours when it goes on.
        store.read_into("key", [(0, 5)], [buffer])
        upload.complete()
        OddFileSystem.go_on.set()
        assert buffer == b"12345"
        assert store.get("other", 5) == b"67890"

    def test_a_read_that_hangs_at_the_size_is_given_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = store_at(f"odd://{tmp_path}/run")
        store.put_if_absent("key", b"12345")
        for range_ in ((5, 5), (3, 7)):
            OddFileSystem.oddity = "hangs at info"
            with monkeypatch.context() as during, pytest.raises(TemporaryError, match="no answer within"):
                during.setattr(store.systems, "_limits", TimeLimits(0.2, 1 << 40))
                store.read_into("key", [range_], [memoryview(bytearray(range_[1] - range_[0]))])
            assert OddFileSystem.oddity == ""

    def test_what_another_mover_took_is_missing(self) -> None:
        store = store_at(f"taking://{uuid.uuid4().hex}/run")
        store.put("key", b"1")
        with pytest.raises(MissingError):
            store.move("key", "new")
        assert list(store.list()) == []

    def test_a_full_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is stored, and a process that has tried nothing before can make room."""
        store_at(f"local://{tmp_path}/run").put("a/key", b"1")
        monkeypatch.setattr(FullFileSystem, "is_full", True)
        store = store_at(f"full://{tmp_path}/run")
        for call in (lambda: store.put("a/key", b"2"), lambda: store.put_if_absent("b", b"2")):
            with pytest.raises(UnavailableError, match="free space") as caught:
                call()
            assert not isinstance(caught.value, TemporaryError)
        assert store.get("a/key", 1) == b"1"
        store.delete(["a/key"])
        assert files(tmp_path) == []

    def test_threads_that_come_first_together_try_once(self, tmp_path: Path) -> None:
        store = store_at(f"local://{tmp_path}/run")
        tried: list[str] = []
        use = store.systems.use

        def noted(doing: str, *arguments: Any, **options: Any) -> Any:
            tried.append(doing)
            return use(doing, *arguments, **options)

        store.systems.use = noted  # type: ignore[method-assign]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: store.put_if_absent(f"key-{number}", b"1"), range(8)))
        once = tried.count("write to")
        assert once and tried.count("store") == 8
        other = store_at(f"local://{tmp_path}/other")
        tried.clear()
        use = other.systems.use
        other.systems.use = noted  # type: ignore[method-assign]
        other.put_if_absent("key", b"1")
        assert tried.count("write to") == once

    def test_a_mistake_in_a_program_is_not_tried_again(self, tmp_path: Path) -> None:
        store = store_at(f"local://{tmp_path}/run")

        def fail(system: Any) -> None:
            raise AssertionError("a mistake")

        with pytest.raises(AssertionError, match="a mistake"):
            store.systems.use("try", "here", fail)

    def test_a_name_that_is_too_long(self, tmp_path: Path) -> None:
        store = store_at(f"local://{tmp_path}/{'x' * 300}")
        with pytest.raises(InvalidError, match="choose a shorter path"):
            store.put_if_absent("key", b"1")


@pytest.mark.parametrize("keeps_a_dictionary", (False, True))
def test_listings_are_not_kept(keeps_a_dictionary: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ListingsFileSystem, "keeps_a_dictionary", keeps_a_dictionary)
    url = f"listings://{uuid.uuid4().hex}/run"
    reader, writer = store_at(url), store_at(url)
    for number in range(3):
        writer.put(f"a/{number}", b"1")
        assert len(list(reader.list("a/"))) == number + 1
    writer.delete(["a/0"])
    assert [entry.key for entry in reader.list()] == ["a/1", "a/2"]
    with pytest.raises(MissingError):
        reader.size("a/0")


def test_a_forked_process_makes_file_systems_of_its_own(tmp_path: Path) -> None:
    store = store_at(f"odd://{tmp_path}/run")
    store.put("key", b"from the parent")
    pid = os.fork()
    if not pid:
        status = 1
        try:
            assert store.get("key", 100) == b"from the parent"
            store.put_if_absent("child", b"from the child")
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.get("child", 100) == b"from the child"
