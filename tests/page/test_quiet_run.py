"""The training of `make demo`, undisturbed: no alert fires while the ranks train, nor after."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from demo.ranks import Ranks
from holdfast import api
from tests.page.prepared_run import REPOSITORY
from tests.unit.cli.running import holdfast

SAVES = 12
"""More than the saves of a window and as many before them."""

pytestmark = pytest.mark.long


def test_no_alert_fires_on_an_undisturbed_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    root, asked = tmp_path / "run", set[int]()
    root.mkdir()
    arguments = ["--journal", str(tmp_path / "journal.jsonl"), "--seed", "1", "--until", str(SAVES)]
    arguments += ["--root", str(root), "--save-every", "1"]
    with Ranks("quiet", logs=tmp_path / "logs", count=2, arguments=arguments) as ranks:
        while ranks.running():
            if (root / "holdfast.json").exists():
                require_quiet(root)
                asked.add(len(api.list_steps(root).steps))
            time.sleep(0.5)
        ranks.wait()
    assert len(asked & {*range(1, SAVES)}) >= 3, f"the run was seen while it trained, after so many saves: {asked}"
    run = api.list_steps(root)
    assert [each.status for each in run.steps] == ["committed"] * SAVES
    (work,) = api.works_of([report for _, report in api.reports(root, SAVES) if not isinstance(report, Exception)])
    assert len(work.ranks) == 2, "the rules had reports of both ranks"
    require_quiet(root)


def require_quiet(root: Path) -> None:
    outcome = holdfast("alerts", root, "--json")
    assert (outcome.out, outcome.status) == ("[]\n", 0)
