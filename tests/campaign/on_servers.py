"""The shipped store suite on every server of the campaign. Run by name: `pytest tests/campaign/on_servers.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from holdfast.ports.store import Store
from holdfast.stores.objects.store import ObjectStore
from holdfast.stores.wrappers.retrying import RetryingStore
from holdfast.testing.store import StoreSuite
from tests.servers.all import SERVERS, only_variables_of
from tests.servers.server import Server


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with SERVERS[request.param]() as server:
        yield server


class TestOnServer(StoreSuite):
    """Every test has a folder of its own."""

    is_asked_for_cached: ClassVar[bool] = False

    @pytest.fixture
    def store(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> Store:
        only_variables_of(server, monkeypatch)
        settings = server.settings(single_writer=server.name == "rclone")
        return RetryingStore(ObjectStore(server.new_url(), settings=settings), settings)
