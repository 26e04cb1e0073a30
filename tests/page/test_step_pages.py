"""The pages of one step: heat map, timelines, tensors, statistics and differences."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast import api
from holdfast.errors import MissingError, UnavailableError
from holdfast.page import app, subjects
from tests.page.browsing import Browser
from tests.page.conftest import RANKS, SLOW_RANK


def test_the_heat_map_shows_each_rank_by_phase_and_the_timelines_of_three(browser: Browser) -> None:
    page, document = browser.get("/run/0/step?step=300"), browser.json("/run/0/step?step=300")
    assert document["ranks"]["slowest"] == SLOW_RANK
    assert set(document["timelines"]) == {str(rank) for rank in document["ranks"].values()}
    assert sum("/step?step=300&work=save-" in link and "rank=" in link for link in page.links) == RANKS
    assert f"rank {SLOW_RANK} on host-1 (slowest)" in page.text and "3 requests made again" in page.text
    asked = browser.json("/run/0/step?step=300&rank=5")
    assert "5" in asked["timelines"] and asked["ranks"]["asked for"] == 5


def test_a_large_heat_map_is_left_to_the_browser(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(browser.pages.templates.globals, "cells_max", 10)
    page = browser.get("/run/0/step?step=300")
    (source,) = (link for link in page.links if "format=json" in link and "work=save-" in link)
    assert len(browser.client.get(source).json()["work"]["ranks"]) == RANKS
    assert "needs JavaScript" in page.text
    assert app.CELLS_MAX == 8192


def test_the_tensors_are_a_tree_that_filters_narrow(browser: Browser) -> None:
    whole = browser.json("/run/0/tensors?step=300")
    assert whole["tensor_count"] == 5 and [each["name"] for each in whole["tensors"]] == ["half"]
    assert whole["folders"] == [["model.", 4, 432]]
    below = browser.json("/run/0/tensors?step=300&prefix=model.1.")
    assert {each["name"] for each in below["tensors"]} == {"model.1.weight", "model.1.bias"}
    found = browser.json("/run/0/tensors?step=300&glob=*.weight&sort=bytes")
    assert [each["name"] for each in found["tensors"]] == ["model.0.weight", "model.1.weight"]
    assert [each["name"] for each in browser.json("/run/0/tensors?step=300&dtype=bfloat16")["tensors"]] == ["half"]
    assert browser.get("/run/0/tensors?step=300&glob=nothing").text.count("no tensor matches") == 1


def test_statistics_agree_with_numpy(browser: Browser, pristine: Path) -> None:
    weight = api.open_checkpoint(pristine, step=300).read("model.0.weight")
    assert isinstance(weight, np.ndarray)
    found = browser.json("/run/0/tensor?step=300&name=model.0.weight")["statistics"]
    wide = weight.astype(np.float64)
    assert (found["min"], found["max"], found["elements"]) == (wide.min(), wide.max(), 64)
    assert math.isclose(found["mean"], wide.mean(), abs_tol=1e-12)
    assert math.isclose(found["norm"], np.linalg.norm(wide), rel_tol=1e-12)
    assert found["histogram"] == np.histogram(wide, 64)[0].tolist()
    half = browser.json("/run/0/tensor?step=300&name=half")["statistics"]
    assert (half["nan"], half["infinite"], half["zeros"], half["min"], half["max"]) == (1, 1, 1, -4.0, 2.0)
    assert half["corners"][0][:2] == [1.0, 2.0] and "histogram of 64 bins" not in str(half)
    assert "infinite" in browser.get("/run/0/tensor?step=300&name=half").text


def test_a_large_tensor_is_drawn_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.offline.diff import statistics

    holdfast.save(tmp_path / "large", {"w": torch.arange(1 << 20, dtype=torch.int32)}, process_group=False)
    monkeypatch.setattr(statistics, "_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(statistics, "_BLOCK_BYTES", 1 << 14)
    found = api.statistics(api.open_checkpoint(tmp_path / "large"), "w")
    assert found.total_elements == 1 << 20 and (1 << 17) <= found.elements <= (1 << 18) + (1 << 14)
    assert (found.min, found.max) == (0, (1 << 20) - 1), "both ends are among the drawn"
    assert math.isclose(found.mean, (1 << 19), rel_tol=0.01)
    assert max(found.histogram) < 3 * sum(found.histogram) / 64
    page = Browser(tmp_path / "large").get("/run/0/tensor?step=-&name=w")
    assert f"over {found.elements:,} of {1 << 20:,} elements, evenly drawn" in page.text


def test_an_empty_tensor_has_no_numbers(tmp_path: Path) -> None:
    holdfast.save(
        tmp_path / "empty", {"w": torch.zeros(0, 3), "c": torch.ones(2, dtype=torch.complex64)}, process_group=False
    )
    browser = Browser(tmp_path / "empty")
    found = browser.json("/run/0/tensor?step=-&name=w")["statistics"]
    assert found["elements"] == 0 and found["min"] is None
    browser.get("/run/0/tensor?step=-&name=w")
    assert browser.json("/run/0/tensor?step=-&name=c")["statistics"]["max"] == 1.0


def test_a_diff_says_which_tensor_changed_most(browser: Browser, pristine: Path) -> None:
    document = browser.json("/run/0/diff?step=400&other=300")["diff"]
    expected = api.diff(api.open_checkpoint(pristine, step=300), api.open_checkpoint(pristine, step=400))
    changes = {each.fqn: each.change.max_relative for each in expected.tensors if each.change is not None}
    assert {each["fqn"]: each["change"]["max_relative"] for each in document["tensors"] if each["change"]} == changes
    page = browser.get("/run/0/diff?step=400&other=300&sort=max_relative")
    rows = [link for link in page.links if "/tensor?" in link]
    assert rows[0].endswith(max(changes, key=lambda name: changes[name]))
    by_norm = {each.fqn: each.change.relative for each in expected.tensors if each.change is not None}
    rows = [link for link in browser.get("/run/0/diff?step=400&other=300").links if "/tensor?" in link]
    assert rows[0].endswith(max(by_norm, key=lambda name: by_norm[name]))
    assert "epoch: 300 in A, 7 in B" in page.text


def test_long_work_shows_progress_and_stops(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.observers import Progress

    def slow(checkpoint: object, name: str, *, observer: subjects.LongWork) -> object:
        for done in range(2000):
            observer.on_event(Progress(done, 2000))
            time.sleep(0.01)
        return None

    monkeypatch.setattr(api, "statistics", slow)
    page = browser.get("/run/0/tensor?step=300&name=half")
    assert "reading half" in page.text and ("meta", {"http-equiv": "refresh", "content": "1"}) in page.active
    waiting = browser.get("/run/0/tensor?step=300&name=model.0.bias")
    assert "other work may run first" in waiting.text, "one at a time"
    (stop,) = (link for link in page.links if link.endswith("&stop=1"))
    stopped = browser.get(f"/run/0/tensor{stop}")
    assert "was stopped" in stopped.text and all(tag != "meta" or "http-equiv" not in at for tag, at in stopped.active)
    monkeypatch.undo()
    assert "was stopped" in browser.get("/run/0/tensor?step=300&name=model.0.bias&stop=1").text
    assert "infinite" in browser.get("/run/0/tensor?step=300&name=half").text


def test_failed_work_begins_again() -> None:
    work, answers = subjects.WorkQueue(), iter([None, 7])

    def fails_once(_: subjects.LongWork) -> object:
        if (answer := next(answers)) is None:
            raise UnavailableError("the store is away")
        return answer

    with pytest.raises(UnavailableError, match="away"):
        work.run("reading", "key", fails_once, stop=False)
    assert work.run("reading", "key", fails_once, stop=False) == 7


def test_open_work_is_kept_and_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "_DONE_SECONDS", 0.01)
    work, answers = subjects.WorkQueue(), threading.Event()
    began = [work.run("reading", str(each), lambda _: answers.wait(60), stop=False) for each in range(16)]
    try:
        with pytest.raises(UnavailableError, match="16 other works"):
            work.run("reading", "16", lambda _: True, stop=False)
        assert work.run("reading", "0", lambda _: True, stop=False) is began[0], "the work goes on"
    finally:
        answers.set()
    monkeypatch.undo()
    kept = [work.run("reading", str(each), lambda _: False, stop=False) for each in (15, 14, 13, 12, 16)]
    assert kept == 4 * [True] + [False], "the newest results are kept"


def test_unknown_names_are_answered_with_the_nearest(browser: Browser) -> None:
    assert "the nearest names are 300" in browser.get("/run/0/step?step=30", 404).text
    assert "model.0.weight" in browser.get("/run/0/tensor?step=300&name=model.0.wieght", 404).text
    assert "below 1" in browser.get("/run/5", 404).text
    browser.get("/run/0/diff?step=300&other=nothing", 404)
    browser.get("/nothing", 404)


def test_the_trace_is_that_of_the_command(browser: Browser, pristine: Path) -> None:
    assert browser.client.get("/run/0/trace?step=300").json() == api.trace(pristine, step=300).document


def traced_steps(browser: Browser, step: str) -> set[int]:
    """Ask for the trace that the page of a step links to; return the steps of its events."""
    (link,) = [each for each in browser.get(f"/run/0/step?step={step}").links if "/trace" in each]
    answer = browser.client.get(link)
    assert answer.status_code == 200, answer.text
    return {each["args"]["step"] for each in answer.json()["traceEvents"] if "step" in each.get("args", ())}


def test_a_step_that_going_back_left_behind_has_a_trace(browser: Browser, pristine: Path) -> None:
    (name,) = [each["name"] for each in browser.json("/")["steps"] if each["name"].startswith("500@")]
    assert traced_steps(browser, name) == {500}
    assert api.trace(pristine, step=name).document == api.trace(pristine, step=500).document
    for absent in (f"500@{'0' * 32}", 501):
        with pytest.raises(MissingError, match=f"no (committed )?step {absent}"):
            api.trace(pristine, step=absent)


def test_a_step_of_the_near_tier_alone_has_a_trace(tmp_path: Path) -> None:
    near = holdfast.Tier(tmp_path / "near", every=1, keep_last=3)
    with holdfast.CheckpointManager(tmp_path / "run", every=2, near=near, process_group=False) as manager:
        for step in (1, 2, 3):
            manager.maybe_save(step, {"w": torch.ones(4)})
    assert not (tmp_path / "run" / "step-000000000001").exists()
    assert traced_steps(Browser(tmp_path / "run"), "1") == {1}
    assert api.trace(tmp_path / "run").saves == 3


def test_many_tensors_come_in_pages(tmp_path: Path) -> None:
    state = {"model": {f"w{number:04}": torch.zeros(1) for number in range(1200)}}
    holdfast.save(tmp_path / "many", state, process_group=False)
    browser = Browser(tmp_path / "many")
    path, found = "/run/0/tensors?step=-&prefix=model.", []
    while path:
        page = browser.get(path)
        found += [link for link in page.links if "/tensor?" in link]
        later = [link for link in page.links if f"start={len(found)}" in link and "format" not in link]
        path = later[0] if later else ""
    assert len(found) == len(set(found)) == 1200
