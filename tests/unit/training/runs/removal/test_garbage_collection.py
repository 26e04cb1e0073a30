"""Collecting: what goes, what stays and why, beside readers, tags, saves under way and other writers."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch

import holdfast
from holdfast import api
from holdfast._face import wiring
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.readable import StoreEntry
from holdfast.base.ports.store import Store
from holdfast.base.types.removal import Unreferenced
from holdfast.core.format.names import SUPERSEDED_FOLDER, step_folder, superseded_key
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError, UnavailableError
from holdfast.policies import AnyOf, BestN, LatestN, Tagged
from holdfast.settings import Settings
from holdfast.stored.leases.reader import ReaderLease, leases
from holdfast.stored.leases.writer import hold_writer_lease
from holdfast.stored.repository.catalog import read_manifest, read_run_id
from holdfast.stored.repository.epochs import RELEASED, put_heartbeat
from holdfast.stored.repository.removal import mark_keys, marks, put_mark
from holdfast.stored.repository.timelines import displace
from holdfast.training.runs.removal.garbage_collection import CheckpointGC
from holdfast.training.runs.removal.pins import Pins, StepPin
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.support.tuning import tuned
from tests.unit.ranks import World, fresh_store, plain

Result = TypeVar("Result")

SMALL = tuned(Settings(chunk_bytes=4096, collect_grace_seconds=0.0), window_bytes=8192, unchanged_bytes_min=4096)
State = dict[str, object]


def state_at(step: int) -> State:
    """A tensor that is another at every step, and one that is the same at all."""
    chance = torch.Generator().manual_seed(step)
    return {"moving": torch.randn(3000, generator=chance), "frozen": torch.arange(6000.0), "step": step}


def manager_at(
    root: Path, keep_last: int | None = None, start_over: bool = False, **more: object
) -> holdfast.CheckpointManager:
    settings = replace(SMALL, **more)  # type: ignore[arg-type]
    return holdfast.CheckpointManager(
        root, keep_last=keep_last, start_over=start_over, process_group=False, settings=settings
    )


def saved(root: Path, *steps: int) -> None:
    with manager_at(root) as manager:
        manager.load(state_at(0))
        for step in steps:
            manager.save(step, state_at(step)).wait()


def require_whole(root: Path, *steps: int) -> None:
    with manager_at(root) as manager:
        assert manager.steps() == list(steps)
        for step in steps:
            assert list(api.open_checkpoint(step_path(root, step)).verify()) == []
            loaded = state_at(step + 1000)
            assert manager.load(loaded, step) == step
            expected = state_at(step)
            assert torch.equal(loaded["moving"], expected["moving"])  # type: ignore[arg-type]
            assert torch.equal(loaded["frozen"], expected["frozen"])  # type: ignore[arg-type]
            assert loaded["step"] == step


def step_path(root: Path, step: int) -> Path:
    return root / step_folder(step).rstrip("/")


def store_of(root: Path) -> LocalStore:
    return LocalStore(root, settings=SMALL)


def collect(root: Path, keep_last: int, **more: object) -> api.CollectReport:
    keep = AnyOf(LatestN(keep_last), Tagged())
    return api.collect(root, keep=keep, settings=SMALL, **more)  # type: ignore[arg-type]


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_a_process_left_that_was_killed_while_it_asked_the_store_goes(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    key = f"reports/probe-{'0' * 24}"
    store_of(tmp_path).put(key, b"first")
    report = collect(tmp_path, 1)
    assert report.files == 1 and report.steps == ()
    assert not list(store_of(tmp_path).list("reports/"))
    require_whole(tmp_path, 1)


def test_what_a_kept_step_shares_stays_by_its_link(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4)
    report = collect(tmp_path, 2)
    assert report.steps == (1, 2)
    assert set(report.reasons) == {3, 4}
    assert "newest" in report.reasons[4]
    require_whole(tmp_path, 3, 4)
    assert not step_path(tmp_path, 1).exists() and not step_path(tmp_path, 2).exists()


def test_a_pack_goes_with_the_last_that_refers_to_it(tmp_path: Path) -> None:
    with manager_at(tmp_path, link_unchanged=False) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step)).wait()
    with manager_at(tmp_path, deduplicate=False) as manager:
        manager.load(state_at(0))
        manager.save(3, state_at(3)).wait()
    collect(tmp_path, 2)
    assert step_path(tmp_path, 1).exists()
    collect(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [step_folder(3).rstrip("/")]
    require_whole(tmp_path, 3)


def test_a_dry_run_says_the_same_and_removes_nothing(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    before = sorted(tmp_path.rglob("*"))
    planned = collect(tmp_path, 1, dry_run=True)
    assert sorted(tmp_path.rglob("*")) == before
    assert planned.steps == (1, 2) and planned.bytes > 0
    done = collect(tmp_path, 1)
    assert (done.steps, done.reasons) == (planned.steps, planned.reasons)
    assert collect(tmp_path, 1).steps == ()
    assert not mark_keys(store_of(tmp_path))


def test_a_manager_collects_behind_training(tmp_path: Path) -> None:
    with manager_at(tmp_path, keep_last=2) as manager:
        for step in range(1, 8):
            manager.save(step, state_at(step)).wait()
        until(lambda: manager.steps() == [6, 7])
    require_whole(tmp_path, 6, 7)


def test_a_grace_is_not_waited_for_at_the_end_and_goes_on_at_the_next_start(tmp_path: Path) -> None:
    start = time.monotonic()
    with manager_at(tmp_path, keep_last=1, collect_grace_seconds=3600.0) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step)).wait()
        until(lambda: bool(mark_keys(store_of(tmp_path))))
    assert time.monotonic() - start < 600
    require_whole(tmp_path, 1, 2)
    with manager_at(tmp_path, keep_last=1) as manager:
        manager.load(state_at(0))
        manager.save(3, state_at(3)).wait()
        until(lambda: manager.steps() == [3])


def test_tagged_quarantined_and_torn_steps_stay(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4, 5, 6)
    api.tag(tmp_path, 2, "release")
    flip(newest_pack(tmp_path, 4))
    with manager_at(tmp_path) as manager:
        os.unlink(newest_pack(tmp_path, 6))
        flip(newest_pack(tmp_path, 5))
        assert manager.load(state_at(0)) == 3
    report = collect(tmp_path, 1)
    # 4, 5 and 6 are damaged and under quarantine, so 3 is the newest valid one.
    assert report.steps == (1,)
    assert report.reasons[2] == ("tag release",)
    assert "newest" in report.reasons[3]
    assert report.reasons[6] == ("under quarantine",)
    api.untag(tmp_path, "release")
    assert collect(tmp_path, 1).steps == (2,)


def newest_pack(root: Path, step: int) -> Path:
    manifest = read_manifest(store_of(root), step_folder(step))
    own = next(pack.name for pack in manifest.packs if not pack.name.startswith("step-"))
    return step_path(root, step) / manifest.attempt / own


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)


def test_a_newest_step_that_lacks_a_pack_takes_no_place(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    os.unlink(newest_pack(tmp_path, 3))
    report = collect(tmp_path, 1)
    assert report.steps == (1,)
    assert "newest" in report.reasons[2] and "missing or of another size" in report.reasons[3][0]
    require_loads(tmp_path, 2)


def require_loads(root: Path, step: int) -> None:
    loaded = state_at(1000)
    with manager_at(root) as manager:
        assert manager.load(loaded, step) == step
    assert torch.equal(loaded["moving"], state_at(step)["moving"])  # type: ignore[arg-type]


def test_a_manifest_that_cannot_be_read_keeps_every_pack(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 1, 2, 3)
    manifest = step_path(tmp_path, 2) / "manifest.json"
    kept = manifest.read_bytes()
    manifest.write_bytes(kept.replace(b"attempt", b"Attempt"))
    report = collect(tmp_path, 1)
    assert report.steps == (1,)
    assert "no pack is removed while the manifests of steps [2] cannot be read" in caplog.text
    manifest.write_bytes(kept)
    require_whole(tmp_path, 2, 3)


def test_a_damaged_tag_or_run_stops_it(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    api.tag(tmp_path, 1, "release")
    tag = tmp_path / "tags" / "release.json"
    tag.write_bytes(tag.read_bytes()[:-3])
    with pytest.raises(CorruptError, match="release"):
        collect(tmp_path, 1)
    api.untag(tmp_path, "release")
    run = tmp_path / "holdfast.json"
    run.write_bytes(run.read_bytes()[:-3])
    with pytest.raises(CorruptError, match=r"holdfast\.json"):
        collect(tmp_path, 1)
    assert [path.name for path in sorted(tmp_path.glob("step-*/manifest.json"))] == ["manifest.json"] * 2


def test_bad_calls_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no root of a run"):
        api.collect(tmp_path / "nowhere")
    saved(tmp_path / "run", 1, 2)
    with pytest.raises(InvalidError, match="is one checkpoint"):
        api.collect(step_path(tmp_path / "run", 1))
    with pytest.raises(InvalidError, match="no step has the metric 'loss'"):
        api.collect(tmp_path / "run", keep=BestN(1, "loss"))
    with pytest.raises(InvalidError, match="grace_seconds"):
        api.collect(tmp_path / "run", grace_seconds=-1)
    require_whole(tmp_path / "run", 1, 2)


def test_refused_while_a_job_writes(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step)).wait()
        with pytest.raises(ConflictError, match="another job writes here"):
            collect(tmp_path, 1)
        assert collect(tmp_path, 1, dry_run=True).steps == (1,)
    assert collect(tmp_path, 1).steps == (1,)


def test_leftovers_go_and_strangers_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 1, 2)
    shutil.copytree(step_path(tmp_path, 1), step_path(tmp_path, 9))
    os.unlink(step_path(tmp_path, 9) / "manifest.json")
    (step_path(tmp_path, 2) / "notes.txt").write_text("mine")
    report = api.collect(tmp_path, settings=SMALL)
    assert report.steps == () and report.files > 0
    assert not step_path(tmp_path, 9).exists()
    assert (step_path(tmp_path, 2) / "notes.txt").read_text() == "mine"
    assert "no file of a save; it is not removed" in caplog.text
    require_whole(tmp_path, 1, 2)


def test_a_reader_holds_its_step_until_it_is_done(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    location = replace(wiring.location_at(step_path(tmp_path, 1), SMALL))
    assert location.root is not None
    lease = ReaderLease(SystemClock(), 10.0)
    lease.begin(location, read_manifest(store_of(tmp_path), step_folder(1)))
    report = collect(tmp_path, 1)
    assert report.steps == (2,)
    assert report.reasons[1][0].startswith("read by host ")
    require_loads(tmp_path, 1)
    lease.close()
    assert not leases(store_of(tmp_path))
    assert collect(tmp_path, 1).steps == (1,)


def test_a_load_takes_a_lease_and_gives_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1, 2)
    seen: list[int | None] = []

    class Watched:
        def state_dict(self) -> State:
            return {"value": 1}

        def load_state_dict(self, _: State) -> None:
            seen.extend(lease.step for lease in leases(store_of(tmp_path)))

    with manager_at(tmp_path, start_over=True) as manager:
        manager.save(3, {"watched": Watched()}).wait()
        manager.load({"watched": Watched()}, 3)
        assert seen == [3]
        assert not leases(store_of(tmp_path))
    holdfast.load(step_path(tmp_path, 3), {"watched": Watched()}, process_group=False)
    assert seen == [3, 3]
    assert not leases(store_of(tmp_path))


def test_leases_of_the_dead_do_not_count(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    child = os.fork()
    if child == 0:
        try:
            lease = ReaderLease(SystemClock(), 10.0)
            lease.begin(
                wiring.location_at(step_path(tmp_path, 1), SMALL), read_manifest(store_of(tmp_path), step_folder(1))
            )
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert len(leases(store_of(tmp_path))) == 1
    assert collect(tmp_path, 1).steps == (1,)
    assert not leases(store_of(tmp_path))


class HandClock(SystemClock):
    """A clock that only a test moves on; its wall clock jumps as it likes."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic_seconds(self) -> float:
        return self.now

    def unix_seconds(self) -> float:
        return -86400.0 * (self.now % 7)


def test_a_silent_lease_of_another_machine_dies_by_our_own_clock(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    store, clock = store_of(tmp_path), HandClock()
    lease = ReaderLease(clock, 10.0)
    lease.begin(wiring.location_at(step_path(tmp_path, 1), SMALL), read_manifest(store, step_folder(1)))
    lease._stopped.set()  # Its machine is gone: nobody renews it.
    path = tmp_path / leases(store)[0].key
    other_machine(path, store)
    with hold_writer_lease(store, clock, 10.0, run_id_of(store)) as tenure:
        collector = CheckpointGC(store, clock, LatestN(1), tenure)
        for clock.now in (0.0, 5.0, 9.9):
            report = collector.collect(0, lambda _: False)
            assert report is not None and report.steps == ()
        clock.now = 10.0
        report = collector.collect(0, lambda _: False)
        assert report is not None and report.steps == (1,)


def run_id_of(store: Store) -> str:
    run_id = read_run_id(store)
    assert run_id is not None
    return run_id


def other_machine(path: Path, store: LocalStore, lease_seconds: float = 10.0) -> None:
    """Have a lease say that its reader is on a machine that was booted another time."""
    from holdfast.stored.leases.process import this_process
    from holdfast.stored.leases.reader import put_lease

    holder = replace(this_process(SystemClock(), lease_seconds), boot="another", nonce=path.stem)
    put_lease(store, holder, 1, 1)


class Asked(ForwardingStore):
    """Records the folders of steps that are listed, and listings of all."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.listed: list[str] = []

    def _around(self, name: str, subject: str, call: Callable[[], Result]) -> Result:
        if name == "list" and (not subject or subject.startswith("step-")):
            self.listed.append(subject)
        return call()


def test_a_step_that_stays_is_listed_once(tmp_path: Path) -> None:
    store = Asked(store_of(tmp_path))
    with manager_at(tmp_path, deduplicate=False) as manager:
        collector = CheckpointGC(store, SystemClock(), LatestN(3), manager._parts.writer_lease)
        for step in range(1, 5):
            manager.save(step, state_at(step)).wait()
        collected = collector.collect(0, lambda _: False)
        assert collected is not None and collected.steps == (1,)
        expected = [step_folder(step) for step in (1, 1, 2, 3, 4)]
        assert sorted(store.listed) == expected, "the step to delete by both inventories"
        manager.save(5, state_at(5)).wait()
        holdfast.load(tmp_path / step_folder(2), state_at(0), process_group=False)
        store.listed.clear()
        collected = collector.collect(0, lambda _: False)
        assert collected is not None and collected.steps == (2,)
        assert sorted(store.listed) == [step_folder(step) for step in (2, 2, 5)]
    assert sorted(path.name + "/" for path in tmp_path.glob("step-*")) == [step_folder(step) for step in (3, 4, 5)]


def test_the_folders_of_many_nodes_are_listed_at_once_by_each_inventory(tmp_path: Path) -> None:
    store = Asked(store_of(tmp_path))
    store.traits = replace(store.traits, has_parity=True)
    with manager_at(tmp_path, deduplicate=False) as manager:
        collector = CheckpointGC(store, SystemClock(), LatestN(3), manager._parts.writer_lease)
        for step in range(1, 6):
            manager.save(step, state_at(step)).wait()
        holdfast.load(tmp_path / step_folder(2), state_at(0), process_group=False)
        collected = collector.collect(0, lambda _: False)
        assert collected is not None and collected.steps == (1, 2)
        assert store.listed == ["", ""]
    assert sorted(path.name + "/" for path in tmp_path.glob("step-*")) == [step_folder(step) for step in (3, 4, 5)]


class SilentNode(ForwardingStore):
    """The folders of nodes of which one, with the packs of some steps, does not answer."""

    def __init__(self, inner: Store, steps: Iterable[int]) -> None:
        super().__init__(inner)
        self.traits = replace(inner.traits, has_parity=True)
        self.folders_of_packs = tuple(map(step_folder, steps))

    def _is_there(self, key: str) -> bool:
        return not (key.startswith(self.folders_of_packs) and key.endswith(".safetensors"))

    def size(self, key: str) -> int:
        if not self._is_there(key):
            raise UnavailableError("a node does not answer")
        return super().size(key)

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        return (each for each in super().list(prefix, after=after, up_to=up_to) if self._is_there(each.key))


def test_steps_that_cannot_be_looked_at_for_long_do_not_pile_up(tmp_path: Path) -> None:
    with manager_at(tmp_path, deduplicate=False) as manager:
        for step in range(1, 7):
            manager.save(step, state_at(step)).wait()
    api.tag(tmp_path, 3, "kept")
    store = SilentNode(store_of(tmp_path), range(2, 7))
    collector = CheckpointGC(store, SystemClock(), AnyOf(LatestN(1), Tagged()), None)
    assert set(collector.survey().reasons) == {1, 3, 6}, "the newest one, the complete one, and that with a tag"
    store.folders_of_packs = ("-",)
    assert set(collector.survey().reasons) == {3, 6}


def test_a_pack_in_a_folder_that_is_not_listed_again_is_still_missed(tmp_path: Path) -> None:
    store = Asked(store_of(tmp_path))
    with manager_at(tmp_path, link_unchanged=False) as manager:
        collector = CheckpointGC(store, SystemClock(), LatestN(2), None)
        manager.save(1, state_at(1)).wait()
        collector.survey()
        manager.save(2, state_at(2)).wait()
        (pack,) = (pack for pack in read_manifest(store, step_folder(2)).packs if pack.name.startswith("step-"))
        store.listed.clear()
        (tmp_path / pack.name).unlink()
        reasons = collector.survey().reasons
        assert step_folder(1) not in store.listed
        assert f"{pack.name} is missing or of another size" in reasons[2]


def test_a_step_that_changes_is_listed_again(tmp_path: Path) -> None:
    store = Asked(store_of(tmp_path))
    with manager_at(tmp_path, deduplicate=False) as manager:
        collector = CheckpointGC(store, SystemClock(), LatestN(1), None)
        for step in (1, 2, 3):
            manager.save(step, state_at(step)).wait()
        inventory = collector.survey()
        assert set(inventory.reasons) == {3}
        store.listed.clear()
        assert collector.survey() == inventory
        assert step_folder(3) not in store.listed
        # The step is saved again: its manifest has other content and the same size.
        shutil.rmtree(tmp_path / step_folder(3))
        manager.save(3, state_at(3)).wait()
        again = collector.survey()
        assert step_folder(3) in store.listed
        assert again.standing[3] != inventory.standing[3]
        assert set(again.reasons) == {3}


def test_a_mark_of_many_files_stays_small_enough_for_readers(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    keys = (f"step-{step:012d}/{'0' * 16}/r{rank:05d}.safetensors" for step in range(12) for rank in range(16_384))
    mark = put_mark(
        store, "run", "a" * 32, 1, Unreferenced({1: "0" * 32}, dict.fromkeys(keys, 4096)), is_carried_out=True
    )
    # Every load and tag reads it, and ignores one above the largest size.
    assert store.size(mark.key) < 1 << 20
    assert marks(store) == [mark]
    document = json.loads((tmp_path / mark.key).read_text())
    assert document["file_count"] == 12 * 16_384
    assert document["files"][0].endswith("r00000.safetensors")


def test_who_comes_after_the_mark_steps_aside(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    store = store_of(tmp_path)
    digest = read_manifest(store, step_folder(1)).digest
    with hold_writer_lease(store, SystemClock(), 10.0, run_id_of(store)) as tenure, manager_at(tmp_path) as manager:
        going = Unreferenced({1: digest})
        put_mark(store, run_id_of(store), "a" * 32, tenure.epoch, going, is_carried_out=False)
        assert manager.load(state_at(0), 1) == 1, "during the grace there is time to say so"
        mark = put_mark(store, run_id_of(store), "a" * 32, tenure.epoch, going, is_carried_out=True)
        assert [each.steps for each in marks(store)] == [{(1, digest)}]
        with pytest.raises(MissingError, match="is being deleted"):
            manager.load(state_at(0), 1)
        assert manager.load(state_at(0)) == 2
        with pytest.raises(ConflictError, match="is being deleted"):
            manager.tag(1, "late")
        assert not list(tmp_path.glob("tags/*"))
    # Whoever marked it is gone, and nobody carries it out any more.
    assert mark_keys(store) == [mark.key]
    with manager_at(tmp_path) as manager:
        assert manager.load(state_at(0), 1) == 1
        manager.tag(1, "late")
    assert collect(tmp_path, 1).steps == ()
    assert not mark_keys(store)


def test_what_is_tagged_or_read_during_the_grace_stays(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4)
    store, clock = store_of(tmp_path), SystemClock()
    lease = ReaderLease(clock, 10.0)

    def meanwhile(_: float) -> bool:
        assert len(mark_keys(store)) == 1
        api.tag(tmp_path, 2, "mine")
        lease.begin(wiring.location_at(step_path(tmp_path, 1), SMALL), read_manifest(store, step_folder(1)))
        return False

    with hold_writer_lease(store, clock, 10.0, run_id_of(store)) as tenure:
        report = CheckpointGC(store, clock, AnyOf(LatestN(1), Tagged()), tenure).collect(0, meanwhile)
    assert report is not None and report.steps == (3,)
    lease.close()
    require_whole(tmp_path, 1, 2, 4)


def test_a_listing_that_lacks_what_was_there_removes_nothing(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    store, clock = store_of(tmp_path), SystemClock()
    hidden = tmp_path.parent / "hidden"

    def meanwhile(_: float) -> bool:
        step_path(tmp_path, 3).rename(hidden)
        return False

    lost = pytest.raises(CorruptError, match=r"steps \[3\] were there and are not listed any more")
    with hold_writer_lease(store, clock, 10.0, run_id_of(store)) as tenure, lost:
        CheckpointGC(store, clock, LatestN(1), tenure).collect(0, meanwhile)
    hidden.rename(step_path(tmp_path, 3))
    require_whole(tmp_path, 1, 2, 3)


def test_one_who_was_replaced_removes_nothing(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    store, clock = store_of(tmp_path), SystemClock()

    def meanwhile(_: float) -> bool:
        # As a contender does that has seen no sign of life for as long as the lease.
        put_heartbeat(store, tenure.epoch, RELEASED)
        saved(tmp_path, 4)
        return False

    with (
        hold_writer_lease(store, clock, 10.0, run_id_of(store)) as tenure,
        pytest.raises(ConflictError, match="took over"),
    ):
        CheckpointGC(store, clock, LatestN(1), tenure).collect(0, meanwhile)
    require_whole(tmp_path, 1, 2, 3, 4)


def test_a_save_under_way_keeps_what_it_refers_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pins, fourth = Pins(), StepPin(4)
    saved(tmp_path, 1, 2, 3)
    assert pins.pin(fourth, 1)
    store, clock = store_of(tmp_path), SystemClock()
    with hold_writer_lease(store, clock, 10.0, run_id_of(store)) as tenure:
        report = CheckpointGC(store, clock, LatestN(1), tenure, pins).collect(0, lambda _: False)
        assert report is not None and report.steps == (2,)
        pins.unpin(fourth, is_committed=True)
        report = CheckpointGC(store, clock, LatestN(1), tenure, pins).collect(0, lambda _: False)
        assert report is not None and report.steps == (1,)
    assert pins.release_for_removal(frozenset([1, 2])) == {1, 2}
    assert not pins.pin(StepPin(5), 2), "what is going cannot be referred to any more"
    assert pins.pin(StepPin(6), 3)
    assert pins.release_for_removal(frozenset([2, 3])) == {2}


def test_a_base_that_was_collected_is_not_referred_to(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with manager_at(tmp_path) as manager:
        assert manager.load(state_at(0), 1) == 1
        # By another process, before this one begins to write.
        saved(tmp_path, 2)
        collect(tmp_path, 1)
        manager.save(3, state_at(3)).wait()
        collected_too = api.open_checkpoint(step_path(tmp_path, 3)).manifest
        assert all(not pack.name.startswith("step-") for pack in collected_too.packs)
    # The other process saved step 2 meanwhile: this one did not load it, so its step begins a timeline.
    require_whole(tmp_path, 3)


def test_saving_and_collecting_beside_each_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    with manager_at(tmp_path, keep_last=2) as manager:
        for step in range(1, 40):
            manager.save(step, state_at(step))
            if step % 7 == 0:
                # A load beside a save in flight begins a timeline, and the newest step of the former one would stay.
                manager.wait()
                manager.load(state_at(0))
        manager.wait()
        until(lambda: manager.steps() == [38, 39])
    require_whole(tmp_path, 38, 39)
    assert not caplog.records


def test_threads_end_with_their_manager(tmp_path: Path) -> None:
    with manager_at(tmp_path, keep_last=1) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step)).wait()
        manager.load(state_at(0))
    names = {thread.name for thread in threading.enumerate()}
    assert "holdfast-collect" not in names


def test_a_damaged_mark_keeps_nobody_from_the_run(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    (tmp_path / "collecting").mkdir()
    (tmp_path / "collecting" / ("0" * 32 + ".json")).write_bytes(b"")
    with manager_at(tmp_path, keep_last=1) as manager:
        assert manager.load(state_at(0), 1) == 1
        assert manager.load(state_at(0)) == 3
        manager.tag(1, "mine")
        manager.save(4, state_at(4)).wait()
        manager.save(5, state_at(5)).wait()
        until(lambda: manager.steps() == [1, 5])
    assert not mark_keys(store_of(tmp_path))


@pytest.mark.parametrize("content", [b"", b"torn"])
def test_a_torn_lease_holds_everything_and_not_for_ever(tmp_path: Path, content: bytes) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "readers").mkdir(exist_ok=True)
    (tmp_path / "readers" / ("0" * 32 + ".json")).write_bytes(content)
    store, clock = store_of(tmp_path), HandClock()
    with hold_writer_lease(store, clock, 10.0, run_id_of(store)) as tenure:
        collector = CheckpointGC(store, clock, LatestN(1), tenure)
        report = collector.collect(0, lambda _: False)
        assert report is not None and report.steps == ()
        clock.now = 60.0
        report = collector.collect(0, lambda _: False)
        assert report is not None and report.steps == (1,)
    assert not leases(store)


def test_gc_watches_who_cannot_be_seen(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    store = store_of(tmp_path)
    lease = ReaderLease(SystemClock(), 0.5)
    lease.begin(wiring.location_at(step_path(tmp_path, 1), SMALL), read_manifest(store, step_folder(1)))
    lease._stopped.set()
    other_machine(tmp_path / leases(store)[0].key, store, 0.5)
    assert collect(tmp_path, 1).steps == (1,)


@pytest.mark.parametrize("lost", ["index-00000.msgpack", "parts/r00000.msgpack"])
def test_a_newest_step_that_lacks_its_index_takes_no_place(tmp_path: Path, lost: str) -> None:
    saved(tmp_path, 1, 2)
    (newest_pack(tmp_path, 2).parent / lost).unlink()
    assert collect(tmp_path, 1).steps == ()
    require_loads(tmp_path, 1)


def test_a_copied_step_folder_takes_no_place(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    shutil.copytree(step_path(tmp_path, 2), step_path(tmp_path, 9))
    report = collect(tmp_path, 1)
    assert report.steps == (1,)
    require_loads(tmp_path, 2)


def test_a_checkpoint_saved_by_path_among_the_steps_stops_nothing(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    holdfast.save(tmp_path / "alone", state_at(7), process_group=False)
    (tmp_path / "alone").rename(step_path(tmp_path, 7))
    assert collect(tmp_path, 1).steps == (1,)
    require_loads(tmp_path, 2)


def test_where_the_run_goes_on_from_stays_though_others_are_newer(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30, 40)
    with manager_at(tmp_path, keep_last=1) as manager:
        assert manager.load(state_at(0), 20) == 20
        assert manager.kept()[20] == ("the run goes on from it",)
        collect_in(manager)
        assert manager.steps() == [20, 40]
    require_whole(tmp_path, 20, 40)


def collect_in(manager: holdfast.CheckpointManager) -> None:
    """Collect now, as the thread of the manager does after a commit."""
    parts = manager._parts
    parts.writer_lease.hold(run_id_of(parts.store))
    assert parts.collecting is not None
    assert parts.collecting._collector.collect(0.0, lambda _: False) is not None


def test_a_step_whose_old_manifest_is_going_is_not_saved_anew_beside_it() -> None:
    pins = Pins()
    assert pins.release_for_removal(frozenset([5])) == {5}
    pinned = threading.Event()

    def pin() -> None:
        pins.pin(StepPin(5), None)
        pinned.set()

    thread = threading.Thread(target=pin)
    thread.start()
    assert not pinned.wait(0.2)
    pins.release_for_removal(frozenset())
    assert pinned.wait(60)
    thread.join()


def test_a_save_that_failed_for_certain_pins_nothing(tmp_path: Path) -> None:
    with manager_at(tmp_path, keep_last=1) as manager:
        manager.save(1, state_at(1)).wait()
        with pytest.raises(ConflictError):
            manager.save(1, state_at(1)).wait()
        for step in (2, 3):
            manager.save(step, state_at(step)).wait()
        until(lambda: manager.steps() == [3])


def test_a_save_that_may_come_later_stays_pinned() -> None:
    pins, first, again, third = Pins(), StepPin(5), StepPin(5), StepPin(5)
    assert pins.pin(first, 1)
    pins.note_unknown(first)
    assert pins.pin(again, 2), "tried again"
    pins.unpin(again, is_committed=False)
    assert pins.needed() == {1, 5}
    pins.pin(third, None)
    pins.unpin(third, is_committed=True)
    assert not pins.needed()


def test_two_saves_of_one_step_are_pinned_each_by_itself() -> None:
    pins, first, second = Pins(), StepPin(5), StepPin(5)
    assert pins.pin(first, 1) and pins.pin(second, 2)
    pins.unpin(first, is_committed=True)
    assert pins.needed() == {2, 5} and pins.under_way() == {5}
    pins.unpin(second, is_committed=True)
    assert not pins.needed()


def test_a_save_that_ended_before_it_was_pinned_pins_nothing() -> None:
    pins, late = Pins(), StepPin(5)
    pins.unpin(late, is_committed=False)
    assert not pins.pin(late, 1) and not pins.needed()


def test_a_manifest_that_moves_during_an_inventory_keeps_its_files() -> None:
    world = World(1)
    world.play(lambda rank, run: [run.save(step, {"p": plain(step)}).wait(timeout=60.0) for step in (1, 2)])
    store, digest = world.store, world.manifest(2).digest

    def move(operation: FaultPoint) -> None:
        if operation.subject == SUPERSEDED_FOLDER:
            displace(store, 2, digest, 1)

    hooked = FaultyStore(store, Faults(move, names=("list",), lasting=True, after=True))
    inventory = CheckpointGC(hooked, SystemClock(), None, None).survey()
    assert store.size(superseded_key(2, digest)) and not inventory.unreferenced.files


def test_a_refused_save_leaves_the_one_in_flight_of_the_same_step_pinned() -> None:
    released, reached = threading.Event(), threading.Event()

    def stall(operation: FaultPoint) -> None:
        if operation.subject.endswith("000002/manifest.json"):
            reached.set()
            assert released.wait(60)

    slow = FaultyStore(fresh_store(), Faults(stall, names=("put_if_absent",), lasting=True))

    def part(rank: int, run: holdfast.CheckpointManager) -> None:
        run.save(1, {"p": plain(1.0)}).wait(timeout=60.0)
        first = run.save(2, {"p": plain(2.0)})
        assert reached.wait(60)
        with pytest.raises(InvalidError):
            run.save(2, {"p": object()}).wait(timeout=60.0)
        assert run._parts.pins.under_way() == {2}
        released.set()
        first.wait(timeout=60.0)
        assert not run._parts.pins.under_way()

    assert World(1, stores={0: slow}).play(part) == [None]


def test_packs_that_a_manifest_set_aside_names_stay(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    flip(newest_pack(tmp_path, 3))
    with manager_at(tmp_path, keep_last=1, deduplicate=False) as manager:
        assert manager.load(state_at(0)) == 2
        for step in (3, 4):
            manager.save(step, state_at(step)).wait()
        # 2 is the newest valid step of the timeline that training left when it fell back.
        until(lambda: manager.steps() == [2, 4])
    # The first step holds what the one that was set aside refers to.
    assert [path.name for path in step_path(tmp_path, 1).rglob("*.safetensors")]


def test_looking_changes_nothing(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    child = os.fork()
    if child == 0:
        try:
            location, manifest = (
                wiring.location_at(step_path(tmp_path, 1), SMALL),
                read_manifest(store_of(tmp_path), "step-000000000001/"),
            )
            ReaderLease(SystemClock(), 10.0).begin(location, manifest)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    before = sorted(tmp_path.rglob("*"))
    assert collect(tmp_path, 1, dry_run=True).steps == (1,)
    with manager_at(tmp_path) as manager:
        manager.kept()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_step_that_stays_for_now_keeps_the_packs_that_it_shares_with_one_that_goes(tmp_path: Path) -> None:
    """Two marks are in their grace; a read keeps the step of the first one, and ends before the second one is due."""
    saved(tmp_path, 1, 2)
    store, clock, keep = store_of(tmp_path), SystemClock(), LatestN(1)
    run_id = read_run_id(store)
    assert run_id is not None
    with hold_writer_lease(store, clock, 10.0, run_id) as writer_lease:
        first = CheckpointGC(store, clock, keep, writer_lease).mark()
    with manager_at(tmp_path, deduplicate=False) as manager:
        manager.load(state_at(0))
        manager.save(3, state_at(3)).wait()
    with hold_writer_lease(store, clock, 10.0, run_id) as writer_lease:
        collector = CheckpointGC(store, clock, keep, writer_lease)
        second = collector.mark([first])
        assert (first.steps, second.steps) == ((1,), (2,))
        reading = ReaderLease(clock, 10.0)
        reading.begin(wiring.location_at(step_path(tmp_path, 1), SMALL), read_manifest(store, step_folder(1)))
        assert collector.execute([first]).steps == ()
        reading.close()
        assert collector.execute([second]).steps == (2,)
    require_whole(tmp_path, 1, 3)
    assert collect(tmp_path, 1).steps == (1,)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [step_folder(3).rstrip("/")]
