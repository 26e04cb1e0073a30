"""Names, tags, values, metrics, hosts and errors come from strangers: they are text, everywhere."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from urllib.parse import quote

import pytest
import torch

import holdfast
from holdfast import api
from holdfast.base.types.events import Operation, Phase, RankReport
from holdfast.page import app
from holdfast.page.report import report_of
from holdfast.page.subjects import subjects_at
from holdfast.stored.repository.reports import put_reports
from tests.hostile.cases import Case
from tests.hostile.corpus import CASES
from tests.hostile.crafting import Crafted, make_template
from tests.page.browsing import Browser, Seen
from tests.support.newer_format import write_newer

MARKUP = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(2)>", "'><svg onload=alert(3)>", "</title><b>", "{{ 7*7 }}",
    "\x1b]0;owned\x07", "javascript:alert(4)", "\u202e\u2028", "&lt;b&gt;", "a" * 4096, "%00%0d%0a", "</script><!--",
)  # fmt: skip


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run whose every text is markup, and a file of such events."""
    root = tmp_path_factory.mktemp("strange") / "<b>run</b>"
    state = {
        "model": {f"w{text}": torch.ones(2) for text in MARKUP},
        "values": {f"k{text}": text for text in MARKUP},
        "nested": [{text: [text]} for text in MARKUP],
    }
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        for step in (1, 2, 3):
            state["model"] = {f"w{text}": torch.ones(2) * step for text in MARKUP}
            state["values"] = {f"k{text}": f"{text}{step}" for text in MARKUP}
            manager.save(step, state, metrics={f"<i>loss</i>{MARKUP[1]}": 0.5}).wait()
    store = holdfast._face.wiring.store_at(root, holdfast.Settings())
    for record in api.list_steps(root).steps:
        assert record.manifest is not None
        shutil.rmtree(root / f"step-{record.step:012d}" / "reports")
        reports = [
            RankReport(
                Operation("save", record.step, MARKUP[0], rank, 3), record.manifest.attempt, MARKUP[rank], 1, 1e9, 9.0,
                (Phase(MARKUP[0], 0.0, 1.0), Phase("write", 0.0, 8.0 if rank else 1.0)), 5,
                {"staging": MARKUP[0], MARKUP[1]: MARKUP[2], "throttled": MARKUP[0], "staged_seconds": MARKUP[1]},
            )
            for rank in range(3)
        ]  # fmt: skip
        put_reports(store, f"step-{record.step:012d}/", reports)
    events = root.parent / "<events>.jsonl"
    line = {"time": "2099-01-01T00:00:00Z", "event": "failed", "verb": "save", "rank": 1, "step": 4, "world_size": 2}
    events.write_text(
        "".join(json.dumps({**line, "host": text, "error": text, "message": text}) + "\n" for text in MARKUP)
        + f"{MARKUP[0]}\n"
    )
    return root, events


def require_harmless(seen: Seen, path: str) -> None:
    scripts = [named for tag, named in seen.active if tag == "script"]
    assert scripts == [{"src": "/static/page.js", "defer": None}], path
    assert {tag for tag, _ in seen.active} <= {"script", "meta", "link", "form", "input", "button"}, path
    assert not seen.handlers, path
    assert not [link for link in seen.links if link.lower().startswith(("javascript", "http", "//", "data"))], path


def test_markup_in_names_is_text_on_every_page(strange: tuple[Path, Path]) -> None:
    root, events = strange
    browser = Browser(root, events=[str(events)])
    pages = browser.walk()
    assert len(pages) > 20 and any("/tensor?" in path for path in pages) and any("/diff?" in path for path in pages)
    for path, seen in pages.items():
        if seen.text:
            require_harmless(seen, path)
            assert "\x1b" not in seen.text and "\u202e" not in seen.text
    text = "".join(seen.text for seen in pages.values())
    assert "<script>alert(1)</script>" in text and "onerror=alert(2)" in text and "{{ 7*7 }}" in text
    assert "49" not in browser.get("/run/0/tensors?step=3&prefix=model.").text.split()
    for name in json.loads(json.dumps(browser.json("/run/0/tensors?step=3&glob=*")))["tensors"]:
        answer = browser.client.get("/run/0/tensor", params={"step": "3", "name": name["name"]})
        assert answer.status_code == 200, name["name"][:50]
        require_harmless(Seen(answer.text), name["name"])


def test_markup_is_text_in_the_report(strange: tuple[Path, Path]) -> None:
    root, events = strange
    seen = Seen(report_of(subjects_at([str(root)], [str(events)], holdfast.Settings())))
    assert [tag for tag, _ in seen.active if tag == "script"] == ["script"] and not seen.handlers
    assert not [link for link in seen.links if not link.startswith("#")]


CRAFTED = [
    pytest.param(case, marks=[pytest.mark.long] if number % 20 or "30,000" in case.name else [], id=case.name)
    for number, case in enumerate(CASES)
]
"""`make test` tries some cases of the corpus, `make test-long` the others."""


@pytest.mark.parametrize("case", CRAFTED)
def test_a_crafted_run_is_never_a_traceback(case: Case, template: Path, tmp_path: Path) -> None:
    crafted = Crafted(Path(shutil.copytree(template, tmp_path / "run", symlinks=True)))
    case.craft(crafted)
    try:
        browser = Browser(crafted.root)
    except holdfast.errors.CheckpointError:
        return
    step = quote(next((each["name"] for each in browser.client.get("/?format=json").json().get("steps", ())), "-"))
    listed = browser.client.get(f"/run/0/tensors?step={step}&format=json").json().get("tensors", ())
    name = quote(next((each["name"] for each in listed), "none")[:4096])
    paths = (
        "/",
        "/run/0/step?",
        "/run/0/tensors?",
        f"/run/0/tensor?name={name}&",
        f"/run/0/diff?other={step}&",
        "/run/0/trace?",
    )
    for path in paths:
        answer = browser.client.get(f"{path}step={step}" if path != "/" else path)
        assert answer.status_code < 500 or answer.status_code == 503, (path, answer.text)
        assert "Traceback" not in answer.text


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template") / "run"
    make_template(root)
    return root


def test_odd_numbers_and_many_phases_are_shown(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = api.open_checkpoint(root, step=300)
    (stored,) = (root / "step-000000000300" / "reports").glob("save-*")
    stored.unlink()
    phases = [[Phase("write", 0.0, 1e-320)], *([Phase(f"{n}-{m}", 0.0, 1.0) for m in range(400)] for n in range(29))]
    reports = [
        RankReport(
            Operation("save", 300, "root", rank, 30), checkpoint.manifest.attempt, "host", 1, 1e9, 9.0,
            tuple(of_rank), 1 << 20, {},
        )
        for rank, of_rank in enumerate(phases)
    ]  # fmt: skip
    monkeypatch.setattr(RankReport, "bytes_per_second", 0.0)  # A writer refuses the infinite one.
    put_reports(holdfast._face.wiring.store_at(root, holdfast.Settings()), "step-000000000300/", reports)
    monkeypatch.undo()
    browser = Browser(root)
    assert browser.json("/run/0/step?step=300")["work"]["ranks"][0]["bytes_per_second"] is None, "it is infinite"
    text = browser.client.get("/run/0/step?step=300").text
    assert text.count('<th class="n">') == 2 + app.PHASES_MAX


def test_a_path_that_is_not_utf8_is_shown(pristine: Path, tmp_path: Path) -> None:
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/runs/\xff"))
    shutil.copytree(pristine, root)
    shutil.copytree(pristine, root.with_name("b"))
    browser = Browser(root.parent)
    for path in ("/", "/run/1", "/run/1/step?step=300", "/run/1/tensors?step=300", "/run/1/diff?step=300&other=200"):
        assert "\\udcff" in str(browser.json(path)), path
        assert "\\udcff" in browser.get(path).text
    browser.json("/run/1/trace?step=300")
    browser.json("/run/1/tensor?step=300&name=half")


def test_damaged_files_are_shown_as_damaged(root: Path) -> None:
    (root / "step-000000000200" / "manifest.json").write_text("{}")
    (report,) = (root / "step-000000000100" / "reports").glob("save-*")
    report.write_text(report.read_text().replace("host-1", "host-9"))
    (future,) = (root / "step-000000000300" / "reports").glob("save-*")
    write_newer(future)
    browser = Browser(root)
    document = browser.json("/")
    assert [each["status"] for each in document["steps"] if each["step"] == 200] == ["damaged"]
    damaged = [each["text"] for each in document["alerts"] if each["rule"] == "damaged"]
    assert any("step-000000000200" in text for text in damaged) and any(report.name in text for text in damaged)
    assert not any(future.name in text for text in damaged), "a report of a newer format is not damaged"
    assert any(future.name in text for text in document["damaged"])
    browser.get("/run/0/step?step=200", 422)
    assert report.name in browser.get("/run/0/step?step=100").text
    assert future.name in browser.get("/run/0/step?step=300").text
