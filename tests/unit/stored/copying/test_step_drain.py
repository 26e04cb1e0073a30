"""A step of a near tier is drained to a root: once whole and never in part, whatever cuts the drain."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast._face import wiring
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.base.types.events import Event, Progress
from holdfast.core.format.names import manifest_key, step_folder
from holdfast.core.plan.drain import share_of
from holdfast.errors import ConflictError, CorruptError, MissingError, UnavailableError
from holdfast.stored.checkpoint import pack_sizes
from holdfast.stored.copying.step_drain import StepDrain
from holdfast.stored.publishing.outcome import OutcomeKind
from holdfast.stored.repository.epochs import put_accepted, put_epoch, read_epoch
from holdfast.stored.repository.timelines import run_timelines
from tests.doubles.calls import RecordingStore
from tests.doubles.faults import Faults, FaultyStore, raise_error, stall_until
from tests.support.crashed_run import COMPRESSED, run_at, training_state
from tests.support.object_server import ObjectServer
from tests.unit.stored.copying.drained_run import (
    STEPS,
    drain_of,
    flip,
    frozen_pack,
    join,
    manifest_at,
    near_at,
    require_same,
    root_of,
    steps_in,
)

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture
def near(tmp_path: Path) -> LocalStore:
    return near_at(tmp_path / "near")


@pytest.fixture(params=["local", "memory", "objects"])
def root(request: pytest.FixtureRequest, tmp_path: Path, objects: ObjectServer) -> Store:
    return root_of(request.param, tmp_path, objects)


class Watch:
    """Takes progress, and may act at the first."""

    def __init__(self) -> None:
        self.seen: list[Progress] = []
        self.act = lambda: None

    def on_event(self, event: Event) -> None:
        assert isinstance(event, Progress)
        self.seen.append(event)
        self.act()


def drained(near: Store, root: Store, step: int, epoch: int) -> None:
    drain = drain_of(near, root, step)
    drain.copy(drain.lacking())
    assert drain.publish(epoch).kind is OutcomeKind.COMMITTED
    require_same(near, root, step)


def test_steps_are_drained_with_the_packs_that_they_refer_to(near: LocalStore, root: Store) -> None:
    epoch, watch = join(near, root), Watch()
    drain = drain_of(near, root, 30, watch)
    frozen = frozen_pack(near, 30)
    assert [file.key for file in drain.files] == [file.key for file in drain.lacking()]
    assert drain.files[0].key == frozen and frozen.startswith(step_folder(10))
    copied = drain.copy(drain.lacking())
    assert copied.files == len(drain.files)
    assert watch.seen[-1] == Progress(copied.bytes, copied.bytes)
    assert drain.lacking() == [] and steps_in(root) == []
    assert drain.publish(epoch).kind is OutcomeKind.COMMITTED
    require_same(near, root, 30)
    assert steps_in(root) == [step_folder(30).rstrip("/")]
    reports = f"{step_folder(30)}reports/"
    assert [entry.key for entry in root.list(reports)] == [entry.key for entry in near.list(reports)] != []
    # The unchanged tensor is in the root by now, and no link to it is.
    earlier = drain_of(near, root, 10)
    assert frozen in {file.key for file in earlier.files} - {file.key for file in earlier.lacking()}
    drained(near, root, 10, epoch)
    drained(near, root, 20, epoch)
    assert not [entry.key for entry in root.list("") if entry.key.endswith(".link")]
    assert drain.publish(epoch).kind is OutcomeKind.COMMITTED, "the very same manifest is there"


def test_the_shares_of_ranks_are_a_whole_step(near: LocalStore, root: Store) -> None:
    epoch = join(near, root)
    for rank in range(3):
        drain = drain_of(near, root, 20)
        with pytest.raises(UnavailableError, match=r"lacks \d+ of the \d+ files of step 20"):
            drain.publish(epoch)
        share = share_of(((file.key, file.record.bytes) for file in drain.files), 3, rank)
        assert drain.copy([file for file in drain.files if file.key in share]).keys == share
    assert drain.publish(epoch).kind is OutcomeKind.COMMITTED
    require_same(near, root, 20)


def test_coded_packs_are_drained_as_they_are(tmp_path: Path, root: Store) -> None:
    near = near_at(tmp_path / "coded", STEPS[:2], COMPRESSED)
    epoch = join(near, root)
    drained(near, root, 20, epoch)
    drained(near, root, 10, epoch)


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_drain_that_is_cut_at_any_call_is_continued_by_the_next(
    near: LocalStore, tmp_path: Path, objects: ObjectServer, kind: str
) -> None:
    at = met = 0
    while met or not at:
        at += 1
        root = root_of(kind, tmp_path, objects)
        epoch = join(near, root)
        # Once cut, nothing is done any more: no upload is aborted either.
        faults = Faults(raise_error(UnavailableError), at=at, lasting=True)
        cut = drain_of(near, FaultyStore(root, faults), 20)
        try:
            cut.copy(cut.lacking())
            outcome = cut.publish(epoch).kind
        except UnavailableError:
            outcome = OutcomeKind.ABORTED
        met = faults.met
        if steps_in(root):
            require_whole_but_unfinished(near, root)
        else:
            assert outcome is not OutcomeKind.COMMITTED
        next_drain = drain_of(near, root, 20)
        lacking = next_drain.lacking()
        assert next_drain.copy(next_drain.files).files == len(lacking)
        assert next_drain.publish(epoch).kind is OutcomeKind.COMMITTED
        require_same(near, root, 20)
    assert at > 20


def require_whole_but_unfinished(near: Store, root: Store) -> None:
    root.delete([entry.key for entry in root.list("copying/")])
    require_same(near, root, 20)


def test_two_drains_at_once_make_one_step(near: LocalStore, root: Store) -> None:
    epoch = join(near, root)
    together = threading.Barrier(2)

    def one() -> OutcomeKind:
        drain = drain_of(near, root, 20)
        lacking = drain.lacking()
        together.wait(60)
        drain.copy(lacking)
        assert not drain.lacking()
        return drain.publish(epoch).kind

    with ThreadPoolExecutor(2) as threads:
        outcomes = [future.result() for future in [threads.submit(one) for _ in range(2)]]
    assert outcomes == [OutcomeKind.COMMITTED] * 2
    require_same(near, root, 20)


@pytest.mark.parametrize("at", ["upload.write", "upload.complete", "move"])
def test_a_slow_drain_ends_well_after_another_one_has_published(
    near: LocalStore, tmp_path: Path, objects: ObjectServer, at: str
) -> None:
    root = root_of("local", tmp_path, objects)
    epoch, published = join(near, root), threading.Event()
    slow = drain_of(near, FaultyStore(root, Faults(stall_until(published), names=[at])), 20)
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(lambda: slow.copy(slow.files))
        while not list(root.list("copying/")):
            pass
        drained(near, root, 20, epoch)
        published.set()
        assert ended.result().keys == {file.key for file in slow.files}
    require_same(near, root, 20)


def test_a_damaged_chunk_is_fatal_only_if_the_root_lacks_the_file(near: LocalStore, root: Store) -> None:
    epoch, frozen = join(near, root), frozen_pack(near, 30)
    drained(near, root, 20, epoch)
    flip(Path(near.url), frozen)
    for link in Path(near.url).rglob("*.link"):
        link.unlink()
    drained_without_the_pack = drain_of(near, root, 30)
    drained_without_the_pack.copy(drained_without_the_pack.lacking())
    assert drained_without_the_pack.publish(epoch).kind is OutcomeKind.COMMITTED
    drain = drain_of(near, root, 10)
    (own, *_) = [file.key for file in drain.lacking() if file.is_pack]
    flip(Path(near.url), own)
    before = len(drain.lacking())
    with pytest.raises(CorruptError, match=rf"step 10 is damaged: .*{own} bytes \[\d+, \d+\) of .*: chunk hashes"):
        drain.copy(drain.lacking())
    assert [file.key for file in drain.lacking()] == [own] and before > 1, "all others are there"
    with pytest.raises(UnavailableError, match="lacks 1 of"):
        drain.publish(epoch)
    assert step_folder(10).rstrip("/") not in steps_in(root)


def test_a_damaged_file_is_read_from_its_link(near: LocalStore, root: Store) -> None:
    epoch, frozen = join(near, root), frozen_pack(near, 30)
    whole = near.get(frozen, 1 << 20)
    flip(Path(near.url), frozen)
    drain = drain_of(near, root, 30)
    drain.copy(drain.lacking())
    assert root.get(frozen, 1 << 20) == whole
    assert drain.publish(epoch).kind is OutcomeKind.COMMITTED


def take_over(root: Store, epoch: int, steps: dict[int, str | None]) -> int:
    """Begin the next epoch, in which these steps of former epochs count; return its number."""
    former = read_epoch(root, epoch)
    assert former is not None
    put_epoch(root, replace(former, number=epoch + 1))
    put_accepted(root, epoch + 1, former.run_id, steps)
    return epoch + 1


def test_a_drain_of_an_epoch_that_is_over_publishes_nothing(near: LocalStore, root: Store) -> None:
    epoch = join(near, root)
    drain = drain_of(near, root, 30)
    drain.copy(drain.lacking())
    newer = take_over(root, epoch, {10: manifest_at(near, 10).digest})
    with pytest.raises(ConflictError, match="the list of the newer epoch lacks the step"):
        drain.publish(newer)
    # One that counts may be drained, but not by the writer that was replaced.
    drained(near, root, 10, newer)
    with pytest.raises(ConflictError, match="took over"):
        drain_of(near, root, 10).publish(epoch)
    assert steps_in(root) == [step_folder(10).rstrip("/")]


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_manifest_that_is_damaged_after_it_was_read_is_not_published(
    near: LocalStore, root: Store, damage: str
) -> None:
    epoch, key = join(near, root), manifest_key(20)
    drain = drain_of(near, root, 20)
    drain.copy(drain.lacking())
    whole = near.get(key, 1 << 20)
    middle = len(whole) // 2
    near.put(key, whole[:middle] + (b"" if damage == "cut" else bytes([whole[middle] ^ 1]) + whole[middle + 1 :]))
    with pytest.raises(CorruptError, match=r"manifest.json: the manifest of step 20 is damaged.*holdfast repair"):
        drain.publish(epoch)
    assert steps_in(root) == []
    near.put(key, whole)
    assert drain.publish(epoch).kind is OutcomeKind.COMMITTED
    require_same(near, root, 20)


def test_a_writer_that_takes_over_while_the_manifest_is_put_decides(near: LocalStore, root: Store) -> None:
    epoch, recorded = join(near, root), RecordingStore(root)
    drain = drain_of(near, recorded, 30)
    drain.copy(drain.lacking())

    def watch(name: str, subject: str) -> None:
        if (name, subject) == ("put_if_absent", manifest_key(30)):
            take_over(root, epoch, {})

    with recorded.watched(watch):
        assert drain.publish(epoch).kind is OutcomeKind.ASK_STORAGE
    assert run_timelines(root).chain == ()


def test_a_fenced_manifest_makes_room_and_another_one_that_counts_does_not(
    near: LocalStore, root: Store, tmp_path: Path
) -> None:
    epoch = join(near, root)
    other = near_at(tmp_path / "other", STEPS[:2])
    theirs = other.get(manifest_key(20), 1 << 20)
    root.put(manifest_key(20), theirs)
    drain = drain_of(near, root, 20)
    drain.copy(drain.lacking())
    with pytest.raises(ConflictError, match=r"already there; expected none.*Two manifests of step 20 count"):
        drain.publish(epoch)
    assert root.get(manifest_key(20), len(theirs)) == theirs
    newer = take_over(root, epoch, {20: manifest_at(near, 20).digest})
    assert drain.publish(newer).kind is OutcomeKind.COMMITTED
    require_same(near, root, 20)


def test_the_step_of_an_older_timeline_moves_to_superseded(near: LocalStore, root: Store) -> None:
    drained(near, root, 20, join(near, root))
    before = manifest_at(near, 20)
    with run_at(near) as manager:
        manager.load(training_state(20), 10)
        manager.save(20, training_state(25)).wait()
    epoch = join(near, root)
    newer = manifest_at(near, 20)
    assert newer.timeline.number == 2 and newer.digest != before.digest
    drain = drain_of(near, root, 20)
    drain.copy(drain.lacking())
    # The older one no more: it would take the place of a newer one.
    drained(near, root, 10, epoch)
    assert drain.publish(epoch).kind is OutcomeKind.COMMITTED
    require_same(near, root, 20)
    timelines = run_timelines(root)
    assert [stored.step for stored in timelines.chain] == [10, 20]
    assert [stored.digest for stored in timelines.superseded] == [before.digest]
    older = StepDrain(near, root, before, SystemClock(), wiring.codecs())
    assert older.lacking() == []
    with pytest.raises(ConflictError, match="already there"):
        older.publish(epoch)


def test_a_step_that_has_left_the_near_tier_is_not_published(near: LocalStore, root: Store) -> None:
    epoch, drain = join(near, root), drain_of(near, root, 20)
    drain.copy(drain.lacking())
    near.delete([manifest_key(20)])
    with pytest.raises(MissingError):
        drain.publish(epoch)
    assert steps_in(root) == []


def test_a_drain_that_is_cancelled_ends_and_is_continued(near: LocalStore, root: Store) -> None:
    epoch, watch = join(near, root), Watch()
    drain = drain_of(near, root, 20, watch)
    watch.act = drain.cancel
    with pytest.raises(UnavailableError, match=r"was ended"):
        drain.copy(drain.lacking())
    there = len(drain.files) - len(drain.lacking())
    assert there < len(drain.files)
    with pytest.raises(UnavailableError, match=r"was ended"):
        drain.copy(drain.lacking())
    assert len(drain.files) - len(drain.lacking()) == there
    drained(near, root, 20, epoch)


def test_a_file_of_another_size_is_replaced(near: LocalStore, root: Store) -> None:
    epoch, drain = join(near, root), drain_of(near, root, 20)
    drain.copy(drain.lacking())
    cut = drain.files[-1].key
    root.put(cut, b"cut")
    assert [file.key for file in drain.lacking()] == [cut]
    drained(near, root, 20, epoch)


def test_reports_that_cannot_be_copied_change_nothing(
    near: LocalStore, root: Store, caplog: pytest.LogCaptureFixture
) -> None:
    epoch = join(near, root)
    drain = drain_of(near, FaultyStore(root, Faults(raise_error(UnavailableError), names=["put"])), 20)
    drain.copy(drain.lacking())
    assert drain.publish(epoch).kind is OutcomeKind.COMMITTED
    assert "drain of step 20: committed, but reports of the step are missing" in caplog.text
    require_same(near, root, 20)


def test_a_root_that_answers_in_pages_is_listed_and_no_file_is_asked_for(
    near: LocalStore, tmp_path: Path, objects: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_sizes, "CALLS_AT_ONCE", 0)  # As if each folder had more files than that.
    root = root_of("objects", tmp_path, objects)
    join(near, root)
    recorded = RecordingStore(root)
    drain = drain_of(near, recorded, 20)
    assert drain.lacking() == drain.files
    drain.copy(drain.files)
    recorded.take()
    assert drain.lacking() == []
    folders = {file.key.rpartition("/")[0] for file in drain.files}
    asked = [(call.name, call.subject) for call in recorded.take()]
    assert sorted(asked) == sorted(("list", f"{folder}/") for folder in folders)
