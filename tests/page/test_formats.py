"""Anyone's checkpoint is shown: each format that is read, near tiers, and checkpoints under way of being loaded."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast import api, errors
from tests.export.written import dcp_saved
from tests.page.browsing import Browser
from tests.page.conftest import state_of
from tests.reading.test_foreign_objects import copied
from tests.unit.cli.running import holdfast as run
from tests.unit.cli.test_inspect_coded import state

REPOSITORY = Path(__file__).resolve().parents[2]
OWN = REPOSITORY / "tests" / "fixtures"
SHARED = Path(os.environ.get("HOLDFAST_FIXTURES") or REPOSITORY.parent / "shared" / "fixtures")


MARKS = ("latest", "latest_universal", ".metadata", "*.safetensors")
"""Files whose folder is a checkpoint. Each file of Megatron's legacy checkpoints is one of its own."""

REFUSED = {"pp2": "DeepSpeed tag|pipeline|PipelineModule", "moe": "experts of DeepSpeed's own MoE layers"}
"""The reason why DeepSpeed's own folders of a case are refused (docs/formats.md), by the beginning of its name."""


def cases_below(folder: Path) -> list[Path]:
    return sorted(case for group in folder.glob("*") for case in group.glob("*") if case.is_dir())


def checkpoints_of(case: Path) -> list[Path]:
    return sorted({path.parent for mark in MARKS for path in case.rglob(mark)} | {*case.glob("legacy/**/*.pt")})


def refusal_of(case: Path, checkpoint: Path) -> str:
    reasons = [text for name, text in REFUSED.items() if case.name.startswith(name)]
    return reasons[0] if reasons and checkpoint.name in ("ckpt", "universal") else ""


def require_shown(path: Path | str) -> api.Checkpoint:
    """Require remarks, origin, tensors and numbers of a checkpoint on its pages."""
    checkpoint, browser = api.open_checkpoint(path), Browser(path)
    page = browser.get("/").text
    assert checkpoint.origin and checkpoint.origin in page
    for remark in checkpoint.remarks:
        assert " ".join(errors.printable(remark).split()) in page
    assert browser.json("/run/0/tensors?step=-")["tensor_count"] == len(checkpoint.tensors) > 0
    name = next(iter(checkpoint.tensors))
    found = browser.json(f"/run/0/tensor?step=-&name={quote(name)}")["statistics"]
    values = torch.as_tensor(checkpoint.read(name, framework="torch")).double()
    finite = values[values.isfinite()]
    assert (found["elements"], found["min"], found["max"]) == (values.numel(), finite.min(), finite.max())
    return checkpoint


@pytest.mark.parametrize("case", cases_below(OWN), ids=lambda case: f"{case.parent.name}-{case.name}")
def test_each_fixture_is_shown(case: Path) -> None:
    checkpoints = checkpoints_of(case)
    assert checkpoints
    for each in checkpoints:
        require_shown(each)


# The folders of DeepSpeed are the fixtures above.
@pytest.mark.parametrize("group", [pytest.param("deepspeed", marks=pytest.mark.long), "deepspeed-parallel", "megatron"])
def test_each_shared_fixture_is_shown(group: str) -> None:
    if not (SHARED / group).is_dir():
        pytest.skip(f"no {SHARED / group}; HOLDFAST_FIXTURES names another folder")
    for case in sorted(path for path in (SHARED / group).iterdir() if path.is_dir()):
        checkpoints = checkpoints_of(case)
        assert len(checkpoints) > 1, case
        for each in checkpoints:
            if why := refusal_of(case, each):
                outcome = run("serve", each, "--out", "-")
                assert outcome.status == 2 and re.search(why, outcome.err) and str(each) in outcome.err
            else:
                require_shown(each)


@pytest.mark.parametrize("format", ["safetensors", "torch", "dcp"])
def test_a_checkpoint_of_another_system_is_shown(pristine: Path, tmp_path: Path, format: str) -> None:
    path = tmp_path / "other"
    holdfast.export(pristine, path, to=format, step=300, model_only=False)
    assert "another system's checkpoint" in Browser(path).get("/").text
    assert len(require_shown(path).tensors) == 5


def bin_folder(path: Path) -> str:
    path.mkdir()
    parts = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    torch.save({"a.weight": torch.arange(6.0)}, path / parts[0])  # noqa: TID251 - as Transformers 4 does
    torch.save({"b.weight": torch.ones(2), "b.more": torch.zeros(3)}, path / parts[1])  # noqa: TID251
    weights = {"a.weight": parts[0], "b.weight": parts[1]}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return "b.more"


def safetensors_folder(path: Path) -> str:
    path.mkdir()
    save_file({"a.weight": torch.arange(6.0), "a.more": torch.zeros(3)}, path / "model-00001-of-00001.safetensors")
    weights = {"a.weight": "model-00001-of-00001.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return "a.more"


def torch_file(path: Path) -> str:
    torch.save({"a": torch.arange(6.0), "when": np.datetime64("2026-01-01")}, path)  # noqa: TID251 - as a user does
    return "when"


def dcp_folder(path: Path) -> str:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    dcp_saved(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    return "optimizer"


@pytest.mark.parametrize("make", [bin_folder, safetensors_folder, torch_file, dcp_folder])
def test_a_remark_of_each_format_is_shown(tmp_path: Path, make: Callable[[Path], str]) -> None:
    word = make(tmp_path / "other")
    remarks = require_shown(tmp_path / "other").remarks
    assert any(word in remark for remark in remarks), remarks


def test_a_checkpoint_at_a_url_is_shown(tmp_path: Path) -> None:
    safetensors_folder(tmp_path / "other")
    assert require_shown(copied(tmp_path / "other")).remarks


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
