"""Sizes and moments that a page does not expect: each is answered by a page with its status and a sentence."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import holdfast
from holdfast import api
from holdfast.stored.repository.reports import put_reports
from tests.page.browsing import Browser, Seen
from tests.page.conftest import reports_of, state_of

LONG_NAME = "model." + "n" * 4090


def write_zeros(path: Path, shapes: dict[str, int]) -> Path:
    """Write float32 tensors of so many zeros as safetensors; the file is a hole, so any size costs no disk."""
    header, at = dict[str, Any](), 0
    for name, elements in shapes.items():
        header[name] = {"dtype": "F32", "shape": [elements], "data_offsets": [at, at := at + 4 * elements]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return path


def until_done(browser: Browser, path: str) -> Seen:
    """Follow a progress page as a browser without JavaScript does."""
    deadline = time.monotonic() + 100
    while ("meta", {"http-equiv": "refresh", "content": "1"}) in (page := browser.get(path)).active:
        assert time.monotonic() < deadline, page.text
        time.sleep(0.1)
    return page


def test_a_step_that_is_collected_while_it_is_shown(root: Path) -> None:
    browser = Browser(root)
    paths = [f"/run/0/{path}" for path in ("step?step=100", "tensors?step=100", "tensor?step=100&name=half")]
    paths += ["/run/0/diff?step=100&other=200", "/run/0/diff?step=200&other=100"]
    for path in paths:
        browser.get(path)
    settings = holdfast.Settings(collect_grace_seconds=0.0)
    with holdfast.CheckpointManager(root, keep_last=2, settings=settings, process_group=False) as manager:
        state = state_of(0)
        manager.load(state)
        for step in (600, 700):
            manager.save(step, state).wait()
    assert not (root / "step-000000000100").exists()
    for path in paths:
        assert "step 100 was removed at 20" in browser.get(path, 404).text
    browser.get("/run/0/trace?step=100", 404)
    assert "700" in browser.get("/").text


@pytest.mark.long
def test_two_hundred_thousand_tensors_and_a_long_name(tmp_path: Path) -> None:
    names = [f"model.layers.{number // 1000}.w{number % 1000}" for number in range(200_000)]
    browser = Browser(write_zeros(tmp_path / "many.safetensors", dict.fromkeys([*names, LONG_NAME[6:]], 1)))
    first = browser.json("/run/0/tensors?step=-")
    assert first["tensor_count"] == 200_001
    assert len(browser.client.get("/run/0/tensors?step=-&glob=*").content) < 4 << 20
    (found,) = browser.json("/run/0/tensors?step=-&glob=*.199.w999")["tensors"]
    assert "mean" in until_done(browser, f"/run/0/tensor?step=-&name={quote(found['name'])}").text
    long = browser.json("/run/0/tensors?step=-&glob=*nnnn")["tensors"][0]["name"]
    assert long == LONG_NAME and LONG_NAME in until_done(browser, f"/run/0/tensor?step=-&name={long}").text
    assert "model.layers.199.w99" in browser.get("/run/0/tensor?step=-&name=model.model.layers.199.w9999", 404).text


@pytest.mark.long
def test_a_tensor_larger_than_memory(tmp_path: Path) -> None:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    path = write_zeros(tmp_path / "large.safetensors", {"large": memory_bytes // 2})
    with path.open("rb+") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\x80\x3f")  # 1.0 as float32.
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    before = peak_bytes()
    page = until_done(Browser(path), "/run/0/tensor?step=-&name=model.large")
    assert "evenly drawn" in page.text and f"of {memory_bytes // 2:,} elements" in page.text
    assert "max 1 " in page.text, "the last element is among the drawn"
    assert peak_bytes() - before < 600 << 20


def peak_bytes() -> int:
    """Return the largest memory that this process has had."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def test_real_work_stops_and_lets_other_work_begin(tmp_path: Path) -> None:
    paths = [write_zeros(tmp_path / f"{name}.safetensors", {"large": 1 << 34, "small": 4}) for name in "ab"]
    browser = Browser(*paths)
    page = browser.get("/run/0/diff?step=-&subject=1")
    assert "comparing" in page.text and ("meta", {"http-equiv": "refresh", "content": "1"}) in page.active
    assert "other work may run first" in browser.get("/run/0/tensor?step=-&name=model.small").text
    (stop,) = (link for link in page.links if link.endswith("&stop=1"))
    deadline = time.monotonic() + 20
    while "was stopped" not in (page := browser.get(f"/run/0/diff{stop}")).text:
        assert time.monotonic() < deadline, page.text
    assert "mean" in until_done(browser, "/run/0/tensor?step=-&name=model.small").text


@pytest.mark.parametrize("began", [4e9, 2.5e11])
def test_a_report_of_the_future(root: Path, began: float) -> None:
    attempt = api.open_checkpoint(root, step=400).manifest.attempt
    (stored,) = (root / "step-000000000400" / "reports").glob(f"save-{attempt}*")
    stored.unlink()
    store = holdfast._face.wiring.store_at(root, holdfast.Settings())
    put_reports(store, "step-000000000400/", reports_of(400, attempt, began))
    browser = Browser(root)
    assert [each["rule"] for each in browser.json("/")["alerts"]] == ["slow_rank"]
    page = browser.get("/run/0/step?step=400").text
    assert ("2096-10-02" if began == 4e9 else "5138-11-16") in page
    browser.json("/run/0/trace?step=400")
