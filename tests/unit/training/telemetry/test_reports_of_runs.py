"""Every save and load leaves its report on every rank, and none that could not be left hurts anybody."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.types.events import Began, Ended, Entered, Event, Failed, Phase, Progress, RankReport
from holdfast.base.types.reports import LoadReport, SaveReport
from holdfast.core.format.names import step_folder
from holdfast.errors import CheckpointError, UnavailableError
from holdfast.stored.repository.reports import reports_in
from holdfast.training.telemetry.trace import trace_of
from tests.doubles.faults import FaultPoint, Faults, FaultyStore, raise_error
from tests.doubles.framework import GlobalTensor
from tests.support.tuning import tuned
from tests.unit.ranks import HASTY, PATIENT, World, fresh_store, plain, saved, sharded
from tests.unit.training.telemetry.traced import require_sound

SAVED = {"collect", "agree", "plan", "compare", "copy", "queue", "write", "part", "vote"}
COMMITTED = {"index", "publish", "sweep"}
FULL = raise_error(lambda key: UnavailableError(f"{key}: full"))


class Heard:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def of(self, rank: int, kind: type) -> list:
        return [
            each
            for each in self.events
            if isinstance(each, kind)
            and (each.report.operation if isinstance(each, Ended) else each.operation).rank == rank  # type: ignore[union-attr]
        ]


def loaded(run: CheckpointManager, target: dict[str, GlobalTensor]) -> LoadReport:
    run.load(target)
    assert run.load_report is not None
    return run.load_report


def target(world_size: int) -> dict[str, GlobalTensor]:
    each = sharded(world_size)
    return {"w": GlobalTensor(each.dtype, np.zeros_like(each.array), each.layout)}


def reports_of(world: World, step: int) -> list[RankReport]:
    found = [each for _, each in reports_in(world.store, step_folder(step))]
    assert all(isinstance(each, RankReport) for each in found)
    return found  # type: ignore[return-value]


def names_of(phases: tuple[Phase, ...]) -> set[str]:
    return {each.name for each in phases}


def test_every_rank_reports_a_save_and_a_load() -> None:
    heard = Heard()
    world = World(3, observers=(heard,))

    def part(rank: int, run: CheckpointManager) -> object:
        return saved(run, 7, {"w": sharded(3)}), loaded(run, target(3))

    outcomes = world.play(part)
    reports = reports_of(world, 7)
    assert [(each.operation.verb, each.operation.rank) for each in reports] == [
        (verb, rank) for verb in ("load", "save") for rank in range(3)
    ]
    assert len({each.id for each in reports if each.operation.verb == "load"}) == 1
    assert {each.id for each in reports if each.operation.verb == "save"} == {world.manifest(7).attempt}
    files = [name for name in world.files() if "/reports/" in name]
    assert [name[-11:] for name in files] == ["r00000.json"] * 2, "the ranks of one node share a file"
    committers = [each for each in reports if names_of(each.phases) >= COMMITTED]
    assert len(committers) == 1, "one rank commits, the others wait for it"
    for each in reports:
        own_save, own_load = outcomes[each.operation.rank]  # type: ignore[misc]
        own: SaveReport | LoadReport = own_save if each.operation.verb == "save" else own_load
        assert each.phases == own.phases and each.bytes == own.bytes
        assert sum(phase.seconds for phase in each.phases if phase.name != "copy") <= each.seconds + 1e-4
        assert all(phase.stop_seconds <= each.seconds + 1e-5 for phase in each.phases)
        expected = {"resolve", "plan", "agree", "read", "restore", "wait"}
        if each.operation.verb == "save":
            expected = SAVED | (COMMITTED if each is committers[0] else {"wait"})
        assert names_of(each.phases) == expected
        assert heard.of(each.operation.rank, Ended)[each.operation.verb == "load"].report == replace(
            each, operation=replace(each.operation, url=f"{world.store.url}/step-000000000007")
        )
    for rank in range(3):
        assert [each.operation.verb for each in heard.of(rank, Began)] == ["save", "load"]
        entered = {each.phase for each in heard.of(rank, Entered) if each.operation.verb == "save"}
        assert SAVED - {"queue"} <= entered
        progress = [each for each in heard.of(rank, Progress) if each.operation.verb == "save"]
        assert progress[-1].done_bytes == progress[-1].total_bytes > 0
        assert [each.done_bytes for each in progress] == sorted(each.done_bytes for each in progress)
    require_sound(trace_of(world.store).document, reports)


def test_bytes_that_ranks_pass_on_are_told_of_and_timed() -> None:
    heard = Heard()
    world = World(2, tuned(replace(PATIENT, share_reads="always"), exchange_bytes_max=16384), observers=(heard,))

    def part(rank: int, run: CheckpointManager) -> object:
        saved(run, 1, {"w": plain(3.0, count=50_000)})
        return loaded(run, {"w": plain(0.0, count=50_000)})

    for rank, report in enumerate(world.play(part)):
        assert isinstance(report, LoadReport), report
        assert report.exchanged_bytes > 0 and "exchange" in names_of(report.phases)
        progress = [each for each in heard.of(rank, Progress) if each.operation.verb == "load"]
        assert progress[-1].done_bytes == progress[-1].total_bytes == report.bytes + report.exchanged_bytes


def test_a_report_that_cannot_be_written_is_a_warning_of_one_rank(caplog: pytest.LogCaptureFixture) -> None:
    def failing(world: World) -> FaultyStore:
        return FaultyStore(world.store, Faults(FULL, names={"put"}, lasting=True))

    world = World(2)
    world = replace(world, stores={rank: failing(world) for rank in range(2)})
    with caplog.at_level(logging.INFO):
        outcomes = world.play(lambda rank, run: saved(run, 1, {"w": sharded(2)}))
    assert [type(each) for each in outcomes] == [SaveReport, SaveReport]
    said = [each for each in caplog.records if "the report could not be stored beside the checkpoint" in each.message]
    # Rank 1 leaves its report to rank 0 if it comes first. Then only rank 0 fails.
    assert sorted(each.levelno for each in said) in ([logging.INFO, logging.WARNING], [logging.WARNING])
    assert "beside the checkpoint: UnavailableError: " in said[0].message
    assert said[0].message.endswith("set settings.reports=False")
    assert reports_of(world, 1) == []


def test_none_is_left_where_none_is_asked_for() -> None:
    world = World(2, replace(PATIENT, reports=False))

    def part(rank: int, run: CheckpointManager) -> object:
        return saved(run, 1, {"w": sharded(2)}), loaded(run, target(2))

    outcomes = world.play(part)
    assert not [name for name in world.files() if "reports" in name]
    assert all(each[0].phases and each[1].phases for each in outcomes)  # type: ignore[index]


def test_a_save_that_fails_is_told_of_on_every_rank_and_leaves_no_report() -> None:
    heard = Heard()
    world = World(2, HASTY, observers=(heard,))
    broken = FaultyStore(world.store, Faults(FULL, names={"upload"}))
    world = replace(world, stores={1: broken})
    outcomes = world.play(lambda rank, run: saved(run, 1, {"w": sharded(2)}))
    assert all(isinstance(each, CheckpointError) for each in outcomes)
    for rank in range(2):
        (failed,) = heard.of(rank, Failed)
        assert isinstance(failed, Failed)
        assert failed.operation.step == 1 and failed.error == "UnavailableError" and "full" in failed.message
        assert {"collect", "agree", "plan"} <= names_of(failed.phases)
        assert not heard.of(rank, Ended)
    left = [name for name in world.files() if not name.startswith("epochs/")]
    assert left == ["README", "holdfast.json"], "what is left is the run's own"


def test_a_call_that_is_refused_is_told_of_once() -> None:
    heard = Heard()
    world = World(1, observers=(heard,))

    def part(rank: int, run: CheckpointManager) -> object:
        error = saved(run, 1, {"w": object()})
        wrong = {"v": plain(1.0)}
        saved(run, 2, {"w": plain(1.0)})
        try:
            loaded(run, wrong)  # type: ignore[arg-type]
        except CheckpointError:
            pass
        return error

    (error,) = world.play(part)
    assert isinstance(error, CheckpointError)
    failed = heard.of(0, Failed)
    assert [(each.operation.verb, each.operation.step) for each in failed] == [("save", 1), ("load", 2)]
    assert [each.operation.step for each in heard.of(0, Began)] == [1, 2, 2]


def test_a_load_that_goes_on_with_an_older_step_is_told_of_as_both() -> None:
    heard = Heard()
    world = World(2, observers=(heard,))

    def part(rank: int, run: CheckpointManager) -> object:
        saved(run, 1, {"w": sharded(2)}), saved(run, 2, {"w": sharded(2)})
        if rank == 0:
            key = next(name for name in world.files() if "step-000000000002" in name and name.endswith("1.safetensors"))
            data = bytearray(world.store.get(key, 1 << 20))
            data[-1] ^= 1
            world.store.put(key, bytes(data))
        return loaded(run, target(2))

    for rank, report in enumerate(world.play(part)):
        assert isinstance(report, LoadReport), report
        assert report.step == 1 and [each.step for each in report.passed_over] == [2]
        began = [each for each in heard.of(rank, Began) if each.operation.verb == "load"]
        assert [each.operation.step for each in began] == [2, 1]
        (failed,) = heard.of(rank, Failed)
        assert (failed.operation.step, failed.error, failed.phases) == (2, "CorruptError", ())
        (own,) = [each for each in reports_of(world, 1) if (each.operation.verb, each.operation.rank) == ("load", rank)]
        assert own.facts["passed_over"] == 1 and own.phases == report.phases
        assert [each.name for each in own.phases].count("resolve") == 2, "what was lost on the way counts"
    assert not [each for each in reports_of(world, 2) if each.operation.verb == "load"]


def test_nothing_is_left_beside_what_another_system_wrote(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    target = {"model": {"w": torch.zeros(3)}}
    holdfast.load(tmp_path, target, process_group=False)
    assert target["model"]["w"].tolist() == [1, 1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_save_by_path_has_its_reports_once_it_returns(tmp_path: Path) -> None:
    report = holdfast.save(tmp_path / "c", {"w": torch.ones(3)}, process_group=False)
    (path,) = (tmp_path / "c" / "reports").iterdir()
    assert path.name == f"save-{report.attempt}-r00000.json"
    assert names_of(report.phases) == (SAVED - {"copy"}) | COMMITTED
    holdfast.load(tmp_path / "c", {"w": torch.zeros(3)}, process_group=False)
    assert len(list((tmp_path / "c" / "reports").iterdir())) == 2


def test_loads_without_end_leave_the_report_of_the_last(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    with holdfast.CheckpointManager(tmp_path) as manager:
        manager.save(1, state).wait()
        for _ in range(5):
            manager.load(state)
    names = [path.name for path in (tmp_path / step_folder(1) / "reports").iterdir()]
    assert sorted(name.partition("-")[0] for name in names) == ["load", "save"]


def test_storage_that_hangs_after_the_commit_does_not_keep_a_save_or_load_from_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("holdfast.core.engine.background._SOON_SECONDS", 0.05)
    over, store = threading.Event(), fresh_store()

    def hang(operation: FaultPoint) -> None:
        if "reports/" in operation.subject:
            over.wait(300.0)

    faulty = FaultyStore(store, Faults(hang, names={"put"}, lasting=True))
    world = World(2, store=store, stores={0: faulty, 1: faulty})

    def part(rank: int, run: CheckpointManager) -> object:
        return saved(run, 7, {"w": sharded(2)}), loaded(run, target(2))

    with caplog.at_level(logging.WARNING, logger="holdfast"):
        outcomes = world.play(part)
    assert not over.is_set()
    over.set()
    for report, load_report in outcomes:  # type: ignore[misc]
        assert isinstance(report, SaveReport), report
        assert isinstance(load_report, LoadReport), load_report
    assert any("save of step 7: the report could not be stored" in each.getMessage() for each in caplog.records)
