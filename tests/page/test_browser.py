"""The page in a real browser: headless Chromium, driven by Playwright, over a run with a history.

`make page` installs both. HOLDFAST_CHROMIUM names another Chromium.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

import pytest
import torch

import holdfast
from holdfast import api
from holdfast.stored.repository.reports import put_reports
from tests.page.conftest import reports_of
from tests.page.prepared_run import PreparedRun, prepare
from tests.page.test_bad_input import write_zeros

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = os.environ.get("HOLDFAST_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
MANY_RANKS = 3000
"""Ranks whose heat map is left to the script."""

OF_A_KIND_MAX = 4
"""Pages of one kind that are opened."""

TARGET = "new URL(each.getAttribute('href'), location).href.split('#')[0]"
PICTURES = os.environ.get("PAGE_PICTURES")
"""Folder that receives pictures for the docs."""

in_full = pytest.mark.skipif(PICTURES is None, reason="make page runs it")

pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; make page installs one")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    return prepare(tmp_path_factory.mktemp("prepared"))


@contextmanager
def served(*arguments: object) -> Iterator[str]:
    """Serve by the command; yield the URL that it prints."""
    command = [sys.executable, "-m", "holdfast.cli", "serve", "--port", "0", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def url(run: PreparedRun) -> Iterator[str]:
    with served(run.root, *(option for path in run.events for option in ("--events", path))) as url:
        yield url


@pytest.fixture(scope="module")
def large_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run with a save on many ranks, two large checkpoints, and one of many tensors."""
    folder = tmp_path_factory.mktemp("large")
    with holdfast.CheckpointManager(folder / "run", process_group=False) as manager:
        manager.save(100, {"w": torch.ones(4)}).wait()
    attempt = api.open_checkpoint(folder / "run", step=100).manifest.attempt
    store = holdfast._face.wiring.store_at(folder / "run", holdfast.Settings())
    (report,) = (folder / "run" / "step-000000000100" / "reports").glob("save-*")
    report.unlink()
    reports = reports_of(100, attempt, 1e9, ranks=MANY_RANKS)
    for first in range(0, MANY_RANKS, 500):
        put_reports(store, "step-000000000100/", reports[first : first + 500])
    large = [write_zeros(folder / f"{name}.safetensors", {"large": 1 << 36, "small": 4}) for name in "ab"]
    names = [f"w{number:04}" for number in range(1200)]
    many = write_zeros(folder / "many.safetensors", {name: 1 + number for number, name in enumerate(names)})
    with served(folder / "run", *large, many) as url:
        yield url


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright; make page installs it")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@contextmanager
def opened(chromium: Browser, url: str, width: int, colors: Any, *, script: bool = True) -> Iterator[Page]:
    """Open the page; at its end, require that the browser had nothing to complain of."""
    size = {"width": width, "height": 900}
    page = chromium.new_page(viewport=size, color_scheme=colors, java_script_enabled=script)
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.set_default_timeout(20_000)
    page.goto(url)
    page.wait_for_url(re.compile("^[^?]*([?](?!.*token=).*)?$"))  # The page of the token leads on.
    yield page
    page.close()
    assert complaints == []
    assert {urlsplit(each).netloc for each in asked} == {urlsplit(url).netloc}, "no other host is asked"


def picture(page: Page, name: str) -> None:
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"page-{name}.png")


@pytest.mark.parametrize(
    ("width", "colors"),
    [
        (1280, "light"),
        (400, "dark"),
        pytest.param(1280, "dark", marks=in_full),
        pytest.param(400, "light", marks=in_full),
    ],
)
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
        shade = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", shade)[:3])) < 3 * 128) == (colors == "dark"), shade


def test_the_printed_url_works_from_a_page_of_another_site(chromium: Browser, url: str, tmp_path: Path) -> None:
    (tmp_path / "mail.html").write_text(f'<a href="{url}">it trains</a>')
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as other, ThreadPoolExecutor(1) as thread:
        thread.submit(other.serve_forever)
        page = chromium.new_page()
        try:
            page.goto(f"http://localhost:{other.server_port}/mail.html")
            page.click("a")
            page.wait_for_selector(".lineage")
            answer = page.reload()
            assert answer is not None and answer.status == 200
            assert page.url == urljoin(url, "/") and page.is_visible(".lineage")
        finally:
            page.close()
            other.shutdown()


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
        page.wait_for_load_state()
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
        names = cells(page, 0)
        assert names and all(name.startswith("model.blocks.") and name.endswith(".weight") for name in names)
        page.select_option("[name=sort]", "bytes")
        page.click("button")
        by_bytes = cells(page, 0)
        assert sorted(by_bytes) == sorted(names) and by_bytes != names
        page.reload()
        assert page.input_value("[name=glob]") == "model.blocks.*.weight" and page.input_value("[name=sort]") == "bytes"
        page.go_back()
        assert cells(page, 0) == names
        page.select_option("[name=dtype]", index=1)
        page.click("button")
        assert set(cells(page, 1)) == {page.input_value("[name=dtype]")}
        page.click("tbody a")
        page.wait_for_selector("text=mean")
        page.goto(url)
        page.click("text=± >> nth=-1")
        page.wait_for_selector("table")
        names = cells(page, 0)
        for order in ("descending", "ascending"):
            page.click("th >> nth=0")
            assert page.get_attribute("th >> nth=0", "aria-sort") == order
            assert cells(page, 0) == sorted(names, reverse=order == "descending")
        page.click("text=NORM A-B")
        norms = [float(text) for text in cells(page, 5)]
        assert norms == sorted(norms, reverse=True) and len(norms) == len(names)
        page.fill("[name=other]", "20")
        page.click("button")
        page.wait_for_selector("table")
        assert "other=20" in page.url


def cells(page: Page, column: int) -> list[str]:
    """Return the texts of a column of the first table, once the page is loaded."""
    page.wait_for_load_state()
    return page.eval_on_selector_all(f"tbody tr td:nth-child({column + 1})", "all => all.map(each => each.innerText)")


def test_pages_of_many_tensors_lead_on_and_back(chromium: Browser, large_url: str) -> None:
    with opened(chromium, large_url, 1280, "dark") as page:
        page.click("text=many.safetensors")
        page.click("nav >> text=tensors")
        page.click("text=model.")
        first = cells(page, 0)
        page.click("text=later")
        second = cells(page, 0)
        page.click("text=later")
        assert len({*first, *second, *cells(page, 0)}) == 1200
        assert not page.is_visible("text=later")
        page.click("text=earlier")
        assert cells(page, 0) == second
        page.click(".path a")
        page.wait_for_selector("tr.folder")


@pytest.mark.parametrize("script", [True, pytest.param(False, marks=in_full)], ids=["script", "no script"])
def test_long_work_is_stopped_and_other_work_begins(chromium: Browser, large_url: str, script: bool) -> None:
    with opened(chromium, large_url, 400, "dark", script=script) as page:
        page.click("text=a.safetensors")
        page.click("nav >> text=diff")
        page.select_option("[name=subject]", label=page.inner_text("option:has-text('b.safetensors')"))
        page.click("button")
        page.wait_for_selector("progress")
        page.wait_for_selector("text=GiB of")  # The page shows itself anew, with progress.
        page.click("text=stop")
        page.wait_for_selector("text=was stopped")
        page.reload()
        page.wait_for_selector("text=was stopped")
        page.click("text=begin again")
        page.wait_for_selector("progress")
        page.click("text=stop")
        page.wait_for_selector("text=was stopped")
        page.go_back()
        page.goto(urljoin(large_url, "/run/1/tensor?step=-&name=model.small"))
        page.wait_for_selector("text=mean")


@in_full
def test_many_ranks_are_drawn_and_lead_to_their_timelines(chromium: Browser, large_url: str) -> None:
    url = urljoin(large_url, "/run/0/step?step=100") + f"&{urlsplit(large_url).query}"
    with opened(chromium, url, 1280, "light") as page:
        page.wait_for_selector(f"canvas[data-drawn='{MANY_RANKS}']")
        page.hover("canvas", position={"x": 300, "y": 3})
        under = re.fullmatch(r"rank (\d+) on host-(\d+), copy: 0\.200 s", page.inner_text(".heat-at"))
        assert under is not None and int(under[1]) // 4 == int(under[2])
        page.click("canvas", position={"x": 300, "y": 3})
        page.wait_for_url(f"**rank={under[1]}**")
        page.wait_for_selector(f"text=rank {under[1]} on host-{under[2]} (asked for)")
    with opened(chromium, url, 1280, "light", script=False) as page:
        assert "needs JavaScript" in page.inner_text("main")


def test_an_open_page_shows_news_by_itself(chromium: Browser, run: PreparedRun, tmp_path: Path) -> None:
    root = Path(shutil.copytree(run.root, tmp_path / "run"))
    with served(root) as url, opened(chromium, url, 1280, "light") as page:
        assert "fresh-tag" not in page.inner_text("main")
        api.tag(root, 28, "fresh-tag")
        page.wait_for_selector("table >> text=fresh-tag")


def test_a_report_is_a_page_of_its_own(chromium: Browser, run: PreparedRun, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    command = [sys.executable, "-m", "holdfast.cli", "serve", run.root, "--out", out]
    subprocess.run(command, check=True)
    with opened(chromium, out.as_uri(), 400, "dark") as page:
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        page.click("table.steps a >> text=28")
        assert page.url.endswith("#save-28") and page.is_visible("#save-28 table")
