"""The shipped store suite on every store."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from holdfast.ports.store import Store
from holdfast.settings import Settings
from holdfast.stores.local import LocalStore
from holdfast.stores.memory import MemoryStore
from holdfast.stores.objects.store import ObjectStore
from holdfast.testing.store import StoreSuite
from tests.object_server import ObjectServer

_SHARED_MEMORY = "/dev/shm"


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


class TestMemory(StoreSuite):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore(uuid.uuid4().hex)

    def test_stores_of_one_name_share_content(self) -> None:
        name = uuid.uuid4().hex
        MemoryStore(name).put("key", b"1")
        assert MemoryStore(name).get("key", 1) == b"1"
        assert list(MemoryStore(name + "x").list()) == []


class TestObjects(StoreSuite):
    """On a server that speaks S3. Every test has a folder of its own in one bucket."""

    @pytest.fixture
    def store(self, objects: ObjectServer) -> Store:
        return ObjectStore(objects.new_url(), settings=objects.settings())
