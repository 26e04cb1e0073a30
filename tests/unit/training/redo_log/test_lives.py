"""Lives of one run with a redo log, in one process: restarts, going back, damage, other writers, collection."""

from __future__ import annotations

import gc
import hashlib
import logging
import signal
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Differential, Preempted
from holdfast.backends.stores.local import LocalStore
from holdfast.base.ports.store import Store
from holdfast.errors import InvalidError, MissingError, UnavailableError
from holdfast.stored.repository import logs
from holdfast.stored.repository.logs import SealedRecord, read_records
from tests.doubles.faults import Faults, FaultyStore, raise_error


class Training:
    """A small network and its loop; two of them with equal steps are equal in every bit."""

    def __init__(self, root: Path | Store, *, every: int = 10, **options: object) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 7, 0.9)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "rng": holdfast.RngState(),
        }
        options = {"differential": True, "preemption": False} | options
        self.manager = holdfast.CheckpointManager(root, every=every, process_group=False, **options)  # type: ignore[arg-type]
        torch.manual_seed(7)

    def step(self, number: int, *closure: Callable[[], float]) -> holdfast.SaveHandle | None:
        """Train one step and offer it to the manager; return the handle of a save."""
        self.model(torch.randn(5, 6)).square().mean().backward()
        self.optimizer.step(*closure)
        self.schedule.step()
        self.optimizer.zero_grad()
        return self.manager.maybe_save(number, self.state)

    def run(self, first: int, last: int) -> None:
        """Train steps, and wait until all are sealed and committed."""
        for number in range(first, last + 1):
            self.step(number)
        self.settle()

    def settle(self) -> None:
        """Wait until saves and seals have ended."""
        self.manager.wait()
        log = self.manager._redo_log
        assert log is None or log._writer.drain(20) or log._writer.failure

    def die(self) -> None:
        """End as a kill would: nothing more is sealed, saved or collected. The lease of a dead process is free."""
        self.settle()
        manager = self.manager
        if manager._redo_log is not None:
            manager._redo_log.close()
        manager._parts.close(lambda: False)
        manager._job.close()

    def digest(self) -> str:
        """Return the digest of all that a restart must restore."""
        found = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            found.update(tensor.numpy().tobytes())
        for parameter in self.model.parameters():
            for _, value in sorted(self.optimizer.state[parameter].items()):
                found.update(value.numpy().tobytes())
        found.update(repr(self.schedule.state_dict()).encode() + torch.get_rng_state().numpy().tobytes())
        return found.hexdigest()


def digests(root: Path, last: int) -> Mapping[int, str]:
    """Return the digest after each step of a run that is never killed."""
    whole = Training(root, differential=False)
    found = {}
    for number in range(1, last + 1):
        whole.step(number)
        found[number] = whole.digest()
    whole.manager.close()
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, str]:
    return digests(tmp_path_factory.mktemp("whole"), 40)


def loaded(root: Path, step: int | None = None, **options: object) -> tuple[Training, int | None]:
    """Return a new process of the run, and the step that it has loaded."""
    again = Training(root, **options)
    return again, again.manager.load(again.state, step)


def test_a_restart_goes_on_at_the_last_record(tmp_path: Path, expected: Mapping[int, str]) -> None:
    first = Training(tmp_path)
    assert first.manager.recoverable is None
    first.run(1, 17)
    assert first.manager.recoverable == 17
    first.die()

    again, step = loaded(tmp_path)
    report = again.manager.load_report
    assert report is not None
    assert (step, report.step, report.base_step, report.redone_steps) == (17, 17, 10, 7)
    assert report.why_not_further == ""
    assert again.digest() == expected[17]
    again.run(18, 33)
    assert again.digest() == expected[33]
    again.manager.close()


def test_the_loaded_step_is_not_saved_again(tmp_path: Path) -> None:
    first = Training(tmp_path)
    first.run(1, 17)
    first.die()

    again, _ = loaded(tmp_path)
    assert again.manager.maybe_save(17, again.state) is None
    assert again.manager.save(17, again.state).wait() is not None
    assert again.manager.steps() == [1, 10, 17]
    again.manager.close()


@pytest.mark.parametrize("step", [12, 17])
def test_a_recorded_step_is_loaded_by_number(tmp_path: Path, expected: Mapping[int, str], step: int) -> None:
    first = Training(tmp_path)
    first.run(1, 17)
    first.die()

    again, found = loaded(tmp_path, step)
    assert (found, again.digest()) == (step, expected[step])
    again.run(step + 1, 26)
    again.die()

    third, found = loaded(tmp_path)
    assert (found, third.digest()) == (26, expected[26])
    third.manager.close()


def test_a_record_is_no_step_of_a_digest(tmp_path: Path) -> None:
    first = Training(tmp_path)
    first.run(1, 17)
    first.die()
    again = Training(tmp_path)
    with pytest.raises(MissingError, match="no committed step 12@abcd"):
        again.manager.load(again.state, "12@abcd")
    again.manager.close()


def test_a_base_is_taken_alone_by_number(tmp_path: Path, expected: Mapping[int, str]) -> None:
    first = Training(tmp_path)
    first.run(1, 17)
    first.die()

    again, found = loaded(tmp_path, 10)
    assert (found, again.digest()) == (10, expected[10])
    # Nothing newer is committed: until the next base the records still count.
    again.manager.close()
    third, found = loaded(tmp_path)
    assert (found, third.digest()) == (17, expected[17])
    third.manager.close()


def test_a_step_that_nothing_reaches_is_refused(tmp_path: Path) -> None:
    first = Training(tmp_path)
    first.run(1, 17)
    first.die()

    again = Training(tmp_path)
    before = again.digest() if again.optimizer.state else [p.clone() for p in again.model.parameters()]
    with pytest.raises(MissingError, match=r"step 18; .*: 10, 1; in the redo log after step 10: 11 to 17; in the redo"):
        again.manager.load(again.state, 18)
    assert all(torch.equal(old, new) for old, new in zip(before, again.model.parameters(), strict=True))
    again.manager.close()


def test_going_back_cuts_the_log(tmp_path: Path, expected: Mapping[int, str]) -> None:
    first = Training(tmp_path)
    first.run(1, 17)
    first.die()
    again, _ = loaded(tmp_path, 12)
    again.run(13, 14)  # The first is a base on a new timeline.
    again.die()

    third, found = loaded(tmp_path)
    assert (found, third.digest()) == (14, expected[14])
    third.manager.close()


def test_a_run_without_the_argument_cuts_the_log(tmp_path: Path) -> None:
    first = Training(tmp_path)
    first.run(1, 17)
    first.die()
    plain, found = loaded(tmp_path, differential=False)
    assert found == 17
    plain.run(18, 22)  # Step 20 states no log.
    plain.die()

    again, found = loaded(tmp_path)
    assert found == 20
    again.manager.close()


def test_a_damaged_base_is_passed_over_by_the_log(tmp_path: Path, expected: Mapping[int, str]) -> None:
    first = Training(tmp_path)
    first.run(1, 33)
    first.die()
    (pack,) = (tmp_path / f"step-{30:012d}").rglob("r00000.safetensors")
    with pack.open("r+b") as file:
        file.seek(-40, 2)
        file.write(b"damage")

    again, found = loaded(tmp_path)
    report = again.manager.load_report
    assert report is not None
    assert (found, report.base_step, again.digest()) == (33, 20, expected[33])
    again.manager.close()


@pytest.mark.parametrize("damaged", ["r00000.safetensors", "manifest.json"])
@pytest.mark.parametrize("step", [30, 32])
def test_a_recorded_step_is_loaded_by_number_past_a_damaged_base(
    tmp_path: Path, expected: Mapping[int, str], step: int, damaged: str
) -> None:
    first = Training(tmp_path)
    first.run(1, 33)
    first.die()
    (path,) = (tmp_path / f"step-{30:012d}").rglob(damaged)
    with path.open("r+b") as file:
        file.seek(-40, 2)
        file.write(b"damage")
    again, _ = loaded(tmp_path)  # The base is under quarantine from here on.
    again.die()

    third, found = loaded(tmp_path, step)
    report = third.manager.load_report
    assert report is not None
    assert (found, report.base_step, third.digest()) == (step, 20, expected[step])
    third.manager.close()


def test_flipped_gradients_end_the_redo_before_them(tmp_path: Path, expected: Mapping[int, str]) -> None:
    first = Training(tmp_path)
    for number in range(1, 18):
        first.run(number, number)  # A segment each.
    first.die()
    (segment,) = tmp_path.glob(f"log/*/r00000/{14:012d}.safetensors")
    with segment.open("r+b") as file:
        file.seek(-40, 2)
        file.write(b"damage")

    again, found = loaded(tmp_path)
    report = again.manager.load_report
    assert report is not None
    assert (found, again.digest()) == (13, expected[13])
    assert "step 14 cannot be redone" in report.why_not_further
    again.manager.close()


def test_a_redo_that_departs_ends_at_the_base(
    tmp_path: Path, expected: Mapping[int, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = Training(tmp_path)
    first.run(1, 40)  # Enough steps for the sums of every tensor.
    first.die()
    module = sys.modules[torch.optim.Adam.__module__]
    bare = module.adam

    def other(*arguments: object, **options: float) -> None:
        bare(*arguments, **{**options, "lr": options["lr"] * 1.5})

    monkeypatch.setattr(module, "adam", other)
    # A base before all of them.
    for step in (10, 20, 30, 40):
        (manifest,) = tmp_path.glob(f"step-{step:012d}/manifest.json")
        manifest.unlink()
    again, found = loaded(tmp_path)
    if found != 1:
        pytest.skip("no tensor was due in these steps")
    assert again.manager.load_report is not None
    assert "did not give the recorded state" in again.manager.load_report.why_not_further
    assert "step 1 is loaded alone" in caplog.text
    again.manager.close()


def test_two_bases_and_their_log_stay(tmp_path: Path) -> None:
    training = Training(tmp_path, keep_last=1, settings=holdfast.Settings(collect_grace_seconds=0))
    for first in range(1, 37, 4):
        training.run(first, first + 3)  # On a slow disk one segment would hold all steps, and stay.
    training.manager.close()

    assert training_steps(tmp_path) == [20, 30]
    (log,) = (path.name for path in (tmp_path / "log").iterdir())
    store = LocalStore(tmp_path, settings=holdfast.Settings())
    assert list(read_records(store, log, 0, 20)) == list(range(21, 37))
    assert len(read_records(store, log, 0, 0)) < 20


def training_steps(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("step-*"))


def test_a_full_log_asks_for_a_base(tmp_path: Path) -> None:
    training = Training(tmp_path, every=1000, differential=Differential(log_bytes_max=60_000))
    for number in range(1, 40):
        training.step(number)
        training.settle()
    assert len(training.manager.steps()) > 2
    training.manager.close()


def test_a_failed_seal_interrupts_and_the_next_base_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path)
    training.run(1, 4)
    log = training.manager._redo_log
    assert log is not None
    with monkeypatch.context() as patched:
        patched.setattr("holdfast.training.redo_log.log_writer.write_segment", _no_space)
        training.run(5, 5)
        training.run(6, 6)
    assert "the redo log is interrupted" in caplog.text
    assert "No space left" in caplog.text
    training.run(7, 12)
    assert log.why == ""
    assert training.manager.recoverable == 12
    training.die()
    again, found = loaded(tmp_path)
    assert found == 12
    again.manager.close()


def test_the_base_after_a_failed_first_base_begins_the_log(
    tmp_path: Path, expected: Mapping[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults(raise_error(UnavailableError), names={"upload"})
    store = LocalStore(tmp_path, settings=holdfast.Settings())
    store.url = "kept://run"  # As a store of a user.
    training = Training(FaultyStore(store, faults), every=100)
    training.step(1)
    with pytest.raises(UnavailableError):
        training.settle()
    training.run(2, 4)
    assert faults.met == 1
    assert "is interrupted" not in caplog.text
    assert (training.manager.steps(), training.manager.recoverable) == ([2], 4)
    training.die()
    again, found = loaded(tmp_path)
    assert (found, again.digest()) == (4, expected[4])
    again.manager.close()


def test_interruptions_request_bases_again_after_a_base_of_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, every=20)
    training.run(1, 3)
    for number in range(4, 50):
        with monkeypatch.context() as patched:
            if number in (4, 9, 44):
                patched.setattr("holdfast.training.redo_log.log_writer.write_segment", _no_space)
            training.run(number, number)
    # Each failed seal is seen at the next boundary, whose base is requested; the third one after the base of step 40.
    assert [step for step in training.manager.steps() if step % 20] == [1, 5, 10, 45]
    training.manager.close()


def test_a_closed_manager_keeps_no_state(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.run(1, 12)
    manager, model = training.manager, weakref.ref(training.model)
    manager.close()
    del training
    gc.collect()
    assert model() is None


def test_a_segment_that_goes_while_it_is_read_ends_the_redo_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Mapping[int, str]
) -> None:
    first = Training(tmp_path)
    for number in range(1, 18):
        first.run(number, number)  # A segment each.
    first.die()
    gone = next(tmp_path.glob(f"log/*/r00000/{15:012d}.safetensors"))
    read = logs.records_in

    def raced(store: Store, segment: logs.Segment) -> Mapping[int, SealedRecord]:
        if segment.key.endswith(gone.name):
            gone.unlink()
        return read(store, segment)

    monkeypatch.setattr(logs, "records_in", raced)
    again, found = loaded(tmp_path)
    assert (found, again.digest()) == (14, expected[14])
    again.manager.close()


def _no_space(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_a_signal_seals_the_step(tmp_path: Path) -> None:
    training = Training(tmp_path, preemption=True)
    training.run(1, 3)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Preempted) as ended:
        training.step(4)
    assert ended.value.code == 85
    training.manager.close()
    again, found = loaded(tmp_path)
    assert found == 4
    again.manager.close()


def test_the_policy_must_take_requests(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=r"differential: the policy takes no requests"):
        holdfast.CheckpointManager(
            tmp_path, save=holdfast.policies.EveryNSteps(10), differential=True, process_group=False
        )
    with pytest.raises(InvalidError, match=r"differential='3': expected True, False or holdfast.Differential"):
        holdfast.CheckpointManager(tmp_path, every=3, differential=3, process_group=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match=r"flush_every=0"):
        Differential(flush_every=0)


def test_a_state_without_an_optimizer_is_refused(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path, every=3, differential=True, process_group=False) as manager:
        with pytest.raises(InvalidError, match="optimizer"):
            manager.maybe_save(1, {"model": torch.nn.Linear(2, 2)})
        assert manager.steps() == []


def test_a_group_of_records_shares_a_segment(tmp_path: Path, expected: Mapping[int, str]) -> None:
    training = Training(tmp_path, differential=Differential(flush_every=4))
    training.run(1, 9)
    training.die()
    assert len(list(tmp_path.glob("log/*/r00000/*.safetensors"))) < 8
    again, found = loaded(tmp_path)
    assert (found, again.digest()) == (9, expected[9])
    again.manager.close()


def test_records_that_fill_the_memory_are_sealed_before_their_number_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.training.redo_log.log_memory._BYTES_MIN", 0)
    training = Training(tmp_path, every=100, differential=Differential(flush_every=50))
    for number in range(1, 9):
        training.step(number)
    log = training.manager._redo_log
    assert log is not None
    assert (log.why, log._memory.waited_seconds < 0.1) == ("", True)
    training.settle()
    assert training.manager.recoverable == 8
    training.manager.close()


def test_the_log_line_names_sizes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        training = Training(tmp_path)
        training.run(1, 3)
        training.step(4)
    assert "a base comes at least every" in caplog.text
    training.manager.close()


def test_training_after_the_boundary_of_a_step_is_not_doubled(tmp_path: Path) -> None:
    first = Training(tmp_path)
    first.run(1, 15)
    first.model(torch.randn(5, 6)).square().mean().backward()
    first.optimizer.step()
    first.optimizer.zero_grad()
    first.manager.save(15, first.state).wait()
    expected = first.digest()
    first.die()

    again, found = loaded(tmp_path)
    assert (found, again.digest()) == (15, expected)
    again.manager.close()


def test_a_save_of_a_part_is_no_base(
    tmp_path: Path, expected: Mapping[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    first = Training(tmp_path, every=100)
    first.run(1, 5)
    first.manager.save(6, first.state, only="model*").wait()
    first.die()
    assert "is no base of the log" in caplog.text
    again = Training(tmp_path)
    assert again.manager.load(again.state, 5) == 5
    assert again.digest() == expected[5]
    again.manager.close()


def test_one_small_gradient_keeps_a_boundary_from_being_the_end(tmp_path: Path) -> None:
    first = Training(tmp_path)
    first.run(1, 5)
    # One row of many: no sample of the gradient would show the row.
    grad = torch.zeros_like(first.model[0].weight)
    grad[3, 3] = 1.0
    first.model[0].weight.grad = grad
    first.manager.maybe_save(6, first.state)
    first.die()
    again, found = loaded(tmp_path)
    report = again.manager.load_report
    assert report is not None
    assert found == 5
    assert "has consumed the gradients" in report.why_not_further
    again.manager.close()
