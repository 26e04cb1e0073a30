"""The page over a run, beside the library calls that it stands on: `python -m bench.page`, from `make page`.

Results go to `bench/results/page.json`. Each round measures the page and the call in turn. Reports of ranks that this
machine lacks are written by the code that ranks write theirs by.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from playwright.sync_api import sync_playwright
from starlette.testclient import TestClient

import holdfast
from bench import report
from bench.job import ROOT
from bench.part import Round, Spread, in_turn, spread_of
from holdfast import api
from holdfast._face import wiring
from holdfast.base.types.events import Operation, Phase, RankReport
from holdfast.page.app import Pages
from holdfast.page.subjects import subjects_at
from holdfast.stored.repository.reports import put_reports

RESULTS = report.RESULTS / "page.json"
CHROMIUM = os.environ.get("HOLDFAST_CHROMIUM") or shutil.which("chromium")
TOKEN, HOST = "token-of-the-bench", "testserver"
POLL_SECONDS, BLOCK_SECONDS = 5.0, 12.0


def seconds_of(act: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def run_of(folder: Path, steps: int, ranks: int = 0) -> Path:
    """Make a run of small steps; each has reports of so many ranks, if any are asked."""
    with holdfast.CheckpointManager(folder, process_group=False) as manager:
        for step in range(1, steps + 1):
            manager.save(step, {"weights": torch.zeros(8), "step": step}, metrics={"loss": 1 / step}).wait()
    for record in api.list_steps(folder).steps if ranks else ():
        assert record.manifest is not None
        put_ranks(folder, record.step, record.manifest.attempt, ranks)
    return folder


def put_ranks(folder: Path, step: int, attempt: str, ranks: int) -> None:
    """Write the reports of a save on many ranks, eight in a file, as the ranks of one host do."""
    chance, store = np.random.default_rng(step), wiring.store_at(folder, holdfast.Settings())
    for path in (folder / f"step-{step:012d}" / "reports").glob(f"save-{attempt}*"):
        path.unlink()
    for first in range(0, ranks, 8):
        of_host = []
        for rank in range(first, min(first + 8, ranks)):
            copy, write = chance.uniform(0.1, 0.3), chance.uniform(1.0, 2.0)
            phases = (Phase("copy", 0.0, copy), Phase("write", copy, write), Phase("wait", copy + write, 0.1))
            operation, host = Operation("save", step, str(folder), rank, ranks), f"host-{first // 8}"
            seconds, facts = copy + write + 0.1, {"staging": "copy", "staged_seconds": copy, "retries": 0}
            of_host.append(RankReport(operation, attempt, host, rank, 1e9 + step, seconds, phases, 1 << 30, facts))
        put_reports(store, f"step-{step:012d}/", of_host)


class Visitor:
    """A browser without a screen, at a page that has read nothing yet."""

    def __init__(self, path: Path) -> None:
        self._client = TestClient(Pages(subjects_at([str(path)], [], holdfast.Settings())).app(TOKEN, [HOST]))
        self._client.headers["Authorization"] = f"Bearer {TOKEN}"

    def get(self, path: str, tag: str = "") -> str:
        """Return the tag of an answer, which must be a page, or `not modified` to a tag."""
        answer = self._client.get(path, headers={"If-None-Match": tag} if tag else {})
        assert answer.status_code == (304 if tag else 200), (path, answer.status_code, answer.text[:300])
        return answer.headers.get("etag", "")


def listing_rounds(folder: Path, rounds: int, steps: int) -> list[Round]:
    """Measure the first answer of a long run, and a poll without news."""
    root, found = run_of(folder / "long", steps), list[Round]()
    store = wiring.store_at(root, holdfast.Settings())
    for number in range(rounds):
        visitor, this = Visitor(root), Round()
        for name, act in in_turn([("page", partial(visitor.get, "/")), ("ls", lambda: api.list_steps(root))], number):
            this[name] = seconds_of(act)
        while True:  # Older saves are read with each refresh.
            tag = visitor.get("/")
            if tag == visitor.get("/"):
                break
        polls: list[tuple[str, Callable[[], object]]] = [
            ("poll", partial(visitor.get, "/", tag)),
            ("folders", lambda: store.folders("")),
        ]
        for name, act in in_turn(polls, number):
            this[name] = statistics.median(seconds_of(act) for _ in range(5))
        found.append(this)
        print(this, flush=True)
    return found


def tree_rounds(folder: Path, rounds: int, tensors: int) -> list[Round]:
    """Measure the first answer of a tree of many tensors."""
    path, found = folder / "tree", list[Round]()
    state = {f"layers.{number // 1000}.{number % 1000}.weight": torch.zeros(1) for number in range(tensors)}
    holdfast.save(path, state, process_group=False)
    for number in range(rounds):
        this = Round()
        pair: list[tuple[str, Callable[[], object]]] = [
            ("tree", lambda: Visitor(path).get("/run/0/tensors")),  # The start of the command opens the checkpoint.
            ("index", lambda: len(holdfast.open_checkpoint(path).tensors)),
        ]
        for name, act in in_turn(pair, number):
            this[name] = seconds_of(act)
        found.append(this)
        print(this, flush=True)
    return found


@contextlib.contextmanager
def served(root: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve a run by the command; yield its URL and its process."""
    command = [sys.executable, "-m", "holdfast.cli", "serve", str(root), "--port", "0", "--no-token"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip(), server
        server.terminate()


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def heat_rounds(folder: Path, rounds: int, ranks: int) -> tuple[list[Round], float]:
    """Measure a heat map of many ranks, from the request until it is drawn; return the memory of the server, too."""
    root, found = run_of(folder / "heat", 1), list[Round]()
    (record,) = api.list_steps(root).steps
    assert record.manifest is not None
    put_ranks(root, 1, record.manifest.attempt, ranks)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for number in range(rounds):
            with served(root) as (url, server):
                page, this = browser.new_page(), Round()

                def draw(page: object = page, url: str = url) -> None:
                    page.goto(f"{url}run/0/step?step=1", timeout=300_000)  # type: ignore[attr-defined]
                    page.wait_for_selector("canvas[data-drawn]", timeout=300_000)  # type: ignore[attr-defined]

                for name, act in in_turn([("drawn", draw), ("decoded", lambda: len([*api.reports(root, 1)]))], number):
                    this[name] = seconds_of(act)
                page.close()
                this["rss_mib"] = rss_mib(server.pid)
            found.append(this)
            print(this, flush=True)
        browser.close()
    return found, max(each["rss_mib"] for each in found)


def _compute(stop: object, count: object) -> None:
    torch.set_num_threads(1)
    matrix = torch.rand(384, 384)
    while not stop.is_set():  # type: ignore[attr-defined]
        matrix = (matrix @ matrix).softmax(-1)
        with count.get_lock():  # type: ignore[attr-defined]
            count.value += 1  # type: ignore[attr-defined]


def training_rounds(folder: Path, rounds: int) -> list[Round]:
    """Measure the pace of two processes that compute, while a browser polls the page and while none does."""
    root, found, context = run_of(folder / "trained", 300), list[Round](), get_context("spawn")
    stop, count = context.Event(), context.Value("q", 0)
    ranks = [context.Process(target=_compute, args=(stop, count)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    with served(root) as (url, _):
        polls = threading.Event()

        def poll() -> None:
            tag = ""
            while not stop.is_set():
                if polls.is_set():
                    request = urllib.request.Request(url, headers={"If-None-Match": tag} if tag else {})
                    with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(request) as answer:
                        tag = answer.headers.get("ETag", "")
                stop.wait(POLL_SECONDS)

        asking = threading.Thread(target=poll)
        asking.start()
        for number in range(rounds):
            this = Round()
            for name in in_turn(["polled", "alone"], number):
                polls.set() if name == "polled" else polls.clear()
                before = count.value
                time.sleep(BLOCK_SECONDS)
                this[name] = 1 / (count.value - before)
            found.append(this)
            print(this, flush=True)
        stop.set()
        asking.join()
    for rank in ranks:
        rank.join()
    return found


def report_mib(folder: Path) -> float:
    """Return the size of a report of 300 steps on 64 ranks."""
    root, out = run_of(folder / "mailed", 300, ranks=64), folder / "report.html"
    subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "serve", str(root), "--out", str(out)], check=True, capture_output=True
    )
    return out.stat().st_size / 2**20


def main() -> None:
    """Measure, and write the keys."""
    (ROOT / "runs").mkdir(exist_ok=True)
    quick = bool(os.environ.get("QUICK"))
    rounds = 2 if quick else 7
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as made:
        folder = Path(made)
        listings = listing_rounds(folder, rounds, 200 if quick else 2000)
        trees = tree_rounds(folder, rounds, 2_000 if quick else 200_000)
        heats, rss = heat_rounds(folder, rounds, 16_384)
        training, size = training_rounds(folder, rounds), report_mib(folder)
    spreads: dict[str, Spread] = {
        "run_page_vs_ls": spread_of([each["page"] / each["ls"] for each in listings]),
        "refresh_vs_listing": spread_of([each["poll"] / each["folders"] for each in listings]),
        "tensor_tree_200k": spread_of([each["tree"] / each["index"] for each in trees]),
        "heat_map_16384": spread_of([each["drawn"] / each["decoded"] for each in heats]),
        "page_train_slowdown": spread_of([each["polled"] / each["alone"] for each in training]),
        "serve_rss_mib": spread_of([rss]),
        "report_mib": spread_of([size]),
    }
    for key, spread in spreads.items():
        print(f"{key}: {spread.median:.3f} ({spread.low:.3f}–{spread.high:.3f})")
    if not quick:
        every = {"listings": listings, "trees": trees, "heats": heats, "training": training}
        RESULTS.write_text(json.dumps({**report.columns_of(spreads), "rounds": every}, indent=1) + "\n")


if __name__ == "__main__":
    main()
