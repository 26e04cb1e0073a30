"""The record of `make campaign-stores` and its like: each campaign goes on where it was interrupted.

A failure is a failure.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.campaign import record as campaign
from tests.campaign.record import Block, Options, Record, options_now, write_results
from tests.campaign.secrets import forms_of, in_files
from tests.campaign.server_parts import wanted
from tests.campaign.suites import SUITES_OF, counted_in, reporting
from tests.campaign.suites import wanted as wanted_suites

OPTIONS = Options(seed=7, rounds=100, faults=10, kills=10, examples=10)
RACES = [("ceph", "races", 100)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(campaign, "FOLDER", tmp_path)
    monkeypatch.setattr(campaign, "RESULTS", tmp_path / "results.json")
    return tmp_path


def block(number: int, *, failure: str = "") -> Block:
    done = 0 if failure else 50
    counts = {"rounds": done, "held_milliseconds_max": number}
    return Block("ceph", "races", number, 1, 50, done, 1.0, "ceph 16", counts, failure)


def test_the_same_command_goes_on_and_another_one_begins_anew() -> None:
    Record(OPTIONS).add(block(0))
    assert Record(OPTIONS).has("ceph", "races", 0) and not Record(OPTIONS).has("ceph", "races", 1)
    assert not Record(replace(OPTIONS, kills=11)).blocks()


def test_without_a_seed_an_interrupted_campaign_keeps_its_own() -> None:
    given = {"ROUNDS": "100", "FAULTS": "10", "KILLS": "10", "EXAMPLES": "10"}
    assert options_now({**given, "SEED": "7"}) == OPTIONS
    Record(OPTIONS)
    assert options_now(given) == OPTIONS
    assert options_now({**given, "KILLS": "11"}).seed != OPTIONS.seed
    Record(OPTIONS).end()
    assert options_now(given).seed != OPTIONS.seed
    assert options_now({"QUICK": "1"}).rounds < options_now({}).rounds == 1000


def test_results_say_what_was_done_and_whether_it_went_well(folder: Path) -> None:
    record = Record(OPTIONS)
    record.add(block(0))
    assert not write_results(record, RACES, {"found": []}), "half of it is not there"
    record.add(block(1))
    assert write_results(record, RACES, {"found": []})
    assert not write_results(record, RACES, {"found": ["a.log"]}), "a credential was found"
    (part,) = json.loads((folder / "results.json").read_text())["parts"]
    assert part["outcome"] == "passed" and part["rounds_passed"] == part["rounds_asked"] == 100
    assert part["counts"] == {"rounds": 100, "held_milliseconds_max": 1}
    record.add(block(2, failure="two winners"))
    assert not write_results(record, [("ceph", "races", 150)], {"found": []})
    (part,) = json.loads((folder / "results.json").read_text())["parts"]
    assert part["outcome"] == "failed" and "two winners" in part["failures"][0]


def test_only_some_servers_or_parts_are_asked_for() -> None:
    assert {server for server, _, _ in wanted(OPTIONS)} == {"ministack", "ceph", "ceph-bluestore", "azurite"}
    assert wanted(replace(OPTIONS, only=("ceph/races",))) == RACES
    assert {part for _, part, _ in wanted_suites(OPTIONS)} == {"property", "store suite"}


def test_a_credential_is_found_in_whichever_form(tmp_path: Path) -> None:
    secret = "canary/secret+of=this test"
    for number, form in enumerate(forms_of([secret])):
        (tmp_path / f"{number}.log").write_bytes(b"x" * (1 << 20) + form)
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "keyring").write_text(secret)
    (tmp_path / "clean.log").write_text("nothing")
    sought = in_files(tmp_path, [secret], besides=[tmp_path / "server"])
    assert len(sought.found) == len(forms_of([secret])) >= 4
    assert not any("clean" in name or "server" in name for name in sought.found)


def test_the_suites_of_every_campaign_are_there_and_take_their_numbers() -> None:
    for suite in (suite for suites in SUITES_OF.values() for suite in suites.values()):
        texts = [(campaign.ROOT / file.partition("::")[0]).read_text() for file in suite.files]
        assert not suite.rounds_variable or all(suite.rounds_variable in text for text in texts)
        assert suite.block_rounds > 0 and suite.rounds(OPTIONS) > 0


def test_the_counts_of_tests_are_sums_of_their_properties(tmp_path: Path) -> None:
    test = tmp_path / "test_counting.py"
    test.write_text(
        "import pytest\n"
        "from hypothesis import given, strategies\n"
        "@pytest.mark.parametrize('count', [2, 3])\n"
        "def test_counting(count, record_property):\n"
        "    record_property('kills', count)\n"
        "    record_property('blocked_milliseconds_max', count)\n"
        "@given(strategies.booleans())\n"
        "def test_with_statistics(drawn): pass\n"
    )
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", *reporting(report), str(test)]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert counted_in(report) == {"kills": 5, "blocked_milliseconds_max": 3}
    assert counted_in(tmp_path / "absent.xml") == {}
