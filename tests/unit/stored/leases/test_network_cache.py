"""Network mounts remember absent names and listings: fence and takeover ask in ways that the server answers anew."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.alone import AloneComm
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.keys import is_listed
from holdfast.base.ports.readable import StoreEntry
from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Epoch
from holdfast.core.format.names import epoch_key, step_folder
from holdfast.core.format.sealed_json import header, sealed
from holdfast.errors import ConflictError, MissingError
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.leases.process import this_process
from holdfast.stored.leases.writer import WriterLease
from holdfast.stored.publishing.manifest import publish_manifest
from holdfast.stored.publishing.outcome import OutcomeKind
from holdfast.stored.repository.catalog import read_run_id
from holdfast.stored.repository.epochs import put_epoch, require_newest
from holdfast.stored.repository.timelines import committed_steps
from holdfast.training.coordination.job import Job
from tests.doubles.framework import NumpyFramework
from tests.unit.ranks import PATIENT, plain

CLOCK = SystemClock()


class NetworkMount(ForwardingStore):
    """One client's view: absent names and listings are remembered until this client writes into their folder.

    Opening a file asks the server.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._absent: set[str] = set()
        self._folders: dict[str, list[str]] = {}
        self._listings: dict[str, list[StoreEntry]] = {}

    def size(self, key: str) -> int:
        if key in self._absent:
            raise MissingError(f"{key}: remembered as absent")
        try:
            return super().size(key)
        except MissingError:
            self._absent.add(key)
            raise

    def folders(self, prefix: str = "") -> list[str]:
        return self._folders.setdefault(prefix, super().folders(prefix))

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        entries = self._listings.setdefault(prefix, [*super().list(prefix)])
        return (entry for entry in entries if is_listed(entry.key, after, up_to))

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        self._forget(key)
        super().put(key, data, durable=durable)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._forget(key)
        super().put_if_absent(key, data)

    def _forget(self, key: str) -> None:
        folder = os.path.dirname(key)
        self._absent = {name for name in self._absent if os.path.dirname(name) != folder}
        for known in (self._folders, self._listings):
            known.pop(f"{folder}/" if folder else "", None)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


def begin(store: Store, number: int) -> None:
    put_epoch(store, Epoch(number, "run", this_process(CLOCK, 10.0)))


def test_an_epoch_that_began_after_the_first_look_is_seen_by_the_second(store: MemoryStore) -> None:
    begin(store, 1)
    mount = NetworkMount(store)
    require_newest(mount, 1)
    with pytest.raises(MissingError):
        mount.size(epoch_key(2))
    begin(store, 2)
    with pytest.raises(ConflictError, match="epoch 1 is over"):
        require_newest(mount, 1)


def test_a_commit_during_which_a_new_epoch_began_is_not_acknowledged(store: MemoryStore) -> None:
    class TakenOver(NetworkMount):
        """The new job begins its epoch as the old one publishes."""

        def put_if_absent(self, key: str, data: bytes) -> None:
            super().put_if_absent(key, data)
            begin(store, 2)

    begin(store, 1)
    data = sealed({**header("manifest"), "step": 7})
    outcome = publish_manifest(CheckpointLocation(TakenOver(store), step_folder(7), 7), data, 1)
    assert outcome.kind is OutcomeKind.ASK_STORAGE


def test_a_step_committed_after_the_new_job_listed_the_root_is_accepted(store: MemoryStore) -> None:
    mount = NetworkMount(store)
    old = CheckpointManager.over(store, Job(AloneComm(), CLOCK, PATIENT, NumpyFramework(0)))
    old.save(1, {"w": plain(1.0)}).wait()
    assert committed_steps(mount) == [1], "the new job loads from it"
    old.save(2, {"w": plain(2.0)}).wait()
    old.close()
    run_id = read_run_id(store)
    assert run_id is not None
    lease = WriterLease(mount, CLOCK, 10.0)
    lease.hold(run_id)
    lease.release()
    assert committed_steps(store) == [1, 2]
