"""The shipped store suite on every store."""

from __future__ import annotations

import os
import random
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pytest

from holdfast.backends.stores.fsspec.store import FileSystemStore
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.memory import MemoryStore
from holdfast.backends.stores.objects.store import ObjectStore
from holdfast.backends.stores.shelf import ShelfStore
from holdfast.backends.stores.wrappers.retrying import RetryingStore
from holdfast.base.ports.store import Store
from holdfast.errors import MissingError
from holdfast.settings import ObjectSettings, Settings
from holdfast.testing.store import Listings, SmallObjects, StoreSuite
from holdfast.testing.store_names import AnyNamesSuite
from tests.servers.all import only_variables_of
from tests.servers.google import GoogleFake, google
from tests.support.fsspec_file_systems import IN_MEMORY, QUIET
from tests.support.object_server import ObjectServer
from tests.unit.backends.stores.wrappers.by_hand import ClockBySleep
from tests.unit.backends.stores.wrappers.network import NetworkStore, drawn

_SHARED_MEMORY = "/dev/shm"


@pytest.fixture(scope="module")
def google_fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoogleFake]:
    with google(tmp_path_factory.mktemp("google")) as fake:
        yield fake


class TestLocal(StoreSuite):
    uploads_hidden: ClassVar[bool] = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "made" / "at first write", settings=Settings())


@pytest.mark.skipif(not os.access(_SHARED_MEMORY, os.W_OK), reason="no tmpfs to write to")
class TestLocalOnTmpfs(StoreSuite):
    uploads_hidden: ClassVar[bool] = False

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY) as folder:
            yield LocalStore(folder, settings=Settings())


@pytest.mark.skipif(not os.access(_SHARED_MEMORY, os.W_OK), reason="no tmpfs to write to")
class TestShelf(StoreSuite):
    uploads_hidden: ClassVar[bool] = False

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY) as folder:
            yield ShelfStore(folder, settings=Settings())


class TestMemory(StoreSuite, AnyNamesSuite):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore(uuid.uuid4().hex)

    def test_stores_of_one_name_share_content(self) -> None:
        name = uuid.uuid4().hex
        MemoryStore(name).put("key", b"1")
        assert MemoryStore(name).get("key", 1) == b"1"
        assert list(MemoryStore(name + "x").list()) == []


class TestObjects(StoreSuite, AnyNamesSuite):
    """On a server that speaks S3. Every test has a folder of its own in one bucket."""

    is_asked_for_cached: ClassVar[bool] = False

    @pytest.fixture
    def store(self, objects: ObjectServer) -> Store:
        settings = objects.settings()
        return RetryingStore(ObjectStore(objects.new_url(), settings=settings), settings)


class TestObjectsOfGoogle(SmallObjects, Listings):
    """On a fake that speaks Google's generations. The whole suite runs on it in `make campaign-stores`."""

    @pytest.fixture
    def store(self, google_fake: GoogleFake, monkeypatch: pytest.MonkeyPatch) -> Store:
        only_variables_of(google_fake, monkeypatch)
        settings = google_fake.settings()
        return RetryingStore(ObjectStore(google_fake.new_url(), settings=settings), settings)


class TestFileSystemLocal(StoreSuite, AnyNamesSuite):
    """On the local file system of fsspec, which links."""

    is_asked_for_cached: ClassVar[bool] = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return _over_fsspec(f"local://{tmp_path}/made/at first write")


class TestFileSystemInMemory(StoreSuite, AnyNamesSuite):
    """On the file system of fsspec in memory, which stores a file at once, and copies rather than renames."""

    is_asked_for_cached: ClassVar[bool] = False

    @pytest.fixture
    def store(self) -> Store:
        return _over_fsspec(f"{IN_MEMORY}://{uuid.uuid4().hex}/folder")


def _over_fsspec(url: str) -> Store:
    settings = Settings()
    return RetryingStore(FileSystemStore(url, settings=settings), settings, requests_in_flight_max=8)


class _StoredOnceMore:
    """A store whose put may be made again although the first one took effect."""

    def test_writers_beside_movers_lose_nothing(self, store: Store) -> None:
        """An object that was stored and moved away may be stored once more, if nothing said that it was stored."""

        def write(number: int) -> set[bytes]:
            written = set()
            for turn in range(5):
                data = b"%d-%d" % (number, turn)
                with suppress(MissingError):
                    store.put_if_absent(f"a/{number}-{turn}", data)
                    written.add(data)
                    store.move(f"a/{(number + 1) % 4}-{turn}", f"b/{number}-{turn}")
            return written

        with ThreadPoolExecutor(4) as pool:
            written = set[bytes]().union(*pool.map(write, range(4)))
        assert {store.get(entry.key, 10) for entry in store.list()} == written
        assert len(written) == 20


class TestFileSystemThatRefusesRenames(_StoredOnceMore, StoreSuite):
    """On a file system whose rename refuses to replace, and does not say so, as WebHDFS."""

    is_asked_for_cached: ClassVar[bool] = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return _over_fsspec(f"{QUIET}://{tmp_path}/folder")


class TestRetriedOverFaults(_StoredOnceMore, StoreSuite):
    """Two of five requests or replies are lost, and no promise is."""

    @pytest.fixture
    def store(self) -> Store:
        seed = random.randrange(1 << 32)
        print(f"seed {seed}")
        network = NetworkStore(MemoryStore(uuid.uuid4().hex), drawn(seed))
        # Each thread moves the clock of all: no call may come to its deadline.
        settings = Settings(object_store=ObjectSettings(retry_seconds_per_call=1e9))
        return RetryingStore(network, settings, ClockBySleep(seed))
