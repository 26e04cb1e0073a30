"""A drain sends mapped files of the near tier without a copy, where the root takes lent memory; else it reads them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.memory import MemoryStore
from holdfast.backends.stores.objects.store import ObjectStore
from holdfast.backends.stores.remote.memory import BytesInFlight, LentObject
from holdfast.backends.stores.wrappers.retrying import RetryingStore
from holdfast.base.ports.readable import Release
from holdfast.base.ports.store import Store, Upload
from holdfast.core.engine.buffers import is_read_in
from holdfast.errors import CorruptError, UnavailableError
from holdfast.settings import MIB, PAGE_BYTES, Settings
from holdfast.stored.copying import file_copies, step_drain
from holdfast.stored.publishing.outcome import OutcomeKind
from tests.doubles.faults import Faults, FaultyStore
from tests.everyday.frozen_run import made_at
from tests.support.object_server import ObjectServer
from tests.unit.stored.copying.drained_run import drain_of, flip, join, near_at, require_same


class Lending(MemoryStore):
    """A store that sends lent memory at `complete`, as object stores do."""

    def __init__(self, name: str) -> None:
        super().__init__(name, object_bytes_max=MIB)
        self.lent: dict[str, int] = {}
        self._in_flight = BytesInFlight(MIB)

    def upload(
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> Upload:
        """Begin an object of any size: larger ones are sent in parts."""
        return Store.upload(self, key, bytes_max, part_bytes)

    def lent_upload(self, key: str, parts: Sequence[memoryview]) -> Upload:
        self.lent[key] = sum(part.nbytes for part in parts)
        keep = partial(self.keep, key)
        return LentObject(f"{self.url}/{key}", parts, self._in_flight, lambda lent: keep(memoryview(b"".join(lent))))


@pytest.fixture
def near(tmp_path: Path) -> LocalStore:
    return near_at(tmp_path / "near")


@pytest.fixture
def root(request: pytest.FixtureRequest) -> Lending:
    return Lending(request.node.name)


def test_mapped_files_are_lent(near: LocalStore, root: Lending) -> None:
    epoch = join(near, root)
    drain = drain_of(near, root, 20)
    drain.copy(drain.lacking())
    assert root.lent == {file.key: file.record.bytes for file in drain.files}
    assert drain.publish(epoch).kind is OutcomeKind.COMMITTED
    require_same(near, root, 20)


@pytest.mark.parametrize("why", ["the source maps nothing", "a page cannot be read", "too large for one request"])
def test_other_files_are_read(near: LocalStore, root: Lending, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    epoch = join(near, root)
    source = FaultyStore(near, Faults()) if why == "the source maps nothing" else near
    if why == "a page cannot be read":
        monkeypatch.setattr(file_copies, "is_read_in", lambda memory: False)
    drain = drain_of(source, root, 20)
    if why == "too large for one request":
        root.traits = replace(root.traits, object_bytes_max=0)
    drain.copy(drain.lacking())
    assert root.lent == {}
    assert drain.publish(epoch).kind is OutcomeKind.COMMITTED
    require_same(near, root, 20)


class InParts(Lending):
    """A root to which every file is too large for one request; no part ends before another one has begun."""

    def __init__(self, name: str, failing: int | None = None) -> None:
        super().__init__(name)
        self.traits = replace(self.traits, object_bytes_max=0)
        self.together = threading.Barrier(2)
        self.failing, self.under_way, self.at_abort = failing, list[int](), list[int]()

    def upload(
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> Upload:
        """Begin an object."""
        return Part(self, super().upload(key, bytes_max, part_bytes), bytes_max > 2 * part_bytes)


class Part:
    """An upload to `InParts`."""

    def __init__(self, root: InParts, inner: Upload, is_large: bool) -> None:
        self.root, self.inner, self.is_large = root, inner, is_large
        self.room, self.complete = inner.room, inner.complete

    def write(self, offset: int, data: memoryview, release: Release | None = None) -> None:
        """Write a part; the first two of a large file wait for each other."""
        self.root.under_way.append(offset)
        if self.is_large and offset < 2 * PAGE_BYTES:
            self.root.together.wait(20)
        if offset and offset == self.root.failing:
            self.root.under_way.pop()
            raise UnavailableError("a part fails")
        time.sleep(0.3 if self.root.failing and offset > self.root.failing else 0)
        self.inner.write(offset, data, release)
        self.root.under_way.pop()

    def abort(self) -> None:
        """Note how many parts are under way."""
        self.root.at_abort.append(len(self.root.under_way))
        self.inner.abort()


@pytest.fixture
def one_file_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_drain, "_FILES_AT_ONCE", 1)
    monkeypatch.setattr(file_copies, "_PART_BYTES", PAGE_BYTES)


def test_parts_of_a_mapped_file_are_sent_side_by_side(near: LocalStore, one_file_at_once: None) -> None:
    root = InParts("side-by-side")
    epoch = join(near, root)
    drain = drain_of(near, root, 20)
    assert max(file.record.bytes for file in drain.files) > 2 * PAGE_BYTES
    drain.copy(drain.lacking())
    assert drain.publish(epoch).kind is OutcomeKind.COMMITTED
    require_same(near, root, 20)


def test_a_failed_part_ends_the_upload_after_the_others(near: LocalStore, one_file_at_once: None) -> None:
    root = InParts("failed-part", failing=PAGE_BYTES)
    join(near, root)
    drain = drain_of(near, root, 20)
    with pytest.raises(UnavailableError, match="a part fails"):
        drain.copy(drain.lacking())
    assert root.at_abort == [0], "parts were under way as the upload was aborted"


def test_a_damaged_file_is_refuted_before_it_is_sent(near: LocalStore, root: Lending) -> None:
    join(near, root)
    drain = drain_of(near, root, 10)
    (damaged, *_) = [file.key for file in drain.files if file.is_pack]
    flip(Path(near.url), damaged)
    for link in Path(near.url).rglob("*.link"):
        link.unlink()
    with pytest.raises(CorruptError, match="chunk hashes to"):
        drain.copy(drain.lacking())
    assert damaged in root.lent and [file.key for file in drain.lacking()] == [damaged]


def test_the_pages_of_a_file_that_was_cut_short_are_not_touched(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, settings=Settings())
    store.put("file", bytes(4 * PAGE_BYTES))
    mapped = store.mapped("file")
    assert mapped is not None and is_read_in(memoryview(mapped))
    with open(tmp_path / "file", "r+b") as file:
        file.truncate(PAGE_BYTES)
    assert not is_read_in(memoryview(mapped))


def test_an_object_store_gets_lent_files_within_the_cap(
    tmp_path: Path, objects: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_at(tmp_path)
    near = LocalStore(tmp_path, settings=Settings())
    settings = objects.settings(max_bytes_per_second=4.0 * MIB)
    inner = ObjectStore(objects.new_url(), settings=settings)
    lent = dict[str, int]()
    lent_upload = inner.lent_upload

    def note(key: str, parts: Sequence[memoryview]) -> Upload:
        lent[key] = sum(part.nbytes for part in parts)
        return lent_upload(key, parts)

    monkeypatch.setattr(inner, "lent_upload", note)
    root = RetryingStore(inner, settings)
    epoch = join(near, root)
    # Of two ranks, each has half of the cap. A file waits until those before it have used up their time.
    drain = drain_of(near, root.for_operation("drain of step 3", 0, 2), 3)
    began = time.monotonic()
    drain.copy(drain.lacking())
    seconds = time.monotonic() - began
    assert lent == {file.key: file.record.bytes for file in drain.files}
    assert max(lent.values()) > MIB and seconds > max(lent.values()) / (2 * MIB)
    assert drain.publish(epoch).kind is OutcomeKind.COMMITTED
    require_same(near, root, 3)
