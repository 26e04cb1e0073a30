"""A writer is stopped in the act of publishing, another takes over, the first goes on: nobody sees what it left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast import ConflictError, MissingError, Settings, api
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.alone import AloneComm
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.policies import LatestN
from holdfast.stored.repository.epochs import (
    RELEASED,
    current_fence,
    put_accepted,
    put_epoch,
    put_heartbeat,
    read_epoch,
)
from holdfast.stored.repository.timelines import committed_steps
from holdfast.training.coordination.job import Job
from tests.crash.writers.epoch_processes import Writer, writers
from tests.crash.writers.epoch_worker import state_of as writer_state
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.doubles.framework import NumpyFramework

FIRST, LATE, NEXT = 10, 20, 30
LEASE_SECONDS = 1.0
SETTINGS = Settings(lease_seconds=30.0)

pytestmark = pytest.mark.timeout(180)


def path_of(root: Path, step: int) -> Path:
    return root / f"step-{step:012d}"


def state_by(number: int) -> dict[str, object]:
    return {"weights": torch.full((5000,), float(number))}


def manager_at(root: Path) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(root, process_group=False, settings=SETTINGS)


@contextmanager
def stopped_before_publishing(root: Path) -> Iterator[Writer]:
    """Save one step at a root, by a process that is stopped the moment before its second would be published."""
    with writers(1, LEASE_SECONDS) as (writer,):
        writer.tell("race", root, FIRST, 0)
        assert writer.answer()["said"] == "committed"
        writer.tell("close")
        writer.answer()
        writer.tell("stop", root, LATE)
        writer.wait_until_stopped()
        assert not (path_of(root, LATE) / "manifest.json").exists()
        yield writer


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[tuple[Path, Writer]]:
    """A root with one step, and a process that was stopped the moment before its second would be published."""
    root = tmp_path / "run"
    with stopped_before_publishing(root) as writer:
        yield root, writer


def goes_on(writer: Writer) -> None:
    """Let the stopped one go on, and require that it was told who took over."""
    writer.send(signal.SIGCONT)
    answer = writer.answer()
    assert answer["said"] == "ConflictError", answer
    message = str(answer["message"])
    assert f"host {os.uname().nodename}, process {os.getpid()}, since 20" in message or "another writer" in message


@pytest.fixture(scope="module")
def published_late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a step, one published too late, and one of the new writer, which has closed its manager."""
    root = tmp_path_factory.mktemp("late") / "run"
    with stopped_before_publishing(root) as writer, manager_at(root) as manager:
        manager.load(state_by(0))
        manager.save(NEXT, state_by(NEXT)).wait()
        goes_on(writer)
    assert (path_of(root, LATE) / "manifest.json").exists(), "it was published, late"
    return root


@pytest.fixture
def late(published_late: Path, tmp_path: Path) -> Path:
    """A copy of that root, for one test to do with as it likes."""
    return Path(shutil.copytree(published_late, tmp_path / "run", symlinks=True))


def test_managers_ignore_it(late: Path) -> None:
    with manager_at(late) as manager:
        assert manager.steps() == [FIRST, NEXT]
        assert manager.latest == NEXT
        state = state_by(0)
        with pytest.raises(MissingError, match="Either a replaced writer published it, or it was moved away and back"):
            manager.load(state, LATE)
        assert manager.load(state) == NEXT
        assert torch.equal(state["weights"], torch.full((5000,), float(NEXT)))  # type: ignore[arg-type]


def test_it_is_collected_and_not_told_as_a_step(late: Path) -> None:
    assert api.collect(late, keep=LatestN(1), grace_seconds=0).steps == (FIRST,)
    assert not (path_of(late, LATE) / "manifest.json").exists()


def test_it_is_not_resumed_from_where_it_would_be_the_newest(late: Path) -> None:
    (path_of(late, NEXT) / "manifest.json").unlink()
    with manager_at(late) as manager:
        assert manager.latest == FIRST
        assert manager.load(state_by(0)) == FIRST


def test_readers_of_one_path_ignore_it(late: Path, tmp_path: Path) -> None:
    path = path_of(late, LATE)
    for read in (
        lambda: holdfast.open_checkpoint(path).manifest,
        lambda: holdfast.load(path, state_by(0), process_group=False),
        lambda: api.diff(path, path_of(late, FIRST)),
        lambda: api.export(path, tmp_path / "out", to="safetensors"),
        lambda: api.export(path, tmp_path / "out", to="holdfast"),
        lambda: api.import_checkpoint(path, tmp_path / "other", copy=True),
    ):
        with pytest.raises(MissingError, match="Either a replaced writer published it, or it was moved away and back"):
            read()
    assert committed_steps(LocalStore(late, settings=SETTINGS)) == [FIRST, NEXT]


def test_it_is_listed_as_fenced(late: Path) -> None:
    records = {record.step: record for record in api.list_steps(late).steps}
    assert [step for step, record in records.items() if record.committed] == [FIRST, NEXT]
    assert [step for step, record in records.items() if record.fenced] == [LATE]
    said = command("ls", late, "--json")
    assert said.returncode == 0
    statuses = {each["step"]: each["status"] for each in json.loads(said.stdout)["steps"]}
    assert statuses == {FIRST: "committed", LATE: "fenced", NEXT: "committed"}
    assert "step 20: fenced" in command("ls", late).stdout


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_commands_refuse_it(late: Path, verb: str) -> None:
    said = command(verb, path_of(late, LATE))
    assert said.returncode != 0
    assert "Either a replaced writer published it" in said.stdout + said.stderr


def test_it_cannot_be_tagged(late: Path) -> None:
    with manager_at(late) as manager, pytest.raises(MissingError):
        manager.tag(LATE, "release")


def test_a_later_epoch_does_not_accept_it(late: Path) -> None:
    with manager_at(late) as manager:
        manager.load(state_by(0))
        manager.save(40, state_by(40)).wait()
        assert manager.steps() == [FIRST, NEXT, 40]


def test_its_step_can_be_saved_again(late: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manager_at(late) as manager:
        manager.load(state_by(0))
        manager.save(LATE, state_by(7)).wait()
        assert manager.steps() == [FIRST, LATE, NEXT]
    assert "does not count and is removed" in caplog.text
    written = holdfast.open_checkpoint(path_of(late, LATE))
    assert list(written.verify()) == []
    found = written.read("weights")
    assert isinstance(found, np.ndarray) and (found == 7).all()
    folders = [each.name for each in path_of(late, LATE).iterdir() if each.is_dir() and each.name != "reports"]
    assert folders == [written.manifest.attempt], "what the late one had written is swept"


def test_a_step_that_was_saved_meanwhile_is_left_alone(stopped: tuple[Path, Writer]) -> None:
    root, writer = stopped
    with manager_at(root) as manager:
        manager.load(state_by(0))
        manager.save(LATE, state_by(7)).wait()
        before = {path: path.read_bytes() for path in path_of(root, LATE).rglob("*") if path.is_file()}
        goes_on(writer)
        assert {path: path.read_bytes() for path in path_of(root, LATE).rglob("*") if path.is_file()} == before
        assert manager.steps() == [FIRST, LATE]


def test_one_that_publishes_while_the_new_one_writes_the_same_step_does_not_win(stopped: tuple[Path, Writer]) -> None:
    root, writer = stopped

    def let_go_on(operation: FaultPoint) -> None:
        goes_on(writer)
        assert (path_of(root, LATE) / "manifest.json").exists()

    faults = Faults(let_go_on, names={"upload"})
    store = FaultyStore(LocalStore(root, settings=SETTINGS), faults)
    run = CheckpointManager.over(store, Job(AloneComm(), SystemClock(), SETTINGS, NumpyFramework(0)))
    run.load(writer_state(0))
    run.save(LATE, writer_state(7)).wait()
    assert faults.met == 1
    assert run.steps() == [FIRST, LATE]
    run.close()
    written = holdfast.open_checkpoint(path_of(root, LATE))
    assert list(written.verify()) == []
    found = written.read("weights")
    assert isinstance(found, np.ndarray) and (found == 7).all()


def test_whoever_was_replaced_is_told_so_at_every_save(tmp_path: Path) -> None:
    root = tmp_path / "run"
    store = LocalStore(root, settings=SETTINGS)
    with manager_at(root) as manager:
        manager.save(1, state_by(1)).wait()
        first = read_epoch(store, 1)
        assert first is not None
        put_epoch(store, replace(first, number=2, holder=replace(first.holder, host="node-9", boot="another")))
        put_accepted(store, 2, first.run_id, dict(current_fence(store).accepted))
        for _ in range(2):
            handle = manager.save(2, state_by(2))
            with pytest.raises(ConflictError, match=r"epoch 1 is over: epoch 2 \(host node-9, process \d+, since 20"):
                handle.wait()
        put_heartbeat(store, 2, RELEASED)
        with pytest.raises(ConflictError, match="epoch 1 is over"):
            manager.save(2, state_by(2)).wait()
    assert not path_of(root, 2).exists(), "it wrote nothing"


def command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli", *map(str, words)],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "200"},
    )  # fmt: skip
