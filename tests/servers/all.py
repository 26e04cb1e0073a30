"""All servers by name, for tests that run on each of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.servers.azurite import azurite
from tests.servers.ceph import ceph
from tests.servers.google import google
from tests.servers.rclone import rclone
from tests.servers.server import Server

_VARIABLES = ("AWS_", "AZURE_", "GOOGLE_", "GCE_", "CLOUDSDK_", "IDENTITY_", "MSI_")


@contextmanager
def _ceph_over_tls() -> Iterator[Server]:
    with ceph(objectstore="bluestore") as server:
        yield server.over_tls()


SERVERS: dict[str, Callable[[], AbstractContextManager[Server]]] = {
    "ceph": ceph,
    "ceph-over-tls": _ceph_over_tls,
    "azurite": azurite,
    "google": google,
    "rclone": rclone,
}
"""What runs a server. Ceph keeps its data in memory, and in a file where it speaks TLS."""

EXCLUSIVE = tuple(name for name in SERVERS if name != "rclone")
"""Those that keep the condition of a create."""


def only_variables_of(server: Server, patch: pytest.MonkeyPatch) -> None:
    """Give this process the variables of one server, and no other of a vendor."""
    for name in [name for name in os.environ if name.startswith(_VARIABLES)]:
        patch.delenv(name)
    for name, value in server.variables.items():
        patch.setenv(name, value)
