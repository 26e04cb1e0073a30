"""The file `latest`: it follows the commits, names no absent step, and never costs a save."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from holdfast._face import foreign_paths, wiring
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.store import Store
from holdfast.base.types.removal import Unreferenced
from holdfast.core.format.names import manifest_key
from holdfast.errors import InvalidError, UnavailableError
from holdfast.policies import EveryNth
from holdfast.stored.leases.writer import hold_writer_lease
from holdfast.stored.repository import removal
from holdfast.stored.repository.catalog import exists, read_run_id
from holdfast.stored.repository.latest import name_latest
from holdfast.training.runs.listing import run_record
from holdfast.training.runs.removal.garbage_collection import CheckpointGC
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.unit.ranks import PATIENT, World, plain, saved


def latest_of(store: Store) -> str:
    return store.get("latest", 1000).decode()


def saving(*steps: int) -> World:
    world = World(1)
    world.play(lambda rank, run: [saved(run, step, {"a": plain(step)}) for step in steps])
    return world


def test_it_follows_every_commit_and_a_return_to_an_older_step() -> None:
    world = saving(1, 2, 3)
    assert latest_of(world.store) == "step-000000000003"
    world.play(lambda rank, run: (run.load({"a": plain(0)}, 1), saved(run, 2, {"a": plain(-2)})))
    assert latest_of(world.store) == "step-000000000002"


def test_nobody_of_ours_trusts_it() -> None:
    world = saving(1, 2)
    for lie in (b"step-000000000001", b"step-000000000009", b"", b"\xff\xfe", b"x" * 1000):
        world.store.put("latest", lie)
        assert world.play(lambda rank, run: (run.latest, run.load({"a": plain(0)}))) == [(2, 2)]
        assert [record.step for record in run_record(world.store).steps] == [1, 2]


@pytest.mark.parametrize("theirs", [b"global_step300", b"step-3", b"x" * 5000])
def test_a_file_of_another_tool_stays(theirs: bytes, caplog: pytest.LogCaptureFixture) -> None:
    world = saving(1)
    world.store.put("latest", theirs)

    def again(rank: int, run: object) -> list[object]:
        run.load({"a": plain(0)})  # type: ignore[attr-defined]
        return [saved(run, step, {"a": plain(step)}) for step in (2, 3)]  # type: ignore[arg-type]

    (reports,) = world.play(again)  # type: ignore[arg-type]
    assert not any(isinstance(report, Exception) for report in reports)  # type: ignore[attr-defined]
    assert world.store.get("latest", 10_000) == theirs and world.committed() == [1, 2, 3]
    said = [record for record in caplog.records if "does not name the newest step" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.WARNING], "once"


class _Overtaken(ForwardingStore):
    """Another writer names a step between the look and the replacement."""

    named = b"step-000000000003"

    def replace(self, key: str, data: bytes, seen: bytes | None, *, durable: bool = True) -> None:
        if self.named:
            self._inner.put(key, self.named)
            self.named = b""
        super().replace(key, data, seen, durable=durable)


def test_a_step_that_another_writer_named_meanwhile_is_not_taken_back() -> None:
    world = saving(1, 2, 3)
    world.store.put("latest", b"step-000000000001")
    name_latest(_Overtaken(world.store), 2)
    assert latest_of(world.store) == "step-000000000003"


def test_a_failure_is_a_warning_and_the_next_commit_puts_it_right(caplog: pytest.LogCaptureFixture) -> None:
    world = World(1)

    def refuse(point: FaultPoint) -> None:
        if point.subject == "latest":
            raise UnavailableError("the disk is full")

    faults = Faults(refuse, names=("put", "replace", "get"), lasting=True)
    broken = World(1, store=world.store, stores={0: FaultyStore(world.store, faults)})
    (reports,) = broken.play(lambda rank, run: [saved(run, step, {"a": plain(step)}) for step in (1, 2)])
    assert faults.met and not any(isinstance(report, Exception) for report in reports)  # type: ignore[attr-defined]
    assert not exists(world.store, "latest")
    assert caplog.text.count("does not name the newest step: the disk is full") == 1
    world.play(lambda rank, run: (run.load({"a": plain(0)}), saved(run, 3, {"a": plain(3)})))
    assert latest_of(world.store) == "step-000000000003"


def test_it_names_no_step_that_a_collection_removes() -> None:
    world = saving(1, 2, 3)
    store, run_id = world.store, read_run_id(world.store)
    assert run_id is not None
    store.put("latest", b"step-000000000001")  # Old, as after a crash.
    with hold_writer_lease(store, SystemClock(), 60.0, run_id) as lease:
        CheckpointGC(store, SystemClock(), EveryNth(3), lease).collect(0, lambda _: False)
    assert world.committed() == [3] and latest_of(store) == "step-000000000003"


def test_it_goes_with_the_last_step() -> None:
    world = saving(1)
    store = world.store
    digest = world.manifest(1).digest
    with hold_writer_lease(store, SystemClock(), 60.0, read_run_id(store) or "") as lease:
        removal.remove(store, Unreferenced({1: digest}, {}), lease.epoch)
    assert not exists(store, manifest_key(1)) and not exists(store, "latest")


def test_no_other_format_takes_the_root_for_its_own(tmp_path: Path) -> None:
    world = saving(1, 2)
    store = LocalStore(tmp_path / "run", settings=PATIENT)
    for entry in world.store.list():
        store.put(entry.key, world.store.get(entry.key, entry.bytes), durable=False)
    for is_run in (True, False):  # With and without the file that identifies the run.
        assert foreign_paths.foreign_at(str(tmp_path / "run")).listing() is None
        with pytest.raises(InvalidError, match="is the root of a run"):
            wiring.checkpoint_at(tmp_path / "run", wiring.DEFAULT_SETTINGS)
        if is_run:
            store.delete(["holdfast.json"])


def test_a_deepspeed_folder_is_still_one(tmp_path: Path) -> None:
    from holdfast.backends.foreign.deepspeed.reader import DeepSpeedFormat
    from holdfast.backends.stores.foreign import ForeignFiles

    for tag, is_run, known in (
        ("global_step5", False, True),
        ("step-000000000005", False, True),  # Somebody may choose such a tag.
        ("step-000000000005", True, False),
    ):
        folder = tmp_path / f"{tag}-{is_run}"
        (folder / tag).mkdir(parents=True)
        (folder / tag / "mp_rank_00_model_states.pt").write_bytes(b"x")
        (folder / "latest").write_text(tag)
        if is_run:
            (folder / "holdfast.json").write_text("{}")
        assert DeepSpeedFormat().recognises(ForeignFiles(str(folder)), "") is known


@pytest.mark.parametrize("left", [b"", b"\0" * 17, b"step-000000000001\n"])
def test_what_a_power_cut_leaves_of_it_is_put_right(left: bytes) -> None:
    world = saving(1)
    world.store.put("latest", left)
    world.play(lambda rank, run: (run.load({"a": plain(0)}), saved(run, 2, {"a": plain(2)})))
    assert latest_of(world.store) == "step-000000000002"


def test_a_collection_says_nothing_of_a_link_that_somebody_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(1, store=LocalStore(tmp_path / "run", settings=PATIENT))
    world.play(lambda rank, run: [saved(run, step, {"a": plain(step)}) for step in (1, 2)])
    (tmp_path / "run" / "latest").unlink()
    (tmp_path / "run" / "latest").symlink_to("step-000000000001")
    with hold_writer_lease(world.store, SystemClock(), 60.0, read_run_id(world.store) or "") as lease:
        CheckpointGC(world.store, SystemClock(), EveryNth(2), lease).collect(0, lambda _: False)
    assert world.committed() == [2] and "latest" not in caplog.text
    assert (tmp_path / "run" / "latest").is_symlink()
