"""A run whose newest steps are damaged resumes from the newest that is whole, says so, and deletes nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.errors import CorruptError, InvalidError
from holdfast.training.runs.listing import run_record
from tests.crash.damage.damages import DAMAGES, damage_a_chunk, flip, manifest_of
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.support.crashed_run import (
    NEW,
    NEXT,
    OLD,
    committed_at,
    content_under,
    expected_fingerprint,
    fingerprint,
    local_store,
    run_at,
    step_path,
    training_state,
)

OTHER = 99


def resumed(run: CheckpointManager, step: int | None = None) -> tuple[int | None, str]:
    """Load into another state; return the step and what the state is then."""
    state = training_state(OTHER)
    return run.load(state, step), fingerprint(state)


@pytest.mark.parametrize("damaged", [[NEXT], [NEXT, NEW]], ids=["newest", "newest-two"])
@pytest.mark.parametrize("kind", list(DAMAGES))
def test_the_newest_whole_step_is_resumed_from_loudly(
    in_memory: Path, kind: str, damaged: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    root = in_memory / "root"
    committed_at(root, OLD, NEW, NEXT)
    whole = max({OLD, NEW, NEXT} - set(damaged))
    for step in damaged:
        DAMAGES[kind](step_path(root, step))
    before = content_under(root)

    run = run_at(local_store(root))
    assert resumed(run) == (whole, expected_fingerprint(whole))
    assert run.load_report is not None
    assert [each.step for each in run.load_report.passed_over] == damaged
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.split()[1] for text in warned] == [str(step) for step in damaged]
    assert all("is damaged and skipped" in text for text in warned)

    after = content_under(root)
    assert {name: after[name] for name in before} == before, "nothing is deleted or changed"
    # The load that succeeded leaves its report beside the step it took.
    reports = f"{step_path(root, whole).name}/reports/"
    added = [name for name in after.keys() - before.keys() if not name.startswith(reports)]
    assert sorted(name.partition(".")[0] for name in added) == [
        f"quarantine/{step_path(root, step).name}" for step in sorted(damaged)
    ]
    shown = {record.step: record.quarantined is not None for record in run_record(local_store(root)).steps}
    assert shown == {step: step in damaged for step in (OLD, NEW, NEXT)}


def test_a_step_under_quarantine_is_not_read_again_unless_it_is_asked_for(
    in_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = in_memory / "root"
    committed_at(root, OLD, NEW)
    damage_a_chunk(step_path(root, NEW))
    assert resumed(run_at(local_store(root)))[0] == OLD
    caplog.clear()

    faults = Faults()
    run = run_at(FaultyStore(local_store(root), faults))
    for _ in range(2):
        assert resumed(run) == (OLD, expected_fingerprint(OLD))
        assert run.load_report is not None
        (passed,) = run.load_report.passed_over
        assert passed.step == NEW
        assert "hash to" in passed.why
    packs_read = [each.subject for each in faults.seen if each.name in ("read_into", "get_cached")]
    assert packs_read
    assert not [key for key in packs_read if key.startswith(step_path(root, NEW).name)]
    assert [
        record.getMessage().split(" since")[0] for record in caplog.records if record.levelno == logging.WARNING
    ] == [f"step {NEW} is skipped: quarantined"]
    with pytest.raises(CorruptError, match="hash"):
        resumed(run, NEW)


def test_a_run_goes_on_over_a_step_under_quarantine_and_keeps_what_lay_there(in_memory: Path) -> None:
    root = in_memory / "root"
    committed_at(root, OLD, NEW)
    damage_a_chunk(step_path(root, NEW))
    before = content_under(step_path(root, NEW))
    run = run_at(local_store(root))
    assert resumed(run)[0] == OLD
    run.save(NEW, training_state(NEW)).wait()
    run.close()
    assert resumed(run_at(local_store(root))) == (NEW, expected_fingerprint(NEW))
    after = content_under(step_path(root, NEW))
    kept = {name: data for name, data in before.items() if name != "manifest.json"}
    assert {name: after[name] for name in kept} == kept
    aside = [data for name, data in content_under(root / "quarantine").items() if name.endswith(".manifest.json")]
    assert aside == [before["manifest.json"]]


def test_a_root_that_cannot_be_written_is_resumed_from(in_memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = in_memory / "root"
    committed_at(root, OLD, NEW)
    flip(manifest_of(step_path(root, NEW)), 300)

    def refuse(operation: FaultPoint) -> None:
        raise InvalidError("read-only file system")

    faults = Faults(refuse, names={"put_if_absent"}, lasting=True)
    assert resumed(run_at(FaultyStore(local_store(root), faults))) == (OLD, expected_fingerprint(OLD))
    assert "could not be quarantined" in caplog.text
    assert not (root / "quarantine").exists()


@pytest.mark.parametrize("kind", list(DAMAGES))
def test_where_nothing_is_whole_every_step_is_named(in_memory: Path, kind: str) -> None:
    root = in_memory / "root"
    committed_at(root, OLD, NEW)
    for step in (OLD, NEW):
        DAMAGES[kind](step_path(root, step))
    run = run_at(local_store(root))
    for _ in range(2):
        with pytest.raises(CorruptError, match=f"all 2 .*step {NEW}: .*step {OLD}: .*holdfast repair"):
            resumed(run)


def test_a_damaged_record_still_counts(in_memory: Path) -> None:
    root = in_memory / "root"
    committed_at(root, OLD, NEW)
    damage_a_chunk(step_path(root, NEW))
    assert resumed(run_at(local_store(root)))[0] == OLD
    (record,) = (root / "quarantine").iterdir()
    flip(record, 100)
    run = run_at(local_store(root))
    assert resumed(run)[0] == OLD
    assert run.load_report is not None
    assert "record cannot be read" in run.load_report.passed_over[0].why


def test_an_older_step_that_does_not_fit_tells_that_the_state_was_touched(in_memory: Path) -> None:
    root = in_memory / "root"
    run = run_at(local_store(root))
    state = training_state(OLD)
    run.save(OLD, {"model": state["model"]}).wait()
    run.save(NEW, state).wait()
    damage_a_chunk(step_path(root, NEW))
    with pytest.raises(InvalidError, match="missing from the checkpoint") as caught:
        resumed(run)
    assert "partly filled from a newer step" in caught.value.__notes__[0]
