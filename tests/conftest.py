"""What holds for every test, and for every process that a test starts."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.servers.server import Server
from tests.support.object_server import VARIABLES, ObjectServer, object_server
from tests.support.server_folders import ServerFolder

# c10d looks up the names of both ends of every connection, on the key-value store's only thread too, and glibc's
# `files` does not know IPv4-mapped 127.0.0.1: a name server that loses a packet stalls all ranks for its 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# What is started in a shell's background, and whoever shares the files with others, is deaf to Ctrl-C, and what it
# starts would be as well.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples show what is right, not how fast the machine is or what else runs on it.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

_LONG = ("property", "hostile", "distributed", "measured", "crash", "export", "exit_path", "format", "bench")
"""Folders whose files take long, the longest first."""

_LONG_FILES = ("unit/test_guide.py",)
"""Files of other folders that take long: one that begins last is waited for alone."""


def pytest_xdist_auto_num_workers() -> int:
    """Return half as many workers more than processors: a third of the time a worker waits for processes and timers."""
    return (os.cpu_count() or 1) * 3 // 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes long: of several processes that share the files, none is left alone with it at the end."""
    places = {folder: place for place, folder in enumerate(_LONG)}
    tests = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(tests)
        return 0 if path.as_posix() in _LONG_FILES else places.get(path.parts[0], len(places))

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for garbage in what collecting made once, at its end, and never again.

    Modules and tests live until the process ends. Each full collection would walk them all, and each forked process
    would copy their pages.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def _object_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with object_server(tmp_path_factory.mktemp("object-server")) as server:
        yield server


@pytest.fixture
def objects(_object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    """Return a real server that speaks S3; this process has credentials for it, and no endpoint."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    return _object_server


@pytest.fixture(scope="session")
def _tier_server() -> Iterator[Server | None]:
    name = os.environ.get("TIER_ROOT_ON")
    if not name:
        yield None
        return
    from tests.campaign.server_parts import SERVERS

    with SERVERS[name]() as server:
        yield server


@pytest.fixture
def tier_root(_tier_server: Server | None, tmp_path: Path) -> Iterator[Path | ServerFolder]:
    """Return the root of a run with a near tier: a folder, or on the server that `make campaign-tiers` names."""
    if _tier_server is None:
        yield tmp_path / "root"
        return
    # Not by the fixture of the test, which may undo its patches before the end.
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _tier_server.environment.items():
            patch.setenv(name, value)
        yield ServerFolder.at(_tier_server, _tier_server.new_url())
