"""The rig of `make integrations`, tried on a training without a framework."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integrations.kills import PHASES
from tests.integrations.table import Row, are_well, as_markdown, is_well, losses_agree, to_json
from tests.integrations.world import Job, Kill, Outcome, run

JOB = Job("plain", Path(), "holdfast", 4, 2)


@pytest.mark.parametrize("phase", ["writing", "publishing"])
def test_ranks_killed_in_a_phase_resume_from_the_save_before_it(phase: str, tmp_path: Path) -> None:
    job = replace(JOB, folder=tmp_path / "run")
    killed = run(replace(job, kill=Kill((0, 1), phase, save=2)), tmp_path / "killed")
    assert killed.killed, killed.error
    resumed = run(replace(job, resume=True), tmp_path / "resumed")
    assert (resumed.error, resumed.resumed_from) == ("", 2)
    assert len(resumed.results[1]["losses"]) == 2  # type: ignore[arg-type]


def test_a_kill_after_the_commit_loses_nothing(tmp_path: Path) -> None:
    job = replace(JOB, folder=tmp_path / "run")
    killed = run(replace(job, kill=Kill((0, 1), "after", save=2)), tmp_path / "killed")
    assert killed.killed, killed.error
    whole = run(replace(job, folder=tmp_path / "whole"), tmp_path / "unkilled")
    resumed = run(replace(job, resume=True), tmp_path / "resumed")
    assert (resumed.error, resumed.resumed_from) == ("", 4)
    assert resumed.results[0]["digests"] == whole.results[0]["digests"]


def test_what_a_rank_raises_is_the_error_of_the_world(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state.pt").write_bytes(b"no archive")
    outcome = run(replace(JOB, folder=tmp_path / "run", keeper="own", resume=True), tmp_path / "logs")
    assert "UnpicklingError" in outcome.error or "RuntimeError" in outcome.error
    assert not outcome.results


def test_a_rank_that_fails_after_its_result_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIN_EXIT_STATUS", "3")
    outcome = run(replace(JOB, folder=tmp_path / "run", steps=2), tmp_path / "logs")
    assert len(outcome.results) == 2 and outcome.error == "ranks left results, and then ended with {0: 3, 1: 3}"


def test_losses_agree_only_if_each_rank_trained_the_steps_that_were_left() -> None:
    whole = Outcome(1.0, (), {0: {"losses": ["a", "b", "c"]}})
    assert losses_agree(Outcome(1.0, (), {0: {"losses": ["b", "c"]}}), whole, 2)
    assert not losses_agree(Outcome(1.0, (), {0: {"losses": ["c"]}}), whole, 2)
    assert not losses_agree(Outcome(1.0, (), {0: {"losses": []}}), whole, 2)
    assert not losses_agree(Outcome(1.0, (), {0: {"losses": ["a", "c"]}}), whole, 2)


def test_other_ranks_are_well_only_if_they_resumed_from_the_last_save() -> None:
    found = {"resumed_from": 2} | {
        key: value for ranks in (1, 3) for key, value in ((f"resumed_on_{ranks}_from", 2), (f"equal_on_{ranks}", True))
    }
    assert are_well(found)
    assert not are_well(found | {"equal_on_3": False})
    # All of them began anew, alike.
    assert not are_well(found | {"resumed_from": None, "resumed_on_1_from": None, "resumed_on_3_from": None})


def test_every_phase_of_the_table_is_one_that_a_save_comes_to(tmp_path: Path) -> None:
    from holdfast.training.telemetry import trace

    known = {*trace._SAVING, *trace._COMMITTING}
    assert {name for name, _ in PHASES.values()} <= known


def test_a_row_is_well_only_if_the_resume_is_what_would_have_been() -> None:
    row = Row("holdfast", "voting", "one", 2, True)
    assert is_well(row)
    assert not is_well(replace(row, is_identical=False))
    assert not is_well(replace(row, resumed_from=None))
    assert not is_well(replace(row, phase="after"))  # It was committed, and is lost.
    assert not is_well(replace(row, resumed_from=6))
    assert is_well(replace(row, phase="after", resumed_from=4))
    assert not is_well(replace(row, error="MissingError: nothing"))
    assert "| own | writing | all | fails | no | broken / torn |" in as_markdown(
        [to_json(Row("own", "writing", "all", None, False, "broken | torn"))]
    )
