"""Records of epochs: what is written reads back, damage is told, and which manifests count follows from them."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.types.epoch import Epoch, Fence, Holder
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.values import Group
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX, decode_manifest, encode_manifest
from holdfast.core.format.names import accepted_key, epoch_key, step_folder
from holdfast.core.format.sealed_json import sealed
from holdfast.errors import ConflictError, CorruptError, InvalidError, UnavailableError
from holdfast.stored.repository import epochs
from holdfast.stored.repository.catalog import step_folders
from holdfast.stored.repository.epochs import (
    accepted_steps,
    current_fence,
    is_valid,
    newest_epoch,
    put_accepted,
    put_epoch,
    read_epoch,
    remove_before,
    require_counted,
    require_newest,
)
from holdfast.stored.repository.timelines import committed_steps
from tests.doubles.faults import Faults, FaultyStore, raise_error

HOLDER = Holder("node-7", "boot", "pid:[1] time:[2]", 4711, 99, "2026-01-01T00:00:00+00:00", "ab" * 16, 10.0)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


def manifest_bytes(step: int | None, epoch: int, attempt: str = "0" * 16) -> bytes:
    return encode_manifest(
        Manifest(
            run_id="run", step=step, attempt=attempt, created="", parent=None, world_size=1, layouts=(), software={},
            tensors=0, tensor_bytes=0, aliases={}, tree=Group("dict", {}), packs=(), parts=(), indexes=(), epoch=epoch,
        )
    )  # fmt: skip


def publish(store: MemoryStore, step: int, epoch: int, attempt: str = "0" * 16) -> str:
    """Put a manifest; return its digest."""
    data = manifest_bytes(step, epoch, attempt)
    store.put(step_folder(step) + "manifest.json", data)
    return decode_manifest(data, "").digest


def begin(store: MemoryStore, number: int) -> None:
    """Begin an epoch as its holder does."""
    put_epoch(store, Epoch(number, "run", HOLDER))
    put_accepted(store, number, "run", accepted_steps(store, current_fence(store), step_folders(store)))


def test_a_manifest_says_its_epoch_and_the_format_that_brought_it() -> None:
    data = manifest_bytes(3, 7)
    assert decode_manifest(data, "").epoch == 7
    assert b'"format": [\n   1,\n   2\n  ]' in data
    assert b'"epoch"' not in manifest_bytes(3, 0)
    assert b'"format": [\n   1,\n   0\n  ]' in manifest_bytes(3, 0)


@pytest.mark.parametrize("said", [-1, "1", True, 1.0, 10**12])
def test_an_impossible_epoch_is_damage(said: object) -> None:
    document = {"holdfast": {"format": [1, 2], "kind": "checkpoint"}, "step": 3, "epoch": said}
    with pytest.raises(CorruptError, match="epoch is"):
        epochs.run_fields_of_manifest(sealed(document), "here")


def test_a_record_reads_back(store: MemoryStore) -> None:
    epoch = Epoch(3, "run", HOLDER)
    put_epoch(store, epoch)
    assert read_epoch(store, 3) == epoch
    assert read_epoch(store, 4) is None
    assert newest_epoch(store) == 3
    put_epoch(store, Epoch(4, "run", HOLDER, former_ended=True))
    assert read_epoch(store, 4) == Epoch(4, "run", HOLDER, former_ended=True)
    assert str(HOLDER) == "host node-7, process 4711, since 2026-01-01T00:00:00+00:00"


def test_only_one_begins_an_epoch_and_its_lost_reply_is_a_success(store: MemoryStore) -> None:
    put_epoch(store, Epoch(1, "run", HOLDER))
    put_epoch(store, Epoch(1, "run", HOLDER))
    other = Holder("elsewhere", "b", "", 1, 1, "", "cd" * 16, 10.0)
    with pytest.raises(ConflictError):
        put_epoch(store, Epoch(1, "run", other))
    record = read_epoch(store, 1)
    assert record is not None and record.holder == HOLDER


@pytest.mark.parametrize(
    "change",
    [
        {"pid": -1}, {"pid": 1 << 31}, {"pid": "1"}, {"started": True}, {"host": 3}, {"nonce": None},
        {"lease_seconds": 0.0}, {"lease_seconds": 1e9}, {"lease_seconds": "10"},
    ],
)  # fmt: skip
def test_an_impossible_holder_is_damage(store: MemoryStore, change: dict[str, object]) -> None:
    said = {name: getattr(HOLDER, name) for name in HOLDER.__slots__} | change
    document = {"holdfast": {"format": [1, 2], "kind": "epoch"}, "epoch": 1, "run_id": "run", "holder": said}
    store.put(epoch_key(1), sealed(document))
    with pytest.raises(CorruptError, match="holder"):
        read_epoch(store, 1)


def test_a_record_under_another_number_or_of_another_major_version_is_refused(store: MemoryStore) -> None:
    put_epoch(store, Epoch(1, "run", HOLDER))
    store.put(epoch_key(2), store.get(epoch_key(1), 1 << 16))
    with pytest.raises(CorruptError, match="of epoch 1; expected 2"):
        read_epoch(store, 2)
    store.put(epoch_key(3), sealed({"holdfast": {"format": [2, 0], "kind": "epoch"}}))
    with pytest.raises(InvalidError, match="format 2"):
        read_epoch(store, 3)


def test_without_epochs_everything_counts_and_no_manifest_is_read(store: MemoryStore) -> None:
    store.put(step_folder(4) + "manifest.json", b"not one")
    assert committed_steps(store) == [4]


def test_what_a_new_epoch_does_not_accept_counts_nowhere(store: MemoryStore) -> None:
    publish(store, 1, 0)
    begin(store, 1)
    publish(store, 2, 1)
    begin(store, 2)
    publish(store, 3, 1)
    publish(store, 4, 2)
    publish(store, 5, 0)
    assert committed_steps(store) == [1, 2, 4]
    begin(store, 3)
    assert committed_steps(store) == [1, 2, 4]


def test_an_accepted_step_that_was_removed_and_published_late_does_not_count(store: MemoryStore) -> None:
    publish(store, 1, 1, "1" * 16)
    begin(store, 2)
    assert committed_steps(store) == [1]
    publish(store, 1, 1, "2" * 16)
    assert committed_steps(store) == []


def test_an_epoch_that_died_before_it_said_what_it_accepts_changes_nothing(store: MemoryStore) -> None:
    begin(store, 1)
    publish(store, 1, 1)
    put_epoch(store, Epoch(2, "run", HOLDER))
    assert committed_steps(store) == [1]
    begin(store, 3)
    assert committed_steps(store) == [1]
    assert current_fence(store).epoch == 3


def test_a_damaged_manifest_stays_visible_as_such_and_counts_again_once_it_is_whole(store: MemoryStore) -> None:
    begin(store, 1)
    publish(store, 1, 1)
    key = step_folder(1) + "manifest.json"
    whole = store.get(key, 1 << 20)
    store.put(key, whole.replace(b'"created": ""', b'"created": "x"'))
    begin(store, 2)
    assert committed_steps(store) == [1], "a reader is to meet the damage"
    store.put(key, whole)
    assert committed_steps(store) == [1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"", lambda whole: bytes(len(whole)), lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:], lambda whole: bytes(MANIFEST_BYTES_MAX + 1),
        lambda whole: sealed({"holdfast": {"format": [2, 0], "kind": "checkpoint"}}),
    ],
    ids=["empty", "zeros", "half", "bit of its digest", "too large", "newer format"],
)  # fmt: skip
def test_however_a_manifest_is_damaged_a_copy_of_it_counts_again(
    store: MemoryStore, damage: Callable[[bytes], bytes]
) -> None:
    begin(store, 1)
    publish(store, 1, 1)
    key = step_folder(1) + "manifest.json"
    whole = store.get(key, 1 << 20)
    store.put(key, damage(whole))
    begin(store, 2)
    begin(store, 3)
    assert current_fence(store).accepted == {1: None}
    store.put(key, whole)
    assert committed_steps(store) == [1]
    begin(store, 4)
    assert current_fence(store).accepted == {1: decode_manifest(whole, "").digest}


def test_no_epoch_says_what_it_accepts_while_a_manifest_may_not_be_read(store: MemoryStore) -> None:
    begin(store, 1)
    publish(store, 1, 1)
    publish(store, 2, 1)
    refused = Faults(raise_error(InvalidError), names={"get"}, at=2)
    with pytest.raises(InvalidError, match=r"Whether step 2 counts is unknown until"):
        accepted_steps(FaultyStore(store, refused), Fence(1), [1, 2])
    begin(store, 2)
    assert committed_steps(store) == [1, 2]


def test_where_what_was_accepted_is_damaged_the_one_before_counts(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    begin(store, 1)
    publish(store, 1, 1)
    begin(store, 2)
    publish(store, 2, 2)
    store.put(accepted_key(2), b"garbage")
    assert committed_steps(store) == [1, 2]
    assert "the list of epoch 2 cannot be read" in caplog.text
    begin(store, 3)
    assert committed_steps(store) == [1, 2]


def test_only_records_that_say_nothing_and_the_last_two_lists_stay(store: MemoryStore) -> None:
    for number in range(1, 5):
        before = current_fence(store).epoch
        begin(store, number)
        epochs.put_heartbeat(store, number, b"1\n")
        remove_before(store, before)
    names = sorted(entry.key.removeprefix("epochs/").lstrip("0") for entry in store.list("epochs/"))
    assert names == ["1.json", "2.json", "3.accepted.json", "3.beat", "3.json", "4.accepted.json", "4.beat", "4.json"]


def test_the_newest_epoch_and_nobody_else_may_go_on(store: MemoryStore) -> None:
    begin(store, 1)
    require_newest(store, 1)
    begin(store, 2)
    require_newest(store, 2)
    with pytest.raises(ConflictError, match=r"epoch 1 is over: epoch 2 \(host node-7, process 4711, since 2026"):
        require_newest(store, 1)
    store.put(epoch_key(2), b"garbage")
    with pytest.raises(ConflictError, match=r"epoch 2 \(its record cannot be read\)"):
        require_newest(store, 1)


def test_a_step_published_around_the_end_of_its_epoch_is_judged_by_the_next(store: MemoryStore) -> None:
    begin(store, 1)
    early = publish(store, 1, 1)
    require_counted(store, 1, 1, early)
    put_epoch(store, Epoch(2, "run", HOLDER))
    with pytest.raises(UnavailableError, match="list of accepted steps does not exist yet"):
        require_counted(store, 1, 1, early)
    put_accepted(store, 2, "run", accepted_steps(store, current_fence(store), step_folders(store)))
    require_counted(store, 1, 1, early)
    with pytest.raises(ConflictError, match="published too late"):
        require_counted(store, 2, 1, publish(store, 2, 1))


_STEPS = st.integers(0, 5)


@given(st.lists(st.one_of(st.just("begin"), st.tuples(_STEPS, st.booleans())), max_size=30))
def test_a_step_counts_exactly_if_its_writer_was_the_newest_when_it_published(acts: list[object]) -> None:
    """Against a model: late manifests never count, timely ones always do, however epochs follow one another."""
    store = MemoryStore(uuid.uuid4().hex)
    number, model, there = 0, dict[int, bool](), set[int]()
    for each in acts:
        if each == "begin":
            number += 1
            begin(store, number)
            continue
        assert isinstance(each, tuple)
        step, is_late = each
        if step in there:
            continue
        there.add(step)
        epoch = max(number - 1, 0) if is_late else number
        publish(store, step, epoch)
        model[step] = epoch == number
    assert committed_steps(store) == sorted(step for step, is_timely in model.items() if is_timely)
    fence = current_fence(store)
    assert {step for step in there if is_valid(store, fence, step)} == {
        step for step, timely in model.items() if timely
    }


def test_a_fence_admits_by_epoch_or_by_digest() -> None:
    fence = Fence(5, {1: "a"})
    assert fence.admits(9, 5, "x")
    assert fence.admits(9, 6, "x")
    assert fence.admits(1, 2, "a")
    assert not fence.admits(1, 4, "b")
    assert not fence.admits(2, 4, "a")
    assert Fence().admits(1, 0, "x")
    assert Fence(5, {1: None}).admits(1, 4, "whatever lies there")
    assert not Fence(5, {1: None}).admits(2, 4, "x")
