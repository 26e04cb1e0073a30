"""A training on two ranks whose second store waits: killed amid a save, resumed, taken back; seen all the while."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.page.browsing import Browser
from tests.page.training import SLOW_RANK, WAIT_SECONDS
from tests.support.gloo_worlds import Case, Launch, run_world

pytestmark = pytest.mark.long


def test_the_page_is_right_while_a_run_trains_and_after(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    events = [str(tmp_path / f"events-{rank}.jsonl") for rank in range(2)]
    with Launch(2, [Case("tests.page.training:hangs", {"root": str(root)})], tmp_path / "first") as launch:
        launch.wait_for("hanging")
        browser = Browser(root, events=events)
        deadline = time.monotonic() + 30
        while not (found := browser.json("/")["under_way"]) or found[0]["ranks"] != [SLOW_RANK]:
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        (each,) = found
        assert (each["verb"], each["step"], each["phase"], each["world_size"]) == ("save", 600, "write", 2)
        assert each["told_by"] == "events and folders" and each["hosts"], "the hosts are known from ended saves"
        assert f"waits for rank {SLOW_RANK} of 2" in browser.get("/").text
        (bare,) = Browser(root).json("/")["under_way"]
        assert (bare["ranks"], bare["told_by"], bare["since_unix_seconds"]) == ([SLOW_RANK], "lease and folders", None)
        alerts = browser.json("/")["alerts"]
        assert [(each["rule"], each["rank"]) for each in alerts] == [("slow_rank", SLOW_RANK)], "nothing fails yet"
    after = {each["rule"]: each for each in browser.json("/")["alerts"]}
    assert (after["failing"]["step"], after["slow_rank"]["rank"], len(after)) == (600, SLOW_RANK, 2)
    assert browser.json("/")["under_way"] == [] and browser.json("/")["writer"]["state"] == "gone"

    run_world(2, [Case("tests.page.training:goes_back", {"root": str(root)})], tmp_path / "second").values("goes_back")
    document = browser.json("/")
    assert [each["rule"] for each in document["alerts"]] == ["slow_rank"], "a commit ends the failure"
    states = {each["name"].partition("@")[0]: each["status"] for each in document["steps"]}
    assert states == {
        **{str(step): "committed" for step in (100, 200, 300, 400, 500, 550)}, "600": "superseded", "700": "superseded"
    }  # fmt: skip
    first, second = browser.get("/").text.split("Lineage")[1].split("timeline 2")
    assert first.count("superseded") == 2 and "starts from step 500" in second and "550" in second
    step = browser.json("/run/0/step?step=550")
    slow, fast = (step["work"]["ranks"][rank] for rank in (SLOW_RANK, 1 - SLOW_RANK))
    assert slow["phases"]["write"] > WAIT_SECONDS > fast["phases"]["write"] and fast["phases"]["wait"] > 0.5
    assert step["ranks"]["slowest"] == SLOW_RANK and set(step["timelines"]) == {"0", "1"}
