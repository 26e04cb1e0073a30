"""Anyone's checkpoint is shown: each format that is read, near tiers, and checkpoints under way of being loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import holdfast
from holdfast import api
from tests.page.browsing import Browser
from tests.page.conftest import state_of
from tests.unit.cli.test_inspect_coded import state

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


@pytest.mark.parametrize("format", ["safetensors", "torch", "dcp"])
def test_a_checkpoint_of_another_system_is_shown(pristine: Path, tmp_path: Path, format: str) -> None:
    path = tmp_path / "other"
    holdfast.export(pristine, path, to=format, step=300, model_only=False)
    browser = Browser(path)
    assert "another system's checkpoint" in browser.get("/").text
    listed = browser.json("/run/0/tensors?step=-&glob=*")
    assert listed["tensor_count"] == 5
    for each in listed["tensors"]:
        found = browser.json(f"/run/0/tensor?step=-&name={each['name']}")["statistics"]
        assert found["elements"] == found["total_elements"] > 0
    remarks = api.open_checkpoint(path).remarks
    assert all(remark in browser.get("/").text for remark in remarks)


def test_each_fixture_is_shown() -> None:
    shown = 0
    for folder in [FIXTURES, *(path for path in FIXTURES.rglob("*") if path.is_dir())]:
        try:
            checkpoint = api.open_checkpoint(folder)
        except holdfast.errors.CheckpointError:
            continue
        browser = Browser(folder)
        page = browser.get("/")
        assert all(remark.split("\n")[0][:60] in page.text for remark in checkpoint.remarks)
        assert browser.json("/run/0/tensors?step=-")["tensor_count"] == len(checkpoint.tensors)
        shown += 1
    assert shown > 3


def test_a_near_tier_and_its_agent_are_shown(tmp_path: Path) -> None:
    near = tmp_path / "near"
    tier = holdfast.Tier(near, every=200)
    # With a grace, closing waits for the removal of steps from the near tier.
    settings = holdfast.Settings(collect_grace_seconds=0.0)
    with holdfast.CheckpointManager(tmp_path / "run", near=tier, settings=settings, process_group=False) as manager:
        for step in (100, 200, 300):
            manager.save(step, state_of(step)).wait()
    browser = Browser(tmp_path / "run")
    assert " IN " in browser.get("/").text and "agent of" not in browser.get("/").text
    api.agent(str(near), orphan_seconds=0, linger_seconds=0)
    assert f"agent of {near}: does not run; was ended" in browser.get("/").text


def test_a_load_is_under_way_before_anything_is_written(pristine: Path, tmp_path: Path) -> None:
    lines = tmp_path / "events.jsonl"
    began = {"time": "2026-01-01T00:00:00Z", "event": "began", "verb": "load", "step": 300, "world_size": 2}
    lines.write_text("".join(json.dumps({**began, "rank": rank}) + "\n" for rank in (0, 1)))
    browser = Browser(pristine, events=[str(lines)])
    (each,) = browser.json("/")["under_way"]
    assert (each["verb"], each["step"], each["ranks"]) == ("load", 300, [0, 1])
    assert "load of step 300" in browser.get("/").text


def test_many_ranks_fit_into_a_report(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.page import report
    from holdfast.page.subjects import subjects_at

    whole = report.report_of(subjects_at([str(pristine)], [], holdfast.Settings()))
    monkeypatch.setattr(report, "REPORT_BYTES_MAX", len(whole.encode()) - 1)
    less = report.report_of(subjects_at([str(pristine)], [], holdfast.Settings()))
    assert whole.count("<h2>save of step") == 6 and less.count("<h2>save of step") == 5


def test_coded_tensors_have_a_ratio_and_reasons(tmp_path: Path) -> None:
    # Of a job of its own: one that has saved noise before does not code it again.
    settings = holdfast.Settings(compression="on", lease_seconds=8.25)
    holdfast.save(tmp_path / "c", state(), process_group=False, settings=settings)
    browser, coded = Browser(tmp_path / "c"), api.open_checkpoint(tmp_path / "c")
    listed = {each["name"]: each["form"] for each in browser.json("/run/0/tensors?step=-&glob=*")["tensors"]}
    assert {name: form["stored_bytes"] for name, form in listed.items()} == {
        name: coded.stored_form(name).stored_bytes for name in coded.tensors
    }
    assert listed["master.w"]["chunks"] == {"residual": 1}
    assert [kind.why for kinds in coded.codings.values() for kind in kinds]
    page = browser.get("/")
    assert all(kind.why in page.text for kinds in coded.codings.values() for kind in kinds)
