"""A save by path that replaces the checkpoint there: what goes, what stays, and who comes first."""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.local_upload import LocalUpload
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.base.types.reports import SaveReport
from holdfast.errors import CheckpointError, ConflictError, InvalidError, UnavailableError
from holdfast.settings import PAGE_BYTES
from holdfast.stored.leases.path_claim import release_path_claim, take_path_claim
from holdfast.stored.leases.process import this_process
from holdfast.stored.repository.overwriting import claim_of, put_claim, put_replaced_mark, read_claim, replaced_marks
from holdfast.training.coordination.job import Job
from holdfast.training.saving.handle import SaveHandle
from holdfast.training.saving.save import begin_save, save_and_wait
from holdfast.training.saving.target import path_save
from tests.doubles.comm import ThreadComm, outcomes_of_ranks
from tests.doubles.faults import FaultPoint, Faults, FaultyStore, raise_error
from tests.doubles.framework import NumpyFramework
from tests.support.crashed_run import content_under, paths_under
from tests.support.newer_format import write_newer
from tests.support.overwritten_checkpoint import (
    EVERYTHING,
    HASTY,
    PATIENT,
    attempt_at,
    attempts_at,
    job_of,
    location_of,
    number_at,
    request,
    save,
    state_of,
)
from tests.support.tuning import tuned
from tests.unit.ranks import sharded


def begin(where: Path, number: int, job: Job) -> SaveHandle:
    return begin_save(job, *request(job, where, state_of(number)))


class TestWhatGoes:
    def test_each_overwrite_removes_what_the_one_before_replaced(self, tmp_path: Path) -> None:
        best, published = tmp_path / "best", list[str]()
        for number in range(5):
            save(best, number)
            assert number_at(best) == number
            published.append(attempt_at(best))
            assert attempts_at(best) == set(published[-2:]), "the old one stays for its readers until the next"
        old = published[-2]
        assert {path.name for path in (best / "overwriting").iterdir()} == {f"{old}.replaced.json"}
        reports = {path.name for path in (best / "reports").iterdir()}
        assert reports == {f"save-{attempt}-r00000.json" for attempt in published[-2:]}

    def test_nothing_goes_before_the_grace_has_passed(self, tmp_path: Path) -> None:
        best = tmp_path / "best"
        for number in range(4):
            save(best, number, PATIENT)
        assert len(attempts_at(best)) == 4
        save(best, 4, HASTY)
        assert len(attempts_at(best)) == 2

    def test_what_never_was_a_checkpoint_goes_at_once(self, tmp_path: Path) -> None:
        """A save that was killed leaves files and no mark: no reader can have them."""
        best = tmp_path / "best"
        save(best, 1, PATIENT)
        left = best / "0123456789abcdef"
        (left / "parts").mkdir(parents=True)
        (left / "r00000.safetensors").write_bytes(b"half")
        (left / "parts" / "r00000.msgpack").write_bytes(b"half")
        save(best, 2, PATIENT)
        assert number_at(best) == 2 and len(attempts_at(best)) == 2 and not left.exists()

    def test_files_that_no_save_writes_stay(self, tmp_path: Path) -> None:
        best = tmp_path / "best"
        save(best, 1)
        (best / "README").write_text("mine")
        (best / "fedcba9876543210").mkdir()
        (best / "fedcba9876543210" / "notes.txt").write_text("mine")
        save(best, 2)
        save(best, 3)
        assert (best / "README").read_text() == (best / "fedcba9876543210" / "notes.txt").read_text() == "mine"

    def test_a_mark_of_another_machine_counts_once_from_here(self, tmp_path: Path) -> None:
        best = tmp_path / "best"
        save(best, 1)
        old = attempt_at(best)
        save(best, 2)
        mark = best / "overwriting" / f"{old}.replaced.json"

        def move_elsewhere() -> None:
            store = LocalStore(best, settings=HASTY)
            found = replaced_marks(store)[old]
            assert found is not None
            put_replaced_mark(store, old, replace(found, holder=replace(found.holder, boot="of another machine")))

        move_elsewhere()
        save(best, 3)
        assert old in attempts_at(best) and json.loads(mark.read_text())["is_repeated"], "its clock means nothing here"
        move_elsewhere()
        save(best, 4)
        assert old not in attempts_at(best) and not mark.exists()

    def test_a_mark_that_cannot_be_read_begins_anew(self, tmp_path: Path) -> None:
        best = tmp_path / "best"
        save(best, 1)
        old = attempt_at(best)
        save(best, 2)
        (best / "overwriting" / f"{old}.replaced.json").write_bytes(b"torn")
        save(best, 3)
        assert old in attempts_at(best)
        save(best, 4)
        assert old not in attempts_at(best)

    def test_nothing_at_the_path_is_a_plain_save(self, tmp_path: Path) -> None:
        left = tmp_path / "best" / "0123456789abcdef"
        left.mkdir(parents=True)
        (left / "r00000.safetensors").write_bytes(b"half")
        save(tmp_path / "best", 1)
        assert number_at(tmp_path / "best") == 1
        assert {path for path in paths_under(tmp_path / "best") if "/" not in path} == {
            attempt_at(tmp_path / "best"),
            "manifest.json",
            "reports",
        }

    def test_over_a_store_in_memory(self) -> None:
        name = uuid.uuid4().hex
        for number in range(3):
            save(MemoryStore(name), number)
            assert holdfast.open_checkpoint(f"memory://{name}").objects["number"] == number


class TestWhatIsRefused:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        manager = CheckpointManager.over(LocalStore(tmp_path / "run", settings=HASTY), job_of())
        manager.save(300, state_of(1)).wait()
        manager.close()
        return tmp_path / "run"

    def refused(self, path: Path, match: str, kind: type[CheckpointError] = InvalidError) -> None:
        below = path if path.is_dir() else path.parent
        before, paths = content_under(below), paths_under(below)
        with pytest.raises(kind, match=match):
            holdfast.save(path, {"a": 1}, overwrite=True, process_group=False)
        assert content_under(below) == before and paths_under(below) == paths

    def test_a_step_of_a_run(self, run: Path) -> None:
        self.refused(run / "step-000000000300", "is a step of a run; expected the path of a single checkpoint")
        self.refused(run / "step-000000000400", "is a step of a run")

    def test_a_step_of_a_run_behind_a_link(self, run: Path, tmp_path: Path) -> None:
        (tmp_path / "newest").symlink_to(run / "step-000000000300")
        self.refused(tmp_path / "newest", "is a step of a run")

    def test_the_root_of_a_run(self, run: Path) -> None:
        self.refused(run, "is the root of a run")

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "best.pt").write_bytes(b"what torch.save wrote")
        self.refused(tmp_path / "best.pt", "best.pt: is a file; expected a checkpoint of Holdfast, or nothing")

    def test_a_folder_of_other_files(self, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "model.safetensors").write_bytes(b"of Hugging Face")
        self.refused(tmp_path / "model", r"holds model.safetensors and no manifest.json; expected a checkpoint of Hold")

    @pytest.mark.parametrize("text", ['{"name": "an app"}', ""])
    def test_a_manifest_of_something_else(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "app").mkdir()
        (tmp_path / "app" / "manifest.json").write_text(text)
        self.refused(tmp_path / "app", "its manifest.json is not of Holdfast")

    def test_a_newer_format(self, tmp_path: Path) -> None:
        save(tmp_path / "best", 1)
        write_newer(tmp_path / "best" / "manifest.json")
        self.refused(tmp_path / "best", r"format 1.99; this Holdfast reads .* It was not overwritten")

    def test_a_wrong_argument(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidError, match=r"overwrite='yes' \(str\); expected True or False"):
            holdfast.save(tmp_path / "best", {"a": 1}, overwrite="yes", process_group=False)  # type: ignore[arg-type]
        assert not (tmp_path / "best").exists()

    def test_without_it_the_message_names_it(self, tmp_path: Path) -> None:
        holdfast.save(tmp_path / "best", {"a": 1}, process_group=False)
        with pytest.raises(ConflictError, match=r"already there; .* replace it with overwrite=True"):
            holdfast.save(tmp_path / "best", {"a": 1}, process_group=False)


class TestDamage:
    @pytest.mark.parametrize("damage", [b"", b"torn", None])
    def test_a_damaged_checkpoint_is_overwritten(self, tmp_path: Path, damage: bytes | None) -> None:
        best = tmp_path / "best"
        save(best, 1)
        manifest, old = best / "manifest.json", attempt_at(best)
        data = bytearray(manifest.read_bytes())
        data[200] ^= 1
        manifest.write_bytes(bytes(data) if damage is None else damage)
        save(best, 2)
        assert number_at(best) == 2 and old in attempts_at(best)
        save(best, 3)
        assert number_at(best) == 3 and old not in attempts_at(best)

    def test_a_failed_overwrite_leaves_a_damaged_one_to_repair(self, tmp_path: Path) -> None:
        best = tmp_path / "best"
        save(best, 1)
        before = (best / "manifest.json").read_bytes()
        (best / "manifest.json").write_bytes(before[:-5])
        faults = Faults(raise_error(UnavailableError), names={"upload.write"}, lasting=True)
        with pytest.raises(UnavailableError, match="a fault was injected"):
            save(FaultyStore(LocalStore(best, settings=HASTY), faults), 2)
        assert faults.met
        (best / "manifest.json").write_bytes(before)
        assert number_at(best) == 1 and len(attempts_at(best)) == 1

    def test_a_lost_pack_is_overwritten(self, tmp_path: Path) -> None:
        best = tmp_path / "best"
        save(best, 1)
        next(best.glob("*/r00000.safetensors")).unlink()
        save(best, 2)
        assert number_at(best) == 2


class TestInFlight:
    def test_saves_of_one_job_follow_each_other(self, tmp_path: Path) -> None:
        best, job = tmp_path / "best", job_of()
        handles = [begin(best, number, job) for number in range(6)]
        for handle in handles:
            assert handle.wait(timeout=60) is not None
        job.close()
        assert number_at(best) == 5
        assert read_claim(LocalStore(best, settings=HASTY)) is None
        save(best, 6)
        assert len(attempts_at(best)) == 2, "nothing of the others is left"

    def test_an_interrupt_after_the_hand_over_leaves_the_save_to_the_commit_thread(self, tmp_path: Path) -> None:
        best, job = tmp_path / "best", job_of()
        save(best, 1)
        writes, interrupted, submit = threading.Event(), threading.Event(), job.commits.submit

        class Held(LocalStore):
            def upload(self, *args: object, **options: object) -> LocalUpload:
                writes.set()
                assert interrupted.wait(60) and read_claim(self) is not None
                return super().upload(*args, **options)  # type: ignore[arg-type]

        def submit_and_interrupt(work: Callable[[], None]) -> None:
            submit(work)
            assert writes.wait(60)
            raise KeyboardInterrupt

        job.commits.submit = submit_and_interrupt  # type: ignore[method-assign, assignment]
        with pytest.raises(KeyboardInterrupt):
            begin_save(job, *request(job, Held(best, settings=HASTY), state_of(2)))
        interrupted.set()
        job.close()
        assert number_at(best) == 2 and read_claim(LocalStore(best, settings=HASTY)) is None

    def test_other_settings_are_the_same_job(self, tmp_path: Path) -> None:
        best, job = tmp_path / "best", job_of()
        other = job.with_settings(tuned(HASTY, window_bytes=PAGE_BYTES))
        handles = [begin(best, number, each) for number, each in enumerate((job, other, job, other))]
        for handle in handles:
            handle.wait(timeout=60)
        job.close()
        assert number_at(best) == 3

    def test_a_state_that_cannot_be_saved_leaves_no_claim(self, tmp_path: Path) -> None:
        best = tmp_path / "best"
        save(best, 1)
        with pytest.raises(InvalidError):
            holdfast.save(best, {"a": object()}, overwrite=True, process_group=False)
        assert number_at(best) == 1 and not (best / "overwriting").exists()

    @pytest.mark.parametrize("name", ["upload.write", "put_if_absent", "move"])
    def test_a_failed_save_leaves_the_old_one_and_no_claim(self, tmp_path: Path, name: str) -> None:
        best = tmp_path / "best"
        save(best, 1)
        inner, old, met = LocalStore(best, settings=HASTY), attempt_at(best), list[FaultPoint]()

        def fail(point: FaultPoint) -> None:
            if "claim.json" not in point.subject:
                met.append(point)
                raise UnavailableError(f"a fault was injected at {point.name}")

        with pytest.raises(UnavailableError):
            save(FaultyStore(inner, Faults(fail, names={name}, lasting=True)), 2)
        assert met and number_at(best) == 1 and attempts_at(best) == {old}
        assert not list((best / "overwriting").glob("*[!d].json")), "neither a claim nor a prepared manifest"
        save(best, 3)
        assert number_at(best) == 3

    @pytest.mark.parametrize("after", [False, True], ids=["refused", "reply lost"])
    def test_a_store_that_fails_once_leaves_the_old_or_the_new(self, tmp_path: Path, after: bool) -> None:
        """Every seventh operation of an overwrite, one after the other. What it leaves goes with the next ones."""
        numbers = set()
        for at in range(1, 100, 7):
            best = tmp_path / str(at)
            for number in (1, 2):
                save(best, number)
            faults = Faults(raise_error(UnavailableError), at=at, after=after)
            expected = {2, 3}
            with suppress(UnavailableError):
                save(FaultyStore(LocalStore(best, settings=HASTY), faults), 3)
                expected = {3}
            assert number_at(best) in expected, at
            numbers.add(number_at(best))
            save(best, 4)
            assert number_at(best) == 4 and len(attempts_at(best)) in (2, 3), at
            if not faults.met:
                break
        assert numbers == {2, 3}

    def test_a_reply_that_is_lost_is_an_unknown_outcome(self, tmp_path: Path) -> None:
        """The move happened, and the store says that it failed: nothing is removed."""
        best = tmp_path / "best"
        save(best, 1)
        faults = Faults(raise_error(UnavailableError), names={"move"}, after=True)
        with pytest.raises(UnavailableError, match="outcome unknown"):
            save(FaultyStore(LocalStore(best, settings=HASTY), faults), 2)
        assert number_at(best) == 2
        save(best, 3)
        assert number_at(best) == 3


class TestClaims:
    def test_a_job_that_overwrites_the_path_is_named(self, tmp_path: Path) -> None:
        best, store = tmp_path / "best", LocalStore(tmp_path / "best", settings=HASTY)
        save(best, 1)
        claim = take_path_claim(store, SystemClock(), HASTY.lease_seconds, "another job")
        try:
            with pytest.raises(ConflictError, match=f"another job overwrites this .*process {os.getpid()}, since 20"):
                save(best, 2)
        finally:
            release_path_claim(claim)
        assert number_at(best) == 1
        save(best, 2)
        assert number_at(best) == 2

    def test_a_job_waits_while_another_comes_to_its_end(self, tmp_path: Path) -> None:
        best, store = tmp_path / "best", LocalStore(tmp_path / "best", settings=HASTY)
        save(best, 1)
        claim = take_path_claim(store, SystemClock(), 30.0, "another job")
        timer = threading.Timer(0.2, release_path_claim, [claim])
        timer.start()
        save(best, 2)
        timer.join()
        assert number_at(best) == 2

    @pytest.mark.parametrize("how", ["gone", "silent", "unreadable"])
    def test_the_claim_of_a_process_that_is_gone_is_taken_over(self, tmp_path: Path, how: str) -> None:
        best, store = tmp_path / "best", LocalStore(tmp_path / "best", settings=HASTY)
        save(best, 1)
        holder = this_process(SystemClock(), 0.2)
        if how == "unreadable":
            (best / "overwriting").mkdir(exist_ok=True)
            (best / "overwriting" / "claim.json").write_bytes(b"torn")
        else:
            gone = replace(holder, started=holder.started + 1) if how == "gone" else replace(holder, host="elsewhere")
            assert put_claim(store, claim_of(gone))
        save(best, 2)
        assert number_at(best) == 2 and read_claim(store) is None


@contextmanager
def at_the(operation: str, act: Callable[[], None], store: Store) -> Iterator[Store]:
    """Give a store that acts once before the first operation of a name and subject, such as `move overwriting/`."""
    name, _, subject = operation.partition(" ")
    done = []

    def once(point: FaultPoint) -> None:
        if point.subject.startswith(subject) and point.subject.endswith(".next.json") and not done:
            done.append(True)
            act()

    yield FaultyStore(store, Faults(once, names={name}, lasting=True))
    assert done, "the moment never came"


class TestWhoComesFirst:
    """A process that is stopped at the worst moment, while another takes its claim for that of a dead process."""

    def take_over(self, best: Path, number: int) -> Callable[[], None]:
        def act() -> None:
            # What another machine sees: the claim, and no heartbeat for the lease time.
            store = LocalStore(best, settings=HASTY)
            store.delete(["overwriting/claim.json"])
            save(best, number)

        return act

    @pytest.mark.parametrize("moment", ["put_if_absent overwriting/", "move overwriting/"])
    def test_the_one_that_lost_its_claim_replaces_nothing(self, tmp_path: Path, moment: str) -> None:
        best = tmp_path / "best"
        save(best, 1)
        with (
            at_the(moment, self.take_over(best, 2), LocalStore(best, settings=HASTY)) as store,
            pytest.raises(ConflictError, match=r"may not overwrite|took over"),
        ):
            save(store, 3)
        assert number_at(best) == 2
        save(best, 4)
        assert number_at(best) == 4 and len(attempts_at(best)) == 2

    def test_a_checkpoint_that_changed_is_not_replaced(self, tmp_path: Path) -> None:
        best = tmp_path / "best"
        save(best, 1)

        def change() -> None:
            other = tmp_path / "other"
            save(other, 2)
            for path in other.iterdir():
                if path.is_dir() and path.name != "reports":
                    path.rename(best / path.name)
            (other / "manifest.json").rename(best / "manifest.json")

        with (
            at_the("put_if_absent overwriting/", change, LocalStore(best, settings=HASTY)) as store,
            pytest.raises(ConflictError, match="was saved by another job while this save was under way"),
        ):
            save(store, 3)
        assert number_at(best) == 2

    def test_a_checkpoint_that_was_removed_is_not_replaced(self, tmp_path: Path) -> None:
        best = tmp_path / "best"
        save(best, 1)
        with (
            at_the(
                "put_if_absent overwriting/", (best / "manifest.json").unlink, LocalStore(best, settings=HASTY)
            ) as own,
            pytest.raises(ConflictError, match="was removed while this save was under way"),
        ):
            save(own, 3)

    def test_published_and_replaced_before_it_looks_counts_as_committed(self, tmp_path: Path) -> None:
        """The process is stopped right after its move; by the time that it looks, the next one has replaced it."""
        best, faults = tmp_path / "best", Faults(lambda _: self.take_over(best, 3)(), names={"move"}, after=True)
        save(best, 1)
        report = save(FaultyStore(LocalStore(best, settings=HASTY), faults), 2)
        assert faults.met and number_at(best) == 3 and report.attempt in attempts_at(best)

    def test_a_plain_save_that_came_second_does_not_remove_what_an_overwrite_writes(self, tmp_path: Path) -> None:
        """Its removal of leftovers is late: the path belongs to the next job by then."""
        best, clock = tmp_path / "best", SystemClock()
        store = LocalStore(best, settings=HASTY)
        claims = []

        def begin_next(point: FaultPoint) -> None:
            claims.append(take_path_claim(store, clock, 30.0, "the next job"))
            (best / "0123456789abcdef").mkdir()
            (best / "0123456789abcdef" / "r00000.safetensors").write_bytes(b"being written")

        # The opening lists the folders, then the sweep after the commit.
        faulty = FaultyStore(store, Faults(begin_next, names={"folders"}, at=2))
        job = job_of()
        save_and_wait(job, *path_save(job, location_of(faulty), state_of(1), EVERYTHING))
        job.close()
        assert claims and (best / "0123456789abcdef" / "r00000.safetensors").exists()
        release_path_claim(claims[0])


class TestRanks:
    def outcomes(self, path: Path, overwrites: tuple[bool, ...], *, saves: int = 1) -> list[object]:
        def work(comm: ThreadComm) -> object:
            job = Job(comm, SystemClock(), HASTY, NumpyFramework(comm.rank))
            ended: object = None
            try:
                for number in range(saves):
                    location = location_of(path)
                    state = {"rows": sharded(comm.world_size), "number": number}
                    overwrite = True if number < saves - 1 else overwrites[comm.rank]
                    try:
                        ended = save_and_wait(job, *path_save(job, location, state, EVERYTHING, overwrite=overwrite))
                    except CheckpointError as error:
                        ended = error
            finally:
                job.close()
            return ended

        return outcomes_of_ranks(len(overwrites), work)

    def test_every_rank_writes_beside_the_old_one(self, tmp_path: Path) -> None:
        outcomes = self.outcomes(tmp_path / "best", (True,) * 3, saves=3)
        assert all(isinstance(outcome, SaveReport) for outcome in outcomes), outcomes
        checkpoint = holdfast.open_checkpoint(tmp_path / "best")
        assert list(checkpoint.verify()) == [] and checkpoint.objects["number"] == 2
        assert checkpoint.manifest.world_size == 3 and len(attempts_at(tmp_path / "best")) == 2

    @pytest.mark.parametrize("saves", [1, 2], ids=["first", "after they agreed once"])
    def test_ranks_that_differ_are_refused_on_every_rank(self, tmp_path: Path, saves: int) -> None:
        outcomes = self.outcomes(tmp_path / "best", (True, False, True), saves=saves)
        for outcome in outcomes:
            assert isinstance(outcome, InvalidError), outcomes
            assert "ranks [0, 2] pass overwrite=True and ranks [1] do not" in str(outcome)
        assert (tmp_path / "best").exists() == (saves == 2)
        assert read_claim(LocalStore(tmp_path / "best", settings=HASTY)) is None
