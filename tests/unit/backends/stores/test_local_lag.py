"""The local store on a node whose cache lags behind another node: absent names, stale handles, folders removed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.local_place import LocalPlace
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.base.clock import SystemClock
from holdfast.errors import CheckpointError, MissingError, UnavailableError
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.stored.repository.timelines import committed_steps
from holdfast.testing.store import fill, keys
from tests.doubles.framework import GlobalTensor
from tests.unit.backends.stores.wrappers.by_hand import ClockBySleep
from tests.unit.ranks import World, plain, saved, sharded

DATA = bytes(range(256)) * 40
LAG_SECONDS = 3.0


class Lagging(Syscalls):
    """A node that finds some names absent, for some seconds after its first look; `mkdir` goes to the server."""

    def __init__(self, clock: ClockBySleep, *names: str, seconds: float = LAG_SECONDS) -> None:
        self._clock, self._names, self._seconds = clock, names, seconds
        self._until: dict[str, float] = {}

    def is_hidden(self, path: str) -> bool:
        """Return whether a folder on a path is hidden: the first of them hides those below it."""
        now = self._clock.seconds
        names = [name for name in path.split("/") if name.startswith(self._names)]
        return any(now < self._until.setdefault(name, now + self._seconds) for name in names)

    def _look(self, name: str) -> None:
        if self.is_hidden(name):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)

    def open(self, path: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        self._look(path)
        return super().open(path, flags, mode, dir_fd=dir_fd)

    def stat(self, name: str, *, dir_fd: int) -> os.stat_result:
        self._look(name)
        return super().stat(name, dir_fd=dir_fd)

    def listdir(self, fd: int) -> list[str]:
        return [name for name in super().listdir(fd) if not self.is_hidden(name)]


class StaleOnce(Syscalls):
    """One call fails with ESTALE: the n-th `open`, or `preadv`."""

    def __init__(self, call: str, at: int, *, lasting: bool = False) -> None:
        self._call, self._at, self._lasting = call, at, lasting
        self.calls = 0

    def _count(self, call: str) -> None:
        if call == self._call:
            self.calls += 1
            if self.calls == self._at or (self._lasting and self.calls > self._at):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def open(self, path: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        self._count("open")
        return super().open(path, flags, mode, dir_fd=dir_fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        self._count("preadv")
        return super().preadv(fd, buffers, offset, flags)


def local(root: Path, syscalls: Syscalls | None = None, clock: ClockBySleep | None = None) -> LocalStore:
    return LocalStore(root, settings=Settings(), syscalls=syscalls, clock=clock)


def move(store: LocalStore) -> None:
    store.put("other", DATA)
    store.move("other", "step/parts/new")


def link(store: LocalStore) -> None:
    store.put("other", DATA)
    assert store.link("other", "step/parts/new")


WRITES = {
    "put": lambda store: store.put("step/parts/new", DATA),
    "put_if_absent": lambda store: store.put_if_absent("step/parts/new", DATA),
    "upload": lambda store: fill(store, "step/parts/new", DATA),
    "move": move,
    "link": link,
}
EVERY_WRITE = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
Write = Callable[[LocalStore], None]


@EVERY_WRITE
@pytest.mark.parametrize("hidden", ("above", "root", "step", "parts"))
def test_a_folder_of_another_node_is_waited_for(tmp_path: Path, write: Write, hidden: str) -> None:
    root, clock = tmp_path / "above" / "root", ClockBySleep()
    (root / "step" / "parts").mkdir(parents=True)
    write(local(root, Lagging(clock, hidden), clock))
    assert LAG_SECONDS <= sum(clock.slept) < 2 * LAG_SECONDS
    assert local(root).get("step/parts/new", len(DATA)) == DATA


def test_folders_that_lag_one_after_the_other_are_waited_for(tmp_path: Path) -> None:
    (tmp_path / "root" / "step" / "parts").mkdir(parents=True)
    clock = ClockBySleep()
    store = local(tmp_path / "root", Lagging(clock, "root", "step", "parts"), clock)
    store.put("step/parts/new", DATA)
    assert 3 * LAG_SECONDS <= sum(clock.slept) < 6 * LAG_SECONDS
    assert keys(store) == ["step/parts/new"]


@pytest.mark.parametrize("call", ("rename", "link"))
def test_a_call_in_a_folder_that_lags_is_made_again(tmp_path: Path, call: str) -> None:
    """The folder opens, and the server's answer to the next call is that of before it existed."""
    clock = ClockBySleep()

    class LateTarget(Syscalls):
        def _look(self) -> None:
            if clock.seconds < 1000.0 + LAG_SECONDS:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

        def rename(self, name: str, new_name: str, *, dir_fd: int, new_dir_fd: int | None = None) -> None:
            self._look()
            super().rename(name, new_name, dir_fd=dir_fd, new_dir_fd=new_dir_fd)

        def link(self, name: str, new_name: str, *, dir_fd: int, new_dir_fd: int | None = None) -> None:
            self._look()
            super().link(name, new_name, dir_fd=dir_fd, new_dir_fd=new_dir_fd)

    local(tmp_path).put("old", DATA)
    store = local(tmp_path, LateTarget(), clock)
    if call == "rename":
        store.move("old", "step/new")
    else:
        assert store.link("old", "step/new")
    assert LAG_SECONDS <= sum(clock.slept) < 2 * LAG_SECONDS
    assert store.get("step/new", len(DATA)) == DATA
    assert keys(store) == (["step/new"] if call == "rename" else ["old", "step/new"])


@EVERY_WRITE
def test_the_error_after_the_wait_has_folder_seconds_and_cause(tmp_path: Path, write: Write) -> None:
    (tmp_path / "root" / "step").mkdir(parents=True)
    clock = ClockBySleep()
    store = local(tmp_path / "root", Lagging(clock, "step", seconds=3600), clock)
    with pytest.raises(
        UnavailableError, match=rf"{tmp_path}/root/step: .*ENOENT for 10 s.*cache of this node"
    ) as raised:
        write(store)
    assert "removed" not in str(raised.value)
    assert isinstance(raised.value.__cause__, FileNotFoundError)
    assert sum(clock.slept) == pytest.approx(10, abs=0.5) and max(clock.slept) <= 1


@EVERY_WRITE
def test_a_folder_that_was_removed_is_made_again_at_once(tmp_path: Path, write: Write) -> None:
    clock = ClockBySleep()
    store = local(tmp_path / "root", clock=clock)
    store.put("step/parts/old", DATA)
    local(tmp_path / "root").delete(["step/parts/old"])
    (tmp_path / "root").rmdir()
    write(store)
    assert clock.slept == []
    assert store.get("step/parts/new", len(DATA)) == DATA


def test_what_is_absent_is_not_waited_for(tmp_path: Path) -> None:
    clock = ClockBySleep()
    store = local(tmp_path / "root", clock=clock)
    with pytest.raises(MissingError):
        store.get("step/key", 10)
    assert keys(store) == []
    store.put("step/key", b"1")
    upload = store.upload("step/new", 10, PAGE_BYTES)
    upload.write(0, memoryview(b"0123456789"))
    local(tmp_path / "root").delete(["step/key", "step/new"])
    with pytest.raises(UnavailableError, match="was removed, or this node's cache does not show it yet"):
        store.sync("step/")
    with pytest.raises(UnavailableError, match="another process removed it while it was written"):
        upload.complete()
    upload.abort()
    assert clock.slept == []


def test_a_folder_removed_between_its_creation_and_its_use_is_made_again_at_once(tmp_path: Path) -> None:
    class Removes(Syscalls):
        made = 0

        def mkdir(self, path: str, mode: int, *, dir_fd: int | None = None) -> None:
            super().mkdir(path, mode, dir_fd=dir_fd)
            self.made += 1
            if self.made < 5:
                os.rmdir(path, dir_fd=dir_fd)

    clock, syscalls = ClockBySleep(), Removes()
    local(tmp_path, syscalls, clock).put("step/key", DATA)
    assert clock.slept == [] and syscalls.made == 5
    assert local(tmp_path).get("step/key", len(DATA)) == DATA


DAEMON_POOL: dict[str, Callable[[LocalStore], object]] = {
    "get": lambda store: store.get("step/old", len(DATA)),
    "size": lambda store: store.size("step/old"),
    "list": keys,
    "sync": lambda store: store.sync("step/"),
    "delete": lambda store: store.delete(["step/old"]),
    "put": lambda store: store.put("step/sub/new", DATA),
    "put_if_absent": lambda store: store.put_if_absent("step/sub/new", DATA),
    "upload": lambda store: fill(store, "step/sub/new", DATA),
    "link": lambda store: store.link("step/old", "step/sub/new"),
}


@pytest.mark.parametrize("call", DAEMON_POOL.values(), ids=DAEMON_POOL)
def test_a_stale_handle_at_every_open_is_tried_again(tmp_path: Path, call: Callable[[LocalStore], object]) -> None:
    local(tmp_path / "unharmed").put("step/old", DATA)
    expected = call(local(tmp_path / "unharmed"))
    for at in count(1):
        root, clock, syscalls = tmp_path / str(at), ClockBySleep(), StaleOnce("open", at)
        local(root).put("step/old", DATA)
        found = call(local(root, syscalls, clock))
        if syscalls.calls < at:
            break
        assert found == expected and len(clock.slept) == 1, f"open {at}"
        objects = {entry.key: entry.bytes for entry in local(tmp_path / "unharmed").list()}
        assert {entry.key: entry.bytes for entry in local(root).list()} == objects
        assert not list(root.rglob(".tmp-*"))
    assert at >= 3


def test_an_object_that_another_node_replaced_is_opened_again(tmp_path: Path) -> None:
    class Replaced(StaleOnce):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
            if not self.calls:
                local(tmp_path).put("latest", b"the new one")
            return super().preadv(fd, buffers, offset, flags)

    local(tmp_path).put("latest", b"old")
    clock = ClockBySleep()
    assert local(tmp_path, Replaced("preadv", 1), clock).get("latest", 100) == b"the new one"
    assert len(clock.slept) == 1


@pytest.mark.parametrize("call", ("get", "put"))
def test_a_handle_that_stays_stale_is_an_error_after_the_wait(tmp_path: Path, call: str) -> None:
    clock = ClockBySleep()
    local(tmp_path).put("step/old", DATA)
    with pytest.raises(UnavailableError, match=rf"{tmp_path}/step.*Stale file handle.* for 10 s.*check the mount"):
        DAEMON_POOL[call](local(tmp_path, StaleOnce("open", 2, lasting=True), clock))
    assert sum(clock.slept) == pytest.approx(10, abs=0.5)


def test_ctrl_c_ends_the_wait_and_leaves_nothing_open(tmp_path: Path) -> None:
    class Interrupted(ClockBySleep):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if len(self.slept) == 3:
                raise KeyboardInterrupt

    (tmp_path / "step").mkdir()
    clock = Interrupted()
    store = local(tmp_path, Lagging(clock, "step"), clock)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(KeyboardInterrupt):
        store.put("step/key", DATA)
    assert os.listdir("/proc/self/fd") == before
    assert list((tmp_path / "step").iterdir()) == []


def test_the_work_of_an_export_that_cannot_be_opened_is_an_error_and_no_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".out.holdfast-export").mkdir()
    opened, slept = os.open, list[float]()

    def hidden(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == str(tmp_path / ".out.holdfast-export"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return opened(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", hidden)
    monkeypatch.setattr("time.sleep", slept.append)
    export = LocalPlace(tmp_path / "out").claimed("fingerprint", [], SystemClock())
    with pytest.raises(UnavailableError, match=r"out\.holdfast-export: .*for 10 s"), export:
        pass
    assert sum(slept) == pytest.approx(10, abs=0.5)


def test_ranks_save_though_the_caches_of_their_nodes_lag(tmp_path: Path) -> None:
    clocks = {rank: ClockBySleep(rank) for rank in range(3)}
    # Every folder that another rank made is absent for three seconds, and the files in it too.
    stores = {
        rank: local(tmp_path, Lagging(clock, "step-", "parts", "epochs"), clock) for rank, clock in clocks.items()
    }
    stores[0] = local(tmp_path)
    world = World(3, stores=stores)
    state: dict[str, GlobalTensor] = {"w": sharded(3, rows=18), "b": plain(2.0)}

    def part(rank: int, run: CheckpointManager) -> object:
        return [saved(run, step, state) for step in (1, 2)]

    for outcome in world.play(part):
        assert isinstance(outcome, list) and not any(isinstance(each, CheckpointError) for each in outcome), outcome
    assert sum(clocks[1].slept) >= LAG_SECONDS and sum(clocks[2].slept) >= LAG_SECONDS
    assert committed_steps(local(tmp_path)) == [1, 2]
