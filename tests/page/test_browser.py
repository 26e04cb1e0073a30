"""The page in a real browser: headless Chromium, driven by Playwright, over a run with a history.

`make page` installs both. HOLDFAST_CHROMIUM names another Chromium.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.page.prepared_run import PreparedRun, prepare

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = os.environ.get("HOLDFAST_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
OF_A_KIND_MAX = 4
"""Pages of one kind that are opened."""

TARGET = "new URL(each.getAttribute('href'), location).href.split('#')[0]"
PICTURES = os.environ.get("PAGE_PICTURES")
"""Folder that receives pictures for the docs."""

pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; make page installs one")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    return prepare(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="module")
def url(run: PreparedRun) -> Iterator[str]:
    """The URL that `holdfast serve` prints."""
    events = [option for path in run.events for option in ("--events", str(path))]
    command = [sys.executable, "-m", "holdfast.cli", "serve", str(run.root), "--port", "0", *events]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright; make page installs it")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@contextmanager
def opened(chromium: Browser, url: str, width: int, colors: Any) -> Iterator[Page]:
    """Open the page; at its end, require that the browser had nothing to complain of."""
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=colors)
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    yield page
    page.close()
    assert complaints == []
    assert {urlsplit(each).netloc for each in asked} == {urlsplit(url).netloc}, "no other host is asked"


def picture(page: Page, name: str) -> None:
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"page-{name}.png")


@pytest.mark.parametrize(("width", "colors"), [(1280, "light"), (400, "dark")])
def test_every_page_is_drawn_without_a_complaint(chromium: Browser, url: str, width: int, colors: str) -> None:
    with opened(chromium, url, width, colors) as page:
        assert "token" not in page.url, "the cookie has the token after the first visit"
        ahead, seen = [page.url], Counter[str]()
        while ahead:
            here = ahead.pop(0)
            kind = urlsplit(here).path.rpartition("/")[2]
            if seen[kind] == OF_A_KIND_MAX or "format=json" in here or kind == "trace":
                continue
            seen[kind] += 1
            answer = page.goto(here)
            assert answer is not None and answer.status == 200, here
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), f"{here} is too wide"
            links = page.eval_on_selector_all("a", f"all => all.map(each => {TARGET})")
            ahead += [link for link in links if urlsplit(link).netloc == urlsplit(url).netloc]
        assert seen.keys() >= {"step", "tensors", "tensor", "diff"}


def test_the_questions_of_three_in_the_morning(chromium: Browser, url: str, run: PreparedRun) -> None:
    with opened(chromium, url, 1280, "light") as page:
        alerts = page.inner_text(".alerts")
        assert f"rank {run.slow_rank}" in alerts and "slow_rank" in alerts
        assert f"step {run.failed_step}" in alerts and "no space left on device" in alerts
        lineage = page.inner_text(".lineage")
        assert f"starts from step {run.back_to}" in lineage
        for step in run.left_steps:
            assert f"{step}@" in lineage
        picture(page, "run")
        page.click(".alerts a")  # The save with the slow rank.
        assert page.inner_text("h1") == "step 28"
        page.click("text=save-")
        assert f"slowest: rank {run.slow_rank}" in page.inner_text("main")
        picture(page, "save")
        page.click("table >> text=0")
        assert "rank=0" in page.url
        page.go_back()
        page.reload()
        assert page.inner_text("h1") == "step 28"


def test_filter_sort_and_diff(chromium: Browser, url: str) -> None:
    with opened(chromium, url, 1280, "light") as page:
        page.click("table a >> text=28")
        page.click("text=tensors")
        page.fill("[name=glob]", "model.blocks.*.weight")
        page.click("button")
        names = page.eval_on_selector_all("tbody tr td:first-child", "all => all.map(each => each.innerText)")
        assert names and all(name.startswith("model.blocks.") and name.endswith(".weight") for name in names)
        page.select_option("[name=sort]", "bytes")
        page.click("button")
        by_bytes = page.eval_on_selector_all("tbody tr td:first-child", "all => all.map(each => each.innerText)")
        assert sorted(by_bytes) == sorted(names) and by_bytes != names
        page.click("tbody a")
        page.wait_for_selector("text=mean")
        page.goto(url)
        page.click("text=± >> nth=-1")
        page.wait_for_selector("table")
        page.click("th >> nth=0")
        assert page.get_attribute("th >> nth=0", "aria-sort") in ("ascending", "descending")
