"""Reports of the ranks of one node: one file with all of them, in whatever order the ranks come."""

from __future__ import annotations

import itertools
import tempfile
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.ports.store import Store
from holdfast.base.types.events import Operation, RankReport
from holdfast.errors import CheckpointError, InvalidError, MissingError, UnavailableError
from holdfast.stored.repository.reports import reports_in
from holdfast.training.telemetry import node_reports
from holdfast.training.telemetry.node_reports import IDENTITY_BYTES, NodeReports, node_identity
from tests.doubles.faults import Faults, FaultyStore, raise_error

HERE = b"12345678"


@pytest.fixture(autouse=True, name="folder")
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def report(rank: int, id: str = "ab" * 8) -> RankReport:
    return RankReport(Operation("save", 5, "memory://x", rank, 8), id, "h", rank, 0.0, 1.0, (), rank)


def stored(store: Store) -> dict[str, list[int]]:
    """The ranks in each file."""
    files: dict[str, list[int]] = {}
    for key, found in reports_in(store, ""):
        assert isinstance(found, RankReport), found
        files.setdefault(key, []).append(found.operation.rank)
    return files


def file_of(rank: int, id: str = "ab" * 8) -> str:
    return f"reports/save-{id}-r{rank:05d}.json"


@pytest.mark.parametrize("order", list(itertools.permutations((2, 3, 5))))
def test_one_file_holds_every_rank_of_a_node(order: Sequence[int], folder: Path) -> None:
    store = MemoryStore(uuid.uuid4().hex)
    identities = [b"another!" if rank in (0, 1, 4) else HERE for rank in range(6)]
    for rank in order:
        NodeReports(rank, identities, "job").put(store, "", report(rank))
        # Whoever has returned is stored, once the lowest rank has come.
        come = order[: order.index(rank) + 1]
        assert stored(store) == ({file_of(2): sorted(come)} if 2 in come else {})
    assert list(folder.iterdir()) == []


def test_ranks_that_come_at_once_are_all_stored(folder: Path) -> None:
    store, ranks = MemoryStore(uuid.uuid4().hex), 8
    start = threading.Barrier(ranks)

    def come(rank: int) -> None:
        start.wait()
        for number in range(3):
            NodeReports(rank, [HERE] * ranks, "job").put(store, "", report(rank, f"{number:016x}"))

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(come, range(ranks)))
    assert stored(store) == {file_of(0, f"{number:016x}"): list(range(ranks)) for number in range(3)}
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("amid", [False, True])
def test_a_folder_that_an_earlier_meeting_removes_meanwhile_is_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, amid: bool
) -> None:
    """The last rank of one save removes the empty folder while rank 0 comes to the meeting of the next save."""
    store, left, make = MemoryStore(uuid.uuid4().hex), [True, True], node_reports._make_own

    def made_and_removed(path: Path) -> None:
        make(path)
        if left:
            left.pop()
            path.rmdir()
            if amid:  # As `mkdir` that finds the folder, and then no folder.
                raise FileExistsError(path)

    monkeypatch.setattr(node_reports, "_make_own", made_and_removed)
    for rank in range(3):
        NodeReports(rank, [HERE] * 3, "job").put(store, "", report(rank))
    assert not left
    assert stored(store) == {file_of(0): [0, 1, 2]}
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("identities", [[], [bytes(IDENTITY_BYTES)] * 2, [b"another!", HERE]])
def test_a_rank_that_shares_no_folder_has_a_file_of_its_own(identities: list[bytes], folder: Path) -> None:
    store = MemoryStore(uuid.uuid4().hex)
    NodeReports(1, identities, "job").put(store, "", report(1))
    assert stored(store) == {file_of(1): [1]}
    assert list(folder.iterdir()) == []


def test_a_folder_of_somebody_else_is_not_used(folder: Path) -> None:
    (folder / "holdfast-job-0").mkdir(mode=0o777)
    (folder / "holdfast-job-0").chmod(0o777)
    store = MemoryStore(uuid.uuid4().hex)
    NodeReports(1, [HERE] * 2, "job").put(store, "", report(1))
    assert stored(store) == {file_of(1): [1]}


def test_what_one_rank_could_not_store_the_next_stores() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    full = FaultyStore(store, Faults(raise_error(lambda key: UnavailableError(f"{key}: full")), names={"put"}))
    identities = [HERE] * 3
    NodeReports(0, identities, "job").put(store, "", report(0))
    with pytest.raises(UnavailableError):
        NodeReports(1, identities, "job").put(full, "", report(1))
    assert stored(store) == {file_of(0): [0]}
    NodeReports(2, identities, "job").put(store, "", report(2))
    assert stored(store) == {file_of(0): [0, 1, 2]}


@pytest.mark.parametrize("kind", [UnavailableError, MissingError, InvalidError])
def test_an_error_of_storage_is_raised_whatever_its_kind(kind: type[CheckpointError]) -> None:
    store = FaultyStore(
        MemoryStore(uuid.uuid4().hex),
        Faults(raise_error(lambda key: kind(f"{key}: there is no bucket")), names={"put"}, lasting=True),
    )
    with pytest.raises(kind, match="there is no bucket"):
        NodeReports(0, [HERE] * 2, "job").put(store, "", report(0))


def test_storage_that_takes_no_reports_leaves_a_few_of_them_on_the_node(folder: Path) -> None:
    full = FaultyStore(
        MemoryStore(uuid.uuid4().hex),
        Faults(raise_error(lambda key: UnavailableError(f"{key}: full")), names={"put"}, lasting=True),
    )
    for number in range(30):
        with pytest.raises(UnavailableError):
            NodeReports(0, [HERE] * 2, "job").put(full, "", report(0, f"{number:016x}"))
    left = {path.name for path in (folder / "holdfast-job-0").iterdir()}
    assert left == {f"save-{number:016x}" for number in range(21, 30)}


def test_a_node_of_many_ranks_has_several_files() -> None:
    assert NodeReports(63, [HERE] * 100, "job").ranks == tuple(range(64))
    assert NodeReports(64, [HERE] * 100, "job").ranks == tuple(range(64, 100))


def test_ranks_without_a_folder_for_temporary_files_state_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_identity() == node_identity() != bytes(IDENTITY_BYTES)
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    assert node_identity() == bytes(IDENTITY_BYTES)
