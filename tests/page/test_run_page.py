"""The pages of a run: words of `ls`, alerts, work under way, timelines, and what a poll costs."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import pytest
import torch

import holdfast
from holdfast import api
from holdfast.errors import UnavailableError
from holdfast.page import subjects
from holdfast.page.report import report_of
from tests.page.browsing import Browser, Seen
from tests.page.conftest import RANKS, SLOW_RANK


def test_a_run_has_the_words_and_columns_of_ls(browser: Browser, pristine: Path) -> None:
    table = api.step_table(api.list_steps(pristine))
    page, document = browser.get("/"), browser.json("/")
    assert document["table"]["columns"] == list(table.columns)
    unaged = [[cell for at, cell in enumerate(row) if table.columns[at] != ">AGE"] for row in table.rows]
    found = [[cell for at, cell in enumerate(row) if table.columns[at] != ">AGE"] for row in document["table"]["rows"]]
    assert found == [list(row) for row in unaged]
    assert {"300", "400@", "500@", "TIMELINE", "METRICS", "loss=0.01", "best", "superseded"} <= {
        word if not word.count("@") else word[: word.index("@") + 1] for word in page.text.split()
    }


def test_a_step_says_its_time_and_how_long_training_waited(browser: Browser) -> None:
    steps = {each["name"]: each for each in browser.json("/")["steps"]}
    work = steps["100"]["work"]
    assert len(work["ranks"]) == RANKS and work["ranks"][SLOW_RANK]["own_seconds"] == 8.2
    page = browser.get("/")
    assert "9.00 s 0.20 s" in page.text and f"{SLOW_RANK} on host-1, 8.20 s" in page.text


def test_lineage_shows_what_going_back_left_behind(browser: Browser) -> None:
    page = browser.get("/")
    first, second = page.text.split("Lineage")[1].split("timeline 2")
    assert "timeline 1" in first and first.count("superseded") == 2 and "500@" in first
    assert "starts from step 300" in second and "400" in second
    (link,) = (each for each in page.links if each.endswith("/diff?step=400&other=300"))
    assert "changed" in browser.get(link).text


def test_alerts_are_on_top(browser: Browser) -> None:
    alerts = browser.json("/")["alerts"]
    assert {(each["rule"], each["rank"], each["host"]) for each in alerts} >= {("slow_rank", SLOW_RANK, "host-1")}
    text = browser.get("/").text
    assert text.index("slow_rank") < text.index("STEP CREATED")


def test_a_poll_without_news_is_answered_in_short(root: Path) -> None:
    browser = Browser(root)
    answer = browser.client.get("/")
    again = {"If-None-Match": answer.headers["etag"]}
    assert browser.client.get("/", headers=again).status_code == 304
    api.tag(root, 300, "release")
    fresh = browser.client.get("/", headers=again)
    assert fresh.status_code == 200 and "release" in fresh.text
    assert fresh.headers["etag"] != answer.headers["etag"]
    other = Browser(root).client.get("/", headers=again)
    assert other.status_code == 200, "another server may show another run at the same URL"


def test_manifests_and_reports_are_read_once(root: Path) -> None:
    """A poll that finds news reads the new step alone: files that it read before may be unreadable by then."""
    browser = Browser(root)
    assert len(browser.json("/")["steps"]) == 6
    for path in [*root.glob("step-*/manifest.json"), *root.glob("step-*/reports/*.json")]:
        if "step-000000000500" not in str(path):
            path.write_bytes(path.read_bytes()[:-40] + b"x" * 40)
    shutil.copytree(root / "step-000000000500", root / "step-000000000600")
    steps = {each["name"]: each for each in browser.json("/")["steps"]}
    assert steps["100"]["status"] == "committed" and steps["100"]["work"]["world_size"] == RANKS
    assert steps["600"]["status"] == "damaged", "the manifest of a new folder is read: it names another step"


def test_under_way_is_told_by_lease_and_folders_and_by_events(root: Path, tmp_path: Path) -> None:
    attempt = root / "step-000000000900" / "00112233445566aa" / "parts"
    attempt.mkdir(parents=True)
    for rank in (0, 2):
        (attempt / f"r{rank:05d}.msgpack").write_bytes(b"part")
    document = Browser(root).json("/")
    assert document["under_way"] == [], "the writer has released its lease: nothing is under way"
    assert [each["rule"] for each in document["alerts"] if each["step"] == 900] == ["failing"]
    _hold_lease(root)
    (each,) = Browser(root).json("/")["under_way"]
    assert (each["verb"], each["step"], each["phase"], each["told_by"]) == ("save", 900, "write", "lease and folders")
    assert (each["ranks"], each["world_size"]) == ([1], 3)
    lines = tmp_path / "events.jsonl"
    began = {"event": "began", "verb": "save", "step": 900, "world_size": 3, "time": "2026-01-01T00:00:00+00:00"}
    ended = {"event": "ended", "verb": "load", "step": 100, "world_size": 3, "time": "2026-01-01T00:00:00+00:00"}
    rows = [{**began, "rank": rank} for rank in range(3)] + [{**ended, "rank": 1, "host": "worker-b"}]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows) + "damaged\n")
    browser = Browser(root, events=[str(lines)])
    (each,) = browser.json("/")["under_way"]
    assert each["told_by"] == "events and folders"
    assert (each["ranks"], each["hosts"], each["since_unix_seconds"]) == ([1], ["worker-b"], 1767225600.0)
    page = browser.get("/")
    assert "waits for rank 1 of 3 on worker-b" in page.text and "line 5 is damaged" in page.text


def _hold_lease(root: Path) -> None:
    """Let this process hold the lease as far as its files tell."""
    for path in (root / "epochs").glob("*.beat"):
        path.write_bytes(b"7\n")


def test_a_removed_step_says_when_it_went(root: Path) -> None:
    browser = Browser(root)
    browser.get("/run/0/step?step=100")
    shutil.move(root / "step-000000000100", root.with_name("kept"))
    browser.get("/")
    assert "was removed at 20" in browser.get("/run/0/step?step=100", 404).text
    shutil.move(root.with_name("kept"), root / "step-000000000100")
    browser.get("/run/0/step?step=100")


def test_a_silent_store_leaves_the_page_with_its_age(root: Path) -> None:
    browser = Browser(root)
    answer = browser.client.get("/")
    assert "data-as-of" in answer.text
    os.rename(root, root.with_name("away"))
    silent = browser.client.get("/", headers={"If-None-Match": answer.headers["etag"]})
    assert silent.status_code == 200, "an open page learns that the store is silent"
    assert "data-as-of" not in silent.text, "the page keeps the moment of the last answer"
    page = browser.get("/")
    assert "the page shows the run as of" in page.text and "300" in page.text
    os.rename(root.with_name("away"), root)
    assert "the page shows the run as of" not in browser.get("/").text


def test_no_report_is_made_of_a_store_that_falls_silent(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "_SAVES_AT_ONCE", 1)
    browser = Browser(root)
    browser.get("/")
    os.rename(root, root.with_name("away"))
    with pytest.raises(UnavailableError, match="5 saves are not read"):
        report_of(browser.pages.subjects)


def test_a_folder_of_runs_and_one_checkpoint(pristine: Path, tmp_path: Path) -> None:
    shutil.copytree(pristine, tmp_path / "runs" / "a")
    shutil.copytree(pristine, tmp_path / "runs" / "b")
    alone = tmp_path / "alone"
    shutil.copytree(pristine / "step-000000000300", alone)
    browser = Browser(tmp_path / "runs", alone)
    page = browser.get("/")
    assert [each for each in page.links if each.startswith("/run/")] == ["/run/0", "/run/1", "/run/2"]
    assert "step 300" in browser.get("/run/2").text
    assert "/run/2/tensor?step=-&name=half" in browser.get("/run/2/tensors?step=-").links
    assert "equal" in browser.get("/run/0/diff?step=300&subject=2").text


def test_a_store_that_hangs_holds_up_no_page(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    browser = Browser(pristine)
    browser.get("/")
    (subject,) = browser.pages.subjects
    assert subject.watch is not None
    answers, refresh = threading.Event(), subject.watch.refresh
    monkeypatch.setattr(subjects, "_ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(subject.watch, "refresh", lambda: answers.wait(60) and refresh())
    try:
        page = browser.get("/")
        assert "the store has not answered" in page.text and "timeline 2" in page.text
        assert browser.json("/")["as_of"] < time.time()
    finally:
        answers.set()
    monkeypatch.undo()
    assert "the store has not answered" not in browser.get("/").text


@pytest.mark.parametrize(("name", "path"), [("open_checkpoint", "step?step=300"), ("trace", "trace?")])
def test_a_page_of_a_store_that_hangs_is_answered(
    pristine: Path, monkeypatch: pytest.MonkeyPatch, name: str, path: str
) -> None:
    browser = Browser(pristine)
    browser.get("/")
    answers = threading.Event()
    monkeypatch.setattr(subjects, "_ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(api, name, lambda *_, **__: answers.wait(20))
    try:
        began = time.monotonic()
        assert "has not answered" in browser.get(f"/run/0/{path}", 503).text
        assert time.monotonic() - began < 10
    finally:
        answers.set()


def test_a_store_that_never_answered_is_named(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    browser = Browser(pristine)
    (subject,) = browser.pages.subjects
    assert subject.watch is not None
    answers = threading.Event()
    monkeypatch.setattr(subjects, "_ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(subject.watch, "refresh", lambda: answers.wait(60))
    try:
        assert str(pristine) in browser.get("/", 503).text
    finally:
        answers.set()


def test_a_step_that_is_saved_again_is_shown_as_it_is(tmp_path: Path) -> None:
    root, state = tmp_path / "run", {"w": torch.full((4,), 12.0)}
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        for step in (8, 12, 16):
            manager.save(step, state).wait()
    browser = Browser(root)
    before = browser.json("/run/0/step?step=12")["facts"]
    assert browser.json("/run/0/tensor?step=12&name=w")["statistics"]["mean"] == 12.0
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        manager.load(state, step=8)
        state["w"][:] = 112.0
        manager.save(12, state).wait()
    assert browser.json("/run/0/step?step=12")["facts"] != before
    assert browser.json("/run/0/tensor?step=12&name=w")["statistics"]["mean"] == 112.0


def test_a_timeline_is_compared_with_the_step_that_it_left(tmp_path: Path) -> None:
    root, state = tmp_path / "run", {"w": torch.zeros(4)}
    for back_to, steps in ((None, (4, 8, 12)), (8, (12, 16)), (4, (8,))):
        with holdfast.CheckpointManager(root, process_group=False) as manager:
            if back_to is not None:
                manager.load(state, step=back_to)
            for step in steps:
                manager.save(step, state).wait()
    browser = Browser(root)
    names = {each["name"]: each["timeline"]["number"] for each in browser.json("/")["steps"]}
    (left,) = (name for name in names if name.startswith("8@"))
    pairs = [link.partition("/diff?")[2] for link in browser.get("/").links if "/diff?" in link and "step=12" in link]
    (second,) = (name for name, number in names.items() if number == 2 and name.startswith("12"))
    assert urlencode({"step": second, "other": left}) in pairs


def test_an_age_goes_on_without_news(root: Path) -> None:
    browser = Browser(root)
    browser.get("/")
    facts = browser.pages.subjects[0].refresh()
    (step,) = (each for each in facts["steps"] if each.name == "300")
    hours = replace(step, created_unix_seconds=time.time() - 3 * 3600)
    steps = [hours if each is step else each for each in facts["steps"]]
    text = browser.pages.render("report.html", {**facts, "steps": steps, "whole_max": 0})
    assert Seen(text).text.count("3 h") == 1
